"""What is alive of the package in this process: objects of its compiled classes, and blocks of C memory if those count.

Owns nothing.  Invariant: counting changes nothing but the permanent generation of the collector, which it empties.
"""

import ctypes
import functools
import gc
import importlib
import sys
from collections import Counter
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["alive", "block_counts", "forget", "import_extensions", "leaked"]

TESTS = Path(__file__).resolve().parents[1]
OURS = (TESTS, TESTS.parent / "bench")
"""Folders whose modules hold nothing that is needed after the last test."""
BLOCKS = "blocks of C memory"


def block_counts() -> dict[str, tuple[int, int]]:
    """{module: (blocks taken, blocks freed)} of the compiled modules that are loaded; {} in an optimised build."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name.startswith("ggml_sched.") and file.endswith(tuple(EXTENSION_SUFFIXES)):
            library = ctypes.CDLL(file)
            try:
                found[name] = tuple(ctypes.c_int64.in_dll(library, f"gs_blocks_{what}").value
                                    for what in ("taken", "freed"))
            except ValueError:      # no such symbol: an optimised build
                return {}
    return found


def import_extensions() -> None:
    """Import every compiled module: what a module keeps for good is then alive before the first test.

    Not the hook of llama.cpp: to import it changes what ggml does in this process, and its tests have processes of
    their own.
    """
    import ggml_sched

    home = Path(ggml_sched.__file__).parent
    for file in home.rglob(f"*{EXTENSION_SUFFIXES[0]}"):
        if file.parent != home / "llama_cpp":
            importlib.import_module(".".join((*file.relative_to(home.parent).parent.parts, file.name.split(".")[0])))


def alive() -> Counter[str]:
    """How many objects of each compiled class are alive, subclasses included, and how many blocks.  Not those that are
    globals of the package's modules: a module that a test imports first keeps them for good."""
    gc.unfreeze()
    gc.collect()
    kept = {id(value) for name, module in list(sys.modules.items()) if name.startswith("ggml_sched.")
            for value in vars(module).values()}
    found = Counter(kind for value in gc.get_objects()
                    if id(value) not in kept and (kind := compiled_class(type(value))))
    found[BLOCKS] = sum(taken - freed for taken, freed in block_counts().values())
    return found


@functools.cache
def compiled_class(kind: type) -> str | None:
    """The full name of the class of a compiled module that a class is, or is made of."""
    for base in kind.__mro__:
        name = base.__module__ if isinstance(base.__module__, str) else ""
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if name.startswith("ggml_sched.") and file.endswith(tuple(EXTENSION_SUFFIXES)):
            return f"{name}.{base.__qualname__}"
    return None


def leaked(before: Counter[str], after: Counter[str]) -> list[str]:
    """A line for each kind of which more are alive than before."""
    return [f"{after[kind] - before[kind]} {kind}" for kind in sorted(after) if after[kind] > before[kind]]


def forget(items: list) -> None:
    """Drop what tests that have run still hold: arguments, tracebacks, cached results, globals of their modules."""
    for item in items:
        for name in ("funcargs", "_request"):
            if hasattr(item, name):
                setattr(item, name, {} if name == "funcargs" else None)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    from ggml_sched.placement.devices import Device

    gc.unfreeze()
    for value in gc.get_objects():
        if issubclass(type(value), functools._lru_cache_wrapper):
            value.cache_clear()
        elif issubclass(type(value), BaseException):        # a parameter of a test, for one
            value.__traceback__ = None
        elif issubclass(type(value), Device):               # likewise; it keeps the dry backend that it made
            vars(value).pop("_dry", None)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        is_ours = file is not None and any(map(Path(file).is_relative_to, OURS))
        if is_ours and Path(file).name not in ("conftest.py", "alive.py"):
            vars(module).clear()
