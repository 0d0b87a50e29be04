"""The answer of a fit as an SVG file: what fills each device, where the milliseconds of a token go, and the bound.

    python tools/fit_picture.py        # writes docs/pictures/fit.svg

Bars of devices are to the scale of their memory, the bar of time to the scale of the token.  Which of several
placements within `within` is found depends on the solver, so tests compare the figures, and not the drawing.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import ggml_sched as gs
from ggml_sched.placement.answer import Fit
from ggml_sched.planning.tables import memory_text, seconds

__all__ = ["answer", "drawing"]

ROOT = Path(__file__).resolve().parent.parent
GRAPHS, PICTURE = ROOT / "tests" / "data" / "graphs", ROOT / "docs" / "pictures" / "fit.svg"
SUBJECT = "Mixtral 8x7B in 4 bits, context 4096, on a card of 24 GiB and the host"
KINDS = {"experts": "#e8963a", "attention": "#4c78a8", "other weights": "#9a8fc0", "cache": "#5fa777",
         "arena": "#c6a53a", "reserve": "#b8bec5", "left": "#f3f4f6"}
SPENT = {"compute": "#4c78a8", "copies": "#e8963a", "splits": "#9a8fc0"}
WIDTH, LEFT, RIGHT, BAR, STEP = 1000, 70, 30, 34, 62
INK, PALE, PAPER, LIMIT = "#24292f", "#57606a", "#fcfcfd", "#cf222e"


def answer() -> Fit:
    """The answer that is drawn."""
    graphs = [gs.load_graph(GRAPHS / f"mixtral-8x7b-{what}.json.gz") for what in ("decode", "prefill512")]
    devices = [gs.Device("GPU", 24 << 30, bandwidth=1e12, flops=80e12, reserve=300 << 20),
               gs.Device("CPU", 64 << 30, bandwidth=60e9, flops=1e12, host=True)]
    return gs.fit(graphs, devices, gs.Link(25e9, 8e-6))


def kind_of(name: str) -> str:
    """The part of a model that a weight belongs to, by the name that llama.cpp gives it."""
    if "_exps" in name:
        return "experts"
    return "attention" if ".attn_" in name else "other weights"


def parts(fit: Fit, d: int) -> dict[str, int]:
    """The bytes of one device by kind."""
    use = fit.memory[d]
    found = dict.fromkeys(KINDS, 0)
    for entry in fit.placed:
        if entry.device == d:
            found[kind_of(entry.name) if entry.kind == "weight" else "cache"] += entry.nbytes
    found["arena"], found["reserve"], found["left"] = use.arena, use.reserve, use.left
    return found


def bar(y: int, pieces: list[tuple[str, float, str]], total: float, width: float) -> list[str]:
    """Rectangles one beside the other: (title, amount, colour) of each; `total` fills `width` pixels."""
    drawn, x = [], float(LEFT)
    for title, amount, colour in pieces:
        size = width * amount / total
        if size > 0.2:
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{BAR}" fill="{colour}" '
                         f'stroke="{PAPER}" stroke-width="0.6"><title>{escape(title)}</title></rect>')
        x += size
    return drawn


def label(x: float, y: float, text: str, colour: str = INK, anchor: str = "start", size: int = 13) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def legend(y: int, colours: dict[str, str]) -> list[str]:
    drawn, x = [], float(LEFT)
    for kind, colour in colours.items():
        drawn.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{colour}" stroke="{PALE}" '
                     'stroke-width="0.4"/>')
        drawn.append(label(x + 17, y + 11, kind, PALE, size=12))
        x += 34 + 7.2 * len(kind)
    return drawn


def drawing(fit: Fit) -> str:
    """The SVG file."""
    width = WIDTH - LEFT - RIGHT
    shown = [use.device.memory - (use.left if use.device.host else 0) for use in fit.memory]
    largest = max(shown)
    body = [label(LEFT, 28, SUBJECT, size=15)]
    y = 48
    for d, use in enumerate(fit.memory):
        amounts = parts(fit, d)
        if use.device.host:
            amounts["left"] = 0
        body.append(label(LEFT - 8, y + 22, use.device.name, anchor="end"))
        body += bar(y, [(f"{use.device.name}: {kind} {memory_text(n)}", n, KINDS[kind]) for kind, n in amounts.items()],
                    largest, width)
        text = ", ".join(f"{kind} {memory_text(n)}" for kind, n in amounts.items() if n and kind != "reserve")
        body.append(label(LEFT, y + BAR + 15, text, PALE, size=12))
        y += STEP
    body += legend(y, KINDS)
    y += 44
    price = fit.prices[0]
    pieces = [(f"{device.name} computes {seconds(taken)}", taken, SPENT["compute"])
              for device, taken in zip(fit.devices, price.compute, strict=True)]
    pieces += [(f"copies {seconds(price.copies)}", price.copies, SPENT["copies"]),
               (f"splits {seconds(price.splits)}", price.splits, SPENT["splits"])]
    scale = price.seconds * 1.04
    body.append(label(LEFT - 8, y + 22, "a token", anchor="end"))
    body += bar(y, pieces, scale, width)
    x = LEFT + width * fit.rules_bound / scale
    body.append(f'<line x1="{x:.1f}" y1="{y - 6}" x2="{x:.1f}" y2="{y + BAR + 6}" stroke="{LIMIT}" stroke-width="2"/>')
    body.append(label(x, y - 10, f"proven: at least {seconds(fit.rules_bound)}", LIMIT, "end", 12))
    text = ", ".join(title for title, taken, _ in pieces if taken)
    body.append(label(LEFT, y + BAR + 15, f"{seconds(price.seconds)}: {text}", PALE, size=12))
    y += BAR + 34
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">')
    return "\n".join([head, f"<title>{escape(SUBJECT)}</title>", f'<rect width="{WIDTH}" height="{y}" fill="{PAPER}"/>',
                      *body, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawing(answer()), encoding="utf-8")
