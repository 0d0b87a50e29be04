"""What `fit` raises where no placement keeps the budgets: the missing bytes, and a change that would suffice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ggml_sched.errors import OutOfMemory
from ggml_sched.placement.devices import Device
from ggml_sched.placement.trials import Trials
from ggml_sched.planning.tables import memory_text

__all__ = ["Least", "refusal"]


class Least(NamedTuple):
    """The fewest bytes with which a placement can be had."""

    on_host: int
    arenas: int
    """Bytes of the arenas of all devices."""
    has_slots: bool = False
    has_window: bool = False
    """Whether slots for experts, and windows of weights, are among the bytes of the host."""


def refusal(models: Sequence[Trials], devices: Sequence[Device], pins: Sequence[Mapping[str, int]],
            least: Least | None = None, fetches: bool = False, pinned: Sequence[int] = ()) -> OutOfMemory:
    """The error to raise.

    `least`: what a placement needs that keeps all budgets but that of the host; None if no placement was found even
    with endless memory on the host.  `fetches`: whether as many weights of the host as possible are fetched in it.
    `pinned`: without `least`, for each device the bytes that suffice for what is pinned to it and for its arena; empty
    where that is not known.
    """
    on_host, arenas = (None, 0) if least is None else (least.on_host, least.arenas)
    host = len(devices) - 1
    weights = sum(size for model in models for name, size in model.sizes.items() if model.kinds[name] == "weight")
    caches = sum(size for model in models for name, size in model.sizes.items()) - weights
    wanted, there = weights + caches + arenas, sum(device.budget for device in devices)
    parts = f"the weights take {memory_text(weights)}, the caches {memory_text(caches)}"
    if on_host is not None:
        parts += f", the arenas {memory_text(arenas)}"
    kept = sum(min(device.memory, device.reserve) for device in devices)
    lines = [f"nothing fits: {parts}, together {memory_text(wanted)}; the devices have {memory_text(there)}"
             + (f" beside their reserves of {memory_text(kept)}" if kept else "")]
    for d, device in enumerate(devices):
        fixed = sum(model.bytes_on(d, name) for model, pin in zip(models, pins, strict=True)
                    for name, at in pin.items() if at == d)
        if fixed > device.budget:
            lines.append(f"what is pinned to {device.name} takes {memory_text(fixed)} of its "
                         f"{memory_text(device.budget)}")
    if fetches:
        name = devices[host].name
        slots = ["the fewest slots for experts"] if least and least.has_slots else []
        window = [f"a window of the weights that {name} would fetch"] if not least or least.has_window else []
        *first, last = ["caches", "arenas", *slots, *window]
        lines.append(f"{', '.join(first)} and {last} exceed the {memory_text(devices[host].budget)} of {name}, too")
    if on_host is None:
        short = [(device, need) for device, need in zip(devices, pinned, strict=False) if need > device.budget]
        if not short:
            return OutOfMemory("; ".join(lines), None, wanted, there)
        more = " and ".join(_more(device, _missing(device, need)) for device, need in short)
        lines.append(f"for what is pinned, and the arenas beside it, {more} would suffice")
        return OutOfMemory("; ".join(lines), short[0][0].name, short[0][1], short[0][0].budget)
    missing = _missing(devices[host], on_host)
    lines.append(f"{_more(devices[host], missing)} would suffice")
    known = [model.graphs[0].meta.get("n_ctx") for model in models]
    rows = max((n for n in known if isinstance(n, int)), default=0)
    if rows > 0 and caches > missing:
        lines.append(f"so would a context of about {rows * (caches - missing) // caches} tokens instead of {rows}")
    return OutOfMemory("; ".join(lines), devices[host].name, on_host, devices[host].budget)


def _missing(device: Device, need: int) -> int:
    """The bytes, at least one, that a device lacks for `need`."""
    # Not from the budget: that is 0, not negative, if the reserve is larger than the memory.
    return max(1, need + device.reserve - device.memory)


def _more(device: Device, missing: int) -> str:
    return f"{memory_text(missing)} ({missing} bytes) more on {device.name}"
