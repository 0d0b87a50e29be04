"""Masks, soft_max, rope and flash attention against f64 formulas."""

import math

import numpy as np
import op_results
import pytest
from op_results import FLOATS, QUANTISED, assert_close, compute, random, stored, width

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(5)
INF = np.inf


def slopes_of(n_head: int, max_bias: float) -> list[float]:
    """Alibi, written as the paper's halving sequence."""
    if not max_bias:
        return [1.0] * n_head
    whole = 2 ** int(math.log2(n_head))
    ratio = 2 ** (-max_bias / whole)
    first = [ratio ** (i + 1) for i in range(whole)]
    return first + [math.sqrt(ratio) ** (2 * i + 1) for i in range(n_head - whole)]


def causal(rng: np.random.Generator, n_kv: int, n_rows: int, *outer: int) -> np.ndarray:
    """A mask of extents ne = (n_kv, n_rows, *outer) with a bias in the cells that it leaves."""
    mask = random(rng, n_kv, n_rows, *outer)
    mask[..., np.arange(n_kv) > np.arange(n_rows)[:, None] + max(0, n_kv - n_rows)] = -INF
    return mask


@pytest.mark.parametrize("n_past", [0, 2, 9])
def test_diag_mask(ctx, n_past):
    a = ctx.tensor("f32", (5, 3, 2))
    x = random(RNG, 5, 3, 2)
    future = np.triu(np.ones((3, 5), bool), n_past + 1)
    for op, value in ((ctx.diag_mask_inf, -INF), (ctx.diag_mask_zero, 0)):
        assert np.array_equal(compute(ctx, op(a, n_past), {a: x}), np.where(future, value, x).astype(np.float32))


def soft_max(x, mask=None, scale=1.0, max_bias=0.0, sinks=None):
    x = x.astype(float) * scale
    for i3 in range(x.shape[0]):
        for h, slope in enumerate(slopes_of(x.shape[1], max_bias)):
            if mask is not None:
                m = mask[i3 % mask.shape[0], h % mask.shape[1], : x.shape[2]].astype(float)
                x[i3, h] += slope * m
            e = np.exp(x[i3, h])
            x[i3, h] = e / (e.sum(-1, keepdims=True) + (0 if sinks is None else math.exp(sinks[h])))
    return x


@pytest.mark.spread("type max_bias", "with_sinks max_bias", "type kernels", "max_bias kernels")
@pytest.mark.parametrize("type", [None, "f32", "f16"])
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_max(type, max_bias, with_sinks):
    if type is None and max_bias:
        pytest.skip("alibi needs a mask")
    for ne, mask_ne in (
        ((7, 3, 6, 2), (7, 4, 1, 1)), ((7, 3, 6, 4), (7, 3, 3, 2)), ((9, 1, 3, 1), (9, 1, 3, 1)),
        ((1, 1, 1, 1), (1, 1, 1, 1)), ((4, 0, 1, 1), (4, 2, 1, 1)), ((600, 40, 5, 1), (600, 40, 1, 1)),
        ((64, 7, 4, 2), (64, 8, 1, 1)), ((1000, 33, 2, 1), (1000, 34, 1, 1)),
    ):
        ctx = gs.Context()
        a, sinks = ctx.tensor("f32", ne), ctx.tensor("f32", (ne[2],))
        mask = None if type is None else ctx.tensor(type, mask_ne)
        x, s = random(RNG, *ne), random(RNG, ne[2])
        m = None if mask is None else causal(RNG, *mask_ne)
        values = {a: x, sinks: s, **({} if mask is None else {mask: m})}
        out = ctx.soft_max(a, mask, 0.7, max_bias, sinks if with_sinks else None)
        want = soft_max(x, None if m is None else stored(m, type), 0.7, max_bias, s if with_sinks else None)
        assert_close(compute(ctx, out, values), want)


def test_soft_max_of_large_values_does_not_overflow_and_masked_rows_are_nan(ctx):
    a = ctx.tensor("f32", (3, 2))
    x = np.float32([[1e4, 1e4, -1e4], [-INF, -INF, -INF]])
    assert_close(compute(ctx, ctx.soft_max(a), {a: x}), [[0.5, 0.5, 0], [np.nan] * 3])
    mask = ctx.tensor("f32", (3, 2))
    assert np.isnan(compute(ctx, ctx.soft_max(a, mask), {a: np.ones((2, 3)), mask: np.full((2, 3), -INF)})).all()


def rotated(
    x, positions, n_dims, neox, base=10000.0, scale=1.0, factors=None, ext=0.0, attn=1.0, fast=32.0, slow=1.0,
    n_ctx_orig=0,
):
    """Rope pair by pair with complex numbers."""
    out = x.astype(float).copy()
    magnitude = attn
    low = high = 0.0
    if ext:

        def corr(rot):
            return n_dims * math.log(n_ctx_orig / (rot * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0, math.floor(corr(fast))), min(n_dims - 1, math.ceil(corr(slow)))
        magnitude *= 1 + 0.1 * math.log(1 / scale)
    for t, pos in enumerate(positions):
        for i in range(n_dims // 2):
            angle = pos * base ** (-2 * i / n_dims) / (1 if factors is None else factors[i])
            theta = scale * angle
            if ext:
                ramp = (1 - min(1, max(0, (i - low) / max(0.001, high - low)))) * ext
                theta = theta * (1 - ramp) + angle * ramp
            p, q = (i, i + n_dims // 2) if neox else (2 * i, 2 * i + 1)
            z = (x[:, t, :, p] + 1j * x[:, t, :, q].astype(float)) * magnitude * np.exp(1j * theta)
            out[:, t, :, p], out[:, t, :, q] = z.real, z.imag
    return out


@pytest.mark.spread("mode type", "mode kernels", "type kernels")
@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize("type", ["f32", "f16"])
def test_rope(mode, type):
    """Of parts of rows and whole rows, of few and many positions, of none."""
    for ne, n_dims in (((12, 3, 5, 2), 0), ((12, 3, 5, 2), 2), ((12, 3, 5, 2), 8), ((12, 3, 5, 2), 12),
                       ((64, 3, 5, 1), 64), ((80, 2, 300, 1), 32), ((96, 4, 0, 1), 64)):
        ctx = gs.Context()
        a, pos = ctx.tensor(type, ne), ctx.tensor("i32", ne[2:3])
        x, p = random(RNG, *ne), RNG.integers(0, 4000, ne[2]).astype(np.int32)
        got = compute(ctx, ctx.rope(a, pos, n_dims, mode), {a: x, pos: p})
        assert_close(got, rotated(stored(x, type), p, n_dims, mode == "neox"), type)


@pytest.mark.parametrize("mode", ["normal", "neox"])
def test_rope_with_factors_and_yarn(ctx, mode):
    a, pos, ff = ctx.tensor("f32", (64, 2, 3)), ctx.tensor("i32", (3,)), ctx.tensor("f32", (40,))
    x, p, f = random(RNG, 64, 2, 3), np.int32([5, 0, 99]), random(RNG, 40, low=1, high=4)
    numbers = {
        "freq_base": 5e5,
        "freq_scale": 0.25,
        "ext_factor": 1.0,
        "attn_factor": 1.1,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }
    out = ctx.rope(a, pos, 64, mode, ff, 4096, **numbers)
    want = rotated(x[None], p, 64, mode == "neox", 5e5, 0.25, f, 1.0, 1.1, 16.0, 2.0, 4096)
    assert_close(compute(ctx, out, {a: x, pos: p, ff: f}), want)
    plain = ctx.rope(a, pos, 64, mode, ff, freq_base=5e5, freq_scale=0.5)
    assert_close(compute(ctx, plain, {a: x, pos: p, ff: f}), rotated(x[None], p, 64, mode == "neox", 5e5, 0.5, f))


def test_rope_of_a_view_and_in_place(ctx):
    a, pos = ctx.tensor("f32", (20, 4, 300)), ctx.tensor("i32", (300,))
    x, p = random(RNG, 20, 4, 300), np.arange(300, dtype=np.int32)
    view = ctx.view_3d(a, 12, 2, 300, 2 * a.nb[1], a.nb[2], 16)
    want = rotated(x[None, :, ::2, 4:16], p, 8, True)
    assert_close(compute(ctx, ctx.rope(view, pos, 8, "neox"), {a: x, pos: p}), want)
    assert_close(compute(ctx, ctx.rope(view, pos, 8, "neox", inplace=True), {a: x, pos: p}), want)


def attention(q, k, v, mask=None, scale=1.0, max_bias=0.0, softcap=0.0, sinks=None):
    """[n_batch, n_rows, n_head, d_v], one head and row at a time."""
    n_batch, n_head, n_rows, _ = q.shape
    out = np.zeros((n_batch, n_rows, n_head, v.shape[3]))
    for b in range(n_batch):
        for h, slope in enumerate(slopes_of(n_head, max_bias)):
            kv = h * k.shape[1] // n_head
            for r in range(n_rows):
                m = (
                    np.zeros(k.shape[2])
                    if mask is None
                    else mask[b % mask.shape[0], h % mask.shape[1], r].astype(float)
                )
                cells = m > -INF
                s = k[b, kv, cells] @ q[b, h, r] * scale
                if softcap:
                    s = softcap * np.tanh(s / softcap)
                w = np.exp(s + slope * m[cells])
                total = w.sum() + (0 if sinks is None else math.exp(sinks[h]))
                out[b, r, h] = w @ v[b, kv, cells] / total if cells.any() else 0
    return out


EXPECTED: dict[tuple, np.ndarray] = {}
"""What the arguments of `assert_attention` give, computed once for all instruction sets."""


def assert_attention(type: str, size: tuple[int, ...], mask: str | None = None, outer: tuple[int, ...] = (),
                     max_bias: float = 0.0, softcap: float = 0.0, with_sinks: bool = False) -> None:
    """`size`: elements of a key and of a value, heads, key heads, rows, keys.  The mask is of type `mask`; `outer`: its
    extents behind the first, where there is not one mask for all heads and batches."""
    d, d_v, n_head, n_kv_head, n_rows, n_kv = size
    ctx = gs.Context()
    q, sinks = ctx.tensor("f32", (d, n_rows, n_head, 2)), ctx.tensor("f32", (n_head,))
    k, v = ctx.tensor(type, (d, n_kv, n_kv_head, 2)), ctx.tensor(type, (d_v, n_kv, n_kv_head, 2))
    rng = np.random.default_rng(size)
    x, y, z, s = (random(rng, *t.ne) for t in (q, k, v, sinks))
    values = {q: x, k: y, v: z, sinks: s[0, 0, 0]}
    masking = held = None
    if mask is not None:
        masking = ctx.tensor(mask, (n_kv, *(outer or (n_rows,))))
        values[masking] = held = causal(rng, *masking.ne).astype({"f16": np.float16, "f32": np.float32}[mask])
    options = (d**-0.5, max_bias, softcap)
    out = ctx.flash_attn_ext(q, k, v, masking, *options, sinks if with_sinks else None)
    key = type, size, mask, outer, max_bias, softcap, with_sinks
    if key not in EXPECTED:
        EXPECTED[key] = attention(x, stored(y, type), stored(z, type), held, *options,
                                  s[0, 0, 0] if with_sinks else None)
    assert_close(compute(ctx, out, values), EXPECTED[key])


@pytest.mark.spread("type options", "type kernels", "options kernels")
@pytest.mark.parametrize("type", FLOATS + QUANTISED)
@pytest.mark.parametrize("options", [
    {}, {"mask": "f32", "outer": (3, 1, 2)}, {"mask": "f32", "max_bias": 8.0}, {"softcap": 3.0}, {"with_sinks": True},
    {"mask": "f16", "outer": (4, 3, 1), "max_bias": 4.0, "softcap": 2.0, "with_sinks": True},
], ids=["plain", "mask", "alibi", "softcap", "sinks", "all"])
def test_flash_attn_ext(type, options):
    assert_attention(type, (width(32, type), width(64, type), 6, 2, 3, 11), **options)


SIZES = [
    (64, 64, 4, 4, 1, 32), (64, 64, 8, 2, 1, 700), (128, 128, 2, 1, 3, 300), (40, 24, 6, 3, 1, 257),
    (64, 64, 4, 2, 37, 96), (128, 64, 1, 1, 130, 200), (24, 40, 3, 3, 9, 65), (16, 16, 2, 1, 70, 1),
    (576, 512, 8, 1, 2, 33), (64, 96, 3, 1, 1, 300), (64, 64, 7, 1, 1, 260), (72, 40, 10, 2, 1, 70),
]


@pytest.mark.spread("size type", "size kernels", "type kernels")
@pytest.mark.parametrize("type", [*FLOATS, "q8_0"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_flash_attention_of_few_and_of_many_rows(size, type):
    if type == "q8_0" and (size[0] % 32 or size[1] % 32):
        pytest.skip("rows of whole blocks")
    assert_attention(type, size)
    for max_bias, softcap, with_sinks in ((0.0, 0.0, False), (8.0, 0.0, True), (0.0, 5.0, True)):
        assert_attention(type, size, "f16", (), max_bias, softcap, with_sinks)


def of_sequences(rng: np.random.Generator, n_kv: int, n_rows: int, *outer: int) -> np.ndarray:
    """A mask of rows of one sequence each: all see the first cells, each then a run of its own and, of the last cells,
    every n_rows-th.  Row 1 sees nothing.  The last two cells are not used."""
    mask = np.full((*outer[::-1], n_rows, n_kv), -INF, np.float32)
    first, last = n_kv // 4, n_kv // 2
    for row in range(n_rows):
        run = first + row * (last - first) // n_rows
        seen = [*range(first), *range(run, run + (last - first) // n_rows), *range(last + row, n_kv - 2, n_rows)]
        mask[..., row, seen] = random(rng, len(seen))
    mask[..., 1, :] = -INF
    return mask


OF_SEQUENCES = [(64, 64, 2, 2, 4, 300), (64, 64, 6, 2, 2, 70), (64, 64, 6, 2, 5, 520), (64, 64, 4, 4, 16, 700),
                (40, 24, 7, 1, 20, 203), (16, 16, 1, 1, 90, 400), (128, 96, 8, 2, 33, 190), (32, 32, 4, 2, 9, 6000)]


@pytest.mark.spread("size kernels", "type kernels")
@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", OF_SEQUENCES, ids=str)
def test_rows_of_several_sequences_attend_to_their_own_cells(size, type):
    """Cells that no row sees, or others alone, may hold inf and NaN."""
    d, d_v, n_head, n_kv_head, n_rows, n_kv = size
    rng = np.random.default_rng(size)
    large, lost = (1e30, 1e30) if type == "f32" else (INF, np.nan)      # ggml multiplies values of f32 by weights of 0
    for dtype, heads, max_bias in ((np.float16, 1, 0.0), (np.float32, n_head, 0.0), (np.float16, 1, 8.0)):
        ctx = gs.Context()
        q, sinks = ctx.tensor("f32", (d, n_rows, n_head)), ctx.tensor("f32", (n_head,))
        k, v = ctx.tensor(type, (d, n_kv, n_kv_head)), ctx.tensor(type, (d_v, n_kv, n_kv_head))
        mask = ctx.tensor({np.float16: "f16", np.float32: "f32"}[dtype], (n_kv, n_rows, heads))
        x, y, z, s = (random(rng, *t.ne) for t in (q, k, v, sinks))
        m = of_sequences(rng, n_kv, n_rows, heads).astype(dtype)
        y[..., -2:, :], z[..., -1, :] = lost, large
        held = [stored(array, type) for array in (y, z)]
        want = attention(x, *held, m[None] if m.ndim == 3 else m, 0.2, max_bias, sinks=s[0, 0, 0])
        z[..., n_kv - 3, :] = large
        (seen,) = np.nonzero(m.reshape(-1, n_rows, n_kv)[0, :, n_kv - 3] > -INF)
        out = ctx.flash_attn_ext(q, k, v, mask, 0.2, max_bias, sinks=sinks)
        got = compute(ctx, out, {q: x, k: y, v: z, mask: m, sinks: s[0, 0, 0]}).reshape(n_rows, n_head, d_v)
        others = np.setdiff1d(np.arange(n_rows), seen)
        assert len(others) >= n_rows - 1
        assert_close(got[others], want.reshape(n_rows, n_head, d_v)[others])
        assert (np.abs(got[seen]) > 1e20).all()


@pytest.mark.spread("size kernels", "mask kernels", "type kernels")
@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("mask", ["f16", "f32"])
@pytest.mark.parametrize("size", [(64, 64, 4, 2, 70, 200), (64, 96, 2, 2, 150, 150), (32, 32, 3, 1, 40, 300),
                                  (128, 64, 2, 1, 8, 130), (16, 16, 1, 1, 127, 128)], ids=str)
def test_rows_of_a_prompt_attend_to_the_cells_up_to_their_own(size, mask, type):
    """Most blocks of cells are seen by all rows, with masks of 0, or by none; other rows than those that see a NaN, or
    a value of inf, do not have it."""
    d, d_v, n_head, n_kv_head, n_rows, n_kv = size
    rng, ctx, past = np.random.default_rng(size), gs.Context(), n_kv - n_rows
    q, masking = ctx.tensor("f32", (d, n_rows, n_head)), ctx.tensor(mask, (n_kv, n_rows))
    k, v = ctx.tensor(type, (d, n_kv, n_kv_head)), ctx.tensor(type, (d_v, n_kv, n_kv_head))
    x, y, z = (random(rng, *t.ne) for t in (q, k, v))
    dtype = {"f16": np.float16, "f32": np.float32}[mask]
    m = np.where(np.arange(n_kv) <= past + np.arange(n_rows)[:, None], 0, -INF).astype(dtype)
    out = ctx.flash_attn_ext(q, k, v, masking, 0.2)
    held = [stored(array, type) for array in (y, z)]
    want = attention(x, *held, m[None, None], 0.2).reshape(n_rows, -1)
    values = {q: x, k: y, v: z, masking: m}
    assert_close(compute(ctx, out, values).reshape(n_rows, -1), want)
    if type == "q8_0":
        return
    for lost, cell, wrong in ((y, past + 6, np.nan), (z, past + 5, INF), (y, 0, np.nan)):
        before, lost[..., cell, :] = lost[..., cell, :].copy(), wrong
        got, seen = compute(ctx, out, values).reshape(n_rows, -1), max(cell - past, 0)
        lost[..., cell, :] = before
        assert_close(got[:seen], want[:seen])
        assert not np.isfinite(got[seen:]).any()


@pytest.mark.parametrize("mask", ["f16", "f32"])
def test_each_head_and_batch_may_have_a_mask_of_its_own(ctx, mask):
    """Of blocks of cells that one head or batch does not see another sees all, with masks of 0."""
    d, n_head, n_rows, n_kv = 32, 3, 70, 140
    rng = np.random.default_rng(1)
    q, k = ctx.tensor("f32", (d, n_rows, n_head, 2)), ctx.tensor("f16", (d, n_kv, n_head, 2))
    masking = ctx.tensor(mask, (n_kv, n_rows, n_head, 2))
    x, y = random(rng, *q.ne), random(rng, *k.ne)
    m = np.zeros((2, n_head, n_rows, n_kv), {"f16": np.float16, "f32": np.float32}[mask])
    m[0, 1], m[1, 2, :, :128], m[1, 0, :, 64:] = -INF, -INF, -INF
    held = stored(y, "f16")
    got = compute(ctx, ctx.flash_attn_ext(q, k, k, masking, 0.3), {q: x, k: y, masking: m})
    assert_close(got, attention(x, held, held, m, 0.3))


def test_flash_attention_over_a_permuted_cache(ctx):
    d, n_head, n_kv_head, n_kv, n_rows = 8, 4, 2, 6, 3
    q, cache = ctx.tensor("f32", (d, n_head, n_rows)), ctx.tensor("f16", (d * n_kv_head, 10))
    view = ctx.permute(ctx.view_3d(cache, d, n_kv_head, n_kv, d * 2, cache.nb[1]), 0, 2, 1, 3)
    x, c = random(RNG, d, n_head, n_rows), random(RNG, d * n_kv_head, 10)
    held = stored(c, "f16")[:n_kv].reshape(n_kv, n_kv_head, d).swapaxes(0, 1)[None]
    out = ctx.flash_attn_ext(ctx.permute(q, 0, 2, 1, 3), view, view, None, 0.3)
    assert_close(compute(ctx, out, {q: x, cache: c}), attention(x.swapaxes(0, 1)[None], held, held, None, 0.3))


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("d", "n_rows", "n_kv"), [(4, 3, 5), (64, 1, 90), (64, 3, 90), (64, 20, 90)])
def test_flash_attention_never_looks_at_masked_cells(ctx, d, n_rows, n_kv, type):
    """Unused cells of a KV cache hold anything; ggml's result does not depend on them."""
    q, k, v = ctx.tensor("f32", (d, n_rows, 2)), ctx.tensor(type, (d, n_kv, 1)), ctx.tensor(type, (d, n_kv, 1))
    mask, sinks = ctx.tensor("f32", (n_kv, n_rows)), ctx.tensor("f32", (2,))
    x, y, z = random(RNG, d, n_rows, 2), random(RNG, d, n_kv), random(RNG, d, n_kv)
    m = np.zeros((n_rows, n_kv), np.float32)
    m[:, n_kv // 2 + 1 :] = -INF
    m[1:2] = -INF  # a row that sees nothing
    y[-2], z[-2], y[-1], z[-1] = np.nan, np.nan, INF, -INF
    held = [stored(array, type)[None, None] for array in (y, z)]
    values = {q: x, k: y, v: z, mask: m, sinks: np.float32([0.3, -1])}
    for use in (None, sinks):
        got = compute(ctx, ctx.flash_attn_ext(q, k, v, mask, 0.5, sinks=use), values)
        want = attention(x[None], *held, m[None, None], 0.5, sinks=None if use is None else [0.3, -1])
        assert_close(got, want)
        assert not got.reshape(n_rows, 2, d)[1:2].any()


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n_head", range(2, 8))
def test_a_head_does_not_look_at_cells_that_only_others_see(ctx, n_head, type):
    """Heads that share a key head are computed together: infinite values of a cell reach only the heads that see it."""
    d, n_kv = 64, 39
    q, k, v = ctx.tensor("f32", (d, 1, n_head)), ctx.tensor(type, (d, n_kv, 1)), ctx.tensor(type, (d, n_kv, 1))
    mask = ctx.tensor("f32", (n_kv, 1, n_head))
    x, y, z = random(RNG, d, 1, n_head), random(RNG, d, n_kv), random(RNG, d, n_kv)
    held = [stored(array, type)[None, None] for array in (y, z)]
    m = np.zeros((n_head, 1, n_kv), np.float32)
    m[: n_head - 1, :, 5] = m[0, :, 6:11] = -INF
    want = attention(x.reshape(1, n_head, 1, d), *held, m[None], 0.5)
    z[5] = INF
    got = compute(ctx, ctx.flash_attn_ext(q, k, v, mask, 0.5), {q: x, k: y, v: z, mask: m}).reshape(n_head, d)
    assert_close(got[: n_head - 1], want.reshape(n_head, d)[: n_head - 1])
    assert np.isposinf(got[n_head - 1]).all()


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("d", "d_v"), [(0, 64), (0, 3), (64, 0)])
def test_keys_or_values_without_elements_are_attended_to(d, d_v, type):
    """Keys without elements have equal scores: the result is the mean of the values."""
    ctx = gs.Context()
    q, k, v = (ctx.tensor(kind, ne, input=True)
               for kind, ne in (("f32", (d, 1, 2)), (type, (d, 9, 1)), (type, (d_v, 9, 1))))
    out = ctx.flash_attn_ext(q, k, v, None, 0.5)
    z = random(RNG, d_v, 9)
    with gs.CpuBackend(1, kernels=op_results.KERNELS) as backend:
        scheduler = gs.Scheduler([backend])
        scheduler.alloc(graph := gs.Graph(out))
        for tensor, array in ((q, random(RNG, d, 1, 2)), (k, random(RNG, d, 9)), (v, z)):
            if array.size:
                tensor.set(array)
        scheduler.compute(graph)
        assert out.ne == (d_v, 2, 1, 1)
        if d_v:
            assert_close(out.numpy().reshape(2, d_v), np.broadcast_to(stored(z, type).mean(0), (2, d_v)))


def test_keys_without_elements_and_masks_that_leave_few_of_them(ctx):
    """One block of cells is seen by all rows; of the others each row sees a few."""
    d_v, n_rows, n_kv = 16, 64, 300
    q, k, v, masking = (ctx.tensor("f32", ne, input=True)
                        for ne in ((0, n_rows, 1), (0, n_kv, 1), (d_v, n_kv, 1), (n_kv, n_rows)))
    out = ctx.flash_attn_ext(q, k, v, masking, 1.0)
    rng = np.random.default_rng(2)
    z, m = random(rng, d_v, n_kv), np.where(rng.random((n_rows, n_kv)) < 0.02, 0, -INF).astype(np.float32)
    m[:, :64] = 0
    with gs.CpuBackend(1, kernels=op_results.KERNELS) as backend:
        scheduler = gs.Scheduler([backend])
        scheduler.alloc(graph := gs.Graph(out))
        v.set(z)
        masking.set(m)
        scheduler.compute(graph)
        weights = np.exp(m.astype(np.float64))
        assert_close(out.numpy().reshape(n_rows, d_v), weights @ z / weights.sum(1, keepdims=True))


@pytest.mark.spread("size type", "size kernels")
@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("size", [(64, 64, 3, 3), (128, 64, 4, 1), (64, 128, 2, 7), (64, 96, 3, 2), (72, 64, 3, 1),
                                  (64, 72, 2, 5)], ids=str)
def test_a_token_attends_to_all_heads_of_a_row_and_to_one_with_the_same_bits(size, type):
    """A thread that has all heads of a chunk of keys reads a cache by rows, others by heads."""
    d, d_v, n_kv_head, group = size
    n_kv, n_head = 1109, n_kv_head * group
    rng = np.random.default_rng(size)
    for heads, masked, n_rows in ((0, 0, 1), (1, 0.0, 1), (1, 0.3, 1), (1, 0.8, 1), (n_head, 0.3, 1), (1, 0.3, 2)):
        ctx = gs.Context()
        q, k, v = (ctx.tensor(kind, ne) for kind, ne in (
            ("f32", (d, n_rows, n_head)), (type, (d, n_kv_head, n_kv)), (type, (d_v, n_kv_head, n_kv))))
        x, y, z = (random(rng, *t.ne) for t in (q, k, v))
        values, mask, m = {q: x, k: y, v: z}, None, None
        if heads:
            mask, m = ctx.tensor("f16", (n_kv, n_rows, heads)), random(rng, n_kv, n_rows, heads, 1)
            m[rng.random(m.shape) < masked] = m[..., 2] = m[..., 300:530] = -INF
            values[mask] = m = m.astype(np.float16)
            y[:, 2], z[:, 2], y[:, 400], z[:, 400] = np.nan, np.nan, INF, -INF
        out = ctx.flash_attn_ext(q, ctx.permute(k, 0, 2, 1, 3), ctx.permute(v, 0, 2, 1, 3), mask, 0.2)
        held = (stored(array, type).swapaxes(1, 2) for array in (y, z))
        assert_close(compute(ctx, out, values), attention(x, *held, m, 0.2))


def test_flash_attention_of_no_rows_and_no_cells(ctx):
    q, none = ctx.tensor("f32", (4, 3, 2)), ctx.tensor("f32", (4, 0, 2))
    assert not compute(ctx, ctx.flash_attn_ext(q, none, none), {}).any()
    k = ctx.tensor("f32", (4, 3, 2))
    assert compute(ctx, ctx.flash_attn_ext(none, k, k), {}).size == 0


@pytest.mark.parametrize(("ne", "extents", "mask", "is_supported"), [
    ((8, 4, 5, 1), (8, 7, 4, 1), (7, 5, 1, 1), True),
    ((8, 5, 4, 1), (8, 7, 4, 1), (7, 5, 1, 1), False),      # the result has tokens and heads the other way round
    ((16, 4, 5, 1), (16, 7, 4, 1), (7, 5, 1, 1), False),    # keys are longer than queries
    ((8, 4, 5, 1), (8, 7, 4, 1), (6, 5, 1, 1), False)])     # a cell without a mask
def test_attention_whose_extents_do_not_fit_is_not_supported(ctx, ne, extents, mask, is_supported):
    q = ctx.tensor("f32", (8, 5, 4))
    k, v = ctx.tensor("f32", extents), ctx.tensor("f32", extents)
    fitting = ctx.flash_attn_ext(q, ctx.tensor("f32", (8, 7, 4)), ctx.tensor("f32", (8, 7, 4)),
                                 ctx.tensor("f16", (7, 5)), scale=0.5)
    nb = ctx.tensor("f32", ne).nb
    node = ctx.restore("FLASH_ATTN_EXT", "f32", ne, nb, (q, k, v, ctx.tensor("f16", mask)),
                       op_params=fitting.op_params)
    with gs.CpuBackend(1) as backend:
        assert backend.supports_op(fitting) and backend.supports_op(node) == is_supported
