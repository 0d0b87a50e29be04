"""Sums, order and norms against f64 formulas."""

import numpy as np
import pytest
from op_results import FLOATS, assert_close, compute, random, stored

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(4)
SHAPES = [(7, 5, 3, 2), (1, 4), (15, 2), (130, 2), (5,), (2000, 100), (4096, 9), (130, 40, 3, 2)]


def strided(ctx: gs.Context) -> tuple[gs.Tensor, gs.Tensor, np.ndarray, np.ndarray]:
    """(root, permuted slice of it, data of the root, data of the view)."""
    a = ctx.tensor("f32", (6, 10, 4))
    x = random(RNG, 6, 10, 4)
    view = ctx.permute(ctx.view_3d(a, 5, 5, 4, 2 * a.nb[1], a.nb[2], 4), 1, 2, 0, 3)
    return a, view, x, x[:, ::2, 1:6].transpose(1, 2, 0)


ROWS = {
    "sum_rows": lambda x: x.sum(-1, keepdims=True),
    "mean": lambda x: x.mean(-1, keepdims=True),
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
    "rms_norm": lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "l2_norm": lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-5),
}
EPS = {"norm": (1e-5,), "rms_norm": (1e-5,), "l2_norm": (1e-5,)}


@pytest.mark.spread("op ne", "op kernels", "ne kernels")
@pytest.mark.parametrize("ne", SHAPES, ids=str)
@pytest.mark.parametrize("op", ROWS)
def test_rows(ctx, op, ne):
    a = ctx.tensor("f32", ne)
    x = random(RNG, *ne)
    assert_close(compute(ctx, getattr(ctx, op)(a, *EPS.get(op, ())), {a: x}), ROWS[op](x.astype(float)), scale=10)


@pytest.mark.parametrize("op", ROWS)
def test_rows_of_permuted_and_sliced(ctx, op):
    a, view, x, rows = strided(ctx)
    assert_close(compute(ctx, getattr(ctx, op)(view, *EPS.get(op, ())), {a: x}), ROWS[op](rows.astype(float)))


def test_rows_of_nothing(ctx):
    none, empty_rows = ctx.tensor("f32", (4, 0)), ctx.tensor("f32", (0, 3))
    for op in ROWS:
        assert compute(ctx, getattr(ctx, op)(none, *EPS.get(op, ())), {}).size == 0
    assert compute(ctx, ctx.sum_rows(empty_rows), {}).tolist() == [[0], [0], [0]]
    assert np.isnan(compute(ctx, ctx.mean(empty_rows), {})).all()
    assert compute(ctx, ctx.sum(empty_rows), {}).tolist() == [0]


def test_norm_of_zeros_and_huge_values_follows_ieee(ctx):
    a = ctx.tensor("f32", (4,))
    assert compute(ctx, ctx.rms_norm(a, 0.0), {a: np.zeros(4)}).tolist() != [0, 0, 0, 0]  # 0 / 0
    assert compute(ctx, ctx.l2_norm(a, 1e-6), {a: np.zeros(4)}).tolist() == [0, 0, 0, 0]
    assert compute(ctx, ctx.rms_norm(a, 1e-6), {a: np.full(4, 1e30)}).tolist() == [0, 0, 0, 0]  # 1e30 / inf


@pytest.mark.parametrize("type", FLOATS)
def test_sum(ctx, type):
    a = ctx.tensor(type, (300, 7, 2))
    x = random(RNG, 300, 7, 2)
    assert_close(compute(ctx, ctx.sum(a), {a: x}), stored(x, type).sum(), type, scale=100)
    assert_close(compute(ctx, ctx.sum(ctx.transpose(a)), {a: x}), stored(x, type).sum(), type, scale=100)


@pytest.mark.parametrize("n_groups", [1, 2, 3, 4, 6])
def test_group_norm(ctx, n_groups):
    a = ctx.tensor("f32", (5, 3, 6, 2))
    x = random(RNG, 5, 3, 6, 2).astype(float)
    want = np.empty_like(x)
    width = -(-6 // n_groups)
    for batch, out in zip(x, want, strict=True):
        for start in range(0, 6, width):
            group = batch[start : start + width]
            out[start : start + width] = (group - group.mean()) / np.sqrt(group.var() + 1e-6)
    assert_close(compute(ctx, ctx.group_norm(a, n_groups, 1e-6), {a: x.astype(np.float32)}), want)


def test_argmax_takes_the_first_of_equals(ctx):
    a = ctx.tensor("f32", (5, 3))
    x = np.float32([[1, 3, 3, 2, 0], [-1, -1, -1, -1, -1], [0, 0, 0, 0, 9]])
    got = compute(ctx, ctx.argmax(a), {a: x})
    assert got.dtype == np.int32 and got.tolist() == [1, 0, 4]
    square = ctx.tensor("f32", (3, 3))
    y = random(RNG, 3, 3)
    assert compute(ctx, ctx.argmax(ctx.transpose(square)), {square: y}).tolist() == y.argmax(0).tolist()


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_argsort(ctx, order):
    for ne in ((9, 4, 2), (1, 3), (0, 2), (16, 5), (17, 5), (3000, 50)):
        a = ctx.tensor("f32", ne)
        x = RNG.permuted(np.arange(int(np.prod(ne)), dtype=np.float32).reshape(ne[::-1]), axis=-1)
        got = compute(ctx, ctx.argsort(a, order), {a: x}).reshape(x.shape)
        sorted_ = np.take_along_axis(x, got.astype(np.int64), -1)
        assert np.array_equal(sorted_, np.sort(x, axis=-1)[..., :: 1 if order == "asc" else -1])


def test_argsort_keeps_the_order_of_equals_and_puts_nan_last(ctx):
    a = ctx.tensor("f32", (5,))
    x = np.float32([2, np.nan, 1, 2, 1])
    assert compute(ctx, ctx.argsort(a), {a: x}).tolist() == [2, 4, 0, 3, 1]
    assert compute(ctx, ctx.argsort(a, "desc"), {a: x}).tolist() == [0, 3, 2, 4, 1]
    for n, rows in ((1, 1), (8, 3), (17, 5), (500, 40)):
        a, x = ctx.tensor("f32", (n, rows)), RNG.integers(-3, 4, (rows, n)).astype(np.float32)
        x[RNG.random(x.shape) < 0.1] = np.nan
        x[RNG.random(x.shape) < 0.1] = np.inf
        for node in (ctx.argsort(a), ctx.argsort(a, "desc"), ctx.top_k(a, max(1, n // 3)), ctx.argmax(a)):
            sign = 1 if node.op == "ARGSORT" and not any(node.op_params) else -1
            want = x.argmax(-1) if node.op == "ARGMAX" else (sign * x).argsort(-1, kind="stable")[:, : node.ne[0]]
            assert np.array_equal(compute(ctx, node, {a: x}).reshape(want.shape), want), node


def test_top_k(ctx):
    a, view, x, rows = strided(ctx)
    for k in (0, 1, 3, 4):
        got = compute(ctx, ctx.top_k(view, k), {a: x})
        want = np.argsort(-rows.astype(float), axis=-1)[..., :k]
        assert np.array_equal(got.reshape(want.shape), want)


def test_arange(ctx):
    for start, stop, step in ((0, 10, 1), (1.5, -2, -0.25), (3, 3, 1), (0, 1, 0.3)):
        out = ctx.arange(start, stop, step)
        assert_close(compute(ctx, out, {}), start + step * np.arange(out.n_elements))
