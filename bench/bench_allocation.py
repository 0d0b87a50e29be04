"""The allocators: one graph in one arena, first-generation rules, against ggml's gallocr."""

from __future__ import annotations

import peer
import pytest
import samples

import ggml_sched as gs

GRAPHS = ["llama-2-7b-decode", "llama-2-7b-prefill512", "mamba-1.4b-prefill512"]


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_allocator_measures(benchmark, name):
    """A fresh allocator each time: nothing that was measured before is used."""
    graph, _ = samples.configured(name, "c1")
    size = benchmark(lambda: gs.GraphAllocator().alloc_graph(gs.TensorAllocator.measure(32), graph))
    benchmark.extra_info |= {"nodes": len(graph), "bytes": size}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_allocator_again(benchmark, name):
    graph, (backend,) = samples.configured(name, "c1")
    allocator = gs.GraphAllocator()
    size = allocator.alloc_graph(gs.TensorAllocator.measure(32), graph)
    with gs.TensorAllocator.from_backend(backend, size) as tallocr:

        def run():
            tallocr.reset()
            allocator.alloc_graph(tallocr, graph)

        benchmark(run)
    benchmark.extra_info |= {"nodes": len(graph), "bytes": size}


@pytest.mark.skipif(not peer.available(), reason="python bench/peer/build.py makes the peer")
@pytest.mark.parametrize("name", GRAPHS)
def test_today_ggml_gallocr(benchmark, name):
    with peer.Peer(*samples.configured(name, "c1")) as other:
        benchmark(other.gallocr)


def test_single_tensors(benchmark):
    """1,000 tensors, every second one freed on the way."""
    ctx = gs.Context()
    tensors = [ctx.tensor("f32", 100 + i % 7) for i in range(1000)]
    with gs.TensorAllocator.from_backend(gs.DryBackend("dry"), 1 << 20) as tallocr:

        def run():
            tallocr.reset()
            for i, t in enumerate(tensors):
                tallocr.alloc(t)
                if i % 2:
                    tallocr.free(tensors[i - 1])

        benchmark(run)
        benchmark.extra_info["bytes"] = tallocr.max_size
