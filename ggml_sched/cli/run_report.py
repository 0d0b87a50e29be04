"""The output of `ggml-sched run --stats`: splits and copies of the graphs, memory, and times."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggml_sched.planning.tables import seconds, table

if TYPE_CHECKING:
    from ggml_sched import Graph, Plan
    from ggml_sched.llama import Generation, Model


def report(args: argparse.Namespace, model: Model, loaded: Mapping[str, float],
           generations: Iterable[Generation[Any]]) -> None:
    """Print the tables to standard error; `loaded`: {part of loading: its seconds}."""
    stats = [generation.stats for generation in generations]
    n_prompt = max((s.n_prompt for s in stats), default=1)
    name = "a small model" if args.model is None else os.path.basename(args.model)
    h = model.hparams
    parts = [f"{name}: {h.arch}, {h.n_layer} layers of {h.n_embd}, vocabulary of {h.n_vocab}, context of "
             f"{model.n_ctx}; KV cache of {model.kv_type}; policy {args.policy}; "
             + ", ".join(f"{what} in {seconds(took)}" for what, took in loaded.items())]

    batch = max(min(n_prompt, model.n_batch), 1)
    graphs = {f"prompt ({batch} tokens)": (batch, model.cache.padded(batch), 1),
              "generation (1 token)": (1, model.cache.padded(max(model.n_ctx - model.n_free, 1)), 1)}
    rows: list[Sequence[object]] = [("graph", "nodes", "splits", "copies", "copied bytes", "time to plan")]
    for what, shape in graphs.items():
        graph = model.batch_graph(*shape).graph
        plan, took = _timed_plan(model, graph, args.policy)
        rows.append((what, len(graph.nodes), len(plan.splits), len(plan.copies), plan.copy_bytes,
                     seconds(took)))
    parts.append(table(rows))

    rows = [("backend", "weights", "KV cache", "arena", "work bytes")]
    for backend, held in model.memory().items():
        rows.append((backend.name, held.weights, held.cache, held.arena, held.work))
    parts.append(table(rows))

    parts += _fetched(model)

    rows = [("", "tokens", "time", "tokens/s")]
    times = (("prompt", sum(s.n_prompt - s.n_cached for s in stats), sum(s.prompt_seconds for s in stats)),
             ("generation", sum(s.n_evaluated for s in stats), sum(s.seconds for s in stats)))
    for what, count, took in times:
        if count and took:
            rows.append((what, count, seconds(took), f"{count / took:.1f}"))
    parts.append(table(rows))
    print("\n" + "\n\n".join(parts), file=sys.stderr, flush=True)


def _fetched(model: Model) -> list[str]:
    """Texts about a limit of memory: the weights that stay, the bytes that were read, at which rate, the time that
    computes waited for reads, and the least time that a token's reads take.  Empty without a limit."""
    held = model.residency
    if held is None:
        return []
    what = f"of a limit of {sum(held.limits.values()):,} bytes: {held.resident:,} of weights that stay"
    if model.store is None:
        return [what + ", which are all"]
    done = model.store.traffic
    window = sum(choice.window for choice in held.choices.values())
    rate = done.nbytes / done.seconds if done.seconds else 0.0
    rows: list[Sequence[object]] = [("store", "weights fetched", "bytes read", "MB/s", "stalled", "bound of a token")]
    rows.append((model.store.name, done.fetches, f"{done.nbytes:,}", f"{rate / 1e6:.0f}", seconds(done.stalled),
                 seconds(held.nbytes / rate) if rate and held.nbytes else "-"))
    if model.slots is None or held.nbytes:
        what += f", {held.nbytes:,} fetched for each token or batch, in a window of {window:,} or more"
    if model.slots is None:
        return [what, table(rows)]
    slots, counted = model.slots, model.slots.traffic
    what += f", and {slots.n_slots:,} slots of {slots.slot_nbytes:,} for experts"
    by_expert: list[Sequence[object]] = [("slots", "hits", "misses", "hit rate", "bytes of experts read")]
    by_expert.append((slots.n_slots, counted.hits, counted.misses, f"{counted.rate:.1%}", f"{counted.nbytes:,}"))
    return [what, table(rows), table(by_expert)]


def _timed_plan(model: Model, graph: Graph, policy: str) -> tuple[Plan, float]:
    """The plan of a graph, and the seconds of making it without a plan cache, the least of three measurements."""
    from ggml_sched import Scheduler

    best = float("inf")
    with Scheduler(model.scheduler.backends, policy=policy, plan_cache=0) as scheduler:
        for _ in range(3):
            start = time.perf_counter()
            plan = scheduler.plan(graph)
            best = min(best, time.perf_counter() - start)
    return plan, best
