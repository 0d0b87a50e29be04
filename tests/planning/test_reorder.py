"""Another node order: less alive at once, the same results, never worse than the given order."""

import json
import pickle

import numpy as np
import pytest
from configs import configured_graph, graph_names
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes
from random_results import check, in_memory_of_their_own, set_all

import ggml_sched as gs
from ggml_sched.planning.reorder import reorder


def wide(n: int) -> tuple[gs.Graph, gs.Tensor, list[gs.Tensor]]:
    """n large branches, all computed before their small sums: interleaving them saves memory."""
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


def test_the_pickle_of_a_reordered_plan_has_the_order_that_the_caller_gave(tmp_path):
    graph, *_ = wide(8)
    backend = gs.DryBackend("A")
    with gs.Scheduler([backend], reorder=True) as scheduler:
        plan = scheduler.plan(graph)
    again = pickle.loads(pickle.dumps(plan))
    for restored in (again, pickle.loads(pickle.dumps(again))):
        assert restored.graph.fingerprint == plan.graph.fingerprint != graph.fingerprint
        assert restored.given_graph.fingerprint == graph.fingerprint
        assert str(restored) == str(plan) and not restored.fallbacks()
        restored.save(tmp_path / "plan.json")
        assert str(gs.load_plan(tmp_path / "plan.json", graph, [backend])) == str(plan)


def test_where_one_order_exceeds_a_budget_the_other_is_taken(monkeypatch):
    graph, *_ = wide(8)
    backend = gs.DryBackend("A")
    better = gs.Scheduler([backend], reorder=True).plan(graph).graph
    for given_order, other in ((graph, better), (better, graph)):
        monkeypatch.setattr("ggml_sched.planning.planner.reorder", lambda _, other=other: other)
        with gs.Scheduler([backend], reorder=True) as scheduler:
            least = scheduler.plan(given_order)
            assert least.graph is better
        with gs.Scheduler([backend], reorder=True, budgets={backend: least.buffer_sizes[0]}) as scheduler:
            plan = scheduler.plan(given_order)
            assert plan.graph is better and plan.buffer_sizes == least.buffer_sizes
        with (gs.Scheduler([backend], reorder=True, budgets={backend: least.buffer_sizes[0] - 32}) as scheduler,
              pytest.raises(gs.OutOfMemory)):
            scheduler.plan(given_order)


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


def test_a_file_keeps_the_order(tmp_path):
    """A loaded plan serves the graph in its given order, or an equal graph, without another search for the order."""
    (graph, *_), (twin, x, _) = wide(4), wide(4)
    backend = gs.CpuBackend(1)
    with gs.Scheduler([backend], reorder=True) as scheduler:
        plan = scheduler.plan(graph)
    assert plan.given_graph is graph is not plan.graph
    with pytest.warns(DeprecationWarning, match="given_graph"):
        assert plan.asked is graph
    plan.save(tmp_path / "plan.json")
    loaded = gs.load_plan(tmp_path / "plan.json", twin, [backend])
    assert loaded.given_graph is twin and loaded.buffer_sizes == plan.buffer_sizes
    assert [twin.position_of(t) for t in loaded.graph.nodes] == [graph.position_of(t) for t in plan.graph.nodes]
    with gs.Scheduler([backend]) as scheduler:
        scheduler.adopt(loaded)
        assert scheduler.alloc(twin).data is loaded.data
        x.set(np.full(4096, 2.0))
        scheduler.compute(twin)
        assert twin.nodes[-1].numpy() == 4 * 4 * 4096 * 2.0
    text = (tmp_path / "plan.json").read_text()
    data = json.loads(text)
    for order in ([], data["order"][1:], [*data["order"][1:], 0], data["order"][::-1], [True, *data["order"][1:]], 7):
        (tmp_path / "plan.json").write_text(json.dumps({**data, "order": order}))
        with pytest.raises(gs.FileFormatError):
            gs.load_plan(tmp_path / "plan.json", twin, [backend])


def test_flags_set_after_the_graph_was_made_do_not_reach_the_other_order(ctx):
    """Nor do alloc dependencies added later: both orders are of the graph as it was made."""
    graph, x, large = wide(4)
    before = reorder(graph)
    late = ctx.set_name(ctx.sqr(x), "late")
    for t in large:
        ctx.set_output(t)
    ctx.set_input(graph.leafs[-1])
    ctx.keep_until(large[0], graph.nodes[-1])
    ctx.keep_until(late, graph.nodes[-1])          # which is no tensor of the graph
    after = reorder(graph)
    assert after.nodes == before.nodes and after.fingerprint == before.fingerprint and after.deps == {}
    for t in graph.tensors:
        assert after.flags_of(t) == before.flags_of(t) == graph.flags_of(t)
    with gs.Scheduler([gs.DryBackend("A")], reorder=True) as scheduler:
        plan = scheduler.plan(graph)
        plan.verify()
        assert plan.graph.nodes == before.nodes
        assert plan.buffer_sizes == gs.Scheduler([gs.DryBackend("A")]).plan(before).buffer_sizes


def test_the_other_order_keeps_what_the_graph_keeps(ctx):
    graph, x, large = wide(4)
    ctx.keep_until(large[0], graph.nodes[-1])
    kept = gs.Graph(*large, graph.nodes[-1])
    assert reorder(kept).deps == kept.deps == {graph.nodes[-1]: (large[0],)}


def test_an_order_has_every_node_once():
    graph, x, large = wide(2)
    nodes = list(graph.nodes)
    assert graph.with_order(nodes).fingerprint == graph.fingerprint
    for wrong in (nodes[:-1], [*nodes[:-1], nodes[0]], [*nodes[:-1], x], nodes[::-1],
                  [*nodes[:-1], gs.Context().tensor("f32", 4, "stranger")]):
        with pytest.raises(gs.GraphError):
            graph.with_order(wrong)


@pytest.mark.parametrize("configuration", [pytest.param("c1", marks=pytest.mark.soak), "c4"])
@pytest.mark.parametrize("name", [
    pytest.param(n, marks=() if n.startswith(("gpt2", "mamba", "mixtral")) else pytest.mark.soak)
    for n in graph_names() if n.endswith("decode")])
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
