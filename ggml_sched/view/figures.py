"""The Bokeh figures of a page: for each plan a strip of layers and backends, and a memory map for each arena.

They are made without data, which page.js fills in: which blocks a map shows depends on the layers that are open.
Figures of plans of equal length share one axis of time, and maps of one backend one axis of bytes; for plans of
different length page.js moves the axes so that they show the same layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bokeh.embed import components
from bokeh.events import DoubleTap, MouseLeave, MouseMove, Tap
from bokeh.models import (
    AdaptiveTicker,
    BoxAnnotation,
    BoxZoomTool,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    FixedTicker,
    PanTool,
    Range1d,
    ResetTool,
    Span,
    WheelZoomTool,
)
from bokeh.plotting import figure

from ggml_sched.view.content import Content

__all__ = ["Embedded", "embed"]

LANE, TALL, SMALL = 22, 270, 90
"""Heights in pixels: of a lane of the strip, of the map of the largest arena, and at least of each map."""
LEFT, RIGHT = 92, 14
_BLOCK = {"left": "left", "right": "right", "bottom": "bottom", "top": "top"}


@dataclass(frozen=True)
class Embedded:
    """Figures as HTML: `script` draws them into `divs`, {(number of the plan, name of the figure): HTML element}."""

    script: str
    divs: dict[tuple[int, str], str]


def embed(contents: Sequence[Content], key: str, marks: Mapping[str, int]) -> Embedded:
    """The figures of plans that are shown side by side; `key`: how the names of all their Bokeh models begin.

    `marks`: {backend: bytes at which its maps get one more line, which is dotted}."""
    ranges = _time_ranges(contents)
    tops: dict[str, int] = {}
    for of in (of for c in contents for of in c.maps if of.arena):
        tops[of.backend] = max(of.arena, tops.get(of.backend, 0), marks.get(of.backend, 0))
    bytes_of = {name: Range1d(0, top * 1.02, bounds=(0, top * 1.1)) for name, top in tops.items()}
    largest = max(tops.values(), default=1)
    found: dict[tuple[int, str], figure] = {}
    for p, content in enumerate(contents):
        found[p, "strip"] = _strip(content, f"{key}.{p}", ranges[p])
        for b, of in enumerate(content.maps):
            if of.arena:
                high = round(max(SMALL, TALL * tops[of.backend] / largest))
                made = _map(f"{key}.{p}", b, of.arena, of.live, ranges[p], bytes_of[of.backend], high)
                if of.backend in marks:
                    made.add_layout(Span(location=float(marks[of.backend]), dimension="width", line_width=2,
                                         line_dash="dotted", line_color="#8a94a0"))
                found[p, f"map{b}"] = made
    script, divs = components(tuple(found.values()), wrap_script=False)
    return Embedded(script, dict(zip(found, divs, strict=True)))


def _time_ranges(contents: Sequence[Content]) -> list[Range1d]:
    """The axis of time of each plan: one object for plans of equal length."""
    made = {c.end: Range1d(0, c.end, bounds=(-0.02 * c.end, 1.02 * c.end), min_interval=2) for c in contents}
    return [made[c.end] for c in contents]


def _figure(name: str, high: int, x_range: Range1d, y_range: Range1d) -> figure:
    """A figure without data that passes its events to page.js."""
    made = figure(name=name, height=high, sizing_mode="stretch_width", x_range=x_range, y_range=y_range, tools=[],
                  toolbar_location=None, min_border_left=LEFT, min_border_right=RIGHT, min_border_top=4,
                  min_border_bottom=4, outline_line_color=None, background_fill_color=None, border_fill_color=None,
                  lod_threshold=None)
    made.xaxis.visible = False
    made.xgrid.visible = False
    made.yaxis.axis_line_color = None
    made.yaxis.major_tick_line_color = None
    made.yaxis.minor_tick_line_color = None
    wheel = WheelZoomTool(dimensions="width", zoom_on_axis=False)
    made.add_tools(PanTool(dimensions="width"), wheel, BoxZoomTool(dimensions="width"), ResetTool())
    made.toolbar.active_scroll = wheel
    for event, what in ((MouseMove, "move"), (MouseLeave, "leave"), (Tap, "tap"), (DoubleTap, "reset")):
        made.js_on_event(event, CustomJS(code=f"ggmlView.on('{what}', '{name}', cb_obj)"))
    return made


def _source(name: str, *columns: str) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _blocks(made: figure, name: str, line_color: str | None, line_width: float = 1, edges: bool = False) -> None:
    """Add rectangles to a figure, whose data page.js fills in; `edges`: whether these data say how opaque each
    rectangle's edge is."""
    columns = (*_BLOCK, "fill", "alpha", *(["edge"] if edges else []))
    made.quad(**_BLOCK, source=_source(name, *columns), fill_color="fill", fill_alpha="alpha", line_color=line_color,
              line_width=line_width, line_alpha="edge" if edges else 1, name=f"{name}.glyphs")


def _strip(content: Content, key: str, time: Range1d) -> figure:
    """A lane for the layers, and one for each backend with its splits; copies are arrows between lanes."""
    names = [*content.data["backends"]]
    if len(content.sections) > 1:
        names.insert(0, "parts" if content.sections[0].label.startswith("part ") else "layers")
    made = _figure(f"{key}.strip", LANE * len(names) + 8, time, Range1d(-len(names), 0))
    made.yaxis.ticker = FixedTicker(ticks=[-k - 0.5 for k in range(len(names))])
    made.yaxis.major_label_overrides = {-k - 0.5: name for k, name in enumerate(names)}
    made.ygrid.visible = False
    _blocks(made, f"{key}.strip.layers", "#80808060", 0.6)
    _blocks(made, f"{key}.strip.splits", None)
    made.text("x", "y", "text", source=_source(f"{key}.strip.labels", "x", "y", "text"), text_font_size="10.5px",
              text_align="center", text_baseline="middle", text_color="#808890", name=f"{key}.strip.text")
    made.segment("x", "y0", "x", "y1", source=_source(f"{key}.strip.copies", "x", "y0", "y1", "angle"),
                 line_width=1.2, line_color="#57606a", name=f"{key}.strip.lines")
    made.scatter("x", "y1", source=made.select_one({"name": f"{key}.strip.lines"}).data_source, marker="triangle",
                 size=7, angle="angle", fill_color="#57606a", line_color=None, name=f"{key}.strip.tips")
    return made


def _map(key: str, b: int, arena: int, live: int, time: Range1d, nbytes: Range1d, high: int) -> figure:
    """The memory map of one arena, with the bytes alive over time, and lines at its size and at its live bytes."""
    name, size, most = f"{key}.map{b}", float(arena), float(live)     # Bokeh warns of integers beyond 2**53
    made = _figure(name, high, time, nbytes)
    made.yaxis.formatter = CustomJSTickFormatter(code="return ggmlView.bytes(tick)")
    made.yaxis.ticker = AdaptiveTicker(base=2, mantissas=[1], num_minor_ticks=0, desired_num_ticks=max(2, high // 48))
    made.add_layout(BoxAnnotation(bottom=0, top=size, level="image", line_color=None, name=f"{name}.back"))
    _blocks(made, f"{name}.cells", "#ffffff", 0.7)
    _blocks(made, f"{name}.blocks", "#ffffff", 0.5, edges=True)
    made.step("x", "y", source=_source(f"{name}.curve", "x", "y"), mode="after", line_width=1, line_color="#24292f",
              line_alpha=0.6, name=f"{name}.line")
    made.add_layout(Span(location=size, dimension="width", line_width=2, name=f"{name}.arena"))
    made.add_layout(Span(location=most, dimension="width", line_width=2, line_dash="dashed", name=f"{name}.live"))
    _blocks(made, f"{name}.hits", "#e8117f", 2)
    _blocks(made, f"{name}.chosen", "#e8117f", 3)
    made.text("x", "y", "text", source=_source(f"{name}.labels", "x", "y", "text", "colour"), text_font_size="11px",
              text_align="center", text_baseline="middle", text_color="colour", name=f"{name}.labels.text")
    return made
