"""The bound by runs holds for every path that fits, is at least the bound by multipliers, and is above it where runs
have to share several devices."""

from dataclasses import replace

import numpy as np
import pytest
from random_chains import least, near_budget, random_chain

from ggml_sched.placement.chain import Chain
from ggml_sched.placement.solve import solve
from ggml_sched.placement.solve.bound import best_bound
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.runs import RunBound

RNG = np.random.default_rng()


def segments(n_stages, n_devices, change):
    """A chain whose stages are on one device each, the host last: a slow one without a budget; `change`: seconds to
    enter another device."""
    n = n_devices + 1
    order = [n_devices, *range(n_devices)]
    cost = np.full((n, n, n), np.inf)
    for state, device in enumerate(order):
        cost[device, :, state] = (4.0 if device == n_devices else 1.0) + change * (np.arange(n) != state)
    memory = np.diag([10] * n)
    start = np.full(n, np.inf)
    start[0] = 0.0
    return Chain((0,) * n_stages, (cost,), (memory,), start, tuple((device,) for device in order))


@pytest.mark.parametrize("n_devices, n_graphs", [(2, 1), (3, 1), (2, 2)])
def test_no_path_that_fits_costs_less_than_the_bound_by_runs(n_devices, n_graphs):
    for _ in range(40):
        chain = random_chain(RNG, n_devices, n_stages=int(RNG.integers(1, 6)), n_graphs=n_graphs)
        # Whatever the devices of the states are said to be.
        devices = tuple((int(device),) * n_graphs for device in RNG.integers(0, n_devices, len(chain.start)))
        chain = replace(chain, devices=devices)
        budget = near_budget(RNG, chain)
        problem, optimum = Problem(chain, budget), least(chain, budget)
        bound, by_runs = best_bound(problem), RunBound(problem)
        if bound.value == np.inf or not by_runs.helps:
            continue
        for cells in (1, 3, by_runs.cells):
            by_runs.cells = cells
            value, _ = by_runs.relax(bound.multipliers * RNG.uniform(0, 2, len(bound.multipliers)), 1e9)
            assert value <= optimum * (1 + 1e-12)
            before = bound.value
            by_runs.raise_(bound, 1e9)
            assert before <= bound.value
            assert bound.value <= optimum * (1 + 1e-12)


def test_every_scarce_device_of_a_path_is_entered():
    chain, budget = segments(8, 2, 0.5), [30, 30, 1000]
    problem = Problem(chain, budget)
    bound = best_bound(problem)
    alone = bound.value
    RunBound(problem).raise_(bound, np.inf)
    optimum = least(chain, budget)
    assert optimum == pytest.approx(6 + 2 * 4 + 2 * 0.5)
    assert alone < bound.value - 0.2
    assert bound.value <= optimum * (1 + 1e-12)


def test_a_bound_ends_at_what_is_sought():
    problem = Problem(segments(8, 2, 0.5), [30, 30, 1000])
    bound = best_bound(problem)
    stop = bound.value + 0.01
    RunBound(problem).raise_(bound, stop)
    assert bound.value == stop


def test_equal_calls_by_runs_give_equal_bounds():
    chain, budget = segments(60, 3, 0.25), [95, 105, 135, 10_000]
    one, two = (solve(chain, budget, 0.0, solver="own") for _ in range(2))
    assert (one.cost, one.bound, one.path) == (two.cost, two.bound, two.path)
    without = solve(replace(chain, devices=()), budget, 0.0, solver="own")
    assert one.bound >= without.bound
    assert one.bound <= one.cost


def test_devices_of_other_states_are_a_typed_error():
    chain = segments(3, 2, 0.5)
    with pytest.raises(ValueError, match="2 states, and 3 states"):
        Problem(replace(chain, devices=chain.devices[:2]), [10, 10, 10])
