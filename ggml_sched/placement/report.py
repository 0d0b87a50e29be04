"""Answers of `fit` as text: does it fit, where everything is, where the time goes, what more memory would bring.

Owns the words and the units; all figures are the answer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ggml_sched.placement.answer import Fetching, Fit
from ggml_sched.placement.devices import DEFAULT_LINK
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import memory_text, seconds, table

__all__ = ["memory_table", "more_memory", "report", "verdict"]

_NUMBER = re.compile(r"\d+")
_MORE = (("GB", 10**9), ("MB", 10**6), ("KB", 10**3))


def report(fit: Fit) -> str:
    """The answer as text: the verdict, three tables (bytes of devices, kinds of tensors, seconds), and notes."""
    return "\n\n".join([verdict(fit), memory_table(fit), kinds_table(fit), time_table(fit), notes(fit)])


def verdict(fit: Fit) -> str:
    """Two lines: whether the model fits the devices other than the host, and how long a compute takes."""
    *beside, host = fit.memory
    there = [use for use in beside if use.weights or use.cache]
    names = " and ".join(use.device.name for use in there)
    sizes = " and ".join(memory_text(use.weights + use.cache) for use in there)
    on_host = host.weights + host.cache
    pinned = sum(entry.nbytes for entry in fit.placed if entry.pinned and fit.devices[entry.device].host)
    if fit.fetchings:
        held = " and ".join(f"{use.device.name} ({memory_text(use.weights + use.cache + use.slots)})"
                            for use in fit.memory if use.weights or use.cache or use.slots)
        reads = ", ".join(f"{which} {' and '.join(_reads(part, fetching))}" for which, part, fetching in _parts(fit))
        first = f"not without a disk: {reads}; all else fits {held}"
    elif not beside:
        first = f"yes: all of it fits {host.device.name} ({memory_text(on_host)})"
    elif not there:
        first = f"no: all of it is on {host.device.name} ({memory_text(on_host)})"
    elif not on_host:
        first = f"yes: all of it fits {names} ({sizes})"
    elif pinned == on_host:
        first = f"yes: all but the {memory_text(on_host)} pinned to {host.device.name} fits {names} ({sizes})"
    elif on_host <= max(use.left for use in there) and not pinned:
        first = (f"yes: it fits {names} ({sizes}), and {memory_text(on_host)} cost as little on {host.device.name}")
    else:
        part = sum(use.weights + use.cache for use in there) / _total(fit)
        rest = f"{memory_text(on_host)} stay on {host.device.name}"
        first = f"in part: {part:.0%} fits {names} ({sizes}), and {rest}"
    return f"{first}\n{seconds(fit.seconds)} for {_work(fit)}, {fit.full_gap:.2%} above the bound"


def _parts(fit: Fit) -> list[tuple[str, Fit, Fetching]]:
    """("each evaluation", the answer, what it fetches) for each model that fetches weights."""
    if len(fit.fetchings) == 1:
        return [("each evaluation", fit, fit.fetchings[0])]
    return [(f"each evaluation of model {k}", fit.model(k), found) for k, found in enumerate(fit.fetchings)]


def _reads(fit: Fit, fetching: Fetching) -> list[str]:
    """What an evaluation gets from the disk."""
    found = [f"fetches {memory_text(fetching.nbytes)} of the weights"] if fetching.names else []
    if fetching.slots is not None:
        found.append(f"reads about {memory_text(round(fetching.slots.nbytes[_main(fit)]))} of experts")
    return found or ([f"reads rows of {', '.join(fetching.rows)}"] if fetching.rows else ["fetches nothing"])


def _main(fit: Fit) -> int:
    """The index of the graph with the largest weight in the goal."""
    return fit.goal.index(max(fit.goal))


def _work(fit: Fit) -> str:
    """What the goal counts: "256 times 1 token and 512 tokens"."""
    parts = []
    for plan, weight in zip(fit.plans, fit.goal, strict=True):
        if weight:
            parts.append(_name(plan) if weight == 1 else f"{weight:g} times {_name(plan)}")
    return " and ".join(parts)


def _name(plan: Plan) -> str:
    n = plan.graph.meta.get("n_tokens")
    return f"{n} token{'s' if n != 1 else ''}" if isinstance(n, int) else f"{len(plan.graph)} nodes"


def memory_table(fit: Fit) -> str:
    """A row for each device: weights, slots for experts, if there are any, cache, arena, reserve, what is left, and
    weights in a file, if there are any."""
    has_slots = any(fetching.slots is not None for fetching in fit.fetchings)
    rows: list[Sequence[object]] = [("device", "memory", "weights", *(["slots"] if has_slots else []), "cache", "arena",
                                     "reserve", "left", *(["in the file"] if fit.fetchings else []))]
    for use in fit.memory:
        rows.append((use.device.name, *map(memory_text, (
            use.device.memory, use.weights, *([use.slots] if has_slots else []), use.cache, use.arena, use.reserve,
            use.left, *([use.fetched] if fit.fetchings else [])))))
    return table(rows, underlined=True)


def kinds_table(fit: Fit) -> str:
    """A row for each kind of resident, which is all those whose names differ in numbers alone: their bytes, and how
    many they are, on each device."""
    kinds: dict[str, list[list[int]]] = {}
    places = [device.name for device in fit.devices] + (["in the file"] if fit.fetchings else [])
    for entry in fit.placed:
        counts = kinds.setdefault(_NUMBER.sub("*", entry.name), [[0, 0] for _ in places])
        at = len(fit.devices) if entry.fetched else entry.device
        counts[at][0] += 1
        counts[at][1] += entry.nbytes
    small = [kind for kind, counts in kinds.items() if sum(n for _, n in counts) < _total(fit) / 1000]
    if len(small) > 1:
        rest = [[0, 0] for _ in places]
        for kind in small:
            for d, (n, nbytes) in enumerate(kinds.pop(kind)):
                rest[d][0] += n
                rest[d][1] += nbytes
        kinds["smaller ones"] = rest
    rows: list[Sequence[object]] = [("tensors", *places)]
    for kind, counts in kinds.items():
        rows.append((kind, *(f"{memory_text(nbytes)} ({n})" if n else "" for n, nbytes in counts)))
    return table(rows, underlined=True)


def _total(fit: Fit) -> int:
    return sum(entry.nbytes for entry in fit.placed)


def time_table(fit: Fit) -> str:
    """A row for each graph: its weight, seconds, and where they go."""
    rows: list[Sequence[object]] = [("graph", "weight", "time", *(f"on {device.name}" for device in fit.devices),
                                     "copies", "splits", *(["waits for fetches"] if fit.fetchings else []))]
    for plan, weight, price in zip(fit.plans, fit.goal, fit.prices, strict=True):
        rows.append((_name(plan), f"{weight:g}", seconds(price.seconds), *map(seconds, price.compute),
                     seconds(price.copies), seconds(price.splits),
                     *([f"{seconds(price.stalled)} of {seconds(price.fetches)}"] if fit.fetchings else [])))
    return table(rows, underlined=True)


def notes(fit: Fit) -> str:
    """What more memory is worth, what the bound covers, which numbers are measured."""
    lines = [line for part in _parts(fit) for line in _fetching(*part)]
    if any(fetching.slots is not None for fetching in fit.fetchings):
        lines.append("assumed: each token chooses its experts at random; where tokens prefer some, less is read")
    lines += more_memory(fit)
    others = "none at all" if all(fit.goal) else "none that does so in the graphs without a weight"
    lines.append(f"no placement that was compared, with nodes where their weights and caches are, takes less than "
                 f"{seconds(fit.rules_bound)} (gap {fit.gap:.2%}); {others} takes less than "
                 f"{seconds(fit.bound)} (gap {fit.full_gap:.2%})")
    measured = [device.name for device in fit.devices if device.measured]
    assumed = [device.name for device in fit.devices if not device.measured]
    if measured:
        lines.append(f"measured: the speeds of {', '.join(measured)}")
    if assumed:
        lines.append(f"assumed: the speeds of {', '.join(assumed)}")
    if fit.link is None and len(fit.devices) > 1:
        lines.append(f"assumed: links of {DEFAULT_LINK.bandwidth / 1e9:g} GB/s and {seconds(DEFAULT_LINK.latency)}")
    return "\n".join(lines)


def _fetching(which: str, fit: Fit, found: Fetching) -> Iterator[str]:
    """The lines about the weights that one model fetches, and about its slots for experts, if there are any; `which`:
    its evaluations."""
    host, speed = fit.devices[-1].name, f"{found.disk.bandwidth / 1e9:.3g} GB/s"
    model = which.removeprefix("each evaluation")
    if model:
        yield f"{model.removeprefix(' of ')} has {memory_text(found.share)} of {host}"
    if found.names:
        reading = sum(found.disk.launch + fit.entry(name).nbytes / found.disk.bandwidth for name in found.names)
        yield (f"{which} fetches {len(found.names)} weights of {memory_text(found.nbytes)} from {found.disk.name} at "
               f"{speed}, which takes {seconds(reading)}, to a window of {memory_text(found.window)}; with 1 GiB more "
               f"on {host} it would fetch {memory_text(found.with_more)}")
    slots = found.slots
    if slots is not None:
        g = _main(fit)
        yield (f"{slots.n_slots} slots of {memory_text(slots.slot_nbytes)} on {host} are for {slots.n_experts} "
               f"experts{model}: of {memory_text(round(slots.used[g]))} of experts for "
               f"{_name(fit.plans[g])}, about {memory_text(round(slots.nbytes[g]))} are in no slot, and read from "
               f"{found.disk.name} at {speed}; with 1 GiB more on {host} there would be {slots.n_slots_with_more} "
               f"slots, and about {memory_text(round(slots.nbytes_with_more[g]))} to read")


def more_memory(fit: Fit) -> list[str]:
    """A line for each device with a multiplier above 0: what one more GB, MB or KB is worth.  The unit is the largest
    one that is at most a quarter of the device and worth at most the fit's seconds: a multiplier holds for small
    changes alone."""
    lines = []
    for device, worth in zip(fit.devices, fit.worth, strict=True):
        if worth > 0:
            unit, size = next(((unit, size) for unit, size in _MORE
                               if 4 * size <= device.memory and worth * size <= fit.seconds), _MORE[-1])
            lines.append(f"a {unit} more on {device.name} is worth about {seconds(min(worth * size, fit.seconds))}")
    return lines
