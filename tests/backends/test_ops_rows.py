"""get_rows and set_rows against NumPy's indexing."""

import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, compute, random, stored, width

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(2)


@pytest.mark.parametrize("type", FLOATS + QUANTISED + ("i32",))
def test_get_rows(type):
    ctx, n = gs.Context(), width(64, type)
    table, ids = ctx.tensor(type, (n, 9)), ctx.tensor("i32", (5,))
    x = RNG.integers(-99, 99, (9, n)).astype(np.int32) if type == "i32" else random(RNG, n, 9)
    got = compute(ctx, ctx.get_rows(table, ids), {table: x, ids: np.int32([8, 0, 3, 3, 8])})
    want = x if type == "i32" else stored(x, type)
    assert np.array_equal(got, want[[8, 0, 3, 3, 8]])


@pytest.mark.parametrize("type", ["f32", "f16", "q4_1"])
def test_get_rows_of_batches_and_strided_tables(ctx, type):
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
    for n, n_table, names in ((width(64, type), 9, [7, 2, 7, 0]), (1024, 300, [*RNG.permutation(300)[:199], 7, 7])):
        ctx = gs.Context()
        table, rows = ctx.tensor(type, (n, n_table)), ctx.tensor("f32", (n, len(names)))
        ids = ctx.tensor(type_ids, (len(names),))
        x, y = random(RNG, n, n_table), random(RNG, n, len(names))
        given = np.array(names, np.dtype(type_ids.replace("i", "int")))
        got = compute(ctx, ctx.set_rows(table, rows, ids), {table: x, rows: y, ids: given})
        want, held = stored(x, type), stored(y, type)
        for name, row in zip(names, held, strict=True):     # of two rows for one place, the last
            want[name] = row
        assert np.array_equal(got, want)


def test_set_rows_of_batches_in_a_view(ctx):
    cache, rows, ids = (ctx.tensor("f16", (4, 6, 4)), ctx.tensor("f32", (4, 2, 4, 1)), ctx.tensor("i64", (2, 2)))
    x, y = random(RNG, 4, 6, 4), random(RNG, 4, 2, 4, 1)
    view = ctx.view_3d(cache, 4, 3, 4, 2 * cache.nb[1], cache.nb[2])
    names = np.array([[0, 2], [1, 0]])
    got = compute(ctx, ctx.set_rows(view, rows, ids), {cache: x, rows: y, ids: names})
    want = stored(x, "f16")[:, ::2]
    for batch in range(4):
        want[batch][names[batch % 2]] = stored(y[0, batch], "f16")
    assert np.array_equal(got, want)
