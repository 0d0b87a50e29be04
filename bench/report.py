"""Memory and planning time of every sample graph, ours beside today's ggml: a page of Markdown.

    python bench/report.py [--repeat N] [--graphs NAME ...] > docs/benchmarks.md

With the peer built (python bench/peer/build.py) ggml plans the same graphs in the same process, both
taking turns, and medians are compared.  Without it, bytes are compared with what was recorded of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import numpy
import peer
import samples

import ggml_sched as gs

MEMORY_CONFIGS = ("c1", "c2half", "c2full", "c4")
TIME_CONFIGS = ("c1", "c4")
GROWTH = (1_000, 10_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=60, metavar="N", help="measurements of each time (60)")
    parser.add_argument("--graphs", nargs="+", default=samples.names(), metavar="NAME")
    args = parser.parse_args()
    if not peer.available():
        print("no peer: run python bench/peer/build.py to compare times with today's ggml", file=sys.stderr)
    summary: list[list] = []
    sections = [memory(args.graphs, summary), times(args.graphs, args.repeat, summary),
                growth(max(args.repeat // 3, 3), summary)]
    print(heading(args.repeat))
    head = [f"{len(args.graphs)} graphs of well-known models", "median", "worst"]
    print(f"## Summary\n\n{markdown(head, summary)}\n")
    print("\n".join(sections), end="")


def heading(repeat: int) -> str:
    ggml = (f"ggml {peer.version()} (from ggml-python's source distribution, -O3) in the same process"
            if peer.available() else "what was recorded of ggml, no peer being built here")
    return f"""# Benchmarks

Written by `python bench/report.py`; `pytest bench` times single operations.

Machine: {processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; Python \
{platform.python_version()}, NumPy {numpy.__version__}, ggml-sched {gs.__version__}.
Compared with {ggml}: devices without memory, alignment {samples.ALIGNMENT}.
Times are medians of {repeat}, the two taking turns.

| configuration | backends, best first | where weights and caches live |
|---|---|---|
| c1 | CPU | CPU |
| c2half | GPU, CPU | half of the layers on each |
| c2full | GPU, CPU | all layers on the GPU, the embedding on the CPU |
| c4 | three GPUs, CPU | a third of the layers on each GPU, the embedding on the CPU |
"""


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(": ")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


# -- memory ------------------------------------------------------------------------------------------


def memory(names: list[str], summary: list[list]) -> str:
    """Arena bytes: against the lower bound on one backend, against ggml's on all.  Adds to the summary."""
    rows, ratios = [], []
    for name in names:
        recorded = samples.recorded().get(name)
        if recorded is None:
            continue
        ours = {config: sum(planned(name, config).buffer_sizes) for config in MEMORY_CONFIGS}
        bound = recorded["live_bytes_lower_bound_align32"]
        ratio = [ours["c1"] / bound]
        ratio += [ours[config] / sum(recorded[config]["buffer_bytes"]) for config in MEMORY_CONFIGS]
        ratios.append(ratio)
        rows.append([name, f"{ours['c1']:,}", *(f"{r:.3f}" for r in ratio)])
    if not rows:
        return ""
    columns = list(zip(*ratios, strict=True))
    rows.append(["**mean**", "", *(f"**{fmean(column):.3f}**" for column in columns)])
    rows.append(["**largest**", "", *(f"**{max(column):.3f}**" for column in columns)])
    everywhere = [ratio for column in columns[1:] for ratio in column]
    summary.append(["arena on one backend / most bytes alive at once",
                    f"{median(columns[0]):.3f}", f"{max(columns[0]):.3f}"])
    summary.append(["arenas / ggml's, four configurations", f"{median(everywhere):.2f}", f"{max(everywhere):.2f}"])
    head = ["graph", "c1 bytes", "c1 / bound", *(f"{config} / ggml" for config in MEMORY_CONFIGS)]
    return f"""## Memory

Bytes of all arenas, `policy="default"`, each plan verified.  The bound is the largest sum of live bytes at
any node under ggml's in-place decisions: packing those lives cannot go below it, better decisions can.

{markdown(head, rows)}
"""


def planned(name: str, config: str) -> gs.Plan:
    graph, backends = samples.configured(name, config)
    with gs.Scheduler(backends, plan_cache=0) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    return plan


# -- time --------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Medians in microseconds; ggml's are None without the peer."""

    nodes: int
    scratch: float
    anew: float
    same: float
    reserve: float | None = None
    alloc: float | None = None


def measure(name: str, config: str, repeat: int) -> Times:
    graph, backends = samples.configured(name, config)
    twins = [graph, samples.configured(name, config, backends)[0]]
    with gs.Scheduler(backends, plan_cache=0) as planner, gs.Scheduler(backends) as scheduler:
        scheduler.alloc(graph)

        def anew() -> float:
            twins.reverse()
            return timed(lambda: scheduler.alloc(twins[0]))

        def same() -> float:
            return timed(lambda: scheduler.alloc(twins[0]))

        ours: dict[str, Callable[[], float]] = {
            "scratch": lambda: timed(lambda: planner.plan(graph)), "anew": anew, "same": same}
        if not peer.available():
            return Times(len(graph), **in_turns(ours, repeat))
        with peer.Peer(*samples.configured(name, config)) as other:
            theirs = {"reserve": other.reserve, "alloc": other.alloc}
            return Times(len(graph), **in_turns(ours | theirs, repeat))


def in_turns(runs: dict[str, Callable[[], float]], repeat: int) -> dict[str, float]:
    """The median of each, all of them run in turn, `repeat` times after a warm-up."""
    seen: dict[str, list[float]] = {what: [] for what in runs}
    for round_ in range(repeat + 3):
        for what, run in runs.items():
            value = run()
            if round_ >= 3:
                seen[what].append(value)
    return {what: median(values) for what, values in seen.items()}


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def times(names: list[str], repeat: int, summary: list[list]) -> str:
    """Planning and allocating, in microseconds.  Adds to the summary."""
    rows, ratios, again = [], [], []
    for name in names:
        for config in TIME_CONFIGS:
            t = measure(name, config, repeat)
            again.append(t.same)
            scratch, anew, same = f"{t.scratch:,.0f}", f"{t.anew:,.0f}", f"{t.same:.2f}"
            if t.reserve is None or t.alloc is None:
                rows.append([name, config, t.nodes, scratch, "", "", anew, "", "", same])
                continue
            ratios.append((t.scratch / t.reserve, t.anew / t.alloc))
            rows.append([name, config, t.nodes, scratch, f"{t.reserve:,.0f}", f"{ratios[-1][0]:.2f}",
                         anew, f"{t.alloc:,.0f}", f"{ratios[-1][1]:.2f}", same])
    if ratios:
        columns = list(zip(*ratios, strict=True))
        rows.append(["**median**", "", "", "", "", f"**{median(columns[0]):.2f}**",
                     "", "", f"**{median(columns[1]):.2f}**", ""])
        labels = "planning from scratch / ggml's reserve", "allocating an equal graph built anew / ggml's"
        for what, column in zip(labels, columns, strict=True):
            summary.append([what, f"{median(column):.2f}", f"{max(column):.2f}"])
    summary.append(["allocating the same graph again", f"{median(again):.1f} us", f"{max(again):.1f} us"])
    head = ["graph", "", "nodes", "plan, us", "ggml reserve, us", "ratio", "alloc anew, us", "ggml alloc, us",
            "ratio", "alloc again, us"]
    return f"""## Time

Plan: from scratch (`plan_cache=0`), against `ggml_backend_sched_reserve`.  Alloc anew: `alloc` of an equal
graph that was built anew, against `ggml_backend_sched_alloc_graph` of a reserved one.  Alloc again: `alloc`
of the graph that is allocated.

{markdown(head, rows)}
"""


def growth(repeat: int, summary: list[list]) -> str:
    rows, costs = [], []
    for n_nodes in GROWTH:
        graph, backends = samples.synthetic(n_nodes)
        with gs.Scheduler(backends, plan_cache=0) as scheduler:
            took = min(timed(lambda: scheduler.plan(graph)) for _ in range(repeat))  # noqa: B023
        costs.append(took / len(graph))
        rows.append([f"{len(graph):,}", f"{took / 1e3:.2f}", f"{costs[-1] * 1e3:.0f}"])
    summary.append([f"time per node, {GROWTH[-1]:,} nodes / {GROWTH[-2]:,}", f"{costs[-1] / costs[-2]:.1f}", "-"])
    return f"""## Growth

Planning synthetic transformer blocks from scratch, c4; the least time of {repeat}.

{markdown(["nodes", "ms", "ns per node"], rows)}
"""


def markdown(head: list[str], rows: list[list]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
