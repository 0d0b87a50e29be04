"""Properties that kernels declare: supported ops and types, and sources that may be overwritten."""

import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, place, random, raw, width

import ggml_sched as gs
from ggml_sched._core import inplace_ops, op_names
from ggml_sched.backends.cpu.oracle.registry import KERNELS

RNG = np.random.default_rng(6)
NE = (32, 6, 4, 2)


def build(ctx: gs.Context, op: str, type: str) -> gs.Tensor | None:
    """A node of `op` laid out as the sources that it tolerates, or None where the type does not fit."""
    only_f32 = {"NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM", "SOFT_MAX", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "ADD_ID"}
    if type != "f32" and op in only_f32 or type == "bf16" and op == "ROPE":
        return None
    a = ctx.tensor(type, NE, "a")
    kind, _, which = op.partition(":")
    if kind == "UNARY":
        return ctx.unary(a, which)
    if kind == "GLU":
        return ctx.glu_split(a, ctx.tensor(type, NE, "b"), which)
    if op in ("ADD", "SUB", "MUL", "DIV"):
        return getattr(ctx, op.lower())(a, ctx.tensor(type, NE, "b"))
    if op in ("SQR", "SQRT", "LOG", "DUP", "CONT", "DIAG_MASK_INF", "DIAG_MASK_ZERO"):
        return getattr(ctx, op.lower())(a, *((1,) if "MASK" in op else ()))
    if op in ("NORM", "RMS_NORM", "L2_NORM"):
        return getattr(ctx, op.lower())(a, 1e-5)
    makers = {
        "ADD1": lambda: ctx.add1(a, ctx.tensor(type, (1,), "b")),
        "ADD_ID": lambda: ctx.add_id(
            ctx.tensor("f32", (32, 6, 4)), ctx.tensor("f32", (32, 3)), ctx.tensor("i32", (6, 4))
        ),
        "SCALE": lambda: ctx.scale(a, 0.3, 0.1),
        "CLAMP": lambda: ctx.clamp(a, -0.5, 0.5),
        "GROUP_NORM": lambda: ctx.group_norm(a, 2, 1e-5),
        "SOFT_MAX": lambda: ctx.soft_max(a, ctx.tensor("f32", NE, "mask"), 0.5, 4.0, ctx.tensor("f32", (4,))),
        "ROPE": lambda: ctx.rope(a, ctx.tensor("i32", (4,)), 16, "normal", ctx.tensor("f32", (8,))),
        "CPY": lambda: ctx.cast(a, type),
        "REPEAT": lambda: ctx.repeat(a, a),
        "SET": lambda: ctx.set(a, ctx.tensor(type, (3, 2), "b"), a.nb[1], a.nb[2], a.nb[3], 128),
    }
    return makers[op]()


def fill(ctx: gs.Context) -> None:
    for t in ctx.tensors:
        if t.op == "NONE":
            t.set(RNG.integers(0, 3, t.ne[::-1]).astype(np.int32) if str(t.type) == "i32" else random(RNG, *t.ne))


TOLERANT = sorted(op for op, kernel in KERNELS.items() if kernel.inplace)


@pytest.mark.spread("op", "type")
@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", TOLERANT)
def test_a_tolerated_source_may_be_the_destination(ctx, op, type):
    node = build(ctx, op, type)
    if node is None:
        pytest.skip(f"{op} has no kernel for {type}")
    for n_threads in (1, 2):
        with gs.CpuBackend(n_threads) as backend:
            buffer = place(ctx, backend)
            fill(ctx)
            before = {t: raw(t) for t in node.src if t is not None}
            backend.graph_compute(gs.Graph(node))
            want, home, tried = raw(node), node.offset, 0
            for i, source in enumerate(node.src):
                same = source is not None and (source.type, source.ne, source.nb) == (node.type, node.ne, node.nb)
                if backend.inplace_sources(op) >> i & 1 and same:
                    gs.bind_resident(node, buffer, source.offset)
                    backend.graph_compute(gs.Graph(node))
                    assert raw(node) == want, f"{op} over source {i}"
                    backend.set_tensor(source, before[source])
                    gs.bind_resident(node, buffer, home)
                    tried += 1
            assert tried
            buffer.close()


def test_a_source_that_is_not_tolerated_is_copied_first(ctx):
    """Planners never place a result over such a source; a caller may, and the result is right."""
    a, b = ctx.tensor("f32", (16, 16)), ctx.tensor("f32", (16, 16))
    node = ctx.mul_mat(a, b)
    with gs.CpuBackend(1) as backend:
        buffer = place(ctx, backend)
        fill(ctx)
        backend.graph_compute(gs.Graph(node))
        want = raw(node)
        gs.bind_resident(node, buffer, b.offset + 64)
        backend.graph_compute(gs.Graph(node))
        assert raw(node) == want


def test_every_in_place_op_of_ggml_that_runs_tolerates_its_first_source():
    backend = gs.CpuBackend(1)
    for op in op_names():
        if op in KERNELS and op in inplace_ops():
            assert backend.inplace_sources(op) & 1, op
    for op in ("MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT", "GET_ROWS", "CONCAT", "NO_SUCH_OP", "CONV_2D"):
        assert backend.inplace_sources(op) == 0


def test_every_op_that_a_context_makes_has_a_kernel():
    missing = {op for op in op_names() if op not in KERNELS}
    assert not any(op.startswith(("UNARY", "GLU")) for op in missing)
    assert not missing & {
        "DUP", "CPY", "CONT", "ADD", "ADD1", "ADD_ID", "SUB", "MUL", "DIV", "SCALE", "SQR", "SQRT", "LOG", "SUM",
        "SUM_ROWS", "MEAN", "REPEAT", "CONCAT", "NORM", "RMS_NORM", "GROUP_NORM", "L2_NORM", "MUL_MAT", "MUL_MAT_ID",
        "GET_ROWS", "SET_ROWS", "SET", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "SOFT_MAX", "ROPE", "CLAMP", "ARGMAX",
        "ARGSORT", "TOP_K", "ARANGE", "PAD", "FLASH_ATTN_EXT",
    }


def test_supports_op_says_no_where_there_is_no_kernel_and_computing_says_so_too(ctx):
    f32, f16, q8, i32, k = (ctx.tensor(t, (256, 4)) for t in ("f32", "f16", "q8_0", "i32", "iq3_s"))
    nodes = {
        ctx.add(i32, i32): False,
        ctx.add(q8, f32): False,
        ctx.rms_norm(f16, 1e-5): False,
        ctx.silu(i32): False,
        ctx.mul_mat(k, f32): False,
        ctx.mul_mat(i32, f32): False,
        ctx.mul_mat(f32, q8): False,
        ctx.dup(k): False,
        ctx.soft_max(f16): False,
        ctx.cast(i32, "f16"): False,
        ctx.argsort(f16): False,
        ctx.add(f32, f16): True,
        ctx.mul_mat(q8, f16): True,
        ctx.dup(i32): True,
        ctx.cast(q8, "q4_0"): True,
        ctx.reshape(k, 512, 2): True,
    }
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        for node, supported in nodes.items():
            assert backend.supports_op(node) is supported, node
            if supported:
                backend.graph_compute(gs.Graph(node))
            else:
                with pytest.raises(gs.UnsupportedOp, match="'CPU'.*no kernel"):
                    backend.graph_compute(gs.Graph(node))
                with pytest.raises(gs.UnsupportedOp):
                    backend.graph_plan_create(gs.Graph(node))


@pytest.mark.parametrize(
    "op",
    [
        "ADD", "MUL_MAT", "GET_ROWS", "SOFT_MAX", "ROPE", "FLASH_ATTN_EXT", "CPY", "CONCAT", "SET_ROWS", "MUL_MAT_ID",
        "ARANGE", "SUM", "SET", "PAD", "REPEAT", "GLU:SWIGLU",
    ],
)
def test_nodes_of_a_file_with_shapes_that_do_not_fit_are_not_supported(ctx, op):
    """Graph files give every field; nothing there was checked by an op's method."""
    a, b = ctx.tensor("f32", (5, 7)), ctx.tensor("i32", (3, 2))
    backend = gs.CpuBackend(1)
    for src in ((), (a,), (a, b), (b, a), (None, a), (a, None), (a, b, a, b, a, b)):
        try:
            node = ctx.restore(op, "f32", (11, 2, 3, 1), (4, 44, 88, 264), src, op_params=(1, 2, 3, 4, 5))
        except gs.GraphError as error:
            # What is missing is missing for every backend.
            assert "has no source" in str(error) or op == "SET_ROWS" and "view_src" in str(error)
            continue
        assert not backend.supports_op(node), src


def test_types_of_weights(ctx):
    backend = gs.CpuBackend(1)
    for type in FLOATS + QUANTISED:
        n = width(32, type)
        w, x = ctx.tensor(type, (n, 3)), ctx.tensor("f32", (n, 2))
        assert backend.supports_op(ctx.mul_mat(w, x))
        assert backend.supports_op(ctx.get_rows(w, ctx.tensor("i32", (2,))))


def random_node(rng: np.random.Generator, ctx: gs.Context, names: list[str]) -> tuple[gs.Tensor, list[gs.Tensor]]:
    """A node of a random op, of random types, extents, strides and parameters, and its sources; GraphError."""
    ne = tuple(int(n) for n in rng.choice([1, 2, 4, 0, 3], 4, p=[0.35, 0.3, 0.2, 0.05, 0.1]))

    def tensor(op: str = "NONE", src=(), root: gs.Tensor | None = None, params=()) -> gs.Tensor:
        kind = str(rng.choice(["f32"] * 7 + ["f16", "i32", "bf16", "i64"]))
        extents = tuple(int(n) if rng.random() < 0.95 else int(rng.integers(0, 5)) for n in ne)
        strides, total = [], gs.Type[kind.upper()].type_size
        for n in extents:
            strides.append(total)
            total *= max(n, 1) * int(rng.choice([1, 1, 1, 2]))
        if rng.random() >= 0.8:
            strides = [int(v) for v in rng.permutation(strides)]
        return ctx.restore(op, kind, extents, strides, src, root, op_params=params)

    op = str(rng.choice(names))
    src = [tensor() for _ in range(rng.integers(1, 4))]
    # Results with gaps, or in another order, are views: here of the first source.
    root = src[0] if rng.random() < 0.3 else None
    return tensor(op, src, root, [int(v) for v in rng.integers(0, 5, 11)]), src


@pytest.mark.parametrize("n", [1200, pytest.param(3000, marks=pytest.mark.soak)])
def test_any_node_of_a_file_is_refused_or_writes_inside_itself(n):
    """Random ops, types, shapes and strides: typed errors only, and no byte changes outside the result."""
    rng = np.random.default_rng(10)
    ran = 0
    for _ in range(n):
        ctx = gs.Context()
        try:
            node, src = random_node(rng, ctx, sorted(KERNELS))
        except gs.GraphError as error:
            assert any(said in str(error) for said in ("has no source", "share bytes", "gaps", "view_src",
                                                      "do not lie inside"))
            continue
        with gs.CpuBackend(1) as backend:
            buffer = place(ctx, backend, 64, 1)
            for tensor in src:
                if str(tensor.type) in ("i32", "i64"):
                    backend.set_tensor(tensor, bytes(tensor.nbytes))  # ids of rows that exist
            before = buffer.memory.copy()
            try:
                backend.graph_compute(gs.GraphView([node]))
            except gs.UnsupportedOp:
                assert not backend.supports_op(node)
            except gs.BackendError as error:
                assert "row" in str(error)
            else:
                ran += 1
            before[node.offset : node.offset + node.nbytes] = 0
            after = buffer.memory.copy()
            after[node.offset : node.offset + node.nbytes] = 0
            assert np.array_equal(before, after), node
    assert ran > n // 30
