"""Devices for llama.cpp that this machine does not have: they have a size and buffers, and compute nothing.

They are ggml's structs, made by ctypes as versions 0.15 and 0.25 of ggml lay them out, in the process of a dry run.  A
device supports the ops that the CPU supports, and reads its own buffers alone.  With `pipeline` it claims to compute
asynchronously and to have events, as CUDA's devices do: llama.cpp then overlaps the parts of a batch on several
devices, which takes more compute memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Imitated", "imitate"]

P, SIZE, INT, BOOL = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_bool
GPU = 1
SUPPORTS_OP = 9
"""The number of a device's function supports_op, among the pointers at the start of its struct."""


def _slots(*names: str) -> list[tuple[str, Any]]:
    return [(name, P) for name in names]


class _Type(ctypes.Structure):
    _fields_ = _slots("get_name", "alloc_buffer", "get_alignment", "get_max_size", "get_alloc_size", "is_host",
                      "device", "context")


class _Backend(ctypes.Structure):
    _fields_ = _slots("guid", "get_name", "free", "set_async", "get_async", "set_2d", "get_2d", "copy_async",
                      "synchronize", "plan_create", "plan_free", "plan_update", "plan_compute", "graph_compute",
                      "event_record", "event_wait", "graph_optimize", "device", "context")


class _Device(ctypes.Structure):
    _fields_ = _slots("get_name", "get_description", "get_memory", "get_type", "get_props", "init_backend",
                      "get_buffer_type", "host_buffer_type", "from_host_pointer", "supports_op", "supports_buffer_type",
                      "offload_op", "event_new", "event_free", "event_synchronize", "registry", "context")


class _Registry(ctypes.Structure):
    _fields_ = [("version", INT), *_slots("get_name", "count", "get", "find", "context")]


class _Event(ctypes.Structure):
    _fields_ = _slots("device", "context")


class _Properties(ctypes.Structure):
    _fields_ = [("name", P), ("description", P), ("free", SIZE), ("total", SIZE), ("kind", INT), ("id", P),
                ("is_async", BOOL), ("host_buffer", BOOL), ("from_host_pointer", BOOL), ("events", BOOL),
                ("mmap", BOOL)]


class Imitated:
    """One device, with a name, its bytes of memory, and an alignment of tensors.  `handle` and `buffer_type` are the
    addresses of its structs of a device and of a buffer type, which exist as long as this object."""

    def __init__(self, base: ctypes.CDLL, cpu: int, registry: int, name: str, memory: int, alignment: int,
                 pipeline: bool) -> None:
        self._base, self._memory, self._pipeline = base, memory, pipeline
        self.name = name
        self._label = ctypes.create_string_buffer(name.encode())
        self._guid = ctypes.create_string_buffer(b"ggml-sched dry\0\0", 16)
        self._kept: list[object] = []
        label = ctypes.addressof(self._label)
        self._device, self._type = _Device(), _Type()
        self.handle: int = ctypes.addressof(self._device)
        self.buffer_type: int = ctypes.addressof(self._type)
        # The CPU's own function; one in Python would be slow, because schedulers make some ten queries for each node.
        supports_op = (P * (SUPPORTS_OP + 1)).from_address(cpu)[SUPPORTS_OP]
        get_label = self._slot(P, lambda of: label, P)
        ignore = self._slot(None, lambda of, event: None, P, P)
        for field, value in {
            "get_name": get_label, "get_description": get_label,
            "get_memory": self._slot(None, self._get_memory, P, P, P), "get_type": self._slot(INT, lambda of: GPU, P),
            "get_props": self._slot(None, self._get_props, P, P),
            "init_backend": self._slot(P, self._init_backend, P, P),
            "get_buffer_type": self._slot(P, lambda of: self.buffer_type, P), "supports_op": supports_op,
            "supports_buffer_type": self._slot(BOOL, lambda of, kind: kind == self.buffer_type, P, P),
            "event_new": self._slot(P, self._new_event, P), "event_free": ignore, "event_synchronize": ignore,
            "registry": registry,
        }.items():
            setattr(self._device, field, value)
        self._type.get_name = get_label
        self._type.alloc_buffer = self._slot(P, lambda kind, size: None, P, SIZE)
        self._type.get_alignment = self._slot(SIZE, lambda kind: alignment, P)
        self._type.device = self.handle

    def _slot(self, result: Any, function: Callable[..., object], *arguments: Any) -> int | None:
        made = ctypes.CFUNCTYPE(result, *arguments)(function)
        self._kept.append(made)
        return ctypes.cast(made, P).value

    def _get_memory(self, of: int, free: int, total: int) -> None:
        SIZE.from_address(free).value = SIZE.from_address(total).value = self._memory

    def _get_props(self, of: int, props: int) -> None:
        found = _Properties.from_address(props)
        found.name = found.description = ctypes.addressof(self._label)
        found.free = found.total = self._memory
        found.kind = GPU
        found.is_async = found.events = self._pipeline
        found.mmap = True

    def _init_backend(self, of: int, parameters: int) -> int:
        backend = _Backend(guid=ctypes.addressof(self._guid), get_name=self._device.get_name, device=self.handle,
                           free=self._slot(None, lambda which: None, P),
                           synchronize=self._slot(None, lambda which: None, P),
                           event_record=self._slot(None, lambda which, event: None, P, P),
                           event_wait=self._slot(None, lambda which, event: None, P, P))
        self._kept.append(backend)
        return ctypes.addressof(backend)

    def _new_event(self, of: int) -> int:
        event = _Event(device=self.handle)
        self._kept.append(event)
        return ctypes.addressof(event)


def imitate(base: ctypes.CDLL, cpu: int, devices: Sequence[tuple[str, int, int]], pipeline: bool) -> list[Imitated]:
    """Make a device of each (name, bytes, alignment).  `base` is ggml's base library, `cpu` the address of its CPU
    device."""
    made: list[Imitated] = []
    registry, kept = _Registry(version=2), []

    def slot(result: Any, function: Callable[..., object], *arguments: Any) -> int | None:
        kept.append(ctypes.CFUNCTYPE(result, *arguments)(function))
        return ctypes.cast(kept[-1], P).value

    name = ctypes.create_string_buffer(b"imitated")
    registry.get_name = slot(P, lambda of: ctypes.addressof(name), P)
    registry.count = slot(SIZE, lambda of: len(made), P)
    registry.get = slot(P, lambda of, index: made[index].handle, P, SIZE)
    registry.find = slot(P, lambda of, wanted: None, P, P)
    made += [Imitated(base, cpu, ctypes.addressof(registry), *described, pipeline) for described in devices]
    for device in made:
        device._kept += [registry, kept, name]
    return made
