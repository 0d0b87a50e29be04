"""mul_mat, mul_mat_id, get_rows, set_rows against f64 formulas and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, assert_close, assert_product, compute, place, random, stored, width

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(2)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """ggml's mul_mat in f64: one matrix of a for each run of b's matrices."""
    a, b = (x.reshape((1,) * (4 - x.ndim) + x.shape).astype(np.float64) for x in (a, b))
    out = np.empty((*b.shape[:3], a.shape[2]))
    for i3 in range(b.shape[0]):
        for i2 in range(b.shape[1]):
            out[i3, i2] = b[i3, i2] @ a[i3 * a.shape[0] // b.shape[0], i2 * a.shape[1] // b.shape[1]].T
    return out


@pytest.mark.parametrize("type_b", FLOATS)
@pytest.mark.parametrize("type_a", FLOATS + QUANTISED)
def test_mul_mat_types(type_a, type_b):
    ctx, n = gs.Context(), 2 * width(32, type_a)
    a, b = ctx.tensor(type_a, (n, 7)), ctx.tensor(type_b, (n, 3))
    x, y = random(RNG, n, 7), random(RNG, n, 3)
    want = product(stored(x, type_a), stored(y, type_b))
    assert_product(compute(ctx, ctx.mul_mat(a, b), {a: x, b: y}), want, type_a, n / 3)


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(
    "ne",
    [
        ((32, 5, 2, 3), (32, 4, 2, 3)),
        ((32, 5, 2, 1), (32, 4, 6, 1)),
        ((32, 5, 2, 2), (32, 4, 4, 6)),
        ((32, 5, 1, 1), (32, 1, 8, 2)),
        ((32, 5, 4, 1), (32, 1, 8, 1)),
        ((32, 1, 1, 1), (32, 1, 1, 1)),
        ((32, 0, 1, 1), (32, 4, 1, 1)),
        ((32, 5, 1, 1), (32, 0, 1, 1)),
        ((0, 5, 1, 1), (0, 4, 1, 1)),
    ],
    ids=str,
)
def test_mul_mat_broadcasts(ne, type):
    ctx = gs.Context()
    a, b = ctx.tensor(type, ne[0]), ctx.tensor("f32", ne[1])
    x, y = random(RNG, *ne[0]), random(RNG, *ne[1])
    assert_product(compute(ctx, ctx.mul_mat(a, b), {a: x, b: y}), product(stored(x, type), y), type, 10)


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
def test_mul_mat_of_a_cache_and_permuted_queries(type):
    """Attention as llama-style graphs write it: K and V are views of a cache, q is permuted."""
    d, n_head, n_kv_head, n_tokens, n_kv, n_ctx = 8, 6, 2, 3, 5, 9
    ctx = gs.Context()
    cache, q = ctx.tensor(type, (d * n_kv_head, n_ctx)), ctx.tensor("f32", (d, n_head, n_tokens))
    k = ctx.permute(ctx.view_3d(cache, d, n_kv_head, n_kv, d * cache.nb[0], cache.nb[1]), 0, 2, 1, 3)
    c, x = random(RNG, d * n_kv_head, n_ctx), random(RNG, d, n_head, n_tokens)
    want = product(stored(c, type)[:n_kv].reshape(n_kv, n_kv_head, d).swapaxes(0, 1), x.swapaxes(0, 1))
    values = {cache: c, q: x}
    assert_close(compute(ctx, ctx.mul_mat(k, ctx.permute(q, 0, 2, 1, 3)), values), want, scale=10)

    # V transposed in its cache: rows of one channel over the positions.
    v_cache, scores = ctx.tensor(type, (n_ctx, d * n_kv_head)), ctx.tensor("f32", (n_kv, n_tokens, n_head))
    v = ctx.view_3d(v_cache, n_kv, d, n_kv_head, n_ctx * v_cache.nb[0], n_ctx * d * v_cache.nb[0])
    w, s = random(RNG, n_ctx, d * n_kv_head), random(RNG, n_kv, n_tokens, n_head)
    want = product(stored(w, type)[:, :n_kv].reshape(n_kv_head, d, n_kv), s)
    assert_close(compute(ctx, ctx.mul_mat(v, scores), {v_cache: w, scores: s}), want, scale=10)


def test_mul_mat_of_transposed_right_side_and_one_row():
    ctx = gs.Context()
    a, b = ctx.tensor("f32", (6, 1)), ctx.tensor("f32", (4, 6))
    x, y = random(RNG, 6, 1), random(RNG, 4, 6)
    assert_close(compute(ctx, ctx.mul_mat(a, ctx.transpose(b)), {a: x, b: y}), product(x, y.T), scale=10)


@pytest.mark.parametrize("type", ["f32", "f16", "q4_0", "q4_K", "iq4_xs"])
def test_mul_mat_in_chunks(type):
    ctx = gs.Context()
    a, b = ctx.tensor(type, (512, 1500)), ctx.tensor("f32", (512, 3))
    x, y = random(RNG, 512, 1500), random(RNG, 512, 3)
    assert_product(compute(ctx, ctx.mul_mat(a, b), {a: x, b: y}), product(stored(x, type), y), type, 60)
    n = width(64, type)
    many, wide = ctx.tensor(type, (n, 130, 70)), ctx.tensor("f32", (n, 2, 140))
    x, y = random(RNG, n, 130, 70), random(RNG, n, 2, 140)
    want = product(stored(x, type), y)
    assert_product(compute(ctx, ctx.mul_mat(many, wide), {many: x, wide: y}), want, type, 30)


@pytest.mark.parametrize("type", FLOATS + QUANTISED)
@pytest.mark.parametrize("b_rows", [1, 3])
def test_mul_mat_id(type, b_rows):
    k, m, n_expert, n_used, n_tokens = width(32, type), 5, 4, 3, 6
    ctx = gs.Context()
    w, b = ctx.tensor(type, (k, m, n_expert)), ctx.tensor("f32", (k, b_rows, n_tokens))
    ids = ctx.tensor("i32", (n_used, n_tokens))
    x, y = random(RNG, k, m, n_expert), random(RNG, k, b_rows, n_tokens)
    names = RNG.integers(0, n_expert, (n_tokens, n_used)).astype(np.int32)
    held = stored(x, type)
    want = np.array(
        [[held[names[t, u]] @ y[t, u % b_rows].astype(float) for u in range(n_used)] for t in range(n_tokens)]
    )
    assert_product(compute(ctx, ctx.mul_mat_id(w, b, ids), {w: x, b: y, ids: names}), want, type, 10)


def test_mul_mat_id_of_large_experts_and_none():
    ctx = gs.Context()
    w, b, ids = ctx.tensor("f16", (512, 1100, 3)), ctx.tensor("f32", (512, 1, 4)), ctx.tensor("i32", (2, 4))
    x, y = random(RNG, 512, 1100, 3), random(RNG, 512, 1, 4)
    names = np.int32([[0, 2], [2, 0], [2, 2], [0, 0]])
    want = np.array([[stored(x, "f16")[e] @ y[t, 0] for e in row] for t, row in enumerate(names)])
    assert_close(compute(ctx, ctx.mul_mat_id(w, b, ids), {w: x, b: y, ids: names}), want, scale=60)
    empty, none = ctx.tensor("f32", (512, 1, 0)), ctx.tensor("i32", (2, 0))
    assert compute(ctx, ctx.mul_mat_id(w, empty, none), {w: x}).size == 0


@pytest.mark.parametrize("type", FLOATS + QUANTISED + ("i32",))
def test_get_rows(type):
    ctx, n = gs.Context(), width(64, type)
    table, ids = ctx.tensor(type, (n, 9)), ctx.tensor("i32", (5,))
    x = RNG.integers(-99, 99, (9, n)).astype(np.int32) if type == "i32" else random(RNG, n, 9)
    got = compute(ctx, ctx.get_rows(table, ids), {table: x, ids: np.int32([8, 0, 3, 3, 8])})
    want = x if type == "i32" else stored(x, type)
    assert np.array_equal(got, want[[8, 0, 3, 3, 8]])


@pytest.mark.parametrize("type", ["f32", "f16", "q4_1"])
def test_get_rows_of_batches_and_strided_tables(type):
    ctx = gs.Context()
    table, ids = ctx.tensor(type, (32, 8, 3, 2)), ctx.tensor("i32", (4, 3, 2))
    x, names = random(RNG, 32, 8, 3, 2), RNG.integers(0, 4, (2, 3, 4)).astype(np.int32)
    every_other = ctx.view_4d(table, 32, 4, 3, 2, 2 * table.nb[1], table.nb[2], table.nb[3], table.nb[1])
    want = np.array([[stored(x, type)[q, p, 1::2][names[q, p]] for p in range(3)] for q in range(2)])
    assert np.array_equal(compute(ctx, ctx.get_rows(every_other, ids), {table: x, ids: names}), want)
    none = ctx.tensor("i32", (0,))
    flat = ctx.tensor(type, (32, 8))
    assert compute(ctx, ctx.get_rows(flat, none), {flat: x[0, 0]}).size == 0


@pytest.mark.parametrize("type_ids", ["i32", "i64"])
@pytest.mark.parametrize("type", FLOATS + QUANTISED)
def test_set_rows(type, type_ids):
    ctx, n = gs.Context(), width(64, type)
    table, rows, ids = ctx.tensor(type, (n, 9)), ctx.tensor("f32", (n, 4)), ctx.tensor(type_ids, (4,))
    x, y = random(RNG, n, 9), random(RNG, n, 4)
    names = np.array([7, 2, 7, 0], np.dtype(type_ids.replace("i", "int")))
    got = compute(ctx, ctx.set_rows(table, rows, ids), {table: x, rows: y, ids: names})
    want = stored(x, type)
    want[[2, 7, 0]] = stored(y, type)[[1, 2, 3]]  # of the two rows for 7, the last
    assert np.array_equal(got, want)


def test_set_rows_of_batches_in_a_view():
    ctx = gs.Context()
    cache, rows, ids = (
        ctx.tensor("f16", (4, 6, 4)),
        ctx.tensor("f32", (4, 2, 4, 1)),
        ctx.tensor("i64", (2, 2)),
    )
    x, y = random(RNG, 4, 6, 4), random(RNG, 4, 2, 4, 1)
    view = ctx.view_3d(cache, 4, 3, 4, 2 * cache.nb[1], cache.nb[2])
    names = np.array([[0, 2], [1, 0]])
    got = compute(ctx, ctx.set_rows(view, rows, ids), {cache: x, rows: y, ids: names})
    want = stored(x, "f16")[:, ::2]
    for batch in range(4):
        want[batch][names[batch % 2]] = stored(y[0, batch], "f16")
    assert np.array_equal(got, want)


@pytest.mark.parametrize("bad", [-1, 9, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("op", ["get_rows", "set_rows", "mul_mat_id", "add_id"])
def test_rows_outside_the_table_raise_and_change_nothing(op, bad):
    ctx = gs.Context()
    ids = ctx.tensor("i32", (2, 1), "ids")
    table, rows = ctx.tensor("f32", (4, 9), "table"), ctx.tensor("f32", (4, 2), "rows")
    out = {
        "get_rows": lambda: ctx.get_rows(table, ids),
        "set_rows": lambda: ctx.set_rows(table, rows, ids),
        "mul_mat_id": lambda: ctx.mul_mat_id(ctx.tensor("f32", (4, 3, 9)), ctx.tensor("f32", (4, 1, 1)), ids),
        "add_id": lambda: ctx.add_id(rows, table, ids),
    }[op]()
    ctx.set_name(out, "the node")
    with gs.CpuBackend(1) as backend:
        place(ctx, backend)
        x = random(RNG, 4, 9)
        table.set(x)
        ids.set(np.int32([[1, bad]]))
        with pytest.raises(gs.BackendError, match=f"'CPU'.*'the node'.*{bad}.* 9 rows"):
            backend.graph_compute(gs.Graph(out))
        assert np.array_equal(table.numpy(), x)
        ids.set(np.int32([[1, 8]]))
        backend.graph_compute(gs.Graph(out))
