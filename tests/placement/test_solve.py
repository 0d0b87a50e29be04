"""solve() against brute force on small random chains: what it returns fits, is near the least, and its bound holds."""

import itertools

import numpy as np
import pytest

from ggml_sched.placement.chain import Chain, Solution
from ggml_sched.placement.solve import solve

RNG = np.random.default_rng()


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
    return Chain(tuple(rng.integers(0, n_classes, n_stages).tolist()), tuple(cost), tuple(memory), start)


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


def checked(chain: Chain, budget, found: Solution) -> float:
    """The seconds of a solution's path, added again; its bytes and its fields agree with the chain."""
    if found.path is None:
        assert found.cost == np.inf and found.memory is None
        return np.inf
    assert len(found.path) == len(chain.classes)
    seconds, used, state = float(chain.start[found.path[0].state_in]), 0, found.path[0].state_in
    for number, choice in zip(chain.classes, found.path, strict=True):
        assert choice.state_in == state
        seconds += chain.cost[number][choice]
        used, state = used + chain.memory[number][choice.pattern], choice.state_out
    assert found.memory == tuple(used.tolist())
    assert (used <= np.array(budget)).all()
    assert found.cost == pytest.approx(seconds, rel=1e-12)
    assert found.bound <= found.cost
    return seconds


def near_budget(rng, chain):
    """Budgets between what choices take at least and what they take at most."""
    rows = [chain.memory[number] for number in chain.classes]
    low, high = sum(row.min(0) for row in rows), sum(row.max(0) for row in rows)
    return [int(rng.integers(a, b + 1)) for a, b in zip(low, high, strict=True)]


@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("part", range(4))
def test_solutions_are_near_the_best_of_all_combinations(n_devices, part):
    rng = np.random.default_rng([n_devices, part])
    for _ in range(60):
        chain = random_chain(rng, n_devices, n_stages=int(rng.integers(1, 6)))
        budget = near_budget(rng, chain)
        found, optimum = solve(chain, budget, 0.005), least(chain, budget)
        seconds = checked(chain, budget, found)
        assert found.bound <= optimum * (1 + 1e-12)
        if found.bound == np.inf:
            assert optimum == np.inf
        elif found.path is not None:
            assert seconds >= optimum * (1 - 1e-12)
