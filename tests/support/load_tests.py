"""Tests of another file, for files that run them with another device, or with a fault in it."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_tests(path: str) -> ModuleType:
    """A new module from tests/<path>.py, whose globals may be replaced."""
    file = Path(__file__).parents[1] / f"{path}.py"
    spec = importlib.util.spec_from_file_location(f"tests_of_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
