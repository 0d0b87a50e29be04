"""Building a graph from nothing and allocating it, compared with ggml's C calls; and planning for CPU backends.

Compare medians.
"""

from __future__ import annotations

import building
import peer
import pytest
import samples

import ggml_sched as gs

SHAPES = ["Llama 2 7B, decode", "Llama 3.1 405B, decode"]

over_shapes = pytest.mark.parametrize("name", SHAPES)
with_peer = pytest.mark.skipif(not peer.available(), reason="python bench/peer/build.py makes the peer")


@over_shapes
@pytest.mark.parametrize("allocates", [False, True], ids=["build", "step"])
def test_graph_from_nothing(benchmark, name, allocates):
    with building.Model(building.SHAPES[name]) as model:
        benchmark(model.step if allocates else model.build)
        benchmark.extra_info["nodes"] = len(model.graph)


@with_peer
@over_shapes
@pytest.mark.parametrize("allocates", [False, True], ids=["build", "step"])
def test_today_ggml_from_nothing(benchmark, name, allocates):
    with peer.Builder(building.SHAPES[name]) as other:
        benchmark(other.run, allocates)
        benchmark.extra_info["nodes"] = len(other.ops)


@pytest.mark.parametrize("config", ["c1", "c4"])
@pytest.mark.parametrize("name", ["llama-2-7b-decode", "mixtral-8x7b-decode"])
def test_plan_from_scratch_for_cpu_backends(benchmark, name, config):
    backends = tuple(gs.CpuBackend(1, name=device) for device in samples.CONFIGS[config])
    graph, backends = samples.configured(name, config, backends)
    with gs.Scheduler(backends, plan_cache=0) as scheduler:
        benchmark(scheduler.plan, graph)
        benchmark.extra_info |= {"nodes": len(graph), "kinds": len(set(graph.kinds()))}
    for backend in backends:
        backend.close()
