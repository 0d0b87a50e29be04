"""Cases of arenas: the two parts of a case hold every placement of it, and are cut where the bound may rise most; and
what the search over cases proves is not above the price of any placement of the tables."""

import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from placed_models import CPU, FAST, GPU, solution_of, windowed
from small_models import devices, layered, sized

import ggml_sched as gs
from ggml_sched.placement import branching, last_bounds, open_cases
from ggml_sched.placement.arenas import Case, by_caches, first_case, halves, mirrored, mirrors
from ggml_sched.placement.branching import Branching
from ggml_sched.placement.candidates import Candidates
from ggml_sched.placement.chain import Chain, Choice, Solution
from ggml_sched.placement.devices import Links
from ggml_sched.placement.last_bounds import LastBounds
from ggml_sched.placement.open_cases import Open, OpenCases
from ggml_sched.placement.phases import Phase
from ggml_sched.placement.tables import Tables
from ggml_sched.placement.trials import Trials

CASE = Case((100, 80, 1000), (10, 20, 0), (None, True, None))
LINK = gs.Link(25e9, 8e-6)
LEVELS = tuple(np.array(levels) for levels in ((0, 10, 30), (0, 20, 50, 70), (0, 500)))


def test_a_case_is_cut_at_what_a_solution_needs_where_a_byte_is_worth_most():
    gain, (above, below) = halves(CASE, (30, 70, 500), (2.0, 1.0, 0.0), (0, 0, 0), LEVELS)
    assert gain == 50.0         # 50 bytes of the second device, for 20 of the first that are worth twice as much
    assert above == CASE._replace(floors=(10, 70, 0))
    assert below == CASE._replace(limits=(100, 69, 1000))
    # Arenas that are larger anyway raise nothing.
    gain, (above, below) = halves(CASE, (30, 70, 500), (2.0, 1.0, 0.0), (0, 45, 0), LEVELS)
    assert gain == 40.0
    assert above.floors == (30, 20, 0) and below.limits == (29, 80, 1000)


def test_a_case_is_cut_below_what_a_solution_needs_where_a_level_is_near():
    levels = (LEVELS[0], np.array([20, 50, 57, 58, 64, 70]), LEVELS[2])
    gain, (above, below) = halves(CASE, (30, 70, 500), (2.0, 1.0, 0.0), (0, 0, 0), levels)
    assert gain == 40.0         # 58 is the least level of at least three quarters of the way from 20 to 70
    assert above.floors == (30, 20, 0) and below.limits == (29, 80, 1000)
    gain, (above, below) = halves(CASE, (30, 70, 500), (1.0, 1.0, 0.0), (0, 0, 0), levels)
    assert gain == 38.0
    assert above.floors == (10, 58, 0) and below.limits == (100, 57, 1000)


def test_a_case_whose_floors_are_what_is_needed_is_not_cut():
    assert halves(CASE, (10, 20, 500), (2.0, 1.0, 0.0), (0, 0, 0), LEVELS) is None


def test_a_case_is_cut_at_whether_a_device_has_caches():
    gain, (there, not_there) = by_caches(CASE, (2e-6, 9e-6, 0.0), ((), (), ()))
    assert gain == 2e-6         # it is decided for the second device
    assert there == CASE._replace(caches=(True, True, None))
    assert not_there == CASE._replace(caches=(False, True, None))
    assert by_caches(CASE, (0.0, 9e-6, 0.0), ((), (), ())) is None


def test_caches_of_some_stages_decide_those_of_all_stages():
    """Two devices; the second set of stages, and the third, are parts of the first."""
    case, implied = Case((1, 1), (0, 0), (None,) * 6), ((), (), (0,), (1,), (0,), (1,))
    _, (there, not_there) = by_caches(case, (0.0, 1.0, 0.0, 2.0, 0.0, 0.0), implied)
    assert there.caches == (None, True, None, True, None, None)
    assert not_there.caches == (None, None, None, False, None, None)
    _, (there, not_there) = by_caches(case, (0.0, 3.0, 0.0, 2.0, 0.0, 0.0), implied)
    assert there.caches == (None, True, None, None, None, None)
    assert not_there.caches == (None, False, None, False, None, False)


def test_a_case_is_cut_at_what_any_path_of_its_bound_needs():
    """The path with the best value needs no more than the floors; another one, of which the bound is a mean, does."""
    needs = {"best": (10, 20, 0), "other": (10, 70, 500)}
    table = SimpleNamespace(levels=LEVELS, needed=lambda chain, path: needs[path[0]], implied=((), (), ()),
                            unpaid=lambda chain, path: (0.0, 0.0, 0.0))
    candidates = SimpleNamespace(within=0.005, turns=False, budgets=(100, 80, 1000),
                                 joined=lambda arenas: list(arenas[0]))
    chain = Chain((0,), (np.full((1, 1, 1), 5.0),), (np.zeros((1, 3), int),), np.zeros(1), ((2,),))
    made = Open((CASE,), ({},), (chain,), chain, CASE.floors,
                          Solution(5.0, 5.0, None, None, (2.0, 1.0, 0.0)), ())
    cases = OpenCases(candidates, [table])
    assert cases.halves(made, ()) is None
    assert cases.halves(made, (("best",),)) is None
    assert cases.halves(made, (("best",), ("other",))) == (
        (CASE._replace(floors=(10, 70, 0)),), (CASE._replace(limits=(100, 69, 1000)),))


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


def searched(seed):
    """A random small model on two devices: (its trials, its tables, candidates without a placement)."""
    graphs = [layered(random.Random(seed), 1, tokens) for tokens in (1, 64)]
    given = devices(random.Random(seed), 2, sum(sized(graphs[0]).values()))[::-1]
    links = Links(given, gs.Link(5e8, 1e-6))
    model = Trials(graphs, given, links, (1.0, 0.0), 1.0)
    tables = Tables(model.facts, model.weights, given, links, [False, False], {})
    return model, tables, Candidates([model], given, 0.001, False, 0.0)


def last_of(search):
    return LastBounds(search.cases, search.bounds, search._explore)


def test_branch_and_bound_goes_on_with_the_least_bound_also_of_searched_cases():
    def branched(made, bound, turn):
        heard.append(bound)
        made.branches = SimpleNamespace(value=bound, is_stuck=True, path=None)
        return bound

    heard, chain = [], Chain((0,), (np.full((1, 1, 1), 5.0),), (np.zeros((1, 3), int),), np.zeros(1), ((2,),))
    candidates = SimpleNamespace(within=0.005, budgets=(100, 80, 1000), best=SimpleNamespace(seconds=10.0),
                                 is_near=lambda bound: False, is_late=False)
    cases = OpenCases(candidates, [])
    for add, bound in ((cases.put, 5.0), (cases.put, 7.0), (cases.weaken, 3.0)):
        add(bound, Open((CASE,), ({},), (), chain, CASE.floors, Solution(5.0, 5.0, None, None, ()), (), is_parted=True))
    last = LastBounds(cases, SimpleNamespace(branched=branched), None)
    last._parted = lambda made, bound: False
    assert last.raised() == 3.0 and heard == [3.0]


def test_no_placement_of_the_tables_undercuts_what_cases_prove():
    parts = []
    for seed in range(6):
        model, tables, candidates = searched(seed)
        bound = Branching(candidates, [tables], [{}]).run()
        best = cheapest_of_the_tables(model, tables, tables.chain())
        assert bound <= best * (1 + 1e-9)
        parts.append(bound / best)
    assert max(parts) > 0.999


def test_caches_of_one_window_prove_no_copies_of_the_inputs_of_another():
    """The caches of two layers of four fit beside the weights, and two layers read one mask: the device needs a copy
    of one mask."""
    graph = windowed(4, cells=512)
    held = {t.name: t.nbytes for t in graph.tensors if t.resident and t.view_src is None}
    pins = {name: int(name == "embd") for name in held if not name.endswith((".keys", ".values"))}
    room = sum(held[name] for name, d in pins.items() if not d) + 5 * held["l0.keys"]
    given = (FAST.replace(memory=room), CPU)
    links = Links(given, LINK)
    model = Trials([graph], given, links, (1.0,), 1.0)
    tables = Tables(model.facts, model.weights, given, links, [False], pins)
    candidates = Candidates([model], given, 1e-6, False, 0.0)
    bound = Branching(candidates, [tables], [pins]).run()
    best = cheapest_of_the_tables(model, tables, tables.chain())
    assert candidates.best.seconds == pytest.approx(best, rel=1e-9)
    assert best * (1 - 1e-4) <= bound <= best * (1 + 1e-9)


def test_how_long_copies_last_proves_no_more_than_the_placements_of_the_tables_allow(monkeypatch):
    """The masks are a large part of the arenas; each case is parted so where that may raise its bound at all."""
    monkeypatch.setattr(open_cases, "MAX_DEVICES", 1)
    monkeypatch.setattr(open_cases, "FAR", 1e-6)
    monkeypatch.setattr(last_bounds, "LASTING", -np.inf)
    parted = []
    by_lasting = LastBounds._by_lasting
    monkeypatch.setattr(LastBounds, "_by_lasting", lambda *given: parted.append(by_lasting(*given)) or parted[-1])
    graph = windowed(4, tokens=16, cells=512)
    held = {t.name: t.nbytes for t in graph.tensors if t.resident and t.view_src is None}
    pins = {name: int(name == "embd") for name in held if not name.endswith((".keys", ".values"))}
    fixed = sum(held[name] for name, d in pins.items() if not d)
    for cached in (3, 5, 7):
        given = (FAST.replace(memory=fixed + cached * held["l0.keys"]), CPU)
        links = Links(given, LINK)
        model = Trials([graph], given, links, (1.0,), 1.0)
        tables = Tables(model.facts, model.weights, given, links, [False], pins)
        candidates = Candidates([model], given, 1e-6, False, 0.0)
        search = Branching(candidates, [tables], [pins])
        best = cheapest_of_the_tables(model, tables, tables.chain())
        search.run()
        again = last_of(Branching(candidates, [tables], [pins]))
        again.cases.add((first_case(tables.needs, candidates.budgets, len(tables.readers)),), ({},), 0.0)
        with monkeypatch.context() as patch:
            for name in ("halves", "halves_at"):
                patch.setattr(OpenCases, name, lambda *given: None)
            assert again.raised() <= best * (1 + 1e-9)
    assert any(parted)


def test_a_case_that_is_parted_by_how_long_copies_last_is_bounded_at_the_end(monkeypatch):
    """Kinds of placements divide no chain with phases: its tables have more rows than the patterns of these kinds."""
    monkeypatch.setattr(open_cases, "FAR", 1.0)
    graph = windowed(4, tokens=16, cells=512)
    held = {t.name: t.nbytes for t in graph.tensors if t.resident and t.view_src is None}
    pins = {name: int(name == "embd") for name in held if not name.endswith((".keys", ".values"))}
    given = (FAST.replace(memory=sum(held[name] for name, d in pins.items() if not d) + 3 * held["l0.keys"]), CPU)
    links = Links(given, LINK)
    model = Trials([graph], given, links, (1.0,), 1.0)
    tables = Tables(model.facts, model.weights, given, links, [False], pins)
    candidates = Candidates([model], given, 1e-6, False, 0.0)
    Branching(candidates, [tables], [pins]).run()
    search = Branching(candidates, [tables], [pins])
    search.cases.add((first_case(tables.needs, candidates.budgets, len(tables.readers)),), ({},), 0.0,
                     (Phase(0, 0, 80_000),))
    [(bound, _, made)] = search.cases.left
    assert made.phased is not None and bound < candidates.best.seconds * 0.95
    assert last_of(search).raised() >= bound


def test_a_placement_is_solved_again_with_its_arenas_and_with_caches_where_it_has_them(monkeypatch):
    """On three devices: first with few labels in its own case, then thoroughly in the case of its arenas and caches."""
    best = SimpleNamespace(cases=(CASE,), shared=({},), arenas=(3, 4, 5), seconds=2.0, residents=({"cache": 1},),
                           nodes=("assigned",))
    candidates = SimpleNamespace(budgets=[100, 80, 1000], best=best, fine=0.0, cutoff=2.0, is_late=False,
                                 is_near=lambda bound: False)
    # One set of stages with caches, and one input that the placement copies to the first device.
    table = SimpleNamespace(readers=((True,),), devices=(0, 1, 2), caches_of=lambda residents, nodes: (
        *(d >= residents["cache"] for d in range(3)), nodes == "assigned", False, False))
    solved = []
    monkeypatch.setattr(branching, "chains_of", lambda tables, cases, shared: solved.append(list(cases)) or [cases])
    monkeypatch.setattr(branching, "joined", lambda chains: chains[0])
    candidates.solve = lambda chain, arenas, *, cutoff, effort, part: solved[-1].append((tuple(arenas), effort))
    search = Branching(candidates, [table], [{}])
    search._polish()
    assert solved == [[CASE, ((3, 4, 5), "some")],
                      [Case((100, 80, 1000), (3, 4, 5), (False, True, True, True, None, None)), ((3, 4, 5), "all")]]
    candidates.is_near = lambda bound: True
    search._polish()
    assert len(solved) == 2


def test_a_placement_is_solved_again_with_the_arenas_that_the_plan_of_the_first_solution_needs(monkeypatch):
    plans = iter([SimpleNamespace(arenas=(3, 9, 5), missing=missing) for missing in ((0, 4, 0), (0, 0, 0))])
    solved = []

    def solve(chain, arenas, *, cutoff, effort, part):
        solved.append(tuple(arenas))
        return Solution(1.0, 1.0, (Choice(0, 0, 0),), (0, 0, 0), (0.0, 0.0, 0.0))

    candidates = SimpleNamespace(fine=0.0, cutoff=2.0, solve=solve, plan=lambda *given: next(plans))
    monkeypatch.setattr(branching, "chains_of", lambda tables, cases, shared: [None])
    Branching(candidates, [SimpleNamespace()], [{}])._resolve(
        SimpleNamespace(arenas=(3, 4, 5), shared=({},)), (CASE,), "some")
    assert solved == [(3, 4, 5), (3, 9, 5)]


def test_the_costliest_efforts_are_tried_a_few_times_where_a_bound_is_far_from_the_best(monkeypatch):
    monkeypatch.setattr(last_bounds, "EFFORTS", {"more": 3, "most": 1})
    efforts = []
    candidates = SimpleNamespace(budgets=(1, 1), best=SimpleNamespace(seconds=2.0), within=0.001, cutoff=2.0,
                                 solve=lambda chain, floors, cutoff, effort: efforts.append(effort))
    search, made = last_of(Branching(candidates, [], [])), SimpleNamespace(chain=None, floors=())
    for bound in (1.0, 1.999, 1.0, 1.0, 1.0):       # the second is near enough
        assert search._most(made, bound) is None
    assert efforts == ["more", "most", "more", "more"]


@pytest.mark.parametrize(("rise", "turns"), [(1e-6, range(5, 6)), (1e-3, range(40, 60))], ids=["slow", "fast"])
def test_branch_and_bound_ends_where_a_bound_far_below_the_best_rises_too_slowly(rise, turns, monkeypatch):
    candidates = SimpleNamespace(budgets=(1, 1, 1), best=SimpleNamespace(seconds=1.1), is_late=False,
                                 is_near=lambda bound: bound >= 1.1)
    search = last_of(Branching(candidates, [], []))
    made = SimpleNamespace(turns=0, is_parted=True, chains=(), branches=None)
    search.cases.left = [(1.0, 0, made)]

    def branched(made, bound, effort):
        made.turns += 1
        made.branches = SimpleNamespace(value=bound + rise, is_stuck=False)
        return bound + rise

    monkeypatch.setattr(search._bounds, "branched", branched)
    assert search._finish() == pytest.approx(1.0 + made.turns * rise)
    assert made.turns in turns


def test_a_trial_has_the_splits_of_the_graphs_that_the_goal_counts():
    graphs = [layered(random.Random(0), 1, tokens) for tokens in (1, 64)]
    given = devices(random.Random(0), 2, sum(sized(graphs[0]).values()))[::-1]
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0)):
        model = Trials(graphs, given, Links(given, gs.Link(5e8, 1e-6)), weights, 1.0)
        trial = model.run({name: k % 2 for k, name in enumerate(model.sizes)})
        counted = [plan.data.n_splits for plan, weight in zip(trial.plans, weights, strict=True) if weight]
        assert trial.splits == sum(counted) > len(counted)


TWO = (FAST.replace(name="one"), GPU, FAST.replace(name="two"), CPU)


def test_orders_exchange_devices_that_are_equal_in_all_but_their_names():
    slow = gs.Link(1e9, 8e-6)
    assert mirrors(TWO, Links(TWO, LINK), ()) == [(0, 1, 2, 3), (2, 1, 0, 3)]
    assert mirrors(TWO, Links(TWO, LINK), {2}) == [(0, 1, 2, 3)]
    assert mirrors(TWO, Links(TWO, {("CPU", "two"): slow, ("*", "*"): LINK}), ()) == [(0, 1, 2, 3)]
    assert mirrors((FAST, GPU, CPU), Links((FAST, GPU, CPU), LINK), ()) == [(0, 1, 2)]
    three = (*TWO, FAST.replace(name="three"))
    assert len(mirrors(three, Links(three, LINK), ())) == 6


def test_cases_that_equal_devices_make_of_each_other_are_one():
    orders = mirrors(TWO, Links(TWO, LINK), ())
    one = Case((100, 80, 70, 1000), (10, 20, 0, 0), (None, True, False, None))
    two = Case((70, 80, 100, 1000), (0, 20, 10, 0), (False, True, None, None))
    assert mirrored([one], [{"embd": 0}], orders) == mirrored([two], [{"embd": 2}], orders)
    assert mirrored([one], [{"embd": 0}], orders) != mirrored([two], [{"embd": 0}], orders)
    assert mirrored([one], [{}], orders) != mirrored([two._replace(floors=(0, 20, 11, 0))], [{}], orders)
    assert mirrored([one], [{}], orders) != mirrored([two._replace(caches=(None, True, None, None))], [{}], orders)
    one, two = (case._replace(caches=(*case.caches, *more)) for case, more in (
        (one, (None, None, None, True)), (two, (None, None, None, True))))
    assert mirrored([one], [{}], orders) == mirrored([two], [{}], orders)
    other = two._replace(caches=(*two.caches[:4], True, *two.caches[5:]))
    assert mirrored([one], [{}], orders) != mirrored([other], [{}], orders)


def test_equal_devices_are_bounded_once(monkeypatch):
    folder = Path(__file__).parents[1] / "data" / "graphs"
    graphs = [gs.load_graph(folder / f"llama-160m-{run}.json.gz") for run in ("decode", "prefill512")]
    room = sum(t.nbytes for t in graphs[0].tensors if t.resident and t.view_src is None) // 6
    given = (FAST.replace(name="one", memory=room), FAST.replace(name="two", memory=room), CPU)
    bounded = []
    relaxed = open_cases.relaxed
    monkeypatch.setattr(open_cases, "relaxed", lambda *args: bounded.append(args) or relaxed(*args))
    once = gs.fit(graphs, given, LINK, within=1e-4)
    cases = len(bounded)
    monkeypatch.setattr(branching, "mirrors", lambda *args: [(0, 1, 2)])
    twice = gs.fit(graphs, given, LINK, within=1e-4)
    assert 0 < cases < len(bounded) - cases
    assert once.seconds == pytest.approx(twice.seconds, rel=1e-3)
    assert once.rules_bound == pytest.approx(twice.rules_bound, rel=1e-3)


def test_arenas_may_fill_a_device_to_the_last_byte():
    """A stage that holds nothing on the first device fits beside arenas of all its bytes; of one more it does not."""
    chain = Chain((0,), (np.zeros((1, 1, 1)),), (np.array([[0, 3]]),), np.zeros(1), ((1,),))
    candidates = Candidates([], [GPU.replace(memory=5), CPU.replace(memory=3)], 0.001, False, 0.0)
    assert candidates.solve(chain, (5, 0)).path is not None
    assert candidates.solve(chain, (6, 0)) is None
