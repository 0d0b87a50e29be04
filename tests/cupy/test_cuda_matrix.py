"""Matrix products on the device: every way through the kernels, against the oracle.

Columns that meet blocks are rounded to 8 bits, or, `exact`, not: the errors that these may make differ by magnitudes.
"""

from itertools import product as iterproduct
from math import prod

import cupy_kernels
import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, random, raw, width

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.launch import Builder, struct
from ggml_sched.backends.cupy.ops import OPS, matrix

RNG = np.random.default_rng(12)
ROUNDED, EXACT = 1e-4, 1e-11


def check(ctx: gs.Context, out: gs.Tensor, values: dict | None = None, exact: bool = False, **options) -> None:
    """A product of random values, but for leaves in `values`."""
    bound = EXACT if exact or str(out.src[0].type) in FLOATS else ROUNDED
    given = cupy_kernels.leaves(ctx, RNG) | (values or {})
    assert cupy_kernels.error_of(ctx, out, given, exact=exact, **options) <= bound


def check_product(kind: str, a: tuple, b: tuple, exact: bool = False, **options) -> None:
    ctx = gs.Context()
    check(ctx, ctx.mul_mat(ctx.tensor(kind, a), ctx.tensor("f32", b)), exact=exact, **options)


@pytest.mark.spread("kind exact", "kind columns", "columns exact")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 8, 9])
@pytest.mark.parametrize("kind", FLOATS + QUANTISED)
def test_every_type_with_few_columns_and_more(kind, columns, exact):
    k = width(96, kind)
    check_product(kind, (2 * k, 19), (2 * k, columns), exact)


def parts_of(ctx: gs.Context, node: gs.Tensor, **options) -> tuple[int, int]:
    """(blocks over the rows, elements of k of a warp that shares its rows) of the last launch."""
    launch = cupy_kernels.placed_launches(ctx, [node], **options).launches[-1]
    return launch.grid[0], int(launch.args[0]["part"][0])


@pytest.mark.spread("kind exact", "kind columns", "columns exact", "kind k")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 8])
@pytest.mark.parametrize("k", [2304, 4096])
@pytest.mark.parametrize("kind", QUANTISED)
def test_warps_share_rows_where_they_are_few(kind, k, columns, exact):
    """2,304 elements are three parts; the bits of each order of threads have to be the same."""
    ctx = gs.Context()
    node = ctx.mul_mat(ctx.tensor(kind, (k, 19)), ctx.tensor("f32", (k, columns)))
    assert parts_of(ctx, node, exact=exact) == (10, {2304: 768, 4096: 1024}[k])
    check(ctx, node, exact=exact)


@pytest.mark.spread("kind", "columns")
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("k", [513, 776, 1024, 1031, 2048])
@pytest.mark.parametrize("kind", FLOATS)
def test_warps_share_rows_without_blocks(kind, k, columns):
    """Of odd lengths, where the last warp has what is left; and of rows that are not aligned."""
    ctx = gs.Context()
    node = ctx.mul_mat(ctx.tensor(kind, (k, 7)), ctx.tensor("f32", (k, columns)))
    assert parts_of(ctx, node) == (4, 256 if k <= 1024 else 512)
    check(ctx, node)
    whole = ctx.tensor(kind, (k + 3, 7))
    check(ctx, ctx.mul_mat(ctx.view_2d(whole, k, 7, whole.nb[1], whole.nb[0]), ctx.tensor("f32", (k, columns))))


def test_warps_share_rows_of_matrices_that_share_columns(ctx):
    """Several matrices, experts with one that is not there, and up to three products with biases."""
    check(ctx, ctx.mul_mat(ctx.tensor("q8_0", (2304, 5, 2)), ctx.tensor("f32", (2304, 1, 6))))
    ids = ctx.tensor("i32", (2, 1), "ids")
    out = ctx.mul_mat_id(ctx.tensor("q4_0", (2304, 5, 4)), ctx.tensor("f32", (2304, 1, 1)), ids)
    assert parts_of(ctx, out) == (3, 768)
    check(ctx, out, {ids: np.array([[3, 1]], np.int32)})


@pytest.mark.parametrize("n_multiprocessors", [1, 28, 132, 1000])
@pytest.mark.parametrize("kind", ["q4_0", "f32"])
def test_parts_cover_every_element_once_and_only_where_rows_are_few(ctx, kind, n_multiprocessors):
    for k, rows in iterproduct((512, 2048, 2304, 4096, 14336, 14592), (1, 8, 100, 224, 232, 8000, 8008)):
        p = struct(matrix.PRODUCT, matrices=1, columns=1)
        rows_of_block = matrix._share(Builder(n_multiprocessors=n_multiprocessors), ctx.tensor(kind, (k, rows)), p,
                                      -(-rows // 8))
        part = int(p["part"][0])
        is_few = -(-rows // 8) <= n_multiprocessors and k > {"q4_0": 2048, "f32": 512}[kind]
        assert (part > 0) == is_few and rows_of_block == (2 if is_few else 8)
        assert not part or (part % 256 == 0 and part * 4 >= k)


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_quantised_type_in_tiles_without_tensor_cores_and_in_wide_ones(kind):
    k = width(96, kind)
    check_product(kind, (k, 19), (k, 9), tensor=False)
    check_product(kind, (k, 70), (k, 18))


@pytest.mark.spread("kind", "columns")
@pytest.mark.parametrize("kind", ["q4_1", "q6_K", "mxfp4"])
@pytest.mark.parametrize("columns", [16, 17, 70])
def test_parts_of_k_are_added_up_by_the_last_block(kind, columns):
    """1,664 elements are 13 pieces; rows of blocks of 256 have 1,792, 14 pieces."""
    k = 1792 if kind.endswith("K") else 1664
    ctx = gs.Context()
    node = ctx.mul_mat(ctx.tensor(kind, (k, 67)), ctx.tensor("f32", (k, columns)))
    launch = cupy_kernels.placed_launches(ctx, [node]).launches[-1]
    assert launch.kernel.endswith("_16" if columns == 16 else "_64") and launch.grid[2] > 1
    check(ctx, node)
    check_product(kind, (k, 67), (k, columns), n_multiprocessors=1)


@pytest.mark.parametrize("n_multiprocessors", [1, 13, 132, 1000])
@pytest.mark.parametrize("k", [32, 512, 1056, 4096, 14336])
def test_parts_take_every_piece_once(ctx, k, n_multiprocessors):
    for rows, columns in ((1, 9), (4096, 16), (4096, 70), (100_000, 512)):
        node = ctx.mul_mat(ctx.tensor("q4_0", (k, rows)), ctx.tensor("f32", (k, columns)))
        n_parts, pieces = matrix._parts_of_k(node, n_multiprocessors)
        total = -(-k // matrix.PIECE)
        assert pieces * (n_parts - 1) < total <= pieces * n_parts and n_parts <= matrix.MAX_PARTS
        assert n_parts == 1 or pieces >= matrix.PIECES


@pytest.mark.spread("kind", "k")
@pytest.mark.parametrize("kind", ["f16", "q4_0", "q6_K"])
@pytest.mark.parametrize("k", [256, 1280])
def test_rows_and_columns_of_several_tiles(kind, k):
    check_product(kind, (k, 131), (k, 70))
    check_product(kind, (k, 131), (k, 70), tensor=False)
    check_product(kind, (k, 65), (k, 64), exact=True)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("k", [1, 7, 33, 100])
def test_plain_rows_of_odd_lengths(kind, k):
    for columns in (1, 3, 12):
        check_product(kind, (k, 9), (k, columns))


@pytest.mark.spread("kind", "columns")
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q5_K"])
@pytest.mark.parametrize("columns", [1, 3, 20])
def test_matrices_that_meet_several_of_the_other_side(kind, columns):
    k = width(64, kind)
    check_product(kind, (k, 5, 2, 3), (k, columns, 6, 3))
    check_product(kind, (k, 5, 2, 1), (k, columns, 40 if columns < 20 else 8, 2))


def test_columns_of_other_types_and_strides():
    for kind, type_b, columns in (("q4_0", "f16", 1), ("q4_0", "bf16", 11), ("f32", "f16", 2), ("f16", "bf16", 11)):
        ctx = gs.Context()
        w, x = ctx.tensor(kind, (64, 7)), ctx.tensor(type_b, (columns, 64))
        check(ctx, ctx.mul_mat(w, ctx.transpose(x)))


@pytest.mark.parametrize("kind", FLOATS)
def test_views_of_a_cache_and_permuted_queries(ctx, kind):
    """Attention as llama-style graphs write it; of the values, rows are one channel over the positions."""
    d, n_head, n_kv_head, n_tokens, n_kv, n_ctx = 8, 6, 2, 3, 5, 9
    cache, q = ctx.tensor(kind, (d * n_kv_head, n_ctx)), ctx.tensor("f32", (d, n_head, n_tokens))
    k = ctx.permute(ctx.view_3d(cache, d, n_kv_head, n_kv, d * cache.nb[0], cache.nb[1]), 0, 2, 1, 3)
    v_cache, scores = ctx.tensor(kind, (n_ctx, d * n_kv_head)), ctx.tensor("f32", (n_kv, n_tokens, n_head))
    v = ctx.view_3d(v_cache, n_kv, d, n_kv_head, v_cache.nb[1], d * v_cache.nb[1])
    for out in (ctx.mul_mat(k, ctx.permute(q, 0, 2, 1, 3)), ctx.mul_mat(v, scores)):
        check(ctx, out)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden_by_rounding(ctx, value):
    w, x = ctx.tensor("q4_0", (64, 5)), ctx.tensor("f32", (64, 2))
    data = random(RNG, 64, 2)
    data[0, 40] = value
    got = cupy_kernels.compute(ctx, ctx.mul_mat(w, x), {w: random(RNG, 64, 5), x: data}).reshape(2, 5)
    assert not np.isfinite(got[0]).any() and np.isfinite(got[1]).all()


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-36, 1e30])
def test_activations_of_any_size_stay_in_range(ctx, size):
    w, x = ctx.tensor("q4_1", (64, 5)), ctx.tensor("f32", (64, 1))
    values = {w: random(RNG, 64, 5), x: (random(RNG, 64, 1) * size).astype(np.float32)}
    out = ctx.mul_mat(w, x)
    got, want = cupy_kernels.compute(ctx, out, values), cupy_kernels.oracle(ctx, out, values)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max() + 1e-34


# -- experts ---------------------------------------------------------------------------------------------


@pytest.mark.spread("kind exact", "n_tokens n_experts slots")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["f16", "q4_0", "q4_K", "mxfp4"])
@pytest.mark.parametrize("n_tokens, n_experts, slots", [(1, 8, 1), (8, 5, 3), (9, 40, 1), (70, 3, 3)])
def test_experts_of_one_token_and_of_prompts(ctx, kind, n_tokens, n_experts, slots, exact):
    k, n_used = width(64, kind), 3
    w, x = ctx.tensor(kind, (k, 37, n_experts)), ctx.tensor("f32", (k, slots, n_tokens))
    ids = ctx.tensor("i32", (n_used, n_tokens))
    out = ctx.mul_mat_id(w, x, ids)
    names = np.array([RNG.permutation(n_experts)[:n_used] for _ in range(n_tokens)], np.int32)
    if n_experts == 40:
        names[:] = 39                      # experts without a pair, and one with all
    check(ctx, out, {ids: names}, exact)
    if n_tokens > 8 and not exact:
        check(ctx, out, {ids: names}, tensor=False)


def test_ids_in_a_strided_view(ctx):
    w, x, table = ctx.tensor("f32", (32, 5, 6)), ctx.tensor("f32", (32, 1, 12)), ctx.tensor("i32", (4, 12))
    check(ctx, ctx.mul_mat_id(w, x, ctx.view_2d(table, 2, 12, table.nb[1], 4)))


@pytest.mark.parametrize("order", cupy_kernels.ORDERS)
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("n_tokens", [2, 20])
def test_an_id_of_no_expert_sets_the_error_word_and_writes_nothing(ctx, n_tokens, bad, order):
    w, x, ids = ctx.tensor("f32", (32, 70, 4)), ctx.tensor("f32", (32, 1, n_tokens)), ctx.tensor("i32", (2, n_tokens))
    out = ctx.mul_mat_id(w, x, ids)
    names = RNG.integers(0, 4, (n_tokens, 2)).astype(np.int32)
    names[1, 0] = bad
    values = {w: random(RNG, *w.ne), x: random(RNG, *x.ne), ids: names}
    with cupy_kernels.filled(ctx, values, poison=0x11):
        fault = cupy_kernels.run(cupy_kernels.build([out]), order)
        assert (fault["position"], fault["source"], fault["value"], fault["limit"]) == (1, 2, bad, 4)
        got = out.numpy().reshape(n_tokens, 2, 70)
    poison = np.frombuffer(b"\x11" * 4, np.float32)[0]
    assert (got[1, 0] == poison).all() and not (got[1, 1] == poison).any() and not (got[0] == poison).any()


@pytest.mark.parametrize("kind, exact", [("f32", False), ("q4_0", False), ("q4_0", True)])
@pytest.mark.parametrize("n_tokens", [2, 20, 300])
def test_without_experts_every_id_is_a_fault(ctx, n_tokens, kind, exact):
    w, x, ids = ctx.tensor(kind, (64, 70, 0)), ctx.tensor("f32", (64, 1, n_tokens)), ctx.tensor("i32", (2, n_tokens))
    out = ctx.mul_mat_id(w, x, ids)
    with cupy_kernels.filled(ctx, {x: random(RNG, *x.ne), ids: np.zeros((n_tokens, 2), np.int32)}, poison=0x11):
        builder = cupy_kernels.build([out], exact=exact)
        assert tuple(cupy_kernels.run(builder)) == (1, 2, 0, 0)
        assert set(raw(out)) == {0x11}
    assert builder.work_size <= ops.work_size([out], exact, False, True)


# -- launches ---------------------------------------------------------------------------------------------


def test_weights_are_read_once_for_eight_columns_and_experts_without_the_host(ctx):
    w, few, many = (ctx.tensor(kind, ne) for kind, ne in (("q4_0", (64, 5)), ("f32", (64, 8)), ("f32", (64, 9))))
    experts, one, more = (ctx.tensor(kind, ne) for kind, ne in (
        ("q4_0", (64, 5, 3)), ("f32", (64, 1, 1)), ("f32", (64, 1, 30))))
    ids, all_ids = ctx.tensor("i32", (2, 1)), ctx.tensor("i32", (2, 30))
    nodes = [ctx.mul_mat(w, few), ctx.mul_mat(w, many), ctx.mul_mat_id(experts, one, ids),
             ctx.mul_mat_id(experts, more, all_ids)]
    kernels = [launch.kernel for launch in cupy_kernels.placed_launches(ctx, nodes).launches]
    assert kernels == ["activations.quantize", "matvec_plain.q4_0_8",
                       "activations.quantize", "mma_plain.q4_0_16",
                       "activations.quantize", "matvec_plain.q4_0_1",
                       "activations.quantize", "experts.count", "experts.place", "mma_plain.q4_0_64"]


def test_work_memory_is_what_is_said():
    for (kind, columns), type_b in iterproduct((("q4_0", 1), ("q4_0", 100), ("f16", 3), ("f32", 40)), ("f32", "f16")):
        ctx = gs.Context()
        nodes = [ctx.mul_mat(ctx.tensor(kind, (64, 300)), ctx.tensor(type_b, (64, columns, 2))),
                 ctx.mul_mat_id(ctx.tensor(kind, (64, 30, 6)), ctx.tensor(type_b, (64, 2, columns)),
                                ctx.tensor("i32", (2, columns)))]
        for node, exact, blas, tensor in iterproduct(nodes, *[(False, True)] * 3):
            used = cupy_kernels.placed_launches(ctx, [node], exact=exact, blas=blas, tensor=tensor).work_size
            assert used <= ops.work_size([node], exact, blas, tensor) <= OPS[node.op].work(node) + 255
            if kind != "f16" or not blas:
                assert used == ops.work_size([node], exact, blas, tensor)


def test_work_memory_has_room_for_the_parts_of_a_large_device(ctx):
    for columns in (9, 40, 300):
        node = ctx.mul_mat(ctx.tensor("q4_0", (4096, 300)), ctx.tensor("f32", (4096, columns)))
        for n in (1, 132, 256, 1000):
            used = cupy_kernels.placed_launches(ctx, [node], n_multiprocessors=n).work_size
            assert used <= ops.work_size([node], False, False, True)
            assert n < 256 or used == ops.work_size([node], False, False, True)


def test_what_kernels_cannot_count_or_load_is_not_theirs(ctx):
    for a, b, fits in (((32, 4), (32, 1 << 20), True), ((32, 4), (32, 1 << 22), False),
                       ((32, 4), (32, 1, 1 << 15, 1 << 15), True), ((32, 4), (32, 1, 1 << 16, 1 << 15), False)):
        assert ops.supports(ctx.mul_mat(ctx.tensor("f16", a), ctx.tensor("f32", b))) == fits
    for n_tokens, fits in ((1 << 20, True), (1 << 22, False)):
        node = ctx.mul_mat_id(ctx.tensor("f16", (32, 4, 8)), ctx.tensor("f32", (32, 1, n_tokens)),
                              ctx.tensor("i32", (2, n_tokens)))
        assert ops.supports(node) == fits
    w, x = ctx.tensor("q4_K", (512, 4)), ctx.tensor("f32", (256, 1))
    assert ops.supports(ctx.mul_mat(ctx.view_2d(w, 256, 4, w.nb[1], 144), x))
    assert not ops.supports(ctx.mul_mat(ctx.view_2d(w, 256, 3, w.nb[1], 142), x))       # loads of 16 bytes


def test_grids_stay_within_what_a_device_takes(ctx):
    node = ctx.mul_mat(ctx.tensor("f16", (8, 3, 1)), ctx.tensor("f32", (8, 2, 70_000)))
    for launch in cupy_kernels.placed_launches(ctx, [node]).launches:
        assert launch.grid[0] < 2**31 and max(launch.grid[1:]) <= 65535 and prod(launch.grid) > 0


@pytest.mark.parametrize("columns", [1, 3, 12])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_columns_between_the_multiples_that_wide_loads_need(ctx, kind, columns):
    w, whole = ctx.tensor(kind, (64, 9)), ctx.tensor("f32", (68, columns))
    check(ctx, ctx.mul_mat(w, ctx.view_2d(whole, 64, columns, whole.nb[1], 4)))


def test_the_most_columns_are_those_of_the_most_tiles():
    """A grid has at most 65,535 blocks in its second direction, of 64 columns each."""
    ctx = gs.Context()
    w = ctx.tensor("f32", (32, 4))
    for columns, fits in ((65535 * 64, True), (65535 * 64 + 1, False)):
        assert ops.supports(ctx.mul_mat(w, ctx.tensor("f32", (32, columns)))) == fits
