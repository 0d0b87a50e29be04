"""The sections on time: the recorded graphs, backends with support queries, building graphs, and larger graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import asking
import building
import samples
from planning import Times, measure
from summary import Line
from timing import ratio

from ggml_sched.planning.tables import markdown

CONFIGS = ("c1", "c4")
GROWTH = (1_000, 3_000, 10_000, 100_000)
LARGE = 3_000
"""The least number of nodes of the summary's large graphs."""


def section(names: list[str], rounds: int) -> tuple[str, list[Line]]:
    """Planning and allocating the recorded graphs."""
    rows, seen = [], []
    for name in names:
        for config in CONFIGS:
            t = measure(partial(samples.configured, name, config), rounds)
            seen.append(t)
            rows.append([name, config, *_cells(t), f"{t['same']:.1f}", f"{t['build']:,.0f}"])
    if seen[0].plan_ratio is not None:
        plan, alloc = median(t.plan_ratio for t in seen), median(t.alloc_ratio for t in seen)
        rows.append(["**median**", *[""] * 4, f"**{plan:.2f}**", "", "", f"**{alloc:.2f}**", "", ""])
    same = [t["same"] for t in seen]
    lines = [*_ratios(seen, ""),
             Line("allocating the same graph again", "≤ 2 us", f"{median(same):.1f} us", f"{max(same):.1f} us")]
    head = ["graph", "", "nodes", *HEAD, "same, us", "build, us"]
    return f"""## Time

* plan: `Scheduler.plan` with `plan_cache=0`.  It looks up where residents are, places, splits, and computes lifetimes
  and offsets; nothing is left from an earlier call.
* reserve: `ggml_backend_sched_reserve`, which does the same, on a scheduler whose buffers have been large enough
  since its first call.  Its tensors were put back to what building a graph leaves.
* anew: `Scheduler.alloc` of an equal graph that was built anew.  Its plan is found by its fingerprint, the tensors
  of the graph before lose their addresses, and its own get theirs.
* alloc: `ggml_backend_sched_reset` and `ggml_backend_sched_alloc_graph`, which places and splits again, finds that
  what was reserved will do, and gives the addresses.  Its tensors were put back, too.
* same: `Scheduler.alloc` of the graph that is allocated.  ggml knows nothing like it.
* build: what a `gs.Graph` costs when its order is known, flat arrays and fingerprint.  No other time in this table
  includes it, as none includes what building a graph costs ggml.

{markdown(head, rows)}
""", lines


def asked(names: list[str], rounds: int) -> tuple[str, list[Line]]:
    """Planning for backends that do not support everything."""
    rows, seen = [], []
    for name in names:
        for config in CONFIGS:
            t = asking.measure(name, config, rounds)
            if t is None:
                rows.append([name, config, *["-"] * 9])
                continue
            seen.append(t)
            reserve = f"{t['reserve']:,.0f}" if "reserve" in t.blocks else "-"
            rows.append([name, config, f"{t.kinds:,}", f"{t['dry']:,.0f}", f"{t['asked']:,.0f}",
                         _number(t.ratio("asked", "dry"), 2), reserve, _number(t.ratio("asked", "reserve"), 2),
                         f"{t['dry first']:,.0f}", f"{t['asked first']:,.0f}",
                         _number(t.ratio("asked first", "dry first"), 2)])
    lines = []
    for what, other, target in (("for backends that are not asked", "dry", "≤ 1.3"),
                                ("ggml's reserve with its CPU backend", "reserve", "≤ 0.5")):
        ratios = [t.ratio("asked", other) for t in seen if other in t.blocks]
        if ratios:
            lines.append(Line(f"planning from scratch for CPU backends / {what}", target, f"{median(ratios):.2f}",
                              f"{max(ratios):.2f}"))
    head = ["graph", "", "kinds", "dry, us", "CPU, us", "ratio", "ggml reserve, us", "ratio", "dry, first, us",
            "CPU, first, us", "ratio"]
    return f"""## Backends that are asked

Dry backends support everything and are never asked.  Here all backends are `CpuBackend`s, which are asked what they
support: once for each kind of node, and the answers are remembered.  ggml's devices answer as its CPU backend does, and
are asked for every node on every call.  first: for a `gs.Graph` that was never planned, whose kinds are found then;
what the kinds are of has been asked before.  `-`: the graph has ops for which the CPU backend has no kernels.

{markdown(head, rows)}
""", lines


def built(rounds: int) -> tuple[str, list[Line]]:
    """Building a graph, which none of the other times includes."""
    rows, steps = [], []
    for name, shape in building.SHAPES.items():
        t = building.measure(shape, rounds)
        row = [name, f"{t.nodes:,}"]
        for what in ("step", "build"):
            ours, theirs = t.blocks[what], t.blocks.get(f"ggml {what}")
            found = None if theirs is None else ratio(ours, theirs)
            row += [f"{median(ours):,.0f}", "-" if theirs is None else f"{median(theirs):,.0f}", _number(found, 2)]
            if what == "step" and found is not None:
                steps.append(found)
        rows.append([*row, f"{1e3 * median(t.blocks['step']) / t.nodes:.0f}"])
    lines = [Line("building a graph and allocating it / ggml's, from Python and from C", "≤ 3", f"{median(steps):.2f}",
                  f"{max(steps):.2f}")] if steps else []
    head = ["graph", "nodes", "step, us", "ggml, us", "ratio", "build, us", "ggml, us", "ratio", "step, ns per node"]
    return f"""## Building graphs

A llama-like graph on one device, built by the same calls in the same order: from Python by the methods of a
`gs.Context` and `gs.Graph(...)`, in C by ggml's functions and `ggml_build_forward_expand`.  build: from nothing to a
graph.  step: that, and `Scheduler.alloc`, which knows its plan, or `ggml_backend_sched_reset` and
`ggml_backend_sched_alloc_graph`: all that comes before a compute.  Giving back the graph before is part of it.

{markdown(head, rows)}
""", lines


def large(rounds: int) -> tuple[str, list[Line]]:
    """Planning and allocating graphs of up to 100,000 nodes."""
    makes: list[tuple[str, str, Callable]] = [
        (f"Llama 3.1 405B, {n_tokens} tokens" if n_tokens > 1 else "Llama 3.1 405B, decode", config,
         partial(samples.deep, config, n_tokens)) for n_tokens in (1, 512) for config in CONFIGS]
    makes += [(f"RWKV 6 1.6B, {n_tokens} tokens" if n_tokens > 1 else "RWKV 6 1.6B, decode", config,
               partial(samples.recurrent, config, n_tokens)) for n_tokens in (1, 512) for config in CONFIGS]
    makes += [("synthetic", "c4", partial(samples.synthetic, n, "c4")) for n in GROWTH]
    seen = [(name, config, measure(make, rounds)) for name, config, make in makes]
    rows = [[name, config, *_cells(t), _number(t.memory, 3), f"{1e3 * t['plan'] / t.nodes:.0f}",
             f"{1e3 * t['reserve'] / t.nodes:.0f}" if "reserve" in t.blocks else "-"] for name, config, t in seen]
    grown = [t for name, _, t in seen if name == "synthetic"]
    per_node = [t["plan"] / t.nodes for t in grown]
    growth = per_node[-1] / per_node[-2]
    lines = [*_ratios([t for name, _, t in seen if name.startswith("RWKV")], ", a recurrent model"),
             *_ratios([t for *_, t in seen if t.nodes >= LARGE], f", {LARGE:,} nodes and more"),
             Line(f"time per node, {GROWTH[-1]:,} nodes / {GROWTH[-2]:,}", "≤ 1.5", f"{growth:.1f}", "-")]
    head = ["graph", "", "nodes", *HEAD, "arenas / ggml's", "plan, ns per node", "reserve, ns per node"]
    return f"""## Large graphs, and a recurrent one

No recorded graph has 3,000 nodes.  These are the 126 layers of Llama 3.1 405B by their shapes, in the graph that this
package builds, and synthetic transformer blocks of 12 nodes; and the 24 layers of RWKV 6 1.6B, with states.  ggml's
scheduler is given room for 2 * (nodes + leafs) + 1024 tensors.

{markdown(head, rows)}
""", lines


HEAD = ["plan, us", "ggml reserve, us", "ratio", "anew, us", "ggml alloc, us", "ratio"]


def _cells(t: Times) -> list[str]:
    """Table cells: the number of nodes, and the columns of HEAD."""
    reserve, alloc = (f"{t[what]:,.0f}" if what in t.blocks else "-" for what in ("reserve", "alloc"))
    return [f"{t.nodes:,}", f"{t['plan']:,.0f}", reserve, _number(t.plan_ratio, 2),
            f"{t['anew']:,.0f}", alloc, _number(t.alloc_ratio, 2)]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratios(seen: list[Times], which: str) -> list[Line]:
    if seen[0].plan_ratio is None:
        return []
    columns = [t.plan_ratio for t in seen], [t.alloc_ratio for t in seen]
    named = (("planning from scratch / ggml's reserve", "≤ 0.5"),
             ("allocating an equal graph built anew / ggml's", "≤ 0.2"))
    return [Line(what + which, target, f"{median(column):.2f}", f"{max(column):.2f}")
            for (what, target), column in zip(named, columns, strict=True)]
