"""The section on computing: queued computes that overlap, and graphs that take turns."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from summary import Line
from timing import in_turns, ratio, timed

import ggml_sched as gs
from ggml_sched.planning.tables import markdown

NAP = 0.005
"""Seconds that each backend takes for its part of a compute."""
QUEUED = 20


class Sleeper(gs.CpuBackend):
    """Sleeps for a fixed time per split, without using a processor."""

    def __init__(self, name: str, concurrent: bool) -> None:
        super().__init__(1, name)
        self.concurrent_copies = concurrent

    def graph_plan_compute(self, plan) -> None:
        time.sleep(NAP)
        super().graph_plan_compute(plan)


def section(rounds: int) -> tuple[str, list[Line]]:
    rows, ratios = [], []
    for order in ("last", "first"):
        for concurrent in (True, False):
            for copies in (1, 2, 3):
                rate, each = overlap(order, concurrent, copies)
                ratios.append((copies, rate))
                rows.append([f"host {order}, takes data while it computes" if concurrent else f"host {order}",
                             copies, f"{each:.1f}", f"{rate:.2f}"])
    turns = switching(rounds)
    lines = [Line("two equal backends, queued / synchronous rate, two copies", "≥ 1.8",
                  f"{np.median([r for c, r in ratios if c == 2]):.2f}", f"{min(r for c, r in ratios if c == 2):.2f}"),
             Line("switching between two prepared graphs / allocating the same one again", "-",
                  f"{turns['ratio']:.1f}", "-")]
    return f"""## Computing

Two backends that take {1e3 * NAP:.0f} ms each for their half of a graph; {QUEUED} computes, queued, against the same
one after the other.  The host is the last in the list of backends and computes the last half, or the first.

{markdown(["backends", "copies", "ms for each compute", "queued / synchronous rate"], rows)}

Graphs of 438 nodes that take turns in one arena: {turns["switch"]:.1f} us to switch, where each was prepared before;
{turns["same"]:.1f} us to allocate the same one again.
""", lines


def overlap(order: str, concurrent: bool, copies: int) -> tuple[float, float]:
    """(how many times as fast queued computes are, ms for each of them)."""
    device, host = Sleeper("device", concurrent), Sleeper("host", concurrent)
    ctx = gs.Context()
    x = ctx.tensor("f32", (256, 4), "x", input=True)
    first = ctx.sqr(x)
    second = ctx.set_output(ctx.add(first, x))
    graph = gs.Graph(second)
    with gs.Scheduler([device, host], copies=copies) as scheduler:
        for node, backend in zip((first, second), (device, host) if order == "last" else (host, device), strict=True):
            scheduler.set_tensor_backend(node, backend)
        scheduler.alloc(graph)
        values = np.ones((4, 256), np.float32)

        def run(queued: bool) -> None:
            for _ in range(QUEUED):
                x.set(values)
                (scheduler.compute_async if queued else scheduler.compute)(graph)
            scheduler.synchronize()

        run(True)
        took = [timed(partial(run, queued)) for queued in (False, True)]
    return took[0] / took[1], took[1] / QUEUED / 1e3


def switching(rounds: int) -> dict[str, float]:
    """Microseconds to compute another prepared graph, and to repeat the same one."""
    def chain() -> gs.Graph:
        ctx = gs.Context()
        t = ctx.tensor("f32", 64, "x", input=True)
        for _ in range(438):
            t = ctx.sqr(t)
        return gs.Graph(t)

    graphs = [chain(), chain()]
    with gs.Scheduler([gs.DryBackend("CPU", accepts_computes=True)]) as scheduler:
        scheduler.reserve(*graphs)
        for graph in graphs:
            scheduler.compute(graph)

        def switch() -> float:
            graphs.reverse()
            return timed(lambda: scheduler.alloc(graphs[0]))

        seen = in_turns({"switch": switch, "same": lambda: timed(lambda: scheduler.alloc(graphs[0]))}, rounds)
    return {"switch": float(np.median(seen["switch"])), "same": float(np.median(seen["same"])),
            "ratio": ratio(seen["switch"], seen["same"])}
