"""Reserved arenas: shared by several graphs, and enough for smaller ones without planning."""

import numpy as np
import pytest
from devices import device, resident_tensor

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, make_plan, replay_plan


def attention(ctx: gs.Context, w: gs.Tensor, tokens: int, n_kv: int) -> tuple[gs.Graph, list[gs.Tensor]]:
    """A graph whose shapes, strides and view offsets depend on two numbers."""
    x = ctx.tensor("f32", (32, tokens), "x", input=True)
    mask = ctx.tensor("f32", (n_kv, tokens), "mask", input=True)
    q = ctx.mul_mat(w, x)
    k = ctx.tensor("f32", (32, n_kv), "k", input=True)
    scores = ctx.soft_max(ctx.mul_mat(k, q), mask, 0.2)
    last = ctx.view_2d(scores, n_kv, 1, scores.nb[1], (tokens - 1) * scores.nb[1])
    out = ctx.set_output(ctx.add(ctx.mul_mat(ctx.cont(ctx.transpose(k)), scores), x))
    tail = ctx.set_output(ctx.scale(ctx.cont(last), 3.0))
    return gs.Graph(out, tail), [x, mask, k, out, tail]


@pytest.mark.parametrize("policy", ["default", "seed"])
@pytest.mark.parametrize("tokens, n_kv", [(1, 8), (7, 64), (8, 64), (3, 40)])
def test_smaller_graphs_of_the_same_wiring_use_the_reserved_plan_and_compute_the_same(policy, tokens, n_kv):
    rng = np.random.default_rng(tokens)
    results = []
    for reserved in (True, False):
        backends = [gs.CpuBackend(name="A"), gs.CpuBackend(name="B")]
        w = resident_tensor(backends[0], (32, 32))
        w.set(np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32))
        with gs.Scheduler(backends, policy=policy) as scheduler:
            if reserved:
                scheduler.reserve(attention(gs.Context(), w, 8, 64)[0])
                before = [scheduler.buffer_size(b) for b in backends]
            graph, (x, mask, k, out, tail) = attention(gs.Context(), w, tokens, n_kv)
            plan = scheduler.alloc(graph)
            plan.verify()
            if reserved:
                assert [scheduler.buffer_size(b) for b in backends] == before
                if (tokens, n_kv) != (8, 64):
                    assert set(plan.methods) == {"replayed"}
            if not results:
                shapes = ((tokens, 32), (tokens, n_kv), (n_kv, 32))
                data = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
            for t, values in zip((x, mask, k), data, strict=True):
                t.set(values)
            for _ in range(2):
                scheduler.compute(graph)
            results.append((out.numpy(), tail.numpy()))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_reserved_plans_of_one_wiring_serve_side_by_side(order, monkeypatch):
    """A plan that was reserved later replaces none, and other plans in the cache evict none."""
    sizes = [(2, 64), (8, 16), (8, 64)]
    backend = gs.CpuBackend()
    w = resident_tensor(backend, (32, 32))
    with gs.Scheduler([backend], plan_cache=1) as scheduler:
        for i in order:
            scheduler.reserve(attention(gs.Context(), w, *sizes[i])[0])
        held = scheduler.buffer_size(backend)
        monkeypatch.setattr("ggml_sched.planning.planner.make_plan", None)
        for tokens, n_kv in ((1, 64), (8, 8), (7, 63), (8, 64), (2, 33), (1, 1)):
            plan = scheduler.alloc(attention(gs.Context(), w, tokens, n_kv)[0])
            plan.verify()
            assert set(plan.methods) == {"replayed"} or (tokens, n_kv) in sizes
        assert scheduler.buffer_size(backend) == held


def chain_of_heirs(rows: int, width: int, at: int, then: int) -> tuple[gs.Graph, gs.Tensor, gs.Tensor, list]:
    """Rows of a large result are computed in place, then one row of those: memory handed over at two offsets."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (width, 1), "x", input=True)
    large = ctx.repeat(x, ctx.tensor("f32", (width, rows), "like"))
    part = ctx.relu(ctx.view_2d(large, width, rows // 2, large.nb[1], at * large.nb[1]))
    row = ctx.sqr(ctx.scale(ctx.view_1d(part, width, then * part.nb[1]), 0.5))
    out = ctx.set_output(ctx.add(row, x))
    return gs.Graph(out), x, out, [large, part, row]


@pytest.mark.parametrize("rows, width, at, then", [(16, 32, 5, 3), (16, 64, 2, 1), (16, 64, 0, 0), (8, 64, 3, 2),
                                                   (12, 16, 1, 0), (16, 64, 8, 7)])
def test_memory_handed_over_at_an_offset_moves_with_the_smaller_graphs_views(rows, width, at, then):
    results = []
    for reserved in (True, False):
        backend = gs.CpuBackend()
        with gs.Scheduler([backend]) as scheduler:
            if reserved:
                graph, _, _, (large, part, row) = chain_of_heirs(16, 64, 5, 3)
                scheduler.reserve(graph)
                plan = scheduler.plan(graph)
                assert [plan.offset_of(t) - plan.offset_of(large) for t in (part, row)] == [5 * 256, 8 * 256]
                before = scheduler.buffer_size(backend)
            graph, x, out, (large, part, row) = chain_of_heirs(rows, width, at, then)
            plan = scheduler.alloc(graph)
            plan.verify()
            if reserved and at + then <= 8:
                assert plan.methods == ("replayed",) and scheduler.buffer_size(backend) == before
                assert [plan.offset_of(t) - plan.offset_of(large) for t in (part, row)] == [
                    at * width * 4, (at + then) * width * 4]
            x.set(np.arange(width, dtype=np.float32) - 9)
            for _ in range(2):
                scheduler.compute(graph)
            results.append(out.numpy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_only_the_default_policy_moves_what_took_over_the_front_to_an_offset(policy):
    graphs = [chain_of_heirs(16, 64, at, 0) for at in (0, 2)]
    with gs.Scheduler([gs.DryBackend("A")], policy) as scheduler:
        scheduler.reserve(graphs[0][0])
        plan = scheduler.plan(graphs[0][0])
        assert plan.data.is_inplace(graphs[0][0].id_of(graphs[0][3][1]))
        graph, (large, part, _) = graphs[1][0], graphs[1][3]
        plan = scheduler.plan(graph)
        plan.verify()
        assert plan.data.is_inplace(graph.id_of(part)) == (policy == "default")
        assert policy == "seed" or plan.offset_of(part) == plan.offset_of(large) + 512


def test_memory_handed_over_at_an_offset_that_is_not_aligned_in_the_smaller_graph_is_planned_anew():
    graph, *_ = chain_of_heirs(16, 64, 5, 3)
    smaller, _, _, (_, part, _) = chain_of_heirs(16, 24, 5, 3)
    with gs.Scheduler([gs.DryBackend("A", alignment=64)]) as scheduler:
        scheduler.reserve(graph)
        plan = scheduler.alloc(smaller)
        plan.verify()
        assert set(plan.methods) != {"replayed"} and not plan.data.is_inplace(smaller.id_of(part))


def test_a_larger_graph_is_planned_and_grows_the_arena():
    backend = gs.DryBackend("A")
    w = resident_tensor(backend, (32, 32))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(attention(gs.Context(), w, 4, 32)[0])
        before = scheduler.buffer_size(backend)
        plan = scheduler.alloc(attention(gs.Context(), w, 8, 64)[0])
        plan.verify()
        assert set(plan.methods) != {"replayed"} and scheduler.buffer_size(backend) > before


def test_an_op_that_no_longer_runs_in_place_is_planned_anew():
    """In the reserved graph ADD takes over its second source; here that source is broadcast."""
    backend, graphs = gs.DryBackend("A"), []
    for rows in (4, 1):
        ctx = gs.Context()
        a = ctx.scale(ctx.tensor("f32", (64, 4), "a", input=True), 2.0)
        b = ctx.scale(ctx.tensor("f32", (64, rows), "b", input=True), 2.0)
        graphs.append(gs.Graph(ctx.set_output(ctx.add(a, b)), ctx.set_output(ctx.sqr(a))))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(graphs[0])
        plan = scheduler.alloc(graphs[1])
        plan.verify()
        assert set(plan.methods) != {"replayed"}


def test_a_plan_cache_of_zero_never_replays():
    backend = gs.DryBackend("A")
    w = resident_tensor(backend, (32, 32))
    with gs.Scheduler([backend], plan_cache=0) as scheduler:
        scheduler.reserve(attention(gs.Context(), w, 8, 64)[0])
        assert set(scheduler.alloc(attention(gs.Context(), w, 2, 64)[0]).methods) != {"replayed"}


def test_backends_are_asked_once_for_a_graph_that_a_reserved_plan_does_not_serve():
    def request(n):
        ctx = gs.Context()
        x = ctx.tensor("f32", n, "x", input=True)
        return Request(gs.Graph(ctx.set_output(ctx.sqr(ctx.relu(x)))), Devices((backend,)), None)

    backend = device(gs.DryBackend, "A", records={"supports_op"})
    reserved, larger = make_plan(request(64), Policy()), request(4096)
    backend.take()
    assert replay_plan(larger, reserved, Policy()) is None
    make_plan(larger, Policy())
    make_plan(larger, Policy(stream=True))
    assert backend.count("supports_op") == 2       # nodes


def test_a_smaller_graph_that_a_backend_does_not_run_is_planned_anew():
    """Backends may judge by shapes."""
    picky, other = gs.DryBackend("picky", supports_op=lambda t: t.ne[1] >= 4), gs.DryBackend("other")

    def build(rows):
        ctx = gs.Context()
        return gs.Graph(ctx.sqr(ctx.tensor("f32", (8, rows), "x")))

    large, small = build(4), build(2)
    with gs.Scheduler([picky, other]) as scheduler:
        scheduler.reserve(large)
        assert scheduler.plan(large).backend_of(large.nodes[0]) is picky
        plan = scheduler.plan(small)
        plan.verify()
        assert plan.backend_of(small.nodes[0]) is other


def test_a_reset_forgets_what_was_reserved(ctx):
    graph = gs.Graph(ctx.sqr(ctx.tensor("f32", (8, 4), "x")))
    small = gs.Graph(ctx.sqr(ctx.tensor("f32", (8, 2), "x")))
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        scheduler.reserve(graph)
        assert scheduler.plan(small).methods == ("replayed",)
        scheduler.reset()
        assert scheduler.plan(small).methods != ("replayed",)
