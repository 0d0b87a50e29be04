"""Flash attention of many columns over caches in f16, on tensor cores: against the oracle, and where it is not used.

Queries and weights are rounded to f16: the error that the contract of backends allows results in f32, an nmse of 1e-6,
is a few times what that gives, and a thousandth of what one wrong cell of these would.
"""

from contextlib import nullcontext

import cupy_kernels
import numpy as np
import pytest
from op_results import random

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.device import DeviceError
from ggml_sched.backends.cupy.ops import attention

RNG = np.random.default_rng(12)
ALLOWED = 1e-6


class Node:
    """Attention of `rows` queries of heads[0] heads over `n_kv` cells of heads[1] heads, with random values.

    `hidden`: the mask hides cells behind those that a row sees, and a tenth of the others; `mask` is its type, None: no
    mask; `mask_heads`, `mask_batches`: its outer extents.
    """

    def __init__(self, d: int = 64, d_v: int | None = None, *, rows: int = 20, heads: tuple[int, int] = (2, 2),
                 n_kv: int = 100, batch: int = 1, mask: str | None = "f16", mask_heads: int = 1, mask_batches: int = 1,
                 sinks: bool = False, used: int | None = None, **options) -> None:
        self.ctx = ctx = gs.Context()
        self.q = ctx.tensor("f32", (d, rows, heads[0], batch))
        self.k = ctx.tensor("f16", (d, n_kv, heads[1], batch))
        self.v = ctx.tensor("f16", (d_v or d, n_kv, heads[1], batch))
        self.mask = None if mask is None else ctx.tensor(mask, (n_kv, rows, mask_heads, mask_batches))
        sinks_of = ctx.tensor("f32", (heads[0],)) if sinks else None
        self.out = ctx.flash_attn_ext(self.q, self.k, self.v, self.mask, d**-0.5, sinks=sinks_of, **options)
        self.values = cupy_kernels.leaves(ctx, RNG)
        if self.mask is not None:
            bias = random(RNG, *self.mask.ne)
            bias[RNG.random(bias.shape) < 0.1] = -np.inf
            ends = (n_kv if used is None else used) - rows + np.arange(rows)[:, None]
            bias[..., np.arange(n_kv)[None] > ends] = -np.inf
            self.values[self.mask] = bias.astype(np.float16 if mask == "f16" else np.float32)

    def kernel(self, **options) -> str:
        launch, = cupy_kernels.placed_launches(self.ctx, [self.out], **options).launches
        return launch.kernel

    def check(self, allowed: float = ALLOWED, **options) -> np.ndarray:
        """Compute it on tensor cores, and compare with the oracle, whose result is returned."""
        assert self.kernel(**options).startswith("attention_mma.")
        want = cupy_kernels.oracle(self.ctx, self.out, self.values)
        got = cupy_kernels.compute(self.ctx, self.out, self.values, **options)
        finite = np.isfinite(want)
        assert np.array_equal(got[~finite], want[~finite], equal_nan=True)
        assert cupy_kernels.error(got[finite], want[finite]) < allowed
        return want


# -- extents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [8, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_head_sizes(d):
    Node(d, n_kv=70).check()


@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (128, 64), (64, 128), (40, 200), (576, 512), (320, 256), (64, 512)])
def test_heads_whose_keys_and_values_differ(d, d_v):
    Node(d, d_v, rows=9, n_kv=70).check()


@pytest.mark.parametrize(("rows", "heads", "kernel"), [
    (9, (1, 1), "128_16"), (16, (2, 2), "128_16"), (17, (2, 2), "128_16"), (4, (6, 2), "128_16"),
    (1, (12, 1), "128_16"), (32, (1, 1), "128_16"), (33, (1, 1), "128_64"), (64, (1, 1), "128_64"),
    (65, (1, 1), "128_64"), (13, (10, 2), "128_64"), (43, (6, 2), "128_64")])
def test_columns(rows, heads, kernel):
    node = Node(72, rows=rows, heads=heads, n_kv=96)
    assert node.kernel() == f"attention_mma.tiles_{kernel}"
    node.check(n_multiprocessors=2)


@pytest.mark.parametrize("rows", [10, 40])
@pytest.mark.parametrize("n_kv", [1, 7, 31, 32, 33, 64, 127, 129, 320])
def test_cells(rows, n_kv):
    Node(rows=rows, n_kv=n_kv, mask=None, heads=(2, 1)).check(n_multiprocessors=1)
    Node(rows=rows, n_kv=n_kv, heads=(2, 1)).check()


@pytest.mark.parametrize(("size", "rows"), [(64, 10), (64, 40), (256, 10), (256, 40), (512, 10)])
def test_shares_are_joined(size, rows):
    node = Node(size, rows=rows, heads=(1, 1), n_kv=330, sinks=True, used=200)
    assert attention._tile_shares(node.out, attention._tile(node.out), 132)[0] > 5
    for n in (2, 132):
        node.check(n_multiprocessors=n)


def test_more_tiles_than_a_block_looks_at_once():
    for n_kv in (8192, 8200):
        Node(8, rows=9, heads=(1, 1), n_kv=n_kv, used=n_kv - 70).check(n_multiprocessors=1)


def test_batches_and_groups():
    Node(40, rows=11, heads=(6, 2), batch=3, n_kv=75, mask_batches=3).check()
    Node(40, rows=11, heads=(6, 2), batch=3, n_kv=75).check()


# -- masks and what scores are made of --------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [(5, (6, 2)), (12, (6, 2))])
@pytest.mark.parametrize("options", [
    {}, {"max_bias": 8.0}, {"logit_softcap": 4.0}, {"sinks": True}, {"mask": "f32"}, {"mask": None},
    {"mask_heads": 6}, {"mask_heads": 2}, {"used": 30},
    {"max_bias": 4.0, "logit_softcap": 5.0, "sinks": True, "used": 70},
    {"mask": None, "logit_softcap": 5.0, "sinks": True}])
def test_variants(columns, options):
    Node(rows=columns[0], heads=columns[1], **options).check()


@pytest.mark.parametrize(("n_kv", "shift"), [(101, 0), (96, 4), (96, 8)])
def test_a_mask_between_the_multiples_that_wide_loads_need(n_kv, shift):
    """Rows of an odd length, and a view that begins between multiples of 16 bytes."""
    node = Node(rows=20, n_kv=n_kv)
    whole = node.ctx.tensor("f16", (20 * n_kv + shift,))
    mask = node.ctx.view_2d(whole, n_kv, 20, 2 * n_kv, 2 * shift)
    node.out = node.ctx.flash_attn_ext(node.q, node.k, node.v, mask, 0.1)
    node.values[whole] = np.append(np.full(shift, -np.inf, np.float16), node.values[node.mask])
    node.check()


def test_rows_that_see_no_cell_are_zero():
    for sinks in (False, True):
        node = Node(rows=20, n_kv=130, sinks=sinks)
        node.values[node.mask][..., 3:6, :] = -np.inf
        assert not node.check()[:, 3:6].any()
    node.values[node.mask][...] = -np.inf
    assert not node.check().any()


def test_cells_of_anything_behind_a_mask():
    """What no row sees is not looked at, in tiles that are left out and in those that are not."""
    for rows, used in ((9, 20), (40, 70), (40, 130)):
        node = Node(rows=rows, n_kv=300, used=used)
        for t in (node.k, node.v):
            node.values[t][..., used:, :] = np.nan
        assert np.isfinite(node.check()).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("d", "rows"), [(64, 9), (32, 40), (256, 9), (512, 12)])
def test_what_is_not_finite_in_a_cell_reaches_the_rows_that_see_it(d, rows, value):
    node = Node(d, rows=rows, heads=(2, 1), n_kv=90)
    node.values[node.mask][:] = np.where(np.arange(90)[None] > 80 - rows + np.arange(rows)[:, None], -np.inf, 0)
    for t in (node.k, node.v):
        node.values[t][..., 80 - rows + 2, 5] = value           # rows from the second on see this cell
        want = node.check().reshape(rows, -1)
        assert np.isfinite(want[:2]).all() and not np.isfinite(want[2:]).all()
        node.values[t][..., 80 - rows + 2, 5] = 1.0


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e5, 1e30])
def test_queries_beyond_the_range_of_f16(size):
    """Each column is multiplied by a power of two of its own."""
    node = Node(rows=12, n_kv=64)
    node.values[node.q] *= np.logspace(0, 3, 12, dtype=np.float32)[:, None] * np.float32(size)
    node.values[node.k] *= np.float32(min(1 / size / 100, 1e4))
    node.out = node.ctx.flash_attn_ext(node.q, node.k, node.v, node.mask, float(np.float32(min(1.0, 1e-3 / size))))
    node.check(1e-5)


def test_queries_that_are_not_finite():
    node = Node(rows=20, n_kv=70)
    for row, value in ((3, np.nan), (7, np.inf), (11, -np.inf)):
        node.values[node.q][..., row, 4] = value
    assert np.isnan(node.check()).reshape(20, -1).all(axis=1).nonzero()[0].tolist() == [3, 7, 11]


def test_views_of_queries_and_caches(ctx):
    """As the runner has them: heads side by side in the rows of a cache; queries permuted."""
    rows, n_kv = 18, 80
    of_q, of_k, of_v = ctx.tensor("f32", (32, 4, rows)), *(ctx.tensor("f16", (64, n_kv)) for _ in "kv")
    k, v = (ctx.view_3d(t, 32, n_kv, 2, t.nb[1], 64) for t in (of_k, of_v))
    node = Node(32, rows=rows, heads=(4, 2), n_kv=n_kv)
    node.ctx, node.mask = ctx, ctx.tensor("f16", (n_kv, rows))
    node.out = ctx.flash_attn_ext(ctx.permute(of_q, 0, 2, 1, 3), k, v, node.mask, 0.2)
    node.values = cupy_kernels.leaves(ctx, RNG)
    node.check()


# -- where it is not used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "kernel"), [
    ({"rows": 8, "heads": (1, 1)}, "attention.half_64_8"), ({"d": 60}, "attention_any.any_64_8"),
    ({"d": 64, "d_v": 60}, "attention.half_64_8"), ({"d": 1024, "d_v": 64}, "attention.half_64_8"),
    ({"d": 768, "d_v": 512}, "attention.half_512_4")])
def test_few_columns_and_extents_without_a_tile_are_computed_in_f32(options, kernel):
    assert Node(**options).kernel() == kernel


def test_exact_results_older_devices_and_odd_addresses_are_computed_in_f32(ctx):
    node = Node(rows=20)
    assert node.kernel(exact=True) == node.kernel(tensor=False) == "attention.half_64_8"
    whole = [ctx.tensor("f16", (80, 40)) for _ in "kv"]
    for shift, kernel in ((4, "attention.half_64_8"), (8, "attention_mma.tiles_64_16")):
        k, v = (ctx.view_3d(t, 64, 40, 1, t.nb[1], t.nb[2], 16 * (i == 0) + 2 * shift * i) for i, t in enumerate(whole))
        out = ctx.flash_attn_ext(ctx.tensor("f32", (64, 12, 1)), k, v)
        launch, = cupy_kernels.placed_launches(ctx, [out]).launches
        assert launch.kernel == kernel


def test_heads_of_a_long_cache_share_tensor_cores(ctx):
    """From five columns on, where a cache has 4,096 cells."""
    found = []
    for cells, heads in ((4095, 8), (4096, 4), (4096, 5), (4096, 8)):
        k = ctx.tensor("f16", (128, cells, 1))
        node = ctx.flash_attn_ext(ctx.tensor("f32", (128, 1, heads)), k, k)
        launch, = cupy_kernels.placed_launches(ctx, [node]).launches
        found.append(launch.kernel.partition(".")[0])
    assert found == ["attention", "attention", "attention_mma", "attention_mma"]


def test_work_memory_is_what_is_said(ctx):
    for d, rows, heads, n_kv in ((64, 10, 1, 4096), (128, 40, 2, 4096), (512, 12, 1, 700), (128, 1, 8, 5000)):
        k = ctx.tensor("f16", (d, n_kv, 1))
        node = ctx.flash_attn_ext(ctx.tensor("f32", (d, rows, heads)), k, k)
        taken = cupy_kernels.placed_launches(ctx, [node], n_multiprocessors=256).work_size
        assert 0 < taken <= ops.OPS[node.op].work(node)


@pytest.mark.parametrize("n_multiprocessors", [1, 7, 132, 1000])
@pytest.mark.parametrize("cells", [1, 63, 64, 65, 4096, 100_003])
def test_shares_cover_every_cell_once(ctx, cells, n_multiprocessors):
    for rows, heads in ((9, (8, 2)), (33, (1, 1)), (512, (32, 32)), (1, (64, 1))):
        k = ctx.tensor("f16", (64, cells, heads[1]))
        node = ctx.flash_attn_ext(ctx.tensor("f32", (64, rows, heads[0])), k, k)
        tile = attention._tile(node)
        shares, share = attention._tile_shares(node, tile, n_multiprocessors)
        assert share * (shares - 1) < cells <= share * shares
        assert shares <= attention.MAX_SHARES and share % tile.cells == 0


def test_shared_memory_is_what_every_device_has(ctx):
    """99 KiB, static memory included, on all from sm_80 on."""
    for d in (*range(8, 640, 8),):
        for d_v in (8, 64, 128, 200, 256, 512):
            k, v = ctx.tensor("f16", (d, 64, 1)), ctx.tensor("f16", (d_v, 64, 1))
            for rows in (9, 33):
                node = ctx.flash_attn_ext(ctx.tensor("f32", (d, rows, 1)), k, v)
                tile = attention._tile(node)
                assert tile is None or tile.shared(node, 2) + 64 <= 99 << 10
                assert tile is not None or d > 576


# -- planted bugs -----------------------------------------------------------------------------------------------------

WAIT = "                wait_copies();\n"
KEYS, VALUES = (f"                __syncthreads();           // the {what} have" for what in ("keys", "values"))
BUGS = {
    "": ("", ""),
    "keys are not waited for": (WAIT + KEYS, KEYS),
    "values are not waited for": (WAIT + VALUES, VALUES),
    "no barrier behind the keys": (KEYS, "//"),
    "no barrier behind the values": (VALUES, "//"),
    "a tile that a few rows see is left out": ("n >= lowest && !every", "n >= last / each && !every"),
    "masked cells are multiplied by 0": ("!all && has_infinite", "!all && a.dv < 0 && has_infinite"),
    "another column's power is undone": ("*= soft.back[j / 2 % 2]", "*= soft.back[0]"),
    "results of one warp are not joined": ("x = turn ? to[h] : float4{}", "x = float4{}"),
    "weights of neighbouring cells are exchanged": ("0x7632u : 0x5410u", "0x3276u : 0x1054u"),
}


@pytest.mark.parametrize("bug", [bug if i < 4 else pytest.param(bug, marks=pytest.mark.soak)
                                 for i, bug in enumerate(BUGS)])
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    # Two kernels of seven: they take time to compile.
    two = ("attention_mma.cu", "TILED_SIZES(TILED_KERNEL)",
           "TILED_KERNEL(64_16, 64, 16, 4) TILED_KERNEL(64_64, 64, 64, 3)")
    cupy_kernels.edit_sources(monkeypatch, tmp_path, two, *([("attention_mma.cuh", *BUGS[bug])] if bug else []))
    with pytest.raises((AssertionError, DeviceError)) if bug else nullcontext():
        for rows in (12, 40):
            node = Node(rows=rows, heads=(1, 1), n_kv=300, used=290)
            node.values[node.mask][..., 3:, 192:256] = -np.inf
            node.values[node.q] *= np.logspace(0, 1, rows, dtype=np.float32)[:, None]
            for t in (node.k, node.v):
                node.values[t][..., 290 - rows + 3, :] = np.nan
                node.values[t][..., 290:, :] = np.nan
            node.check()
