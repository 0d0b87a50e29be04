"""Fused kernels: which nodes they fuse, and that results equal those of the single kernels."""

from collections import Counter

import configs
import cupy_kernels
import numpy as np
import op_results
import pytest
from op_results import width

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.launch import MAX_BLOCKS

RNG = np.random.default_rng(20)


def values_of(ctx: gs.Context) -> dict:
    return cupy_kernels.leaves(ctx, RNG, 5)


def found(graph: gs.Graph) -> list[tuple[str, ...]]:
    return [tuple(graph.nodes[i].op for i in group) for group in ops.fusion_groups(graph.nodes)]


def check(ctx: gs.Context, outs, values: dict, *, read: tuple[gs.Tensor, ...] = (), n_launches: int,
          tolerance: float = 2e-6, exact: bool = False) -> None:
    """Groups give what the nodes give one by one, in every order of threads; unread results stay unwritten."""
    graph, seen = gs.Graph(*outs), None
    keep = (*outs, *read)
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.placed(ctx, order, 64, 0x3F) as backend:
            op_results.set_values(values)
            before = {t: op_results.raw(t) for t in graph.nodes if t.computes}
            cupy_kernels.run(cupy_kernels.build(graph.nodes, exact=exact), order)
            want = [t.numpy() for t in keep]
            for tensor, bits in before.items():
                backend.set_tensor(tensor, bits)
            op_results.set_values(values)
            builder = cupy_kernels.build_grouped(graph.nodes, needed=set(keep), exact=exact)
            assert len(builder.launches) == n_launches
            fault = cupy_kernels.run(builder, order)
            assert fault["position"] == 0
            for t, wanted in zip(keep, want, strict=True):
                np.testing.assert_allclose(t.numpy(), wanted, rtol=tolerance, atol=tolerance)
            bits = [op_results.raw(t) for t in keep]
            assert seen in (None, bits), "other bits in another order"
            seen = bits
            inner = {graph.nodes[i] for group in ops.fusion_groups(graph.nodes) for i in group[:-1]} - set(keep)
            for t in inner:
                assert op_results.raw(t) == before[t], f"{t} was written"


@pytest.mark.parametrize("norm", ["rms_norm", "norm"])
@pytest.mark.parametrize("ne", [(64, 3), (100, 4, 2), (1, 1), (5, 1, 1, 2)], ids=str)
def test_a_norm_and_its_weight(ctx, norm, ne):
    x, w = ctx.tensor("f32", ne), ctx.tensor("f32", ne[:1])
    out = ctx.mul(getattr(ctx, norm)(x, 1e-5), w)
    assert found(gs.Graph(out)) == [(norm.upper(), "MUL")]
    check(ctx, [out], values_of(ctx), n_launches=1)


@pytest.mark.parametrize("read", [False, True])
def test_a_sum_its_norm_and_weight(ctx, read):
    """The residual goes on: then the sum is written, too."""
    a, b, w = (ctx.tensor("f32", ne) for ne in ((96, 5), (96, 5), (96,)))
    total = ctx.add(a, b)
    normed = ctx.mul(ctx.rms_norm(total, 1e-6), w)
    outs = [ctx.add(ctx.sqr(normed), total)] if read else [normed]
    assert found(gs.Graph(*outs)) == [("ADD", "RMS_NORM", "MUL")]
    check(ctx, outs, values_of(ctx), read=(total,) if read else (), n_launches=3 if read else 1)


@pytest.mark.parametrize(("n", "norm", "added", "term", "read"), [
    (40, "norm", False, (40,), False), (40, "norm", True, (40,), False), (40, "rms_norm", False, (40, 6), False),
    *((8300, norm, True, (8300,), read) for norm in ("rms_norm", "norm") for read in (False, True))])
def test_a_norm_with_weight_and_bias_or_residual(ctx, n, norm, added, term, read):
    """Elements of rows too long to be held are read again from memory, where the group wrote them."""
    x, y, w, shift = (ctx.tensor("f32", ne) for ne in ((n, 6), (n,), (n,), term))
    start = ctx.add(x, y) if added else x
    out = ctx.add(ctx.mul(getattr(ctx, norm)(start, 1e-6), w), shift)
    assert found(gs.Graph(out)) == [(*(("ADD",) if added else ()), norm.upper(), "MUL", "ADD")]
    check(ctx, [out], values_of(ctx), read=(start,) if read else (), n_launches=1)


def test_a_sum_kept_over_its_first_operand():
    """The residual may take the place of what it adds to, in rows of any length."""
    for n in (96, 8300):
        ctx = gs.Context()
        a, b, w = ctx.tensor("f32", (n, 2)), ctx.tensor("f32", (n, 2)), ctx.tensor("f32", (n,))
        total = ctx.add(a, b)
        out = ctx.mul(ctx.norm(total, 1e-6), w)
        graph, values = gs.Graph(out), values_of(ctx)
        want = cupy_kernels.compute(ctx, out, values)
        for order in cupy_kernels.ORDERS:
            with cupy_kernels.filled(ctx, values, 64) as buffer:
                gs.bind_resident(total, buffer, a.offset)
                builder = cupy_kernels.build_grouped(graph.nodes, needed={total, out})
                assert len(builder.launches) == 1
                cupy_kernels.run(builder, order)
                np.testing.assert_allclose(out.numpy(), want, rtol=2e-6, atol=2e-6)
                assert np.array_equal(total.numpy(), (values[a] + values[b]).reshape(2, n))


def test_what_others_read_or_is_an_output_stays_a_node_of_its_own(ctx):
    x, w = ctx.tensor("f32", (16, 2)), ctx.tensor("f32", (16,))
    normed = ctx.rms_norm(x, 1e-5)
    assert found(gs.Graph(ctx.mul(normed, w), ctx.sqr(normed))) == []
    assert found(gs.Graph(ctx.mul(normed, normed))) == []
    assert found(gs.Graph(ctx.mul(ctx.set_output(normed), w))) == []


def test_a_weight_that_is_a_member_is_not_left_unwritten(ctx):
    a, b, w = (ctx.tensor("f32", (16, 2)) for _ in range(3))
    total = ctx.add(a, b)
    out = ctx.add(ctx.mul(ctx.rms_norm(total, 1e-5), w), total)
    assert ("ADD", "RMS_NORM", "MUL", "ADD") not in found(gs.Graph(out))
    # Without its last sum the group writes what is read outside: the first sum.
    check(ctx, [out], values_of(ctx), read=(total,), n_launches=2)


@pytest.mark.parametrize("wire", [
    lambda ctx, normed: ctx.mul(ctx.tensor("f32", (16, 2)), normed),
    lambda ctx, normed: ctx.mul(normed, ctx.tensor("f32", (8,))),
    lambda ctx, normed: ctx.mul(normed, ctx.tensor("f16", (16,)))],
    ids=["other operand", "narrow weight", "other type"])
def test_other_wirings_are_left_alone(ctx, wire):
    assert found(gs.Graph(wire(ctx, ctx.rms_norm(ctx.tensor("f32", (16, 2)), 1e-5)))) == []


def test_a_result_over_a_source_element_by_element(ctx):
    """A plan may put the product where the operand of the norm lies."""
    x, y, w = ctx.tensor("f32", (48, 4)), ctx.tensor("f32", (48, 4)), ctx.tensor("f32", (48,))
    total = ctx.add(x, y)
    out = ctx.mul(ctx.rms_norm(total, 1e-5), w)
    graph, values = gs.Graph(out), values_of(ctx)
    want = cupy_kernels.compute(ctx, out, values)
    for over, shift, n_launches in ((x, 0, 1), (y, 0, 1), (w, -64, 4)):     # over the weight: one by one, and a copy
        with cupy_kernels.filled(ctx, values, 64) as buffer:
            gs.bind_resident(out, buffer, over.offset + shift)
            builder = cupy_kernels.build_grouped(graph.nodes, needed={out})
            assert len(builder.launches) == n_launches
            cupy_kernels.run(builder)
            np.testing.assert_allclose(out.numpy(), want, rtol=2e-6, atol=2e-6)


def rope_into_cache(ctx, type, n_dims, mode, factors, wide, n_tokens, n_head=3, width=16, n_rows=9):
    k, positions = ctx.tensor("f32", (width, n_head, n_tokens)), ctx.tensor("i32", (n_tokens,))
    cache = ctx.tensor(type, (width * n_head, n_rows))
    ids = ctx.tensor("i64" if wide else "i32", (n_tokens,))
    f = ctx.tensor("f32", (n_dims // 2,)) if factors else None
    turned = ctx.rope(k, positions, n_dims, mode, f, freq_base=100.0, ext_factor=0.5, n_ctx_orig=64, freq_scale=0.25)
    out = ctx.set_rows(cache, ctx.reshape_2d(turned, width * n_head, n_tokens), ids)
    values = {t: RNG.uniform(0.5, 2, t.ne[::-1]).astype(np.float32) for t in (k, cache, f) if t is not None}
    return out, turned, cache, values, positions, ids


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize("form", [(16, False, True), (8, True, False), (0, False, True)], ids=str)
def test_rope_and_the_write_of_its_rows(ctx, type, mode, form):
    n_dims, factors, wide = form
    out, _, _, values, positions, ids = rope_into_cache(ctx, type, n_dims, mode, factors, wide, 4)
    assert found(gs.Graph(out)) == [("ROPE", "SET_ROWS")]
    values |= {positions: np.int32([0, 1, 700, 100000]), ids: np.array([7, 0, 3, 8])}
    check(ctx, [out], values, n_launches=1)
    values[ids] = np.array([5, 2, 5, 5])                # the last one stays
    check(ctx, [out], values, n_launches=1)


def test_a_rope_that_others_read_is_not_fused_with_a_write(ctx):
    out, turned, *_ = rope_into_cache(ctx, "f16", 8, "neox", False, True, 4)
    assert found(gs.Graph(out, ctx.sqr(turned))) == []
    many = gs.Context()
    out, *_ = rope_into_cache(many, "f16", 512, "neox", False, True, 2, width=512)
    assert found(gs.Graph(out)) == []                   # more frequencies than an argument holds
    blocks = gs.Context()
    out, *_ = rope_into_cache(blocks, "q8_0", 32, "neox", False, True, 2, width=32)
    assert found(gs.Graph(out)) == []


@pytest.mark.parametrize(("n_heads", "groups"), [(65535, [("ROPE", "SET_ROWS")]), (65536, [])])
def test_a_rope_with_more_heads_than_a_grid_has_blocks_is_not_fused_with_a_write(ctx, n_heads, groups):
    out, *_ = rope_into_cache(ctx, "f16", 2, "neox", False, True, 1, n_head=n_heads, width=2)
    assert found(gs.Graph(out)) == groups


@pytest.mark.parametrize(("n_tokens", "n_heads", "grid"), [(4, 3, (4, 3, 1)), (70000, 1, (MAX_BLOCKS, 1, 1))])
def test_a_rope_with_a_write_has_a_block_for_each_token_and_head(ctx, n_tokens, n_heads, grid):
    """Results would be the same of fewer, which would turn all heads one after the other."""
    out, *_ = rope_into_cache(ctx, "f16", 2, "neox", False, True, n_tokens, n_head=n_heads, width=2, n_rows=1)
    graph = gs.Graph(out)
    launch, = cupy_kernels.placed_launches(ctx, graph.nodes, cupy_kernels.build_grouped, needed={out}).launches
    assert (launch.kernel, launch.grid) == ("rope.rope_set_rows", grid)


@pytest.mark.parametrize("bad", [-1, 9, 1 << 40])
def test_a_fused_write_to_a_row_that_is_not_there(ctx, bad):
    out, _, cache, values, positions, ids = rope_into_cache(ctx, "f32", 16, "normal", False, True, 2)
    values |= {positions: np.int32([1, 2]), ids: np.array([4, bad])}
    graph = gs.Graph(out)
    with cupy_kernels.filled(ctx, values, 256, 0x11) as buffer:
        before, start = bytes(buffer.memory), cache.offset
        fault = cupy_kernels.run(cupy_kernels.build_grouped(graph.nodes, needed={out}))
        assert graph.nodes[fault["position"] - 1] is out
        assert (fault["source"], fault["value"], fault["limit"]) == (1, bad, 9)
        after = bytes(buffer.memory)
        row = slice(start + 4 * cache.nb[1], start + 5 * cache.nb[1])
        assert after[row] != before[row]
        assert after[: row.start] == before[: row.start] and after[row.stop :] == before[row.stop :]


SAMPLES = {path.name.removesuffix(".json.gz"): path for path in configs.sample_paths()}


@pytest.mark.parametrize(("sample", "launches", "wanted"), [
    ("llama-2-7b-fa-decode", 614, {"RMS_NORM+MUL": 1, "ADD+RMS_NORM+MUL": 64,
                                   "MUL_MAT+ROPE+MUL_MAT+MUL_MAT+ROPE+SET_ROWS+SET_ROWS": 32,
                                   "MUL_MAT+MUL_MAT+GLU:SWIGLU": 32}),
    ("phi2-2.7b-decode", 777, {"NORM+MUL+ADD": 1, "ADD+NORM+MUL+ADD": 32, "ROPE+SET_ROWS": 32}),
    ("gpt2-124m-prefill512", 297, {"ADD+NORM+MUL+ADD": 25}),
    ("mamba-1.4b-decode", 1398, {"RMS_NORM+MUL": 1, "ADD+RMS_NORM+MUL": 48}),
])
def test_groups_of_models(sample, launches, wanted):
    backend = gs.DryBackend("dry")
    graph = gs.load_graph(SAMPLES[sample], place=lambda t: backend)
    computing = [node for node in graph.nodes if node.computes]
    assert len(computing) == launches
    groups = Counter("+".join(ops_of) for ops_of in found(graph))
    assert groups == wanted
    assert all(ops.supports(node) for node in computing if not node.op.startswith(("MUL_MAT", "FLASH")))


def test_members_that_are_read_outside_are_computed_one_by_one(ctx):
    """Their results must be written."""
    x, w = ctx.tensor("f32", (16, 2)), ctx.tensor("f32", (16,))
    nodes = gs.Graph(ctx.mul(ctx.rms_norm(x, 1e-5), w)).nodes
    assert len(cupy_kernels.placed_launches(ctx, nodes, cupy_kernels.build_grouped).launches) == 2


# -- two products and their gated unit -----------------------------------------------------------------


def feed_forward(kind: str, n_tokens: int = 1, op: str = "swiglu_split", rows: int = 37):
    ctx, k = gs.Context(), width(64, kind)
    x = ctx.tensor("f32", (k, n_tokens))
    a, b = ctx.mul_mat(ctx.tensor(kind, (k, rows)), x), ctx.mul_mat(ctx.tensor(kind, (k, rows)), x)
    return ctx, getattr(ctx, op)(a, b)


def experts(kind: str, n_tokens: int = 1, n_experts: int = 5):
    ctx, k = gs.Context(), width(64, kind)
    x, ids = ctx.tensor("f32", (k, 1, n_tokens)), ctx.tensor("i32", (2, n_tokens), "ids")
    a, b = (ctx.mul_mat_id(ctx.tensor(kind, (k, 19, n_experts)), x, ids) for _ in range(2))
    return ctx, ctx.swiglu_split(a, b)


def check_gated(ctx: gs.Context, out: gs.Tensor, n_launches: int, exact: bool = False) -> None:
    check(ctx, [out], values_of(ctx), n_launches=n_launches, tolerance=1e-5, exact=exact)


@pytest.mark.parametrize("kind", ["f32", "f16", "q4_0", "q6_K", "mxfp4"])
def test_a_feed_forward_of_one_token_is_two_launches_at_most(kind):
    check_gated(*feed_forward(kind), n_launches=2 if kind in op_results.QUANTISED else 1)
    check_gated(*feed_forward(kind), n_launches=1, exact=True)


@pytest.mark.parametrize("op", ["swiglu_split", "geglu_split", "reglu_split"])
@pytest.mark.parametrize("n_tokens, rows", [(1, 1), (3, 8), (8, 9)])
def test_gates_and_several_tokens(op, n_tokens, rows):
    check_gated(*feed_forward("q8_0", n_tokens, op, rows), n_launches=2)


@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("kind", ["bf16", "q4_K"])
def test_chosen_experts(kind, n_tokens):
    check_gated(*experts(kind, n_tokens), n_launches=2 if kind == "q4_K" else 1)


def test_what_is_no_feed_forward_of_few_tokens_is_left_alone(ctx):
    assert not ops.fusion_groups(gs.Graph(feed_forward("q4_0", 9)[1]).nodes)
    x, y = ctx.tensor("f32", (64, 1)), ctx.tensor("f32", (64, 1))
    w, v, small = ctx.tensor("q4_0", (64, 8)), ctx.tensor("q4_0", (64, 8)), ctx.tensor("q8_0", (64, 8))

    def groups(a: gs.Tensor, b: gs.Tensor, *more: gs.Tensor) -> list:
        return [ops_of for ops_of in found(gs.Graph(ctx.swiglu_split(a, b), *more)) if "GLU:SWIGLU" in ops_of]

    assert groups(ctx.mul_mat(w, x), ctx.mul_mat(v, x))
    assert not groups(ctx.mul_mat(w, x), ctx.mul_mat(v, y))         # other columns
    assert not groups(ctx.mul_mat(w, x), ctx.mul_mat(small, x))     # other types
    both = ctx.mul_mat(w, x)
    assert not groups(both, both)
    read = ctx.mul_mat(w, x)
    assert not groups(read, ctx.mul_mat(v, x), ctx.sqr(read))       # another node reads a product


def test_products_that_are_needed_are_computed_one_by_one():
    ctx, out = feed_forward("q4_0")
    nodes = gs.Graph(out).nodes
    builder = cupy_kernels.placed_launches(ctx, nodes, cupy_kernels.build_grouped, needed={out, nodes[0]})
    assert [launch.kernel.split(".")[0] for launch in builder.launches].count("elementwise") == 1


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_of_no_expert_is_found_in_the_group(bad):
    ctx, out = experts("f32")
    nodes = [node for node in gs.Graph(out).nodes if node.computes]
    values = values_of(ctx)
    next(array for t, array in values.items() if t.name == "ids")[..., 1] = bad
    with cupy_kernels.filled(ctx, values):
        builder = cupy_kernels.Builder("EMULATED", needed={out})
        ops.build_group(builder, (3, 4, 5), nodes)
        fault = cupy_kernels.run(builder)
        assert (fault["position"], fault["source"], fault["value"], fault["limit"]) == (6, 2, bad, 5)


# -- groups that were not found --------------------------------------------------------------------------


def of_norms(ctx):
    """A factor of one element, which repeats; and members of fewer rows than the norm."""
    x, row, less = (ctx.tensor("f32", ne) for ne in ((64, 4), (64,), (64, 2)))
    norm = ctx.rms_norm(x, 1e-5)
    yield [norm, ctx.mul(norm, ctx.tensor("f32", (1,)))]
    yield [norm, ctx.mul(less, row)]
    yield [norm, ctx.mul(norm, row), ctx.add(less, row)]
    yield [ctx.add(less, row), norm, ctx.mul(norm, row)]


def of_ropes(ctx):
    """Rows for a cache that are fewer than the rope's."""
    rope = ctx.rope(ctx.tensor("f32", (16, 2, 5)), ctx.tensor("i32", (5,)), 16)
    yield [rope, ctx.set_rows(ctx.tensor("f32", (32, 9)), ctx.tensor("f32", (32, 2)), ctx.tensor("i32", (2,)))]
    yield [rope, ctx.set_rows(ctx.tensor("f32", (8, 9)), ctx.tensor("f32", (8, 5)), ctx.tensor("i32", (5,)))]


def of_gates(ctx):
    x = ctx.tensor("f32", (64, 1))
    a = ctx.mul_mat(ctx.tensor("q4_0", (64, 8)), x)
    b = ctx.mul_mat(ctx.tensor("q8_0", (64, 8)), x)
    c = ctx.mul_mat(ctx.tensor("q4_0", (128, 8)), ctx.tensor("f32", (128, 1)))
    yield [a, b, ctx.swiglu_split(a, b)]
    yield [a, c, ctx.swiglu_split(a, c)]
    yield [a, b, ctx.swiglu_split(*(ctx.tensor("f32", (8, 1)) for _ in "ab"))]


def of_experts(ctx):
    """Fewer ids, or weights, than the scores have tokens."""
    scores, few = ctx.soft_max(ctx.tensor("f32", (8, 6))), ctx.tensor("f32", (8, 2))
    for order, tokens in ((ctx.argsort(few, "desc"), 6), (ctx.argsort(scores, "desc"), 2)):
        yield [scores, order, ctx.get_rows(ctx.tensor("f32", (1, 8, tokens)), ctx.tensor("i32", (2, tokens)))]


def of_sums(ctx):
    product = ctx.mul(ctx.tensor("f32", (16, 2, 3)), ctx.tensor("f32", (1, 2, 3)))
    yield [product, ctx.add(*(ctx.tensor("f32", (16, 9)) for _ in "ab"))]
    product = ctx.mul(ctx.tensor("f32", (16, 2, 3)), ctx.tensor("f32", (16,)))
    yield [product, ctx.add(*(ctx.tensor("f32", (16, 3)) for _ in "ab"))]


def of_projections(ctx):
    """Products of several matrices, of which the second has fewer weights."""
    x = ctx.tensor("f32", (64, 1, 4))
    yield [ctx.mul_mat(ctx.tensor("f32", (64, 8, n)), x) for n in (4, 1)]


@pytest.mark.parametrize("groups", [of_norms, of_ropes, of_gates, of_experts, of_sums, of_projections])
def test_groups_that_no_kernel_computes_are_computed_one_by_one(ctx, groups):
    """A driver may send a worker any group: its kernel would access memory outside of the tensors."""
    for nodes in groups(ctx):
        assert all(ops.supports(node) for node in nodes)
        with cupy_kernels.filled(ctx, {}):
            single = cupy_kernels.build(nodes).launches
            builder = cupy_kernels.Builder("EMULATED", needed={nodes[-1]})
            ops.build_group(builder, range(len(nodes)), nodes)
            assert [launch.kernel for launch in builder.launches] == [launch.kernel for launch in single]
