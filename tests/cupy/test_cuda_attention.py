"""Flash attention on the device, in f32: sizes and types that take different code paths."""

import cupy_kernels
import numpy as np
import pytest
from op_results import assert_close, random

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.ops import attention

RNG = np.random.default_rng(11)


def causal(n_kv: int, n_rows: int, used: int) -> np.ndarray:
    """A mask with biases: row r sees the cells up to used - n_rows + r."""
    mask = random(RNG, n_kv, n_rows)
    mask[np.arange(n_kv)[None, :] > np.arange(n_rows)[:, None] + used - n_rows] = -np.inf
    return mask


def check_node(ctx: gs.Context, out: gs.Tensor, values: dict) -> np.ndarray:
    """A node of random values, but for `values`, against the oracle, whose result is returned."""
    given = cupy_kernels.leaves(ctx, RNG) | values
    want = cupy_kernels.oracle(ctx, out, given)
    assert_close(cupy_kernels.compute(ctx, out, given, tensor=False), want)
    return want


def check(kind: str, d: int, d_v: int, *, rows: int = 1, heads: tuple[int, int] = (2, 1), n_kv: int = 40,
          used: int | None = None, batch: int = 1, **options) -> None:
    """One node over a cache, against the oracle."""
    ctx = gs.Context()
    q = ctx.tensor("f32", (d, rows, heads[0], batch))
    k, v = (ctx.tensor(kind, (n, n_kv, heads[1], batch)) for n in (d, d_v))
    mask, sinks = ctx.tensor("f16", (n_kv, rows)), ctx.tensor("f32", (heads[0],))
    out = ctx.flash_attn_ext(q, k, v, mask, d**-0.5, sinks=sinks if options.pop("sinks", False) else None, **options)
    check_node(ctx, out, {mask: causal(n_kv, rows, used or n_kv).astype(np.float16)})


@pytest.mark.parametrize("d", [32, 40, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(d):
    check("f16", d, d)
    check("f32", d, d, rows=3, heads=(4, 2))


def test_head_sizes_of_compressed_caches():
    check("f16", 576, 512, heads=(5, 1), n_kv=33)
    check("f16", 192, 128, rows=2)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16"])
def test_caches_of_other_types(kind):
    check(kind, 64, 128, rows=5, heads=(6, 2), n_kv=70)
    check(kind, 128, 64, heads=(1, 1), n_kv=70)


@pytest.mark.parametrize("rows, heads", [(1, (1, 1)), (1, (8, 2)), (9, (8, 2))])
def test_long_caches_are_split_and_joined(ctx, rows, heads):
    n_kv = 600
    k = ctx.tensor("f16", (64, n_kv, heads[1]))
    node = ctx.flash_attn_ext(ctx.tensor("f32", (64, rows, heads[0])), k, k)
    assert attention._shares(node, 132)[0] > 1
    check("f16", 64, 64, rows=rows, heads=heads, n_kv=n_kv)
    # The last shares hold only masked cells.
    check("f16", 64, 64, rows=rows, heads=heads, n_kv=n_kv, used=200, sinks=True, max_bias=4.0, logit_softcap=5.0)


@pytest.mark.parametrize("rows, heads", [(1, (8, 8)), (1, (8, 2)), (2, (8, 1)), (1, (5, 1))])
@pytest.mark.parametrize("n_kv", [64, 65, 200, 256])
def test_short_caches_are_split_where_heads_are_fewer_than_multiprocessors(ctx, n_kv, rows, heads):
    k = ctx.tensor("f16", (64, n_kv, heads[1]))
    node = ctx.flash_attn_ext(ctx.tensor("f32", (64, rows, heads[0])), k, k)
    assert (attention._shares(node, 132)[0] > 1) == (n_kv >= 128)
    assert attention._shares(node, 1)[0] == 1
    check("f16", 64, 64, rows=rows, heads=heads, n_kv=n_kv, sinks=True)


def test_one_launch_computes_a_split_cache_and_a_short_one_fills_the_device(ctx):
    """llama-2-7b on 132 multiprocessors: 32 heads, 256 cells."""
    k = ctx.tensor("f16", (128, 256, 32))
    launches = cupy_kernels.placed_launches(ctx, [ctx.flash_attn_ext(ctx.tensor("f32", (128, 1, 32)), k, k)]).launches
    assert [(launch.kernel, launch.grid) for launch in launches] == [("attention.half_128_1", (1, 4, 32))]


@pytest.mark.parametrize("n_multiprocessors", [1, 7, 132, 1000])
@pytest.mark.parametrize("cells", [1, 63, 64, 65, 128, 256, 257, 383, 384, 385, 4096, 100_003])
def test_shares_cover_every_cell_once(ctx, cells, n_multiprocessors):
    for heads in ((8, 2), (1, 1), (32, 32), (64, 1)):
        k = ctx.tensor("f16", (64, cells, heads[1]))
        node = ctx.flash_attn_ext(ctx.tensor("f32", (64, 1, heads[0])), k, k)
        shares, share, chunk = attention._shares(node, n_multiprocessors)
        assert share * (shares - 1) < cells <= share * shares
        assert shares <= attention.MAX_SHARES and chunk in attention.CHUNKS
        assert shares == 1 or share % (attention.WARPS * chunk) == 0


def test_heads_of_a_group_read_a_cell_once(ctx):
    """Eight query heads of a key head are columns of one block."""
    k = ctx.tensor("f16", (128, 4096, 8))
    for heads, blocks in ((64, 8), (32, 8), (128, 16)):
        launch, = cupy_kernels.placed_launches(
            ctx, [ctx.flash_attn_ext(ctx.tensor("f32", (128, 1, heads)), k, k)], tensor=False).launches
        assert launch.grid[0] * launch.grid[2] == blocks


def test_batches_and_unused_cells_of_anything():
    check("f16", 32, 32, rows=2, heads=(4, 2), batch=3, n_kv=300, used=17)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_what_is_not_finite_in_a_cell_reaches_the_rows_that_see_it(ctx, kind, value):
    q, k, v = ctx.tensor("f32", (32, 3, 2)), ctx.tensor(kind, (32, 300, 1)), ctx.tensor(kind, (32, 300, 1))
    mask = ctx.tensor("f16", (300, 3))
    out = ctx.flash_attn_ext(q, k, v, mask, 0.2)
    keys = random(RNG, *k.ne)
    keys.reshape(300, 32)[299, 5] = value         # the last row alone sees the last cell
    want = check_node(ctx, out, {mask: causal(300, 3, 300).astype(np.float16), k: keys})
    assert np.isfinite(want.reshape(3, 2, 32)[:2]).all()


def test_work_memory_is_what_is_said(ctx):
    for kind, n_kv in (("f16", 4096), ("q5_1", 300), ("f16", 100)):
        k = ctx.tensor(kind, (64, n_kv, 2))
        node = ctx.flash_attn_ext(ctx.tensor("f32", (64, 1, 8)), k, k)
        taken = cupy_kernels.placed_launches(ctx, [node], n_multiprocessors=256, tensor=False).work_size
        assert taken <= ops.OPS[node.op].work(node)


@pytest.mark.parametrize(("shift", "d"), [(2, 64), (1, 64), (4, 64), (8, 60), (4, 58)])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_caches_between_the_multiples_that_wide_loads_need(ctx, kind, shift, d):
    q, mask = ctx.tensor("f32", (d, 3, 2)), ctx.tensor("f16", (40, 3))
    wholes = [ctx.tensor(kind, (80, 40)) for _ in "kv"]
    k, v = (ctx.view_3d(t, d, 40, 1, t.nb[1], t.nb[2], shift * t.type.type_size) for t in wholes)
    out = ctx.flash_attn_ext(q, k, v, mask, d**-0.5)
    values = {t: random(RNG, *t.ne) for t in wholes}
    for t in wholes:
        values[t][..., shift + d :] = np.nan          # not to be read
    check_node(ctx, out, values | {mask: causal(40, 3, 40).astype(np.float16)})
