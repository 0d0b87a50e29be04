"""Planning: from scratch, again, an equal graph built anew, and growth to 100,000 nodes.  Compare medians. `extra_info`
has the plan's bytes, their lower bound, splits and copies; with the peer built, each of `test_today_ggml_*` times
today's ggml on the same graph.
"""

from __future__ import annotations

import peer
import pytest
import samples

import ggml_sched as gs

GRAPHS = ["llama-2-7b-decode", "mixtral-8x7b-decode", "mamba-1.4b-prefill512"]
"""The usual one, and the largest."""
CASES = [(name, config) for name in GRAPHS for config in ("c1", "c4")]

over_graphs = pytest.mark.parametrize(("name", "config"), CASES)
with_peer = pytest.mark.skipif(not peer.available(), reason="python bench/peer/build.py makes the peer")


def note(benchmark, plan: gs.Plan) -> None:
    benchmark.extra_info |= {
        "nodes": len(plan.graph), "bytes": sum(plan.buffer_sizes), "live_bytes": sum(plan.live_bytes),
        "splits": len(plan.splits), "copies": len(plan.copies), "copy_bytes": plan.copy_bytes}


@over_graphs
def test_plan_from_scratch(benchmark, name, config):
    graph, backends = samples.configured(name, config)
    with gs.Scheduler(backends, plan_cache=0) as scheduler:
        note(benchmark, benchmark(scheduler.plan, graph))


@over_graphs
def test_alloc_of_an_equal_graph_built_anew(benchmark, name, config):
    graph, backends = samples.configured(name, config)
    twins = [graph, samples.configured(name, config, backends)[0]]
    with gs.Scheduler(backends) as scheduler:
        note(benchmark, scheduler.alloc(graph))

        def setup():
            twins.reverse()
            return (twins[0],), {}

        benchmark.pedantic(scheduler.alloc, setup=setup, rounds=200, warmup_rounds=4)


@over_graphs
def test_alloc_of_the_same_graph(benchmark, name, config):
    graph, backends = samples.configured(name, config)
    with gs.Scheduler(backends) as scheduler:
        note(benchmark, scheduler.alloc(graph))
        benchmark(scheduler.alloc, graph)


@over_graphs
def test_graph_object(benchmark, name, config):
    """Making an equal Graph, without planning: flat arrays, and the fingerprint."""
    graph, _ = samples.configured(name, config)
    benchmark(gs.Graph.from_order, graph.tensors, graph.nodes, graph.leafs)


@pytest.mark.parametrize("n_nodes", [1_000, 10_000, 100_000])
def test_growth(benchmark, n_nodes):
    graph, backends = samples.synthetic(n_nodes)
    with gs.Scheduler(backends, plan_cache=0) as scheduler:
        note(benchmark, benchmark.pedantic(scheduler.plan, (graph,), rounds=5, warmup_rounds=1))


@with_peer
@over_graphs
def test_today_ggml_reserve(benchmark, name, config):
    with peer.Peer(*samples.configured(name, config)) as other:
        benchmark(other.reserve)
        benchmark.extra_info |= {"bytes": sum(other.buffer_sizes), "splits": other.n_splits}


@with_peer
@over_graphs
def test_today_ggml_alloc(benchmark, name, config):
    with peer.Peer(*samples.configured(name, config)) as other:
        benchmark(other.alloc)
