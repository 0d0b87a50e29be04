"""Rows rearranged inside their bytes: there and back, and products of them with the bits of ggml's order."""

import cupy_kernels
import numpy as np
import op_results
import pytest
from op_results import QUANTISED, random

import ggml_sched as gs
from ggml_sched.backends.cupy import ops, repack

RNG = np.random.default_rng(14)
PACKED = tuple(str(kind) for kind in repack.FIELDS)


@pytest.mark.parametrize("kind", PACKED)
def test_rows_come_back_and_change_on_the_way(kind):
    kind = gs.Type[kind.upper()]
    assert sum(repack.FIELDS[kind]) == kind.type_size
    rows = RNG.integers(0, 256, (3, 2 * repack.together(kind) * kind.type_size), np.uint8)
    packed = repack.repack(rows, kind)
    assert packed.shape == rows.shape and not np.array_equal(packed, rows)
    assert np.array_equal(repack.unpack(packed, kind), rows)
    for row, other in zip(rows, packed, strict=True):
        assert np.array_equal(np.sort(row), np.sort(other))
    with pytest.raises(ValueError, match=f"{repack.together(kind)} {kind} blocks"):
        repack.repack(rows[:, :-kind.type_size], kind)


@pytest.mark.parametrize("kind", QUANTISED + ("f32",))
def test_only_rows_of_whole_groups_are_rearranged(kind):
    kind = gs.Type[kind.upper()]
    unit = repack.together(kind) * kind.block_size
    assert not any(repack.packs(kind, n) for n in (0, unit - kind.block_size, unit + kind.block_size))
    assert repack.packs(kind, 2 * unit) == (kind in repack.FIELDS)


def products(ctx: gs.Context, out: gs.Tensor, values: dict, packed: tuple, exact: bool) -> bytes:
    """The result's bits, with the roots in `packed` rearranged."""
    seen = set()
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.filled(ctx, values) as buffer:
            buffer.is_packed = lambda root: root in packed
            for root in packed:
                rows = np.frombuffer(op_results.raw(root), np.uint8).reshape(-1, root.nb[1])
                buffer.backend.set_tensor(root, repack.repack(rows, root.type).tobytes())
            assert cupy_kernels.run(cupy_kernels.build(gs.Graph(out).nodes, exact=exact), order)["position"] == 0
            seen.add(op_results.raw(out))
    assert len(seen) == 1
    return seen.pop()


@pytest.mark.spread("kind exact", "columns")
@pytest.mark.parametrize("columns, exact", [(1, False), (3, False), (9, False), (2, True), (10, True)])
@pytest.mark.parametrize("kind", PACKED)
def test_products_have_the_bits_of_ggmls_order(ctx, kind, columns, exact):
    member = gs.Type[kind.upper()]
    k = repack.together(member) * member.block_size
    w, x = ctx.tensor(kind, (k, 6)), ctx.tensor("f32", (k, columns))
    out = ctx.mul_mat(ctx.view_2d(w, k, 4, w.nb[1], w.nb[1]), x)          # rows stay rows: views go on working
    values = {w: random(RNG, k, 6), x: random(RNG, k, columns)}
    assert products(ctx, out, values, (w,), exact) == products(ctx, out, values, (), exact)


@pytest.mark.parametrize("n_tokens", [1, 12])
def test_experts_have_the_bits_of_ggmls_order(ctx, n_tokens):
    w, x, ids = ctx.tensor("q4_0", (256, 9, 3)), ctx.tensor("f32", (256, 1, n_tokens)), ctx.tensor("i32", (2, n_tokens))
    out = ctx.mul_mat_id(w, x, ids)
    values = {w: random(RNG, *w.ne), x: random(RNG, *x.ne), ids: RNG.integers(0, 3, (n_tokens, 2)).astype(np.int32)}
    assert products(ctx, out, values, (w,), False) == products(ctx, out, values, (), False)


def test_other_ops_refuse_rearranged_rows(ctx):
    w = ctx.tensor("q4_0", (256, 2), "w")
    node = ctx.cpy(w, ctx.tensor("f32", (256, 2)))
    with gs.CpuBackend(1) as backend, backend.alloc_tensors(ctx) as buffer:
        cupy_kernels.build([node])
        buffer.is_packed = lambda root: root is w
        with pytest.raises(gs.UnsupportedOp, match="CPY.*'w'"):
            cupy_kernels.build([node])


def test_a_view_into_a_group_is_refused(ctx):
    w, x = ctx.tensor("q4_0", (512, 4), "w"), ctx.tensor("f32", (256, 1))
    inside = ctx.mul_mat(ctx.set_name(ctx.view_2d(w, 256, 4, w.nb[1], 18), "inside") or w, x)
    whole = ctx.mul_mat(ctx.view_2d(w, 256, 4, w.nb[1], 8 * 18), x)
    with gs.CpuBackend(1) as backend, backend.alloc_tensors(ctx) as buffer:
        buffer.is_packed = lambda root: root is w
        cupy_kernels.build([whole])
        with pytest.raises(gs.UnsupportedOp, match="'inside'.*'w'"):
            cupy_kernels.build([inside])
    assert ops.supports(whole)
