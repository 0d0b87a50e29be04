"""Random batches through `ggml_sched.llama`: counts of plans, grown buffers and waits after the first graph of each
kind.

    python bench/random_batches.py [BATCHES] [ARCH ...] [--seed SEED]

Batches have 1 to 64 rows of up to 63 sequences and 1 to all outputs, or are embeddings of texts; small random models,
a backend that computes nothing.  A kind of graph is a wiring, and for outputs: one token's, all of no more tokens than
sequences, no more than one for each sequence, more, or all.  One line for each model: the number of kinds, and of all
graphs but the first of each kind how many were planned, grew a buffer, or waited for queued computes before they could
start.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import ggml_sched as gs
from ggml_sched.execution.arenas import SchedulerArenas
from ggml_sched.execution.pipeline import Pipeline
from ggml_sched.llama import Batch, Model, load
from ggml_sched.llama.runner import Runner
from ggml_sched.llama.synthetic import random_model
from ggml_sched.planning import planner

N_ROWS, N_SEQ, N_CTX = 64, 63, 512
ARCHITECTURES = ("llama", "qwen3moe", "gemma2", "gemma3", "phi2", "gpt2", "gpt-oss", "deepseek2", "mamba")


class Idle(gs.CpuBackend):
    """Has memory, prepares plans, and computes nothing."""

    def graph_plan_compute(self, plan) -> None:
        pass

    def graph_compute(self, graph) -> None:
        pass


@contextmanager
def counting() -> Iterator[Counter]:
    """Counts of `kinds`, `graphs`, `planned`, `grown` and `waited` while the block runs."""
    counts: Counter = Counter()
    kinds: set[object] = set()
    make_plan, grow, drain, allocate = planner.make_plan, SchedulerArenas.grow, Pipeline.drain, Runner._allocate
    is_first = False

    def note(what: str) -> None:
        if not is_first:
            counts[what] += 1

    def counted_make_plan(*args):
        note("planned")
        return make_plan(*args)

    def counted_grow(self, *args):
        note("grown")
        return grow(self, *args)

    def counted_drain(self):
        if not self.is_idle:
            note("waited")
        return drain(self)

    def counted_allocate(self, graph):
        nonlocal is_first
        kind = graph.graph.wiring, self._largest(graph.shape)
        is_first = kind not in kinds
        kinds.add(kind)
        counts["kinds"] = len(kinds)
        note("graphs")
        allocate(self, graph)
        is_first = False

    planner.make_plan, SchedulerArenas.grow, Pipeline.drain, Runner._allocate = (
        counted_make_plan, counted_grow, counted_drain, counted_allocate)
    try:
        yield counts
    finally:
        planner.make_plan, SchedulerArenas.grow, Pipeline.drain, Runner._allocate = make_plan, grow, drain, allocate


def evaluate_random_batch(model: Model, rng: random.Random) -> None:
    """A text's embedding, one token, or a batch of several sequences; sequences end where the cache is full."""
    n, kind = rng.choice((1, rng.randint(1, N_ROWS))), rng.random()
    while model.n_free < n:
        longest = max(range(model.n_seq), key=lambda i: model.sequence(i).n_past)
        model.sequence(longest).reset()
    if kind < 0.2:
        model.embed([rng.randrange(model.n_vocab) for _ in range(n)], rng.choice(("mean", "last")))
        return
    if kind < 0.4:
        model.sequence(rng.randrange(model.n_seq)).eval([1] * n, last_only=rng.random() < 0.5)
        return
    taken = sorted(rng.choices(rng.sample(range(model.n_seq), rng.randint(1, model.n_seq)), k=n))
    past = Counter({i: model.sequence(i).n_past for i in set(taken)})
    positions = []
    for i in taken:
        positions.append(past[i])
        past[i] += 1
    outputs = sorted(rng.sample(range(n), rng.randint(1, n)))
    model.eval_batch(Batch(*(np.array(values, np.int32) for values in (
        [rng.randrange(model.n_vocab) for _ in range(n)], positions, taken, outputs))))


def measure(arch: str, n_batches: int, seed: int, backends: list[gs.Backend], n_ctx: int = N_CTX,
            n_seq: int = N_SEQ, **options) -> Counter:
    """Counts over random batches of one model."""
    rng = random.Random(seed)
    with (load(random_model(arch, 1), backends, n_ctx, N_ROWS, n_seq=n_seq, **options) as model,
          counting() as counts):
        for _ in range(n_batches):
            evaluate_random_batch(model, rng)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("batches", nargs="?", type=int, default=10_000)
    parser.add_argument("arch", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for arch in args.arch:
        for flash in (False, True):
            start = time.perf_counter()
            with Idle(1) as backend:
                counts = measure(arch, args.batches, args.seed, [backend], flash=flash)
            print(f"{arch:10} {'flash' if flash else 'softmax':8} {counts['kinds']:2} kinds, "
                  f"{counts['graphs']} more graphs: {counts['planned']} planned, {counts['grown']} grown, "
                  f"{counts['waited']} waited ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
