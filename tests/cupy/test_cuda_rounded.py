"""Kernels that write their result rounded to 8 bits beside its f32, for products with it: the bits of the parts."""

from contextlib import nullcontext

import cupy_kernels
import numpy as np
import op_results
import pytest
from cuda_emulator import EmulatedDevice

import ggml_sched as gs
from ggml_sched.backends.cupy import ops, source
from ggml_sched.backends.cupy.launch import Builder

RNG = np.random.default_rng(24)


def rounds(builder: Builder) -> int:
    return sum(launch.kernel == "activations.quantize" for launch in builder.launches)


def same_bits(ctx: gs.Context, outs: list[gs.Tensor], values: dict, n_launches: int | None = None, n_rounds: int = 0,
              **options) -> Builder:
    """Launches that round give the bits of those beside launches that round alone, in every order of threads and
    blocks; returns the former."""
    graph = gs.Graph(*outs)
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.placed(ctx, order, 64, 0x3F) as backend:
            op_results.set_values(values)
            before = {t: op_results.raw(t) for t in graph.nodes if t.computes}
            cupy_kernels.run(cupy_kernels.build_grouped(graph.nodes, False, needed=set(outs), **options), order)
            want = [op_results.raw(t) for t in outs]
            for tensor, bits in before.items():
                backend.set_tensor(tensor, bits)
            op_results.set_values(values)
            builder = cupy_kernels.build_grouped(graph.nodes, needed=set(outs), **options)
            assert cupy_kernels.run(builder, order)["position"] == 0
            assert [op_results.raw(t) for t in outs] == want
            assert rounds(builder) == n_rounds
            assert n_launches in (None, len(builder.launches))
            assert builder.work_size <= ops.work_size(graph.nodes, options.get("exact", False), False, True)
    return builder


def weights(ctx: gs.Context, width: int, kind: str = "q4_0", rows: int = 9) -> gs.Tensor:
    return ctx.tensor(kind, (width, rows))


def values_of(ctx: gs.Context) -> dict:
    return cupy_kernels.leaves(ctx, RNG, 5)


@pytest.mark.parametrize("norm", ["rms_norm", "norm"])
@pytest.mark.parametrize(("width", "n"), [(64, 1), (160, 3), (16416, 2), (1024, 12)])
def test_a_norm_rounds_what_products_read(ctx, norm, width, n):
    """Rows that registers hold, and longer ones; few columns, and those of a tile.  One launch for a node or group."""
    x, w = ctx.tensor("f32", (width, n)), ctx.tensor("f32", (width,))
    y = ctx.mul(getattr(ctx, norm)(x, 1e-5), w)
    outs = [ctx.mul_mat(weights(ctx, width), y), ctx.mul_mat(weights(ctx, width, "q8_0"), y)]
    same_bits(ctx, outs, values_of(ctx), n_launches=3)


def test_a_norm_of_a_kept_sum_rounds_and_a_norm_without_a_weight(ctx):
    a, b, w = ctx.tensor("f32", (96, 2)), ctx.tensor("f32", (96, 2)), ctx.tensor("f32", (96,))
    total = ctx.add(a, b)
    y = ctx.mul(ctx.rms_norm(total, 1e-5), w)
    plain = ctx.l2_norm(total, 1e-5)
    outs = [ctx.mul_mat(weights(ctx, 96), y), total, ctx.mul_mat(weights(ctx, 96), plain)]
    same_bits(ctx, outs, values_of(ctx), n_launches=4)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e38, 1e-38, 0.0])
def test_what_is_not_finite_or_tiny_is_rounded_as_by_the_parts(ctx, bad):
    x, w = ctx.tensor("f32", (128, 3)), ctx.tensor("f32", (128,))
    y = ctx.mul(ctx.rms_norm(x, 1e-5), w)
    values = values_of(ctx)
    values[w][40:64] = bad
    same_bits(ctx, [ctx.mul_mat(weights(ctx, 128), y)], values, n_launches=2)


def test_experts_read_rows_that_a_norm_has_rounded(ctx):
    """The router and the experts' reshaped columns are other shapes of the same rows."""
    x, w, ids = ctx.tensor("f32", (64, 3)), ctx.tensor("f32", (64,)), ctx.tensor("i32", (2, 3))
    y = ctx.mul(ctx.rms_norm(x, 1e-5), w)
    router = ctx.mul_mat(ctx.tensor("f32", (64, 5)), y)
    out = ctx.mul_mat_id(ctx.tensor("q4_0", (64, 7, 5)), ctx.reshape_3d(y, 64, 1, 3), ids)
    same_bits(ctx, [router, out], values_of(ctx), n_launches=3)


def test_no_norm_rounds_for_products_that_read_something_else(ctx):
    x, w = ctx.tensor("f32", (64, 4)), ctx.tensor("f32", (64,))
    y = ctx.mul(ctx.rms_norm(x, 1e-5), w)
    half = ctx.view_2d(y, 64, 2, y.nb[1], 0)                    # the first two columns
    outs = [ctx.mul_mat(ctx.tensor("f16", (64, 5)), y), ctx.mul_mat(weights(ctx, 64), half)]
    same_bits(ctx, outs, values_of(ctx), n_launches=4, n_rounds=1)


def test_no_norm_rounds_for_exact_products(ctx):
    y = ctx.rms_norm(ctx.tensor("f32", (64, 1)), 1e-5)
    builder = same_bits(ctx, [ctx.mul_mat(weights(ctx, 64), y)], values_of(ctx), n_launches=2, exact=True)
    assert builder.work_size == 0


def overwritten(ctx: gs.Context) -> None:
    """A later node's result has the memory of the rounded one, and its shape."""
    x, w = ctx.tensor("f32", (64, 1)), ctx.tensor("f32", (64,))
    y = ctx.mul(ctx.rms_norm(x, 1e-5), w)
    first = ctx.mul_mat(weights(ctx, 64), y)
    other = ctx.sqr(x)
    outs = [first, ctx.mul_mat(weights(ctx, 64), other)]
    graph, values = gs.Graph(*outs), values_of(ctx)
    want = [cupy_kernels.compute(ctx, out, values) for out in outs]
    with cupy_kernels.filled(ctx, values, 64) as buffer:
        gs.bind_resident(other, buffer, y.offset)
        cupy_kernels.run(cupy_kernels.build_grouped(graph.nodes, needed=set(outs)))
        for out, wanted in zip(outs, want, strict=True):
            np.testing.assert_array_equal(out.numpy(), wanted)


def test_rounded_columns_are_dropped_where_a_node_writes(ctx):
    overwritten(ctx)


def test_columns_that_are_kept_for_too_long_are_found(ctx, monkeypatch):
    monkeypatch.setattr(Builder, "written", lambda self, node: None)
    with pytest.raises(AssertionError, match="Mismatched"):
        overwritten(ctx)


def test_an_input_at_the_address_of_a_rounded_result_is_rounded_again(ctx):
    """The caller may set it between the nodes."""
    x, w = ctx.tensor("f32", (64, 1)), ctx.tensor("f32", (64,))
    y, given = ctx.mul(ctx.rms_norm(x, 1e-5), w), ctx.tensor("f32", (64, 1))
    outs = [ctx.mul_mat(weights(ctx, 64), y), ctx.mul_mat(weights(ctx, 64), given)]
    with cupy_kernels.filled(ctx, values_of(ctx), 64) as buffer:
        gs.bind_resident(given, buffer, y.offset)
        assert rounds(cupy_kernels.build_grouped(gs.Graph(*outs).nodes, needed=set(outs))) == 1


# -- gated units ----------------------------------------------------------------------------------


def feed_forward(ctx: gs.Context, n: int, rows: int, kinds: tuple[str, str] = ("q4_0", "q8_0"),
                 op: str = "swiglu_split") -> gs.Tensor:
    x = ctx.sqr(ctx.tensor("f32", (64, n)))
    gate, up = (ctx.mul_mat(weights(ctx, 64, kinds[0], rows), x) for _ in range(2))
    return ctx.mul_mat(weights(ctx, rows, kinds[1], 7), getattr(ctx, op)(gate, up))


@pytest.mark.parametrize("op", ["swiglu_split", "geglu_split"])
@pytest.mark.parametrize(("n", "rows"), [(1, 32), (1, 160), (3, 96), (8, 64)])
def test_a_gated_unit_rounds_for_the_product_behind_it(ctx, op, n, rows):
    """After the node before, and its rounding: the unit, and the product."""
    same_bits(ctx, [feed_forward(ctx, n, rows, op=op)], values_of(ctx), n_launches=4, n_rounds=1)


@pytest.mark.parametrize("kinds", [("f16", "q4_0"), ("f32", "q6_K"), ("q4_K", "q4_K"), ("q4_0", "f16")])
def test_types_of_weights(ctx, kinds):
    x = ctx.sqr(ctx.tensor("f32", (256, 2)))
    gate, up = (ctx.mul_mat(weights(ctx, 256, kinds[0], 256), x) for _ in range(2))
    out = ctx.mul_mat(weights(ctx, 256, kinds[1], 5), ctx.swiglu_split(gate, up))
    same_bits(ctx, [out], values_of(ctx), n_rounds=int(kinds[0] in op_results.QUANTISED))


def test_columns_that_are_made_dense_lie_beside_what_a_unit_rounds(ctx):
    x = ctx.transpose(ctx.sqr(ctx.tensor("f32", (2, 512))))
    gate, up = (ctx.mul_mat(weights(ctx, 512, "f16", 32), x) for _ in range(2))
    same_bits(ctx, [ctx.mul_mat(weights(ctx, 32, "q8_0", 7), ctx.swiglu_split(gate, up))], values_of(ctx))


@pytest.mark.parametrize("n", [1, 3])
def test_experts_round_each_their_own_rows(ctx, n):
    x, ids = ctx.sqr(ctx.tensor("f32", (64, 1, n))), ctx.tensor("i32", (2, n), "ids")
    gate, up = (ctx.mul_mat_id(ctx.tensor("q4_0", (64, 96, 5)), x, ids) for _ in range(2))
    down = ctx.mul_mat_id(ctx.tensor("q4_0", (96, 9, 5)), ctx.swiglu_split(gate, up), ids)
    same_bits(ctx, [down], values_of(ctx), n_launches=4, n_rounds=1)


def test_a_unit_of_other_rows_is_rounded_by_a_launch(ctx):
    """Of 4,100 groups of 32 rows; and a unit whose products are computed one by one."""
    x = ctx.sqr(ctx.tensor("f32", (32, 1)))
    gate, up = (ctx.mul_mat(weights(ctx, 32, "q8_0", 32 * 4100), x) for _ in range(2))
    out = ctx.mul_mat(weights(ctx, 32 * 4100, "q8_0", 1), ctx.swiglu_split(gate, up))
    with cupy_kernels.filled(ctx, {}, 64):
        assert rounds(cupy_kernels.build_grouped(gs.Graph(out).nodes, needed={out})) == 2
        assert rounds(cupy_kernels.build_grouped(gs.Graph(out).nodes, needed={out, gate})) == 2


def test_an_id_of_no_expert_leaves_the_counters_at_zero(ctx):
    """`run` checks that they are; the next launch needs them so."""
    x, ids = ctx.sqr(ctx.tensor("f32", (64, 1, 2))), ctx.tensor("i32", (2, 2), "ids")
    gate, up = (ctx.mul_mat_id(ctx.tensor("q4_0", (64, 64, 5)), x, ids) for _ in range(2))
    down = ctx.mul_mat_id(ctx.tensor("q4_0", (64, 9, 5)), ctx.swiglu_split(gate, up), ids)
    values = values_of(ctx)
    values[ids][:] = [[1, 7], [0, 4]]
    with cupy_kernels.filled(ctx, values, 64):
        fault = cupy_kernels.run(cupy_kernels.build_grouped(gs.Graph(down).nodes, needed={down}))
        assert (fault["value"], fault["limit"]) == (7, 5)


PLANTED = {
    "": ("c < a.columns; c += warps", "c < a.columns; c += warps"),
    "a block too early": ("const unsigned others = 32 / warps - 1;", "const unsigned others = 32 / warps - 2;"),
    "another block's rows": ("const int64_t group = block * warps >> 5;", "const int64_t group = block * warps >> 6;"),
    "the first column alone": ("c < a.columns; c += warps", "c < 1; c += warps"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_bugs_of_the_last_block_are_found(ctx, bug, tmp_path, monkeypatch):
    """Without one the same kernels pass."""
    out, values = feed_forward(ctx, 3, 96), values_of(ctx)
    for path in source.KERNELS.glob("*.cu*"):
        text = path.read_text()
        if path.name == "matvec.cuh":
            assert text.count(PLANTED[bug][0]) == 1
            text = text.replace(*PLANTED[bug])
        (tmp_path / path.name).write_text(text)
    planted = {order: EmulatedDevice(order=order, host_access=True) for order in cupy_kernels.ORDERS}
    streams = {order: device.stream() for order, device in planted.items()}
    with monkeypatch.context() as patch:
        patch.setattr(cupy_kernels, "function", lambda kernel, order: planted[order].function(kernel, tmp_path))
        patch.setattr(cupy_kernels, "stream", streams.__getitem__)
        with pytest.raises(AssertionError) if bug else nullcontext():
            same_bits(ctx, [out], values, n_rounds=1)


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [32, 1024])
@pytest.mark.parametrize(("n", "width", "heads", "kind"), [(1, 64, 2, "f16"), (3, 128, 4, "f16"), (1, 256, 1, "q8_0"),
                                                         (8, 64, 6, "f16")])
def test_attention_rounds_for_the_product_behind_it(ctx, n, width, heads, kind, cells):
    """Caches that are split over blocks, and those that are not."""
    q = ctx.tensor("f32", (width, n, heads))
    k, v = (ctx.tensor(kind, (width, cells, 1)) for _ in "kv")
    out = ctx.reshape_2d(ctx.flash_attn_ext(q, k, v, None, 0.1, 0.0, 0.0), width * heads, n)
    same_bits(ctx, [ctx.mul_mat(weights(ctx, width * heads), out)], values_of(ctx), n_launches=2)


def test_attention_of_narrow_heads_leaves_rounding_to_a_launch(ctx):
    q, k, v = ctx.tensor("f32", (48, 1, 2)), ctx.tensor("f16", (48, 40, 1)), ctx.tensor("f16", (48, 40, 1))
    out = ctx.reshape_2d(ctx.flash_attn_ext(q, k, v, None, 0.1, 0.0, 0.0), 96, 1)
    same_bits(ctx, [ctx.mul_mat(weights(ctx, 96), out)], values_of(ctx), n_launches=3, n_rounds=1)
