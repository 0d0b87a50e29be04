"""The table of a library's functions: argument types and the Python function that a call runs."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from cuda_stub.world import NAMES, NOT_SUPPORTED, PEER_ALREADY, CudaError, World

__all__ = ["Calls", "address_of", "store"]

FAILED = 719        # what a defect of the stub itself returns


class Calls:
    """`@calls(types...)` adds a function `name(world, *args)`; it raises CudaError, or returns a status or None."""

    def __init__(self) -> None:
        self.functions: dict[str, tuple[tuple[Any, ...], Callable[..., int | None]]] = {}

    def __call__(self, *types: Any, name: str = "") -> Callable[[Callable], Callable]:
        def add(function: Callable[..., int | None]) -> Callable[..., int | None]:
            self.functions[name or function.__name__] = types, function
            return function

        return add

    def callback(self, world: World, name: str) -> Any:
        """A C function for `name`; what is not in the table is "not supported"."""
        types, function = self.functions.get(name, ((), _unsupported))

        def call(*args: Any) -> int:
            try:
                with world.lock:
                    world.counts[name] += 1
                    if planted := world.planted(name):
                        if name == "cudaStreamEndCapture":      # ends a capture in any case
                            world.stream(args[0]).capture = None
                        raise CudaError(planted, "planted")
                    if function is _unsupported:
                        raise CudaError(NOT_SUPPORTED, "not in the stub")
                    return function(world, *(0 if arg is None else arg for arg in args)) or 0
            except CudaError as error:
                if error.status != PEER_ALREADY:        # an answer, as the runtime keeps no list of a process' peers
                    world.complaints.append(f"{name}: {NAMES.get(error.status, error.status)} {error.why}".strip())
                return error.status
            except BaseException as error:      # a callback from C has no caller in Python
                world.complaints.append(f"{name}: {error!r}\n{traceback.format_exc()}")
                return FAILED

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)


def _unsupported() -> None:
    """Stands for all functions that are not in a table."""


def address_of(callback: Any) -> int:
    address = ctypes.cast(callback, c_void_p).value
    assert address is not None
    return address


def store(pointer: int, value: int, type: Any = ctypes.c_uint64) -> None:
    """Write a result through a pointer argument."""
    ctypes.cast(pointer, ctypes.POINTER(type))[0] = value
