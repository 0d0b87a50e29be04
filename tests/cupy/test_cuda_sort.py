"""ARGSORT and TOP_K of rows that fit one block, and of longer ones."""

import cupy_kernels
import numpy as np
import pytest

from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.ops.sort import CHUNK

RNG = np.random.default_rng(24)


def order(rows: np.ndarray, descending: bool) -> np.ndarray:
    return (-rows if descending else rows).argsort(axis=-1, kind="stable")


@pytest.mark.parametrize("n", [1, 2, 3, 31, 64, 100, 1025, CHUNK])
def test_rows_of_one_block(ctx, n):
    x = RNG.integers(-20, 20, (3, n)).astype(np.float32)          # many are equal
    x[0, RNG.integers(0, n)], x[1, 0] = np.nan, -0.0
    x[2, RNG.integers(0, n)] = -np.inf
    a = ctx.tensor("f32", (n, 3))
    for way in ("asc", "desc"):
        got = cupy_kernels.compute(ctx, ctx.argsort(a, way), {a: x})
        assert np.array_equal(got.reshape(x.shape), order(x, way == "desc"))
    k = min(n, 5)
    assert np.array_equal(cupy_kernels.compute(ctx, ctx.top_k(a, k), {a: x}).reshape(3, k), order(x, True)[:, :k])


@pytest.mark.parametrize("n", [CHUNK + 1, 3 * CHUNK - 5])
def test_rows_of_several_blocks(ctx, n):
    x = RNG.integers(-300, 300, (2, n)).astype(np.float32)
    x[0, [5, n - 1]], x[1, [0, 4000]] = np.nan, (np.inf, -np.inf)
    a = ctx.tensor("f32", (n + 3, 2))
    view = ctx.view_2d(a, n, 2, a.nb[1], 8)
    values = {a: np.pad(x, ((0, 0), (2, 1)))}
    out = ctx.argsort(view, "desc")
    assert np.array_equal(cupy_kernels.compute(ctx, out, values), order(x, True))
    best = cupy_kernels.compute(ctx, ctx.top_k(view, 40), values)
    assert np.array_equal(best, order(x, True)[:, :40])
    taken = cupy_kernels.placed_launches(ctx, [out]).work_size
    assert taken == ops.OPS["ARGSORT"].work(out) == 2 * 8 * 4 * CHUNK // (2 if n == CHUNK + 1 else 1)


def test_many_short_rows(ctx):
    x = RNG.normal(size=(70, 64)).astype(np.float32)
    a = ctx.tensor("f32", (64, 10, 7))
    got = cupy_kernels.compute(ctx, ctx.top_k(a, 8), {a: x.reshape(7, 10, 64)})
    assert np.array_equal(got.reshape(70, 8), order(x, True)[:, :8])
