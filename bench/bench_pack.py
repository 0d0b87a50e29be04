"""Packing against omnimalloc's exact search, in the same run: time until the capacity is met, and quality.

`pytest bench/bench_pack.py --benchmark-only`; `pip install omnimalloc` for the ratios, else they are left out
(measured with omnimalloc 1.0.0).  The peer gets what it needs to stop early: the capacity as its bound, and
the smallest time limit, found by steps of half, with which it still answers.  Only that last run counts, on
all processors of the machine where ours uses one.  Extra info of each benchmark: bytes, bound, steps, and
`ratio`, our median over the peer's seconds (target: at most 0.1 on each hard instance).  `capped` says that
the peer had not answered when LIMIT seconds were over; `ratio` is then an upper bound.
"""

from __future__ import annotations

import csv
import random
import time
from pathlib import Path

import numpy as np
import pytest

import ggml_sched as gs

try:
    # Its public allocators take no capacity, and stop only at a time limit: hence the solver below them.
    from omnimalloc import Allocation
    from omnimalloc._cpp import Partition, max_threads, try_solve_many
except ImportError:
    try_solve_many = None

HARD = Path(__file__).parents[1] / "tests" / "data" / "packing"
CAPACITY = 1048576
LIMIT = 20.0            # seconds for the peer


def read(name):
    with open(HARD / f"{name}.{CAPACITY}.csv", newline="") as file:
        return [(int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(file)]


def mirrored(name):
    """The same problem with time reversed and the rows shuffled: another search."""
    rows = [(-upper, -lower, size) for lower, upper, size in read(name)]
    random.Random(5).shuffle(rows)
    return rows


def guillotine(n, seed):
    """A rectangle of CAPACITY bytes cut into n; packs into it with nothing to spare."""
    rng = random.Random(seed)
    parts = [(0, n, CAPACITY)]
    while len(parts) < n:
        parts.sort(key=lambda p: (p[1] - p[0]) / n * p[2] / CAPACITY * rng.uniform(0.3, 1))
        lower, upper, size = parts.pop()
        if rng.random() < 0.5 and upper - lower > 1:
            cut = rng.randrange(lower + 1, upper)
            parts += [(lower, cut, size), (cut, upper, size)]
        else:
            cut = rng.randrange(1, size)
            parts += [(lower, upper, cut), (lower, upper, size - cut)]
    rng.shuffle(parts)
    return parts


def training(n, seed):
    """Forward results live until their backward step, in reverse; gradients and scratch are short."""
    rng = random.Random(seed)
    steps, rows = n * 2 // 5, []
    pattern = [(rng.choice([1, 2, 4, 8, 3]) * rng.choice([4096, 65536, 262144]), rng.random() < 0.6)
               for _ in range(12)]
    for i in range(steps):
        size, kept = pattern[i % 12]
        if rng.random() > 0.9:
            size = rng.randrange(32, 1 << 20) // 32 * 32
        back = 2 * steps - 1 - i
        rows.append((i, back + 1 if kept else i + rng.randint(1, 4), size))
        rows.append((back - rng.choice([1, 1, 2]), back + 1, size))
        if rng.random() < 0.5:
            rows.append((back, back + 1, rng.choice([4096, 65536, 1 << 20])))
    rng.shuffle(rows)
    return rows[:n]


def chain(n, seed):
    """An inference graph's kind: a few long lifetimes, the rest over within some nodes."""
    rng = random.Random(seed)
    rows = [(0, n, 64 * 2**k) for k in range(4)]
    return rows + [(i, min(n, i + rng.choice([1, 1, 2, 2, 3, 8])), rng.choice([1, 2, 3, 4, 8]) * 4096)
                   for i in range(n - 4)]


def peer_seconds(rows, capacity):
    """Seconds in which omnimalloc's search finds a packing within capacity, and whether it was cut off."""
    first = min(r[0] for r in rows)
    items = [Allocation(i, z, a - first, b - first) for i, (a, b, z) in enumerate(rows)]
    limit = 0.002
    while True:
        start = time.perf_counter()
        base = Partition.from_allocations(items)
        ways = [base.reorder(keys).with_bound(capacity + 1) for keys in ("WAT", "TAW", "TWA")]
        found = try_solve_many(ways, capacity + 1, None, canonical=True, dominance=True, floor_inference=True,
                               monotonic_floor=True, decompose=True, timeout=limit, num_threads=max_threads())
        took = time.perf_counter() - start
        if found is not None and found.peak <= capacity:
            return took, False
        if limit >= LIMIT:
            return took, True
        limit = min(1.5 * limit, LIMIT)


def measure(benchmark, rows, peer=False, **options):
    columns = [np.array(c, np.int64) for c in zip(*rows, strict=True)]
    found = benchmark.pedantic(gs.pack, columns, options, rounds=5, iterations=1, warmup_rounds=1)
    benchmark.extra_info.update(buffers=len(rows), arena=found.arena, bound=found.bound, method=found.method,
                                steps=found.steps, optimal=found.optimal,
                                above_bound=round(found.arena / found.bound, 5))
    if peer and try_solve_many is not None:
        seconds, capped = peer_seconds(rows, options["capacity"])
        stats = benchmark.stats
        benchmark.extra_info.update(peer="omnimalloc", peer_seconds=seconds, capped=capped)
        if stats is not None:
            benchmark.extra_info["ratio"] = round(stats.stats.median / seconds, 5)
    return found


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
@pytest.mark.parametrize("make", [read, mirrored], ids=["given", "mirrored"])
def test_hard_instance(benchmark, make, name):
    assert measure(benchmark, make(name), peer=True, capacity=CAPACITY).arena <= CAPACITY


@pytest.mark.parametrize(("n", "seed"), [(40, 40), (80, 80), (80, 2080), (160, 1160)])
def test_perfect_tiling(benchmark, n, seed):
    assert measure(benchmark, guillotine(n, seed), peer=True, capacity=CAPACITY).arena == CAPACITY


@pytest.mark.parametrize("seed", [0, 1])
def test_training_graph_of_20000_buffers(benchmark, seed):
    found = measure(benchmark, training(20_000, seed))
    assert found.arena <= 1.01 * found.bound


@pytest.mark.parametrize("n", [1_000, 10_000, 100_000])
def test_inference_graph(benchmark, n):
    assert measure(benchmark, chain(n, 7)).optimal
