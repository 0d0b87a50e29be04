"""Weights with interleaved rows: the products of every type, instruction set and number of columns are those of the
tensors; their memory is counted; and what is left out."""

import itertools

import numpy as np
import pytest
from matrix_products import BLOCKS, assert_near, block_size, eight_bits, normal, product, weights

import ggml_sched as gs
from ggml_sched.backends.cpu._kernels import interleaves
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

BAND = 16


def number(type: str) -> int:
    return int(gs.Type[type.upper()])


def tensor_of(backend: gs.Backend, type: str, *ne: int) -> gs.Tensor:
    ctx = gs.Context()
    tensor = ctx.tensor(type, ne, "w")
    backend.alloc_tensors(ctx)
    return tensor


def computed(backend: gs.CpuBackend, ctx: gs.Context, node: gs.Tensor,
             values: dict[gs.Tensor, np.ndarray]) -> np.ndarray:
    """The values of a node of a context, whose leafs get these values."""
    buffer = backend.alloc_tensors(ctx)
    for tensor, array in values.items():
        tensor.set(array)
    backend.graph_compute(gs.Graph(node))
    result = node.numpy().copy()
    buffer.close()
    return result


def multiplied(backend: gs.CpuBackend, a: gs.Tensor, x: np.ndarray) -> np.ndarray:
    """The product of weights with activations [..., n, k]."""
    ctx = gs.Context()
    b = ctx.tensor("f32", x.shape[::-1])
    return computed(backend, ctx, ctx.mul_mat(a, b), {b: x})


def chosen(backend: gs.CpuBackend, a: gs.Tensor, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The products of tokens [n, 1, k] with the experts [n, used] that they choose: [n, used, m]."""
    ctx = gs.Context()
    b, chosen_ids = ctx.tensor("f32", x.shape[::-1]), ctx.tensor("i32", ids.shape[::-1])
    return computed(backend, ctx, ctx.mul_mat_id(a, b, chosen_ids), {b: x, chosen_ids: ids})


@pytest.fixture(params=[1, 2, 3])
def backend(request):
    with gs.CpuBackend(request.param) as backend:
        yield backend


def skip_unless_interleaved(type: str) -> None:
    if not interleaves(number(type)):
        pytest.skip(f"rows of {type} are not interleaved for this instruction set")


def test_all_small_types_are_interleaved_where_the_instruction_set_has_vectors_of_bytes(isa):
    left_out = {"portable": set(BLOCKS), "neon": set(BLOCKS), "dotprod": set(BLOCKS)}
    assert {type for type in BLOCKS if not interleaves(number(type))} == left_out.get(isa, {"q8_0", "q6_K"})


@pytest.mark.spread("type isa", "type n", "n isa")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18, 40])
@pytest.mark.parametrize("type", [type for type in BLOCKS if type not in ("q8_0", "q6_K")])
def test_products_are_those_of_the_tensor(isa, type, n):
    skip_unless_interleaved(type)
    for (blocks, m), threads in zip(itertools.product((1, 2, 3, 4, 7, 18), (16, 48)), itertools.cycle((1, 2, 3))):
        k = blocks * block_size(type)
        (held, w), x = weights(type, m, k), normal(n, k)
        with gs.CpuBackend(threads) as backend:
            a = tensor_of(backend, type, k, m)
            a.set(held)
            assert backend.interleave([a]) == a.nbytes
            assert_near(multiplied(backend, a, x), *product(w, eight_bits(x)))
            assert np.array_equal(a.numpy(), w.reshape(a.numpy().shape)), "the tensor itself has changed"


@pytest.mark.spread("type isa", "type n", "n isa")
@pytest.mark.parametrize("n", [1, 6, 250])
@pytest.mark.parametrize("type", ["q4_0", "q5_1", "q2_K", "q3_K", "mxfp4"])
def test_rows_longer_than_a_panel_and_many_parts(isa, type, n):
    skip_unless_interleaved(type)
    k, m = 4608, 144
    (held, w), x = weights(type, m, k), normal(n, k)
    with gs.CpuBackend(2) as backend:
        a = tensor_of(backend, type, k, m)
        a.set(held)
        backend.interleave([a])
        assert_near(multiplied(backend, a, x), *product(w, eight_bits(x)))


@pytest.mark.parametrize("type", ["q4_0", "q5_K", "q2_K"])
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_experts_and_batches_have_matrices_of_their_own(isa, type, tokens):
    skip_unless_interleaved(type)
    k, m, experts, used = 2 * block_size(type), 32, 5, 2
    (held, w), x = weights(type, experts, m, k), normal(tokens, 1, k)
    ids = np.array([[(i + j * 2) % experts for j in range(used)] for i in range(tokens)], np.int32)
    with gs.CpuBackend(2) as backend:
        a = tensor_of(backend, type, k, m, experts)
        a.set(held)
        backend.interleave([a])
        want, scale = product(w[ids].reshape(tokens * used, m, k), eight_bits(x).repeat(used, 0))
        assert_near(chosen(backend, a, x, ids).reshape(tokens * used, 1, m), want.reshape(tokens * used, 1, m), scale)
        many = normal(experts, 3, k)
        assert_near(multiplied(backend, a, many), *product(w, eight_bits(many)))


@pytest.mark.parametrize("n", [1, 3, 17])
@pytest.mark.parametrize("type", ["q4_0", "q2_K", "q3_K", "q4_K", "iq4_xs"])
def test_a_wrong_scale_stays_in_its_row_and_large_activations_do_not_overflow(isa, type, n):
    skip_unless_interleaved(type)
    k, m, large = 2 * block_size(type), 32, np.float32(2.0**110)
    held, x = weights(type, m, k)[0].copy(), np.abs(normal(n, k))
    at = {"q2_K": 80, "q3_K": 108}.get(type, 0)
    with gs.CpuBackend(2) as backend:
        a = tensor_of(backend, type, k, m)
        a.set(held)
        backend.interleave([a])
        result = multiplied(backend, a, x)
        assert np.array_equal(multiplied(backend, a, x * large), result * large)
        held.reshape(m, 2, -1)[19, 1, at:at + 2] = np.float16([np.inf]).view(np.uint8)
        a.set(held)
        backend.interleave([a])
        again = multiplied(backend, a, x).reshape(n, m)
        assert not np.isfinite(again[:, 19]).any()
        assert np.array_equal(np.delete(again, 19, 1), np.delete(result.reshape(n, m), 19, 1))


def test_the_bits_do_not_depend_on_the_number_of_threads(isa):
    skip_unless_interleaved("q4_1")
    k, m = 576, 1536
    (held, _), seen = weights("q4_1", m, k), {}
    for n in (1, 5, 17):
        x = normal(n, k)
        for threads in (1, 2, 3):
            with gs.CpuBackend(threads) as backend:
                a = tensor_of(backend, "q4_1", k, m)
                a.set(held)
                backend.interleave([a])
                assert multiplied(backend, a, x).tobytes() == seen.setdefault(n, multiplied(backend, a, x).tobytes())


def test_work_memory_is_at_most_what_host_work_says(isa):
    skip_unless_interleaved("q4_0")
    with gs.CpuBackend(2) as backend:
        a = tensor_of(backend, "q4_0", 4608, 1536)
        backend.interleave([a])
        for n in (1, 2, 6, 17, 300):
            ctx = gs.Context()
            node = ctx.mul_mat(a, ctx.tensor("f32", (4608, n)))
            backend.alloc_tensors(ctx)
            plan = backend.graph_plan_create(gs.Graph(node))
            assert plan.work_size <= backend.host_work([node])
            backend.graph_plan_free(plan)


class TestWhatIsLeftOut:
    def test_types_rows_and_views_without_kernels(self, backend):
        if not interleaves(number("q4_0")):
            pytest.skip("no rows are interleaved for this instruction set")
        ctx = gs.Context()
        whole, rest = ctx.tensor("q4_0", (64, 32)), ctx.tensor("q4_0", (64, 24))
        plain, eight = ctx.tensor("f16", (64, 32)), ctx.tensor("q8_0", (64, 32))
        part = ctx.view_2d(whole, 32, 32, whole.nb[1], 0)
        backend.alloc_tensors(ctx)
        assert backend.interleave([rest, plain, eight, part]) == 0
        assert backend.interleave([whole, rest, plain]) == whole.nbytes
        assert backend.interleave([]) == 0

    def test_a_view_of_interleaved_weights_is_multiplied_as_it_is(self, backend):
        skip_unless_interleaved("q4_0")
        held, w = weights("q4_0", 32, 64)
        a = tensor_of(backend, "q4_0", 64, 32)
        a.set(held)
        backend.interleave([a])
        x = normal(2, 64)
        ctx = gs.Context()
        b = ctx.tensor("f32", (64, 2))
        half = ctx.view_2d(a, 64, 16, a.nb[1], 16 * a.nb[1])
        assert_near(computed(backend, ctx, ctx.mul_mat(half, b), {b: x}), *product(w[16:], eight_bits(x)))

    def test_the_oracle_interleaves_nothing(self):
        with gs.CpuBackend(1, kernels="numpy") as backend:
            assert backend.interleave([tensor_of(backend, "q4_0", 64, 32)]) == 0

    def test_a_plan_of_another_instruction_set_reads_the_tensor(self, monkeypatch):
        skip_unless_interleaved("q4_0")
        (held, w), x = weights("q4_0", 32, 64), normal(1, 64)
        with gs.CpuBackend(1) as backend:
            a = tensor_of(backend, "q4_0", 64, 32)
            a.set(held)
            backend.interleave([a])
            monkeypatch.setenv("GGML_SCHED_ISA", "portable")
            assert_near(multiplied(backend, a, x), *product(w, eight_bits(x)))


def test_queued_writes_come_first():
    skip_unless_interleaved("q4_0")
    (held, w), x = weights("q4_0", 32, 64), normal(1, 64)
    with DeferredBackend("A", DeferredQueues()) as backend:
        a = tensor_of(backend, "q4_0", 64, 32)
        backend.set_tensor_async(a, np.ascontiguousarray(held).view(np.uint8).reshape(-1))
        backend.interleave([a])
        ctx = gs.Context()
        b = ctx.tensor("f32", (64, 1))
        node = ctx.mul_mat(a, b)
        backend.alloc_tensors(ctx)
        b.set(x)
        backend.graph_compute(gs.Graph(node))
        backend.synchronize()
        assert_near(node.numpy(), *product(w, eight_bits(x)))


class TestMemory:
    def test_it_counts_and_ends_with_the_buffer_of_the_tensor(self, backend):
        skip_unless_interleaved("q4_0")
        before = backend.used
        a = tensor_of(backend, "q4_0", 64, 32)
        held = backend.used
        backend.interleave([a])
        assert backend.used == held + a.nbytes
        backend.interleave([a])
        assert backend.used == held + a.nbytes, "interleaved again in the same memory"
        assert not a.buffer.is_read(a.offset)
        a.buffer.close()
        assert backend.used == before

    def test_out_of_memory_leaves_the_tensor_and_the_backend_as_they_were(self):
        skip_unless_interleaved("q4_0")
        (held, w), x = weights("q4_0", 32, 64), normal(1, 64)
        with gs.CpuBackend(1, memory=2000) as backend:
            a = tensor_of(backend, "q4_0", 64, 32)
            a.set(held)
            with pytest.raises(gs.OutOfMemory) as caught:
                backend.interleave([a])
            assert caught.value.backend == "CPU"
            assert a.buffer.is_read(a.offset)
            assert_near(multiplied(backend, a, x), *product(w, eight_bits(x)))

    def test_calls_keep_it_while_they_are_planned(self, backend):
        skip_unless_interleaved("q4_0")
        a = tensor_of(backend, "q4_0", 64, 32)
        a.set(weights("q4_0", 32, 64)[0])
        backend.interleave([a])
        ctx = gs.Context()
        b = ctx.tensor("f32", (64, 1))
        node = ctx.mul_mat(a, b)
        backend.alloc_tensors(ctx)
        b.set(normal(1, 64))
        plan = backend.graph_plan_create(gs.Graph(node))
        backend.graph_plan_compute(plan)
        result = node.numpy().copy()
        backend.graph_plan_compute(plan)
        assert np.array_equal(node.numpy(), result)
        a.buffer.close()
        with pytest.raises(gs.PlacementError, match="closed"):
            backend.graph_plan_compute(plan)
        backend.graph_plan_free(plan)

    def test_tensors_of_others_and_closed_ones_are_refused(self, backend):
        with gs.CpuBackend(1, name="other") as other, pytest.raises(gs.PlacementError, match="'CPU'.*no memory there"):
            backend.interleave([tensor_of(other, "q4_0", 64, 32)])
        with pytest.raises(gs.PlacementError):
            backend.interleave([gs.Context().tensor("q4_0", (64, 32), "w")])
        a = tensor_of(backend, "q4_0", 64, 32)
        a.buffer.close()
        with pytest.raises(gs.Error):
            backend.interleave([a])
        with pytest.raises(TypeError, match="tensors"):
            backend.interleave(a)
        backend.close()
        with pytest.raises(gs.BackendError, match="closed"):
            backend.interleave([])
