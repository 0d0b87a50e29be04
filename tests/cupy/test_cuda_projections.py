"""Queries, keys and values: products of one input in one launch, then norms, ropes and writes in another."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import cupy_kernels
import numpy as np
import op_results
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.ops import projections

RNG = np.random.default_rng(25)
WIDTH, HEADS, ROWS = 16, 4, 9


@dataclass
class Layer:
    """The attention's input of a layer: `outs` are the rotated queries, and the caches after their writes."""

    kinds: Sequence[str] = ("q4_0",) * 3
    n: int = 1
    n_kv: int = 2
    k: int = 64
    bias: bool = False
    norm: bool = False
    mode: str = "normal"
    n_dims: int = WIDTH
    cache: str = "f16"
    factors: bool = False
    ids: Sequence[int] | None = None
    keys_first: bool = False
    values: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ctx = ctx = gs.Context()
        x = ctx.sqr(ctx.tensor("f32", (self.k, self.n)))
        positions, ids = ctx.tensor("i32", (self.n,)), ctx.tensor("i64", (self.n,))
        factors = ctx.tensor("f32", (self.n_dims // 2,)) if self.factors else None
        self.caches = [ctx.tensor(self.cache, (WIDTH * self.n_kv, ROWS)) for _ in "kv"]

        def product(kind: str, heads: int) -> gs.Tensor:
            y = ctx.mul_mat(ctx.tensor(kind, (self.k, WIDTH * heads)), x)
            self.products.append(y)
            return ctx.add(y, ctx.tensor("f32", (WIDTH * heads,))) if self.bias else y

        def turned(y: gs.Tensor, heads: int) -> gs.Tensor:
            y = ctx.reshape_3d(y, WIDTH, heads, self.n)
            y = ctx.mul(ctx.rms_norm(y, 1e-5), ctx.tensor("f32", (WIDTH,))) if self.norm else y
            return ctx.rope(y, positions, self.n_dims, self.mode, factors, freq_base=100.0)

        self.products: list[gs.Tensor] = []
        self.q = turned(product(self.kinds[0], HEADS), HEADS)
        v = product(self.kinds[1], self.n_kv)
        k = turned(product(self.kinds[2], self.n_kv), self.n_kv)
        rows = ctx.reshape_2d(k, WIDTH * self.n_kv, self.n)
        self.outs = [self.q, ctx.set_rows(self.caches[0], rows, ids), ctx.set_rows(self.caches[1], v, ids)]
        self.nodes = gs.Graph(*((self.outs[1],) if self.keys_first else (self.q, v)), *self.outs).nodes
        self.values = cupy_kernels.leaves(ctx, RNG)
        self.values[positions] = np.int32([0, 1, 700, 100000, 3, 4, 5, 6, 7][: self.n])
        self.values[ids] = np.array([7, 0, 3, 8, 1, 2, 4, 5][: self.n] if self.ids is None else self.ids)

    def check(self, n_launches: int, tolerance: float = 0.0, **options) -> None:
        """Fused launches give what the parts give, to the bit unless a tolerance is given, in any order of threads."""
        groups = ops.fusion_groups(self.nodes)
        assert [group[-1] for group in groups] == [self.nodes.index(self.outs[2])]
        keep, seen = {*self.outs}, None
        for order in cupy_kernels.ORDERS:
            with cupy_kernels.placed(self.ctx, order, 64, 0x3F) as backend:
                op_results.set_values(self.values)
                before = {t: op_results.raw(t) for t in (*self.caches, *(n for n in self.nodes if n.computes))}
                cupy_kernels.run(cupy_kernels.build(self.nodes, **options), order)
                want = [op_results.raw(t) for t in self.outs]
                floats = self.q.numpy().copy()
                for tensor, bits in before.items():
                    backend.set_tensor(tensor, bits)
                op_results.set_values(self.values)
                builder = cupy_kernels.build_grouped(self.nodes, needed=keep, **options)
                assert cupy_kernels.run(builder, order)["position"] == 0
                assert len(builder.launches) == n_launches
                bits = [op_results.raw(t) for t in self.outs]
                if tolerance:
                    np.testing.assert_allclose(self.q.numpy(), floats, rtol=tolerance, atol=tolerance)
                    assert seen in (None, bits)
                else:
                    assert bits == want
                seen = bits


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("kind", ["q4_0", "f16"])
def test_three_products_and_three_turns_are_two_launches(kind, n):
    """Beside the node before and, for quantised weights, its rounding."""
    Layer((kind,) * 3, n).check(n_launches=4 if kind == "q4_0" else 3)


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_K", "q6_K", "mxfp4", "iq4_nl"])
def test_types_of_weights(kind):
    Layer((kind,) * 3, k=256).check(n_launches=4 if kind in op_results.QUANTISED else 3)


def test_exact_products_are_one_launch_too():
    Layer(n=2).check(n_launches=3, exact=True)


@pytest.mark.parametrize(("kinds", "n_launches"), [(("q4_K", "q6_K", "q4_K"), 5), (("q4_0", "f16", "q8_0"), 6)])
def test_products_of_other_types_are_launches_of_their_own(kinds, n_launches):
    Layer(kinds, 2, k=256).check(n_launches)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", ["q4_0", "f32"])
def test_biases_are_added_by_the_products(kind, n):
    Layer((kind,) * 3, n, bias=True).check(n_launches=4 if kind == "q4_0" else 3)


@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize("n_dims", [WIDTH, 8])
def test_norms_of_heads_belong_to_the_turn(mode, n_dims):
    """Their sums have another order than those of norms alone."""
    Layer(n=3, norm=True, mode=mode, n_dims=n_dims).check(n_launches=4, tolerance=2e-6)


@pytest.mark.parametrize("mode", ["normal", "neox"])
@pytest.mark.parametrize(("n_dims", "factors", "cache"), [(WIDTH, True, "f32"), (8, False, "bf16"), (0, False, "f16")])
def test_ropes(mode, n_dims, factors, cache):
    Layer(n=2, mode=mode, n_dims=n_dims, factors=factors, cache=cache).check(n_launches=4)


def test_of_several_tokens_with_one_row_the_last_is_written():
    Layer(n=4, ids=(5, 2, 5, 5)).check(n_launches=4)


def test_as_many_heads_of_keys_as_of_queries_and_one():
    Layer(n_kv=HEADS).check(n_launches=4)
    Layer(n_kv=1, n=2).check(n_launches=4)


def test_a_cache_of_blocks_is_written_by_its_own_kernels():
    Layer(n=2, cache="q8_0").check(n_launches=6)


@pytest.mark.parametrize("bad", [-1, ROWS, 1 << 40])
def test_a_row_that_is_not_there_names_its_write(bad):
    layer = Layer(n=2, ids=(4, bad))
    with cupy_kernels.filled(layer.ctx, layer.values, 64, 0x11):
        fault = cupy_kernels.run(cupy_kernels.build_grouped(layer.nodes, needed={*layer.outs}))
        assert layer.nodes[fault["position"] - 1] in layer.outs[1:]
        assert (fault["source"], fault["value"], fault["limit"]) == (1, bad, ROWS)


def test_a_needed_product_is_written():
    """A callback, or another split, reads the product before its bias."""
    layer = Layer(bias=True)
    p = layer.products[0]
    want = cupy_kernels.compute(layer.ctx, p, layer.values)
    with cupy_kernels.filled(layer.ctx, layer.values, 64):
        cupy_kernels.run(cupy_kernels.build_grouped(layer.nodes, needed={*layer.outs, p}))
        np.testing.assert_array_equal(p.numpy(), want)


def overlapping(one, over, shift: int = 0, **options) -> None:
    """Results are those of separate memory where the plan gives `one(layer)` the memory of `over(layer)`."""
    layer = Layer(**options)
    with cupy_kernels.filled(layer.ctx, layer.values, 64):
        for node in layer.nodes:
            cupy_kernels.run(cupy_kernels.build([node]))
        want = [op_results.raw(t) for t in layer.outs]
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.filled(layer.ctx, layer.values, 64) as buffer:
            gs.bind_resident(one(layer), buffer, over(layer).offset + shift)
            cupy_kernels.run(cupy_kernels.build_grouped(layer.nodes, needed={*layer.outs}), order)
            assert [op_results.raw(t) for t in layer.outs] == want


OVERLAPS = {
    "values over queries that were rotated": (lambda layer: layer.products[1], lambda layer: layer.products[0], 0),
    "keys over queries that were rotated": (lambda layer: layer.products[2], lambda layer: layer.products[0], 64),
}


@pytest.mark.parametrize("which", OVERLAPS)
def test_products_that_take_the_memory_of_earlier_members_wait_for_them(which):
    """Valid node by node, as the queries are rotated before: so they must not be computed together."""
    overlapping(*OVERLAPS[which], n=3)


@pytest.mark.parametrize("which", OVERLAPS)
def test_products_that_do_not_wait_are_found(which, monkeypatch):
    monkeypatch.setattr(projections, "_may_come_first", lambda *args: True)
    with pytest.raises(AssertionError):
        overlapping(*OVERLAPS[which], n=3)


def test_queries_may_be_rotated_in_place():
    overlapping(lambda layer: layer.q, lambda layer: layer.products[0], n=3)
    layer = Layer(n=3)
    with cupy_kernels.filled(layer.ctx, layer.values, 64) as buffer:
        gs.bind_resident(layer.q, buffer, layer.products[0].offset)
        assert len(cupy_kernels.build_grouped(layer.nodes, needed={*layer.outs}).launches) == 4


def queries_over_keys(shift: int) -> None:
    """The keys are in the cache when the queries are rotated to where the keys' product lay."""
    overlapping(lambda layer: layer.q, lambda layer: layer.products[2], shift, n=3, n_kv=HEADS, keys_first=True)


@pytest.mark.parametrize("shift", [0, 64])
def test_turns_that_write_what_another_reads_are_launches_of_their_own(shift):
    queries_over_keys(shift)


def test_turns_that_do_not_wait_are_found(monkeypatch):
    monkeypatch.setattr(projections, "_are_one", lambda *args: True)
    with pytest.raises(AssertionError):
        queries_over_keys(64)


def test_what_reads_a_product_and_is_no_part_of_it_ends_the_group():
    """A group has every node that depends on its products, up to the last of them."""
    ctx = gs.Context()
    x = ctx.sqr(ctx.tensor("f32", (64, 1)))
    first = ctx.mul_mat(ctx.tensor("q4_0", (64, 8)), x)
    between = ctx.exp(first)
    second = ctx.mul_mat(ctx.tensor("q4_0", (64, 8)), x)
    assert ops.fusion_groups(gs.Graph(between, second).nodes) == []
    assert ops.fusion_groups(gs.Graph(first, second, between).nodes) == [(1, 2)]


def test_a_member_that_adds_what_is_computed_between_ends_the_group():
    ctx = gs.Context()
    x, y = ctx.sqr(ctx.tensor("f32", (64, 1))), ctx.tensor("f32", (8,))
    first, second = (ctx.mul_mat(ctx.tensor("q4_0", (64, 8)), x) for _ in range(2))
    late = ctx.add(second, ctx.sqr(y))
    graph = gs.Graph(first, second, late)
    assert [len(group) for group in ops.fusion_groups(graph.nodes)] == [2]


def test_many_columns_are_left_alone():
    layer = Layer(n=9, ids=range(9))
    assert [[layer.nodes[i].op for i in group] for group in ops.fusion_groups(layer.nodes)] == [["ROPE", "SET_ROWS"]]
