"""The bound by merged labels holds for every path that fits, however coarse it is, and is the best path's seconds where
no two labels are merged."""

import numpy as np
import pytest
from random_chains import least, near_budget, random_chain

from ggml_sched.placement.solve import labels as labels_of_solve
from ggml_sched.placement.solve import solve
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.labels import Labels
from ggml_sched.placement.solve.problem import Problem

RNG = np.random.default_rng()
ENDLESS = 1 << 30


@pytest.mark.parametrize("n_devices, n_graphs", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_no_path_that_fits_costs_less_than_the_bound_by_merged_labels(n_devices, n_graphs, monkeypatch):
    exact = compared = 0
    for _ in range(40):
        chain = random_chain(RNG, n_devices, n_stages=int(RNG.integers(1, 6)), n_graphs=n_graphs)
        budget = near_budget(RNG, chain)
        problem, optimum = Problem(chain, budget), least(chain, budget)
        bound = best_bound(problem)
        if bound.value == np.inf or optimum == np.inf:
            continue
        for slots in (1, 40, 300, 1 << 20):
            monkeypatch.setattr(labels_of_solve, "FEWEST_SLOTS", slots)
            monkeypatch.setattr(labels_of_solve, "MOST_SLOTS", slots)
            value = Labels(problem, bound).merged(1e9, ENDLESS)
            assert value <= optimum * (1 + 1e-12)
            assert bound.value <= value * (1 + 1e-9)
            assert Labels(problem, bound).merged(optimum * 0.9, ENDLESS) <= optimum * 0.9
        # A byte has a part of the budget of its own here, but two paths may still take the same bytes.
        compared += 1
        exact += value == pytest.approx(optimum, rel=1e-9)
    assert exact >= 0.6 * compared > 0


def test_finer_parts_are_tried_while_columns_are_left():
    chain = random_chain(np.random.default_rng(0), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    bound = best_bound(problem)
    found = Labels(problem, bound)
    assert found.merged(1e9, 1) == -np.inf
    values = [found.merged(1e9, effort) for effort in (1 << 12, 1 << 16, 1 << 24)]
    assert values == sorted(values)
    assert bound.value * 1.1 < values[-1]


def test_the_effort_for_a_proof_bounds_at_least_as_well_as_others():
    for _ in range(30):
        chain = random_chain(RNG, 3, n_stages=6, n_patterns=4)
        budget = near_budget(RNG, chain)
        optimum = least(chain, budget)
        for effort in ("bound", "proof"):
            found = solve(chain, budget, 0.0, effort=effort, solver="own")
            assert found.bound <= optimum * (1 + 1e-12)
            assert found.cost >= optimum * (1 - 1e-12)
