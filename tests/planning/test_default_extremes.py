"""Extremes: many holes, backends, splits, uses and nodes; nothing at all; several threads."""

import threading

import numpy as np
import pytest
from devices import devices, poisoned, resident, resident_tensor, verified

import ggml_sched as gs

F32 = np.float32


# -- large numbers of everything ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_fifty_thousand_holes(ctx, policy):
    """100,000 tensors alive at once; then every other one dies, in no simple order; then the rest."""
    n = 100_000
    x = ctx.tensor("f32", 8, "x", input=True)
    parts = [ctx.scale(x, 1.0) for _ in range(n)]
    ends = [ctx.sum(parts[k * 77_777 % (n // 2) * 2]) for k in range(n // 2)]
    more = [ctx.sum(parts[k]) for k in range(1, n, 2)]
    graph = gs.Graph(*parts, *ends, *more)
    with gs.Scheduler([gs.DryBackend("D")], policy=policy) as sched:
        plan = sched.plan(graph)
    assert plan.buffer_sizes[0] >= plan.live_bytes[0] >= 32 * n


@pytest.mark.parametrize("sizes", [[2**63 - 1], [2**63 - 64, 63], [2**62, 2**62 - 1]])
def test_an_arena_of_all_that_63_bits_hold(ctx, sizes):
    parts = [ctx.dup(ctx.tensor("i8", size)) for size in sizes]
    with gs.Scheduler([gs.DryBackend("D", alignment=1)]) as sched:
        plan = verified(sched.plan(gs.Graph(*parts)))
        assert plan.buffer_sizes == plan.live_bytes == (2**63 - 1,)
        more = gs.Graph(*parts, ctx.dup(ctx.tensor("i8", 1, "more")))
        with pytest.raises(gs.OutOfMemory, match="64-bit"):
            sched.plan(more)


def test_no_chunk_ends_beyond_63_bits(ctx):
    graph = gs.Graph(*[ctx.dup(ctx.tensor("i8", 2**47 + 1)) for _ in range(32_767)])
    with gs.Scheduler([gs.DryBackend("D", alignment=1, max_buffer_size=2**60)]) as sched:
        assert sched.plan(graph).chunk_sizes == ((2**47 + 1,) * 32_767,)
        more = gs.Graph(*graph.nodes, ctx.dup(ctx.tensor("i8", 2**47 + 1, "more")))
        with pytest.raises(gs.OutOfMemory, match="more"):
            sched.plan(more)


def test_three_thousand_streamed_weights():
    """Each opens a split of its own; all use the same memory."""
    device, host = devices(2, offloads=("MUL_MAT",))
    home, ctx = gs.Context(), gs.Context()
    weights = [home.tensor("f32", (4, 4), f"w{k}") for k in range(3_000)]
    host.alloc_tensors(home)
    x = h = ctx.tensor("f32", (4, 1), "x", input=True)
    for k, w in enumerate(weights):
        w.set(np.eye(4, dtype=F32)[::-1 if k % 2 else 1])
        h = ctx.mul_mat(w, h)
    graph = gs.Graph(h)
    with gs.Scheduler((device, host)) as sched:
        plan = verified(sched.alloc(graph))
        assert len(plan.splits) == 3_000 and plan.buffer_sizes[0] <= 8 * 64
        x.set(np.arange(4, dtype=F32))
        assert sched.compute(graph)
        np.testing.assert_array_equal(h.numpy(), np.arange(4, dtype=F32))


@pytest.mark.parametrize("n, check", [(500, verified), (10_000, lambda plan: plan)])
def test_a_tensor_read_by_n_nodes_on_each_of_two_backends(ctx, n, check):
    """Moving a seam counts the readers of each tensor; this stays fast when every node reads one tensor."""
    first, second = gs.DryBackend("D0"), gs.DryBackend("D1")
    wa, wb = resident_tensor(first, 4, "wa"), resident_tensor(second, 4, "wb")
    x = h = ctx.tensor("f32", 4, "x", input=True)
    for weight in (wa, wb):
        h = ctx.add(h, weight)
        for _ in range(n):
            h = ctx.mul(h, x)
    with gs.Scheduler((first, second)) as sched:
        assert len(check(sched.plan(gs.Graph(ctx.add(h, wa)))).splits) == 3


def test_a_chain_of_ten_thousand_nodes(ctx):
    backend = poisoned("CPU")
    x = h = ctx.tensor("f32", 4, "x", input=True)
    for _ in range(10_000):
        h = ctx.neg(h)
    graph = gs.Graph(h)
    with gs.Scheduler([backend]) as sched:
        plan = verified(sched.alloc(graph))
        assert plan.buffer_sizes == (128,)      # the input, and one tensor in place
        x.set(np.arange(4, dtype=F32))
        assert sched.compute(graph)
        np.testing.assert_array_equal(h.numpy(), np.arange(4, dtype=F32))


# -- empty and tiny graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_backends", [1, 3])
def test_a_leaf_that_only_unused_views_name_beside_nodes(ctx, n_backends):
    """Such a leaf once had no backend, and the allocator wrote in front of the first arena."""
    with gs.Scheduler(devices(n_backends)) as sched:
        x = ctx.tensor("f32", 4, "x", input=True)
        looked_at = ctx.tensor("f32", 4, "looked at")
        out = ctx.neg(x)
        view = ctx.reshape(looked_at, 2, 2)
        for graph in (gs.Graph(view, out), gs.Graph(out, view)):
            verified(sched.alloc(graph))
            x.set(np.ones(4, F32))
            looked_at.set(np.arange(4, dtype=F32))
            sched.compute(graph)
            np.testing.assert_array_equal(out.numpy(), -np.ones(4, F32))
            np.testing.assert_array_equal(view.numpy().ravel(), np.arange(4, dtype=F32))


# -- threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared backends", "backends of their own"])
def test_two_schedulers_in_two_threads(shared):
    common = devices(2)
    failures, barrier = [], threading.Barrier(4)

    def work(factor):
        try:
            backends = common if shared else devices(2)
            w = resident(backends[0], f"w{factor}", np.full((4, 4), factor, F32))
            with gs.Scheduler(backends) as sched:
                barrier.wait(20)
                for turn in range(30):
                    ctx = gs.Context()
                    x = ctx.tensor("f32", (4, 1), "x", input=True)
                    out = ctx.mul_mat(w, ctx.scale(x, 2.0))
                    graph = gs.Graph(out)
                    sched.alloc(graph)
                    x.set(np.full((1, 4), turn, F32))
                    sched.compute(graph)
                    np.testing.assert_array_equal(out.numpy(), np.full(4, 8 * turn * factor, F32))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_that_fight_over_one_scheduler_corrupt_nothing():
    """Each either computes right or gets the error."""
    graphs = []
    for factor in (2, 3, 5, 7):
        ctx = gs.Context()
        x = ctx.tensor("f32", 64, "x", input=True)
        out = ctx.scale(ctx.sqr(x), factor)
        graphs.append((gs.Graph(out), x, out, factor))
    failures, refused, computed = [], [], []
    with gs.Scheduler(devices(2)) as sched:
        for graph, x, _, _ in graphs:
            sched.alloc(graph)
            x.set(np.ones(64, F32))

        def fight(graph):
            for _ in range(60):
                try:
                    assert sched.compute(graph) is True
                    computed.append(graph)
                except gs.Error as error:
                    (refused if "at work" in str(error) else failures).append(error)
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=fight, args=(graph,)) for graph, *_ in graphs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and computed
        for graph, _, out, factor in graphs:
            assert sched.compute(graph)
            np.testing.assert_array_equal(out.numpy(), np.full(64, factor, F32))
