"""Products that CpuBackend's kernels compute in GgmlBackend's graphs: which ones, and how graphs and plans hold them.

That their bits are those of CpuBackend, test_kernels_matmul.py proves for every type and shape.

`ours` takes every instruction set, `GgmlBackend` itself only one where that is faster.
"""

from functools import cache
from pathlib import Path

import ggml_here
import numpy as np
import pytest
from forks import in_child
from op_results import QUANTISED, place, raw

import ggml_sched as gs
from ggml_sched.graph import quants

if not ggml_here.IS_HERE:
    pytest.skip(ggml_here.WHY_NOT, allow_module_level=True)

RNG = np.random.default_rng(41)


def ours(n_threads: int = 2, **options) -> gs.GgmlBackend:
    backend = ggml_here.backend(n_threads, **{"repack": False, **options})
    backend.own_products = 1
    return backend


def ggmls(n_threads: int = 2, **options) -> gs.GgmlBackend:
    return ggml_here.backend(n_threads, **{"repack": False, "own_products": False, **options})


FLOATS = ("f32", "f16", "bf16")


def block_of(type: str) -> int:
    return gs.Type[type.upper()].block_size


@cache  # to quantise takes longer than to multiply
def weights(type: str, *shape: int) -> np.ndarray:
    x = RNG.standard_normal(shape).astype(np.float32)
    return quants.quantize(x, gs.Type[type.upper()]) if type in QUANTISED else x


def normal(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) + 0.3).astype(np.float32)


def product(type: str, k: int, m: int, n: int) -> tuple[gs.Context, gs.Tensor, dict]:
    ctx = gs.Context()
    a, b = ctx.tensor(type, (k, m), name="weight"), ctx.tensor("f32", (k, n))
    return ctx, ctx.mul_mat(a, b), {a: weights(type, m, k), b: normal(n, k)}


def bits(backend: gs.Backend, ctx: gs.Context, out: gs.Tensor, values: dict, gap: int = 0) -> bytes:
    """The bytes of the result, computed in memory full of NaNs; asserts that replaying the plan repeats them."""
    with backend, place(ctx, backend, gap, 0xFF):
        plan = backend.graph_plan_create(gs.Graph(out))
        seen = []
        for _ in range(2):
            for tensor, array in values.items():
                tensor.set(array)
            backend.graph_plan_compute(plan)
            seen.append(out.numpy().tobytes())
        backend.graph_plan_free(plan)
    assert seen[0] == seen[1]
    return seen[0]


def check(ctx: gs.Context, out: gs.Tensor, values: dict) -> None:
    """Assert the bits of CpuBackend, with any number of threads."""
    want = bits(gs.CpuBackend(1), ctx, out, values)
    for n_threads, gap in ((1, 0), (2, 192), (3, 64)):
        assert bits(ours(n_threads), ctx, out, values, gap) == want, f"{n_threads} threads"


# -- which products ---------------------------------------------------------------------


def test_own_products_are_computed_where_they_are_faster_unless_switched_off(isa):
    with ggml_here.backend() as backend:
        assert backend.own_products == (32 if isa == "avx512" else 0)
    with ggml_here.backend(own_products=False) as backend:
        assert not backend.own_products


@pytest.mark.parametrize("type", ["q8_0", "q4_1"])
def test_switched_off_they_are_ggmls(type):
    ctx, out, values = product(type, 256, 37, 40)
    assert bits(ggmls(), ctx, out, values) != bits(ours(), ctx, out, values)


@pytest.mark.parametrize(("n", "is_ours"), [(1, False), (31, False), (32, True)])
def test_few_columns_are_ggmls(n, is_ours):
    """Few columns need no products of ours, so results keep llama.cpp's bits."""
    ctx, out, values = product("q8_0", 256, 37, n)
    backend = ggmls()
    backend.own_products = 32
    got = bits(backend, ctx, out, values)
    assert got == bits(ours() if is_ours else ggmls(), ctx, out, values)


@pytest.mark.parametrize(("n", "is_ours"), [(1, True), (4, True), (5, False), (40, False)])
@pytest.mark.parametrize("type", FLOATS)
def test_few_columns_by_floats_are_ours(isa, type, n, is_ours):
    """Generation reads each weight once; prompts stay with ggml: else f32 weights would be faster than quantised
    ones."""
    ctx, out, values = product(type, 259, 37, n)
    got = bits(ours(), ctx, out, values)
    assert (got == bits(gs.CpuBackend(1), ctx, out, values)) == is_ours
    assert (got == bits(ggmls(), ctx, out, values)) == (not is_ours)


@pytest.mark.parametrize("type", FLOATS)
def test_products_by_what_is_no_weight_are_ggmls(ctx, type):
    """Those of attention: views of caches, and matrices of many heads."""
    k, m = 259, 37
    cache, heads, x = ctx.tensor(type, (k, m)), ctx.tensor(type, (k, m, 2)), ctx.tensor("f32", (k, 1, 2))
    column = ctx.view_2d(x, k, 1, x.nb[1], 0)
    outs = [ctx.mul_mat(ctx.view_2d(cache, k, m, cache.nb[1], 0), column), ctx.mul_mat(heads, x)]
    values = {cache: weights(type, m, k), heads: weights(type, 2, m, k), x: normal(2, 1, k)}
    for out in outs:
        assert bits(ours(), ctx, out, values) == bits(ggmls(), ctx, out, values)
        assert bits(ours(), ctx, out, values) != bits(gs.CpuBackend(1), ctx, out, values)


@pytest.mark.parametrize("type", QUANTISED)
def test_weights_that_ggml_has_packed_are_ggmls(type):
    def packed(backend):
        """Whether ggml packs the weight, and the bits."""
        ctx, out, values = product(type, 512, 64, 40)
        weight, x = values
        with backend, backend.alloc_buffer(weight.nbytes) as first, backend.alloc_buffer(x.nbytes + out.nbytes) as rest:
            first.usage = "weights"
            gs.bind_resident(weight, first, 0)
            gs.bind_resident(x, rest, 0)
            gs.bind_resident(out, rest, x.nbytes)
            weight.set(values[weight])
            x.set(activations)
            backend.graph_compute(gs.Graph(out))
            return any(first.packs.values()), raw(out)

    activations = normal(40, 512)
    was_packed, got = packed(ours(repack=True))
    assert (got == packed(ggmls(repack=True))[1]) == was_packed
    assert (got == packed(ours())[1]) != was_packed


# -- shapes and places ------------------------------------------------------------------


def test_rows_of_views_and_rows_that_share_memory(ctx):
    a, b = ctx.tensor("q5_0", (128, 40)), ctx.tensor("f32", (96, 30))
    some = ctx.view_2d(a, 64, 21, a.nb[1], 3 * a.nb[1] + a.nb[1] // 2)
    out = ctx.mul_mat(some, ctx.view_2d(b, 64, 11, 40, 8))     # windows that overlap
    check(ctx, out, {a: weights("q5_0", 40, 128), b: normal(30, 96)})


@pytest.mark.parametrize("n", [0, 3])
def test_without_columns_there_is_nothing_to_compute(ctx, n):
    a, b = ctx.tensor("q8_0", (64, 5)), ctx.tensor("f32", (64, 0, n or 1))
    assert bits(ours(), ctx, ctx.mul_mat(a, b), {a: weights("q8_0", 5, 64)}) == b""


@pytest.mark.parametrize("n", [1, 40])
def test_a_result_that_overlaps_its_activations(n):
    """Activations are read as if before the result is written, with the same bits."""
    ctx, out, values = product("q8_0", 96, 64, n)
    weight, x = values
    want = bits(gs.CpuBackend(1), ctx, out, values)
    for shift in (0, 64):
        ctx = gs.Context()
        twins = {ctx.tensor(str(t.type), t.ne): array for t, array in values.items()}
        a, b = twins
        out = ctx.mul_mat(a, b)
        with ours() as backend, backend.alloc_buffer(a.nbytes + 64) as first, backend.alloc_buffer(1 << 16) as rest:
            gs.bind_resident(a, first, 0)
            gs.bind_resident(b, rest, 0)
            gs.bind_resident(out, rest, shift)
            plan = backend.graph_plan_create(gs.Graph(out))
            for _ in range(2):
                for tensor, array in twins.items():
                    tensor.set(array)
                backend.graph_plan_compute(plan)
                assert raw(out) == want
            backend.graph_plan_free(plan)


# -- graphs and plans -------------------------------------------------------------------


def layers(n: int, cut: bool = False) -> tuple[gs.Context, gs.Tensor, dict]:
    """Three products with other nodes between; if `cut`, ids are computed and checked in the middle."""
    ctx = gs.Context()
    first, second, third = (ctx.tensor("q8_0", (64, 64)) for _ in range(3))
    x = ctx.tensor("f32", (64, n))
    y = ctx.silu(ctx.mul_mat(first, x))
    if cut:
        ids = ctx.tensor("i32", (n,))
        y = ctx.get_rows(y, ctx.cont(ids))
    z = ctx.add(ctx.mul_mat(second, y), ctx.rms_norm(ctx.mul_mat(first, y), 1e-5))
    values = {t: weights("q8_0", 3, 64, 64)[i] for i, t in enumerate((first, second, third))}
    values[x] = normal(n, 64)
    if cut:
        values[ids] = RNG.permutation(n).astype(np.int32)
    return ctx, ctx.mul_mat(third, z), values


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("n", [1, 40])
def test_graphs_of_several_products(n, cut):
    ctx, out, values = layers(n, cut)
    want = bits(ours(1), ctx, out, values)
    assert bits(ours(2), ctx, out, values) == bits(ours(3), ctx, out, values, 64) == want
    near = np.frombuffer(bits(gs.CpuBackend(kernels="numpy"), ctx, out, values), np.float32)
    assert ggml_here.error_of(np.frombuffer(want, np.float32), near) <= 3e-4


def test_numbers_of_threads_change_between_replays():
    ctx, out, values = product("q8_0", 256, 200, 40)
    small = product("q4_1", 32, 5, 3)
    want = [bits(gs.CpuBackend(1), *case) for case in ((ctx, out, values), small)]
    with ours(1) as backend, place(ctx, backend), place(small[0], backend):
        plans = [(case, backend.graph_plan_create(gs.Graph(case[1]))) for case in ((ctx, out, values), small)]
        for n in (1, 3, 2, 3, 8, 1, 5):
            backend.set_n_threads(n)
            for (case, plan), known in zip(plans, want, strict=True):
                for tensor, array in case[2].items():
                    tensor.set(array)
                backend.graph_plan_compute(plan)
                assert raw(case[1]) == known, f"{n} threads"
        for _, plan in plans:
            backend.graph_plan_free(plan)
            with pytest.raises(gs.BackendError, match="was freed"):
                backend.graph_plan_compute(plan)


def test_values_change_between_replays():
    ctx, out, values = product("q6_K", 256, 20, 9)
    weight, x = values
    other = {weight: weights("q6_K", 21, 256)[1:], x: normal(9, 256)}
    want = [bits(gs.CpuBackend(1), ctx, out, each) for each in (values, other)]
    with ours() as backend, place(ctx, backend):
        plan = backend.graph_plan_create(gs.Graph(out))
        for turn in (0, 1, 1, 0):
            for tensor, array in (values, other)[turn].items():
                tensor.set(array)
            backend.graph_plan_compute(plan)
            assert raw(out) == want[turn]
        backend.graph_plan_free(plan)


def test_work_memory_is_that_of_the_largest_program():
    """Activations of 8 bits, their scales, and panels for each thread; it is there once for all programs."""
    k, n = 1024, 512
    with ours(2) as backend:
        assert backend._device.work_size == 0
        seen = []
        for columns in (n, 3, n):
            ctx, out, values = product("q8_0", k, 64, columns)
            with place(ctx, backend):
                for tensor, array in values.items():
                    tensor.set(array)
                backend.graph_compute(gs.Graph(out))
            seen.append(backend._device.work_size)
        assert seen[0] == seen[1] == seen[2]
        assert k * n < seen[0] < 2.5 * k * n


def test_no_memory_for_the_work_is_an_error_and_the_plan_serves_later(monkeypatch):
    ctx, out, values = product("q8_0", 256, 20, 9)
    want = bits(gs.CpuBackend(1), ctx, out, values)
    resource = pytest.importorskip("resource")
    ctx2 = gs.Context()
    huge = ctx2.mul_mat(ctx2.tensor("q8_0", (1 << 20, 1)), ctx2.view_2d(ctx2.tensor("f32", (1 << 20,)), 1 << 20, 4096,
                                                                         0, 0))
    with ours(1) as backend, place(ctx, backend), place(ctx2, backend):
        if not backend.supports_op(huge):
            pytest.skip("ggml takes no columns that are one")
        plan = backend.graph_plan_create(gs.Graph(huge))
        limits = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), limits[1]))
        try:
            for _ in range(2):
                with pytest.raises(gs.OutOfMemory):
                    backend.graph_plan_compute(plan)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        backend.graph_plan_free(plan)
        for tensor, array in values.items():
            tensor.set(array)
        backend.graph_compute(gs.Graph(out))
        assert raw(out) == want


def test_a_forked_child_computes_them():
    ctx, out, values = layers(40)
    with ours(2) as backend, place(ctx, backend):
        for tensor, array in values.items():
            tensor.set(array)
        plan = backend.graph_plan_create(gs.Graph(out))
        backend.graph_plan_compute(plan)
        want = raw(out)

        def again():
            backend.graph_plan_compute(plan)
            assert raw(out) == want

        assert in_child(again) == 0
        backend.graph_plan_free(plan)
