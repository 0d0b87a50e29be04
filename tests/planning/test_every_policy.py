"""Every plan is sound, whatever policy made it: placements, offsets, in-place reuse, leafs, arenas of many buffers."""

import pytest
from hypothesis import given
from random_graphs import quick
from random_problems import problems, realised

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, make_plan, replay_plan
from ggml_sched.planning.plan import Plan


def plan_of(graph: gs.Graph, backends, policy: Policy, assigned=None) -> Plan:
    data = make_plan(Request(graph, Devices(tuple(backends)), assigned), policy)
    return Plan(graph, data, tuple(backends), "any policy")


@pytest.mark.parametrize("first, second", [(8, 16), (16, 32), (32, 48)])
def test_a_leaf_that_packing_puts_where_a_node_was_is_loaded_late(first, second):
    """The walk over the nodes gives such a leaf unused memory; packing into one buffer then moves it."""
    ctx = gs.Context()
    node = ctx.neg(ctx.tensor("f32", first, "early", input=True))
    late = ctx.tensor("f32", second, "late", input=True)
    graph = gs.Graph(ctx.concat(late, node, 0))
    backend = gs.DryBackend("A", 4, max_buffer_size=1024)
    plan = plan_of(graph, [backend], Policy(leafs_first=False, reuse="first"))
    assert plan.data.methods != ("best fit",), "the offsets are those of the walk: nothing is tested"
    assert plan.data.is_late(graph.id_of(late))
    plan.verify()


@pytest.mark.parametrize("offsets", ["best fit", "packed"])
def test_copy_slots_have_memory_of_their_own_before_they_are_filled(offsets):
    """Queued computes fill them in turn, at any time: they get none of the bytes that earlier results had."""
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    x, y = ctx.tensor("f32", (64, 64), "x", input=True), ctx.tensor("f32", 64, "y", input=True)
    early = ctx.mean(ctx.sum_rows(ctx.mul_mat(x, x)))
    there = ctx.relu(y)
    graph = gs.Graph(early, ctx.add(there, ctx.sqr(y)))
    policy = Policy(offsets=offsets, leafs_first=False, places=2)
    assigned = {t: b if t in (y, there) else a for t in graph.nodes}
    plan = plan_of(graph, (a, b), policy, assigned)
    assert plan.data.slot_copies
    plan.verify()


@quick(400)
@given(problems())
def test_random_problems_have_sound_plans_or_none(problem):
    """GGML_SCHED_EXAMPLES=50: 20,000 of them."""
    _, backends, policy, _ = problem
    graph, assigned = realised(problem)
    request = Request(graph, Devices(tuple(backends)), assigned)
    try:
        data = make_plan(request, policy)
    except gs.Error:
        return
    Plan(graph, data, tuple(backends), "any policy").verify()
    request.groups(policy)
    again = replay_plan(request, data, policy)
    assert again is not None
    Plan(graph, again, tuple(backends), "any policy, reserved").verify()
