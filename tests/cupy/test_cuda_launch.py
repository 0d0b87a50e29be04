"""The builder of launches: arguments, addresses, work memory, refused nodes, 64-bit indices."""

import cupy_kernels
import numpy as np
import op_results
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.launch import Builder, ErrorWord, Launch
from ggml_sched.backends.cupy.regions import VIEW, Region, Scratch

RNG = np.random.default_rng(25)


def test_addresses_are_put_in_when_they_are_known():
    launch = Launch("m.f", (1, 1, 1), (32, 1, 1), (
        np.int32(3), Scratch(512), Region(256, (1,) * 4, (4,) * 4, scratch=True), ErrorWord()))
    number, pointer, view, word = launch.bound(1 << 40, 77)
    assert number.dtype == np.int32 and pointer == np.uint64((1 << 40) + 512) and word == np.uint64(77)
    assert pointer.dtype == word.dtype == np.uint64
    assert view.dtype == VIEW and view["p"][0] == (1 << 40) + 256


@pytest.mark.parametrize("argument", [3, 2.5, None, "x", np.zeros(2), [1]])
def test_an_argument_without_a_width_is_refused(argument):
    with pytest.raises(TypeError, match="m.f"):
        Builder().launch("m.f", (1,), (1,), argument)


def test_scratch_is_taken_again_by_the_next_node():
    b = Builder()
    assert [b.scratch(n).offset for n in (1, 256, 257, 0)] == [0, 256, 512, 1024]
    b.reset()
    assert b.scratch(10).offset == 0 and b.work_size == 1024


def test_tensors_that_cannot_be_used_are_named(ctx):
    a = ctx.tensor("f32", (4,), "a")
    node = ctx.set_name(ctx.sqr(a), "squared")
    with pytest.raises(gs.PlacementError, match="'EMULATED'.*'squared'.*'a'.*no address"):
        cupy_kernels.build([node])
    with gs.CpuBackend(1) as backend, op_results.place(ctx, backend, 64) as buffer:
        with pytest.raises(gs.PlacementError, match="'a'.*on backend 'CPU'"):
            cupy_kernels.build([node], owns=lambda buffer: False)
        gs.bind_resident(a, buffer, 66)
        with pytest.raises(gs.BackendError, match="'a'.*no multiple of 4"):
            cupy_kernels.build([node])


def test_a_node_without_a_kernel_is_named(ctx):
    node = ctx.set_name(ctx.cast(ctx.tensor("f32", (256, 2)), "q6_K"), "packed")
    assert not ops.supports(node)
    with pytest.raises(gs.UnsupportedOp, match="'EMULATED'.*'packed'.*CPY.*f32.*q6_K"):
        cupy_kernels.build([node])


def test_strides_between_elements_are_refused_beforehand(ctx):
    a = ctx.restore("NONE", "f32", (4, 2, 1, 1), (4, 18, 36, 36))
    assert not ops.supports(ctx.sqr(a))


def test_every_op_that_needs_scratch_says_how_much(ctx):
    a, long = ctx.tensor("f32", (64, 3)), ctx.tensor("f32", (5000, 2))
    cache, rows, ids = ctx.tensor("f16", (1, 9000)), ctx.tensor("f32", (1, 3000)), ctx.tensor("i64", (3000,))
    nodes = [ctx.sum(a), ctx.sum(long), ctx.argsort(long), ctx.argsort(a), ctx.set_rows(cache, rows, ids), ctx.sqr(a)]
    for node in nodes:
        needed = ops.OPS[node.op].work(node)
        assert cupy_kernels.placed_launches(ctx, [node]).work_size == -(-needed // 256) * 256


def test_neighbours_are_copied_as_wide_elements():
    b = Builder()
    n, dense = (16, 3, 2, 1), (4, 64, 192, 384)
    b.move(Region(4096, n, dense), Region(8192, n, dense), n, 4)
    assert b.launches[-1].args[3] == 16 and b.launches[-1].args[2] == 24
    b.move(Region(4096, n, dense), Region(8196, n, dense), n, 4)
    assert b.launches[-1].args[3] == 4
    b.move(Region(4096, n, (4, 68, 204, 408)), Region(8192, n, dense), n, 4)
    assert b.launches[-1].args[3] == 4 and b.launches[-1].args[2] == 96
    b.move(Region(4096, n, (64, 4, 192, 384)), Region(8192, n, dense), n, 4)
    assert b.launches[-1].args[3] == 4
    b.move(Region(4096, (0, 3, 1, 1), dense), Region(8192, (0, 3, 1, 1), dense), (0, 3, 1, 1), 4)
    assert len(b.launches) == 4


def test_four_neighbours_at_once_give_the_same_bits():
    """Where addresses and strides allow it; one element further on they do not."""
    x, y = RNG.normal(size=(5, 72)).astype(np.float32), RNG.normal(size=(5, 72)).astype(np.float32)
    for op in ("add", "sub", "mul", "div", "swiglu_split", "geglu_split", "reglu_split", "swiglu_oai"):
        seen = []
        for offset in (0, 1, 4):
            ctx = gs.Context()
            a, b = ctx.tensor("f32", (80, 5)), ctx.tensor("f32", (80, 5))
            left, right = (ctx.view_2d(t, 72, 5, t.nb[1], 4 * offset) for t in (a, b))
            node = getattr(ctx, op)(left, right)
            values = {t: np.pad(v, ((0, 0), (offset, 8 - offset))) for t, v in ((a, x), (b, y))}
            seen.append(cupy_kernels.compute(ctx, node, values))
            kernel = cupy_kernels.placed_launches(ctx, [node]).launches[0].kernel
            assert kernel.endswith("_by_4") is (offset != 1)
        assert np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])


def test_a_bias_is_added_to_four_neighbours_at_once(ctx):
    a, row, one, few = (ctx.tensor("f32", ne) for ne in ((64, 5, 3), (64,), (1, 5), (32,)))
    values = {t: op_results.random(RNG, *t.ne) for t in (a, row, one, few)}
    for b, kernel in ((row, "binary_by_4"), (one, "binary"), (few, "binary")):
        node = ctx.add(a, b)
        got = cupy_kernels.compute(ctx, node, values)
        assert np.array_equal(got, cupy_kernels.oracle(ctx, node, values))
        assert cupy_kernels.placed_launches(ctx, [node]).launches[0].kernel == f"elementwise.{kernel}"


@pytest.mark.parametrize("axis", range(4))
def test_extents_beyond_32_bits(axis):
    """Only the first elements are read: a tensor with memory for all would be too large for a test."""
    ne = [3, 5, 7, 2]
    nb = (4, 12, 60, 420)
    data, out = RNG.normal(size=(2, 7, 5, 3)).astype(np.float32), np.zeros((2, 7, 5, 3), np.float32)
    n = int(np.prod(ne[: axis + 1]))
    ne[axis] = (1 << 33) + 1
    b = Builder()
    b.flat("copies.move", n, *(Region(array.ctypes.data, tuple(ne), nb) for array in (data, out)), np.int64(n),
           np.int32(4))
    cupy_kernels.run(b)
    assert np.array_equal(out.ravel()[:n], data.ravel()[:n]) and not out.ravel()[n:].any()
