"""dup cpy cont cast set repeat concat pad and views."""

import numpy as np
import pytest
from op_results import FLOATS, QUANTISED, assert_close, compute, random, stored, width

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(3)
PLAIN = {
    "f32": np.float32,
    "f16": np.float16,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}


def values_of(type: str, *ne: int) -> np.ndarray:
    if type in PLAIN and type.startswith("i"):
        return RNG.integers(-100, 100, ne[::-1]).astype(PLAIN[type])
    return random(RNG, *ne)


@pytest.mark.parametrize("type", [*PLAIN, "bf16", *QUANTISED])
def test_dup_and_cont_keep_every_bit(ctx, type):
    n = 2 * width(32, type)
    a = ctx.tensor(type, (n, 3, 2))
    x = values_of(type, n, 3, 2)
    held = stored(x, type) if type not in PLAIN else x.astype(PLAIN[type])
    assert np.array_equal(compute(ctx, ctx.dup(a), {a: x}), held)
    swapped = ctx.permute(a, 0, 2, 1, 3)
    assert np.array_equal(compute(ctx, ctx.cont(swapped), {a: x}), held.swapaxes(0, 1))
    rows = ctx.view_2d(a, n // 2, 2, 2 * a.nb[1])
    assert np.array_equal(compute(ctx, ctx.cont(rows), {a: x}), held.reshape(6, n)[0:4:2, : n // 2])
    assert np.array_equal(compute(ctx, ctx.cpy(a, ctx.tensor(type, (n, 6))), {a: x}), held.reshape(6, n))
    if type in PLAIN:
        turned = ctx.transpose(a)
        assert np.array_equal(compute(ctx, ctx.cont(turned), {a: x}), held.swapaxes(1, 2))
        flat = ctx.cpy(turned, ctx.tensor(type, (6 * n,)))
        assert np.array_equal(compute(ctx, flat, {a: x}), held.swapaxes(1, 2).reshape(-1))


@pytest.mark.parametrize("to", ["f32", "f16", "q8_0"])
def test_four_extents_become_four_others(ctx, to):
    n = width(8, to)
    a, b = ctx.tensor("f32", (n, 3, 5, 2)), ctx.tensor(to, (3 * n, 1, 2, 5))
    x = random(RNG, n, 3, 5, 2)
    for source, held in ((a, x), (ctx.permute(a, 0, 1, 3, 2), x.swapaxes(0, 1))):
        want = stored(held.reshape(5, 2, 1, 3 * n), to)
        assert np.array_equal(compute(ctx, ctx.cpy(source, b), {a: x}), want)
    if to == "f32":
        wide = ctx.tensor(to, (4 * n, 1, 2, 5))
        part = ctx.view_4d(wide, 3 * n, 1, 2, 5, *wide.nb[1:])          # with gaps: the source is seen otherwise
        done = ctx.cont(ctx.cpy(a, part))
        assert np.array_equal(compute(ctx, done, {a: x}), x.reshape(5, 2, 1, 3 * n))


def test_cont_of_a_transposed_with_other_extents(ctx):
    a = ctx.tensor("f32", (4, 6))
    x = random(RNG, 4, 6)
    assert np.array_equal(compute(ctx, ctx.cont(ctx.transpose(a), (3, 8)), {a: x}), x.T.reshape(8, 3))


CASTS = [pytest.param(source, to, marks=() if source == to or "f32" in (source, to) else pytest.mark.soak)
         for source in FLOATS + QUANTISED for to in FLOATS + QUANTISED]
"""Values of one type become those of another by way of f32."""


@pytest.mark.parametrize(("source", "to"), CASTS)
def test_cast_between_floats_and_blocks(source, to):
    ctx, n = gs.Context(), width(64, source, to)
    a = ctx.tensor(source, (n, 3, 2))
    x = random(RNG, n, 3, 2)
    held = stored(x, source)
    got = compute(ctx, ctx.cast(ctx.permute(a, 0, 2, 1, 3), to), {a: x})
    want = held if source == to else stored(held.astype(np.float32), to)
    assert np.array_equal(got, want.swapaxes(0, 1))


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_of_turned_floats_and_of_special_values(ctx, source, to):
    a, b = ctx.tensor(source, (37, 21, 4)), ctx.tensor(source, (9,))
    x, y = random(RNG, 37, 21, 4), np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e30, 3e38, 0.6249])
    want = stored(stored(x, source).astype(np.float32), to).swapaxes(1, 2)
    assert np.array_equal(compute(ctx, ctx.cast(ctx.permute(a, 1, 0, 2, 3), to), {a: x}), want)
    got = compute(ctx, ctx.cast(b, to), {b: y}, ggml=False)     # equal to the oracle's
    assert np.isnan(got[4]) and got[:4].tolist() == [0, 0, np.inf, -np.inf]


def test_cast_between_f32_and_i32(ctx):
    a, b = ctx.tensor("f32", (4,)), ctx.tensor("i32", (2,))
    assert compute(ctx, ctx.cast(a, "i32"), {a: np.float32([1.9, -1.9, 0, 7])}).tolist() == [1, -1, 0, 7]
    assert compute(ctx, ctx.cast(b, "f32"), {b: np.int32([3, -4])}).tolist() == [3, -4]


@pytest.mark.parametrize("to", ["f32", "f16", "bf16", "q8_0"])
def test_cpy_into_a_cache_of_another_shape(ctx, to):
    a, cache = ctx.tensor("f32", (32, 2, 3)), ctx.tensor(to, (512,))
    x, c = random(RNG, 32, 2, 3), random(RNG, 512)
    size = gs.Type[to.upper()]
    part = ctx.view_1d(cache, 192, 64 // size.block_size * size.type_size)
    for source, want in ((a, x), (ctx.permute(a, 0, 2, 1, 3), x.swapaxes(0, 1))):
        done = ctx.cpy(source, part)
        whole = ctx.view_1d(done, 192)
        got = compute(ctx, whole, {a: x, cache: c})
        assert np.array_equal(got, stored(want.reshape(-1), to))


def test_cpy_leaves_the_rest_of_its_target_alone(ctx):
    a, b = ctx.tensor("f32", (3, 2)), ctx.tensor("f32", (4, 4))
    target = ctx.view_2d(b, 2, 3, b.nb[1], 4)
    x, y = random(RNG, 3, 2), random(RNG, 4, 4)
    out = ctx.cpy(a, target)
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        a.set(x)
        b.set(y)
        backend.graph_compute(gs.Graph(out))
        want = y.copy()
        want[0:3, 1:3] = x.reshape(3, 2)
        assert np.array_equal(b.numpy(), want)


def test_cpy_between_overlapping_rows_of_one_tensor(ctx):
    """A cache that moves its rows down: read everything, then write."""
    a = ctx.tensor("f32", (400, 300))
    x = random(RNG, 400, 300)
    out = ctx.cpy(ctx.view_2d(a, 400, 299, a.nb[1]), ctx.view_2d(a, 400, 299, a.nb[1], a.nb[1]))
    assert np.array_equal(compute(ctx, out, {a: x}), x[:-1])


@pytest.mark.parametrize("ne", [(0,), (1,), (3, 0, 2)])
def test_copies_of_nothing_and_of_one(ctx, ne):
    a = ctx.tensor("f32", ne)
    x = random(RNG, *ne)
    for out in (ctx.dup(a), ctx.cont(a), ctx.cast(a, "f16"), ctx.repeat(a, a), ctx.concat(a, a, 0)):
        assert compute(ctx, out, {a: x}).size == out.n_elements


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("type", ["f32", "i32", "f16"])
def test_set(ctx, type, inplace):
    a, b = ctx.tensor(type, (6, 5)), ctx.tensor(type, (3, 2))
    x, y = values_of(type, 6, 5), values_of(type, 3, 2)
    out = ctx.set(a, b, 2 * a.nb[1], a.nbytes, a.nbytes, a.nb[1] + 2 * a.nb[0], inplace)
    want = x.astype(PLAIN[type])
    want[1:4:2, 2:5] = y
    assert np.array_equal(compute(ctx, out, {a: x, b: y}), want)


@pytest.mark.parametrize("type", ["f32", "f16", "i32", "i16"])
def test_repeat(ctx, type):
    a, like = ctx.tensor(type, (3, 2, 1, 2)), ctx.tensor("f32", (6, 2, 5, 4))
    x = values_of(type, 3, 2, 1, 2)
    assert np.array_equal(compute(ctx, ctx.repeat(a, like), {a: x}), np.tile(x.astype(PLAIN[type]), (2, 5, 1, 2)))
    b, swapped = ctx.tensor(type, (2, 3)), ctx.tensor("f32", (3, 4))
    y = values_of(type, 2, 3)
    assert np.array_equal(
        compute(ctx, ctx.repeat(ctx.transpose(b), swapped), {b: y}), np.tile(y.T.astype(PLAIN[type]), (2, 1))
    )


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("type", ["f32", "f16", "i8", "q8_0"])
def test_concat(ctx, type, dim):
    ne = [32, 2, 3, 2]
    other = list(ne)
    other[dim] = 64 if dim == 0 else 5
    a, b = ctx.tensor(type, ne), ctx.tensor(type, other)
    x, y = values_of(type, *ne), values_of(type, *other)
    held = [stored(v, type) if type == "q8_0" else v.astype(PLAIN[type]) for v in (x, y)]
    got = compute(ctx, ctx.concat(a, b, dim), {a: x, b: y})
    assert np.array_equal(got, np.concatenate(held, axis=3 - dim))


def test_concat_of_strided(ctx):
    a, b = ctx.tensor("f32", (4, 3)), ctx.tensor("f32", (3, 2))
    x, y = random(RNG, 4, 3), random(RNG, 3, 2)
    got = compute(ctx, ctx.concat(ctx.transpose(a), b, 1), {a: x, b: y})
    assert np.array_equal(got, np.concatenate([x.T, y]))


def test_pad(ctx):
    a = ctx.tensor("f32", (3, 2, 2))
    x = random(RNG, 3, 2, 2)
    want = np.pad(x, [(0, 0), (0, 1), (0, 2)])[None]
    assert_close(compute(ctx, ctx.pad(a, 2, 1, 0, 1), {a: x}), np.concatenate([want, 0 * want]))
    both = ctx.restore("PAD", "f32", (6, 4, 2, 1), (4, 24, 96, 192), (a,), op_params=(1, 2, 2, 0))
    assert_close(compute(ctx, both, {a: x}), np.pad(x, [(0, 0), (2, 0), (1, 2)]))


def test_views_compute_nothing_and_see_their_root(ctx):
    a = ctx.tensor("f32", (4, 6))
    x = random(RNG, 4, 6)
    doubled = ctx.add(a, a)
    views = {
        ctx.reshape(doubled, 8, 3): (2 * x).reshape(3, 8),
        ctx.transpose(doubled): 2 * x.T,
        ctx.permute(doubled, 1, 0, 2, 3): 2 * x.T,
        ctx.view_2d(doubled, 2, 3, doubled.nb[1], 4): 2 * x[:3, 1:3],
    }
    for view, want in views.items():
        assert np.array_equal(compute(ctx, view, {a: x}), want)
