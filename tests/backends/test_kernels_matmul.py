"""Matrix products against f64 products of the same activations: every type, instruction set, shape and layout.

The compiled kernels multiply quantised weights with activations of 8 bits; `eight_bits` rounds as they do, so that only
the order of f32 additions remains to be compared.  The oracle rounds nothing.  `compute` asserts the same bits for 1, 2
and 3 threads.
"""

import ctypes
import itertools
import mmap
import sys
from functools import cache, partial

import numpy as np
import op_results
import pytest
from forks import in_child
from instruction_sets import ISAS
from matrix_products import BLOCKS, FLOATS, RNG, assert_near, block_size, eight_bits, normal, product, weights
from op_results import compute, place

import ggml_sched as gs
from ggml_sched.graph import quants

without_ggml = partial(compute, ggml=False)
"""ggml's results for values outside any model's range may differ."""
def met(type: str, x: np.ndarray) -> np.ndarray:
    """Activations as the kernels multiply them with weights of a type."""
    return eight_bits(x) if type in BLOCKS and op_results.KERNELS == "compiled" else x.astype(np.float64)


def assert_product(got: np.ndarray, w: np.ndarray, x: np.ndarray) -> None:
    assert_near(got, *product(w, x))


def run(type: str, held: np.ndarray, a_ne: tuple[int, ...], x: np.ndarray, ggml: bool = False) -> np.ndarray:
    ctx = gs.Context()
    a, b = ctx.tensor(type, a_ne), ctx.tensor("f32", x.shape[::-1])
    return compute(ctx, ctx.mul_mat(a, b), {a: held, b: x}, ggml)


@pytest.mark.spread("type kernels", "n kernels", "type n")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 40])
@pytest.mark.parametrize("type", FLOATS + BLOCKS)
def test_every_type_with_few_and_many_columns(kernels, type, n):
    for blocks, m in ((1, 5), (9, 37), (3, 70)):
        k = blocks * block_size(type) if type in BLOCKS else blocks * 15 + 1
        held, w = weights(type, m, k)
        x = normal(n, k)
        assert_product(run(type, held, (k, m), x, ggml=True), w, met(type, x))


@pytest.mark.spread("type isa", "type n", "n isa")
@pytest.mark.parametrize("type", [type for type in BLOCKS if block_size(type) == 32])
@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_any_number_of_blocks(isa, type, n):
    """Kernels for few columns take eight blocks at a time; at the end of a row fewer, or some a second time."""
    for blocks, m in itertools.product((*range(1, 18), 33, 38), (3, 16)):
        held, w = weights(type, m, 32 * blocks)
        x = normal(n, 32 * blocks)
        assert_product(run(type, held, (32 * blocks, m), x), w, met(type, x))


@pytest.mark.spread("type isa")
@pytest.mark.parametrize("type", [type for type in BLOCKS if block_size(type) == 32])
def test_rows_that_are_read_as_one(isa, type):
    """With one column, eight blocks may belong to two rows: also where parts begin, and where rows do not adjoin."""
    for blocks, m in ((13, 1208), (18, 1208), (34, 24)):
        k = 32 * blocks
        held, w = weights(type, m, k)
        x = normal(1, k)
        assert_product(run(type, held, (k, m), x), w, met(type, x))
        ctx = gs.Context()
        a, b = ctx.tensor(type, (k, m)), ctx.tensor("f32", (k, 1))
        every_other = ctx.view_2d(a, k, m // 2, 2 * a.nb[1], 0)
        assert_product(compute(ctx, ctx.mul_mat(every_other, b), {a: held, b: x}, False), w[::2], met(type, x))


@pytest.mark.spread("type isa", "blocks isa")
@pytest.mark.parametrize("type", [type for type in BLOCKS if block_size(type) == 32])
@pytest.mark.parametrize("blocks", [9, 34])
def test_products_that_join_rows_and_others_share_no_columns(isa, type, blocks):
    k = 32 * blocks
    for rows in ((8, 5), (5, 8)):
        ctx = gs.Context()
        b = ctx.tensor("f32", (k, 1))
        pairs = [(ctx.tensor(type, (k, m)), weights(type, m, k)) for m in rows]
        x = normal(1, k)
        out = ctx.concat(*(ctx.mul_mat(a, b) for a, _ in pairs), 0)
        got = compute(ctx, out, {b: x, **{a: held for a, (held, _) in pairs}}, False)
        assert_product(got, np.concatenate([w for _, (_, w) in pairs]), met(type, x))


@pytest.mark.spread("type isa", "n_tokens isa")
@pytest.mark.parametrize("type", [type for type in BLOCKS if block_size(type) == 32])
@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_experts_whose_rows_are_read_as_one(isa, type, n_tokens):
    """Where rows are joined, with one or two tokens, an expert may have two columns, for which they are not."""
    k, m, n_expert = 32 * 9, 40, 5
    held, w = weights(type, n_expert, m, k)
    x = normal(n_tokens, 1, k)
    names = np.stack([np.arange(n_tokens) % 2, np.full(n_tokens, 2)], 1).astype(np.int32)
    names[0, 0] = 4
    ctx = gs.Context()
    a, b = ctx.tensor(type, (k, m, n_expert)), ctx.tensor("f32", (k, 1, n_tokens))
    ids = ctx.tensor("i32", (2, n_tokens))
    got = compute(ctx, ctx.mul_mat_id(a, b, ids), {a: held, b: x, ids: names}).reshape(n_tokens, 2, m)
    for token, used in itertools.product(range(n_tokens), range(2)):
        assert_product(got[token, used], w[names[token, used]], met(type, x)[token, 0])


def test_products_of_many_columns_need_no_memory_for_joined_rows(ctx):
    """577 rows of 18 blocks cannot be joined."""
    sizes = []
    for m in (576, 577):
        out = ctx.mul_mat(ctx.tensor("q4_0", (576, m)), ctx.tensor("f32", (576, 512)))
        with gs.CpuBackend(1) as backend:
            place(ctx, backend)
            sizes.append(backend.graph_plan_create(gs.Graph(out)).work_size)
    assert sizes[0] == sizes[1]


@pytest.mark.spread("type isa", "wrong isa")
@pytest.mark.parametrize("type", [type for type in BLOCKS if block_size(type) == 32 and type != "mxfp4"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_wrong_scales_stay_in_the_row_that_has_them(isa, type, wrong):
    """Of rows that are read as one, too: the first block of a row may lie beside the last one of the row before."""
    k, m = 32 * 9, 16
    held, x = weights(type, m, k)[0], normal(1, k)
    for at, words in ((0, 1), (-1, 1), (0, 2), (-1, 2)):
        if words == 2 and type not in ("q4_1", "q5_1"):     # the minimum is the second word
            continue
        bad = held.copy()
        bad.reshape(m, 9, -1)[5, at, 2 * words - 2:2 * words] = np.float16([wrong]).view(np.uint8)
        got = run(type, bad, (k, m), x).reshape(m)
        assert not np.isfinite(got[5])
        assert np.isfinite(np.delete(got, 5)).all()


@pytest.mark.parametrize(("type", "at"), [
    ("q2_K", 80), ("q2_K", 82), ("q3_K", 108), ("q4_K", 0), ("q4_K", 2), ("q5_K", 0), ("q5_K", 2), ("q6_K", 208),
    ("iq4_xs", 0)])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_wrong_scale_of_256_elements_stays_in_its_row(isa, type, at, wrong):
    """Of an odd number of rows, too: several may share a vector."""
    k = 512
    for m in (1, 2, 3, 16):
        held = weights(type, m, k)[0].copy()
        row = m * 2 // 3
        held.reshape(m, 2, -1)[row, 1, at:at + 2] = np.float16([wrong]).view(np.uint8)
        got = run(type, held, (k, m), normal(1, k)).reshape(m)
        assert not np.isfinite(got[row])
        assert np.isfinite(np.delete(got, row)).all()


@pytest.mark.parametrize("n", [1, 3, 17])
@pytest.mark.parametrize("type", ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K"])
def test_scales_of_blocks_come_before_sums_that_overflow_without_them(isa, type, n):
    """A power of two in the activations is the same power in the result."""
    large = np.float32(2.0**118)
    held = quants.quantize(np.abs(weights(type, 5, 768)[1]) / 512, gs.Type[type.upper()])
    x = np.abs(normal(n, 768))
    assert np.array_equal(run(type, held, (768, 5), x * large), run(type, held, (768, 5), x) * large)


@pytest.mark.parametrize("type", BLOCKS)
def test_a_single_row_leaves_what_follows_its_result(isa, type):
    k, memory = 2 * max(block_size(type), 256), np.full(16, 7, np.float32)
    ctx = gs.Context()
    a, b = ctx.tensor(type, (k, 1)), ctx.tensor("f32", (k, 1))
    out = ctx.mul_mat(a, b)
    (held, w), x = weights(type, 1, k), normal(1, k)
    with gs.CpuBackend(1) as backend:
        for tensor in (a, b):
            gs.bind_resident(tensor, backend.alloc_buffer(tensor.nbytes), 0)
        gs.bind_resident(out, backend.buffer_from_ptr(memory.view(np.uint8)), 0)
        a.set(held)
        b.set(x)
        backend.graph_compute(gs.Graph(out))
    assert_product(memory[:1].reshape(1, 1), w, met(type, x))
    assert (memory[1:] == 7).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.parametrize("type", ["q4_0", "q4_1", "q4_K", "mxfp4"])
def test_no_kernel_of_one_column_reads_before_the_first_row_or_behind_the_last(isa, type):
    reads_within(type, 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.spread("type isa", "type n", "n isa")
@pytest.mark.parametrize("n", [1, 3, 7, 9, 14, 17])
@pytest.mark.parametrize("type", FLOATS + BLOCKS)
def test_no_kernel_reads_before_the_first_row_or_behind_the_last(isa, type, n):
    reads_within(type, n)


def reads_within(type: str, n: int) -> None:
    """The weights begin, or end, where memory begins or ends that may be read; of 21 rows a vector has 16, or fewer."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    reached = np.frombuffer(mmap.mmap(-1, page), np.int64)      # written by the child
    parts = [(13, 1208)] if type in BLOCKS and block_size(type) == 32 and n == 1 else []     # parts of the rows

    def products() -> None:
        for blocks, m in (*itertools.product((1, 3, 5, 7, 8, 11, 34), (1, 5, 21, 24)), *parts):
            ctx, k = gs.Context(), blocks * block_size(type) if type in BLOCKS else 15 * blocks
            a, b = ctx.tensor(type, (k, m)), ctx.tensor("f32", (k, n))
            out = ctx.mul_mat(a, b)
            size = -(-a.nbytes // page) * page
            memory = np.frombuffer(mmap.mmap(-1, size + 2 * page), np.uint8)
            for at in (0, page + size):
                assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + at), ctypes.c_size_t(page), 0) == 0
            for offset in {0, size - a.nbytes}:
                with gs.CpuBackend(1) as backend:
                    gs.bind_resident(a, backend.buffer_from_ptr(memory[page:page + size]), offset)
                    for tensor in (b, out):
                        gs.bind_resident(tensor, backend.alloc_buffer(tensor.nbytes), 0)
                    a.set(weights(type, m, k)[0])
                    b.set(normal(n, k))
                    reached[:3] = blocks, m, offset
                    backend.graph_compute(gs.Graph(out))

    assert in_child(products) == 0, f"{reached[0]} blocks, {reached[1]} rows at {reached[2]} bytes"


@cache  # every instruction set has the same products
def long_rows(type: str, k: int, n: int, kernels: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Activations for weights of 130 rows, their product and its scale, for what `kernels` multiply."""
    x = (np.random.default_rng(n).standard_normal((n, k)) + 0.3).astype(np.float32)
    return x, *product(weights(type, 130, k)[1], met(type, x))


SLOW = ("numpy", "portable")
"""They take a second for 250 columns of 4608; a float and blocks go both their ways."""


# 250 columns are more than the 240 of one part, 513 are three parts.
@pytest.mark.parametrize("columns", [(1, 8, 13, 250), pytest.param((513,), marks=pytest.mark.soak)],
                         ids=["two parts", "three parts"])
@pytest.mark.parametrize(("kernels", "type"), [
    pytest.param(kernels, type, marks=pytest.mark.soak if kernels in SLOW and type != "f32" else ())
    for kernels in ("numpy", *ISAS) for type in ("f32", "f16", "q8_0", "q4_0", "q4_1", "q4_K", "q6_K", "q2_K")],
    indirect=["kernels"])
def test_rows_longer_than_a_repacked_panel_and_many_parts(kernels, type, columns):
    k = 4608 if type in BLOCKS else 2051
    for n in columns:
        x, want, scale = long_rows(type, k, n, op_results.KERNELS)
        assert_near(run(type, weights(type, 130, k)[0], (k, 130), x), want, scale)


@pytest.mark.spread("shape kernels", "shape type", "type kernels")
@pytest.mark.parametrize("type", ["f32", "bf16", "q5_1", "q3_K"])
@pytest.mark.parametrize("shape", [(2, 3, 2, 3, 1), (2, 1, 6, 1, 4), (1, 2, 1, 4, 3), (2, 2, 4, 6, 5), (1, 3, 2, 9, 2)])
def test_one_matrix_meets_all_the_batches_that_share_it(kernels, type, shape):
    a3, a2, b3, b2, n = shape
    k = 2 * max(block_size(type), 24)
    held, w = weights(type, a3, a2, 33, k)
    x = normal(b3, b2, n, k)
    assert_product(run(type, held, (k, 33, a2, a3), x, ggml=True), w, met(type, x))


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q6_K"])
@pytest.mark.parametrize("n", [1, 4, 17])
def test_views_of_a_cache_and_permuted_activations(ctx, kernels, type, n):
    heads, kv_heads, n_kv, n_ctx = 6, 2, 35, 50
    d = block_size(type) if type in BLOCKS else 40
    held, w = weights(type, n_ctx, kv_heads, d)
    x = normal(n, heads, d)
    cache, q = ctx.tensor(type, (d * kv_heads, n_ctx)), ctx.tensor("f32", (d, heads, n))
    head = cache.nb[1] // kv_heads
    keys = ctx.permute(ctx.view_3d(cache, d, kv_heads, n_kv, head, cache.nb[1], 7 * cache.nb[1]), 0, 2, 1, 3)
    got = compute(ctx, ctx.mul_mat(keys, ctx.permute(q, 0, 2, 1, 3)), {cache: held.reshape(n_ctx, -1), q: x})
    w = w.reshape(n_ctx, kv_heads, d)[7:7 + n_kv].swapaxes(0, 1)
    assert_product(got, w, met(type, x.swapaxes(0, 1)))


@pytest.mark.parametrize("type", FLOATS)
def test_values_that_lie_transposed_in_their_cache(ctx, kernels, type):
    """Rows of one channel over the positions."""
    d, heads, kv_heads, n_kv, n_ctx, n = 8, 6, 2, 5, 9, 3
    held, w = weights(type, kv_heads * d, n_ctx)
    x = normal(heads, n, n_kv)
    cache, scores = ctx.tensor(type, (n_ctx, d * kv_heads)), ctx.tensor("f32", (n_kv, n, heads))
    values = ctx.view_3d(cache, n_kv, d, kv_heads, cache.nb[1], d * cache.nb[1])
    got = compute(ctx, ctx.mul_mat(values, scores), {cache: held, scores: x})
    assert_product(got, w[:, :n_kv].reshape(kv_heads, d, n_kv), x)


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
def test_products_of_nothing(kernels, type):
    for a_ne, b_ne in (((32, 0), (32, 4)), ((32, 5), (32, 0)), ((0, 5), (0, 4))):
        ctx = gs.Context()
        assert not compute(ctx, ctx.mul_mat(ctx.tensor(type, a_ne), ctx.tensor("f32", b_ne)), {}).any()
    ctx = gs.Context()
    a, b, ids = ctx.tensor(type, (32, 5, 3)), ctx.tensor("f32", (32, 1, 0)), ctx.tensor("i32", (2, 0))
    assert compute(ctx, ctx.mul_mat_id(a, b, ids), {}).size == 0


@pytest.mark.parametrize("type", [*FLOATS, "q4_0"])
@pytest.mark.parametrize("type_b", FLOATS)
def test_activations_of_any_type_and_stride(ctx, kernels, type, type_b):
    k, m, n = 96, 19, 11
    held, w = weights(type, m, k)
    _, x = weights(type_b, k, n)
    a, b = ctx.tensor(type, (k, m)), ctx.tensor(type_b, (n, k))
    got = compute(ctx, ctx.mul_mat(a, ctx.transpose(b)), {a: held, b: x})
    assert_product(got, w, met(type, x.T))


@pytest.mark.spread("type kernels", "type n_tokens", "kernels n_tokens")
@pytest.mark.parametrize("type", FLOATS + BLOCKS)
@pytest.mark.parametrize(("n_used", "slots", "n_tokens"), [(2, 1, 1), (3, 3, 5), (2, 1, 40)])
def test_tokens_meet_the_experts_that_they_chose(ctx, kernels, type, n_used, slots, n_tokens):
    k, m, n_expert = block_size(type) if type in BLOCKS else 40, 37, 5
    held, w = weights(type, n_expert, m, k)
    x = normal(n_tokens, slots, k)
    names = RNG.integers(0, n_expert - 1, (n_tokens, n_used)).astype(np.int32)  # the last one is never chosen
    a, b = ctx.tensor(type, (k, m, n_expert)), ctx.tensor("f32", (k, slots, n_tokens))
    ids = ctx.tensor("i32", (n_used, n_tokens))
    got = compute(ctx, ctx.mul_mat_id(a, b, ids), {a: held, b: x, ids: names}).reshape(n_tokens, n_used, m)
    y = met(type, x)
    for token in range(n_tokens):
        for used in range(n_used):
            assert_product(got[token, used], w[names[token, used]], y[token, used % slots])


SCALES = {"q2_K": 80, "q3_K": 108, "q6_K": 208}
"""At which byte of a block its scale (f16) is, where a block does not begin with it."""


@pytest.mark.spread("type isa", "type wrong", "type n", "n isa")
@pytest.mark.parametrize("type", FLOATS + BLOCKS)
@pytest.mark.parametrize("n", [1, 3, 7, 13, 17])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_stays_where_it_is(isa, type, n, wrong):
    k, m = 2 * max(block_size(type), 16), 18
    held, w = weights(type, m, k)
    x = normal(n, k)
    x[n - 1, 5] = wrong
    got = run(type, held, (k, m), x).reshape(n, m)
    assert not np.isfinite(got[n - 1]).any()
    assert np.isfinite(got[:n - 1]).all()
    if type in BLOCKS and type != "mxfp4":
        held, at = held.copy(), SCALES.get(type, 0)
        held.reshape(m, -1)[3, at:at + 2] = np.float16([wrong]).view(np.uint8)
        got = run(type, held, (k, m), normal(n, k)).reshape(n, m)
        assert not np.isfinite(got[:, 3]).any()
        assert np.isfinite(np.delete(got, 3, 1)).all()


@pytest.mark.spread("size isa", "size type", "size n", "type isa", "n isa")
@pytest.mark.parametrize("type", ["q8_0", "q4_1", "q2_K", "q3_K", "q4_K", "q6_K", "iq4_xs"])
@pytest.mark.parametrize("n", [1, 3, 13, 17])
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-38, 1e-35, 1e-33, 1e-30, 1e30, 1e35])
def test_activations_of_any_size(isa, type, n, size):
    k, m = 2 * block_size(type), 18
    held, w = weights(type, m, k)
    x = normal(n, k) * np.float32(size)
    got = run(type, held, (k, m), x).reshape(n, m)
    want = met(type, x) @ w.T.astype(np.float64)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.spread("type isa", "type n", "n isa")
@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.parametrize("n", [1, 40])
def test_eight_bits_are_close_to_exact_products(isa, type, n):
    k, m = 4 * max(block_size(type), 64), 50
    held, w = weights(type, m, k)
    x = RNG.standard_normal((n, k)).astype(np.float32)
    want = x.astype(np.float64) @ w.T
    got = run(type, held, (k, m), x).reshape(n, m)
    assert ((got - want) ** 2).sum() <= 1e-4 * (want**2).sum()


LEVELS = {"q4_0": (2, 18), "q4_1": (4, 20), "q5_0": (2, 22), "q5_1": (4, 24), "q8_0": (2, 34), "q2_K": (16, 80),
          "q3_K": (0, 96), "q4_K": (16, 144), "q5_K": (16, 176), "q6_K": (0, 192), "iq4_nl": (2, 18),
          "iq4_xs": (8, 136), "mxfp4": (1, 17)}
"""In which bytes of a block the levels are."""
INTEGER_SCALES = {"q2_K": (0, 16), "q3_K": (96, 108), "q4_K": (4, 16), "q5_K": (4, 16), "q6_K": (192, 208),
                  "iq4_xs": (2, 8)}
"""The same for integer scales."""


@pytest.mark.parametrize("type", BLOCKS)
def test_sums_of_the_largest_levels_do_not_overflow(isa, type):
    """All levels and integer scales are the largest or the smallest, and so are all activations."""
    k, m, (begin, end) = 2 * max(block_size(type), 256), 24, LEVELS[type]
    held = weights(type, m, k)[0].copy()
    blocks = held.reshape(m, k // block_size(type), -1)
    scales = blocks[..., slice(*INTEGER_SCALES.get(type, (0, 0)))]
    for first, byte in enumerate((0, 255, 128, 0x77)):  # 128: the smallest of q8_0; 0x77: the largest of mxfp4
        blocks[first::4, :, begin:end] = byte
        rows = len(scales[first::4])
        scales[first::4] = np.resize(np.uint8([0, 255, 127, 128, 0, 255]), rows)[:, None, None]
    w = quants.dequantize(held, gs.Type[type.upper()])
    for n in (1, 4, 8, 13, 17):
        x = np.float32([1, -1])[np.arange(n) % 2, None] * np.ones((n, k), np.float32)
        got, want = run(type, held, (k, m), x).reshape(n, m), x.astype(np.float64) @ w.T
        assert np.abs(got - want).max() <= 1e-5 * np.abs(w).sum(1).max()


@pytest.mark.parametrize(("exponents", "size"), [((0, 1, 2, 3), 1e30), ((126, 127, 128), 1), ((250, 251, 252), 1e-6)],
                         ids=["subnormal", "near 1", "large"])
def test_scales_that_are_exponents_alone(isa, exponents, size):
    """The least two are subnormal numbers; rows end within eight blocks, or behind them."""
    for blocks, n in ((3, 1), (11, 1), (11, 3), (11, 9)):
        k, m = 32 * blocks, 2 * len(exponents)
        held = weights("mxfp4", m, k)[0].copy()
        held.reshape(m, blocks, 17)[..., 0] = np.resize(np.uint8(exponents), m)[:, None]
        w, x = quants.dequantize(held, gs.Type.MXFP4).astype(np.float64), normal(n, k) * np.float32(size)
        want, most = eight_bits(x) @ w.T, np.abs(x).astype(np.float64) @ np.abs(w).T
        assert (np.abs(run("mxfp4", held, (k, m), x).reshape(n, m) - want) <= 1e-5 * most).all()


def test_an_expert_that_no_token_chose_is_not_read(ctx, isa):
    """Its weights are NaN, and stay out of every result."""
    held = weights("q8_0", 3, 8, 32)[0].copy()
    held[1, :, :, :2] = np.float16([np.nan]).view(np.uint8)
    x, names = normal(6, 1, 32), np.int32([[0], [2], [0], [2], [2], [0]])
    a, b, ids = ctx.tensor("q8_0", (32, 8, 3)), ctx.tensor("f32", (32, 1, 6)), ctx.tensor("i32", (1, 6))
    got = without_ggml(ctx, ctx.mul_mat_id(a, b, ids), {a: held, b: x, ids: names})
    assert np.isfinite(got).all()


def test_there_may_be_more_experts_than_work_for_them(ctx, isa):
    """Their counts need more memory than the products; computed twice, because it is not cleared between."""
    n_expert, n_tokens = 1 << 18, 3
    held, w = weights("f32", n_expert, 2, 4)
    x, names = normal(n_tokens, 1, 4), np.int32([[n_expert - 1, 7], [0, n_expert - 1], [5, 6]])
    a, b = ctx.tensor("f32", (4, 2, n_expert)), ctx.tensor("f32", (4, 1, n_tokens))
    ids = ctx.tensor("i32", (2, n_tokens))
    out = ctx.mul_mat_id(a, b, ids)
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        for tensor, values in ((a, held), (b, x), (ids, names)):
            tensor.set(values)
        plan = backend.graph_plan_create(gs.Graph(out))
        for _ in range(2):
            backend.graph_plan_compute(plan)
            got = out.numpy()
            for token in range(n_tokens):
                for used in range(2):
                    assert_product(got[token, used], w[names[token, used]], x[token, 0])


@pytest.mark.spread("type isa", "type n", "n isa")
@pytest.mark.parametrize("type", FLOATS + BLOCKS)
@pytest.mark.parametrize("n", [1, 3, 9])
def test_what_a_product_before_has_left_stays_out(ctx, isa, type, n):
    """The work memory is full of NaN, and the rows do not fill it."""
    k = 201 if type in FLOATS else 3 * block_size(type)
    long, (held, w), x = weights("f32", 5, 1024)[0], weights(type, 5, k), normal(n, k)
    first = ctx.mul_mat(ctx.tensor("f32", (1024, 5), "long"), ctx.tensor("f32", (1024, n), "nans"))
    second = ctx.mul_mat(ctx.tensor(type, (k, 5), "held"), ctx.tensor("f32", (k, n), "x"))
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        for tensor, values in zip((*first.src, *second.src), (long, np.full((n, 1024), np.nan), held, x), strict=True):
            tensor.set(values)
        backend.graph_compute(gs.Graph(first, second))
        assert np.isnan(first.numpy()).all()
        assert_product(second.numpy(), w, met(type, x))
