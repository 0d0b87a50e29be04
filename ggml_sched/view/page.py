"""Pages: plans in a browser, in one file that needs no network.

Bokeh draws the figures; page.html, page.css and page.js are the page around them; content.py makes the data, tables.py
the tables.  The data are compressed JSON, so that the page of a graph of 100,000 nodes has a few megabytes.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from ggml_sched._files import write_text
from ggml_sched.errors import Error
from ggml_sched.planning.plan import Plan
from ggml_sched.view.content import Content, content_of
from ggml_sched.view.differences import Differences, differences, plan_names
from ggml_sched.view.ink import DARK, LIGHT, ink_on
from ggml_sched.view.roles import DEEP, ROLES
from ggml_sched.view.tables import differences_table, fallbacks_table, peaks_tables, splits_table, tiles

__all__ = ["Shown", "needs_bokeh", "page", "save"]

_FOLDER = Path(__file__).resolve().parent
_HINT = "scroll or + −: zoom · drag or ← →: move · double-click or 0: all · click a layer: open it · /: search"
_SECTIONS = (("Differences", "what is different between the two plans"),
             ("What binds the arenas", "the peaks of live bytes, and what has to shrink together to lower them"),
             ("Nodes that fell back", "computed by a later backend, because a better one does not support them"),
             ("Splits", "consecutive nodes that one backend computes in one go"))


@dataclass(frozen=True)
class Shown:
    """A plan on a page, alone or with `other` beside it; `title`: the title of its tab.

    `marks`: {backend: (what it is, bytes)}: a size to compare the backend's arena with, drawn as a dotted line."""

    title: str
    plan: Plan
    other: Plan | None = None
    names: Sequence[str] = ()
    marks: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def save(plan: Plan, path: str | os.PathLike[str], other: Plan | None = None, names: Sequence[str] = ()) -> None:
    """Write the page of one plan, or of two; does the work of `Plan.save_html`."""
    if not isinstance(other, Plan | None):
        raise TypeError(f"not a Plan: {other!r}")
    write_text(path, page([Shown("", plan, other, names)]))


def page(shown: Sequence[Shown]) -> str:
    """The HTML of a page with a tab for each entry; raises Error if Bokeh (the extra `view`) is not installed."""
    needs_bokeh()
    figures = import_module("ggml_sched.view.figures")
    tabs = [_Tab(one, k, figures) for k, one in enumerate(shown)]
    data = {"tabs": [tab.data for tab in tabs], "roles": [role.name for role in ROLES],
            "colours": [role.colour for role in ROLES], "deep": sorted(DEEP), "light": LIGHT, "dark": DARK}
    return Template(_text("page.html")).substitute(
        title=escape(tabs[0].title if len(tabs) == 1 else f"{len(tabs)} plans"), style=_style(), tabs=_tab_bar(tabs),
        views="\n".join(tab.html for tab in tabs), data=_packed(data), bokeh=_bokeh(),
        embeds="\n".join(f"ggmlEmbeds.push(function() {{\n{tab.script}\n}});" for tab in tabs),
        program=_text("page.js"))


def needs_bokeh() -> None:
    """Raise Error if Bokeh (the extra `view`) is not installed."""
    if find_spec("bokeh") is None:
        raise Error("a page needs Bokeh, which is not installed: pip install 'ggml-sched[view]'")


def _bokeh() -> str:
    """The text of Bokeh's JavaScript, without its widgets."""
    resources = import_module("bokeh.resources").Resources(mode="inline", components=["bokeh"])
    return str(resources.js_raw[0]).replace("</script", "<\\/script")


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _style() -> str:
    """The style sheet: the colours of light and of dark paper as variables, then page.css."""
    def variables(colours: dict[str, str]) -> str:
        named = {**colours, "on-device": ink_on(colours["device"])}
        return "".join(f"--{name}:{colour};" for name, colour in named.items())

    dark = f"@media (prefers-color-scheme:dark){{:root{{color-scheme:dark;{variables(DARK)}}}}}"
    return f":root{{color-scheme:light;{variables(LIGHT)}}}{dark}\n{_text('page.css')}"


def _packed(data: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)).decode()


def _tab_bar(tabs: Sequence[_Tab]) -> str:
    if len(tabs) < 2:
        return ""
    return "<nav>" + "".join(f'<button data-tab="{k}">{escape(tab.title)}</button>' for k, tab in enumerate(tabs)) + \
        "</nav>"


def _labelled(words: str, figure: str) -> str:
    """A figure with a text for screen readers."""
    return f'<div role="img" aria-label="{escape(words)}">{figure}</div>'


class _Tab:
    """One tab: its HTML, the script that draws its figures, and its data."""

    def __init__(self, shown: Shown, k: int, figures: ModuleType) -> None:
        plans = [shown.plan] if shown.other is None else [shown.plan, shown.other]
        names: Sequence[str] = [*shown.names[:1]] or [""]
        self.found: Differences | None = None
        if shown.other is not None:
            names = plan_names(shown.plan, shown.other, shown.names)
            self.found = differences(shown.plan, shown.other, names)
        self.contents: list[Content] = [content_of(plan, name) for plan, name in zip(plans, names, strict=True)]
        self.title: str = shown.title or self._title()
        self.marks: Mapping[str, tuple[str, int]] = shown.marks
        embedded = figures.embed(self.contents, str(k), {name: nbytes for name, (_, nbytes) in shown.marks.items()})
        self.script: str = embedded.script
        self.data: dict[str, Any] = {
            "plans": [content.data for content in self.contents],
            "differences": [] if self.found is None else [list(map(list, entry.tensors)) for entry in self.found]}
        self.html: str = "\n".join(self._html(k, embedded.divs))

    def _title(self) -> str:
        plan = self.contents[0].plan
        nodes = f"{len(plan.graph):,} node{'s' if len(plan.graph) != 1 else ''}"
        return f"Plan of {nodes} on {', '.join(backend.name for backend in plan.backends)}"

    def _html(self, k: int, divs: dict[tuple[int, str], str]) -> Iterator[str]:
        yield f'<main class="view" data-view="{k}" hidden>'
        yield f'<header><h1>{escape(self.title)}</h1><span class="hint">{_HINT}</span></header>'
        yield _text("toolbar.html")
        yield f'<div class="body"><div class="columns n{len(self.contents)}">'
        for p, content in enumerate(self.contents):
            name = f'<h2 class="plan-name">{escape(content.name)}</h2>' if content.name else ""
            yield f'<section class="plan">{name}<div class="tiles">{tiles(content)}</div>'
            yield _labelled("which backend computes when", divs[p, "strip"])
            for b, of in enumerate(content.maps):
                if of.arena:
                    above = of.arena - of.live
                    state = f"{above:,} above the bound" if above else "as small as its lifetimes allow"
                    if of.backend in self.marks:
                        what, nbytes = self.marks[of.backend]
                        state += f"; {what} (dotted): {nbytes:,}"
                    yield f'<h3>{escape(of.backend)}<small>arena {of.arena:,} bytes, {escape(state)}</small></h3>'
                    yield _labelled(f"memory map of {of.backend}; tables below list its peaks", divs[p, f"map{b}"])
            yield "</section>"
        yield ('</div><aside><div class="results" hidden></div><div class="details" aria-live="polite"></div></aside>'
               '</div>')
        yield from self._sections()
        yield "</main>"

    def _sections(self) -> Iterator[str]:
        """The tables under the maps."""
        contents = list(enumerate(self.contents))
        bodies = ([differences_table(self.found)] if self.found is not None else [],
                  [peaks_tables(content, p) for p, content in contents],
                  [fallbacks_table(content, p) if content.fallbacks else "" for p, content in contents],
                  [splits_table(content, p) for p, content in contents])
        for (title, words), body in zip(_SECTIONS, bodies, strict=True):
            if any(body):
                yield f'<details class="table" open><summary>{title}<small>{words}</small></summary>'
                yield f'<div class="columns n{len(body)}">'
                for (_, content), part in zip(contents, body, strict=False):
                    name = f"<h3>{escape(content.name)}</h3>" if len(body) > 1 else ""
                    yield f"<div>{name}{part or '<p class=none>none</p>'}</div>"
                yield "</div></details>"
