"""The bound by nodes: no plan of any placement is cheaper, and it is not far below the best."""

import itertools
import math
import random

import numpy as np
import placement_instances as instances
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, many_residents, quick, recipes
from small_models import layered, sized

import ggml_sched as gs
from ggml_sched.placement.devices import Links
from ggml_sched.placement.facts import facts
from ggml_sched.placement.nodebound import _Wired, node_bound

DEVICES = (gs.Device("A", 1 << 30, bandwidth=1e9, flops=1e9, launch=1e-6, split=3e-6),
           gs.Device("B", 1 << 30, bandwidth=3e9, flops=1e8, launch=2e-6, split=5e-6),
           gs.Device("H", 1 << 30, bandwidth=2e8, flops=1e10, launch=5e-6, split=7e-6, host=True))
LINK = {("A", "H"): gs.Link(1e9, 1.1e-6), ("H", "A"): gs.Link(3e9, 1.3e-6), ("B", "H"): gs.Link(7e8, 1.7e-6)}


@given(recipes(), st.integers(0, 1 << 30))
@quick(60)
def test_no_plan_of_random_homes_and_assignments_is_cheaper(recipe, seed):
    rng = np.random.default_rng(seed)
    built = Built(many_residents(recipe), n_homes=3)
    backends = [gs.DryBackend(device.name) for device in DEVICES]
    for home, backend in zip(built.homes, backends, strict=True):
        backend.alloc_tensors(home)
    known = facts(built.graph)
    with gs.Scheduler(backends) as scheduler:
        for node in built.graph.nodes:
            if node.computes and node.view_src is None and rng.random() < 0.8:
                scheduler.set_tensor_backend(node, backends[int(rng.integers(3))])
        plan = scheduler.plan(built.graph)
    seconds = gs.price(plan, DEVICES, LINK).seconds
    room = list(plan.buffer_sizes)
    for root in {root for roots in known.residents for root in roots}:
        room[[backend.name for backend in backends].index(root.backend.name)] += root.nbytes
    bound = node_bound([known], [1.0], DEVICES, Links(DEVICES, LINK), room)
    assert bound.seconds <= seconds * (1 + 1e-9)


FAST = (gs.Device("G", 1 << 30, bandwidth=20e9, flops=1e12, launch=1e-6, split=2e-6),
        gs.Device("H", 1 << 30, bandwidth=2e9, flops=1e11, launch=1e-6, split=1e-6, host=True))
THREE = (FAST[0], gs.Device("K", 1 << 30, bandwidth=6e9, flops=1e12, launch=1e-6, split=2e-6), FAST[1])
FAST_LINK = gs.Link(4e9, 2e-6)
SIZES = {"up": (64, 256), "down": (256, 64), "out": (64, 320)}


def model(ctx, weights, tokens=1):
    """x + down relu(up x), then out if there is such a weight; `weights`: tensors by name."""
    x = ctx.tensor("f32", (64, tokens), "x", input=True)
    y = ctx.add(x, ctx.mul_mat(weights["down"], ctx.relu(ctx.mul_mat(weights["up"], x))))
    return gs.Graph(ctx.mul_mat(weights["out"], y) if "out" in weights else y)


def best_of_all(devices, names, tokens):
    """(seconds, bytes of each device) of the plans of all homes and all devices of all nodes, and the facts."""
    backends, best = [gs.DryBackend(device.name) for device in devices], []
    for homes in itertools.product(range(len(devices)), repeat=len(names)):
        with gs.Context("graph") as ctx:
            contexts = [gs.Context(device.name) for device in devices]
            graph = model(ctx, {name: contexts[home].tensor("f32", SIZES[name], name)
                                for name, home in zip(names, homes, strict=True)}, tokens)
            for home in set(homes):
                backends[home].alloc_tensors(contexts[home])
            known = facts(graph)
            sizes = [sum(math.prod(SIZES[name]) * 4 for name, home in zip(names, homes, strict=True) if home == device)
                     for device in range(len(devices))]
            for nodes in itertools.product(backends, repeat=len(known.nodes)):
                with gs.Scheduler(backends) as scheduler:
                    for node, backend in zip(known.nodes, nodes, strict=True):
                        scheduler.set_tensor_backend(node, backend)
                    plan = scheduler.plan(graph)
                best.append((gs.price(plan, devices, FAST_LINK).seconds, np.add(sizes, plan.buffer_sizes)))
    return best, known


@pytest.mark.parametrize("devices, names, tokens", [
    pytest.param(FAST, ("up", "down", "out"), 1, marks=pytest.mark.soak), (FAST, ("up", "down"), 64),
    pytest.param(THREE, ("up", "down"), 1, marks=pytest.mark.soak),
    pytest.param(THREE, ("up", "down", "out"), 1, marks=pytest.mark.soak)])
def test_the_bound_is_near_the_best_of_all_placements_and_all_nodes_and_never_above(devices, names, tokens):
    best, known = best_of_all(devices, names, tokens)
    links, parts = Links(devices, FAST_LINK), []
    seconds, used = np.array([one for one, _ in best]), np.array([bytes_ for _, bytes_ in best])
    for part in itertools.product((0, 80_000, 180_000, 1 << 20), repeat=len(devices)):
        fitting = seconds[(used <= part).all(1)].tolist()
        bound = node_bound([known], [1.0], devices, links, part).seconds
        assert bound <= min(fitting, default=math.inf) * (1 + 1e-9), part
        if fitting:
            parts.append(bound / min(fitting))
    assert max(parts) > 1 - 1e-9 and np.median(parts) >= 0.5     # whole weights of three leave much room unused


@pytest.fixture
def known():
    """Facts of the model for 1 and for 64 tokens, of the same weights; and the weights' bytes."""
    with gs.Context("graph") as ctx, gs.Context("weights") as made:
        weights = {name: made.tensor("f32", shape, name) for name, shape in SIZES.items()}
        gs.DryBackend("H").alloc_tensors(made)
        yield [facts(model(ctx, weights, tokens)) for tokens in (1, 64)], sum(t.nbytes for t in weights.values())


def test_residents_of_two_graphs_are_held_once(known):
    graphs, total = known
    links = Links(FAST, FAST_LINK)
    for mixed in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0]):
        assert node_bound(graphs, mixed, FAST, links, [0, total + (1 << 20)]).seconds < math.inf
        assert node_bound(graphs, mixed, FAST, links, [0, total // 2]).seconds == math.inf
    alone = [node_bound([one], [1.0], FAST, links, [total // 2, total]).seconds for one in graphs]
    both = node_bound(graphs, [1.0, 1.0], FAST, links, [total // 2, total]).seconds
    assert max(alone) < both <= sum(alone) * 1.2


def test_arenas_of_graphs_without_a_weight_take_room():
    """A prompt's products run where their weights are: with the bytes of real plans the bound is not above them."""
    backends, links = [gs.DryBackend(device.name) for device in FAST], Links(FAST, FAST_LINK)
    raised = 0
    for homes in itertools.product(range(2), repeat=3):
        with gs.Context("graph") as ctx:
            contexts = [gs.Context(device.name) for device in FAST]
            weights = {name: contexts[home].tensor("f32", SIZES[name], name)
                       for name, home in zip(SIZES, homes, strict=True)}
            for home in set(homes):
                backends[home].alloc_tensors(contexts[home])
            known = [facts(model(ctx, weights, tokens)) for tokens in (1, 512)]
            plans = []
            for graph in known:
                with gs.Scheduler(backends) as scheduler:
                    for node, residents in zip(graph.nodes, graph.residents, strict=True):
                        if residents:
                            scheduler.set_tensor_backend(node, residents[0].backend)
                    plans.append(scheduler.plan(graph.graph))
            room = [sum(t.nbytes for t in weights.values() if t.backend is backend)
                    + max(plan.buffer_sizes[i] for plan in plans) for i, backend in enumerate(backends)]
            seconds = gs.price(plans[0], FAST, FAST_LINK).seconds
            bound = node_bound(known, [1.0, 0.0], FAST, links, room).seconds
            assert bound <= seconds * (1 + 1e-9)
            raised += bound > node_bound(known[:1], [1.0], FAST, links, room).seconds * (1 + 1e-6)
    assert raised


def test_residents_stay_where_they_may_be(known):
    (graph, _), links = known[0], Links(FAST, FAST_LINK)
    seconds = [node_bound([graph], [1.0], FAST, links, [1 << 30] * 2, allowed).seconds
               for allowed in ({}, {"out": (False, True)}, {"out": (False, False)})]
    assert seconds[0] < seconds[1] < seconds[2] == math.inf


def test_multipliers_are_what_a_byte_is_worth(known):
    (graph, _), links = known[0], Links(FAST, FAST_LINK)
    found = node_bound([graph], [1.0], FAST, links, [100_000, 1 << 30])
    more = node_bound([graph], [1.0], FAST, links, [101_000, 1 << 30])
    assert found.seconds - more.seconds == pytest.approx(1000 * found.multipliers[0], rel=1e-3)
    assert found.multipliers[0] > 0 == found.multipliers[1]


@pytest.mark.parametrize("weights, room", [([1.0], [1]), ([1.0, 1.0], [1, 1]), ([-1.0], [1, 1]),
                                           ([math.nan], [1, 1])])
def test_arguments_are_checked(weights, room):
    with gs.Context("graph") as ctx:
        graph = gs.Graph(ctx.relu(ctx.tensor("f32", (4,), "x", input=True)))
        with pytest.raises(ValueError, match="weight"):
            node_bound([facts(graph)], weights, FAST, Links(FAST), room)


def test_residents_of_one_name_in_two_models_take_their_bytes_twice() -> None:
    graph = layered(random.Random(3), 2)
    total = sum(sized(graph).values())
    tight = [gs.Device("GPU", total, 1e10, 1e12), gs.Device("CPU", total // 2, 1e9, 1e10, host=True)]
    twice, links = [facts(graph), facts(layered(random.Random(3), 2))], Links(tight, FAST_LINK)
    room = [device.budget for device in tight]
    one = node_bound(twice[:1], (1.0,), tight, links, room).seconds
    both = node_bound(twice, (1.0, 1.0), tight, links, room, models=(0, 1)).seconds
    assert node_bound(twice, (1.0, 1.0), tight, links, room).seconds == pytest.approx(2 * one)
    assert both == math.inf
    wide = [tight[0], tight[1].replace(memory=2 * total)]
    room = [device.budget for device in wide]
    assert node_bound(twice, (1.0, 1.0), wide, links, room, models=(0, 1)).seconds > 2.5 * one
    pinned = {(1, name): [False, True] for name in sized(graph)}
    dear = node_bound(twice, (1.0, 1.0), wide, links, room, pinned, (0, 1)).seconds
    alone = node_bound(twice[1:], (1.0,), wide, links, room, {name: [False, True] for name in sized(graph)}).seconds
    assert dear == pytest.approx(one + alone, rel=1e-3)


def test_the_first_reader_of_a_result_proves_more_than_the_largest_one_where_attention_comes_first(monkeypatch) -> None:
    made = instances.instance(5248)
    links = Links(made.devices, made.link)

    def bound():
        return node_bound([facts(graph) for graph in made.graphs], (1.0, 0.0), made.devices, links,
                          [device.budget for device in made.devices]).seconds

    both, readers = bound(), _Wired.readers
    monkeypatch.setattr(_Wired, "readers", lambda self, by_bytes: readers(self, True))
    assert both > 1.01 * bound()
