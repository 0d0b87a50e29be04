"""The answer of a fit as an SVG file: what fills each device, where the milliseconds of a token go, and the bound.

    python tools/fit_picture.py        # writes docs/pictures/fit.svg

`Fit.to_svg` draws it, below the answer for a smaller card.  Which of several placements within `within` is found
depends on the solver, so tests compare the figures, and not the drawing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import ggml_sched as gs
from ggml_sched.placement.answer import Fit

__all__ = ["answer", "drawing"]

ROOT = Path(__file__).resolve().parent.parent
GRAPHS, PICTURE = ROOT / "tests" / "data" / "graphs", ROOT / "docs" / "pictures" / "fit.svg"
NAMES = ("a card of 16 GiB", "a card of 24 GiB")


@cache
def answer(gib: int = 24) -> Fit:
    """Mixtral 8x7B in 4 bits, context 4096, on a card of so much memory and the host."""
    graphs = [gs.load_graph(GRAPHS / f"mixtral-8x7b-{what}.json.gz") for what in ("decode", "prefill512")]
    devices = [gs.Device("GPU", gib << 30, bandwidth=1e12, flops=80e12, reserve=300 << 20),
               gs.Device("CPU", 64 << 30, bandwidth=60e9, flops=1e12, host=True)]
    return gs.fit(graphs, devices, gs.Link(25e9, 8e-6))


def drawing() -> str:
    """The SVG file."""
    return answer(24).to_svg(answer(16), NAMES)


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
