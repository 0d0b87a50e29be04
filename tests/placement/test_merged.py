"""The bound by merged labels holds for every path that fits, however coarse it is, and is the best path's seconds where
no two labels are merged."""

import numpy as np
import pytest
from random_chains import least, near_budget, random_chain

from ggml_sched.placement.solve import merged, solve
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.merged import MergedBound
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
        for labels, parts in ((1, 1), (8, 3), (60, 2), (1 << 12, 1 << 12)):
            monkeypatch.setattr(merged, "FEWEST", labels)
            monkeypatch.setattr(merged, "MOST_PARTS", parts)
            found = MergedBound(problem, bound)
            value = found.best(bound.value, optimum * 1.5, ENDLESS)
            assert value <= optimum * (1 + 1e-12)
            assert bound.value <= value * (1 + 1e-9)
            assert found.best(bound.value, optimum * 0.9, ENDLESS) <= optimum * 0.9
            for target in (optimum * 0.99, optimum * 1.01):     # alone, and after each other, as `best` has them
                value, _, ahead = found._proven(target, ENDLESS, None)
                assert value <= optimum * (1 + 1e-12)
                assert found._proven(target * 0.995, ENDLESS, ahead)[0] <= min(optimum, target * 0.995) * (1 + 1e-12)
        # Labels of different bytes are not merged here, but two paths may still take the same bytes.
        compared += 1
        exact += found.best(bound.value, optimum * (1 - 1e-9), ENDLESS) == pytest.approx(optimum, rel=1e-6)
    assert exact >= 0.8 * compared > 0


def test_finer_cells_are_tried_while_columns_are_left():
    chain = random_chain(np.random.default_rng(0), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    bound = best_bound(problem)
    found = MergedBound(problem, bound)
    assert found.best(bound.value, bound.value * 1.2, 1) == pytest.approx(bound.value, rel=1e-12)
    values = [found.best(bound.value, bound.value * 1.2, effort) for effort in (1 << 8, 1 << 12, 1 << 24)]
    assert values == sorted(values)
    assert bound.value * 1.1 < values[-1]


def test_a_sweep_that_ends_early_rules_nothing_out():
    chain = random_chain(np.random.default_rng(0), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    found = MergedBound(problem, best_bound(problem))
    value, left, ahead = found._proven(found._value * 1.2, 100, None)
    assert (left < 0, ahead, value >= found._value * (1 - 1e-9)) == (True, None, True)


def test_efforts_with_merged_labels_bound_every_placement():
    for _ in range(30):
        chain = random_chain(RNG, 3, n_stages=6, n_patterns=4)
        budget = near_budget(RNG, chain)
        optimum = least(chain, budget)
        for effort in ("bound", "all"):
            found = solve(chain, budget, 0.0, effort=effort, solver="own")
            assert found.bound <= optimum * (1 + 1e-12)
            assert found.cost >= optimum * (1 - 1e-12)
