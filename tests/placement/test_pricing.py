"""Prices of plans: the same as a slow walk over splits and copies gives, for random graphs; and each part by hand."""

import math
import pickle
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from random_graphs import Built, many_residents, quick, recipes
from random_problems import plan_of, random_case
from small_graphs import dry_device

import ggml_sched as gs
from ggml_sched.placement.devices import Links
from ggml_sched.placement.facts import facts
from ggml_sched.placement.pricing import Pricer, price_steps

DEVICES = (gs.Device("A", 1 << 30, bandwidth=1e9, flops=1e9, launch=1e-6, split=3e-6),
           gs.Device("B", 1 << 30, bandwidth=3e9, flops=1e8, launch=2e-6, split=5e-6),
           gs.Device("H", 1 << 30, bandwidth=2e8, flops=1e10, launch=5e-6, split=7e-6, host=True))
LINK = {("A", "H"): gs.Link(1e9, 11e-6), ("H", "A"): gs.Link(3e9, 13e-6), ("B", "H"): gs.Link(7e8, 17e-6)}


def slow(plan, devices, link):
    """The price as plain arithmetic over what the plan shows: (seconds of nodes by device, of copies, of splits)."""
    by_name = {device.name: device for device in devices}
    known = facts(plan.graph)
    nodes = dict.fromkeys(by_name, 0.0)
    for node, nbytes, flops in zip(known.nodes, known.nbytes, known.flops, strict=True):
        device = by_name[plan.backend_of(node).name]
        nodes[device.name] += max(nbytes / device.bandwidth, flops / device.flops) + device.launch
    copies = 0.0
    for copy in plan.copies:
        root = copy.tensor.root
        source = root.backend.name if root.is_resident else plan.backends[
            plan.data.memory_index(plan.index_of(root))].name
        route = [source, *(["H"] if "H" not in (source, copy.backend.name) else []), copy.backend.name]
        for way in pairwise(route):
            used = link.get(way) or link[way[::-1]]
            copies += used.latency + copy.nbytes / used.bandwidth
    return list(nodes.values()), copies, sum(by_name[split.backend.name].split for split in plan.splits)


@given(recipes())
@quick(60)
def test_a_price_is_the_sum_over_nodes_copies_and_splits(recipe):
    built = Built(many_residents(recipe), n_homes=3)
    backends = [gs.DryBackend(device.name) for device in DEVICES]
    for home, backend in zip(built.homes, backends, strict=True):
        backend.alloc_tensors(home)
    with gs.Scheduler(backends) as scheduler:
        for node in built.graph.nodes[::5]:
            if node.computes and node.view_src is None:
                scheduler.set_tensor_backend(node, backends[len(node.name) % 3])
        plan = scheduler.plan(built.graph)
    if plan.data.write_backs:
        return      # below
    compute, copies, splits = slow(plan, DEVICES, LINK)
    price = gs.price(plan, DEVICES, LINK)
    assert price.compute == pytest.approx(compute) and price.copies == pytest.approx(copies)
    assert price.splits == pytest.approx(splits)
    assert price.seconds == pytest.approx(sum(compute) + copies + splits)


def two_devices(ctx, weights, more=()):
    """relu(w0 x) on A, w1 times that on H: (backends, graph)."""
    backends = [gs.DryBackend("A"), *more, gs.DryBackend("H")]
    x = ctx.tensor("f32", (64,), "x", input=True)
    for k, backend in enumerate((backends[0], backends[-1])):
        w = weights.tensor("f16", (64, 64), f"w{k}")
        backend.alloc_tensors(weights)
        x = ctx.relu(ctx.mul_mat(w, x))
    return backends, gs.Graph(x)


@pytest.fixture
def plan():
    with gs.Context("graph") as ctx, gs.Context("weights") as weights:
        backends, graph = two_devices(ctx, weights)
        with gs.Scheduler(backends) as scheduler:
            yield scheduler.plan(graph)


def test_the_parts_of_a_price(plan):
    a, _, h = DEVICES
    price = gs.price(plan, [a, h], gs.Link(1e9, 1e-3))
    product, relu = 64 * 64 * 2 + 2 * 64 * 4, 2 * 64 * 4
    work = ((product, 2 * 64 * 64), (relu, 2 * 64))
    seconds = [max(n / d.bandwidth, ops / d.flops) + d.launch for d in (a, h) for n, ops in work]
    assert price.compute == pytest.approx((sum(seconds[:2]), sum(seconds[2:])))
    assert price.copies == pytest.approx(sum(1e-3 + copy.nbytes / 1e9 for copy in plan.copies))
    assert price.splits == pytest.approx(len(plan.splits[0:1]) * 3e-6 + 7e-6)
    assert price.seconds == sum(price.compute) + price.copies + price.splits
    assert pickle.loads(pickle.dumps(price)) == price


def test_devices_are_matched_by_name_whatever_their_order(plan):
    a, b, h = DEVICES
    by_name = gs.price(plan, [h, b, a], LINK)
    link = gs.Link(1e9)
    in_order = gs.price(plan, [a.replace(name="X"), h.replace(name="Y")], link)
    assert by_name.compute[::-1] == gs.price(plan, DEVICES, LINK).compute and by_name.compute[1] == 0
    assert in_order == gs.price(plan, [a, h], link)


@pytest.mark.parametrize("names", [("A", "X"), ("A",), ("X",), ("A", "X", "Y"), ()])
def test_a_backend_without_a_device_is_an_error(plan, names):
    devices = [DEVICES[0].replace(name=name) for name in names]
    with pytest.raises(ValueError, match=r"backend '[AH]' of the plan has no device; devices are"):
        gs.price(plan, devices)


def test_a_larger_fill_never_costs_less():
    with gs.Context("graph") as ctx, gs.Context("cache") as caches, gs.DryBackend("H") as backend:
        cache = caches.tensor("f16", (64, 1000))
        backend.alloc_tensors(caches, usage="any")
        graph = gs.Graph(ctx.mul_mat(cache, ctx.tensor("f32", (64,), input=True)))
        with gs.Scheduler([backend]) as scheduler:
            plan = scheduler.plan(graph)
        prices = [gs.price(plan, DEVICES, LINK, fill=fill).seconds for fill in (0, .5, 1)]
    assert prices == sorted(prices) and prices[0] < prices[1]


def test_a_pricer_prices_plans_of_its_graph_in_any_order_of_nodes(plan):
    pricer = Pricer(facts(plan.graph), DEVICES, Links(DEVICES, LINK))
    assert pricer.price(plan) == gs.price(plan, DEVICES, LINK) == pricer.price(plan)
    with gs.Scheduler(plan.backends) as scheduler:
        again = scheduler.plan(plan.graph.with_order(plan.graph.nodes))
    assert again.graph is not plan.graph and pricer.price(again) == pricer.price(plan)
    with gs.Context("other") as ctx, gs.Context("weights") as weights:
        backends, graph = two_devices(ctx, weights)
        with gs.Scheduler(backends) as scheduler, pytest.raises(gs.GraphError, match="is not in the graph of the plan"):
            pricer.price(scheduler.plan(graph))


def test_a_node_that_writes_into_a_copy_pays_for_the_way_back():
    with gs.Context("graph") as ctx, gs.Context("cache") as caches:
        a, h = gs.DryBackend("A", supports_op=lambda node: node.op != "CPY"), gs.DryBackend("H")
        cache = caches.tensor("f32", (64,), "cache")
        a.alloc_tensors(caches, usage="any")
        graph = gs.Graph(ctx.cpy(ctx.tensor("f32", (64,), "x", input=True), cache))
        with gs.Scheduler([a, h]) as scheduler:
            plan = scheduler.plan(graph)
        assert plan.data.write_backs
        price = gs.price(plan, DEVICES, {**LINK, ("H", "A"): gs.Link(1e9, 1.0), ("A", "H"): gs.Link(1e9, 100.0)})
    there = sum(copy.backend is h for copy in plan.copies)
    assert math.floor(price.copies) == 100 * there + len(plan.data.write_backs)


def test_a_copy_of_a_weight_comes_from_where_it_was_when_the_plan_was_made():
    with gs.Context("graph") as ctx, gs.Context("weights") as weights, gs.DryBackend("C") as other:
        w = weights.tensor("f16", (64, 64), "w")
        other.alloc_tensors(weights)
        graph = gs.Graph(ctx.mul_mat(w, ctx.tensor("f32", (64,), "x", input=True)))
        with gs.Scheduler([gs.DryBackend("A"), dry_device("H", reads=[other])]) as scheduler:
            scheduler.set_tensor_backend(graph.nodes[0], scheduler.backends[0])
            plan = scheduler.plan(graph)
        link = {("H", "A"): gs.Link(1e12, 3.0), ("A", "H"): gs.Link(1e12, 50.0)}
        price = gs.price(plan, DEVICES, link)
        gs.bind_resident(w, None, 0)
        plan.backends[0].alloc_tensors(weights)
        assert gs.price(plan, DEVICES, link) == price
    assert [copy.tensor for copy in plan.copies].count(w) == 1
    assert price.copies == pytest.approx(3.0 * len(plan.copies), rel=1e-6)


def test_the_steps_of_a_price(plan):
    a, _, h = DEVICES
    link = gs.Link(1e9, 1e-3)
    whole, steps = gs.price(plan, [a, h], link), price_steps(plan, [a, h], link)
    kinds = [(step.kind, step.backend) for step in plan.program.steps]
    assert len(steps) == len(kinds) and kinds[0][0] == "load"
    runs = [seconds for (kind, _), seconds in zip(kinds, steps, strict=True) if kind == "run"]
    assert runs == pytest.approx([whole.compute[0] + a.split, whole.compute[1] + h.split])
    assert sum(steps) == pytest.approx(whole.seconds)
    copies = [seconds for (kind, _), seconds in zip(kinds, steps, strict=True) if kind == "copy"]
    assert copies == pytest.approx([1e-3 + 64 * 4 / 1e9])


@pytest.mark.parametrize("seed", range(60))
def test_steps_are_a_price_but_for_copies_that_are_not_made_again_and_splits_of_views(seed):
    plan = plan_of(random_case(Random(seed)))
    devices = [gs.Device(b.name, 1 << 40, bandwidth=1e9 * (k + 1), flops=1e9, launch=1e-6, split=3e-6,
                         host=b is plan.backends[-1]) for k, b in enumerate(plan.backends)]
    link = gs.Link(2e9, 1e-5)
    whole, steps = gs.price(plan, devices, link), price_steps(plan, devices, link)
    runs = [(step, seconds) for step, seconds in zip(plan.program.steps, steps, strict=True) if step.kind == "run"]
    computing = [split for split in plan.splits if any(t.computes for t in split.nodes)]
    assert sum(seconds for _, seconds in runs) == pytest.approx(sum(whole.compute) + 3e-6 * len(computing))
    moved = sum(steps) - sum(seconds for _, seconds in runs)
    assert moved <= whole.copies + 1e-12
    made = [step for step in plan.program.steps if step.kind != "run" and step.locations[0].id >= plan.data.n_tensors]
    if len(made) == len(plan.copies) + len(plan.data.write_backs):
        assert moved == pytest.approx(whole.copies)


# -- weights that a store fetches ------------------------------------------------------------------------------------

CPU = gs.Device("CPU", 1 << 30, bandwidth=1e9, flops=1e12, launch=1e-6, split=0.0, host=True)


def disk(bandwidth, launch=1e-5):
    return gs.Device("disk", 1 << 30, bandwidth=bandwidth, flops=1e12, launch=launch, split=0.0)


def chain_from_a_store(n, window, stored=None, overlaps=True):
    """The plan of a chain of n products whose weights, of 64 KiB, are in a store: those in `stored`, or all."""
    store, cpu = gs.DryStore("disk"), gs.DryBackend("CPU")
    cpu.concurrent_copies = overlaps
    tensors = []
    for k in range(n):
        ctx = gs.Context()
        tensors.append(ctx.tensor("f32", (128, 128), f"w{k}"))
        (store if stored is None or k in stored else cpu).alloc_tensors(ctx)
    ctx = gs.Context()
    y = ctx.tensor("f32", (128, 1), "x", input=True)
    for w in tensors:
        y = ctx.mul_mat(w, y)
    with gs.Scheduler([store, cpu], windows={cpu: window}) as scheduler:
        return scheduler.plan(gs.Graph(ctx.set_output(y)))


def test_a_fetch_costs_what_the_other_steps_wait_for_it():
    plan = chain_from_a_store(1, 0)
    found = gs.price(plan, [disk(1e8), CPU])
    reading = 1e-5 + 65536 / 1e8
    assert found.fetches == pytest.approx(reading) and found.stalled == pytest.approx(reading)
    assert found.copies == 0 and found.seconds == pytest.approx(reading + sum(found.compute))
    assert max(price_steps(plan, [disk(1e8), CPU])) == pytest.approx(reading)


def test_a_copy_of_rows_that_a_store_has_read_costs_what_its_link_does():
    store, cpu = gs.DryStore("disk", supports_op=lambda node: not node.computes or node.op == "GET_ROWS"), \
        gs.DryBackend("CPU")
    stored = gs.Context()
    table = stored.tensor("f32", (128, 32), "table")
    store.alloc_tensors(stored)
    ctx = gs.Context()
    rows = ctx.get_rows(table, ctx.tensor("i32", 4, "ids", input=True))
    with gs.Scheduler([store, cpu]) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.set_output(ctx.silu(rows))))
    assert [copy.tensor.name or copy.tensor.op for copy in plan.copies] == ["ids", "GET_ROWS"]
    link = gs.Link(1e9, 1e-3)
    found = gs.price(plan, [disk(1e8), CPU], link)
    assert found.copies == pytest.approx(2e-3 + (4 * 4 + 4 * 128 * 4) / 1e9)
    assert found.fetches == 0
    assert sum(price_steps(plan, [disk(1e8), CPU], link)) == pytest.approx(found.seconds)


def test_fetches_overlap_with_computing_as_far_as_the_window_allows():
    wide, none = chain_from_a_store(6, 6 * 70_000), chain_from_a_store(6, 0)
    node = gs.price(wide, [disk(1e9), CPU]).compute[1] / 6
    slow = gs.price(wide, [disk(1e8), CPU])
    assert slow.seconds == pytest.approx(slow.fetches + node)               # the last product alone comes after
    fast = gs.price(wide, [disk(1e12, 1e-7), CPU])
    assert fast.stalled == pytest.approx(fast.fetches / 6)                  # the first one alone is waited for
    apart = chain_from_a_store(6, 6 * 70_000, overlaps=False)               # a backend without concurrent copies
    for plan in (none, apart):
        alone = gs.price(plan, [disk(1e8), CPU])
        assert alone.seconds == pytest.approx(alone.fetches + sum(alone.compute))
    # The disk reads while weights that stay are computed with.
    mixed = chain_from_a_store(6, 6 * 70_000, stored={3})
    found = gs.price(mixed, [disk(1e9, 0.0), CPU])
    assert found.fetches == pytest.approx(65536 / 1e9) and found.stalled == 0


def test_a_price_with_fetches_is_between_the_longer_part_and_the_sum():
    for seed in range(30):
        rng = Random(seed)
        plan = chain_from_a_store(rng.randrange(2, 9), rng.choice((0, 70_000, 150_000, 300_000)),
                                  {k for k in range(9) if rng.random() < 0.6})
        found = gs.price(plan, [disk(10 ** rng.uniform(7, 10)), CPU])
        others = sum(found.compute) + found.copies + found.splits
        assert max(others, found.fetches) <= found.seconds * (1 + 1e-12)
        assert found.seconds <= others + found.fetches + 1e-12
