"""The bytes that llama.cpp holds on each device now: weights, caches, compute buffers; and the bytes that are free or
unaccounted for.

The hook records every buffer that a client of ggml makes: those of draft models, projectors and adapters are included.
All sizes are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ggml_sched.llama_cpp.held import Held
from ggml_sched.llama_cpp.install import hook

__all__ = ["DeviceMemory", "Memory", "memory"]

HOST = "CPU"
WEIGHTS, COMPUTE = 1, 2
"""ggml's numbers of the usages of buffers."""


@dataclass(frozen=True)
class DeviceMemory(Held):
    """The bytes that are open on one device, and the rest of its memory."""

    free: int | None = None
    """Bytes that the device, or for the host the system, can still give; None: neither says."""
    capacity: int | None = None
    """Bytes that the device has; None: it does not say."""
    unaccounted: int | None = None
    """Bytes that are in use and in none of these buffers, at least 0.  Of a device: those of other processes, of its
    driver and of libraries.  Of the host: memory that this process has touched outside of its buffers, such as Python's
    and ggml's work memory of computes."""


@dataclass(frozen=True)
class Memory(Mapping[str, DeviceMemory]):
    """{device: bytes}: a value, picklable and comparable; `print` shows a table."""

    devices: Mapping[str, DeviceMemory]

    def __post_init__(self) -> None:
        vars(self)["devices"] = MappingProxyType(dict(self.devices))

    def __getitem__(self, name: str) -> DeviceMemory:
        return self.devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self.devices) == dict(other)

    def __hash__(self) -> int:
        return hash(tuple(self.devices.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (dict(self.devices),)

    def to_dict(self) -> dict[str, dict[str, int | None]]:
        """Plain values, for JSON."""
        return {name: asdict(held) | {"total": held.total} for name, held in self.devices.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        from ggml_sched.planning.tables import table

        head = ["device", "weights", "caches", "compute", "work", "total", "free", "unaccounted"]
        rows = [[name, held.weights, held.caches, held.compute, held.work, held.total,
                 "-" if held.free is None else held.free, "-" if held.unaccounted is None else held.unaccounted]
                for name, held in self.devices.items()]
        return table([head, *rows], underlined=True)


def memory() -> Memory:
    """The bytes of everything that llama.cpp has open in this process, by device; empty if nothing is.

    Compute buffers are counted with the bytes that are reserved, which llama.cpp logs; the host has mapped only the
    pages that computes have touched.  Any thread may call this.  HookError if nothing is installed.
    """
    library = hook()
    held: dict[str, dict[str, int]] = {}

    def add(device: str | None, kind: str, nbytes: int) -> None:
        of = held.setdefault(device or HOST, {})
        of[kind] = of.get(kind, 0) + nbytes

    for _, nbytes, _, device in library.buffers():
        add(device, "compute", nbytes)
    for _, device, nbytes, usage, mapped, first in library.open_buffers():
        add(device, kind_of(usage, first), nbytes)
        if mapped:
            add(device, "mapped", nbytes)
    devices = library.device_memory()
    return Memory({name: _of_device(name, of, devices) for name, of in sorted(held.items()) if any(of.values())})


def kind_of(usage: int, first: str) -> str:
    """The field of `Held` under which a buffer counts; `first`: the name of the first tensor of the context that it was
    made for, "" if none."""
    if usage in (WEIGHTS, COMPUTE):
        return "weights" if usage == WEIGHTS else "compute"
    if not first:
        return "work"
    # Buffers of adapters have no usage; their tensors have the names of the weights that they change.
    return "weights" if re.search(r"\.(weight|bias)\b", first) else "caches"


def _of_device(name: str, of: dict[str, int], devices: Mapping[str, tuple[int, int]]) -> DeviceMemory:
    own = Held(**of)
    if name == HOST:
        free, capacity, touched = _host()
        return DeviceMemory(**of, free=free, capacity=capacity,
                            unaccounted=None if touched is None else max(0, touched - own.total + own.mapped))
    if name not in devices:
        return DeviceMemory(**of)
    free, capacity = devices[name]
    return DeviceMemory(**of, free=free, capacity=capacity, unaccounted=max(0, capacity - free - own.total))


def _host() -> tuple[int | None, int | None, int | None]:
    """Bytes that the system can give, that it has, and that this process has touched; None where Linux does not say."""
    found = [_number("/proc/meminfo", "MemAvailable"), _number("/proc/meminfo", "MemTotal"),
             _number("/proc/self/smaps_rollup", "Anonymous")]
    return found[0], found[1], found[2]


def _number(path: str, field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
