"""Answers of `fit` as SVG files: the bytes of each device by use, what takes the time, and the bound; also beside an
earlier answer.

All bars of devices have the same scale of bytes, and all bars of time the same scale of seconds.  The bar of a host
shows the bytes that are taken, not its whole memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ggml_sched.placement.answer import Fit
from ggml_sched.placement.report import verdict
from ggml_sched.planning.tables import memory_text, preformatted, seconds
from ggml_sched.view.ink import LIGHT, document, ink_on, legend, text, wide
from ggml_sched.view.roles import (
    ATTENTION,
    COPIES,
    EXPERTS,
    FEED_FORWARD,
    INPUTS,
    OTHER,
    OUTPUT,
    RECURRENT,
    ROLES,
    STREAM,
    role_of_name,
)

if TYPE_CHECKING:
    from ggml_sched.placement.stock import Stock

__all__ = ["notebook", "svg"]

WIDTH, LEFT, RIGHT = 1000, 104, 24
BAR, THIN, GAP = 34, 22, 6
"""Pixels: the height of a bar, the height of the bar of an earlier answer, and the gap between the two."""
MOST = 1e100
"""Seconds and weights of an answer in a file are less, so that sums of their products are finite."""
CACHE, ARENA, RESERVE, FREE = "cache", "arena", "reserve", "free"
_WEIGHTS = {EXPERTS: "experts", FEED_FORWARD: "feed-forward", ATTENTION: "attention", RECURRENT: "recurrent",
            OUTPUT: "output", STREAM: "embedding, norms", OTHER: "other weights"}
"""{role: what a drawing calls weights of this role}, in the order in which a bar has them."""
KINDS = {**{name: ROLES[role].colour for role, name in _WEIGHTS.items()}, CACHE: ROLES[INPUTS].colour,
         ARENA: ROLES[COPIES].colour}
"""{use of bytes: its colour}.  Two uses have none: the reserve is hatched, and free bytes are the bar's empty rest."""


@dataclass(frozen=True)
class _Device:
    """The bytes of one device by use."""

    name: str
    memory: int
    parts: dict[str, int]
    """{use, which is a key of KINDS or RESERVE: bytes}."""
    left: int
    is_host: bool


@dataclass(frozen=True)
class _Answer:
    """What is drawn of one answer."""

    devices: tuple[_Device, ...]
    seconds: float
    spent: tuple[tuple[str, float, str], ...]
    """The parts of the bar of time: (what takes it, such as "GPU computes", "copies" or "splits"; its seconds, summed
    over the graphs, each times its weight in the goal; its fill: a CSS class, or a colour "#...")."""


def svg(fit: Fit, before: Fit | Stock | Mapping[str, Any] | None = None, names: Sequence[str] = ()) -> str:
    """The result of `Fit.to_svg`."""
    after = _of_fit(fit)
    earlier = None if before is None else _answer(before, fit)
    titles = tuple(names) or ("before", "after")
    if len(titles) != 2:
        raise ValueError(f"names of two answers, not {len(titles)}: {titles}")
    return _draw(fit, [(titles[1], after)] if earlier is None else [(titles[0], earlier), (titles[1], after)])


def notebook(fit: Fit) -> str:
    """An answer as a notebook shows it."""
    return f"{svg(fit)}<details><summary>as text</summary>{preformatted(str(fit))}</details>"


# -- what is drawn ----------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """The use, a key of `KINDS`, as which the bytes of a weight count, by its name."""
    role = role_of_name(name, weight=True)
    return _WEIGHTS.get(OTHER if role is None else role, _WEIGHTS[OTHER])


def _of_fit(fit: Fit) -> _Answer:
    parts: list[dict[str, int]] = [dict.fromkeys(KINDS, 0) for _ in fit.devices]
    for entry in (entry for entry in fit.placed if not entry.fetched):
        parts[entry.device][kind_of(entry.name) if entry.kind == "weight" else CACHE] += entry.nbytes
    devices = []
    for use, found in zip(fit.memory, parts, strict=True):
        found[_WEIGHTS[EXPERTS]] += use.slots
        devices.append(_Device(use.device.name, use.device.memory, {**found, ARENA: use.arena, RESERVE: use.reserve},
                               use.left, use.device.host))
    names = [device.name for device in fit.devices]
    return _Answer(tuple(devices), fit.seconds, _spent(names, [
        (weight, price.compute, price.copies, price.splits, price.stalled)
        for weight, price in zip(fit.goal, fit.prices, strict=True)]))


def _answer(found: Fit | Stock | Mapping[str, Any], like: Fit) -> _Answer:
    """What is drawn of `found`: an answer of `fit`, a placement of llama.cpp's, or what `Fit.to_dict` returned.  The
    latter two do not have the bytes of each weight: they are taken from `like`."""
    if isinstance(found, Fit):
        return _of_fit(found)
    if isinstance(found, Mapping):
        try:
            return _of_dict(found, like)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"`before` is not what Fit.to_dict returns: {type(error).__name__}: {error}") from None
    used = [(use.device.name, use.weights, use.cache, use.arena, use.left) for use in found.memory]
    names = [use.device.name for use in found.memory]
    # In `found.residents` devices may have llama.cpp's names.
    called = {there: name for name, there in zip(names, _order(found, names), strict=True)}
    devices = [_device(like, name, {(0, resident): called.get(device, device) for resident, device in
                                    found.residents.items()}, weights, cache, arena, left)
               for name, weights, cache, arena, left in used]
    return _Answer(tuple(devices), found.seconds, _spent(names, [
        (weight, price.compute, price.copies, price.splits, price.stalled)
        for weight, price in zip(like.goal, found.prices, strict=True)]))


def _order(found: Stock, names: Sequence[str]) -> list[str]:
    """For each device of `names`, the host last, its name in `found.residents`: the same, or llama.cpp's."""
    there = set(found.residents.values())
    known = [name for name in names if name in there]
    return list(names) if len(known) == len(there) else [*found.order, "CPU"][: len(names)]


def _of_dict(found: Mapping[str, Any], like: Fit) -> _Answer:
    """What is drawn of an answer that may come from a file; KeyError, TypeError, ValueError or AttributeError where it
    is none."""
    hosts = {device["name"] for device in found["devices"] if device["host"]}
    memory = {device["name"]: _whole(device["memory"]) for device in found["devices"]}
    residents: dict[tuple[int, str], str] = {}
    for k, model in enumerate(found.get("models", [found])):
        fetching = model.get("fetching") or {}
        by_expert = fetching.get("experts") or {}
        stored = {*fetching.get("weights", ()), *fetching.get("rows", ()), *by_expert.get("weights", ())}
        # Weights in a file are on no device.
        residents |= {(k, resident): device for resident, device in model.get("residents", {}).items()
                      if resident not in stored}
    names = [str(use["device"]) for use in found["memory"]]
    devices = []
    for name, use in zip(names, found["memory"], strict=True):
        devices.append(_device(like, name, residents, _whole(use["weights"]), _whole(use["cache"]),
                               _whole(use["arena"]), operator.index(use["left"]), memory[name],
                               _whole(use["reserve"]), name in hosts))
        devices[-1].parts[_WEIGHTS[EXPERTS]] += _whole(use.get("slots", 0))
    return _Answer(tuple(devices), _real(found["seconds"]), _spent(names, [
        (_real(graph["weight"]), [_real(graph["compute"][name]) for name in names], _real(graph["copies"]),
         _real(graph["splits"]), _real(graph.get("stalled", 0)))
        for graph in found["graphs"]]))


def _whole(value: Any) -> int:
    """`value`, a number of bytes."""
    nbytes = operator.index(value)
    if not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{nbytes} bytes")
    return nbytes


def _real(value: Any) -> float:
    """`value`, seconds or a weight, as a float."""
    if not isinstance(value, (int, float)) or not 0 <= value < MOST:
        raise ValueError(f"{value!r} is no number from 0 on")
    return float(value)


def _device(like: Fit, name: str, residents: Mapping[tuple[int, str], str], weights: int, cache: int, arena: int,
            left: int, memory: int | None = None, reserve: int | None = None, is_host: bool | None = None) -> _Device:
    """The bytes of device `name` by use, from its totals and from the names of the weights on it (`residents`: {(index
    of its model, weight or cache): device}); bytes of weights that these names do not explain count as other weights.
    None: as in `like`."""
    own = next((device for device in like.devices if device.name == name), None)
    parts = dict.fromkeys(KINDS, 0)
    for entry in like.placed:
        if entry.kind == "weight" and residents.get((entry.model, entry.name)) == name:
            parts[kind_of(entry.name)] += entry.nbytes
    parts[_WEIGHTS[OTHER]] += max(0, weights - sum(parts.values()))
    parts |= {CACHE: cache, ARENA: arena,
              RESERVE: reserve if reserve is not None else 0 if own is None else min(own.reserve, own.memory)}
    taken = sum(parts.values()) + max(0, left)
    return _Device(name, memory if memory is not None else taken if own is None else own.memory, parts, left,
                   is_host if is_host is not None else own is not None and own.host)


def _spent(names: Sequence[str], graphs: Sequence[tuple[float, Sequence[float], float, float, float]],
           ) -> tuple[tuple[str, float, str], ...]:
    """The parts of the bar of time, as in `_Answer.spent`; `graphs`: for each graph (its weight in the goal, seconds
    of each device, of copies, of splits, of waiting for fetched weights)."""
    found = [(f"{name} computes", sum(w * compute[d] for w, compute, _, _, _ in graphs),
              "host" if d == len(names) - 1 and d else "device") for d, name in enumerate(names)]
    found.append(("copies", sum(w * copies for w, _, copies, _, _ in graphs), ROLES[COPIES].colour))
    found.append(("splits", sum(w * splits for w, _, _, splits, _ in graphs), ROLES[OUTPUT].colour))
    if any(stalled for *_, stalled in graphs):
        found.append(("waits for the disk", sum(w * stalled for w, *_, stalled in graphs), ROLES[STREAM].colour))
    return tuple(found)


# -- drawing ----------------------------------------------------------------------------------------------


def _draw(fit: Fit, answers: Sequence[tuple[str, _Answer]]) -> str:
    """The SVG file of (title, answer) pairs, drawn from top to bottom; the last answer is that of the fit."""
    first, _, second = verdict(fit).rpartition("\n")      # the names of devices, in the first, may have line breaks
    room = float(WIDTH - LEFT - RIGHT)
    if len(answers) > 1:
        room -= min(WIDTH / 4, 8 + max(wide(title, 12) for title, _ in answers))
    parts = [_hatching(), text(20, 34, first, size=16, bold=True), text(20, 55, second, "pale", size=12.5)]
    y = 72.0
    every = [device for _, answer in answers for device in answer.devices]
    scale = room / max(1, *map(_shown, every))
    for name in dict.fromkeys(device.name for device in every):
        after = next((d for d in answers[-1][1].devices if d.name == name), None)
        for k, (title, answer) in enumerate(answers):
            high = BAR if k == len(answers) - 1 else THIN
            device = next((d for d in answer.devices if d.name == name), None)
            if k == 0:
                parts.append(text(LEFT - 12, y + high / 2 + (4 if len(answers) > 1 else -1), name, anchor="end",
                                  size=13.5, bold=True))
            if k == len(answers) - 1:
                memory = memory_text((after or device or every[0]).memory)
                parts.append(text(LEFT - 12, y + high / 2 + (4 if len(answers) > 1 else 15), memory, "pale", "end", 12))
            if device is not None:
                parts += _bar(device, y, high, scale, title if len(answers) > 1 else "")
            y += high + GAP
        for line in _lines(_words(after), WIDTH - LEFT - RIGHT) if after is not None else ():
            parts.append(text(LEFT, y + 8, line, "pale", size=12))
            y += 16
        y += 16
    drawn, y = legend(LEFT, y, WIDTH - RIGHT, [
        *((kind, colour) for kind, colour in KINDS.items() if any(device.parts.get(kind) for device in every)),
        *([(RESERVE, "url(#gs-hatch)")] if any(device.parts[RESERVE] for device in every) else [])])
    parts += drawn
    y += 24
    longest = max(answer.seconds for _, answer in answers) * (1.02 if len(answers) == 1 else 1.0) or 1.0
    top = y
    parts.append(text(LEFT - 12, y + (THIN if len(answers) > 1 else BAR) / 2 + 5, "time", anchor="end", size=13.5,
                      bold=True))
    for k, (title, answer) in enumerate(answers):
        high = BAR if k == len(answers) - 1 else THIN
        parts += _time(answer, title if len(answers) > 1 else "", y, high, room / longest)
        y += high + GAP
    x = LEFT + room * fit.bound / longest
    words = f"no placement takes less than {seconds(fit.bound)}"
    parts.append(f'<path d="M{x:.1f} {top - 7:.1f}V{y:.1f}" class="s-limit" stroke-width="2" stroke-dasharray="5 3"/>')
    is_left = x - LEFT > wide(words, 12)
    parts.append(text(x - 5 if is_left else x + 5, top - 9, words, "limit", "end" if is_left else "start", 12))
    parts.append(text(LEFT, y + 8, _time_words(fit, answers), "pale", size=12))
    drawn, y = _time_legend(answers[-1][1], y + 20)
    return document(WIDTH, y + 10, f"{first}: {second}", [*parts, *drawn])


def _lines(words: Sequence[str], room: float) -> Iterator[str]:
    """Words with commas between them, in as many lines as they need."""
    line = ""
    for word in words:
        if line and wide(f"{line}, {word}", 12) > room:
            yield f"{line},"
            line = word
        else:
            line = f"{line}, {word}" if line else word
    yield line


def _hatching() -> str:
    return ('<defs><pattern id="gs-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path d="M0 0V6" class="s-pale" stroke-width="2"/></pattern></defs>')


def _shown(device: _Device) -> int:
    """The bytes that the bar of a device shows: for a host the sum of its parts, for other devices the memory, or the
    sum of the parts if that is larger."""
    taken = sum(device.parts.values())
    return taken if device.is_host else max(device.memory, taken)


def _bar(device: _Device, y: float, high: float, scale: float, title: str) -> Iterator[str]:
    """The bar of one device: its parts side by side, on a background of `_shown` bytes; `title`: text to its right."""
    whole = _shown(device) * scale
    yield f'<rect x="{LEFT}" y="{y:.1f}" width="{max(whole, 1):.1f}" height="{high}" rx="3" class="back edge"/>'
    x = float(LEFT)
    for kind, nbytes in device.parts.items():
        size = nbytes * scale
        if size > 0.2:
            look = 'fill="url(#gs-hatch)"' if kind == RESERVE else f'fill="{KINDS[kind]}"'
            yield (f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{high}" {look} class="s-paper" '
                   f'stroke-width=".8"><title>{escape(f"{device.name}: {kind} {memory_text(nbytes)}")}</title></rect>')
            yield from _inside(kind, nbytes, x, y, size, high)
        x += size
    if title:
        yield text(max(LEFT + whole, x) + 8, y + high / 2 + 4, title, "pale", size=12)


def _inside(kind: str, nbytes: int, x: float, y: float, size: float, high: float) -> Iterator[str]:
    """The bytes of a part as text inside the part, if there is room for the text."""
    words = memory_text(nbytes)
    if kind != RESERVE and high >= THIN and size > wide(words, 11) + 8:
        yield (f'<text x="{x + size / 2:.1f}" y="{y + high / 2 + 4:.1f}" font-size="11" text-anchor="middle" '
               f'fill="{ink_on(KINDS[kind])}" pointer-events="none">{escape(words)}</text>')


def _words(device: _Device) -> list[str]:
    """The bytes of a device by use, in words."""
    found = [f"{kind} {memory_text(nbytes)}" for kind, nbytes in device.parts.items() if nbytes]
    free = f"{memory_text(device.left)} free" if device.left >= 0 else f"{memory_text(-device.left)} too many"
    return [*found, free]


def _time(answer: _Answer, title: str, y: float, high: float, scale: float) -> Iterator[str]:
    """The bar of time of one answer; `scale`: pixels for a second; `title`: text to its right."""
    x = float(LEFT)
    for what, took, look in answer.spent:
        size = took * scale
        if size > 0.2:
            fill = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
            yield (f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{high}" {fill}>'
                   f"<title>{escape(f'{what}: {seconds(took)}')}</title></rect>")
            if size > wide(seconds(took), 11) + 8:
                yield (f'<text x="{x + size / 2:.1f}" y="{y + high / 2 + 4:.1f}" font-size="11" text-anchor="middle" '
                       f'fill="{ink_on(LIGHT.get(look, look))}" pointer-events="none">{seconds(took)}</text>')
        x += size
    if title:
        yield text(x + 8, y + high / 2 + 4, title, "pale", size=12)


def _time_words(fit: Fit, answers: Sequence[tuple[str, _Answer]]) -> str:
    found = f"{seconds(fit.seconds)}, {fit.full_gap:.2%} above the bound"
    if len(answers) > 1:
        title, before = answers[0]
        found += f"; {title} {seconds(before.seconds)}"
        if fit.seconds > 0:
            found += f", {before.seconds / fit.seconds:.2f} times as long"
    return found


def _time_legend(answer: _Answer, y: float) -> tuple[list[str], float]:
    """(the legend of the bar of time, with the parts that take any time; the y below the legend)."""
    drawn, x = [], float(LEFT)
    for what, took, look in answer.spent:
        if took > 0:
            fill = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
            drawn.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" {fill}/>')
            words = f"{what} {seconds(took)}"
            drawn.append(text(x + 18, y + 10.5, words, "pale", size=12))
            x += 19 + wide(words, 12) + 20
    return drawn, y + 20
