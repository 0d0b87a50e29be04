"""Random graphs on backends that compute random groups as one: the same bits as every node alone, in memory of its own.

What such a backend does to memory is in tests/support/fusing.py: members' memory is overwritten before they are
computed, and results that only the group reads are never written.
"""

import pytest
from devices import poisoned
from fusing import Fusing, FusingDeferred, anything
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes
from random_results import check, in_memory_of_their_own, set_all

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredQueues

SEEDS = st.integers(0, 1000)


@quick(60)
@given(recipes(), SEEDS)
def test_nodes_that_are_observed_are_computed_one_by_one(recipe, seed):
    """Each node's result is there when the callback observes it, also one that only its group reads."""
    plain, seen = {}, {}
    expected = in_memory_of_their_own(recipe)
    for backend, found in ((gs.CpuBackend(1), plain), (poisoned("F", base=Fusing, offer=anything(seed)), seen)):
        built = Built(recipe)
        with backend, gs.Scheduler([backend]) as sched:
            backend.alloc_tensors(built.homes[0])
            sched.alloc(built.graph)
            set_all(built)

            def look(node, built=built, found=found):
                found[built.graph.position_of(node)] = node.numpy().tobytes()

            sched.compute(built.graph, look)
            check(built, expected, "observed")
    assert plain == seen


def test_a_device_that_runs_late_gets_its_groups():
    ctx, world = gs.Context(), DeferredQueues(3)
    x = ctx.tensor("f32", 4, "x", input=True)
    graph = gs.Graph(ctx.relu(ctx.neg(x)))
    backend = poisoned("L", base=FusingDeferred, queues=world, offer=lambda graph: [(0, 1)])
    with backend, gs.Scheduler([backend]) as sched:
        sched.alloc(graph)
        for turn in range(3):
            x.set([1.0, -2.0, 3.0, -4.0 - turn])
            sched.compute_async(graph)
        sched.synchronize()
        assert graph.nodes[-1].numpy().tolist() == [0, 2, 0, 6]
        assert backend.fused == [("UNARY:NEG", "UNARY:RELU")] * 3


def test_the_overwritten_memory_is_seen(ctx):
    """A group that does not keep its source: the tests above would notice."""
    x = ctx.tensor("f32", 4, "x", input=True)
    t = ctx.relu(ctx.neg(x))
    with Fusing("F", lambda graph: [(0, 1)]) as backend, gs.Scheduler([backend]) as sched:
        plan = sched.alloc(gs.Graph(t))
        assert plan.data.groups == ((0, 1),)
        x.set([1.0, -2.0, 3.0, -4.0])
        sched.compute(plan.graph)
        assert t.numpy().tolist() == [0, 2, 0, 4]
        # What the plan keeps apart, put together by force.
        backend.compute_as_one([*plan.graph.nodes], {t})
        good = t.numpy().tolist()
        neg = plan.graph.nodes[0]
        gs.bind_resident(neg, x.buffer, x.offset)
        backend.compute_as_one([neg, t], {t})
        assert t.numpy().tolist() != good


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_inner_result_is_never_written_unless_the_backend_goes_one_by_one(ctx, one_by_one):
    x = ctx.tensor("f32", 4, "x", input=True)
    inner = ctx.sum_rows(x)
    t = ctx.add(x, inner)
    graph = gs.Graph(t)
    backend = poisoned("F", base=Fusing, offer=lambda graph: [(0, 1)], one_by_one=one_by_one)
    with backend, gs.Scheduler([backend]) as sched:
        sched.alloc(graph)
        x.set([1.0, -2.0, 3.0, -4.0])
        sched.compute(graph)
        assert t.numpy().tolist() == [-1, -4, 1, -6]
        data = bytearray(4)
        inner.buffer.read(inner.offset, memoryview(data))
        assert (bytes(data) == b"\xcd" * 4) is not one_by_one
