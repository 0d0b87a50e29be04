"""GraphAllocator gives every tensor of real models' graphs the first generation's offset."""

import pytest
from configs import configured_graph, golden, golden_names

import ggml_sched as gs

pytestmark = pytest.mark.parametrize("name", golden_names("c1"))


def alloc_rows(allocator, graph) -> list[list[int]]:
    """[id, offset, id of the tensor whose memory it shares or -1] of every tensor that got an address."""
    rows = []
    for i, t in enumerate(graph.tensors):
        offset = allocator.offset_of(t)
        if offset is not None:
            root = allocator.inplace_root(t)
            rows.append([i, offset, -1 if root is None else graph.tensors.index(root)])
    return rows


def test_measured_offsets_roots_and_size(name):
    graph, _ = configured_graph(name, "c1")
    expected = golden(name, "c1")
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure(64) as tallocr:
        assert allocator.alloc_graph(tallocr, graph) == expected["max_size"]
        assert tallocr.max_size == expected["max_size"]
    assert alloc_rows(allocator, graph) == sorted(expected["alloc"])


def test_the_legacy_pair_measures_the_same(name):
    graph, config = configured_graph(name, "c1")
    expected = golden(name, "c1")
    with gs.Allocator.measure_from_backend(config.backends[0]) as allocator:
        assert allocator.is_measure
        assert allocator.alloc_graph(graph) == expected["max_size"] == allocator.max_size
        assert alloc_rows(allocator, graph) == sorted(expected["alloc"])


def test_a_buffer_of_exactly_the_measured_size_serves(name):
    graph, config = configured_graph(name, "c1")
    expected = golden(name, "c1")
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure_from_backend(config.backends[0]) as measuring:
        allocator.alloc_graph(measuring, graph)
    with gs.TensorAllocator.from_backend(config.backends[0], expected["max_size"]) as tallocr:
        assert allocator.alloc_graph(tallocr, graph) == expected["max_size"]
        assert alloc_rows(allocator, graph) == sorted(expected["alloc"])
        for i, offset, _ in expected["alloc"]:
            assert graph.tensors[i].buffer is tallocr.buffer
            assert graph.tensors[i].offset == offset


def test_a_large_buffer_gives_the_measured_offsets_without_measuring(name):
    graph, config = configured_graph(name, "c1")
    expected = golden(name, "c1")
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.from_backend(config.backends[0], 4 * expected["max_size"]) as tallocr:
        assert allocator.alloc_graph(tallocr, graph) == expected["max_size"]
        assert alloc_rows(allocator, graph) == sorted(expected["alloc"])
