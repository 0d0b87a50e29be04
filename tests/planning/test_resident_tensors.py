"""Weights and caches of a graph file need memory outside the arena, where each compute would load them anew or lose
them."""

import pytest
from configs import sample_paths

import ggml_sched as gs
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict


def graph_with(resident: str, name: str = "w", extra: str = "") -> gs.Graph:
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    w = ctx.restore("NONE", "f32", (4, 3), (4, 16, 48, 48), name=name, resident=resident)
    out = ctx.mul_mat(ctx.view_2d(w, 4, 2, 16) if extra == "view" else w, x)
    return gs.Graph(out)


@pytest.mark.parametrize("policy", ["default", "seed"])
@pytest.mark.parametrize("resident", ["weight", "kv"])
@pytest.mark.parametrize("extra", ["", "view"])
def test_a_resident_tensor_without_a_home_is_refused_by_name(policy, resident, extra):
    backend = gs.DryBackend("A")
    graph = graph_with(resident, extra=extra)
    weight = next(t for t in graph.leafs if t.resident)
    with gs.Scheduler([backend], policy=policy) as scheduler:
        for call in (scheduler.plan, scheduler.alloc, scheduler.reserve, scheduler.compute):
            with pytest.raises(gs.PlacementError, match=rf"'w'.*{resident}.*place=.*alloc_tensors.*set_tensor_backend"):
                call(graph)
        # An assignment by the caller: the weight is loaded with the graph.
        scheduler.set_tensor_backend(weight, backend)
        assert scheduler.plan(graph).offset_of(weight) is not None
        scheduler.set_tensor_backend(weight, None)
        with pytest.raises(gs.PlacementError, match="'w'"):
            scheduler.plan(graph)
        buffer = backend.alloc_buffer(1024)
        gs.bind_resident(weight, buffer, 0)
        assert scheduler.plan(graph).offset_of(weight) is None
        buffer.close()
        with pytest.raises(gs.PlacementError, match="'w'.*closed"):
            scheduler.plan(graph)


def test_one_that_nothing_uses_needs_none(ctx):
    x = ctx.tensor("f32", 4, "x", input=True)
    w = ctx.restore("NONE", "f32", (4,), (4, 16, 16, 16), name="unused", resident="weight")
    y = ctx.sqr(x)
    graph = gs.Graph.from_order([x, w, y], [y], [x, w])
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        assert scheduler.plan(graph).offset_of(w) is None


def test_the_plan_of_an_equal_graph_without_the_mark_does_not_serve_it():
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        plain, marked = graph_with(""), graph_with("weight")
        assert plain.fingerprint == marked.fingerprint
        scheduler.plan(plain)
        scheduler.reserve(plain)
        for call in (scheduler.plan, scheduler.alloc, scheduler.reserve):
            with pytest.raises(gs.PlacementError, match="'w'"):
                call(marked)


@pytest.mark.parametrize("path", sample_paths()[:3], ids=lambda path: path.name.partition(".")[0])
def test_a_file_read_without_place_is_refused_and_one_with_it_is_planned(path):
    backend = gs.DryBackend("A")
    with gs.Scheduler([backend]) as scheduler:
        with pytest.raises(gs.PlacementError, match="place="):
            scheduler.plan(gs.load_graph(path))
        placed = gs.load_graph(path, place=lambda t: backend)
        plan = scheduler.plan(placed)
        assert all(plan.offset_of(t) is None for t in placed.leafs if t.resident)


def test_clones_with_memory_of_their_own_are_planned():
    """A copy of a graph keeps the resident marks; allocating its weights gives them resident backends."""
    graph, ctx, backend = graph_with("weight"), gs.Context(), gs.CpuBackend(1)
    clone = graph_from_dict(graph_to_dict(graph), ctx=ctx)
    with backend.alloc_tensors(ctx), gs.Scheduler([backend]) as scheduler:
        assert scheduler.plan(clone).buffer_sizes == (0,)


def test_a_graph_allocator_places_them_as_it_did():
    """ggml's allocators have no residents: they allocate every tensor without memory."""
    graph = graph_with("weight")
    with gs.TensorAllocator.measure(32) as measuring:
        allocator = gs.GraphAllocator()
        allocator.alloc_graph(measuring, graph)
        assert all(allocator.offset_of(t) is not None for t in graph.tensors)
