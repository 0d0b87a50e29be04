"""Another node order: less alive at once, the same results, never worse than the given order."""

import numpy as np
import pytest
from configs import configured_graph, graph_names
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes
from test_random_execution import check, in_memory_of_their_own, set_all

import ggml_sched as gs
from ggml_sched.reorder import reorder


def wide(n: int) -> tuple[gs.Graph, gs.Tensor, list[gs.Tensor]]:
    """n large branches made first and summed up small afterwards: ready to be interleaved."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (4096,), "x", input=True)
    large = [ctx.repeat(x, ctx.tensor("f32", (4096, 4), "like")) for _ in range(n)]
    small = [ctx.sum(t) for t in large]
    total = small[0]
    for t in small[1:]:
        total = ctx.add(total, t)
    total = ctx.set_output(total)
    return gs.Graph(*large, total), x, large


def test_branches_are_taken_one_after_the_other_when_that_keeps_less_alive():
    graph, *_ = wide(8)
    given_order = gs.Scheduler([gs.DryBackend("A")]).plan(graph)
    with gs.Scheduler([gs.DryBackend("A")], reorder=True) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    assert plan.graph is not graph and set(plan.graph.nodes) == set(graph.nodes)
    assert plan.buffer_sizes[0] < 0.3 * given_order.buffer_sizes[0]


def test_a_reordered_graph_computes_the_same_and_is_allocated_once():
    graph, x, _ = wide(4)
    values = np.arange(4096, dtype=np.float32)
    results = []
    for asked in (False, True):
        with gs.Scheduler([gs.CpuBackend()], reorder=asked) as scheduler:
            plan = scheduler.alloc(graph)
            assert scheduler.alloc(graph) is plan
            x.set(values)
            scheduler.compute(graph)
            results.append(graph.nodes[-1].numpy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("configuration", ["c1", "c4"])
@pytest.mark.parametrize("name", [n for n in graph_names() if n.endswith("decode")])
def test_model_graphs_never_get_worse(name, configuration):
    graph, config = configured_graph(name, configuration, 32)
    given_order = gs.Scheduler(config.backends).plan(graph)
    plan = gs.Scheduler(config.backends, reorder=True).plan(graph)
    plan.verify()
    assert sum(plan.buffer_sizes) <= sum(given_order.buffer_sizes)


@quick(100)
@given(recipes(), st.integers(1, 2))
def test_random_graphs_compute_the_same_bits_in_the_other_order(recipe, n_backends):
    """The other order itself, better or not: reads and writes of shared memory keep theirs."""
    expected = in_memory_of_their_own(recipe, n_backends)
    built = Built(recipe, n_backends)
    other = reorder(built.graph)
    assert set(other.nodes) == set(built.graph.nodes)
    backends = [gs.CpuBackend(1, f"CPU{i}") for i in range(n_backends)]
    with gs.Scheduler(backends) as scheduler:
        for backend, ctx in zip(backends, built.homes, strict=True):
            backend.alloc_tensors(ctx)
        scheduler.alloc(other).verify()
        set_all(built)
        scheduler.compute(other)
        check(built, expected, "reordered")
