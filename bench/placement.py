"""Placements beside the rules of today: milliseconds of real plans, the bound, the gap, and the seconds of the search.

    python bench/placement.py                 # both tables, as Markdown
    python bench/placement.py --rows 8 mixtral  # the rows whose devices and model hold these words
    python bench/placement.py --prompts       # the second table alone

Every figure is the price of a plan that the scheduler made under the budgets.  Context 4096 (70B: 8192), compute memory
for 512 tokens, 300 MiB reserve on each GPU, weights of 4 bits, a link of 25 GB/s and 8 us.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

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


def row(devices: str, model: str) -> tuple[list[object], dict[str, float]]:
    """A row of the first table, and its milliseconds by column."""
    graphs, given = placement_models.graphs(model), SETS[devices]
    trials = Trials(graphs, given, Links(given, LINK), (1.0, 0.0), 1.0)
    found: dict[str, float] = {}
    for column, rule, margin in (("whole", "whole layers", 0), ("margin", "fill", GIB), ("fill", "fill", 0),
                                 ("even", "even", 0)):
        trial = placement_rules.best_of(placement_rules.RULES[rule], trials, margin)
        found[column] = 1e3 * trial.seconds if trial else float("inf")
    start = time.process_time()
    fit = gs.fit(graphs, given, LINK)
    took = time.process_time() - start
    fit.verify()
    found["fit"] = 1e3 * fit.seconds
    cells = [devices, model, f"{found['whole']:.2f}", f"{found['margin']:.2f} / {found['fill']:.2f}",
             f"{found['even']:.2f}", f"**{found['fit']:.2f}**", f"{1e3 * fit.rules_bound:.2f}", f"{100 * fit.gap:.2f}",
             f"{1e3 * fit.bound:.2f}", f"{100 * fit.full_gap:.2f}", f"{took:.2f}", fit.plans[0].data.n_splits]
    return cells, found


def first_table(rows: list[tuple[str, str]]) -> None:
    table, ratios = [], {"whole": [], "margin": [], "fill": [], "even": []}
    for devices, model in rows:
        cells, found = row(devices, model)
        table.append(cells)
        for column, values in ratios.items():
            values.append(found["fit"] / found[column])
        print("|", " | ".join(map(str, cells)), "|", file=sys.stderr, flush=True)
    head = ("devices", "model", "whole layers", "fill / no margin", "even", "**fit**", "bound", "gap %",
            "bound of all", "gap %", "CPU s", "splits")
    print("\n" + markdown(head, table))
    for column, values in ratios.items():
        mean = exp(statistics.fmean(map(log, values)))
        print(f"fit / {column}: {mean:.3f} geometric mean, {max(values):.4f} at worst")


def second_table(rows: list[tuple[str, str]]) -> None:
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
    head = ("devices", "model", "prompt on what holds it", "CPU s", "prompt, weights brought over", "CPU s",
            "512 in and 256 out", "gap %", "CPU s")
    print("\n" + markdown(head, table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="rows that hold all of these words")
    parser.add_argument("--prompts", action="store_true", help="the second table alone")
    parser.add_argument("--tokens", action="store_true", help="the first table alone")
    args = parser.parse_args()

    def chosen(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [row for row in rows if all(word in " ".join(row) for word in args.rows)]

    if not args.prompts:
        first_table(chosen(ROWS))
    if not args.tokens:
        print()
        second_table(chosen(PROMPTS))


if __name__ == "__main__":
    main()
