"""Tables: their sums are the prices of real plans, pruning keeps every optimum, and chains keep what they are given."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from placed_models import CPU, FAST, GPU, Parts, decoder, path_for, planned, real_price, solution_of, windowed

import ggml_sched as gs
from ggml_sched.placement import trials
from ggml_sched.placement.chain import Choice
from ggml_sched.placement.costs import undominated
from ggml_sched.placement.devices import Device, Link, Links
from ggml_sched.placement.facts import facts
from ggml_sched.placement.patterns import MAX_PATTERNS, patterns
from ggml_sched.placement.pricing import price
from ggml_sched.placement.tables import Tables
from ggml_sched.placement.trials import Trials

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"
KINDS = ("gpt2-124m", "llama-160m", "llama-2-7b", "llama-2-7b-fa", "mamba-1.4b", "mixtral-8x7b", "phi2-2.7b",
         "tinyllama-1.1b")
SOME_KINDS = [pytest.param(kind, marks=() if kind in ("gpt2-124m", "mamba-1.4b", "mixtral-8x7b") else pytest.mark.soak)
              for kind in KINDS]
"""Attention, recurrence and experts; the others differ from the first in sizes."""
LINK = Link(25e9, 8e-6)


def tables(graphs, devices, weights=None, stream=None, pins=None):
    known = [facts(graph) for graph in graphs]
    return Tables(known, weights or [1.0] + [0.0] * (len(known) - 1), devices, Links(devices, LINK), stream, pins)


def both(kind):
    return [gs.load_graph(GRAPHS / f"{kind}-{run}.json.gz") for run in ("decode", "prefill512")]


def cases(devices):
    """The sets of devices that hold caches."""
    return list(itertools.product((False, True), repeat=len(devices)))[1:]


def holds(made, chain, solution):
    """For each device whether it has caches in a solution."""
    return np.array([made.holds_caches[c][chain.rows[c][choice.pattern]]
                     for c, choice in zip(chain.classes, solution.path, strict=True)]).any(0)


# -- prices -----------------------------------------------------------------------------------


@pytest.mark.spread("kind", "devices weights")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "weights"), [((GPU, CPU), (256, 1)), ((FAST, GPU, CPU), (1, 0))],
                         ids=["two-mixed", "three-decode"])
def test_the_sum_of_the_tables_is_the_price_of_the_real_plan(kind, devices, weights):
    made = tables(both(kind), devices, weights)
    for first, multiplier in ((True, 0.0), (True, 5e-12), (False, 1e-12)):
        caches = (first, *(False for _ in devices[2:]), True)
        chain = made.chain(caches)
        solution = path_for(chain, (multiplier * max(weights), *(0 for _ in devices[1:])))
        # The case pays for the inputs of the first device: it is exact where that has caches.
        assert holds(made, chain, solution)[0] == first
        seconds, _ = real_price(made, chain, solution, LINK)
        assert solution.cost == pytest.approx(seconds, rel=0.003)


@pytest.mark.parametrize("kind", ["llama-2-7b", "mixtral-8x7b", "mamba-1.4b"])
def test_the_price_holds_where_weights_are_brought_to_a_device(kind):
    made = tables(both(kind), (GPU, CPU), (0, 1), (False, True))
    chain = made.chain((True, True), limits=(1 << 29, 1 << 40))
    solution = path_for(chain, (1e-9, 0))
    assignment = made.assignment(chain, solution)
    assert len(assignment.streamed[1]) > 100
    assert not assignment.streamed[0]
    names = {name: device for name, device in assignment.residents.items() if not name.startswith("cache")}
    assert set(names.values()) == {1}
    assert all(assignment.residents[name] == 1 for name in assignment.streamed[1])
    seconds, _ = real_price(made, chain, solution, LINK, budgets={0: 1 << 30})
    assert solution.cost == pytest.approx(seconds, rel=0.005)


def test_bringing_weights_needs_room_for_the_largest():
    made = tables(both("llama-160m"), (GPU, CPU), (0, 1), (False, True))
    costs, brought = [], []
    for room in (1 << 40, 20 << 20, 1 << 20):
        chain = made.chain((True, True), limits=(room, 1 << 40))
        solution = path_for(chain, (1e-9, 0))
        costs.append(solution.cost)
        brought.append(len(made.assignment(chain, solution).streamed[1]))
    assert costs[0] <= costs[1] < costs[2]
    assert brought[0] >= brought[1] > brought[2] == 0


def test_assignments_of_a_small_model_have_their_price():
    """Random patterns, through random pairs of states that the rules reach."""
    made = tables([decoder(1)], (GPU, CPU))
    chain = made.chain()
    graph = made.graphs[0].graph
    random = np.random.default_rng(5)
    checked = 0
    while checked < 40:
        states = [0, *random.integers(0, 2, len(chain.classes) - 1).tolist(), 0]
        choices = [Choice(int(random.integers(len(chain.cost[c]))), a, b)
                   for c, a, b in zip(chain.classes, states, states[1:], strict=False)]
        solution = solution_of(chain, choices)
        if np.isfinite(solution.cost):
            checked += 1
            assignment = made.assignment(chain, solution)
            plan = planned(graph, assignment.residents, assignment.nodes[0], made.devices)
            assert solution.cost == pytest.approx(price(plan, made.devices, LINK).seconds, rel=1e-9)
            residents = [0, 0]
            for t in graph.leafs:
                if t.resident:
                    residents[assignment.residents[t.name]] += -(-t.nbytes // 64) * 64
            assert solution.memory == tuple(residents)


def test_graphs_that_cost_nothing_follow_those_that_do():
    made = tables([decoder(), decoder(tokens=8)], (GPU, CPU), pins={"l0.ffn.up": 1})
    chain = made.chain((True, True))
    assignment = made.assignment(chain, path_for(chain, (0, 0)))
    ops = [[(node.op, device) for node, device in nodes.items()] for nodes in assignment.nodes]
    assert ops[0] == ops[1]
    assert {device for _, device in ops[0]} == {0, 1}


# -- pruning ----------------------------------------------------------------------------------


def charged(made, each):
    return [made._charged(each, j, (None,) * made.n_sets * len(made.devices)) for j in range(len(each.costs))]


def test_pruning_never_removes_an_optimum():
    made = tables([decoder(1, hidden=96)], (FAST, GPU, CPU))
    full = {c: made._make_table(each, (True,) * 3, charged(made, each), np.ones(len(each.patterns), bool),
                                [np.ones(cost.seconds.shape, bool) for cost in each.costs])
            for c, each in enumerate(made._classes)}
    chain = made.chain()
    random = np.random.default_rng(0)
    for c, each in enumerate(made._classes):
        kept = set(full[c][0].tolist())
        assert kept == set(chain.rows[c].tolist())
        everything = np.concatenate([chain.cost[c].reshape(len(kept), -1), chain.memory[c]], axis=1)
        for row in range(len(each.patterns)):
            alone = made._make_table(each, (True,) * 3, charged(made, each), np.arange(len(each.patterns)) == row,
                                     [np.ones(cost.seconds.shape, bool) for cost in each.costs])[1]
            values = np.concatenate([alone.reshape(-1), each.memory[row]])
            assert (everything <= values + 1e-15).all(1).any(), "a pattern that none beats was removed"
        for _ in range(20):
            weight = random.random(everything.shape[1])
            finite = np.where(np.isfinite(everything), everything, 1e9)
            assert (finite @ weight).min() <= (finite @ weight).min()


def test_undominated_rows_are_those_that_a_slow_search_finds():
    random = np.random.default_rng(3)
    for _ in range(50):
        cost = random.integers(0, 4, (30, 2, 2)).astype(float)
        cost[random.random(cost.shape) < 0.2] = np.inf
        memory = random.integers(0, 3, (30, 2))
        rows = [(*cost[k].ravel(), *memory[k]) for k in range(30)]
        slow = [k for k in range(30) if np.isfinite(cost[k]).any() and not any(
            all(a <= b for a, b in zip(rows[j], rows[k], strict=True)) and (rows[j] != rows[k] or j < k)
            for j in range(30) if j != k and np.isfinite(cost[j]).any())]
        assert undominated(cost, memory).tolist() == slow


def test_without_a_possible_row_one_is_left():
    assert undominated(np.full((3, 1, 1), np.inf), np.zeros((3, 1), np.int64)).tolist() == [0]


# -- patterns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("atoms", "devices", "count"), [(5, 3, 243), (7, 3, 2187), (0, 2, 1), (5, 2, 32),
                                                         (5, 4, 1024)])
def test_patterns_are_all_combinations_where_those_are_few(atoms, devices, count):
    found = patterns(atoms, devices, devices - 1)
    assert len(found) == len({tuple(row) for row in found.tolist()}) == count


@pytest.mark.parametrize(("atoms", "devices"), [(7, 4), (5, 8), (5, 17), (7, 17), (7, 64)])
def test_with_many_devices_a_stage_is_on_two_at_most(atoms, devices):
    found = patterns(atoms, devices, devices - 1)
    rows = {tuple(row) for row in found.tolist()}
    assert len(rows) == len(found) <= max(MAX_PATTERNS, 128 * devices)
    assert all(len(set(row)) <= 2 for row in rows)
    assert all((d,) * atoms in rows for d in range(devices))
    assert all((d,) + (devices - 1,) * (atoms - 1) in rows for d in range(devices))


# -- chains -----------------------------------------------------------------------------------


def test_caches_are_only_where_the_case_has_them():
    made = tables(both("llama-160m"), (FAST, GPU, CPU))
    for caches in cases(made.devices):
        chain = made.chain(caches)
        solution = path_for(chain, (0, 0, 0))
        assignment = made.assignment(chain, solution)
        assert {assignment.residents[name] for name in made.residents if name.startswith("cache")} <= {
            d for d, held in enumerate(caches) if held}


def test_a_device_with_caches_pays_for_their_inputs_once_where_that_is_decided():
    made = tables(both("llama-160m"), (FAST, GPU, CPU))
    chain = made.chain()
    for worth in ((0, 0, 0), (2e-11, 0, 0), (3e-12, 0, 0)):
        solution = path_for(chain, worth)
        unpaid, there = made.unpaid(chain, solution.path), holds(made, chain, solution)
        # Caches of all stages on one device pay in parts for all of one copy.
        assert [price > 1e-12 for price in unpaid[:2]] == [held and there.sum() > 1 for held in there[:2]]
        assert unpaid[2] == 0       # inputs start on the host
        for caches in itertools.product((None, True), repeat=3):
            decided = path_for(made.chain(caches), worth)
            more = sum(price for price, held in zip(unpaid[:3], caches, strict=True) if held)
            if all(there[d] for d in range(2) if caches[d]):
                assert decided.cost == pytest.approx(solution.cost + more, rel=1e-12)
            else:
                assert decided.cost >= solution.cost * (1 - 1e-12)


def test_a_device_pays_for_the_inputs_that_its_own_caches_read_and_for_no_others():
    made = tables([windowed()], (FAST, GPU, CPU))
    assert len(made.readers) == 3       # all stages with caches, and those of each mask
    assert made.implied == ((), (), (), (0,), (1,), (2,), (0,), (1,), (2,))
    random, free = np.random.default_rng(3), made.chain()
    differ = paid = 0
    for solution in random_solutions(free, random, 60):
        there = made.caches_of(made.assignment(free, solution).residents)
        assert list(there[:3]) == holds(made, free, solution).tolist()
        differ += there[3:6] != there[6:]
        chain = made.chain(there)
        path = []
        for c, choice in zip(free.classes, solution.path, strict=True):
            # Other patterns may be left out of this chain: those that another beats there.
            at = np.flatnonzero(chain.rows[c] == free.rows[c][choice.pattern])
            path += [choice._replace(pattern=int(row)) for row in at]
        if len(path) == len(solution.path):
            decided = solution_of(chain, path)
            seconds, _ = real_price(made, chain, decided, LINK)
            assert decided.cost == pytest.approx(seconds, rel=1e-9)
            assert solution.cost <= seconds * (1 + 1e-9)
            more = sum(price for price, held in zip(made.unpaid(free, solution.path), there, strict=True) if held)
            assert solution.cost + more == pytest.approx(seconds, rel=1e-9)
            paid += more > 1e-6
            closed = made.chain([False if held else None for held in there])
            reading = [np.concatenate([held & of[c] for of in made.readers], 1)
                       for c, held in enumerate(made.holds_caches)]
            assert not any(reading[c][closed.rows[c]][:, there].any()
                           for c in closed.classes if np.isfinite(closed.cost[c]).any())
    assert differ > 20 and paid > 20


@pytest.mark.parametrize("tokens", [1, 16])
def test_an_input_that_nodes_without_caches_read_is_paid_for_once_on_each_device_that_reads_it(tokens):
    made = tables([decoder(4, tokens=tokens)], (FAST, GPU, CPU))
    n, first = 3, 3 * len(made.readers)
    assert len(made.copied) == 1        # the positions
    random, free = np.random.default_rng(4), made.chain()
    paid = differ = 0
    for solution in random_solutions(free, random, 80):
        assignment = made.assignment(free, solution)
        there = made.caches_of(assignment.residents, assignment.nodes)
        assert len(there) == made.n_sets * n
        differ += there[:n] != there[first:]
        decided, seconds = path_in(made, there, free, solution), real_price(made, free, solution, LINK)[0]
        assert solution.cost <= seconds * (1 + 1e-9)
        unpaid = made.unpaid(free, solution.path)
        assert all(held or not price for price, held in zip(unpaid[first:], there[first:], strict=True))
        if decided is not None:
            assert decided.cost == pytest.approx(real_price(made, made.chain(there), decided, LINK)[0], rel=1e-9)
            more = sum(price for price, held in zip(unpaid, there, strict=True) if held)
            assert solution.cost + more == pytest.approx(seconds, rel=1e-9)
            paid += sum(unpaid[first:]) > 1e-7
        closed = made.chain((*(None,) * first, *(False if held else None for held in there[first:])))
        for c, each in enumerate(made._classes):
            for j, cost in enumerate(each.costs):
                for reads in cost.reads.values():
                    for variant, row, enters, out in zip(*closed_variants(closed, c, j), strict=True):
                        assert not (reads[variant, row, enters] & np.array(there[first:])).any(), out
    assert paid > 20 and differ


def path_in(made, there, free, solution):
    """The solution in the chain where all entries are decided; None where another pattern beats one of it there."""
    chain, path = made.chain(there), []
    for c, choice in zip(free.classes, solution.path, strict=True):
        path += [choice._replace(pattern=int(row))
                 for row in np.flatnonzero(chain.rows[c] == free.rows[c][choice.pattern])]
    return solution_of(chain, path) if len(path) == len(solution.path) else None


def closed_variants(chain, c, j):
    """(Variants, patterns, devices of the incoming activation, devices of the outgoing one) of a class of a chain."""
    rows = chain.rows[c][np.isfinite(chain.cost[c]).any((1, 2))]
    chosen = chain.variants[c][j][rows]
    row, enters, out = np.nonzero(chosen >= 0)
    return chosen[row, enters, out], rows[row], enters, out


def test_arenas_are_no_smaller_than_what_caches_need_where_a_device_has_some():
    devices = (FAST, GPU, CPU)
    links = Links(devices, LINK)
    model = Trials([windowed(tokens=16)], devices, links, (1.0,), 1.0)
    made = Tables(model.facts, (1.0,), devices, links)
    free = made.chain()
    raised = 0
    for solution in random_solutions(free, np.random.default_rng(5), 60):
        assignment = made.assignment(free, solution)
        floors = made.floors(made.caches_of(assignment.residents))
        arenas = model.run(assignment.residents, assignment.nodes).arenas
        assert all(floor <= arena for floor, arena in zip(floors, arenas, strict=True))
        raised += any(floors[:2])
    assert raised > 30
    assert made.floors([None] * 9) == made.floors([False] * 9) == [0, 0, 0]


def test_limits_leave_only_patterns_whose_arenas_need_no_more():
    made = tables(both("llama-2-7b"), (GPU, CPU))
    for limit in (300 << 20, 100 << 20, 20 << 20):
        chain = made.chain((True, True), limits=(limit, 1 << 40))
        solution = path_for(chain, (0, 0))
        for k, choice in enumerate(solution.path):
            c = made.classes[k]
            assert made.needs[c][chain.rows[c][choice.pattern], 0] <= limit
        assert made.needed(chain, solution.path)[0] <= limit
    assert not any(made.chain((True, True), limits=(0, 1 << 40)).memory[c][:, 0].any() for c in range(1, 5))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_no_real_arena_is_smaller_than_what_its_patterns_need(kind):
    made = tables(both(kind), (GPU, CPU))
    for caches, price_of_bytes in (((True, True), 2e-11), ((False, True), 1e-11), ((True, True), 0.0)):
        chain = made.chain(caches)
        solution = path_for(chain, (price_of_bytes, 0))
        least = np.zeros(2, np.int64)
        for k, choice in enumerate(solution.path):
            c = made.classes[k]
            least = np.maximum(least, made.needs[c][chain.rows[c][choice.pattern]])
        needed = made.needed(chain, solution.path)      # in the variants of the solution
        assert (least <= needed).all()
        least = np.array(needed)
        _, plans = real_price(made, chain, solution, LINK, every=True)
        real = np.max([plan.buffer_sizes for plan in plans], axis=0)
        assert (least <= real).all()
        stages = np.sum([made.holds_caches[c][chain.rows[c][choice.pattern]]
                         for c, choice in zip(chain.classes, solution.path, strict=True)], axis=0)
        assert stages[0] < 3 or made.cached[0] <= real[0]
        if solution.memory[0]:
            assert least[0] > 0.75 * real[0] - (4 << 20)


def random_solutions(chain, rng, count):
    """Solutions of random patterns, through random states."""
    for _ in range(count):
        state, path = 0, []
        for c in chain.classes:
            reached = np.argwhere(np.isfinite(chain.cost[c][:, state, :]))
            pattern, after = reached[rng.integers(len(reached))].tolist()
            path.append(Choice(pattern, state, after))
            state = after
        yield solution_of(chain, path)


@pytest.mark.parametrize("layers", [1, 2])
def test_arenas_of_random_patterns_are_never_smaller_and_rarely_larger_than_they_need(layers):
    devices = (FAST, GPU, CPU)
    links = Links(devices, LINK)
    model = Trials([decoder(layers, tokens=64)], devices, links, (1.0,), 1.0)
    made = Tables(model.facts, (1.0,), devices, links)
    chain = made.chain()
    parts = []
    for solution in random_solutions(chain, np.random.default_rng(layers), 100):
        assignment = made.assignment(chain, solution)
        arenas = model.run(assignment.residents, assignment.nodes).arenas
        needed = made.needed(chain, solution.path)
        assert all(need <= arena for need, arena in zip(needed, arenas, strict=True))
        parts += [need / arena for need, arena in zip(needed, arenas, strict=True) if arena]
    # Copies are made at the beginning of a split, not at their first reader.
    assert np.mean(parts) > 0.94


def test_a_sum_of_two_parts_of_a_product_takes_memory_of_its_own():
    """As with experts: the parts have the strides of the product, so that the sum cannot be computed in place."""
    parts, devices = Parts(), (GPU, CPU)
    ctx, x = parts.ctx, parts.embedding(64, 64)
    both = ctx.mul_mat(parts.resident("up", 64, 128), x)
    one, other = (ctx.view_2d(both, 64, 64, both.nb[1], at) for at in (0, 64 * 4))
    x = ctx.add(ctx.add(one, other), x)
    model = Trials([gs.Graph(ctx.mul_mat(parts.resident("out", 64, 8), x))], devices, Links(devices, LINK), (1.0,), 1.0)
    made = Tables(model.facts, (1.0,), devices, Links(devices, LINK))
    chain = made.chain()
    solution = path_for(chain, (0, 0))
    assignment = made.assignment(chain, solution)
    assert set(assignment.residents.values()) == {1}
    _, arena = model.run(assignment.residents, assignment.nodes).arenas
    # The product, the sum of its parts, and the activation that came in.
    assert made.needed(chain, solution.path)[1] == arena == (128 + 64 + 64) * 64 * 4


@pytest.mark.parametrize("weights", [(0.0, 1.0), (256.0, 1.0)], ids=["prompt", "both"])
def test_neither_arenas_nor_seconds_are_below_the_tables_where_weights_are_brought(weights, monkeypatch):
    monkeypatch.setattr(trials, "_POLICY", trials._LEAN)        # copies of weights are not kept
    devices = (FAST, GPU, CPU)
    links = Links(devices, LINK)
    model = Trials([decoder(2), decoder(2, tokens=64)], devices, links, weights, 1.0)
    made = Tables(model.facts, weights, devices, links, (False, True))
    chain = made.chain()
    brought = 0
    for solution in random_solutions(chain, np.random.default_rng(3), 100):
        assignment = made.assignment(chain, solution)
        trial = model.run(assignment.residents, assignment.nodes)
        assert all(need <= arena for need, arena in zip(made.needed(chain, solution.path), trial.arenas, strict=True))
        assert solution.cost <= trial.seconds * (1 + 1e-9)
        brought += len(assignment.streamed[1])
    assert brought > 100


@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, 1.0)], ids=["token", "both"])
def test_no_arena_is_smaller_than_what_stages_need_between_two_that_read_inputs_of_caches(weights):
    devices = (FAST, GPU, CPU)
    links = Links(devices, LINK)
    model = Trials([decoder(5, cells=256), decoder(5, cells=256, tokens=64)], devices, links, weights, 1.0)
    made = Tables(model.facts, weights, devices, links)
    chain = made.chain()
    larger = 0
    for solution in random_solutions(chain, np.random.default_rng(8), 100):
        assignment = made.assignment(chain, solution)
        arenas = model.run(assignment.residents, assignment.nodes).arenas
        for d in range(2):
            without = made.needed(chain, solution.path)[d]
            for number in range(len(made.lasting)):
                need = made.needed(chain, solution.path, (number, d))[d]
                assert without <= need <= arenas[d]
                larger += need > without
    assert larger > 20


def test_small_copies_count_from_the_split_of_their_reader_on_and_last_between_stages():
    """A mask, a 32nd of the products of queries and keys, is copied before these are computed, and stays."""
    made = tables(both("llama-2-7b")[1:], (GPU, CPU))
    chain = made.chain((True, False))
    solution = path_for(chain, (0, 0))
    _, (plan,) = real_price(made, chain, solution, LINK)
    arena = plan.buffer_sizes[0]
    assert 0.94 * arena < made.needed(chain, solution.path)[0]
    assert 0.9999 * arena < made.needed(chain, solution.path, (0, 0))[0] <= arena


def test_inputs_of_caches_last_in_every_stage_between_two_with_caches():
    devices = (FAST, GPU, CPU)
    links = Links(devices, LINK)
    model = Trials([decoder(3, hidden=1 << 14, cells=4096, tokens=64)], devices, links, (1.0,), 1.0)
    made = Tables(model.facts, (1.0,), devices, links)
    chain = made.chain()
    solution = path_for(chain, (0, 0, 0))
    assert holds(made, chain, solution).tolist() == [True, False, False]
    assignment = made.assignment(chain, solution)
    arena, *_ = model.run(assignment.residents, assignment.nodes).arenas
    without, need = (made.needed(chain, solution.path, within)[0] for within in (None, (0, 0)))
    mask = 64 * 4096 * 4
    assert need >= without + mask
    assert 0.95 * arena < need <= arena
    # The widest nodes are between caches, and do not fit there any more.
    limits = (need - 1, 1 << 40, 1 << 40)
    outer, inner = (made.chain(limits=limits, within=within) for within in ((), ((0, 0),)))
    assert path_for(outer, (0, 0, 0)).cost == solution.cost < path_for(inner, (0, 0, 0)).cost


def test_inputs_count_in_arenas_where_three_stages_read_them():
    for layers in (2, 3):
        made = tables([decoder(layers, cells=4096, tokens=2)], (GPU, CPU))
        assert (made.cached[0] > 0) == (layers == 3)
        assert made.cached[1] == 0
    chain = made.chain((True, False))
    _, (plan,) = real_price(made, chain, path_for(chain, (0, 0)), LINK)
    assert 0.95 * plan.buffer_sizes[0] < made.cached[0] <= plan.buffer_sizes[0]


def test_a_tied_matrix_is_in_one_place_and_counted_once():
    made = tables([decoder(tied=True)], (GPU, CPU))
    assert made.shared == (("embd",),)
    for device in range(2):
        chain = made.chain(shared={"embd": device})
        solution = path_for(chain, (0, 0))
        assert made.assignment(chain, solution).residents["embd"] == device
        assert sum(solution.memory) == sum(-(-n // 64) * 64 for n in made.residents.values())
        seconds, _ = real_price(made, chain, solution, LINK)
        assert solution.cost == pytest.approx(seconds, rel=1e-6)
    assert path_for(made.chain(), (0, 0)).cost <= min(
        path_for(made.chain(shared={"embd": d}), (0, 0)).cost for d in range(2))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_bytes_of_patterns_are_those_that_aligned_tensors_take(alignment):
    devices = (GPU.replace(alignment=alignment), CPU)
    made = tables([decoder(width=33, hidden=41)], devices)
    assert sum(size % 64 > 0 for size in made.residents.values()) > len(made.residents) // 2
    aligned = [sum(-(-size // device.alignment) * device.alignment for size in made.residents.values())
               for device in devices]
    for d, worth in enumerate(((0, 1e-3), (1e-3, 0))):
        memory = path_for(made.chain((True, True)), worth).memory
        assert (memory[d], memory[1 - d]) == (aligned[d], 0)


def test_caches_that_other_layers_read_are_one_group():
    parts = Parts()
    x = parts.embedding(64, 1)
    mask = parts.ctx.tensor("f32", (32, 1), "mask", input=True)
    index = parts.ctx.tensor("i64", (1,), "index", input=True)
    x = parts.attention(x, "a", 32, mask, index)
    cache = next(t for n in gs.Graph(x).leafs for t in [n] if t.name == "a.cache")
    x = parts.attention(x, "b", 32, mask, index, cache)
    made = tables([gs.Graph(parts.attention(x, "c", 32, mask, index, cache))], (GPU, CPU))
    assert made.shared == (("a.cache",),)
    chain = made.chain((True, True), shared={"a.cache": 0})
    assert made.assignment(chain, path_for(chain, (0, 0))).residents["a.cache"] == 0


def test_pins_hold_in_every_pattern():
    made = tables(both("llama-160m"), (GPU, CPU), pins={"blk.3.attn_q.weight": 1, "output.weight": 1,
                                                        "blk.5.attn_norm.weight": 1})
    chain = made.chain((True, True))
    solution = path_for(chain, (0, 0))
    residents = made.assignment(chain, solution).residents
    assert {name for name, device in residents.items() if device == 1} <= {
        "blk.3.attn_q.weight", "blk.3.attn_norm.weight", "output.weight", "output_norm.weight",
        "blk.5.attn_norm.weight", "token_embd.weight"}
    assert residents["blk.3.attn_q.weight"] == residents["output.weight"] == residents["blk.5.attn_norm.weight"] == 1
    seconds, _ = real_price(made, chain, solution, LINK)
    assert solution.cost == pytest.approx(seconds, rel=0.003)


def test_a_case_without_patterns_has_infinite_cost():
    made = tables([decoder()], (GPU, CPU), pins={"l0.attn.cache": 0})
    chain = made.chain((False, True))
    assert path_for(chain, (0, 0)).cost == np.inf


def test_several_models_are_one_chain():
    other = Parts()
    x = other.embedding(32, 1, name="other")
    draft = gs.Graph(other.feed_forward(x, "other.ffn", 64))
    apart = [tables([graph], (GPU, CPU)) for graph in (decoder(), draft)]
    made = tables([decoder(), draft], (GPU, CPU), (1, 3))
    chain = made.chain()
    together = path_for(chain, (0, 0)).cost
    assert together == pytest.approx(path_for(apart[0].chain(), (0, 0)).cost + 3 * path_for(apart[1].chain(),
                                                                                           (0, 0)).cost)
    seconds, _ = real_price(made, chain, path_for(chain, (1e-11, 0)), LINK)
    assert path_for(chain, (1e-11, 0)).cost == pytest.approx(seconds, rel=0.003)


@pytest.mark.parametrize("n", [6, pytest.param(16, marks=pytest.mark.soak)])
def test_many_devices_and_three_graphs_end_in_bounded_tables(n):
    devices = [*(Device(f"GPU{i}", 1 << 40, 2e11 + 1e9 * i, 1e13) for i in range(n)), CPU]
    graphs = [decoder(1), decoder(1, tokens=4), decoder(1, tokens=16)]
    made = tables(graphs, devices, (256, 1, 1), (False, True, True))
    chain = made.chain((True,) * (n + 1))
    assert sum(cost.nbytes for cost in chain.cost) < 100 << 20
    solution = path_for(chain, (0,) * (n + 1))
    seconds, _ = real_price(made, chain, solution, LINK)
    # Inputs are copied to one device, and the chain of this case pays for all.
    assert seconds <= solution.cost * (1 + 1e-9)


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"weights": [1.0, 1.0]}, ValueError, "1 graphs, 2 weights"),
    ({"weights": [-1.0]}, ValueError, "weight of a graph is -1"),
    ({"weights": [float("nan")]}, ValueError, "weight of a graph is nan"),
    ({"weights": [0.0]}, ValueError, "no graph has a weight"),
    ({"devices": (GPU, FAST)}, ValueError, "0 hosts"),
    ({"devices": (CPU, CPU.replace(name="B"))}, ValueError, "2 hosts among the devices: CPU, B"),
    ({"pins": {"embd": 2}}, gs.PlacementError, "'embd' is pinned to device 2"),
])
def test_arguments_that_make_no_sense_are_errors(given, error, message):
    with pytest.raises(error, match=message):
        tables([decoder()], **{"devices": (GPU, CPU), **given})


@pytest.mark.parametrize(("given", "message"), [
    ({"caches": (True,)}, "1 entries of `caches` for 1 sets of stages, 1 inputs and 2 devices"),
    ({"limits": (1,)}, "1 limits for 2"),
    ({"shared": {"embd": 0}}, "'embd' is not read in several stages"),
])
def test_a_chain_of_arguments_that_do_not_fit_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        tables([decoder()], (GPU, CPU)).chain(**given)


def test_a_graph_without_nodes_costs_nothing():
    ctx = gs.Context()
    made = tables([gs.Graph(ctx.tensor("f32", (4,), "x", input=True))], (GPU, CPU))
    chain = made.chain((True, True), limits=(0, 0))
    solution = path_for(chain, (0, 0))
    assert (solution.cost, solution.memory) == (0.0, (0, 0))
    assert made.assignment(chain, solution).nodes == ({},)


def test_a_stage_of_hundreds_of_small_weights_ends_in_bounded_tables():
    parts = Parts()
    x = total = parts.embedding(64, 1)
    for k in range(200):
        each = parts.ctx.mul_mat(parts.resident(f"w{k}", 64, 64), x) if k % 10 == 0 else x
        total = parts.ctx.add(total, parts.norm(each, f"n{k}"))
    made = tables([gs.Graph(total)], (FAST, GPU, CPU))
    assert max(len(needs) for needs in made.needs) == MAX_PATTERNS
    assert np.isfinite(path_for(made.chain((True, True, True)), (0, 0, 0)).cost)


def test_a_solution_without_a_path_has_no_assignment():
    made = tables([decoder()], (GPU, CPU))
    chain = made.chain()
    solution = path_for(chain, (0, 0))
    none = type(solution)(np.inf, np.inf, None, None, ())
    with pytest.raises(gs.PlacementError, match="nothing fits"):
        made.assignment(chain, none)
