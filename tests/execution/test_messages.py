"""What errors say: which tensor, which backend, and what would work."""

import numpy as np
import pytest

import ggml_sched as gs


def small_graph(name=""):
    ctx = gs.Context()
    x = ctx.tensor("f32", (4,), name, input=True)
    return x, ctx.set_output(ctx.silu(x))


def matrix_product(type, types_of_gpu, types_of_cpu):
    """A product with a weight of `type` named w, on backends that compute products with weights of the given types."""
    def takes(types):
        return lambda t: t.op != "MUL_MAT" or str(t.src[0].type) in types

    gpu = gs.DryBackend("GPU", supports_op=takes(types_of_gpu))
    cpu = gs.DryBackend("CPU", supports_op=takes(types_of_cpu))
    ctx = gs.Context()
    w = ctx.tensor(type, (256, 8), "w")
    x = ctx.tensor("f32", (256, 2), "x", input=True)
    y = ctx.mul_mat(w, x)
    return gs.Scheduler([gpu, cpu]), gs.Graph(y)


def test_an_unsupported_op_names_the_types_of_a_weight_that_each_backend_supports():
    scheduler, graph = matrix_product("iq2_xxs", ("f32", "f16"), ("q8_0",))
    with scheduler, pytest.raises(gs.UnsupportedOp) as caught:
        scheduler.plan(graph)
    said = str(caught.value)
    assert "tensor 2 (MUL_MAT f32 [8, 2, 1, 1]): none of the backends 'GPU', 'CPU' supports it" in said
    assert "with the sources 'w' iq2_xxs, 'x' f32" in said
    assert "'GPU' supports it with 'w' of type f32, f16" in said and "'CPU' supports it with 'w' of type q8_0" in said


def test_an_op_that_no_backend_computes_with_any_type_says_so():
    scheduler, graph = matrix_product("f32", (), ())
    with scheduler, pytest.raises(gs.UnsupportedOp, match="whatever the types of its leafs: a backend that computes "
                                                          "MUL_MAT is missing"):
        scheduler.plan(graph)


def test_a_backend_that_supports_no_type_is_listed_beside_one_that_does():
    scheduler, graph = matrix_product("iq2_xxs", (), ("f16",))
    with scheduler, pytest.raises(gs.UnsupportedOp, match="'CPU' supports it with 'w' of type f16; 'GPU' with no type"):
        scheduler.plan(graph)


def test_the_op_of_a_view_that_no_backend_supports_is_named():
    ctx = gs.Context()
    cache = ctx.tensor("f32", (4, 4), "cache", input=True)
    x = ctx.tensor("f32", (4, 4), "x", input=True)
    graph = gs.Graph(ctx.cpy(x, cache))
    scheduler = gs.Scheduler([gs.DryBackend("D", supports_op=lambda t: t.op != "CPY")])
    with scheduler, pytest.raises(gs.UnsupportedOp, match="a backend that computes CPY is missing"):
        scheduler.plan(graph)


def test_reading_after_close_says_that_the_scheduler_was_closed():
    x, y = small_graph("x")
    graph = gs.Graph(y)
    with gs.CpuBackend() as cpu:
        with gs.Scheduler([cpu]) as scheduler:
            scheduler.alloc(graph)
            x.set(np.zeros(4, np.float32))
            scheduler.compute(graph)
            scheduler.reset()
            with pytest.raises(gs.PlacementError, match="in an arena on backend 'CPU', and its scheduler was reset"):
                y.numpy()
            scheduler.alloc(graph)
        for use in (y.numpy, lambda: cpu.get_tensor(y, bytearray(16)), lambda: gs.tensor_copy(x, y)):
            with pytest.raises(gs.PlacementError, match="in an arena on backend 'CPU', and its scheduler was closed"):
                use()


def test_reading_from_a_closed_buffer_says_that_it_was_closed():
    ctx = gs.Context()
    w = ctx.tensor("f32", (4,), "w")
    with gs.CpuBackend() as cpu:
        buffer = cpu.alloc_tensors(ctx)
        buffer.close()
        with pytest.raises(gs.PlacementError, match="'w' has no address: its buffer on backend 'CPU' was closed"):
            w.numpy()
        with pytest.raises(gs.PlacementError, match="was closed"):
            memoryview(w)


def test_reading_a_graph_whose_memory_another_uses_says_what_to_do():
    _, y = small_graph()
    _, other = small_graph()
    with gs.CpuBackend() as cpu, gs.Scheduler([cpu]) as scheduler:
        graphs = gs.Graph(y), gs.Graph(other)
        for graph in graphs:
            scheduler.alloc(graph)
        with pytest.raises(gs.PlacementError, match="tensor 1 has no address: .*another graph uses now.*allocate its"):
            y.numpy()


def test_a_tensor_that_was_never_placed_says_how_it_is():
    x, _ = small_graph()
    with pytest.raises(gs.PlacementError, match="unnamed tensor has no address: place it"):
        x.numpy()


def test_a_host_before_a_device_is_refused_with_both_names():
    with gs.CpuBackend() as cpu:
        with pytest.raises(ValueError, match="'CPU' has the host's memory and comes before 'GPU'.*last"):
            gs.Scheduler([cpu, gs.DryBackend("GPU")])
        gs.Scheduler([gs.DryBackend("GPU"), cpu]).close()


@pytest.mark.parametrize("limit", [500, 1000, 1024, 1535])
def test_a_tensor_beyond_the_largest_buffer_is_an_error_with_the_bytes_that_its_backend_allocates(limit):
    class Padded(gs.DryBackend):
        def alloc_size(self, tensor):
            return tensor.nbytes + 512

    ctx = gs.Context()
    graph = gs.Graph(ctx.neg(ctx.tensor("f32", 250, "x", input=True)))
    with gs.Scheduler([Padded("GPU", 64, max_buffer_size=limit)]) as scheduler:
        with pytest.raises(gs.OutOfMemory, match=rf"^'x' \(.*\): 1536 bytes exceed the maximum buffer size {limit} of "
                                                 "backend 'GPU'") as caught:
            scheduler.plan(graph)
        assert (caught.value.backend, caught.value.needed, caught.value.available) == ("GPU", 1536, limit)


@pytest.mark.parametrize("where", ["leaf", "copy"])
def test_a_tensor_beyond_the_largest_buffer_is_an_error_that_names_the_backend_it_is_on(where):
    """Another backend has smaller buffers, but no part in it."""
    small, large = gs.DryBackend("small", max_buffer_size=64), gs.DryBackend("large", max_buffer_size=512)
    host = gs.DryBackend("host")
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 250), "x", input=True)
    y = ctx.neg(x)
    with gs.Scheduler([small, large, host]) as scheduler:
        scheduler.set_tensor_backend(x, large if where == "leaf" else host)
        scheduler.set_tensor_backend(y, large)
        with pytest.raises(gs.OutOfMemory, match="4000 bytes exceed the maximum buffer size 512 of backend 'large'"):
            scheduler.plan(gs.Graph(y))


def test_computing_on_dry_backends_alone_is_an_error():
    _, y = small_graph()
    graph = gs.Graph(y)
    with gs.Scheduler([gs.DryBackend("GPU"), gs.DryBackend("CPU")]) as scheduler:
        scheduler.plan(graph)
        for compute in (scheduler.compute, scheduler.compute_async):
            with pytest.raises(gs.BackendError, match="'GPU', 'CPU' are dry: .*compute nothing"):
                compute(graph, zero=True)


def test_an_input_without_a_name_is_called_by_its_id():
    x, y = small_graph()
    graph = gs.Graph(y)
    with gs.CpuBackend() as cpu, gs.Scheduler([cpu]) as scheduler:
        with pytest.raises(gs.HazardError, match=rf"input tensor {graph.id_of(x)} \("):
            scheduler.compute(graph)
        with pytest.raises(gs.HazardError, match=rf"^tensor {graph.id_of(y)} \(UNARY:SILU\) has not been computed"):
            y.numpy()
