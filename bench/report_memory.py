"""The section on memory: arena bytes against the lower bound, and against ggml's."""

from __future__ import annotations

from statistics import fmean, median

import samples
from summary import Line

import ggml_sched as gs
from ggml_sched.planning.tables import markdown

CONFIGS = ("c1", "c2half", "c2full", "c4")


def section(names: list[str]) -> tuple[str, list[Line]]:
    rows, ratios = [], []
    for name in names:
        recorded = samples.recorded().get(name)
        if recorded is None:
            continue
        ours = {config: sum(planned(name, config).buffer_sizes) for config in CONFIGS}
        bound = recorded["live_bytes_lower_bound_align32"]
        row = [ours["c1"] / bound]
        row += [ours[config] / sum(recorded[config]["buffer_bytes"]) for config in CONFIGS]
        ratios.append(row)
        rows.append([name, f"{ours['c1']:,}", *(f"{r:.3f}" for r in row)])
    if not rows:
        return "", []
    columns = list(zip(*ratios, strict=True))
    rows.append(["**mean**", "", *(f"**{fmean(column):.3f}**" for column in columns)])
    rows.append(["**largest**", "", *(f"**{max(column):.3f}**" for column in columns)])
    against_bound, *against_ggml = columns
    everywhere = [r for column in against_ggml for r in column]
    lines = [
        Line("arena on one backend / most bytes alive at once", "1.000",
             f"{median(against_bound):.3f}", f"{max(against_bound):.3f}"),
        Line("arenas / ggml's, four configurations", "mean ≤ 0.93, all ≤ 1",
             f"{median(everywhere):.2f} (mean {fmean(everywhere):.2f})", f"{max(everywhere):.2f}"),
    ]
    head = ["graph", "c1 bytes", "c1 / bound", *(f"{config} / ggml" for config in CONFIGS)]
    return f"""## Memory

Bytes of all arenas, `policy="default"`, each plan verified.  The bound is the largest sum of live bytes at
any node under ggml's in-place decisions: packing those lives cannot go below it, better decisions can.

{markdown(head, rows)}
""", lines


def planned(name: str, config: str) -> gs.Plan:
    graph, backends = samples.configured(name, config)
    with gs.Scheduler(backends, plan_cache=0) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    return plan
