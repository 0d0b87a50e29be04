"""Compiled kernels of each instruction set beside the oracle: special values, masked cells, overlap, invalid nodes.

The op tests (test_ops_*.py) compare the two for ordinary values.
"""

from functools import partial

import numpy as np
import pytest
from op_results import place, random, raw

import ggml_sched as gs
from ggml_sched._graph import BufferBase, bind_resident
from ggml_sched.backends.cpu.buffer import CpuBuffer
from ggml_sched.backends.cpu.oracle.registry import KERNELS

UNARY = sorted(op.partition(":")[2] for op in KERNELS if op.startswith("UNARY:"))


def run(ctx: gs.Context, node: gs.Tensor, values: dict, kernels: str, n_threads: int = 1) -> tuple[np.ndarray, bytes]:
    with gs.CpuBackend(n_threads, kernels=kernels) as backend:
        buffer = place(ctx, backend, 64, 0x55)
        for tensor, array in values.items():
            tensor.set(array)
        plan = backend.graph_plan_create(gs.Graph(node))
        if kernels == "compiled":
            assert plan.n_compiled == sum(n.computes for n in gs.Graph(node).nodes), "the oracle ran a node"
        backend.graph_plan_compute(plan)
        result = np.array(node.numpy()), raw(node)
        backend.graph_plan_free(plan)
        buffer.close()
    return result


def check(ctx: gs.Context, node: gs.Tensor, values: dict, rtol: float = 2e-6, atol: float = 1e-6) -> None:
    """Compiled and oracle agree, and 1, 2, and 4 threads give the same bits."""
    want, _ = run(ctx, node, values, "numpy")
    bits = set()
    for n_threads in (1, 2, 4):
        got, found = run(ctx, node, values, "compiled", n_threads)
        bits.add(found)
    np.testing.assert_allclose(got, want, rtol, atol)
    assert len(bits) == 1, "other bits with other numbers of threads"


HALVES = ("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK")
"""Ops whose results are rounded to f16: a difference in an f32's last bit may give the neighbouring f16."""

SPECIAL = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 88.7, 88.8, -87.3, -103.9, -104.1, 1e30,
                      -1e30, 0.625, 0.6249, 20.0, 20.01, 10, -10, 5.5, -5.5, 4, -4, 2.5, -2.5, 3e38, -3e38, 0.5, 9])


@pytest.mark.parametrize("kind", UNARY)
def test_functions_of_one_element_to_the_last_bits(ctx, kind, isa):
    x = np.concatenate([SPECIAL, np.linspace(-12, 12, 3000), np.linspace(-1e-3, 1e-3, 200)]).astype(np.float32)
    a = ctx.tensor("f32", (x.size,))
    if kind == "XIELU":
        words = np.float32([0.8, 0.9, 0.5, -1e-6]).view(np.int32).tolist()
        node = ctx.restore("UNARY:XIELU", "f32", a.ne, a.nb, (a,), op_params=(15, *words))
    else:
        node = ctx.unary(a, kind)
    # Near 0 the tails of gates are products of small numbers: what counts there is the absolute error.
    check(ctx, node, {a: x}, rtol=1.1e-3 if kind in HALVES else 1e-6, atol=1e-6 if kind in HALVES else 3e-7)


def test_zeros_have_the_signs_that_ggml_gives_them(isa):
    """CLAMP gives the limit also for values equal to it; odd functions keep the sign of zero."""
    zeros, n = np.float32([0, -0.0] * 20), 40
    for kind, signs in (("RELU", [False, False]), ("TANH", [False, True]), ("GELU", [False, True]),
                        ("GELU_QUICK", [False, True]), ("SILU", [False, True]), ("NEG", [True, False])):
        ctx = gs.Context()
        a = ctx.tensor("f32", n)
        got, _ = run(ctx, ctx.unary(a, kind), {a: zeros}, "compiled")
        assert not got.any() and np.signbit(got).tolist() == signs * 20, kind
    for least, most, sign in ((0.0, 1.0, False), (-0.0, 1.0, True), (-1.0, 0.0, False), (-1.0, -0.0, True)):
        ctx = gs.Context()
        a = ctx.tensor("f32", n)
        got, _ = run(ctx, ctx.clamp(a, least, most), {a: zeros}, "compiled")
        assert not got.any() and np.signbit(got).tolist() == [sign] * n, (least, most)


@pytest.mark.parametrize("kind", ["EXP", "TANH", "SIGMOID", "SILU"])
def test_exponentials_are_within_two_units_in_the_last_place(ctx, kind, isa):
    x = np.linspace(-87, 88, 40001).astype(np.float32)
    a = ctx.tensor("f32", (x.size,))
    got, _ = run(ctx, ctx.unary(a, kind), {a: x}, "compiled")
    y = x.astype(np.float64)
    want = {"EXP": np.exp, "TANH": np.tanh, "SIGMOID": lambda v: 1 / (1 + np.exp(-v)),
            "SILU": lambda v: v / (1 + np.exp(-v))}[kind](y)
    units = np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))
    assert units.max() <= (2.5 if kind in ("EXP", "TANH") else 4)


def test_a_row_of_one_element_has_any_stride(ctx, isa):
    a = ctx.tensor("f32", (8,))
    turned = ctx.permute(a, 1, 0, 2, 3)
    check(ctx, ctx.add(turned, turned), {a: np.arange(8)})


class HiddenBuffer(CpuBuffer):
    """Memory without a known address: compiled kernels leave its nodes to the oracle."""

    def __init__(self, backend, memory):
        super().__init__(backend, memory)
        BufferBase.__init__(self, backend, memory.nbytes, 0)


@pytest.mark.parametrize("is_hidden", [False, True], ids=["a compiled kernel", "the oracle"])
def test_angles_are_made_anew_for_positions_that_were_written_over_and_for_other_parameters(is_hidden, isa):
    """Sines are made once for positions that stay; here a copy changes them, by a kernel or by the oracle."""
    ctx, elsewhere = gs.Context(), gs.Context()
    a, at, other = ctx.tensor("f32", (16, 2, 3)), ctx.tensor("i32", (3,)), elsewhere.tensor("i32", (3,))
    first, based = ctx.rope(a, at, 16), ctx.rope(a, at, 16, freq_base=500.0)
    change = ctx.cpy(other, at)
    last = ctx.rope(a, at, 16)
    found = []
    for kernels in ("compiled", "numpy"):
        with gs.CpuBackend(1, kernels=kernels) as backend, place(ctx, backend):
            kind = HiddenBuffer if is_hidden else CpuBuffer
            bind_resident(other, kind(backend, np.zeros(64, np.uint8)), 0)
            a.set(random(np.random.default_rng(1), 16, 2, 3))
            at.set(np.int32([1, 2, 3]))
            other.set(np.int32([7, 0, 9]))
            backend.graph_compute([first, based, change, last])
            assert backend.host_work_held <= backend.host_work([first, based, change, last])
            found.append([t.numpy() for t in (first, based, last)])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    assert not np.allclose(found[0][0], found[0][1]) and not np.allclose(found[0][0], found[0][2])


@pytest.mark.parametrize("make", [
    lambda ctx, a, ids: ctx.get_rows(a, ids),
    lambda ctx, a, ids: ctx.set_rows(a, ctx.tensor("f32", (32, 3)), ids),
    lambda ctx, a, ids: ctx.add_id(ctx.tensor("f32", (32, 3, 1)), a, ctx.reshape(ids, 3, 1)),
    lambda ctx, a, ids: ctx.mul_mat_id(ctx.tensor("q4_0", (32, 7, 4)), ctx.tensor("f32", (32, 1, 1)),
                                       ctx.reshape(ids, 3, 1)),
], ids=["get_rows", "set_rows", "add_id", "mul_mat_id"])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -2**31])
def test_numbers_of_no_row_are_errors_that_name_the_node(make, bad, isa):
    ctx = gs.Context()
    a, ids = ctx.tensor("f32", (32, 4)), ctx.tensor("i32", (3,))
    node = make(ctx, a, ids)
    ctx.set_name(node, "picked")
    said = []
    for kernels in ("compiled", "numpy"):
        with gs.CpuBackend(2, kernels=kernels) as backend:
            buffer = place(ctx, backend)
            ids.set(np.int32([0, bad, 3]))
            before = raw(a), raw(node)
            plan = backend.graph_plan_create(gs.Graph(node))
            for compute in (partial(backend.graph_compute, gs.Graph(node)), partial(backend.graph_plan_compute, plan)):
                with pytest.raises(gs.BackendError, match=f"'CPU'.*'picked'.*id {bad} .* of 4 rows") as caught:
                    compute()
                said.append(str(caught.value))
            assert (raw(a), raw(node)) == before
            ids.set(np.int32([0, 1, 3]))
            backend.graph_plan_compute(plan)
            buffer.close()
    assert len(set(said)) == 1


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_attention_to_a_nan_gives_nan_in_its_row_alone(ctx, rows, isa):
    """For a row that attends to one NaN cell only, and for one that attends to others, too."""
    rng = np.random.default_rng(9)
    d, heads, keys = 32, 2, 90
    q, k, v = (ctx.tensor("f32", (d, n, heads)) for n in (rows, keys, keys))
    mask = ctx.tensor("f32", (keys, rows))
    x, m = random(rng, d, keys, heads), np.full((rows, keys), -np.inf, np.float32)
    x[:, 70] = np.nan
    m[0, 70] = m[-1, 69:72] = 0
    m[1:-1, :30] = 0
    values = {q: random(rng, d, rows, heads), k: x, v: random(rng, d, keys, heads), mask: m}
    node = ctx.flash_attn_ext(q, k, v, mask, 0.2)
    check(ctx, node, values, rtol=3e-5, atol=1e-5)
    found = np.isnan(run(ctx, node, values, "compiled")[0].reshape(rows, -1))
    assert found[[0, -1]].all() and not found[1:-1].any()


def test_what_overlaps_is_as_if_it_were_read_before_it_is_written(isa):
    """A result half over its source: no kernel tolerates that, so the source is copied first."""
    rng = np.random.default_rng(9)
    for make in (lambda c, a: c.rms_norm(a, 1e-5), lambda c, a: c.soft_max(a), lambda c, a: c.sqr(a),
                 lambda c, a: c.cont(a), lambda c, a: c.add(a, a)):
        ctx = gs.Context()
        a = ctx.tensor("f32", (64, 8))
        node, x = make(ctx, a), random(rng, 64, 8)
        with gs.CpuBackend(2) as backend:
            buffer = backend.alloc_buffer(3 * a.nbytes)
            gs.bind_resident(a, buffer, a.nbytes)
            seen = set()
            for offset in (2 * a.nbytes, a.nbytes, a.nbytes + 256, a.nbytes - 260):
                gs.bind_resident(node, buffer, offset)
                a.set(x)
                backend.graph_compute(gs.Graph(node))
                seen.add(raw(node))
            assert len(seen) == 1
            buffer.close()


def one_of_each(ctx: gs.Context):
    """A node of each op with a compiled kernel."""
    def f32(*ne: int) -> gs.Tensor:
        return ctx.tensor("f32", ne)

    def i32(*ne: int) -> gs.Tensor:
        return ctx.tensor("i32", ne)

    a, b = f32(8, 4), f32(8, 4)
    yield from (getattr(ctx, op)(a, b) for op in ("add", "sub", "mul", "div"))
    yield from (ctx.scale(a, 2.0), ctx.sqr(a), ctx.sqrt(a), ctx.clamp(a, 0, 1), ctx.add_id(f32(8, 2, 3), a, i32(2, 3)))
    yield from (ctx.unary(a, kind) for kind in UNARY if kind != "XIELU")
    yield from (ctx.glu(a, "swiglu"), ctx.glu_split(a, b, "geglu"), ctx.diag_mask_inf(a, 0), ctx.diag_mask_zero(a, 0))
    yield from (ctx.rms_norm(a, 1e-5), ctx.norm(a, 1e-5), ctx.l2_norm(a, 1e-5), ctx.sum_rows(a), ctx.mean(a))
    yield from (ctx.soft_max(a), ctx.argmax(a), ctx.argsort(a), ctx.top_k(a, 2), ctx.repeat(a, f32(16, 4)))
    yield from (ctx.get_rows(a, i32(4)), ctx.set_rows(f32(8, 4), f32(8, 2), ctx.tensor("i64", (2,))))
    yield from (ctx.cpy(a, b), ctx.dup(a), ctx.cont(a), ctx.concat(a, b, 0), ctx.rope(f32(8, 2, 3), i32(3), 8))
    yield from (ctx.mul_mat(a, f32(8, 2)), ctx.mul_mat_id(f32(8, 4, 2), f32(8, 1, 3), i32(2, 3)))
    yield ctx.flash_attn_ext(f32(8, 2, 4), f32(8, 6, 4), f32(8, 6, 4), ctx.tensor("f16", (6, 2)))


def test_unsupported_nodes_are_not_computed(ctx):
    """With a source too many."""
    nodes = list(one_of_each(ctx))
    more = ctx.tensor("f32", (8, 4))
    nodes += [ctx.restore(n.op, n.type, n.ne, n.nb, (*n.src, more), n.view_src, n.view_offs, n.op_params)
              for n in nodes]
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        refused = 0
        for node in nodes:
            if backend.supports_op(node):
                backend.graph_compute(gs.GraphView([node]))
                continue
            refused += 1
            with pytest.raises(gs.UnsupportedOp):
                backend.graph_compute(gs.GraphView([node]))
    assert refused >= len(nodes) // 2 - 6       # soft_max, copies and the like have a source that may be missing


def misfits(ctx: gs.Context):
    """Nodes of layouts that the compiled kernels do not take, as files may have them, by name."""
    def f32(*ne: int) -> gs.Tensor:
        return ctx.tensor("f32", ne)

    def restored(node: gs.Tensor, *src: gs.Tensor) -> gs.Tensor:
        """The node with other sources."""
        return ctx.restore(node.op, node.type, node.ne, node.nb, src, None, 0, node.op_params)

    product = ctx.mul_mat(f32(32, 5), f32(32, 3))
    yield "a transposed matrix", restored(product, ctx.transpose(f32(5, 32)), f32(32, 3))
    yield "rows of other lengths", restored(product, f32(32, 5), f32(64, 3))
    yield "another number of rows", restored(product, f32(32, 4), f32(32, 3))
    yield "batches that do not share", restored(ctx.mul_mat(f32(8, 4, 2), f32(8, 3, 4)), f32(8, 4, 3), f32(8, 3, 4))
    chosen = ctx.mul_mat_id(f32(8, 4, 2), f32(8, 1, 3), ctx.tensor("i32", (2, 3)))
    yield "experts of fewer tokens", restored(chosen, f32(8, 4, 2), f32(8, 1, 3), ctx.tensor("i32", (2, 2)))
    yield "experts that are no numbers", restored(chosen, f32(8, 4, 2), f32(8, 1, 3), f32(2, 3))
    q, k, v, mask = f32(8, 4, 2), f32(8, 6, 2), f32(8, 6, 2), f32(6, 4)
    attention = ctx.flash_attn_ext(q, k, v, mask, 0.3)
    yield "transposed keys", restored(attention, q, ctx.transpose(f32(6, 8, 2)), v, mask)
    yield "more keys than values", restored(attention, q, f32(8, 9, 2), v, f32(9, 4))
    yield "a mask of fewer rows", restored(attention, q, k, v, f32(6, 2))
    yield "a mask of fewer keys", restored(attention, q, k, v, f32(5, 4))
    yield "a transposed mask", restored(attention, q, k, v, ctx.transpose(f32(4, 6)))
    yield "heads that do not share", restored(attention, q, f32(8, 6, 3), f32(8, 6, 3), mask)
    yield "sinks of fewer heads", restored(attention, q, k, v, mask, f32(1))
    x = f32(6, 2, 2, 3)
    yield "a mask of batches that do not share", restored(ctx.soft_max(x, f32(6, 2)), x, f32(6, 2, 1, 2))


def test_layouts_without_a_compiled_kernel_are_computed_by_the_oracle(isa):
    def outcomes(kernels: str) -> dict:
        rng, found = np.random.default_rng(5), {}
        ctx = gs.Context()
        nodes = dict(misfits(ctx))
        with gs.CpuBackend(2, kernels=kernels) as backend:
            backend.alloc_tensors(ctx)
            for name, node in nodes.items():
                for leaf in (s if s.view_src is None else s.view_src for s in node.src):
                    leaf.set(random(rng, *leaf.ne) if leaf.type == gs.Type.F32 else np.zeros(leaf.n_elements, np.int32))
                try:
                    backend.graph_compute(gs.GraphView([node]))
                    found[name] = node.numpy()
                except gs.Error as error:
                    found[name] = type(error)
        return found

    compiled, plain = outcomes("compiled"), outcomes("numpy")
    for name, want in plain.items():
        if isinstance(want, type):
            assert compiled[name] is want, name
        else:
            np.testing.assert_allclose(compiled[name], want, rtol=1e-5, atol=1e-5, err_msg=name)
