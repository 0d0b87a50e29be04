"""Finds and loads ggml's shared libraries, and queries their devices, ops and types.

Owns nothing: the system's loader loads each file once and keeps it.  Invariant: a `Library` has every function that
`_ggml` needs, its tensors have the layout declared in `abi.h` (checked by probe.py), and it prints nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggml_sched._graph import Type, op_numbers
from ggml_sched.backends.ggml._ggml import FUNCTIONS, QUIET, Api
from ggml_sched.backends.ggml.probe import OLDEST, check
from ggml_sched.errors import BackendError
from ggml_sched.threads.cached import cached_property

if TYPE_CHECKING:
    from ctypes import _CDataType as CType

__all__ = ["INSTALL", "Device", "Library", "installed", "load"]

INSTALL = "pip install 'ggml-sched[ggml]'"
PACKAGES = ("llama_cpp", "ggml")
"""Packages that bring libraries in a folder lib/, best first: llama-cpp-python's is newer, and its kernels for prompts
in f32, f16 and q8_0 are twice as fast (it is built with GGML_LLAMAFILE)."""

NEEDED = FUNCTIONS[: FUNCTIONS.index("graph_plan")]
OF_THE_CPU = FUNCTIONS[len(NEEDED) :]
"""Functions of libggml-cpu.  Where it has all of them, this package makes the thread pool and the work memory that the
kernels use; otherwise ggml's CPU backend makes them itself."""
LAST_OP, LAST_UNARY, LAST_GLU = "GLU", "TRUNC", "GEGLU_QUICK"
"""The last name, in ggml's order, that all supported versions have in each enum: names are queried up to it, because
ggml aborts on a number beyond an enum's end."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that the library offers: `kind` is "cpu", "gpu", "igpu" or "accel", `handle` the address of ggml's
    object."""

    name: str
    description: str
    kind: str
    handle: int


@dataclass(eq=False)
class Library:
    """ggml's libraries, loaded and checked, with their log off.  `uses_openmp`: kernels run on OpenMP's threads rather
    than on a thread pool of ggml's."""

    folder: str
    version: str
    api: Api
    uses_openmp: bool
    _base: ctypes.CDLL = field(repr=False)
    _all: ctypes.CDLL = field(repr=False)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The library's devices, in its order."""
        count, get = _call(self._all, "ggml_backend_dev_count", ctypes.c_size_t), _pointer(
            self._all, "ggml_backend_dev_get", ctypes.c_size_t)
        if count() == 0:
            # ggml was built with each device in a library of its own: load those.
            _call(self._all, "ggml_backend_load_all_from_path", None, ctypes.c_char_p)(os.fsencode(self.folder))
        name, text, kind = (_call(self._base, f"ggml_backend_dev_{what}", kind, ctypes.c_void_p) for what, kind in (
            ("name", ctypes.c_char_p), ("description", ctypes.c_char_p), ("type", ctypes.c_int)))
        kinds = ("cpu", "gpu", "igpu", "accel")
        found = []
        for i in range(count()):
            handle = get(i)
            found.append(Device(name(handle).decode(), text(handle).decode(errors="replace"),
                                kinds[kind(handle)] if 0 <= kind(handle) < len(kinds) else "other", handle))
        return tuple(found)

    def buffer_type(self, device: Device) -> int:
        """ggml's type (ggml_backend_buffer_type_t) of the buffers that a device computes in."""
        found: int = _pointer(self._base, "ggml_backend_dev_buffer_type", ctypes.c_void_p)(device.handle)
        return found

    def is_host(self, buft: int) -> bool:
        """Whether buffers of a type are memory that the CPU reads as it is."""
        found: bool = _call(self._base, "ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)(buft)
        return found

    def alignment(self, buft: int) -> int:
        found: int = _call(self._base, "ggml_backend_buft_get_alignment", ctypes.c_size_t, ctypes.c_void_p)(buft)
        return found

    def max_size(self, buft: int) -> int:
        found: int = _call(self._base, "ggml_backend_buft_get_max_size", ctypes.c_size_t, ctypes.c_void_p)(buft)
        return found

    def memory(self, device: Device) -> tuple[int, int]:
        """(free bytes, all bytes) of a device's memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        size = ctypes.POINTER(ctypes.c_size_t)
        _call(self._base, "ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)(
            device.handle, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def extra_buffer_types(self, device: Device) -> tuple[int, ...]:
        """The types of buffers in which ggml keeps weights repacked, in layouts that its kernels read faster."""
        registry = _pointer(self._base, "ggml_backend_dev_backend_reg", ctypes.c_void_p)(device.handle)
        get = _pointer(self._base, "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_char_p)(
            registry, b"ggml_backend_dev_get_extra_bufts")
        if not get:
            return ()
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(get)(device.handle)
        found: list[int] = []
        while listed and len(found) < 64 and listed[len(found)]:
            found.append(listed[len(found)])
        return tuple(found)


def installed() -> list[str]:
    """The folders of installed packages that have ggml's libraries, best first."""
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            folder = os.path.join(place, "lib")
            if any(_named(Path(folder), "ggml-base")):
                found.append(folder)
    return found


def load(path: str | os.PathLike[str] | None = None) -> Library:
    """The library in a folder, or in one file that has all of ggml; None: the first installed one that loads.

    BackendError if there is none, or if it does not load, is too old, or its tensors have another layout than abi.h's.
    """
    if path is not None:
        return _load(os.fspath(path))
    wrong: BackendError | None = None
    for folder in installed():
        try:
            return _load(folder)
        except BackendError as error:
            wrong = wrong or error
    raise wrong or BackendError(
        f"there is no ggml here: run `{INSTALL}`, or give the folder of its libraries as library=")


def _load(given: str) -> Library:
    folder = given if os.path.isdir(given) else os.path.dirname(given)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")     # without it ggml starts a debugger when it aborts
    cpu: ctypes.CDLL | None
    if os.path.isfile(given):
        base = cpu = everything = _open(given)
    else:
        # In this order: where libggml was loaded before libggml-cpu, kernels have computed NaN.
        base, cpu = _open_named(Path(given), "ggml-base"), _open_first(Path(given), "ggml-cpu")
        everything = _open_named(Path(given), "ggml")
    _check_same_base(given, base, cpu, everything)
    version = _call(base, "ggml_version", ctypes.c_char_p)().decode(errors="replace")
    check(base, given, version)
    _hush(base)
    missing = [name for name in NEEDED if not _address(base, name)]
    if missing:
        raise BackendError(f"ggml {version} in {given} has no ggml_{missing[0]}; {OLDEST} is the oldest supported")
    addresses = {name: _address(base, name) for name in NEEDED}
    addresses |= {name: found for name in OF_THE_CPU if cpu is not None and (found := _address(cpu, name))}
    ops, subs = _numbers(base)
    uses_openmp = cpu is not None and (hasattr(cpu, "GOMP_parallel") or hasattr(cpu, "__kmpc_fork_call"))
    return Library(folder, version, Api(addresses, ops, subs, _types(base)), uses_openmp, base, everything)


def _named(folder: Path, name: str) -> Iterator[Path]:
    for pattern in (f"lib{name}.so", f"lib{name}.dylib", f"lib{name}.so.*", f"lib{name}.*.dylib"):
        yield from sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))


def _open_named(folder: Path, name: str) -> ctypes.CDLL:
    found = _open_first(folder, name)
    if found is None:
        raise BackendError(f"there is no lib{name} in {folder}: run `{INSTALL}`, or give another library=")
    return found


def _open_first(folder: Path, name: str) -> ctypes.CDLL | None:
    """The first file of lib`name` in a folder, loaded; None if there is none.

    A file that is loaded already comes first: wheels have copies where others have links, libggml.so and libggml.so.0,
    and a process that loads one beside the other has two ggmls.
    """
    found = list(_named(folder, name))
    found = [path for path in found if _is_loaded(str(path))] or found
    return _open(str(found[0])) if found else None


def _is_loaded(path: str) -> bool:
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_LOCAL)
    except OSError:
        return False
    return True


def _open(path: str) -> ctypes.CDLL:
    """Load a file without making its symbols visible to libraries that are loaded later."""
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise BackendError(f"ggml's library {path} does not load: {error}") from error


def _check_same_base(given: str, *libraries: ctypes.CDLL | None) -> None:
    """BackendError unless all libraries use one libggml-base.  The loader finds a dependency by its file name alone: if
    another ggml was loaded before, some of the libraries can get that ggml's libggml-base."""
    found = {_address(library, "version") for library in libraries if library is not None}
    if len(found) != 1 or not found.copy().pop():
        raise BackendError(f"the libraries in {given} do not belong together, or another ggml was loaded before them")


def _address(library: ctypes.CDLL, name: str) -> int:
    """The address of ggml_NAME; 0 if the library lacks it."""
    found = getattr(library, f"ggml_{name}", None)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0


def _call(library: ctypes.CDLL, name: str, result: type[CType] | None, *arguments: type[CType]) -> Callable[..., Any]:
    """The library's function `name`, with the given types of result and arguments; BackendError if it has none."""
    found = getattr(library, name, None)
    if found is None:
        raise BackendError(f"{library._name} has no {name}: ggml {OLDEST} is the oldest that is supported")
    return ctypes.CFUNCTYPE(result, *arguments)(ctypes.cast(found, ctypes.c_void_p).value or 0)


def _pointer(library: ctypes.CDLL, name: str, *arguments: type[CType]) -> Callable[..., Any]:
    return _call(library, name, ctypes.c_void_p, *arguments)


def _hush(base: ctypes.CDLL) -> None:
    """Drop ggml's log messages, unless the process has set a log callback of its own."""
    callback, user = ctypes.c_void_p(), ctypes.c_void_p()
    pointer = ctypes.POINTER(ctypes.c_void_p)
    if _address(base, "log_get"):
        _call(base, "ggml_log_get", None, pointer, pointer)(ctypes.byref(callback), ctypes.byref(user))
        start = _address(base, "log_get")
        # ggml's default callback lies in the library itself, within 1 MiB of log_get; the process's own one far away.
        if callback.value and abs(callback.value - start) > 1 << 20:
            return
    _call(base, "ggml_log_set", None, ctypes.c_void_p, ctypes.c_void_p)(QUIET, None)


def _numbers(base: ctypes.CDLL) -> tuple[dict[str | int, int], dict[int, int]]:
    """Two dicts from this package's numbers of ops to ggml's: of the op, and of the sub-op (of UNARY and GLU)."""
    ops = _names(_call(base, "ggml_op_name", ctypes.c_char_p, ctypes.c_int), LAST_OP)
    unary = _names(_call(base, "ggml_unary_op_name", ctypes.c_char_p, ctypes.c_int), LAST_UNARY)
    glu = _names(_call(base, "ggml_glu_op_name", ctypes.c_char_p, ctypes.c_int), LAST_GLU)
    found: dict[str | int, int] = {"CUSTOM": ops["CUSTOM"]} if "CUSTOM" in ops else {}
    subs: dict[int, int] = {}
    for name, number in op_numbers().items():
        family, _, kind = name.partition(":")
        if family in ops:
            found[number] = ops[family]
        if kind and kind in (unary if family == "UNARY" else glu):
            subs[number] = (unary if family == "UNARY" else glu)[kind]
    return found, subs


def _names(name_of: Callable[[int], bytes | None], last: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for number in range(256):
        name = (name_of(number) or b"").decode(errors="replace")
        found[name] = number
        if name == last:
            return found
    raise BackendError(f"ggml names no {last}: ggml {OLDEST} is the oldest that is supported")


def _types(base: ctypes.CDLL) -> list[int]:
    """The numbers of the types to which the library gives the same name, block size and bytes as this package."""
    name = _call(base, "ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    block = _call(base, "ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    size = _call(base, "ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    return [int(kind) for kind in Type
            if (name(kind) or b"").decode(errors="replace").lower() == str(kind).lower()
            and block(kind) == kind.block_size and size(kind) == kind.type_size]
