"""The arguments of `fit`: checked, and converted to what the search takes.

Owns nothing.  Errors name the argument that is wrong, and its value.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, TypeAlias

from ggml_sched._graph import Graph
from ggml_sched.backend import Backend
from ggml_sched.errors import PlacementError
from ggml_sched.placement.devices import DRIVER, Device, Driver
from ggml_sched.placement.measure import is_driven, measure
from ggml_sched.placement.trials import Trials

__all__ = ["Goal", "Graphs", "devices_of", "end_of", "given_devices", "groups_of", "part_of", "pins_of", "streams_of",
           "weights_of", "with_driver"]

Graphs: TypeAlias = "Sequence[Graph] | Sequence[Sequence[Graph]]"
Goal: TypeAlias = "str | Sequence[float] | None"
"""The arguments `graphs` and `goal` of `fit`."""

DRIVER_SPEED = 1e10, 1e11
"""Bytes and operations a second of a host that computes little."""
PROMPT = 32.0
"""A graph of more operations than this for each byte that it reads and writes has many tokens, so streaming weights to
a faster device may save time."""
ROUNDING = 1 << 12
"""Bytes that aligning a tensor adds at most."""
MAX_DEVICES = 16
"""The most devices that `fit` places on."""
LIGHTEST, HEAVIEST = 1e-30, 1e30
"""The range of weights in a goal, so that seconds times a weight are finite and above 0."""


def groups_of(graphs: Graphs) -> list[list[Graph]]:
    """The graphs of each model."""
    if isinstance(graphs, Graph):
        return [[graphs]]
    if isinstance(graphs, (str, PathLike)):
        raise TypeError(f"graphs are a list of Graphs, not {graphs!r}: ggml_sched.llama.model_graphs makes those of a "
                        "model file, ggml_sched.load_graph reads a graph file")
    if not isinstance(graphs, Iterable):
        raise TypeError(f"graphs are a list of Graphs, or a list of such lists, not {graphs!r}")
    given = list(graphs)
    if not given:
        raise ValueError("fit needs at least one graph")
    if all(isinstance(graph, Graph) for graph in given):
        return [given]  # type: ignore[list-item]
    groups = []
    for group in given:
        if isinstance(group, (Graph, str)) or not isinstance(group, Sequence) or not group:
            raise TypeError(f"graphs are a list of Graphs, or a list of such lists, one for each model; {group!r} is "
                            "neither")
        for graph in group:
            if not isinstance(graph, Graph):
                raise TypeError(f"not a Graph: {graph!r}")
        groups.append(list(group))
    return groups


def given_devices(devices: Sequence[Device | Backend]) -> list[Device | Backend]:
    """The devices and backends of a caller, checked."""
    if isinstance(devices, (Device, Backend, str)) or not isinstance(devices, Iterable):
        raise TypeError(f"devices are a list of Devices and Backends, not {devices!r}")
    made = []
    for given in devices:
        if not isinstance(given, (Device, Backend)):
            texts = ": ggml_sched.placement.specs.read_devices reads texts" if isinstance(given, str) else ""
            raise TypeError(f"devices are Devices and Backends; {given!r} is neither{texts}")
        made.append(given)
    return made


def with_driver(made: Sequence[Device | Backend], groups: Iterable[Iterable[Graph]]) -> list[Device | Backend]:
    """The devices and, where some are of other processes and none is a host, this process as the host: it has room for
    the inputs and outputs of the graphs, and for residents that no node reads, but for nothing else."""
    backends = [given if isinstance(given, Backend) else given.backend for given in made]
    if not is_driven(backends) or any(isinstance(given, Device) and given.host for given in made):
        return [*made]
    room = 0
    for graphs in groups:
        needed: list[int] = []
        unread: dict[str, int] = {}
        for graph in graphs:
            read = {s.root for node in graph.nodes for s in node.src if s is not None}
            roots = [t for t in graph.tensors if t.view_src is None]
            needed.append(sum(2 * (t.nbytes + ROUNDING) for t in roots
                              if "output" in t.flags or not t.resident and not t.computes))
            unread |= {t.name: t.nbytes + ROUNDING for t in roots if t.resident and t not in read}
        room += max(needed, default=0) + sum(unread.values())
    return [*made, Driver(DRIVER, room, *DRIVER_SPEED, host=True)]


def devices_of(made: Sequence[Device | Backend]) -> tuple[Device, ...]:
    """The devices, best first and the host last; backends are measured."""
    names = [device.name for device in made]
    if len(set(names)) < len(names):
        raise ValueError(f"two devices have the name {next(n for n in names if names.count(n) > 1)!r}")
    if len(made) > MAX_DEVICES:
        raise ValueError(f"{len(made)} devices; fit places on {MAX_DEVICES} at most")
    measured = [measure(given) if isinstance(given, Backend) else given for given in made]
    hosts = [device.name for device in measured if device.host]
    if len(hosts) != 1:
        raise ValueError(f"one of the devices is the host (host=True), which has the inputs; {len(hosts)} are: "
                         f"{', '.join(hosts) or 'none'}")
    return tuple(sorted(measured, key=lambda device: (device.host, -device.bandwidth, -device.flops, -device.budget,
                                                      device.name)))


def part_of(name: str, value: object, most: str, whole: bool) -> float:
    """The argument `name` as a number above 0 and below 1 (also 1 if `whole`); `most`: what the error says it must be.
    """
    try:
        part = _float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a number, not {value!r}") from None
    if not 0 < part <= 1 or part == 1 and not whole:
        raise ValueError(f"{name} = {value!r} is not {most}")
    return part


def end_of(seconds: object) -> float:
    """The time of the clock `time.monotonic` that is so many seconds away; inf for None.  TypeError, ValueError."""
    if seconds is None:
        return math.inf
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds is a number, or None, not {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"seconds = {seconds!r} is not above 0")
    return time.monotonic() + _float(seconds)


def _float(value: Any) -> float:
    """`value` as a float: infinity for an int that no float holds.  TypeError, ValueError."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def weights_of(goal: Goal, models: Sequence[Trials]) -> tuple[float, ...]:
    """The weight of each graph in the goal."""
    count = sum(len(model.graphs) for model in models)
    if goal is None or isinstance(goal, str):
        if goal not in (None, "decode", "prompt"):
            raise ValueError(f"goal {goal!r} is not 'decode', 'prompt' or a weight for each graph")
        weights = []
        for model in models:
            flops = [float(found.flops.sum()) for found in model.facts]
            chosen = flops.index(max(flops) if goal == "prompt" else min(flops))
            weights += [float(g == chosen) for g in range(len(flops))]
        return tuple(weights)
    try:
        weights = [_float(weight) for weight in goal]
    except (TypeError, ValueError):
        raise TypeError(f"goal {goal!r} is not 'decode', 'prompt' or a weight for each graph") from None
    if len(weights) != count:
        raise ValueError(f"goal has {len(weights)} weights for {count} graphs")
    if not all(weight == 0 or LIGHTEST <= weight <= HEAVIEST for weight in weights) or not any(weights):
        raise ValueError(f"goal {goal!r}: weights are not negative, not all zero, and else from {LIGHTEST:g} to "
                         f"{HEAVIEST:g}")
    at = 0
    for k, model in enumerate(models):
        if not any(weights[at : at + len(model.graphs)]):
            raise ValueError(f"goal {goal!r}: no graph of model {k} has a weight above 0")
        at += len(model.graphs)
    return tuple(weights)


def streams_of(stream: bool | Sequence[bool], models: Sequence[Trials]) -> list[list[bool]]:
    """For each model, for each graph, whether weights may be streamed to another device; `stream` as for `fit`."""
    if isinstance(stream, Sequence):
        flags = [bool(flag) for flag in stream]
        if len(flags) != sum(len(model.graphs) for model in models):
            raise ValueError(f"stream has {len(flags)} flags for {sum(len(model.graphs) for model in models)} graphs")
    else:
        flags = [bool(stream) and float(found.flops.sum()) > PROMPT * float(found.nbytes.sum())
                 for model in models for found in model.facts]
    parts, at = [], 0
    for model in models:
        parts.append([flag and weight > 0 for flag, weight in zip(flags[at:], model.weights, strict=False)])
        at += len(model.graphs)
    return parts


def pins_of(pins: Mapping[str, Device | Backend | str] | None, models: Sequence[Trials],
          devices: Sequence[Device]) -> list[dict[str, int]]:
    """For each model {name of a resident: index of the device that it has to be on}.  Where a resident's name is given,
    and also a pattern that it matches, the name counts."""
    found: list[dict[str, int]] = [{} for _ in models]
    if pins is None:
        return found
    if not isinstance(pins, Mapping):
        raise TypeError(f"pins are {{name or pattern: device}}, not {pins!r}")
    names = [device.name for device in devices]
    given: list[dict[str, dict[str, int]]] = [{} for _ in models]
    for pattern, device in pins.items():
        if not isinstance(pattern, str):
            raise TypeError(f"pins are {{name or pattern: device}}; {pattern!r} is no name")
        name = device if isinstance(device, str) else getattr(device, "name", None)
        if name not in names:
            raise PlacementError(f"pin {pattern!r}: {device!r} is not one of the devices {', '.join(names)}")
        hits = [(of, resident) for model, of in zip(models, given, strict=True) for resident in model.sizes
                if resident == pattern or fnmatchcase(resident, pattern)]
        if not hits:
            raise PlacementError(f"pin {pattern!r} names none of the weights and caches{_likely(pattern, models)}")
        for of, resident in hits:
            of.setdefault(resident, {})[pattern] = names.index(name)
    for of, fixed in zip(given, found, strict=True):
        for resident, chosen in of.items():
            (pattern, d), *others = ((resident, chosen[resident]),) if resident in chosen else chosen.items()
            for other, at in others:
                if at != d:
                    raise PlacementError(f"pins {pattern!r} and {other!r} put {resident!r} on {names[d]} and on "
                                         f"{names[at]}")
            fixed[resident] = d
    return found


def _likely(pattern: str, models: Sequence[Trials]) -> str:
    """The end of the error for a pin that matches nothing: names that the caller may have meant."""
    names = list(dict.fromkeys(name for model in models for name in model.sizes))
    try:
        hits = sum(re.search(pattern, name) is not None for name in names)
    except re.error:
        hits = 0
    if hits:
        return (f", though it matches {hits} as a regular expression: patterns are those of files, such as "
                f"{re.sub('[0-9]+', '*', names[len(names) // 2])}")
    like = get_close_matches(pattern, names, 3)
    return f"; like it are {', '.join(like)}" if like else ""
