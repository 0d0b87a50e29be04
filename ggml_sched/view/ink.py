"""Pieces of SVG drawings: the page with its colours for light and dark, texts, rectangles, legends, axes of bytes.

A drawing is a card with a background of its own, so that it can stand on any page.  Colours of paper and ink are CSS
classes, which follow the reader's choice of light or dark; colours of roles are the same in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from ggml_sched.planning.tables import memory_text

__all__ = ["DARK", "LIGHT", "axis_steps", "byte_text", "document", "ink_on", "legend", "text", "wide"]

LIGHT = {"paper": "#fcfcfd", "ink": "#24292f", "pale": "#57606a", "line": "#d0d7de", "grid": "#e6e9ee",
         "back": "#eff1f4", "limit": "#cf222e", "device": "#6a7f99", "host": "#b0a48c"}
DARK = {"paper": "#161b22", "ink": "#e6edf3", "pale": "#9aa4af", "line": "#3d444d", "grid": "#2a313a",
        "back": "#1f262e", "limit": "#ff7b72", "device": "#7f97b5", "host": "#a89a7e"}
"""{CSS class: colour}, on light and on dark paper.  `paper` is the card; `ink`, `pale` texts; `line`, `grid` lines;
`back` memory that nothing takes; `limit` a bound; `device`, `host` the splits of backends."""
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_WIDTHS = {**dict.fromkeys("il.,:;'|!jtf()[]/ ", 0.34), **dict.fromkeys("mwMW%@", 0.88),
           **dict.fromkeys("ABCDEFGHKNOPQRSTUVXYZ&", 0.7)}
"""{character: about its width at font size 1}; other characters have 0.6."""

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Matches what may be in the name of a tensor or device, and not in an XML file, not even escaped."""


def wide(words: str, size: float = 13) -> float:
    """About how wide a text is, in pixels."""
    return size * sum(_WIDTHS.get(c, 0.6) for c in words)


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """An SVG file of these parts on a card, with U+FFFD in place of characters that XML cannot have."""
    size = f"{width:.0f} {height:.0f}"
    return _NOT_IN_XML.sub("\ufffd", "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" class="gs-plan" font-size="13" '
        f'font-family="{_FONT}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_style()}</style>",
        f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" class="paper edge"/>',
        *parts,
        "</svg>\n",
    ]))


def _style() -> str:
    """The CSS classes, for light and dark paper: for each colour, class NAME fills with it, class s-NAME strokes."""
    def rules(colours: dict[str, str]) -> str:
        fills = "".join(f".gs-plan .{name}{{fill:{c}}}.gs-plan .s-{name}{{stroke:{c}}}" for name, c in colours.items())
        return f"{fills}.gs-plan .edge{{stroke:{colours['line']}}}"

    return f"{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}"


def text(x: float, y: float, words: str, colour: str = "ink", anchor: str = "start", size: float = 13,
         bold: bool = False) -> str:
    """A line of text at (x, y); `colour`: one of the CSS classes of `LIGHT`."""
    more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (f' font-size="{size:g}"' if size != 13 else "")
    more += ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{colour}"{more}>{escape(words)}</text>'


def legend(x: float, y: float, right: float, entries: Iterable[tuple[str, str]]) -> tuple[list[str], float]:
    """(the legend, the y below it): for each of `entries`, (name, colour), a square and the name, in as many lines
    between x and `right` as they need."""
    drawn, at = [], x
    for name, colour in entries:
        size = 19 + wide(name, 12) + 20
        if at + size - 20 > right and at > x:
            at, y = x, y + 20
        drawn.append(f'<rect x="{at:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{colour}"/>')
        drawn.append(text(at + 18, y + 10.5, name, "pale", size=12))
        at += size
    return drawn, y + 20


def ink_on(colour: str) -> str:
    """The colour of a text on `colour`: white or dark, by the relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2 else "#14181d"


def axis_steps(top: int, most: int) -> range:
    """Multiples of a power of two from 0 up to `top` bytes, at most `most` of them beside 0."""
    step = 1
    while top // step > most:
        step *= 2
    return range(0, top + 1, step)


def byte_text(nbytes: int) -> str:
    """Bytes for an axis: "64 MiB", "1.5 GiB"."""
    number, unit = memory_text(nbytes).split()
    return f"{float(number):g} {unit}" if nbytes else "0"
