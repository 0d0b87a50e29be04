"""CUDA kernels against the oracle: NaN and infinity, results over their sources, any node of a file."""

from itertools import product

import cupy_kernels
import numpy as np
import op_results
import pytest
from load_tests import load_tests

import ggml_sched as gs
from ggml_sched.backends.cpu.oracle.registry import KERNELS
from ggml_sched.backends.cupy import launch, ops

RNG = np.random.default_rng(21)

SPECIAL = np.float32([0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40, 3e38, -3e38, 65504, 65519, 65521, -7e4, 0.5,
                      -0.5, 1.5, 2.5, -2.5, 9.99, 10, -10, -9.99, 20, 20.1, 88, 89, -88, -104, 1, -1, 3, -3])

ELEMENTWISE = sorted(op for op in ops.OPS if op.startswith(("UNARY:", "GLU:"))
                     or op in ("ADD", "SUB", "MUL", "DIV", "SCALE", "SQR", "SQRT", "LOG", "CLAMP"))


inplace = load_tests("backends/test_ops_inplace")


def assert_alike(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    """Near, with NaN where NaN is and infinity where that is."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= tolerance * (1 + np.abs(want)))
    assert same.all(), f"{got[~same][:5]} is not {want[~same][:5]}"


def of_op(ctx: gs.Context, op: str, type: str, ne: tuple[int, ...], arguments: tuple | None = None) -> gs.Tensor:
    """A node with all sources of one type; parameters that matter."""
    a, b = ctx.tensor(type, ne, "a"), ctx.tensor(type, ne, "b")
    words = np.float32([0.8, 1.2, 0.5, -1e-6]).view(np.int32).tolist()
    kind, _, name = op.partition(":")
    if kind == "UNARY":
        made = ctx.unary(a, name) if name != "XIELU" else None
        return made or ctx.restore(op, type, a.ne, a.nb, (a,), op_params=(15, *words))
    if kind == "GLU":
        return ctx.restore(op, type, a.ne, a.nb, (a, b), op_params=(3, 0, *words))
    if arguments is None:
        arguments = {"SCALE": (1.5, -0.25), "CLAMP": (-0.5, 2.0)}.get(op, ())
    if op in ("ADD", "SUB", "MUL", "DIV"):
        arguments = (b,)
    return getattr(ctx, op.lower())(a, *arguments)


@pytest.mark.spread("op", "type")
@pytest.mark.parametrize("type", op_results.FLOATS)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_what_is_no_number_or_has_no_end(ctx, op, type):
    node = of_op(ctx, op, type, (len(SPECIAL), len(SPECIAL)))
    gates, factors = np.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    if op == "GLU:GEGLU_ERF":
        gates = np.where((gates < -6) & np.isfinite(gates), 0, gates)      # f64's erf is -1 there; this one goes on
    values = dict(zip(node.src, (gates, factors), strict=False))
    got, want = cupy_kernels.compute(ctx, node, values), cupy_kernels.oracle(ctx, node, values)
    rounded = 2e-3 if "GELU" in op or "GEGLU" in op else 0                  # to halves
    assert_alike(got, want, max(rounded, {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}[type]))


SIGNS = np.float32([0, -0.0, np.nan, np.inf, -np.inf, 1, -1, 1e-40, -1e-40, 3e38, -3e38, 0.5, -0.5, 2.5, -2.5, 3, -3,
                    9.5, -9.5])
PARAMETERS = {"SCALE": [(1.5, 0.0), (-1.0, 0.0), (1.5, -0.25), (1.0, -0.0)],
              "CLAMP": [(0.0, 1.0), (-1.0, 0.0), (-1.0, -0.0), (-0.5, 2.0), (-np.inf, np.inf)]}


def compiled(ctx: gs.Context, node: gs.Tensor, values: dict) -> np.ndarray:
    """The result of the CPU's compiled kernels."""
    with cupy_kernels.filled(ctx, values, kernels="compiled") as buffer:
        buffer.backend.graph_compute(gs.Graph(node))
        return node.numpy()


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_zeros_have_the_signs_of_the_cpu(op):
    """Near is not enough there: 1 / -0.0 is -inf, and another backend may read the result."""
    ctx, gates_and_factors = gs.Context(), np.meshgrid(SIGNS, SIGNS, indexing="ij")
    for arguments in PARAMETERS.get(op, [None]):
        node = of_op(ctx, op, "f32", (len(SIGNS), len(SIGNS)), arguments)
        values = dict(zip(node.src, gates_and_factors, strict=False))
        want, got = compiled(ctx, node, values), cupy_kernels.compute(ctx, node, values, exact=True)
        for what in (np.isnan, np.isinf, lambda x: (x == 0) & np.signbit(x), lambda x: (x == 0) & ~np.signbit(x)):
            there = what(want) != what(got)
            given = [array[there][:4] for array in values.values()]
            assert not there.any(), f"{node.op} of {given}: {got[there][:4]}, the CPU has {want[there][:4]}"
        finite = np.isfinite(want)
        assert np.allclose(got[finite], want[finite], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["SWIGLU", "GEGLU", "REGLU"])
def test_gated_units_of_products(name):
    """As one kernel: f32 weights of one element are the special values themselves."""
    ctx, n = gs.Context(), len(SIGNS)
    gate, up, x = ctx.tensor("f32", (1, n)), ctx.tensor("f32", (1, n)), ctx.tensor("f32", (1, 1))
    node = ctx.glu_split(ctx.mul_mat(gate, x), ctx.mul_mat(up, x), name)
    gates, factors = np.meshgrid(SIGNS, SIGNS)
    for gate_values, up_values in zip(gates, factors, strict=True):
        values = {gate: gate_values, up: up_values, x: np.ones(1)}
        want, got = compiled(ctx, node, values), cupy_kernels.compute(ctx, node, values, exact=True)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        zero = (want == 0) | (got == 0)
        assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


ROWS = {
    "rms_norm": lambda ctx, a: ctx.rms_norm(a, 1e-5),
    "norm": lambda ctx, a: ctx.norm(a, 1e-5),
    "l2_norm": lambda ctx, a: ctx.l2_norm(a, 1e-5),
    "soft_max": lambda ctx, a: ctx.soft_max(a, None, 0.5),
    "sum_rows": lambda ctx, a: ctx.sum_rows(a),
    "mean": lambda ctx, a: ctx.mean(a),
    "argmax": lambda ctx, a: ctx.argmax(a),
    "argsort": lambda ctx, a: ctx.argsort(a, "desc"),
    "sum": lambda ctx, a: ctx.sum(a),
    "diag_mask": lambda ctx, a: ctx.diag_mask_inf(a, 3),
}


@pytest.mark.parametrize("op", ROWS)
def test_rows_with_nan_or_infinity_among_them(ctx, op):
    x = RNG.uniform(-2, 2, (7, 40)).astype(np.float32)
    x[1, 17], x[2, 3], x[3, 39], x[4, 5], x[5, :] = np.nan, np.inf, -np.inf, 3e38, -np.inf
    x[4, 6] = x[4, 30] = x[4, 5]
    a = ctx.tensor("f32", (40, 7))
    node = ROWS[op](ctx, a)
    assert_alike(cupy_kernels.compute(ctx, node, {a: x}), cupy_kernels.oracle(ctx, node, {a: x}))


@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (33, 33), (4, 1000)], ids=str)
@pytest.mark.parametrize("mask", ["f32", "f16"])
def test_soft_max_of_masked_rows_and_heads_that_share_masks(ctx, mask, shape):
    n_rows, n_kv = shape
    a, m = ctx.tensor("f32", (n_kv, n_rows, 6, 2)), ctx.tensor(mask, (n_kv, n_rows + 1, 2, 1))
    sinks = ctx.tensor("f32", (6,))
    x, masks = op_results.random(RNG, n_kv, n_rows, 6, 2), op_results.random(RNG, n_kv, n_rows + 1, 2, 1)
    masks[RNG.random(masks.shape) < 0.4] = -np.inf
    values = {a: x, m: masks, sinks: op_results.random(RNG, 6)}
    for node in (ctx.soft_max(a, m, 0.3), ctx.soft_max(a, m, 0.3, 8.0), ctx.soft_max(a, m, 1.0, 4.0, sinks)):
        assert_alike(cupy_kernels.compute(ctx, node, values), cupy_kernels.oracle(ctx, node, values))


def test_floats_that_no_integer_holds(ctx):
    a = ctx.tensor("f32", (8,))
    x = np.float32([2147483520, 2147483648, -2147483648, -2147483904, np.nan, np.inf, -np.inf, -0.99])
    got = cupy_kernels.compute(ctx, ctx.cast(a, "i32"), {a: x})
    assert got.tolist() == [2147483520, -(2**31), -(2**31), -(2**31), -(2**31), -(2**31), -(2**31), 0]


@pytest.mark.spread("op", "type")
@pytest.mark.parametrize("type", op_results.FLOATS)
@pytest.mark.parametrize("op", sorted(op for op in inplace.TOLERANT if op in ops.OPS))
def test_a_tolerated_source_may_be_the_destination(ctx, op, type):
    assert ops.OPS[op].inplace == KERNELS[op].inplace
    node = inplace.build(ctx, op, type)
    if node is None:
        return                              # the op does not take the type
    for order in cupy_kernels.ORDERS:
        with gs.CpuBackend(1) as backend, op_results.place(ctx, backend) as buffer:
            inplace.fill(ctx)
            before = {t: op_results.raw(t) for t in node.src if t is not None}
            cupy_kernels.run(cupy_kernels.build([node]), order)
            want, home, tried = op_results.raw(node), node.offset, 0
            for i, source in enumerate(node.src):
                if (ops.OPS[op].inplace >> i & 1 and source is not None
                        and (source.type, source.ne, source.nb) == (node.type, node.ne, node.nb)):
                    gs.bind_resident(node, buffer, source.offset)
                    builder = cupy_kernels.build([node])
                    assert builder.work_size == ops.OPS[op].work(node), "a source was copied"
                    cupy_kernels.run(builder, order)
                    assert op_results.raw(node) == want, f"{op} over source {i}"
                    backend.set_tensor(source, before[source])
                    gs.bind_resident(node, buffer, home)
                    tried += 1
            assert tried


@pytest.mark.parametrize("op", sorted(set(ops.OPS) & set(inplace.TOLERANT)))
def test_a_source_half_over_the_result_is_read_before(ctx, op):
    node = inplace.build(ctx, op, "f32")
    with gs.CpuBackend(1) as backend, op_results.place(ctx, backend, 64) as buffer:
        inplace.fill(ctx)
        cupy_kernels.run(cupy_kernels.build([node]))
        want = op_results.raw(node)
        gs.bind_resident(node, buffer, node.src[0].offset + 64)
        cupy_kernels.run(cupy_kernels.build([node]))
        assert op_results.raw(node) == want


def over_sources(ctx: gs.Context) -> list[gs.Tensor]:
    """Nodes of ops that tolerate no result over a source, or not over every one."""
    a, b, table = ctx.tensor("f32", (32, 6, 4)), ctx.tensor("f32", (32, 6, 4)), ctx.tensor("f32", (32, 40))
    ids, small = ctx.tensor("i32", (24,)), ctx.tensor("f32", (8, 3, 1))
    taps = ctx.tensor("f32", (4, 6))
    return [ctx.concat(a, b, 0), ctx.concat(a, b, 2), ctx.pad(a, 3, 2, 1), ctx.get_rows(table, ids), ctx.argsort(a),
            ctx.top_k(a, 30), ctx.repeat(small, a), ctx.sum_rows(a), ctx.mean(a), ctx.sum(a), ctx.cast(a, "f16"),
            ctx.cast(a, "q8_0"), ctx.set(a, small, a.nb[1], a.nb[2], a.nb[3], 0), ctx.cont(ctx.permute(a, 1, 0, 2, 3)),
            ctx.soft_max(a, b), ctx.soft_max(a, None, 1.0, 0.0, ctx.tensor("f32", (4,))), ctx.add(a, table_row(ctx, b)),
            ctx.ssm_conv(a, taps), ctx.rope(a, ctx.tensor("i32", (4,)), 16, "neox", ctx.tensor("f32", (8,)))]


def table_row(ctx: gs.Context, t: gs.Tensor) -> gs.Tensor:
    return ctx.view_1d(t, t.ne[0], t.nb[1])


@pytest.mark.parametrize("number", range(19))
def test_no_result_over_any_source_changes_what_it_is(ctx, number):
    """Planners never place a result over such a source; a caller may, and the result is right."""
    nodes = over_sources(ctx)
    assert len(nodes) == 19
    node = nodes[number]
    for i, shift in product(range(len(node.src)), (-64, 0, 64)):
        source = node.src[i]
        if source is not None:
            with gs.CpuBackend(1) as backend, op_results.place(ctx, backend, 8192) as buffer:
                inplace.fill(ctx)
                cupy_kernels.run(cupy_kernels.build([node]))
                want = op_results.raw(node)
                gs.bind_resident(node, buffer, source.root.offset + shift)
                cupy_kernels.run(cupy_kernels.build([node]), 4711)
                assert op_results.raw(node) == want, f"over source {i}"


@pytest.mark.parametrize("blocks", [1, 3])
def test_grids_smaller_than_what_they_compute(ctx, blocks, monkeypatch):
    """What one grid cannot hold is folded: with room for few blocks everything is."""
    monkeypatch.setattr(launch, "MAX_BLOCKS", blocks)
    a, w, table = ctx.tensor("f32", (96, 9, 5)), ctx.tensor("f32", (96,)), ctx.tensor("q4_0", (96, 9))
    ids, wide = ctx.tensor("i32", (40,)), ctx.tensor("i64", (9,))
    cache = ctx.tensor("q8_0", (96, 20))
    x = op_results.random(RNG, 96, 9, 5)
    values = {a: x, w: op_results.random(RNG, 96), table: op_results.random(RNG, 96, 9),
              cache: op_results.random(RNG, 96, 20), ids: RNG.integers(0, 9, 40).astype(np.int32),
              wide: RNG.permutation(20)[:9]}
    nodes = [ctx.add(a, w), ctx.soft_max(a), ctx.rms_norm(a, 1e-5), ctx.group_norm(a, 3, 1e-5), ctx.argsort(a),
             ctx.sum_rows(a), ctx.sum(a), ctx.cont(ctx.transpose(a)), ctx.get_rows(table, ids), ctx.cast(a, "q4_0"),
             ctx.set_rows(cache, ctx.view_2d(a, 96, 9, a.nb[1]), wide), ctx.pad(a, 3, 1), ctx.concat(a, a, 1)]
    for node in nodes:
        assert_alike(cupy_kernels.compute(ctx, node, values), cupy_kernels.oracle(ctx, node, values))


@pytest.mark.parametrize(("words", "fits"), [
    ((24, 96, 96, 0), True), ((24, 96, 96, 2), False), ((26, 96, 96, 0), False),
    ((8, 96, 96, 0), False), ((12, 96, 96, 4), True),
])
def test_a_window_has_whole_elements_that_share_no_bytes(ctx, words, fits):
    a, b = ctx.tensor("f32", (6, 4)), ctx.tensor("f32", (3, 2))
    node = ctx.restore("SET", "f32", a.ne, a.nb, (a, b), op_params=words)
    assert KERNELS["SET"].fits(node) and ops.supports(node) is fits


@pytest.mark.parametrize("n", [1000, pytest.param(2500, marks=pytest.mark.soak)])
def test_any_node_of_a_file_is_refused_or_writes_inside_itself(n):
    """Random ops, types, extents and strides: what the oracle computes, or a typed error; no byte outside changes."""
    rng = np.random.default_rng(22)
    names, ran = sorted(ops.OPS), 0
    for _ in range(n):
        ctx = gs.Context()
        try:
            node, src = inplace.random_node(rng, ctx, names)
        except gs.GraphError:
            continue
        with gs.CpuBackend(1, kernels="numpy") as backend, op_results.place(ctx, backend, 64, 1) as buffer:
            for t in src:
                if str(t.type) in ("i32", "i64"):
                    backend.set_tensor(t, bytes(t.nbytes))      # ids of rows that exist
                else:
                    t.set(rng.uniform(0.5, 2, t.ne[::-1]).astype(np.float32))
            before = buffer.memory.copy()
            if not ops.supports(node):
                with pytest.raises(gs.UnsupportedOp, match="no kernel"):
                    cupy_kernels.build([node])
                continue
            fault = cupy_kernels.run(cupy_kernels.build([node]))
            got = node.numpy()
            outside = np.ones(buffer.size, bool)
            outside[node.offset : node.offset + node.nbytes] = False
            assert np.array_equal(before[outside], buffer.memory[outside]), node
            buffer.memory[:] = before
            try:
                backend.graph_compute(gs.GraphView([node]))
            except gs.BackendError:
                assert fault["position"] == 1
                continue
            assert fault["position"] == 0
            want = node.numpy()
            assert_alike(got, want, 1e-2 if node.type == gs.Type.BF16 else 2e-3)
            ran += 1
    assert ran > n // 25
