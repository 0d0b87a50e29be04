"""Well-known devices, by name: memory, bandwidth and operations as published, from `known_devices.json`.

Operations a second are the peak of dense products of FP16 with sums in FP32, on tensor or matrix cores where the
device has them; FP32 for Apple's chips and for processors.  Each entry names the page of its figures, or the formula
and the page of what it was computed from.

Names are read without spaces, punctuation, capitals and the maker's name: "4090", "RTX 4090" and "NVIDIA GeForce
RTX 4090" are one device.  A size in a name, "3060 12GB", has to be that of the device; for a device with the system's
memory, which comes in several sizes, it may also be a smaller one.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ggml_sched.placement.devices import Device

__all__ = ["Known", "known_device", "known_devices"]

_MAKERS = re.compile(r"^(?:nvidia|geforce|amd|radeon|instinct|apple|tesla|quadro)+")
_SIZE = re.compile(r"(?:^| )(\d{1,4}) ?g(?:i?b)?(?= |$)")
"""Finds a size, such as "12gb", in a name that has only small letters, digits and single spaces."""
_TIMES = re.compile(r"(\d\d?)\s*[x*]\s*(.+)|(.+?)\s*[x*]\s*(\d\d?)")
"""Matches a device given several times in one name, such as "2x3090" or "3090 x2"."""


class Known(NamedTuple):
    """One well-known device: peaks, as published."""

    name: str
    also: tuple[str, ...]
    """Other names."""
    memory: int
    """Bytes of the usual size."""
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Operations a second: dense FP16 with sums in FP32, or FP32 where the module's first lines say so."""
    host: bool
    launch: float | None
    split: float | None
    reserve: int
    """Bytes that a driver takes; 0 where `reserve_share` counts instead."""
    reserve_share: float
    """The part of the memory that the system keeps, 0 to 1."""
    source: str
    """The address of the page of these figures, or "computed from", the formula, and the page of its figures."""

    def device(self, name: str | None = None, memory: int | None = None) -> Device:
        """This device under `name`, with `memory` bytes where that is not the usual size."""
        size = self.memory if memory is None else memory
        return Device(self.name if name is None else name, size, self.bandwidth, self.flops, self.host, self.launch,
                      self.split, reserve=min(size, self.reserve + int(size * self.reserve_share)))


@cache
def known_devices() -> tuple[Known, ...]:
    """All well-known devices, in the order of the file."""
    text = files("ggml_sched.placement").joinpath("known_devices.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return tuple(_known(row, data["reserve_mib"]) for row in data["devices"])


def _known(row: dict[str, Any], reserve_mib: int) -> Known:
    """The device of one entry of the file; `reserve_mib`: MiB that a driver takes."""
    def seconds(field: str) -> float | None:
        return row[field] / 1e6 if field in row else None

    share = row.get("reserve_share", 0.0)
    return Known(row["name"], tuple(row["also"]), int(row["memory_gib"] * 2**30), row["bandwidth_gbs"] * 1e9,
                 row["tflops"] * 1e12, row.get("host", False), seconds("launch_us"), seconds("split_us"),
                 0 if share else reserve_mib << 20, share, row["source"])


@cache
def _by_name() -> dict[str, Known]:
    return {_short(name): known for known in known_devices() for name in (known.name, *known.also)}


def _short(name: str) -> str:
    """A name as names are compared: small letters and digits, without the maker."""
    return _MAKERS.sub("", re.sub(r"[^a-z0-9+]", "", name.lower()))


def known_device(name: str) -> Known:
    """The device of this name; ValueError, with names like it, if none has it."""
    names = _by_name()
    found = names.get(_short(name))
    if found is not None:
        return found
    base, gib = _parted(name)
    found = names.get(_short(base))
    if gib:
        sized = names.get(_short(f"{base}{gib}gb"))
        if sized is not None:
            return sized
        if found is not None and (found.memory == gib << 30 or found.reserve_share and 0 < gib << 30 < found.memory):
            return found._replace(memory=gib << 30)
    raise ValueError(f"no well-known device is called {name!r}{_hint(name, base, gib, found)}; give "
                     "NAME:MEMORY:BANDWIDTH:FLOPS, such as GPU0:24GiB:1000GB/s:80TF")


def _parted(name: str) -> tuple[str, int]:
    """A name without the size in it, and that size in GiB; 0: it has none."""
    plain = re.sub(r"[^a-z0-9+]+", " ", name.lower())
    size = _SIZE.search(plain)
    return (plain, 0) if size is None else (plain[: size.start()] + plain[size.end() :], int(size[1]))


def _hint(name: str, base: str, gib: int, found: Known | None) -> str:
    """The part of an error that says what to give in place of a name that no device has; `base`, `gib`: the name's two
    parts (see `_parted`); `found`: the device of that base, if any, which has another size."""
    names = _by_name()
    if found is not None:
        return (f": {found.name} has {found.memory >> 30} GiB here, and {_short(base)}:{gib}GiB would be its speeds "
                f"with {gib}")
    times = _TIMES.fullmatch(name.strip().lower())
    if times is not None and (one := names.get(_short(times[2] or times[3]))) is not None:
        return f": give {one.name} {times[1] or times[4]} times, as devices of their own"
    like = difflib.get_close_matches(_short(base), names, 4, 0.5)
    return f"; like it are {', '.join(dict.fromkeys(names[key].name for key in like))}" if like else ""
