"""The tables of a page as HTML: figures of a plan, what binds its arenas, splits, nodes that fell back, differences.

Rows have attributes for page.js: a click on a row outlines its tensors in the memory maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from ggml_sched.planning.peaks import ArenaPeaks
from ggml_sched.planning.tables import memory_text
from ggml_sched.view.content import Content
from ggml_sched.view.differences import Differences

__all__ = ["differences_table", "fallbacks_table", "peaks_tables", "splits_table", "tiles"]

_ROWS = 500
"""The most rows of a table of splits; of further splits only their number is shown."""
_PEAKS, _SERIES, _NAMED = 4, 6, 4
"""The most that are listed: peaks of an arena, series of a peak, tensors in a row."""
_WORTH = 0.01
"""A cap is listed if it saves at least this part of the live bytes."""


def tiles(content: Content) -> str:
    """The main numbers of a plan as tiles side by side: bytes of arenas, splits, copies, nodes that fell back."""
    plan = content.plan
    found = [(memory_text(size), f"arena of {backend.name}", f"{size:,} bytes; {live:,} alive at once")
             for backend, size, live in zip(plan.backends, plan.buffer_sizes, plan.live_bytes, strict=True) if size]
    found.append((f"{len(plan.splits):,}", "splits" if len(plan.splits) != 1 else "split", ""))
    if plan.copies:
        found.append((memory_text(plan.copy_bytes), f"in {len(plan.copies):,} copies", f"{plan.copy_bytes:,} bytes"))
    if content.fallbacks:
        nodes = sum(len(fallback.nodes) for fallback in content.fallbacks)
        what = "nodes fell back" if nodes != 1 else "node fell back"
        found.append((f"{nodes:,}", what, "computed by a later backend: see below"))
    return "".join(f'<div class="tile" title="{escape(title)}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
                   for value, label, title in found)


def peaks_tables(content: Content, p: int) -> str:
    """For each arena its peaks, with what each series alone would save, and its caps; `p`: number of the plan in its
    tab."""
    where = {key: k for k, key in enumerate(content.named_series())}

    def members(b: int, series: Iterable[object]) -> str:
        return ",".join(str(where[b, (s.name, s.op, s.type, s.ne)]) for s in series)  # type: ignore[attr-defined]

    parts = []
    for b, of in enumerate(content.peaks):
        if of.live:
            parts.append(_arena_peaks(content, p, b, of, members))
    if not parts:
        return '<p class="none">No arena has bytes.</p>'
    return f'<div class="arenas">{"".join(parts)}</div>'


def _arena_peaks(content: Content, p: int, b: int, of: ArenaPeaks, members: object) -> str:
    above = of.arena - of.live
    state = f"{memory_text(above)} above" if above else "equal to"
    lines = [f'<section class="arena"><h4>{escape(of.backend)}: the arena is {state} the most bytes alive at once, '
             f"{of.live:,}</h4>"]
    for peak in of.peaks[:_PEAKS]:
        like = f", and {peak.times - 1} more like it" if peak.times > 1 else ""
        node = escape(peak.node or "an unnamed tensor")
        at = f'data-plan="{p}" data-map="{b}" data-at="{content.clock[peak.position]}"'
        lines.append(f'<table><caption class="link" {at}>peak at <b>{node}</b>, position {peak.position}{like}'
                     "</caption>"
                     '<tr><th>alive then<th class="n">bytes<th class="n">it alone saves<th>')
        for series, nbytes, alone in peak.series[:_SERIES]:
            marks = f'data-plan="{p}" data-series="{members(b, [series])}"'  # type: ignore[operator]
            lines.append(f'<tr class="link" {marks}><td>{escape(str(series))}<td class="n">{nbytes:,}<td class="n">'
                         f"{alone:,}<td>{_bar(nbytes / of.live)}")
        if len(peak.series) > _SERIES:
            rest = sum(nbytes for _, nbytes, _ in peak.series[_SERIES:])
            more = len(peak.series) - _SERIES
            lines.append(f'<tr><td>{more} more<td class="n">{rest:,}<td><td>{_bar(rest / of.live)}')
        lines.append("</table>")
    if len(of.peaks) > _PEAKS:
        lines.append(f"<p>and {len(of.peaks) - _PEAKS} other peaks</p>")
    caps = [cap for cap in of.caps if cap.saves >= _WORTH * of.live]
    if caps:
        lines.append('<table><caption>what each set of them gives, if it took no memory</caption>'
                     '<tr><th>without memory for<th class="n">the arena may shrink by<th>')
        for cap in caps:
            marks = f'data-plan="{p}" data-series="{members(b, cap.series)}"'  # type: ignore[operator]
            names = " and ".join(series.label for series in cap.series)
            lines.append(f'<tr class="link" {marks}><td>{escape(names)}<td class="n">{cap.saves:,}'
                         f"<td>{_bar(cap.saves / of.live)}")
        lines.append("</table>")
    return "\n".join([*lines, "</section>"])


def _bar(part: float) -> str:
    return f'<span class="bar" style="--part:{100 * min(1.0, part):.1f}%" title="{part:.1%}"></span>'


def splits_table(content: Content, p: int) -> str:
    """A row for each split: its backend, nodes, and what is copied before it."""
    plan = content.plan
    rows = []
    for k, split in enumerate(plan.splits[:_ROWS]):
        inputs = tuple(dict.fromkeys(split.inputs))
        first, last = split.nodes[0], split.nodes[-1]
        nodes = (first.name or first.op) + (f" … {last.name or last.op}" if len(split) > 1 else "")
        copied = _listed([t.name or t.op for t in inputs])
        total = f"{sum(t.nbytes for t in inputs):,}" if inputs else ""
        rows.append(f'<tr class="link" data-plan="{p}" data-split="{k}"><td class="n">{k}<td>'
                    f'{escape(split.backend.name)}<td class="n">{split.start}–{split.stop - 1}<td>{escape(nodes)}'
                    f'<td class="n">{total}<td>{escape(copied)}')
    return _table(("#split", "backend", "#nodes", "first … last", "#bytes copied before it", "of"), rows,
                  len(plan.splits))


def _listed(names: Sequence[str]) -> str:
    """The first `_NAMED` names, and how many others there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def fallbacks_table(content: Content, p: int) -> str:
    """A row for all nodes of one op that one backend refused for the same reason."""
    rows = []
    for k, fallback in enumerate(content.fallbacks):
        why = f"{fallback.refused_by} does not support {fallback.why}"
        rows.append(f'<tr class="link" data-plan="{p}" data-fallback="{k}"><td>{escape(fallback.op)}'
                    f'<td class="n">{len(fallback.nodes)}<td>{escape(fallback.backend)}<td>{escape(why)}'
                    f"<td>{escape(_listed(fallback.nodes))}")
    return _table(("op", "#nodes", "computed on", "because", "which"), rows, len(rows))


def differences_table(found: Differences) -> str:
    """A row for each difference of two plans."""
    if not len(found):
        return '<p class="none">The plans are equal.</p>'
    rows = [f'<tr class="link" data-difference="{k}"><td>{escape(entry.kind)}<td>{escape(entry.what)}'
            f"<td>{escape(entry.one)}<td>{escape(entry.other)}" for k, entry in enumerate(found)]
    return _table(("what", "of", *found.names), rows, len(rows), 'class="differences"')


def _table(head: Sequence[str], rows: Sequence[str], total: int, attributes: str = "") -> str:
    """An HTML table of these rows; a # before a title in `head` marks a column of numbers.  `total`: how many rows
    there are in all; how many are not shown is written below."""
    return "\n".join(_lines(head, rows, total, attributes))


def _lines(head: Sequence[str], rows: Sequence[str], total: int, attributes: str) -> Iterator[str]:
    titles = "".join(f'<th class="n">{escape(t[1:])}' if t.startswith("#") else f"<th>{escape(t)}" for t in head)
    yield f"<table {attributes}><tr>{titles}"
    yield from rows
    yield "</table>"
    if total > len(rows):
        yield f"<p>and {total - len(rows):,} more</p>"
