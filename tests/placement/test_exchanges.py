"""Exchanges and splices of paths beside slow searches of the same neighbours, on random chains."""

import numpy as np
import pytest
from random_chains import near_budget, random_chain

from ggml_sched.placement.solve import solve
from ggml_sched.placement.solve._exchange import improved, spliced
from ggml_sched.placement.solve.bound import best_bound, cheapest
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.search import improve, repair, splice

RNG = np.random.default_rng()


def problems(count, n_devices=2, n_graphs=1):
    """Random problems, each with its bound and the paths met that fit, and those that do not."""
    found = []
    while len(found) < count:
        chain = random_chain(RNG, n_devices, n_stages=int(RNG.integers(2, 9)), n_patterns=6, n_graphs=n_graphs)
        problem = Problem(chain, near_budget(RNG, chain))
        bound = best_bound(problem)
        if np.isfinite(bound.value) and len(problem.scarce) and bound.relaxations:
            found.append((problem, bound, [one.path for one in bound.relaxations if problem.fits(one.path)],
                          [one.path for one in bound.relaxations if not problem.fits(one.path)]))
    return found


def check(problem, path):
    """A path's stages have its classes, its states join, and it fits."""
    assert (problem.group[path] // problem.n_states ** 2 == problem.classes).all()
    assert (problem.before[path[1:]] == problem.after[path[:-1]]).all()
    assert problem.fits(path)


def others(problem, column):
    return range(problem.first[problem.group[column]], problem.first[problem.group[column] + 1])


@pytest.mark.parametrize("n_devices, n_graphs", [(2, 1), (3, 1), (2, 2)])
def test_no_exchange_of_one_or_two_stages_improves_what_was_improved(n_devices, n_graphs):
    for problem, bound, fitting, _ in problems(20, n_devices, n_graphs):
        for path in fitting:
            better = improve(problem, path, bound.multipliers)
            check(problem, better)
            assert problem.cost_of(better) <= problem.cost_of(path)
            for one in range(len(better)):
                for two in range(one, len(better)):
                    for new_one in others(problem, better[one]):
                        for new_two in others(problem, better[two]):
                            tried = better.copy()
                            tried[one] = new_one
                            tried[two] = new_two
                            assert not problem.fits(tried) or (
                                problem.cost_of(tried) >= problem.cost_of(better) * (1 - 1e-9))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_stages_change_places_on_a_full_device(order):
    """Only one of them fits the device.  The second saves 9 seconds there, the first takes 1 more elsewhere."""
    seconds, nbytes = np.array([[5.0, 6.0], [1.0, 10.0]])[[*order]], np.array([[10, 0], [10, 0]])
    path = np.array([0, 1])[[*order]] + [0, 2]
    improved(np.array([0, 2, 4]), np.array([0, 0, 1, 1]), seconds.ravel(), nbytes.reshape(-1, 1), np.array([10]), path,
             np.zeros(1), 1e-9, 8)
    assert path.tolist() == (np.array([1, 0])[[*order]] + [0, 2]).tolist()


def test_a_repaired_path_fits():
    repaired = 0
    for problem, bound, _, over in problems(40):
        for path in over:
            found = repair(problem, path, bound.multipliers)
            if found is not None:
                check(problem, found)
                repaired += 1
    assert repaired


def best_splice(problem, tables, columns, path):
    """The least seconds of the path with any part replaced that fits, by trying every part."""
    best = problem.cost_of(path)
    for table, column in zip(tables, columns, strict=True):
        for begin in range(len(path)):
            for end in range(begin, len(path)):
                reached, ways = {int(problem.before[path[begin]]): 0.0}, {int(problem.before[path[begin]]): []}
                for stage in range(begin, end + 1):
                    number, nearer, longer = problem.classes[stage], {}, {}
                    for after in range(problem.n_states):
                        state = min(reached, key=lambda state: reached[state] + table[number, state, after])
                        nearer[after] = reached[state] + table[number, state, after]
                        longer[after] = [*ways[state], column[number, state, after]]
                    reached, ways = nearer, longer
                last = int(problem.after[path[end]])
                if np.isfinite(reached[last]):
                    tried = np.array([*path[:begin], *ways[last], *path[end + 1:]])
                    if problem.fits(tried):
                        best = min(best, problem.cost_of(tried))
    return best


@pytest.mark.parametrize("n_devices, n_graphs", [(2, 1), (3, 1), (2, 2)])
def test_the_best_part_of_all_is_spliced_in(n_devices, n_graphs):
    won = 0
    for problem, bound, fitting, _ in problems(20, n_devices, n_graphs):
        rows = [bound.multipliers * scale for scale in (0.0, 0.7, 1.0)]
        found = [cheapest(problem, problem.cost + problem.bytes @ row) for row in rows]
        tables, columns = np.stack([table for table, _ in found]), np.stack([column for _, column in found])
        for path in fitting:
            new = path.copy()
            changed = spliced(problem.classes, problem.before, problem.after, problem.cost, problem.memory,
                              problem.budget, tables, columns, new, 1e-12)
            check(problem, new)
            assert changed == (problem.cost_of(new) < problem.cost_of(path))
            assert problem.cost_of(new) == pytest.approx(best_splice(problem, tables, columns, path), rel=1e-9)
            check(problem, splice(problem, path, bound))
            won += changed
    assert won


def test_less_effort_has_paths_that_fit_and_bounds_that_hold():
    for _ in range(40):
        chain = random_chain(RNG, 2, n_stages=9, n_patterns=6)
        budget = near_budget(RNG, chain)
        best = solve(chain, budget, 0.0)
        for effort in ("few", "some", "more", "most"):
            found = solve(chain, budget, 0.0, effort=effort)
            assert found.bound <= best.cost * (1 + 1e-12)
            assert found.cost >= best.cost * (1 - 1e-12)
            assert found.memory is None or all(n <= room for n, room in zip(found.memory, budget, strict=True))
