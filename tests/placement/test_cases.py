"""Cases of arenas: the two parts of a case hold every placement of it, and are cut where the bound may rise most; and
what the search over cases proves is not above the price of any placement of the tables."""

import random
from itertools import product
from types import SimpleNamespace

import numpy as np
from placed_models import solution_of
from small_models import devices, layered, sized

import ggml_sched as gs
from ggml_sched.placement.arenas import Case, by_caches, halves
from ggml_sched.placement.branching import Branching
from ggml_sched.placement.candidates import Candidates
from ggml_sched.placement.chain import Choice
from ggml_sched.placement.devices import Links
from ggml_sched.placement.tables import Tables
from ggml_sched.placement.trials import Trials

CASE = Case((100, 80, 1000), (10, 20, 0), (None, True, None))


def test_a_case_is_cut_at_what_a_solution_needs_where_a_byte_is_worth_most():
    gain, (above, below) = halves(CASE, (30, 70, 500), (2.0, 1.0, 0.0), (0, 0, 0))
    assert gain == 50.0         # 50 bytes of the second device, for 20 of the first that are worth twice as much
    assert above == CASE._replace(floors=(10, 70, 0))
    assert below == CASE._replace(limits=(100, 69, 1000))
    # Arenas that are larger anyway raise nothing.
    gain, (above, below) = halves(CASE, (30, 70, 500), (2.0, 1.0, 0.0), (0, 45, 0))
    assert gain == 40.0
    assert above.floors == (30, 20, 0) and below.limits == (29, 80, 1000)


def test_a_case_whose_floors_are_what_is_needed_is_not_cut():
    assert halves(CASE, (10, 20, 500), (2.0, 1.0, 0.0), (0, 0, 0)) is None


def test_a_case_is_cut_at_whether_a_device_has_caches():
    gain, (there, not_there) = by_caches(CASE, (2e-6, 9e-6, 0.0))
    assert gain == 2e-6         # it is decided for the second device
    assert there == CASE._replace(caches=(True, True, None))
    assert not_there == CASE._replace(caches=(False, True, None))
    assert by_caches(CASE, (0.0, 9e-6, 0.0)) is None


def cheapest_of_the_tables(model, tables, chain):
    """The least seconds of the real plans, within the budgets, of all paths through a chain."""
    best, n = np.inf, chain.cost[0].shape[1]
    for patterns in product(*(range(len(chain.cost[c])) for c in chain.classes)):
        for states in product(range(n), repeat=len(patterns) + 1):
            path = [Choice(*each) for each in zip(patterns, states[:-1], states[1:], strict=True)]
            solution = solution_of(chain, path)
            if np.isfinite(solution.cost):
                assignment = tables.assignment(chain, solution)
                trial = model.run(assignment.residents, assignment.nodes)
                best = min(best, trial.seconds if trial.fits else np.inf)
    return best


def test_no_placement_of_the_tables_undercuts_what_cases_prove():
    parts = []
    for seed in range(6):
        graphs = [layered(random.Random(seed), 1, tokens) for tokens in (1, 64)]
        given = devices(random.Random(seed), 2, sum(sized(graphs[0]).values()))[::-1]
        links = Links(given, gs.Link(5e8, 1e-6))
        model = Trials(graphs, given, links, (1.0, 0.0), 1.0)
        tables = Tables(model.facts, model.weights, given, links, [False, False], {})
        bound = Branching(Candidates([model], given, 0.001, False, 0.0), [tables], [{}]).run()
        best = cheapest_of_the_tables(model, tables, tables.chain())
        assert bound <= best * (1 + 1e-9)
        parts.append(bound / best)
    assert max(parts) > 0.999


def test_the_costliest_efforts_are_tried_a_few_times_where_a_bound_is_far_from_the_best():
    efforts = []
    candidates = SimpleNamespace(budgets=(1, 1), best=SimpleNamespace(seconds=2.0), within=0.001, cutoff=2.0,
                                 solve=lambda chain, floors, cutoff, effort: efforts.append(effort))
    branching, made = Branching(candidates, [], []), SimpleNamespace(chain=None, floors=())
    for bound in (1.0, 1.999, 1.0, 1.0, 1.0):       # the second is near enough
        assert branching._most(made, bound) is None
    assert efforts == ["more", "most", "more", "more"]


def test_a_trial_has_the_splits_of_the_graphs_that_the_goal_counts():
    graphs = [layered(random.Random(0), 1, tokens) for tokens in (1, 64)]
    given = devices(random.Random(0), 2, sum(sized(graphs[0]).values()))[::-1]
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0)):
        model = Trials(graphs, given, Links(given, gs.Link(5e8, 1e-6)), weights, 1.0)
        trial = model.run({name: k % 2 for k, name in enumerate(model.sizes)})
        counted = [plan.data.n_splits for plan, weight in zip(trial.plans, weights, strict=True) if weight]
        assert trial.splits == sum(counted) > len(counted)
