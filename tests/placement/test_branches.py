"""The bound by branch and bound over numbers of columns holds for every path that fits, and is the best path's seconds
where parts are divided until nothing is left to divide."""

import numpy as np
import pytest
from random_chains import least, near_budget, random_chain

from ggml_sched.placement.chain import Chain
from ggml_sched.placement.solve import branches, solve
from ggml_sched.placement.solve.bound import Bound, best_bound, bound_from
from ggml_sched.placement.solve.branches import Branches
from ggml_sched.placement.solve.problem import Problem

RNG = np.random.default_rng()
ENDLESS = 1 << 30


@pytest.mark.parametrize("n_devices, n_graphs", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_no_path_that_fits_costs_less_than_the_bound_by_branches(n_devices, n_graphs, monkeypatch):
    exact = compared = 0
    for _ in range(40):
        chain = random_chain(RNG, n_devices, n_stages=int(RNG.integers(1, 6)), n_graphs=n_graphs)
        budget = near_budget(RNG, chain)
        problem, optimum = Problem(chain, budget), least(chain, budget)
        bound = best_bound(problem)
        if bound.value == np.inf or optimum == np.inf:
            continue
        for rows, effort in ((1, ENDLESS), (3, ENDLESS), (30, 30_000), (60, ENDLESS)):
            monkeypatch.setattr(branches, "MAX_ROWS", rows)
            found = Branches(problem, bound)
            value = found.best(optimum * 1.5, effort)
            assert bound.value * (1 - 1e-12) <= value <= optimum * (1 + 1e-12)
            if found.path is not None:
                assert problem.fits(found.path)
                assert problem.cost_of(found.path) >= optimum * (1 - 1e-12)
            for part in (0.9, 1 + 1e-9, 1.001):
                assert Branches(problem, bound).best(optimum * part, effort) <= optimum * min(part, 1 + 1e-12)
        compared += 1
        exact += value == pytest.approx(optimum, rel=1e-4)
        assert found.is_stuck and problem.cost_of(found.path) == pytest.approx(value, rel=1e-4)
    assert exact == compared > 0


def test_paths_are_divided_while_columns_are_left():
    chain = random_chain(np.random.default_rng(0), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    bound = best_bound(problem)
    assert Branches(problem, bound).best(bound.value * 1.2, 0) == bound.value
    values = [Branches(problem, bound).best(bound.value * 1.2, effort) for effort in (1, 1 << 18, 1 << 24)]
    assert values == sorted(values)
    assert bound.value * 1.1 < values[-1]


def test_paths_of_the_last_bound_that_do_not_fit_are_repaired():
    chain = random_chain(np.random.default_rng(6), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((low + high) // 2).tolist())
    found = Branches(problem, best_bound(problem))
    assert found.mixture and not any(problem.fits(one.path) for one in found.mixture)
    found.best(np.inf, 0)
    assert found.path is not None and problem.fits(found.path)


@pytest.mark.parametrize(("bytes_", "room", "value"), [(10, 15, 4.5), (1000, 1005, 4.995)],
                         ids=["half", "nearly whole"])
def test_a_path_has_a_whole_number_of_stages_on_a_device(bytes_, room, value):
    """A number that is nearly whole is not taken for whole where all numbers are."""
    # A stage takes 1 second on the device, or 2 seconds on the host.  One and a half stages, or 1.005, would fit.
    chain = Chain((0, 0, 0), (np.array([[[1.0]], [[2.0]]]),), (np.array([[bytes_, 0], [0, bytes_]]),), np.zeros(1),
                  ((0,),))
    problem = Problem(chain, [room, 10 * bytes_])
    bound = best_bound(problem)
    assert bound.value == pytest.approx(value)
    assert Branches(problem, bound).best(10.0, ENDLESS) == pytest.approx(5.0)


def test_whole_numbers_of_columns_in_an_order_that_no_path_has_are_divided_by_states():
    """Each of two classes is cheap on a device of its own, and changing devices costs as much as it saves."""
    tables = []
    for own in (0, 1):
        cost = np.full((2, 2, 2), np.inf)
        for d in (0, 1):
            cost[d, :, d] = (1.0 if d == own else 4.0) + 3.0 * (np.arange(2) != d)
        tables.append(cost)
    chain = Chain((0, 0, 0, 1, 0, 0, 0, 1), tuple(tables), (np.eye(2, dtype=int),) * 2, np.zeros(2), ((0,), (1,)))
    problem, optimum = Problem(chain, [4, 4]), least(chain, [4, 4])
    search = Branches(problem, best_bound(problem))
    assert search.best(optimum * 2, ENDLESS) == pytest.approx(optimum, rel=1e-4)     # 20 of 23 seconds without states
    assert problem.fits(search.path) and problem.cost_of(search.path) == pytest.approx(optimum)


def test_a_bound_that_begins_at_a_basis_is_the_same():
    """The basis of the bound with fewer rows, where the mean of its paths exceeds one more row."""
    chain = random_chain(np.random.default_rng(0), 3, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    bound = best_bound(problem)
    planes = [of for kind, of in bound.basis if kind == "plane"]
    memory = np.stack([one.memory for one in planes])
    begun = branches.begun(bound.basis, planes)
    assert sorted(number for kind, number in begun if kind == "plane") == list(range(len(planes)))
    again = bound_from(problem, Bound(-np.inf, np.zeros(len(problem.budget))), planes, memory, basis=begun)
    assert again.value == pytest.approx(bound.value, rel=1e-6)
    assert len(again.relaxations) < len(bound.relaxations)
    assert branches.begun(bound.basis, planes[1:]) == []


def test_a_call_goes_on_where_the_last_one_ended():
    chain = random_chain(np.random.default_rng(0), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    bound = best_bound(problem)
    stop = bound.value * 1.15
    search, values = Branches(problem, bound), [bound.value]
    assert search.value == bound.value and search.mixture == bound.mixture
    while values[-1] < stop and len(values) < 1000:
        values.append(search.best(stop, 1))
        assert search.is_stuck or values[-1] == min(stop, search.value)
    assert values == sorted(values) and values[-1] == Branches(problem, bound).best(stop, ENDLESS) == stop
    assert len(values) > 2


def test_a_search_is_stuck_where_the_part_with_the_least_bound_is_divided_no_more(monkeypatch):
    monkeypatch.setattr(branches, "MAX_ROWS", 1)
    chain = random_chain(np.random.default_rng(0), 2, n_stages=12, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    problem = Problem(chain, ((2 * low + high) // 3).tolist())
    bound = best_bound(problem)
    search = Branches(problem, bound)
    assert not search.is_stuck
    value = search.best(bound.value * 1.2, ENDLESS)
    assert search.is_stuck and value == search.value
    assert min(one.cost for one in search.mixture) <= value <= max(one.cost for one in search.mixture) * (1 + 1e-4)
    assert search.best(bound.value * 1.2, ENDLESS) == value


def test_the_same_call_gives_the_same_bound_and_path():
    chain = random_chain(np.random.default_rng(2), 3, n_stages=10, n_patterns=4, largest=1000)
    low, high = (sum(of(chain.memory[number], 0) for number in chain.classes) for of in (np.min, np.max))
    budget = ((low + high) // 2).tolist()
    one, two = (solve(chain, budget, 0.0, effort="all", solver="own") for _ in range(2))
    assert (one.cost, one.bound, one.path) == (two.cost, two.bound, two.path)
