"""Loads our library, the hook, before ggml's libraries, and checks that ggml's calls reach it.

Owns the one hook of the process: it is loaded once and stays as long as the process.  Invariant: once `install` has
returned a level other than "off", libraries of ggml that are loaded later call the hook, or `check` raises.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ggml_sched.errors import BackendError
from ggml_sched.threads.locks import ForkLock

__all__ = ["LEVELS", "HookError", "check", "clear_counters", "compare", "compute_buffers", "counters", "hook",
           "install", "installed", "last_error", "saved", "served"]

LEVELS = ("off", "alloc", "sched")
"""Levels of `install`: nothing, the graph allocator, or the graph allocator and the scheduler."""
VARIABLE = "GGML_SCHED"
CLIENTS = ("llama_cpp", "ggml")
"""Packages that load ggml's libraries."""
BASE = "libggml-base"

_lock = ForkLock()
_installed: dict[str, object] = {}
"""{"hook": the extension module, "level": its level}; empty: nothing is installed.  A module variable, because loaded
libraries belong to the process."""


class HookError(BackendError, ImportError):
    """llama.cpp cannot use our planner in this process: ggml was loaded first, or its calls do not reach the hook."""


def install(level: str | None = None) -> str:
    """Load the hook, so that a ggml that is loaded from now on uses our planner.  Returns the level that is installed.

    `level`: one of LEVELS; None: the level that is installed, else that of GGML_SCHED in the environment, else "alloc".
    If another level is installed, schedulers that are made from now on have the new one.  HookError if a library of
    ggml's was loaded before the hook, on macOS and Windows, and for "off" when something is installed; ValueError for
    an unknown level.
    """
    chosen = (os.environ.get(VARIABLE) or "alloc") if level is None else level
    if chosen not in LEVELS:
        where = f"{VARIABLE}=" if level is None else "level="
        raise ValueError(f"{where}{chosen!r} is not one of {', '.join(LEVELS)}")
    with _lock:
        there = installed()
        if chosen == there or there != "off" and level is None:
            return there
        if there != "off" and chosen == "off":
            raise HookError(f"level {there!r} is installed, and its library stays as long as the process: 'off' comes "
                            "too late")
        if there != "off":
            schedule = hook().schedule
            _installed["level"] = chosen        # no signal handler runs between these two lines
            schedule(chosen == "sched")
            return chosen
        if sys.platform in ("darwin", "win32"):
            raise HookError(f"llama.cpp on this planner needs the dynamic linker of Linux; this is {sys.platform}")
        found = loaded_bases()
        if found:
            raise HookError(f"{found[0]} is loaded already, and its calls are bound: import ggml_sched.llama_cpp "
                            "before whatever loads it (llama_cpp, ggml, a GgmlBackend)")
        flags = sys.getdlopenflags()
        try:
            sys.setdlopenflags(os.RTLD_GLOBAL | os.RTLD_NOW)
            from ggml_sched.llama_cpp import _hook
        finally:
            sys.setdlopenflags(flags)
        _hook.schedule(chosen == "sched")
        if not any(isinstance(finder, _Watch) for finder in sys.meta_path):     # an interrupted call may have left one
            sys.meta_path.insert(0, _Watch())
        _installed.update(hook=_hook, level=chosen)
    return chosen


def installed() -> str:
    """The level that is installed; "off" if none is."""
    return str(_installed.get("level", "off"))


def hook() -> ModuleType:
    """The extension module _hook of the installed library; HookError if nothing is installed."""
    found = _installed.get("hook")
    if not isinstance(found, ModuleType):
        raise HookError("nothing is installed: call ggml_sched.llama_cpp.install(level=...) before llama_cpp is "
                        "imported")
    return found


def counters() -> dict[str, tuple[int, int]]:
    """{function of ggml's: (calls, nanoseconds inside them)} of the whole process; empty if nothing is installed."""
    return hook().counters() if installed() != "off" else {}


def clear_counters() -> None:
    """Set all counts to zero: those of `counters` and those of `served`."""
    if installed() != "off":
        hook().clear_counters()


def served() -> dict[str, int]:
    """{what: count}: allocators made, and graphs by how they got a plan; docs/llama-cpp.md explains each key.

    Empty if nothing is installed.
    """
    return hook().served() if installed() != "off" else {}


def compute_buffers() -> dict[str, int]:
    """{buffer type: bytes} of the compute buffers that hold llama.cpp's graphs now, of all contexts that are open.

    These are the reserved bytes, which llama.cpp logs; the host has mapped only the pages that computes have touched.
    HookError if nothing is installed.
    """
    held: Counter[str] = Counter()
    for name, nbytes, *_ in hook().buffers():
        held[name] += nbytes
    return {name: nbytes for name, nbytes in held.items() if nbytes}


def compare(on: bool = True) -> None:
    """Let ggml's own allocator measure, too, what llama.cpp reserves from now on: for `saved`.

    It allocates nothing, and takes the time that reserving takes without the hook.  HookError if nothing is installed.
    """
    hook().compare(on)


def saved() -> dict[str, int]:
    """{buffer type: bytes} by which the compute buffers of `compute_buffers` are smaller than ggml's own would be.

    Counts the open contexts that were made after `compare()`; at level "sched" only those with one backend, because
    with several ggml's scheduler would make other splits.  HookError if there are no such contexts.
    """
    compared = [(name, stock - nbytes) for name, nbytes, stock, _ in hook().buffers() if stock is not None]
    if not compared:
        raise HookError("no open context was compared with ggml's own allocator: call compare() before the context is "
                        "made; with several backends only level 'alloc' is compared")
    total: Counter[str] = Counter()
    for name, nbytes in compared:
        total[name] += nbytes
    return dict(total)


def last_error() -> str | None:
    """The reason of the last failed call of a function of ggml's; None if none failed, or nothing is installed."""
    return hook().last_error() if installed() != "off" else None


def loaded_bases() -> list[str]:
    """The files of ggml's base library that the process has loaded."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if BASE in line}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(BASE))


def check() -> None:
    """Raise HookError unless the calls of every ggml that is loaded reach the hook.

    Makes a scheduler of the CPU with each library: the scheduler makes an allocator, which the hook counts if the call
    reaches the hook.  A library without a loaded CPU backend, or whose file was replaced since, is not checked.
    HookError also if a library's structs are not as expected, so that it keeps its own allocator; and if no ggml is
    loaded, because nothing can be checked then.
    """
    library = hook()
    bases = loaded_bases()
    if not bases:
        raise HookError("no ggml is loaded yet, so nothing was checked: import llama_cpp (or what loads ggml) first")
    for path in bases:
        before = library.served()["allocators"]
        if _make_scheduler(path) and library.served()["allocators"] == before:
            raise HookError(f"{path} does not call us: it was linked so that its calls stay inside (-Bsymbolic, hidden "
                            "symbols, or static), or it was loaded before us")
    why = library.unsupported()
    if why is not None:
        raise HookError(f"a loaded ggml has another layout than supported ({why}): its own allocator is used")


def _make_scheduler(base: str) -> bool:
    """Make a scheduler with the library in file `base` and free it; False: the library has no CPU backend to use."""
    try:
        # RTLD_NOLOAD: only a library that is loaded already.  OSError: its file was replaced since.
        found = ctypes.CDLL(base, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
        cpu = _cpu_backend(os.path.dirname(base))
    except OSError:
        return False
    if cpu is None:
        return False
    backend, free_backend = cpu
    try:
        new, free = found.ggml_backend_sched_new, found.ggml_backend_sched_free
        new.restype, free.restype = ctypes.c_void_p, None
        new.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_bool,
                        ctypes.c_bool]
        free.argtypes = [ctypes.c_void_p]
        # For graphs of one node: a scheduler for 16 takes more than malloc's threshold for mappings, which rises when
        # they are freed; then llama.cpp's own larger arrays take pages of the heap instead of untouched mappings.
        scheduler = new(ctypes.byref(ctypes.c_void_p(backend)), None, 1, 1, False, False)
        free(scheduler)
    except AttributeError:
        return False
    finally:
        free_backend(backend)
    return True


def _cpu_backend(folder: str) -> tuple[int, Callable[[int], None]] | None:
    """A new CPU backend of a loaded library in this folder, and the function that frees it; None: none is loaded."""
    for name in sorted(os.listdir(folder)):
        if not name.startswith("libggml-cpu"):
            continue
        try:
            library = ctypes.CDLL(os.path.join(folder, name), mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
            new, free = library.ggml_backend_cpu_init, library.ggml_backend_free
        except (OSError, AttributeError):
            continue
        new.restype, free.restype, free.argtypes = ctypes.c_void_p, None, [ctypes.c_void_p]
        backend = new()
        if backend:
            return backend, free
    return None


class _Watch:
    """An import finder that lets `check` run when a client has been imported: its error becomes a warning."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in CLIENTS or installed() == "off":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            # This changes no other import: find_spec has just made this loader.
            spec.loader.exec_module = _checked(spec.loader.exec_module)  # type: ignore[assignment, method-assign]
        return spec


def _checked(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """A loader's `exec_module` that executes a module, then calls `check`, and warns if that raises HookError."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            if loaded_bases():
                check()
        except HookError as error:
            warnings.warn(f"ggml_sched.llama_cpp: {error}", RuntimeWarning, stacklevel=2)

    return exec_module
