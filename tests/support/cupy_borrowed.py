"""Runs the CPU backend's op tests with other kernels: the same formulas, shapes, views and types."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

__all__ = ["tests"]

BACKENDS = Path(__file__).parents[1] / "backends"


def tests(name: str, wanted: Callable[[str], bool], compute: Callable) -> dict:
    """The selected tests of tests/backends/<name>.py, computing through `compute`; raises if none is selected."""
    spec = importlib.util.spec_from_file_location(f"borrowed_{name}_{compute.__module__}", BACKENDS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.compute = compute
    found = {key: value for key, value in vars(module).items() if key.startswith("test_") and wanted(key)
             and "compute" in value.__code__.co_names}
    assert found, name
    return found
