"""solve() against brute force on small random chains: what it returns fits, is near the least, and its bound holds."""

import itertools

import numpy as np
import pytest
from random_chains import least, near_budget, random_chain

import ggml_sched.placement.solve as solver_room
from ggml_sched.placement.chain import Chain, Solution
from ggml_sched.placement.solve import solve
from ggml_sched.placement.solve.bound import best_bound, relax
from ggml_sched.placement.solve.counts import Counts, has_highs, linear
from ggml_sched.placement.solve.master import Master
from ggml_sched.placement.solve.problem import Problem

RNG = np.random.default_rng()


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


def mirrored(rng, chain, one, two):
    """A chain in which two devices are equal: every pattern has one with the devices exchanged."""
    n = chain.memory[0].shape[1]
    device = np.arange(n)
    device[one], device[two] = two, one
    states = device if len(chain.start) == n else (device[:, None] * n + device).reshape(-1)
    cost = tuple(np.concatenate([table, table[:, states][:, :, states]]) for table in chain.cost)
    memory = tuple(np.concatenate([table, table[:, device]]) for table in chain.memory)
    start = np.minimum(chain.start, chain.start[states])
    return Chain(chain.classes, cost, memory, start, chain.devices)


def near_the_best(chain, budget, within, solver="own"):
    found, optimum = solve(chain, budget, within, solver=solver), least(chain, budget)
    seconds = checked(chain, budget, found)
    assert found.bound <= optimum * (1 + 1e-12)
    assert (found.bound == np.inf) == (optimum == np.inf)
    if optimum < np.inf:
        assert optimum * (1 - 1e-12) <= seconds <= optimum * (1 + within) * (1 + 1e-12)
        assert seconds <= found.bound * (1 + within) * (1 + 1e-9)
    return found


@pytest.mark.parametrize("within", [0.005, 0.0])
@pytest.mark.parametrize("n_devices, n_graphs", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_solutions_are_near_the_best_of_all_combinations(n_devices, n_graphs, within):
    for _ in range(25):
        chain = random_chain(RNG, n_devices, n_stages=int(RNG.integers(1, 6)), n_graphs=n_graphs)
        near_the_best(chain, near_budget(RNG, chain), within)


@pytest.mark.parametrize("n_devices, n_graphs", [(2, 1), (3, 1), (2, 2)])
def test_chains_with_equal_devices_are_solved_like_others(n_devices, n_graphs):
    for _ in range(40):
        chain = random_chain(RNG, n_devices, n_stages=int(RNG.integers(2, 5)), n_graphs=n_graphs, n_patterns=2)
        chain = mirrored(RNG, chain, 0, n_devices - 1)
        budget = near_budget(RNG, chain)
        budget[-1] = budget[0]
        near_the_best(chain, budget, 0.0)


@pytest.mark.skipif(not has_highs(), reason="needs the extra fit")
def test_highs_gives_counts_whose_paths_are_near_the_best(monkeypatch):
    # Labels that prove nothing leave the work to the counts.
    monkeypatch.setattr(solver_room, "EFFORTS", {"all": ((1, 1),), "some": ((1, 1),)})
    for n_devices, n_graphs in [(2, 1), (3, 1), (2, 2)] * 10:
        chain = random_chain(RNG, n_devices, n_classes=2, n_stages=5, n_graphs=n_graphs, n_patterns=3)
        budget = near_budget(RNG, chain)
        found, optimum = solve(chain, budget, 0.0, solver="highs"), least(chain, budget)
        checked(chain, budget, found)
        assert found.bound <= optimum * (1 + 1e-12)
        if found.path is not None and found.cost > optimum * (1 + 1e-5):
            assert found.bound < found.cost


def test_a_bound_is_the_mean_of_paths_that_keep_the_budgets_together():
    mixed = 0
    for n_devices in (2, 3) * 10:
        chain = random_chain(RNG, n_devices, n_classes=2, n_stages=8)
        problem = Problem(chain, near_budget(RNG, chain))
        bound = best_bound(problem)
        if not np.isfinite(bound.value) or not len(problem.scarce):
            continue
        master = Master(len(problem.scarce), 1e6)
        unit = np.maximum(problem.total, 1.0)
        for met in bound.relaxations:
            master.add(met.cost / problem.dearest, (met.memory - problem.budget) / unit)
        promised, _ = master.solve()
        shares = master.shares()
        assert sum(part for _, part in shares) == pytest.approx(1.0, abs=1e-5)
        mean = sum(part * bound.relaxations[plane].cost for plane, part in shares)
        assert mean == pytest.approx(promised * problem.dearest, rel=1e-4)
        assert mean == pytest.approx(bound.value, rel=1e-4)
        over = sum(part * (bound.relaxations[plane].memory - problem.budget) / unit for plane, part in shares)
        assert (over <= 1e-5).all()
        assert {id(met) for met in bound.mixture} <= {id(met) for met in bound.relaxations}
        mixed += len(bound.mixture) > 1
    assert mixed > 5


def test_highs_that_is_not_installed_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(solver_room, "has_highs", lambda: False)
    chain = Chain((0,), (np.ones((1, 1, 1)),), (np.zeros((1, 0), int),), np.zeros(1))
    with pytest.raises(ValueError, match=r"ggml-sched\[fit\]"):
        solve(chain, [], solver="highs")
    assert solve(chain, []).cost == 1.0


def all_counts(chain, budget):
    """A problem, and the counts of all its columns."""
    problem = Problem(chain, budget)
    counts = Counts(problem, np.arange(len(problem.cost)))
    return problem, counts


def test_the_counts_of_a_path_become_a_path_of_equal_seconds_and_bytes():
    for _ in range(60):
        chain = random_chain(RNG, 2, n_classes=2, n_stages=4)
        chain = Chain((0, 1) * 5, (*chain.cost, *chain.cost)[:2], (*chain.memory, *chain.memory)[:2], chain.start)
        budget = near_budget(RNG, chain)
        problem, counts = all_counts(chain, budget)
        visited = relax(problem, np.zeros(len(problem.scarce)))
        if visited is None:
            continue
        used = np.bincount(visited.path, minlength=len(problem.cost))
        begins = (counts.begins - counts.first == problem.before[visited.path[0]]).astype(int)
        ends = (np.arange(problem.n_states) == problem.after[visited.path[-1]]).astype(int)
        solution = np.concatenate([used, begins, ends])
        program = counts.program
        sums = program.rows @ solution
        rows = slice(0, len(sums) - len(problem.scarce))
        assert (program.low[rows] == sums[rows]).all() and (sums[rows] == program.high[rows]).all()
        assert program.cost @ solution == pytest.approx(visited.cost)
        path = counts.path(solution)
        assert path is not None and sorted(path) == sorted(visited.path)
        assert not counts.cut(solution)


def test_parts_that_nothing_enters_are_cut():
    """Ten stages in state 0, or some of them in a circle in state 1 that no stage enters."""
    seconds = np.full((1, 2, 2), np.inf)
    seconds[0] = [[5.0, 9.0], [9.0, 1.0]]
    chain = Chain((0,) * 10, (seconds,), (np.zeros((1, 1), int),), np.array([0.0, np.inf]))
    problem, counts = all_counts(chain, [1])
    state = {int(problem.before[i]): i for i in range(len(problem.cost)) if problem.before[i] == problem.after[i]}
    lost = np.zeros(len(counts.program.cost), int)
    lost[state[0]], lost[state[1]], lost[len(problem.cost)], lost[len(problem.cost) + 1] = 1, 9, 1, 1
    rows = len(counts.program.rows)
    assert counts.path(lost) is None and counts.cut(lost)
    assert len(counts.program.rows) == rows + 1
    assert counts.program.rows[-1] @ lost < counts.program.low[-1]
    for path in itertools.product((0, 1), repeat=10):
        columns = [next(i for i in range(len(problem.cost)) if problem.before[i] == a and problem.after[i] == b)
                   for a, b in zip((0, *path[:-1]), path, strict=True)]
        used = np.concatenate([np.bincount(columns, minlength=len(problem.cost)), [1], np.eye(2, dtype=int)[path[-1]]])
        assert counts.program.rows[-1] @ used >= counts.program.low[-1]


def entered_chain(n_devices, n_stages):
    """A random chain that begins on device 0, a budget, and all of its paths that fit, as counts of the columns."""
    made = random_chain(RNG, n_devices, n_classes=2, n_stages=n_stages, n_patterns=3)
    start = np.where(np.arange(len(made.start)) == 0, 0.0, np.inf)
    chain = Chain(made.classes, made.cost, made.memory, start, made.devices)
    budget = near_budget(RNG, chain)
    problem, counts = all_counts(chain, budget)
    paths = [np.zeros(0, np.int64)]
    for number in chain.classes:
        of_class = np.flatnonzero(problem.group // problem.n_states ** 2 == number)
        paths = [np.append(path, column) for path in paths for column in of_class
                 if problem.before[column] == (problem.after[path[-1]] if len(path) else 0)]
    return problem, counts, [path for path in paths if problem.fits(path)]


def solution_of(problem, path):
    """The values of the program's variables for a path that begins in the only state that it can begin in."""
    ends = (np.arange(problem.n_states) == problem.after[path[-1]]).astype(int)
    return np.concatenate([np.bincount(path, minlength=len(problem.cost)), [1], ends])


def test_rows_that_connect_columns_hold_for_every_path_that_fits():
    rows = 0
    for n_devices in (2, 3) * 6:
        problem, counts, paths = entered_chain(n_devices, 4)
        before = len(counts.program.rows)
        counts.connect()
        program = counts.program
        rows += len(program.rows) - before
        for path in paths:
            sums = program.rows @ solution_of(problem, path)
            assert (sums >= program.low - 1e-9).all() and (sums <= program.high + 1e-9).all()
    assert rows > 30


def test_rows_that_connect_columns_exclude_a_circle_that_nothing_enters():
    seconds = np.array([[[5.0, 9.0], [9.0, 1.0]]])
    chain = Chain((0,) * 10, (seconds,), (np.array([[0, 1]]),), np.array([0.0, np.inf]), ((0,), (1,)))
    problem, counts = all_counts(chain, [1, 9])
    circle = np.zeros(len(counts.program.cost), int)
    for state, times in ((0, 1), (1, 9)):
        circle[np.flatnonzero((problem.before == state) & (problem.after == state))] = times
    circle[len(problem.cost)] = circle[len(problem.cost) + 1] = 1
    assert (counts.program.rows[:4] @ circle == counts.program.low[:4]).all()
    old = len(counts.program.rows)
    counts.connect()
    short = counts.program.rows[old:] @ circle < counts.program.low[old:]
    assert short.sum() == 2         # the one by stages, and the one by bytes


@pytest.mark.skipif(not has_highs(), reason="needs the extra fit")
def test_the_linear_program_bounds_all_paths_and_those_with_each_column():
    near = []
    for n_devices in (2, 3) * 6:
        problem, counts, paths = entered_chain(n_devices, 4)
        counts.connect()
        bound, least_with = linear(counts.program)
        costs = np.array([problem.cost_of(path) for path in paths])
        if not len(costs):
            continue
        assert bound <= costs.min() * (1 + 1e-12)
        near.append(bound / costs.min())
        for path, seconds in zip(paths, costs, strict=True):
            assert (least_with[path] <= seconds * (1 + 1e-12)).all()
    assert max(near) > 0.999


@pytest.mark.skipif(not has_highs(), reason="needs the extra fit")
def test_the_linear_program_says_that_nothing_fits():
    chain = Chain((0,), (np.ones((1, 1, 1)),), (np.array([[5]]),), np.zeros(1), ((0,),))
    _, counts = all_counts(chain, [4])
    bound, least_with = linear(counts.program)
    assert bound == np.inf and (least_with == np.inf).all()


@pytest.mark.skipif(not has_highs(), reason="needs the extra fit")
@pytest.mark.parametrize("columns", [1, 6, 1000])
def test_a_proof_by_the_columns_of_cheap_paths_holds_for_all_paths(columns, monkeypatch):
    """Labels prove nothing here, so that the bound is that of the counts."""
    monkeypatch.setattr(solver_room, "EFFORTS", {"all": ((1, 1),), "some": ((1, 1),)})
    monkeypatch.setattr(solver_room, "MERGED", {})
    monkeypatch.setattr(solver_room, "COUNTED", {"all": ((columns, 100),)})
    parts = []
    for n_devices in (2, 3) * 8:
        made = random_chain(RNG, n_devices, n_classes=2, n_stages=5, n_patterns=3)
        start = np.where(np.arange(len(made.start)) == 0, 0.0, np.inf)
        chain = Chain(made.classes, made.cost, made.memory, start, made.devices)
        budget = near_budget(RNG, chain)
        found, optimum = solve(chain, budget, 0.0, effort="all"), least(chain, budget)
        checked(chain, budget, found)
        assert found.bound <= optimum * (1 + 1e-12)
        if optimum < np.inf:
            parts.append(found.bound / optimum)
    assert max(parts) > 0.999 and (columns < 1000 or np.median(parts) > 0.999)


def test_a_budget_one_byte_short_of_what_a_solution_takes_is_never_exceeded():
    for _ in range(30):
        chain = random_chain(RNG, 2, largest=1 << 40)
        found = near_the_best(chain, near_budget(RNG, chain), 0.0)
        for device in range(2 if found.memory else 0):
            short = list(found.memory)
            short[device] -= 1
            assert near_the_best(chain, short, 0.0).cost >= found.cost


def test_a_cutoff_ends_the_search_and_leaves_the_bound_true():
    for _ in range(40):
        chain = random_chain(RNG, 2)
        budget = near_budget(RNG, chain)
        optimum = least(chain, budget)
        for cutoff in (optimum * 0.9, optimum * 1.1) if optimum < np.inf else (3.0,):
            found = solve(chain, budget, 0.0, cutoff=cutoff)
            assert checked(chain, budget, found) >= optimum * (1 - 1e-12)
            assert found.bound <= optimum * (1 + 1e-12)
            assert found.bound >= min(cutoff, optimum) * (1 - 1e-9)
            assert optimum > cutoff or found.cost <= optimum * (1 + 1e-9)


def test_equal_calls_give_equal_solutions():
    for _ in range(20):
        chain = random_chain(RNG, 3, n_stages=12)
        budget = near_budget(RNG, chain)
        assert vars(solve(chain, budget, 0.0)) == vars(solve(chain, budget, 0.0))


def test_more_bytes_never_cost_more():
    for _ in range(30):
        chain = random_chain(RNG, 2, n_stages=20)
        budget = near_budget(RNG, chain)
        wider = [bytes_ + int(RNG.integers(0, 40)) for bytes_ in budget]
        assert solve(chain, wider, 0.0).cost <= solve(chain, budget, 0.0).cost * (1 + 1e-12)


def test_multipliers_are_what_a_byte_is_worth():
    seconds = np.array([[[1.0]], [[3.0]]])
    chain = Chain((0,) * 10, (seconds,), (np.array([[4, 0], [0, 4]]),), np.zeros(1))
    found = solve(chain, [20, 100], 0.0)
    assert found.cost == 20.0 and found.bound == pytest.approx(20.0)
    assert found.multipliers == pytest.approx((0.5, 0.0))


@pytest.mark.parametrize("change, error, words", [
    ({"classes": ()}, ValueError, "needs a stage"),
    ({"classes": (0, 1)}, ValueError, "classes 0 .. 1, 1 have"),
    ({"classes": (-1,)}, ValueError, "classes -1"),
    ({"classes": (0.5,)}, TypeError, "float"),
    ({"start": np.zeros(0)}, ValueError, "start has the shape"),
    ({"start": np.zeros((1, 1))}, ValueError, "start has the shape"),
    ({"start": np.array([np.nan])}, ValueError, "start has negative seconds, or NaN"),
    ({"start": np.array([-1.0])}, ValueError, "start has negative seconds, or NaN"),
    ({"cost": (np.zeros((1, 2, 2)),)}, ValueError, r"class 0: seconds of shape \(1, 2, 2\)"),
    ({"cost": (np.array([[[np.nan]]]),)}, ValueError, "class 0: negative seconds, or NaN"),
    ({"cost": (np.array([[[-1.0]]]),)}, ValueError, "class 0: negative seconds, or NaN"),
    ({"cost": (np.array([[["a"]]]),)}, TypeError, "class 0: seconds are"),
    ({"cost": ()}, ValueError, "0 tables of seconds, 1 of bytes"),
    ({"memory": (np.zeros((2, 2), int),)}, ValueError, r"class 0: bytes of shape \(2, 2\)"),
    ({"memory": (np.zeros((1, 3), int),)}, ValueError, r"class 0: bytes of shape \(1, 3\)"),
    ({"memory": (np.zeros((1, 2)),)}, TypeError, "bytes float64"),
    ({"devices": ((0,), (1,))}, ValueError, "devices of 2 states, and 1 states"),
    ({"memory": (np.array([[-1, 0]]),)}, ValueError, "patterns of -1 .. 0 bytes"),
    ({"memory": (np.array([[1 << 60, 0]]),)}, ValueError, "patterns of 0 .. 1152921504606846976 bytes"),
])
def test_arrays_that_are_no_chain_are_typed_errors(change, error, words):
    fields = {"classes": (0,), "cost": (np.ones((1, 1, 1)),), "memory": (np.zeros((1, 2), int),), "start": np.zeros(1)}
    with pytest.raises(error, match=words):
        solve(Chain(**{**fields, **change}), [1, 1])


def test_a_path_of_too_many_bytes_is_a_typed_error():
    chain = Chain((0, 0), (np.ones((1, 1, 1)),), (np.array([[1 << 52]]),), np.zeros(1))
    with pytest.raises(ValueError, match="9007199254740992 bytes"):
        solve(chain, [1])


@pytest.mark.parametrize("arguments, error", [
    ({"within": -0.1}, ValueError), ({"within": float("nan")}, ValueError), ({"cutoff": float("nan")}, ValueError),
    ({"solver": "other"}, ValueError), ({"effort": "much"}, ValueError),
    ({"budget": [1.5, 1]}, TypeError), ({"budget": [1]}, ValueError)])
def test_arguments_are_checked(arguments, error):
    chain = Chain((0,), (np.ones((1, 1, 1)),), (np.zeros((1, 2), int),), np.zeros(1))
    with pytest.raises(error):
        solve(**{"chain": chain, "budget": [1, 1], **arguments})


@pytest.mark.parametrize("chain, budget", [
    (Chain((0,), (np.full((1, 1, 1), np.inf),), (np.zeros((1, 1), int),), np.zeros(1)), [5]),
    (Chain((0,), (np.ones((1, 1, 1)),), (np.zeros((1, 1), int),), np.full(1, np.inf)), [5]),
    (Chain((0,), (np.zeros((0, 1, 1)),), (np.zeros((0, 1), int),), np.zeros(1)), [5]),
    (Chain((0,), (np.ones((1, 1, 1)),), (np.ones((1, 1), int),), np.zeros(1)), [0]),
    (Chain((0,), (np.ones((1, 1, 1)),), (np.zeros((1, 1), int),), np.zeros(1)), [-1]),
], ids=["no states join", "no start", "no patterns", "one byte short", "negative budget"])
def test_nothing_fits_is_proven(chain, budget):
    found = solve(chain, budget)
    assert found.path is None and found.memory is None and found.cost == found.bound == np.inf


def test_a_chain_without_devices_is_a_shortest_path():
    chain = Chain((0, 0), (np.array([[[1.0, 5.0], [2.0, 1.0]]]),), (np.zeros((1, 0), int),), np.array([0.0, 0.5]))
    found = solve(chain, [])
    assert found.cost == found.bound == 2.0 and found.memory == ()


def test_equal_devices_of_many_stages_end_in_bounded_time():
    rng = np.random.default_rng(5)
    chain = mirrored(rng, random_chain(rng, 3, n_classes=2, n_stages=150, n_patterns=8, largest=1 << 30), 0, 1)
    low, high = (sum(getattr(chain.memory[number], which)(0) for number in chain.classes) for which in ("min", "max"))
    budget = (low + 0.4 * (high - low)).astype(int).tolist()
    budget[0] = budget[1] = min(budget[:2])
    found = solve(chain, budget, 0.0)
    checked(chain, budget, found)
    assert found.cost <= found.bound * 1.01
