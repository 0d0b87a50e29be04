"""Random chains for the solver of placements, small enough for slow searches beside it."""

import itertools

import numpy as np

from ggml_sched.placement.chain import Chain

__all__ = ["least", "near_budget", "random_chain"]


def random_chain(rng, n_devices, n_classes=3, n_stages=4, n_patterns=4, n_graphs=1, largest=20):
    states = n_devices ** n_graphs
    cost, memory = [], []
    for _ in range(n_classes):
        patterns = int(rng.integers(1, n_patterns + 1))
        seconds = rng.uniform(0.5, 5.0, (patterns, states, states))
        seconds[rng.random(seconds.shape) < 0.15] = np.inf
        cost.append(seconds)
        memory.append(rng.integers(0, largest, (patterns, n_devices)))
    start = rng.uniform(0, 1, states)
    start[rng.random(states) < 0.2] = np.inf
    devices = tuple(itertools.product(range(n_devices), repeat=n_graphs))
    return Chain(tuple(rng.integers(0, n_classes, n_stages).tolist()), tuple(cost), tuple(memory), start, devices)


def near_budget(rng, chain):
    """Budgets between what choices take at least and what they take at most."""
    rows = [chain.memory[number] for number in chain.classes]
    low, high = sum(row.min(0) for row in rows), sum(row.max(0) for row in rows)
    return [int(rng.integers(a, b + 1)) for a, b in zip(low, high, strict=True)]


def least(chain: Chain, budget) -> float:
    """The seconds of the best choices within the budgets, by trying every combination; infinite if none fit."""
    states, best = len(chain.start), np.inf
    for patterns in itertools.product(*(range(len(chain.cost[number])) for number in chain.classes)):
        used = sum(chain.memory[number][row] for number, row in zip(chain.classes, patterns, strict=True))
        if (used > np.array(budget)).any():
            continue
        seconds = chain.start
        for number, row in zip(chain.classes, patterns, strict=True):
            seconds = (seconds[:, None] + chain.cost[number][row]).min(0)
        best = min(best, seconds.min())
    assert states == len(chain.start)
    return float(best)
