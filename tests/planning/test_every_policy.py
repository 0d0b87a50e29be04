"""Every plan is sound, whatever policy made it: placements, offsets, in-place reuse, leafs, arenas of many buffers."""

import pytest
from hypothesis import given
from random_graphs import quick
from random_problems import problems

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, make_plan, plan_values, replay_plan
from ggml_sched.planning.plan import Plan


def plan_of(graph: gs.Graph, backends, policy: Policy, assigned=None) -> Plan:
    data = make_plan(Request(graph, Devices(tuple(backends)), assigned), policy)
    return Plan(graph, data, tuple(backends), "any policy")


@pytest.mark.parametrize("first, second", [(8, 16), (16, 32), (32, 48)])
def test_a_leaf_that_packing_puts_where_a_node_was_is_loaded_late(ctx, first, second):
    """The walk over the nodes gives such a leaf unused memory; packing into one buffer then moves it."""
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
    policy = Policy(offsets=offsets, leafs_first=False, n_copies=2)
    assigned = {t: b if t in (y, there) else a for t in graph.nodes}
    plan = plan_of(graph, (a, b), policy, assigned)
    assert plan.data.slot_copies
    plan.verify()


@quick(75)
@given(problems())
def test_random_problems_have_sound_plans_or_none(problem):
    """GGML_SCHED_EXAMPLES=200: 15,000 of them."""
    graph, backends, assigned, policy = problem
    request = Request(graph, Devices(backends), assigned)
    try:
        data = make_plan(request, policy)
    except gs.Error:
        return
    Plan(graph, data, backends, "any policy").verify()
    request.groups(policy)
    again = replay_plan(request, data, policy)
    assert again is not None
    Plan(graph, again, backends, "any policy, reserved").verify()


@quick(30)
@given(problems())
def test_a_plan_does_not_depend_on_caches_or_on_history(problem):
    """The same plan by a new scheduler, from the cache, after a compute, after a reset and without a cache."""
    graph, backends, assigned, _ = problem
    with gs.Scheduler(backends) as scheduler, gs.Scheduler(backends, plan_cache=0) as without_cache:
        for t, backend in assigned.items():
            for each in (scheduler, without_cache):
                each.set_tensor_backend(t, backend)
        try:
            first = plan_values(scheduler.plan(graph).data)
        except gs.Error:
            return
        for act in (lambda: None, lambda: scheduler.compute(graph), scheduler.reset):
            act()
            assert plan_values(scheduler.plan(graph).data) == plan_values(without_cache.plan(graph).data) == first
