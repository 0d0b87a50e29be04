"""A plan as an SVG file: which backend computes when, and the memory map of each arena; two plans side by side.

Time, which memory.py defines, goes to the right, addresses upwards.  The maps of one backend in two plans have the same
scale, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import memory_text, preformatted
from ggml_sched.view.ink import axis_steps, byte_text, document, legend, text, wide
from ggml_sched.view.layers import Section, sections_of
from ggml_sched.view.memory import MemoryMap, clock_of, copy_times, memory_maps, split_times
from ggml_sched.view.roles import DEEP, ROLES

__all__ = ["Column", "column_of", "draw", "svg"]

WIDTH, LEFT, RIGHT, GAP = 1000, 84, 22, 30
LANE, TALL, SMALL = 20, 250, 74
"""Heights in pixels: of one backend's lane in the strip, of the map of the largest arena, and at least of each map."""
_TITLED = 600
"""The blocks of a map are drawn one by one, each with a title, if they are at most this many; else as one path for each
role."""
_NARROW, _LOW = 0.7, 0.5
"""The least width and height of a block, in pixels."""


@dataclass(frozen=True, eq=False)
class Column:
    """What is drawn of one plan; the drawing has a column for each plan."""

    title: str
    subtitle: str
    end: int
    """The time at which the plan ends: the number of its copies and computing nodes."""
    maps: tuple[MemoryMap, ...]
    names: Sequence[Sequence[str]]
    """For each map, for each of its blocks, the name or op of the tensor in it."""
    lanes: tuple[tuple[str, bool], ...]
    """For each backend its name, and whether it is the host."""
    splits: tuple[tuple[int, int, int], ...]
    """For each split (index of its backend, time at which it begins, time at which it has ended)."""
    copies: tuple[tuple[int, int, int], ...]
    """For each copy (index of the backend that it is from, index of the one that it is for, time)."""
    sections: tuple[Section, ...]
    """The sections of the plan, with times in place of positions."""


def svg(plan: Plan, other: Plan | None = None, names: Sequence[str] = ()) -> str:
    """The result of `Plan.to_svg`."""
    if not isinstance(other, Plan | None):
        raise TypeError(f"not a Plan: {other!r}")
    plans = [plan] if other is None else [plan, other]
    columns = [column_of(one, name) for one, name in zip(plans, [*names, "", ""], strict=False)]
    return draw(columns, ", ".join(map(repr, plans)).replace("<", "").replace(">", ""))


def notebook(plan: Plan) -> str:
    """A plan as a notebook shows it."""
    return f"{svg(plan)}<details><summary>as text</summary>{preformatted(str(plan))}</details>"


def column_of(plan: Plan, name: str = "") -> Column:
    """The column of a plan; `name`: put in front of the title, if it is not empty."""
    clock, maps = clock_of(plan), memory_maps(plan)
    splits = tuple((b, first, last) for b, first, last, _ in split_times(plan, clock))
    copies = tuple((source, to, when) for source, to, when, _, _ in copy_times(plan, clock))
    n, sizes = len(plan.graph), " + ".join(memory_text(size) for size in plan.buffer_sizes if size)
    copied = f", {len(plan.copies)} copies of {memory_text(plan.copy_bytes)}" if plan.copies else ""
    return Column(f"{name}: {n:,} nodes" if name else f"{n:,} nodes, policy {plan.policy}",
                  f"{len(splits)} split{'s' if len(splits) != 1 else ''}{copied}; arenas {sizes or '0 B'}",
                  int(clock[-1]), maps, [[_words(plan, int(i)) for i in of.owner] for of in maps],
                  tuple((b.name, b is plan.backends[-1] and len(plan.backends) > 1) for b in plan.backends),
                  splits, copies,
                  tuple(Section(s.label, int(clock[s.first]), int(clock[s.stop])) for s in sections_of(plan)))


def _words(plan: Plan, i: int) -> str:
    """What to call the tensor of a block: its name, or its op if it has no name."""
    if plan.name_of(i):
        return plan.name_of(i)
    return plan.graph.tensors[i].op.removeprefix("UNARY:").lower() if i < plan.data.n_tensors else plan.label_of(i)


# -- the page --------------------------------------------------------------------------------------------


def draw(columns: Sequence[Column], title: str, subject: str = "") -> str:
    """The SVG file of one column or two; `subject`: a line above them."""
    panel = (WIDTH - LEFT - RIGHT - GAP * (len(columns) - 1)) / len(columns)
    edges = [LEFT + (panel + GAP) * k for k in range(len(columns))]
    end = [max(1, column.end) for column in columns]
    parts: list[str] = []
    y = 20.0
    if subject:
        parts.append(text(edges[0], y + 14, subject, "pale"))
        y += 26
    for x, column in zip(edges, columns, strict=True):
        parts.append(text(x, y + 16, column.title, size=16, bold=True))
        parts.append(text(x, y + 36, _short(column.subtitle, panel, 12.5), "pale", size=12.5))
    y += 54
    if any(len(column.splits) > 1 for column in columns):
        for x, column, n in zip(edges, columns, end, strict=True):
            parts += _strip(column, x, y, panel / n, x == edges[0])
        y += LANE * max(len(column.lanes) for column in columns) + 14
    backends = list(dict.fromkeys(of.backend for column in columns for of in column.maps if of.arena))
    tops = {name: max(of.arena for column in columns for of in column.maps if of.backend == name) for name in backends}
    largest = max(tops.values(), default=1)
    for name in backends:
        high = max(SMALL, TALL * tops[name] / largest)
        y += 40
        for k, (x, column, n) in enumerate(zip(edges, columns, end, strict=True)):
            parts += _axis(tops[name], x, y, panel, high, labelled=not k)
            for of, names in zip(column.maps, column.names, strict=True):
                if of.backend == name and of.arena:
                    parts += _map(of, names, x, y, (panel, panel / n), high, high / tops[name])
        y += high
    for x, column, n in zip(edges, columns, end, strict=True):
        parts += _ruler(column.sections, x, y + 4, panel / n)
    y += 44
    there = sorted({int(role) for column in columns for of in column.maps for role in np.unique(of.role)})
    drawn, y = legend(LEFT, y, WIDTH - RIGHT, [ROLES[role] for role in there])
    parts += drawn
    for at, name, style in ((LEFT, "the arena", "s-ink"),
                            (LEFT + 130, "most bytes alive at once: no arena of these lifetimes is smaller",
                             's-limit" stroke-dasharray="7 4')):
        parts.append(f'<path d="M{at} {y + 10:.1f}h22" class="{style}" stroke-width="2"/>')
        parts.append(text(at + 29, y + 14, name, "pale", size=12))
    y += 20
    return document(WIDTH, y + 12, title, parts)


def _strip(column: Column, x: float, y: float, step: float, labelled: bool) -> Iterator[str]:
    """A lane for each backend, with its splits as rectangles; copies are arrows between lanes.  `step`: pixels for one
    unit of time; `labelled`: whether the names of backends are written."""
    for k, (name, _) in enumerate(column.lanes):
        middle = y + LANE * (k + 0.5)
        yield f'<path d="M{x:.1f} {middle:.1f}h{column.end * step:.1f}" class="s-grid"/>'
        if labelled:
            yield text(x - 10, middle + 4, _short(name, LEFT - 14, 12), anchor="end", size=12)
    for k, (b, first, stop) in enumerate(column.splits):
        words = f"split {k} on {column.lanes[b][0]}: {stop - first} steps"
        across = max(1, (stop - first) * step)
        yield (f'<rect x="{x + first * step:.1f}" y="{y + LANE * b + 3:.1f}" width="{across:.1f}" height="{LANE - 6}" '
               f'rx="2" class="{"host" if column.lanes[b][1] else "device"}">'
               f"<title>{escape(words)}</title></rect>")
    for source, to, time in dict.fromkeys(column.copies):
        if source < 0 or source == to:
            continue
        down = 1 if to > source else -1
        at, tip = x + time * step, y + LANE * (to + 0.5) - down * (LANE / 2 - 3)
        yield (f'<path d="M{at:.1f} {y + LANE * (source + 0.5) + down * (LANE / 2 - 3):.1f}V{tip - down * 5:.1f}m-3 0'
               f'h6l-3 {down * 5}z" class="s-ink ink" stroke-width="1"/>')


def _axis(top: int, x: float, y: float, panel: float, high: float, labelled: bool) -> Iterator[str]:
    """Lines across a map at round numbers of bytes; `labelled`: with these numbers at the left."""
    for nbytes in axis_steps(top, max(2, int(high / 44))):
        at = y + high - high * nbytes / top
        yield f'<path d="M{x - (5 if labelled else 0):.1f} {at:.1f}H{x + panel:.1f}" class="s-grid"/>'
        if labelled:
            yield text(x - 10, at + 4, byte_text(nbytes), "pale", "end", 12)


def _map(of: MemoryMap, names: Sequence[str], x: float, y: float, widths: tuple[float, float], high: float,
         scale: float) -> Iterator[str]:
    """The map of one arena: a title, its bytes as a grey rectangle, its blocks, lines at its size and its live bytes.
    `widths`: (pixels of the whole map, pixels for one unit of time); `scale`: pixels for a byte."""
    panel, step = widths
    base = y + high
    top = base - of.arena * scale
    yield text(x, y - 12, of.backend, size=14, bold=True)
    above = of.arena - of.live
    state = f"{memory_text(above)} above the most bytes alive at once" if above else "as small as its lifetimes allow"
    left = wide(of.backend, 15) + 10
    yield text(x + left, y - 12, _short(f"arena {of.arena:,} bytes, {state}", panel - left, 12.5), "pale", size=12.5)
    yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{panel:.1f}" height="{base - top:.1f}" class="back"/>'
    wides = np.maximum((of.stop - of.first) * step, _NARROW)
    highs = np.maximum((of.high - of.low) * scale, _LOW)
    lefts, bottoms = x + of.first * step, base - of.low * scale
    if len(names) <= _TITLED:
        for k, name in enumerate(names):
            what = f"{name}: {of.high[k] - of.low[k]:,} bytes at {of.low[k]:,}"
            yield (f'<rect x="{lefts[k]:.1f}" y="{bottoms[k] - highs[k]:.1f}" width="{wides[k]:.1f}" '
                   f'height="{highs[k]:.1f}" fill="{ROLES[of.role[k]].colour}" class="s-paper" stroke-width=".6">'
                   f"<title>{escape(what)}</title></rect>")
            if highs[k] >= 15 and wides[k] >= wide(name, 11) + 8:
                ink = "#fff" if of.role[k] in DEEP else "#14181d"
                yield (f'<text x="{lefts[k] + wides[k] / 2:.1f}" y="{bottoms[k] - highs[k] / 2 + 4:.1f}" fill="{ink}" '
                       f'font-size="11" text-anchor="middle" pointer-events="none">{escape(name)}</text>')
    else:
        for role in np.unique(of.role):
            mine = np.flatnonzero(of.role == role)
            outlines = dict.fromkeys(f"M{lefts[k]:.1f} {bottoms[k]:.1f}h{wides[k]:.1f}v-{highs[k]:.1f}h-{wides[k]:.1f}z"
                                     for k in mine)
            yield (f'<path fill="{ROLES[role].colour}" class="s-paper" stroke-width=".4" '
                   f'd="{"".join(outlines)}"/>')
    yield f'<path d="M{x:.1f} {top:.1f}h{panel:.1f}" class="s-ink" stroke-width="2"/>'
    at = base - of.live * scale
    yield (f'<path d="M{x:.1f} {at:.1f}h{panel:.1f}" class="s-limit" stroke-width="2" stroke-dasharray="7 4">'
           f"<title>most bytes alive at once: {of.live:,}</title></path>")


def _ruler(sections: Sequence[Section], x: float, y: float, step: float) -> Iterator[str]:
    """Ticks where layers begin, and the numbers of the layers, or of every second, fourth, ... layer if there is not
    room for all.  `step`: pixels for one unit of time."""
    if len(sections) < 2:
        yield text(x, y + 12, "copies and nodes, in the order of execution", "pale", size=12)
        return
    parts = sections[0].label == "part 1"
    labels = [section.label.removeprefix("part ") for section in sections]
    least = min(section.stop - section.first for section, label in zip(sections, labels, strict=True)
                if label.isdigit()) * step
    every = 1
    while least * every < max(wide(label, 11) for label in labels) + 5 and every < len(labels):
        every *= 2
    for section, label in zip(sections, labels, strict=True):
        at, size = x + section.first * step, (section.stop - section.first) * step
        yield f'<path d="M{at:.1f} {y:.1f}v4" class="s-line"/>'
        if int(label) % every == 0 if label.isdigit() else size * every >= wide(label, 11) + 4:
            yield text(at + size / 2, y + 15, label, "pale", "middle", 11)
    words = "equal parts of the copies and nodes" if parts else "layers"
    yield text(x, y + 31, f"{words}, in the order of execution", "pale", size=12)


def _short(words: str, room: float, size: float) -> str:
    """A text, cut so that it takes at most `room` pixels at a font size of `size`."""
    if wide(words, size) <= room:
        return words
    while words and wide(words + "…", size) > room:
        words = words[:-1]
    return words.rstrip() + "…"
