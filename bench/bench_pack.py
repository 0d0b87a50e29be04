"""Packing against omnimalloc's exact search, in the same run: time until the capacity is met, and quality.

`pytest bench/bench_pack.py --benchmark-only`; without omnimalloc the ratios are left out (peer/packer.py).  Its
search runs on all processors of the machine, ours on one.  Extra info of each benchmark: bytes, bound, tries, and
`ratio`, our median over the peer's seconds (target: at most 0.1 on each hard instance), an upper bound if `capped`.
"""

from __future__ import annotations

import lifetimes
import numpy as np
import pytest
from lifetimes import CAPACITY
from peer import packer

import ggml_sched as gs


def measure(benchmark, rows, peer=False, **options):
    columns = [np.array(c, np.int64) for c in zip(*rows, strict=True)]
    found = benchmark.pedantic(gs.pack, columns, options, rounds=5, iterations=1, warmup_rounds=1)
    benchmark.extra_info.update(buffers=len(rows), arena=found.arena, bound=found.bound, method=found.method,
                                tries=found.tries, optimal=found.optimal,
                                above_bound=round(found.arena / found.bound, 5))
    if peer and packer.available() and benchmark.stats is not None:
        other = packer.search(rows, options["capacity"])
        benchmark.extra_info.update(peer=f"omnimalloc {packer.version()}", peer_seconds=other.seconds,
                                    capped=other.capped,
                                    ratio=round(benchmark.stats.stats.median / other.seconds, 5))
    return found


@pytest.mark.parametrize("name", lifetimes.HARD)
@pytest.mark.parametrize("make", [lifetimes.read, lifetimes.mirrored], ids=["given", "mirrored"])
def test_hard_instance(benchmark, make, name):
    assert measure(benchmark, make(name), peer=True, capacity=CAPACITY).arena <= CAPACITY


@pytest.mark.parametrize(("n", "seed"), [(40, 40), (80, 80), (80, 2080), (160, 1160)])
def test_perfect_tiling(benchmark, n, seed):
    assert measure(benchmark, lifetimes.guillotine(n, seed), peer=True, capacity=CAPACITY).arena == CAPACITY


@pytest.mark.parametrize("n", [320, 5_000])
def test_large_perfect_tiling(benchmark, n):
    """Too hard for the peer, so without it."""
    assert measure(benchmark, lifetimes.guillotine(n, 1_000 + n), capacity=CAPACITY).arena == CAPACITY


@pytest.mark.parametrize(("n", "seed"), [(100, 100), (200, 1200)])
def test_loosened_tiling(benchmark, n, seed):
    assert measure(benchmark, lifetimes.loosened(n, seed), peer=True, capacity=CAPACITY).arena <= CAPACITY


@pytest.mark.parametrize("seed", [0, 1])
def test_training_graph_of_20000_buffers(benchmark, seed):
    found = measure(benchmark, lifetimes.training(20_000, seed))
    assert found.arena <= 1.01 * found.bound


@pytest.mark.parametrize("n", [1_000, 10_000, 100_000])
def test_inference_graph(benchmark, n):
    assert measure(benchmark, lifetimes.chain(n, 7)).optimal
