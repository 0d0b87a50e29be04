"""Rows by number on the device, blocks that it makes, ids that name nothing."""

import cupy_kernels
import numpy as np
import op_results
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy.ops import rows as row_ops
from ggml_sched.graph import quants

RNG = np.random.default_rng(23)
BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def same_bits(ctx: gs.Context, out: gs.Tensor, values: dict) -> None:
    graph = gs.Graph(out)
    with cupy_kernels.filled(ctx, values, 64, kernels="numpy") as buffer:
        buffer.backend.graph_compute(graph)
        want = op_results.raw(out)
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.filled(ctx, values, 64):
            assert cupy_kernels.run(cupy_kernels.build(graph.nodes), order)["position"] == 0
            assert op_results.raw(out) == want


@pytest.mark.parametrize("type", op_results.FLOATS + op_results.QUANTISED)
def test_get_rows_reads_every_bit_of_every_type(type):
    """Blocks of random bytes: all levels and scales, but for scales that are no number."""
    kind = gs.Type[type.upper()]
    ctx, n = gs.Context(), 2 * op_results.width(32, type)
    table, ids = ctx.tensor(type, (n, 40)), ctx.tensor("i32", (60,))
    if kind.is_quantized:
        content = RNG.integers(0, 256, (40, n // kind.block_size, kind.type_size)).astype(np.uint8)
        keep = np.isfinite(quants.dequantize(content, kind).reshape(40, -1, kind.block_size)).all(-1)
        content[~keep] = 0
        assert keep.mean() > 0.8
    else:
        content = op_results.random(RNG, n, 40)
    same_bits(ctx, ctx.get_rows(table, ids), {table: content, ids: RNG.integers(0, 40, 60).astype(np.int32)})


AWKWARD = {
    "nothing": np.zeros(32),
    "minus nothing": -np.zeros(32),
    "two as far": np.where(np.arange(32) == 9, 3, np.where(np.arange(32) == 4, -3, 0.5)),
    "ties": np.arange(32) / 8 - 2,
    "tiny": np.linspace(-1, 1, 32) * 1e-42,
    "huge": np.linspace(-1, 1, 32) * 3e38,
    "one sign": np.linspace(1, 2, 32),
    "infinity": np.where(np.arange(32) == 7, np.inf, 1.0),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_the_cpu(ctx, kind):
    x = np.concatenate([*AWKWARD.values(), RNG.normal(size=64 * 32)]).astype(np.float32).reshape(-1, 96)
    a = ctx.tensor("f32", (96, len(x)))
    same_bits(ctx, ctx.cast(a, kind), {a: x})
    same_bits(ctx, ctx.cast(ctx.view_2d(a, 64, len(x) // 2, 2 * a.nb[1], 4), kind), {a: x})


def test_uneven_blocks_are_as_near_as_those_of_the_cpu(ctx):
    """The search for their scale adds in another order; scales that explain equally much may differ."""
    x = np.concatenate([RNG.normal(size=(300, 32)), RNG.uniform(-1, 1, (300, 32)) ** 3]).astype(np.float32)
    a = ctx.tensor("f32", (32, 600))
    got, want = cupy_kernels.compute(ctx, ctx.cast(a, "iq4_nl"), {a: x}), op_results.stored(x, "iq4_nl")
    assert (got == want).all(-1).mean() > 0.95
    errors = [((y.astype(float) - x) ** 2).sum(-1) for y in (got, want)]
    assert (errors[0] <= 1.01 * errors[1] + 1e-12).all()


def test_awkward_uneven_blocks(ctx):
    x = np.concatenate(list(AWKWARD.values())).astype(np.float32).reshape(-1, 32)
    x = np.concatenate([x, np.where(np.arange(32) == 3, np.nan, x[3])[None]]).astype(np.float32)
    a = ctx.tensor("f32", (32, len(x)))
    got, want = cupy_kernels.compute(ctx, ctx.cast(a, "iq4_nl"), {a: x}), op_results.stored(x, "iq4_nl")
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=0.02)
    assert not got[-1].any() and not got[list(AWKWARD).index("infinity")].any()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_with_a_nan_spoils_itself_alone(ctx, kind):
    x = RNG.normal(size=(3, 32)).astype(np.float32)
    x[1, 5] = np.nan
    a = ctx.tensor("f32", (32, 3))
    got = cupy_kernels.compute(ctx, ctx.cast(a, kind), {a: x})
    assert np.isnan(got[1]).any()
    assert np.array_equal(got[[0, 2]], op_results.stored(x[[0, 2]], kind))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("ids", ["i32", "i64"])
@pytest.mark.parametrize("type", [*op_results.FLOATS, *BLOCKS])
def test_of_several_rows_for_one_place_the_last_stays(ctx, type, ids, many, monkeypatch):
    if many:
        monkeypatch.setattr(row_ops, "MANY", 3)
    cache, b, names = ctx.tensor(type, (64, 7, 2)), ctx.tensor("f32", (64, 30, 2)), ctx.tensor(ids, (30, 1))
    values = {cache: op_results.random(RNG, 64, 7, 2), b: op_results.random(RNG, 64, 30, 2),
              names: RNG.integers(0, 6, 30)}
    same_bits(ctx, ctx.set_rows(cache, b, names), values)


def test_a_transposed_cache_is_written_element_by_element():
    """V without flash attention: more rows than look through each other."""
    ctx, n = gs.Context(), row_ops.MANY + 100
    cache, b, names = ctx.tensor("f16", (1, 4000)), ctx.tensor("f32", (1, n)), ctx.tensor("i64", (n,))
    places = RNG.permutation(4000)[:n]
    places[50] = places[2000]
    values = {cache: op_results.random(RNG, 1, 4000), b: op_results.random(RNG, 1, n), names: places}
    out = ctx.set_rows(cache, b, names)
    assert len(cupy_kernels.placed_launches(ctx, [out]).launches) == 3
    same_bits(ctx, out, values)


def with_bad_id(op: str, ctx: gs.Context):
    """(node, ids, how many rows there are, which source the ids are)."""
    if op == "get_rows":
        table, ids = ctx.tensor("q8_0", (32, 9)), ctx.tensor("i32", (3,))
        return ctx.get_rows(table, ids), ids, 9, 1
    if op == "add_id":
        a, b, ids = ctx.tensor("f32", (5, 3, 1)), ctx.tensor("f32", (5, 9)), ctx.tensor("i32", (3, 1))
        return ctx.add_id(a, b, ids), ids, 9, 2
    if op == "ssm_scan":
        extents = ((4, 2, 3, 9), (2, 3, 5, 3), (3, 5, 3), (1, 3), (4, 1, 5, 3), (4, 1, 5, 3))
        ids = ctx.tensor("i32", (3,))
        return ctx.ssm_scan(*(ctx.tensor("f32", ne) for ne in extents), ids), ids, 9, 6
    cache, b, ids = ctx.tensor("f16", (32, 9)), ctx.tensor("f32", (32, 3)), ctx.tensor("i64", (3,))
    return ctx.set_rows(cache, b, ids), ids, 9, 1


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("op", ["get_rows", "set_rows", "set_rows of many", "add_id", "ssm_scan"])
def test_an_id_that_names_nothing_sets_the_error_word_and_writes_nothing(ctx, op, bad, monkeypatch):
    if op == "set_rows of many":
        monkeypatch.setattr(row_ops, "MANY", 2)
    node, ids, n_rows, source = with_bad_id(op.partition(" ")[0], ctx)
    for order in cupy_kernels.ORDERS:
        with gs.CpuBackend(1, kernels="numpy") as backend, op_results.place(ctx, backend, 256, 0x11) as buffer:
            for t in node.src:
                if str(t.type) == "f32" and t is not node.src[-1]:
                    t.set(op_results.random(RNG, *t.ne))
            ids.set(np.array([3, 4, 5]).reshape(ids.ne[2::-1] if op == "add_id" else -1).squeeze())
            before = buffer.memory.copy()
            backend.graph_compute(gs.GraphView([node]))
            good = buffer.memory.copy()
            buffer.memory[:] = before
            wrong = np.array([3, bad, 5])
            backend.set_tensor(ids, wrong.astype(np.int64 if str(ids.type) == "i64" else np.int32).tobytes())
            before = buffer.memory.copy()
            builder = cupy_kernels.build([node])
            fault = cupy_kernels.run(builder, order)
            assert tuple(fault) == (1, source, bad, n_rows)
            changed = buffer.memory != before
            ids_at = slice(ids.offset, ids.offset + ids.nbytes)
            differs = (buffer.memory != good) & (before == buffer.memory)
            differs[ids_at] = False
            assert changed.any() and differs.any()
            kept = unwritten(op, node, before) == unwritten(op, node, buffer.memory)
            assert kept.all()


def unwritten(op: str, node: gs.Tensor, memory: np.ndarray) -> np.ndarray:
    """The bytes that belong to the bad id."""
    whole = memory[node.offset : node.offset + node.nbytes]
    if op == "ssm_scan":
        outputs, states = whole[: 4 * 90].reshape(3, -1), whole[4 * 90 :].reshape(3, -1)
        return np.concatenate([outputs[1], states[1]])
    if op in ("get_rows", "add_id"):
        return whole.reshape(3, -1)[1]
    rows = whole.reshape(9, -1)
    return rows[[i for i in range(9) if i not in (3, 5)]].ravel()


def test_the_first_fault_stays(ctx):
    table, ids = ctx.tensor("f32", (8, 4)), [ctx.tensor("i32", (1,)) for _ in range(3)]
    nodes = [ctx.get_rows(table, t) for t in ids]
    with gs.CpuBackend(1) as backend, op_results.place(ctx, backend):
        for t, value in zip(ids, (2, 77, 55), strict=True):
            t.set(np.int32([value]))
        fault = cupy_kernels.run(cupy_kernels.build(nodes))
        assert (fault["position"], fault["value"], fault["limit"]) == (2, 77, 4)
