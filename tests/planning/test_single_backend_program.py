"""Programs of one backend are made in one special pass; they equal those of the general compiler."""

import pytest
from configs import sample_paths, sample_plan
from small_graphs import plan_of, random_case

import ggml_sched as gs
from ggml_sched.planning.compiler import make_any, make_single_backend


def both(plan: gs.Plan):
    """The program made in one pass, or None, and the general one."""
    return make_single_backend(plan.graph, plan.data), make_any(plan.graph, plan.data, plan.backends)


@pytest.mark.parametrize("policy", ["default", "seed"])
@pytest.mark.parametrize("path", sample_paths(), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_of_recorded_graphs(path, policy):
    found, expected = both(sample_plan(path, "c1", policy))
    assert found == expected
    assert {step.kind for step in found.steps} == {"load", "run"}


def test_of_random_graphs():
    n_alone = n_late = 0
    for seed in range(400):
        for policy in ("default", "seed"):
            plan = plan_of(random_case(seed), policy)
            found, expected = both(plan)
            if found is not None:
                assert found == expected, f"random_case({seed}), {policy}"
                n_alone += 1
                n_late += [step.kind for step in found.steps].count("run") > 1
    assert n_alone > 100 and n_late > 5


def test_more_is_decided_by_the_general_way():
    """Several backends, and leafs of the plan that nodes write to."""
    ctx = gs.Context()
    x, cache = ctx.tensor("f32", (4,), "x", input=True), ctx.tensor("f32", (4,), "cache", input=True)
    graph = gs.Graph(ctx.neg(ctx.cpy(ctx.sqr(x), cache)))
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    with gs.Scheduler([a]) as scheduler:
        assert both(scheduler.plan(graph))[0] is None
    graph = gs.Graph(ctx.neg(ctx.sqr(x)))
    with gs.Scheduler([a, b]) as scheduler:
        assert both(scheduler.plan(graph))[0] is not None
        scheduler.set_tensor_backend(graph.nodes[0], a)
        scheduler.set_tensor_backend(graph.nodes[1], b)
        assert both(scheduler.plan(graph))[0] is None


def test_a_graph_without_nodes_and_one_that_keeps_an_input():
    ctx = gs.Context()
    x, y = ctx.tensor("f32", (4,), "x", input=True), ctx.tensor("f32", (4,), "y", input=True)
    node = ctx.sqr(x)
    ctx.keep_until(y, node)
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        for graph in (gs.Graph(x), gs.Graph(node), gs.Graph(ctx.reshape(x, 2, 2))):
            found, expected = both(scheduler.plan(graph))
            assert found is None or found == expected
        found, expected = both(scheduler.plan(gs.Graph(node)))
        assert found == expected and len(found.inputs) == 1 and len(found.steps) == 3
