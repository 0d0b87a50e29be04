"""get_rows and set_rows against NumPy's indexing."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, compute, random, stored, width

import ggml_sched as gs
from ggml_sched.graph import quants

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


@cache  # to quantise takes longer than to set
def rows_to_set(type: str, n: int, n_table: int, n_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What to set a table of `type` to, rows and the ids of their places, and the table after they were set."""
    rng = np.random.default_rng(n)
    table, rows = random(rng, n, n_table), random(rng, n, n_rows)
    ids = np.array([7, *rng.permutation(n_table)[:n_rows - 3], 7, 7])
    want = stored(table, type)
    for place, row in zip(ids, stored(rows, type), strict=True):    # of two rows for one place, the last
        want[place] = row
    return quants.quantize(table, gs.Type[type.upper()]) if type in QUANTISED else table, rows, ids, want


CONVERTED = {*FLOATS, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}
"""Types to which compiled kernels convert rows: 201 rows are parts for several threads.  The oracle, which has no
threads, converts to the others: rows of several blocks are enough."""


@pytest.mark.spread("type kernels", "type_ids kernels")
@pytest.mark.parametrize("type_ids", ["i32", "i64"])
@pytest.mark.parametrize("type", FLOATS + QUANTISED)
def test_set_rows(type, type_ids):
    for n, n_table, n_rows in ((width(64, type), 9, 4), (1024, 300, 201) if type in CONVERTED else (1024, 12, 9)):
        ctx = gs.Context()
        table, rows = ctx.tensor(type, (n, n_table)), ctx.tensor("f32", (n, n_rows))
        ids = ctx.tensor(type_ids, (n_rows,))
        x, y, places, want = rows_to_set(type, n, n_table, n_rows)
        given = places.astype(type_ids.replace("i", "int"))
        assert np.array_equal(compute(ctx, ctx.set_rows(table, rows, ids), {table: x, rows: y, ids: given}), want)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_every_id_of_a_table_without_rows_is_a_fault(type, planned, kernels):
    """Otherwise rows would be lost in silence.  No ids, or rows without elements, are no fault."""
    for n, n_rows, fails in ((32, 3, True), (32, 0, False), (0, 3, False)):
        ctx = gs.Context()
        table, rows, ids = ctx.tensor(type, (n, 0)), ctx.tensor("f32", (n, n_rows)), ctx.tensor("i64", (n_rows,))
        graph = gs.Graph(ctx.set_name(ctx.set_rows(table, rows, ids), "to"))
        with gs.CpuBackend(1, kernels="numpy" if kernels == "numpy" else "compiled") as backend:
            backend.alloc_tensors(ctx)
            ids.set(np.zeros(n_rows, np.int64))
            expected = pytest.raises(gs.BackendError, match=r"'to' \(SET_ROWS\): id 0 does not name one of 0 rows")
            with expected if fails else nullcontext():
                if planned:
                    backend.graph_plan_compute(backend.graph_plan_create(graph))
                else:
                    backend.graph_compute(graph)


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
