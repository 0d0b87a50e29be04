"""Placements beside the rules of today: milliseconds of real plans, the bound, the gap, and the seconds of the search.

    python bench/placement.py --llama-cpp DIR > docs/placement.md   # DIR has the sources of the installed llama.cpp
    python bench/placement.py                 # without a column of its own fit
    python bench/placement.py --rows 8 mixtral  # the rows whose devices and model hold these words
    python bench/placement.py --prompts       # the second table alone

Every figure is the price of a plan that the scheduler made under the budgets.  Context 4096 (70B: 8192), compute memory
for 512 tokens, 300 MiB reserve on each GPU, weights of 4 bits, a link of 25 GB/s and 8 us.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
import time
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import placement_llama_cpp
import placement_models
import placement_rules

import ggml_sched as gs
from ggml_sched.placement.devices import Links
from ggml_sched.placement.trials import Trials
from ggml_sched.planning.tables import markdown

GIB, RESERVE = 1 << 30, 300 << 20
LINK = gs.Link(25e9, 8e-6)


def gpu(name: str, gib: int, bandwidth: float, flops: float) -> gs.Device:
    return gs.Device(name, gib * GIB, bandwidth, flops, reserve=RESERVE)


def host(bandwidth: float) -> gs.Device:
    return gs.Device("CPU", 256 * GIB, bandwidth, 1e12, host=True)


SETS = {
    "4 GiB 256 GB/s, host 80 GB/s": (gpu("GPU0", 4, 256e9, 20e12), host(80e9)),
    "2 GiB 256 GB/s, host 80 GB/s": (gpu("GPU0", 2, 256e9, 20e12), host(80e9)),
    "8 GiB 256 GB/s, host 80 GB/s": (gpu("GPU0", 8, 256e9, 20e12), host(80e9)),
    "24 GiB 1 TB/s, host 60 GB/s": (gpu("GPU0", 24, 1e12, 80e12), host(60e9)),
    "24 GiB 1 TB/s, 12 GiB 360 GB/s, host": (gpu("GPU0", 24, 1e12, 80e12), gpu("GPU1", 12, 360e9, 25e12), host(60e9)),
    "80 GiB 2 TB/s, 24 GiB 1 TB/s, host": (gpu("GPU0", 80, 2e12, 200e12), gpu("GPU1", 24, 1e12, 80e12), host(60e9)),
    "twice 24 GiB 1 TB/s, host": (gpu("GPU0", 24, 1e12, 80e12), gpu("GPU1", 24, 1e12, 80e12), host(60e9)),
}
ROWS = [
    ("4 GiB 256 GB/s, host 80 GB/s", "llama-2-7b"), ("4 GiB 256 GB/s, host 80 GB/s", "llama-2-7b-fa"),
    ("2 GiB 256 GB/s, host 80 GB/s", "phi2-2.7b"), ("8 GiB 256 GB/s, host 80 GB/s", "mixtral-8x7b"),
    ("8 GiB 256 GB/s, host 80 GB/s", "30B of 128 experts"), ("8 GiB 256 GB/s, host 80 GB/s", "20B mixture"),
    ("8 GiB 256 GB/s, host 80 GB/s", "16B, latent attention"), ("8 GiB 256 GB/s, host 80 GB/s", "dense 70B"),
    ("24 GiB 1 TB/s, host 60 GB/s", "mixtral-8x7b"), ("24 GiB 1 TB/s, host 60 GB/s", "dense 70B"),
    ("24 GiB 1 TB/s, 12 GiB 360 GB/s, host", "llama-2-7b"), ("24 GiB 1 TB/s, 12 GiB 360 GB/s, host", "mixtral-8x7b"),
    ("24 GiB 1 TB/s, 12 GiB 360 GB/s, host", "dense 70B"), ("80 GiB 2 TB/s, 24 GiB 1 TB/s, host", "mixtral-8x7b"),
    ("80 GiB 2 TB/s, 24 GiB 1 TB/s, host", "dense 70B"), ("twice 24 GiB 1 TB/s, host", "mixtral-8x7b"),
    ("twice 24 GiB 1 TB/s, host", "dense 70B"),
]
PROMPTS = [("24 GiB 1 TB/s, host 60 GB/s", "mixtral-8x7b"), ("8 GiB 256 GB/s, host 80 GB/s", "30B of 128 experts"),
           ("24 GiB 1 TB/s, host 60 GB/s", "dense 70B")]


def row(devices: str, model: str, sources: Path | None = None) -> tuple[list[object], dict[str, float]]:
    """A row of the first table, and its milliseconds by column; `sources`: llama.cpp's, for a column of its fit."""
    graphs, given = placement_models.graphs(model), SETS[devices]
    trials = Trials(graphs, given, Links(given, LINK), (1.0, 0.0), 1.0)
    found: dict[str, float] = {}
    for column, rule, margin in (("whole", "whole layers", 0), ("margin", "fill", GIB), ("fill", "fill", 0),
                                 ("even", "even", 0)):
        trial = placement_rules.best_of(placement_rules.RULES[rule], trials, margin)
        found[column] = 1e3 * trial.seconds if trial else float("inf")
    if sources is not None:
        where = placement_llama_cpp.llama_cpp_fit(model, given, sources)
        trial = None if where is None else trials.run({name: where[name] for name in trials.sizes})
        found["llama.cpp"] = 1e3 * trial.seconds if trial is not None and trial.fits else float("inf")
    start = time.process_time()
    fit = gs.fit(graphs, given, LINK)
    took = time.process_time() - start
    fit.verify()
    found["fit"], found["gap"] = 1e3 * fit.seconds, 100 * fit.gap
    cells = [devices, model, f"{found['whole']:.2f}", f"{found['margin']:.2f} / {found['fill']:.2f}",
             f"{found['even']:.2f}", *([f"{found['llama.cpp']:.2f}"] if sources else []),
             f"**{found['fit']:.2f}**", f"{1e3 * fit.rules_bound:.2f}", f"{100 * fit.gap:.2f}",
             f"{1e3 * fit.bound:.2f}", f"{100 * fit.full_gap:.2f}", f"{took:.2f}", fit.plans[0].data.n_splits]
    return cells, found


HEAD = """# Placements, measured

Written by `python bench/placement.py`; how to place a model: [will it fit?](fit.md).  Every figure is the price of a
plan that the scheduler made under the budgets, in milliseconds a token; bytes are exact, no device was there.
Context 4096 (70B: 8192), compute memory for 512 tokens, 300 MiB reserve on each GPU, weights of 4 bits, a link of
25 GB/s and 8 us.  Launches take 2.5 us and splits 10 us on a GPU, 4 and 5 us on the host.
"""
RULES = """"Whole layers": the largest number of layers that fits, shared by memory.  "Fill": all but the experts first,
then experts, with 1 GiB left on each GPU; behind the stroke without that margin.  "Even": whole layers on the fewest
GPUs.  These three plan for real until the budgets hold, where programs estimate.  "llama.cpp's fit" is its own program,
on imitated devices of these sizes, with its margin of 1 GiB; its placement has the price of a plan of ours.  "bound":
no placement of the tables takes less; "bound of all": none at all.
"""
NAMES = {"whole": "whole layers", "margin": "fill and a margin of 1 GiB", "fill": "fill without a margin",
         "even": "even layers", "llama.cpp": "llama.cpp's own fit"}


def first_table(rows: list[tuple[str, str]], sources: Path | None) -> tuple[str, str]:
    """The summary and the table of tokens."""
    columns = ["whole", "margin", "fill", "even", *(["llama.cpp"] if sources else [])]
    table, ratios = [], {column: [] for column in columns}
    gaps = []
    for devices, model in rows:
        cells, found = row(devices, model, sources)
        table.append(cells)
        gaps.append(found["gap"])
        for column, values in ratios.items():
            values.append(found["fit"] / found[column])
        print("|", " | ".join(map(str, cells)), "|", file=sys.stderr, flush=True)
    head = ("devices", "model", "whole layers", "fill / no margin", "even",
            *(["llama.cpp's fit"] if sources else []), "**fit**", "bound", "gap %", "bound of all", "gap %", "CPU s",
            "splits")
    lines = [(f"a token placed by `fit` / by {NAMES[column]}", "≤ 1.00", f"{statistics.median(values):.3f}",
              f"{max(values):.3f}") for column, values in ratios.items()]
    lines.append(("gap to the bound of the tables, %", "≤ 1.00", f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}"))
    means = ", ".join(f"{NAMES[column]} {exp(statistics.fmean(map(log, values))):.3f}"
                      for column, values in ratios.items())
    summary = markdown(("measured", "target", "median", "worst"), lines)
    said = textwrap.fill(f"Geometric means of the parts: {means}.", 118)
    return f"{summary}\n\n{said}", markdown(head, table)


def second_table(rows: list[tuple[str, str]]) -> str:
    """The table of prompts."""
    table = []
    for devices, model in rows:
        graphs, given = placement_models.graphs(model), SETS[devices]
        cells: list[object] = [devices, model]
        for goal, stream in (("prompt", False), ("prompt", True), ((256.0, 1.0), True)):
            start = time.process_time()
            fit = gs.fit(graphs, given, LINK, goal=goal, stream=stream)
            took = time.process_time() - start
            fit.verify()
            decode, prompt = (1e3 * price.seconds for price in fit.prices)
            if goal == "prompt":
                cells.append(f"{prompt:.0f}")
            else:
                cells += [f"{decode:.2f} and {prompt:.0f}", f"{100 * fit.gap:.2f}"]
            cells.append(f"{took:.2f}")
        table.append(cells)
        print("|", " | ".join(map(str, cells)), "|", file=sys.stderr, flush=True)
    head = ("devices", "model", "prompt on what holds it", "CPU s", "prompt, weights streamed", "CPU s",
            "512 in and 256 out", "gap %", "CPU s")
    return markdown(head, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="rows that hold all of these words")
    parser.add_argument("--prompts", action="store_true", help="the second table alone")
    parser.add_argument("--tokens", action="store_true", help="the first table alone")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR",
                        help="sources of the installed llama.cpp, for a column of its own fit")
    args = parser.parse_args()

    def chosen(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [row for row in rows if all(word in " ".join(row) for word in args.rows)]

    print(HEAD)
    if not args.prompts:
        summary, table = first_table(chosen(ROWS), args.llama_cpp)
        print(f"## Summary\n\n{summary}\n\n{RULES}\n## A token\n\n{table}\n")
    if not args.tokens:
        print(f"## A prompt of 512 tokens\n\n{second_table(chosen(PROMPTS))}")


if __name__ == "__main__":
    main()
