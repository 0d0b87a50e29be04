"""Reading a tensor gives data of the last compute or data that was set; otherwise an error names what is missing."""

import gc
import threading
import time

import numpy as np
import pytest
from devices import PATIENCE, Gated, poisoned, resident

import ggml_sched as gs


def fail(_plan) -> None:
    time.sleep(0.02)        # a concurrent read has to wait for it
    raise gs.BackendError("out of order")


@pytest.fixture
def backend():
    with poisoned("A", before={"graph_plan_compute": lambda _plan: None}) as backend:
        yield backend


def squares(backend: gs.Backend) -> tuple[gs.Scheduler, gs.Graph, gs.Tensor, gs.Tensor]:
    ctx = gs.Context()
    x = ctx.tensor("f32", 4, "x", input=True)
    out = ctx.set_name(ctx.set_output(ctx.sqr(x)), "out")
    scheduler = gs.Scheduler([backend])
    graph = gs.Graph(out)
    scheduler.alloc(graph)
    x.set(np.full(4, 3.0))
    return scheduler, graph, x, out


# -- results -----------------------------------------------------------------------------------------


def test_a_result_is_read_after_its_compute_only(backend):
    scheduler, graph, _, out = squares(backend)
    with scheduler:
        with pytest.raises(gs.HazardError, match="'out'.*not been computed"):
            out.numpy()
        scheduler.compute(graph)
        assert out.numpy().tolist() == [9] * 4
        scheduler.alloc(graph)
        assert out.numpy().tolist() == [9] * 4


def test_a_result_that_is_not_kept_says_so_before_and_after_the_compute(ctx, backend):
    x = ctx.tensor("f32", 4, "x", input=True)
    lost = ctx.set_name(ctx.sqr(x), "lost")
    graph = gs.Graph(ctx.set_output(ctx.neg(lost)))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        with pytest.raises(gs.HazardError, match="'lost' .* is not kept: its memory serves other nodes.*set_output"):
            lost.numpy()
        x.set(np.full(4, 3.0))
        scheduler.compute(graph)
        with pytest.raises(gs.HazardError, match="'lost' .* is not kept: its memory serves other nodes.*set_output"):
            lost.numpy()


def test_a_graph_that_comes_back_has_no_results_until_it_is_computed(ctx, backend):
    scheduler, graph, _, out = squares(backend)
    other = gs.Graph(ctx.set_output(ctx.scale(ctx.tensor("f32", 64, "other", input=True), 2.0)))
    with scheduler:
        scheduler.compute(graph)
        scheduler.compute(other, zero=True)
        scheduler.alloc(graph)
        with pytest.raises(gs.HazardError, match="'out'"):
            out.numpy()
        scheduler.compute(graph)
        assert out.numpy().tolist() == [9] * 4


@pytest.mark.parametrize("queued", [False, True])
def test_a_compute_that_failed_leaves_no_results(backend, queued):
    scheduler, graph, x, out = squares(backend)
    with scheduler:
        scheduler.compute(graph)
        x.set(np.full(4, 5.0))
        backend.before["graph_plan_compute"] = fail
        if queued:
            scheduler.compute_async(graph)
            with pytest.raises(gs.HazardError, match="synchronize"):
                out.numpy()
            with pytest.raises(gs.BackendError, match="out of order"):
                scheduler.synchronize()
        else:
            with pytest.raises(gs.BackendError, match="out of order"):
                scheduler.compute(graph)
        with pytest.raises(gs.HazardError, match="'out'.*not been computed"):
            out.numpy()
        backend.before.clear()
        scheduler.compute(graph)
        assert out.numpy().tolist() == [25] * 4


def test_after_a_stop_there_are_the_results_up_to_it(ctx, backend):
    x = ctx.tensor("f32", 4, "x", input=True)
    nodes = [ctx.set_name(ctx.set_output(ctx.scale(x, float(k))), f"n{k}") for k in range(1, 4)]
    graph = gs.Graph(*nodes)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.ones(4))
        assert not scheduler.compute(graph, lambda node: node is not nodes[1])
        assert [nodes[k].numpy()[0] for k in range(2)] == [1, 2]
        with pytest.raises(gs.HazardError, match="'n3'.*stopped"):
            nodes[2].numpy()


def test_an_empty_result_is_always_there(ctx, backend):
    nothing = ctx.set_output(ctx.sqr(ctx.tensor("f32", (4, 0), "nothing", input=True)))
    busy = ctx.tensor("f32", 64, "busy", input=True)
    graph = gs.Graph(nothing, ctx.neg(ctx.sqr(ctx.neg(busy))))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        assert nothing.numpy().shape == (0, 4)
        scheduler.compute(graph, zero=True)
        assert nothing.numpy().shape == (0, 4)


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_result_whose_memory_was_reused_is_refused_and_an_output_is_not(ctx, policy):
    x = ctx.tensor("f32", (64,), "x", input=True)
    doubled = ctx.set_name(ctx.scale(x, 2.0), "doubled")
    kept = ctx.set_output(ctx.set_name(ctx.scale(x, 3.0), "kept"))
    out = ctx.set_output(ctx.relu(ctx.sqr(doubled)))
    sums = ctx.set_output(ctx.add(kept, kept))
    with gs.Scheduler([gs.CpuBackend()], policy=policy) as scheduler:
        graph = gs.Graph(out, sums)
        scheduler.alloc(graph)
        x.set(np.arange(64, dtype=np.float32))
        seen = {}
        scheduler.compute(graph, callback=lambda node: seen.update({node.name: node.numpy()}))
        np.testing.assert_array_equal(seen["doubled"], 2 * np.arange(64))
        with pytest.raises(gs.HazardError, match="'doubled'.*set_output"):
            doubled.numpy()
        with pytest.raises(gs.HazardError, match="'doubled'"):
            ctx.view_1d(doubled, 4).numpy()
        np.testing.assert_array_equal(kept.numpy(), 3 * np.arange(64))
        np.testing.assert_array_equal(out.numpy(), (2.0 * np.arange(64)) ** 2)
        np.testing.assert_array_equal(x.numpy(), np.arange(64))


@pytest.mark.parametrize("make", [
    lambda ctx, y: ctx.unary(y, "neg", inplace=True),
    lambda ctx, y: ctx.cpy(ctx.scale(ctx.tensor("f32", 4, "other", input=True), 5.0), y),
    lambda ctx, y: ctx.view_1d(ctx.unary(y, "neg", inplace=True), 2),
], ids=["in place", "copy", "view"])
@pytest.mark.parametrize("root", ["node", "input"])
def test_a_node_that_is_not_in_the_graph_is_not_read_as_the_tensor_that_has_its_memory(ctx, backend, make, root):
    x = ctx.tensor("f32", 4, "x", input=True)
    y = ctx.set_output(ctx.set_name(ctx.scale(x, 2.0), "y")) if root == "node" else x
    written = ctx.set_output(ctx.set_name(make(ctx, y), "written"))
    both, first = gs.Graph(written), gs.Graph(ctx.set_output(ctx.sqr(y)))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(first)
        x.set(np.ones(4))
        with pytest.raises(gs.HazardError, match="not kept: the graph that has its memory now does not have the node"):
            written.numpy()                         # never computed
        scheduler.compute(both, zero=True)
        of_both = written.numpy().tolist()
        scheduler.compute(first, zero=True)
        with pytest.raises(gs.HazardError, match="not kept: the graph that has its memory now does not have the node"):
            written.numpy()
        assert ctx.view_1d(y, 2).numpy().tolist() == [2.0, 2.0] if root == "node" else [1.0, 1.0]
        scheduler.compute(both, zero=True)
        assert written.numpy().tolist() == of_both
        scheduler.compute(gs.Graph(ctx.set_output(ctx.sqr(ctx.tensor("f32", 4, "z", input=True)))), zero=True)
        with pytest.raises(gs.PlacementError, match="no address"):
            written.numpy()


def test_a_node_of_a_former_graph_in_memory_that_stays_is_read(ctx, backend):
    cache = resident(backend, "cache", np.zeros(4), "any")
    x = ctx.tensor("f32", 4, "x", input=True)
    written = ctx.cpy(x, cache)
    first, other = gs.Graph(written), gs.Graph(ctx.set_output(ctx.sqr(cache)))
    with gs.Scheduler([backend]) as scheduler, gs.Scheduler([backend]) as second:
        scheduler.alloc(first)
        x.set(np.full(4, 3.0))
        scheduler.compute(first)
        scheduler.compute(other)
        second.compute(other)
        assert written.numpy().tolist() == ctx.view_1d(written, 4).numpy().tolist() == [3] * 4


@pytest.mark.parametrize("queued", [False, True])
def test_a_backend_reads_what_it_has_computed_also_where_the_node_reads_a_copy(ctx, queued):
    """The backend is given a twin of such a node, which is in no graph."""
    class Reading(gs.CpuBackend):
        is_host = False

        def graph_compute(self, graph, *rest):
            super().graph_compute(graph, *rest)
            seen.extend(node.numpy().tolist() for node in graph.nodes if node.view_src is not None)

    seen = []
    device, host = Reading(1, "device"), gs.CpuBackend(1, "host")
    leaf, x = ctx.tensor("f32", 4, "leaf", input=True), ctx.tensor("f32", 4, "x", input=True)
    written = ctx.set_output(ctx.cpy(ctx.scale(x, 2.0), leaf))
    with gs.Scheduler([device, host]) as scheduler:
        for t, backend in ((leaf, device), (written.src[0], host), (written, device)):
            scheduler.set_tensor_backend(t, backend)
        graph = gs.Graph(written)
        scheduler.alloc(graph)
        x.set(np.ones(4))
        leaf.set(np.zeros(4))
        scheduler.compute_async(graph) if queued else scheduler.compute(graph)
        scheduler.synchronize()
    assert seen == [[2.0] * 4]


def test_a_view_of_an_input_takes_data_before_the_compute(ctx):
    """The data of an input waits on the host, as a whole: what a view gets is put into it."""
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    row, column = ctx.view_1d(x, 4, 16), ctx.view_2d(x, 1, 2, 16, 4)
    out = ctx.set_output(ctx.add(x, ctx.repeat(ctx.cont(column), x)))
    graph = gs.Graph(out, ctx.sqr(row))
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.zeros((2, 4)))
        row.set(np.arange(4.0))
        column.set([[5.0], [6.0]])
        np.testing.assert_array_equal(x.numpy(), [[0, 5, 0, 0], [0, 6, 2, 3]])
        scheduler.compute(graph)
        np.testing.assert_array_equal(out.numpy(), [[5, 10, 5, 5], [6, 12, 8, 9]])


# -- leafs that the graph writes to -----------------------------------------------------------------------


def accumulator(policy: str, backend: gs.Backend):
    """x becomes x + b, late: by then nodes have used much memory."""
    ctx = gs.Context()
    b, x = ctx.tensor("f32", 64, "b", input=True), ctx.tensor("f32", 64, "x", input=True)
    busy = ctx.sqr(ctx.neg(ctx.sqr(b)))
    total = ctx.scale(ctx.sum(ctx.concat(busy, busy, 0)), 0.0)
    written = ctx.set_output(ctx.cpy(ctx.add(ctx.add(b, total), x), x))
    scheduler = gs.Scheduler([backend], policy=policy)
    graph = gs.Graph(written)
    scheduler.alloc(graph)
    x.set(np.full(64, 7.0))
    b.set(np.ones(64))
    return scheduler, graph, x


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_leaf_is_as_it_was_set_when_the_compute_that_writes_to_it_fails(policy, queued, backend):
    scheduler, graph, x = accumulator(policy, backend)
    with scheduler:
        backend.before["graph_plan_compute"] = fail
        with pytest.raises(gs.BackendError):
            scheduler.compute_async(graph) if queued else scheduler.compute(graph)
            scheduler.synchronize()
        assert x.numpy().tolist() == [7] * 64
        backend.before.clear()
        scheduler.compute(graph)
        assert x.numpy().tolist() == [8] * 64


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_leaf_is_as_it_was_set_when_the_compute_stops_before_its_writer(policy, backend):
    scheduler, graph, x = accumulator(policy, backend)
    with scheduler:
        assert not scheduler.compute(graph, lambda node: False)
        assert x.numpy().tolist() == [7] * 64
        assert not scheduler.compute(graph, lambda node: node.op != "CPY")
        assert x.numpy().tolist() == [8] * 64


def test_a_leaf_is_as_it_was_set_when_its_graph_comes_back(ctx, backend):
    scheduler, graph, x = accumulator("default", backend)
    other = gs.Graph(ctx.set_output(ctx.scale(ctx.tensor("f32", 4096, "other", input=True), 2.0)))
    scheduler.reserve(other)
    with scheduler:
        scheduler.compute(graph)
        assert x.numpy().tolist() == [8] * 64
        scheduler.compute(other, zero=True)
        scheduler.alloc(graph)
        assert x.numpy().tolist() == [7] * 64


def test_setting_a_part_of_a_leaf_keeps_what_the_graph_has_written_to_the_rest(ctx, backend):
    a, x = ctx.tensor("f32", 8, "a", input=True), ctx.tensor("f32", 8, "x", input=True)
    graph = gs.Graph(ctx.set_output(ctx.cpy(ctx.scale(a, 2.0), x)))
    part = ctx.view_1d(x, 4, 16)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        a.set(np.ones(8))
        scheduler.compute(graph)
        part.set(np.full(4, 5.0))
        assert x.numpy().tolist() == [2] * 4 + [5] * 4


# -- weights and caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["node", "cache", "set"])
def test_reading_and_setting_a_cache_wait_for_queued_computes(through):
    backend, ctx = Gated("slow"), gs.Context()
    cache = resident(backend, "cache", np.zeros(4), "any")
    x = ctx.tensor("f32", 4, "x", input=True)
    written = ctx.set_output(ctx.cpy(x, cache))
    graph, gate = gs.Graph(written), threading.Event()
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.ones(4))
        backend.before = lambda number: gate.wait(PATIENCE)
        scheduler.compute_async(graph)
        threading.Timer(0.05, gate.set).start()
        if through == "set":
            cache.set(np.full(4, 3.0))
            scheduler.synchronize()
            assert cache.numpy().tolist() == [3] * 4
        else:
            assert (written if through == "node" else cache).numpy().tolist() == [1] * 4


# -- orders of their own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopted", [False, True])
def test_a_graph_that_is_computed_in_another_order_comes_back(tmp_path, adopted):
    """Only the scheduler has that order, and allocations hold no reference to the graph."""
    ctx, backend = gs.Context(), gs.CpuBackend(1)
    x = ctx.tensor("f32", 64, "x", input=True)
    rows = [ctx.repeat(ctx.scale(x, 2.0 + k), ctx.tensor("f32", (64, 64))) for k in range(3)]
    sums = [ctx.set_output(ctx.sum(row)) for row in rows]
    base = gs.Graph(*sums)
    graph = base.with_order([n for n in base.nodes if n.op != "SUM"] + [n for n in base.nodes if n.op == "SUM"])
    other = gs.Graph(ctx.set_output(ctx.sqr(x)))
    with gs.Scheduler([backend], reorder=True) as maker:
        plan = maker.plan(graph)
        assert plan.graph is not graph
        plan.save(tmp_path / "plan.json")
    with gs.Scheduler([backend], reorder=not adopted) as scheduler:
        if adopted:
            scheduler.adopt(gs.load_plan(tmp_path / "plan.json", graph, [backend]))
        del plan
        for turn in range(3):
            scheduler.alloc(graph)
            gc.collect()
            x.set(np.full(64, float(turn)))
            scheduler.compute(graph)
            assert [t.numpy()[0] for t in sums] == [64 * 64 * (2 + k) * turn for k in range(3)]
            found = scheduler.alloc(graph)
            assert found.given_graph is graph and found.graph is not graph
            scheduler.compute(other)


# -- schedulers that are gone ------------------------------------------------------------------------


def test_results_of_a_freed_scheduler_are_refused_and_its_inputs_are_not(backend):
    scheduler, graph, x, out = squares(backend)
    scheduler.compute(graph)
    assert np.all(out.numpy() == 9)
    del scheduler
    gc.collect()
    with pytest.raises(gs.HazardError, match="the scheduler that has allocated 'out'"):
        out.numpy()
    assert np.all(x.numpy() == 3)
