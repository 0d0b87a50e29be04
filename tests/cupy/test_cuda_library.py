"""Products of prompts by the device's matrix library, simulated in NumPy: pieces, batches, strides, and when it is
used."""

import cupy_kernels
import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, width

import ggml_sched as gs
from ggml_sched.backends.cupy.ops import OPS, library
from ggml_sched.graph import quants

RNG = np.random.default_rng(15)


def check(ctx: gs.Context, out: gs.Tensor, calls: int) -> None:
    """The product is right, and made by so many calls of the library."""
    values = cupy_kernels.leaves(ctx, RNG)
    with cupy_kernels.filled(ctx, values, 64, 0x7F):
        builder = cupy_kernels.build([out], blas=True, tensor=False)
        assert builder.work_size <= OPS[out.op].work(out)
        assert [launch.kernel for launch in builder.launches].count(library.PRODUCT) == calls
        cupy_kernels.run(builder)
        got = out.numpy()
    assert cupy_kernels.error(got, cupy_kernels.oracle(ctx, out, values)) <= 1e-6


@pytest.mark.parametrize("kind", [kind for kind in FLOATS + QUANTISED if kind != "f32"])
def test_every_type(kind):
    ctx, k = gs.Context(), 2 * width(64, kind)
    w, x = ctx.tensor(kind, (k, 19)), ctx.tensor("f32", (k, 33))
    check(ctx, ctx.mul_mat(w, x), 1)


@pytest.mark.parametrize("kind, a, b, calls", [
    ("f16", (64, 19, 2, 3), (64, 33, 6, 3), 6), ("q4_0", (64, 19, 2, 3), (64, 33, 6, 3), 6),
    ("f16", (64, 19, 4, 2), (64, 33, 4, 4), 4), ("q4_0", (64, 19, 4, 1), (64, 33, 4, 2), 8),
])
def test_batches(ctx, kind, a, b, calls):
    w, x = ctx.tensor(kind, a), ctx.tensor("f32", b)
    check(ctx, ctx.mul_mat(w, x), calls)


def test_weights_in_pieces(ctx, monkeypatch):
    monkeypatch.setattr(library, "PIECE", 64 * 256)
    w, x = ctx.tensor("q8_0", (64, 600)), ctx.tensor("f16", (64, 40))
    check(ctx, ctx.mul_mat(w, x), 3)


def test_caches_and_queries_as_attention_has_them(ctx):
    cache, q = ctx.tensor("f16", (128, 60)), ctx.tensor("f32", (64, 4, 40))
    k = ctx.permute(ctx.view_3d(cache, 64, 2, 50, 128, cache.nb[1]), 0, 2, 1, 3)
    out = ctx.mul_mat(k, ctx.permute(q, 0, 2, 1, 3))
    check(ctx, out, 2)


def test_rows_that_share_elements_are_taken_apart(ctx):
    signal, x = ctx.tensor("f16", 400), ctx.tensor("f32", (64, 40))
    windows = ctx.view_2d(signal, 64, 30, 16)
    check(ctx, ctx.mul_mat(windows, x), 1)


def test_it_is_not_used_for_few_columns_exact_products_or_f32(ctx):
    w, x = ctx.tensor("q4_0", (64, 64)), ctx.tensor("f32", (64, 64))
    nodes = [ctx.mul_mat(w, ctx.tensor("f32", (64, 15))), ctx.mul_mat(ctx.tensor("f32", (64, 64)), x)]
    used = ctx.mul_mat(w, ctx.tensor("f32", (64, 16)))
    for options, some in (({"blas": True}, [used]), ({"blas": True}, nodes), ({"blas": True, "exact": True}, [used]),
                          ({}, [used])):
        builder = cupy_kernels.placed_launches(ctx, some, tensor=False, **options)
        kernels = {launch.kernel for launch in builder.launches}
        assert (library.PRODUCT in kernels) == (options == {"blas": True} and some == [used])


@pytest.mark.parametrize(("kind", "columns", "used"), [
    ("q4_0", 16, False), ("q4_0", 191, False), ("q4_0", 192, True), ("f16", 16, True), ("bf16", 15, False)])
def test_tensor_cores_multiply_quantised_weights_until_decoding_pays(ctx, kind, columns, used):
    node = ctx.mul_mat(ctx.tensor(kind, (64, 64)), ctx.tensor("f32", (64, columns)))
    kernels = {launch.kernel for launch in cupy_kernels.placed_launches(ctx, [node], blas=True).launches}
    assert (library.PRODUCT in kernels) == used
    assert any(kernel.startswith("mma_") for kernel in kernels) == (kind == "q4_0" and not used)


@pytest.mark.parametrize("kind", ["q4_0", "f16"])
def test_activations_beyond_f16_stay_finite(kind):
    """The columns in which they are, alone, are scaled; those with an infinity stay as they are."""
    ctx, k, n = gs.Context(), 256, 20
    w, x = ctx.tensor(kind, (k, 19)), ctx.tensor("f32", (k, n, 2))
    wide = ctx.tensor(kind, (k, 19, 2)) if kind == "f16" else w
    out = ctx.mul_mat(wide, x)
    values = cupy_kernels.leaves(ctx, RNG)
    columns = RNG.standard_normal((2, n, k)).astype(np.float32)
    columns[0, 3] *= 1e6
    columns[1, 7, 5] = 65505.0
    columns[1, 8] *= 1e30
    columns[0, 9, 9] = np.inf
    columns[0, 10, 1] = np.nan
    values[x] = columns
    with cupy_kernels.filled(ctx, values, 64, 0x7F), np.errstate(invalid="ignore"):
        cupy_kernels.run(cupy_kernels.build([out], blas=True, tensor=False))
        got = out.numpy()
    weights = values[wide].astype(np.float16) if kind == "f16" else quants.dequantize(
        quants.quantize(values[wide], wide.type), wide.type)
    weights = weights.astype(np.float64)
    assert not np.isfinite(got[0, 9:11]).any()
    columns[0, 9:11] = got[0, 9:11] = 0
    expected = columns.astype(np.float64) @ (weights.swapaxes(-1, -2))
    distance = ((got - expected) ** 2).sum(-1) / ((expected**2).sum(-1) + 1e-30)
    assert distance.max() < 1e-5
