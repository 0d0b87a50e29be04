"""Solving chains of 163 stages: `pytest bench/bench_solve.py --benchmark-only`.

Targets: at most 0.1 s for one GPU and a host, at most 1 s for four devices.  Extra info of each benchmark: the gap, and
the columns.  A chain has 81 pairs of an attention and a feed-forward stage of seven classes, and an output; a pattern
assigns a device to each of five or four weights.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ggml_sched.placement.chain import Chain
from ggml_sched.placement.solve import solve

SPEED = {1: (1e12,), 2: (1e12, 6e10), 3: (1e12, 3.6e11, 6e10), 4: (1e12, 3.6e11, 3.6e11, 6e10)}
"""Bytes a second of each device, the host last."""
COPY, BEGIN = 8e-6, 1e-5


def stage(devices, sizes):
    """Tables of a stage whose weights are read one after the other, by the devices that hold them."""
    n, speed = len(devices), np.array(devices)
    patterns = np.array(list(itertools.product(range(n), repeat=len(sizes))))
    seconds = (np.array(sizes) / speed[patterns]).sum(1)
    inside = (np.diff(patterns, axis=1) != 0).sum(1) * (COPY + BEGIN)
    into = (patterns[:, 0, None] != np.arange(n)) * (COPY + BEGIN)
    out = (patterns[:, -1, None] != np.arange(n)) * COPY
    cost = (seconds + inside)[:, None, None] + into[:, :, None] + out[:, None, :]
    nbytes = np.stack([((patterns == device) * np.array(sizes)).sum(1) for device in range(n)], 1)
    return cost, nbytes.astype(np.int64)


def chain(n_devices):
    rng = np.random.default_rng(n_devices)
    sizes = [tuple((rng.uniform(0.5, 1.5, 5 if kind < 4 else 4) * 3e7).astype(int).tolist()) for kind in range(7)]
    tables = [stage(SPEED[n_devices], one) for one in sizes]
    classes = (*(kind for layer in range(81) for kind in (layer // 27, 3 + layer % 3)), 6)
    start = np.full(n_devices, np.inf)
    start[-1] = 0.0
    return Chain(classes, tuple(cost for cost, _ in tables), tuple(nbytes for _, nbytes in tables), start)


@pytest.mark.parametrize("n_devices", [2, 3, 4])
def test_chain_of_163_stages(benchmark, n_devices):
    made = chain(n_devices)
    total = sum(int(made.memory[kind].max()) for kind in made.classes)
    budget = [int(total * 0.6 / (n_devices - 1))] * (n_devices - 1) + [total]
    found = benchmark.pedantic(solve, (made, budget), {"solver": "own"}, rounds=3, iterations=1)
    benchmark.extra_info.update(gap=found.cost / found.bound - 1, patterns=sum(len(cost) for cost in made.cost))
    assert found.path is not None
