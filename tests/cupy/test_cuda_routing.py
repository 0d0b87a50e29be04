"""Experts: ids and weights from the router's scores in one launch, and the weighted sum of results in another."""

import cupy_kernels
import numpy as np
import op_results
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import ops
from ggml_sched.backends.cupy.ops import routing

RNG = np.random.default_rng(26)
FULL = ["SOFT_MAX", "ARGSORT", "GET_ROWS", "SUM_ROWS", "CLAMP", "DIV"]


def found(*outs: gs.Tensor) -> list[list[str]]:
    nodes = gs.Graph(*outs).nodes
    return [[nodes[i].op for i in group] for group in ops.fusion_groups(nodes)]


def chosen(ctx: gs.Context, n: int, used: int, tokens: int, normalised: bool = True, **options
           ) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
    """The scores' soft max, the order of the experts, and the weights of the chosen ones."""
    scores = ctx.soft_max(ctx.tensor("f32", (n, tokens), "scores"), **options)
    order = ctx.argsort(scores, "desc")
    ids = ctx.view_2d(order, used, tokens, order.nb[1])
    weights = ctx.get_rows(ctx.reshape_3d(scores, 1, n, tokens), ids)
    if normalised:
        weights = ctx.reshape_2d(weights, used, tokens)
        weights = ctx.div(weights, ctx.clamp(ctx.sum_rows(weights), 6e-5, float("inf")))
    return scores, order, weights


def same_bits(ctx: gs.Context, outs: list[gs.Tensor], n_launches: int, values: dict | None = None) -> None:
    """The fused launches give the bits of the parts, in every order of threads and blocks."""
    graph = gs.Graph(*outs)
    values = values or cupy_kernels.leaves(ctx, RNG)
    for order in cupy_kernels.ORDERS:
        got = []
        for build in (cupy_kernels.build, cupy_kernels.build_grouped):
            with cupy_kernels.placed(ctx, order, 64, 0x3F):
                op_results.set_values(values)
                options = {"needed": set(outs)} if build is cupy_kernels.build_grouped else {}
                builder = build(graph.nodes, **options)
                assert cupy_kernels.run(builder, order)["position"] == 0
                got.append([op_results.raw(t) for t in outs])
        assert got[0] == got[1]
        assert len(builder.launches) == n_launches


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("n", "used", "tokens"), [(8, 2, 1), (128, 8, 1), (60, 4, 7), (1, 1, 3), (200, 32, 2),
                                                   (1000, 9, 1)])
def test_experts_are_chosen_in_one_launch(ctx, n, used, tokens, normalised):
    _, order, weights = chosen(ctx, n, used, tokens, normalised)
    assert found(order, weights) == [FULL if normalised else FULL[:3]]
    same_bits(ctx, [order, weights], 1)


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf, 0.0, 200.0])
def test_scores_that_are_equal_or_not_finite_are_ranked_as_by_the_parts(ctx, score):
    _, order, weights = chosen(ctx, 16, 4, 3)
    values = cupy_kernels.leaves(ctx, RNG)
    values[ctx.tensors[0]][..., 1, 3:9] = score
    same_bits(ctx, [order, weights], 1, values)


def test_what_is_read_elsewhere_is_computed_one_by_one(ctx):
    scores, order, weights = chosen(ctx, 16, 4, 2)
    outs = [order, weights, ctx.sqr(scores)]
    assert found(*outs) == []
    same_bits(ctx, outs, 7)


def test_a_needed_member_is_written(ctx):
    scores, order, weights = chosen(ctx, 16, 4, 2)
    nodes = gs.Graph(order, weights).nodes
    with cupy_kernels.filled(ctx, {}):
        assert len(cupy_kernels.build_grouped(nodes, needed={order, weights, scores}).launches) == 6


@pytest.mark.parametrize("wire", [
    lambda ctx: chosen(ctx, 1030, 4, 1), lambda ctx: chosen(ctx, 64, 40, 1),
    lambda ctx: chosen(ctx, 16, 4, 2, mask=ctx.tensor("f32", (16, 2)))],
    ids=["too many experts", "too many chosen", "a mask"])
def test_other_choices_are_left_alone(ctx, wire):
    _, order, weights = wire(ctx)
    assert found(order, weights) == []


def over_the_scores() -> None:
    """The order lies over the scores of the next token: one by one these have been read by then."""
    ctx = gs.Context()
    _, order, weights = chosen(ctx, 16, 4, 3)
    values = cupy_kernels.leaves(ctx, RNG)
    with cupy_kernels.filled(ctx, values, 64):
        cupy_kernels.run(cupy_kernels.build(gs.Graph(order, weights).nodes))
        want = [op_results.raw(t) for t in (order, weights)]
    for threads in cupy_kernels.ORDERS:
        with cupy_kernels.filled(ctx, values, 64) as buffer:
            gs.bind_resident(order, buffer, ctx.tensors[0].offset + 64)
            cupy_kernels.run(cupy_kernels.build_grouped(gs.Graph(order, weights).nodes, needed={order, weights}),
                             threads)
            assert [op_results.raw(t) for t in (order, weights)] == want


def test_an_order_over_the_scores():
    over_the_scores()


def test_an_order_over_scores_that_are_still_read_is_found(monkeypatch):
    monkeypatch.setattr(routing, "apart", lambda *args: True)
    with pytest.raises(AssertionError):
        over_the_scores()


# -- the sum --------------------------------------------------------------------------------------


def weighted(ctx: gs.Context, n: int, used: int, tokens: int) -> tuple[gs.Tensor, gs.Tensor]:
    """The product of results and weights, and the sum of its parts."""
    x = ctx.mul(ctx.tensor("f32", (n, used, tokens)), ctx.tensor("f32", (1, used, tokens)))
    parts = [ctx.view_2d(x, n, tokens, x.nb[2], i * x.nb[1]) for i in range(used)]
    out = parts[0]
    for part in parts[1:]:
        out = ctx.add(out, part)
    return x, out


@pytest.mark.parametrize(("n", "used", "tokens"), [(64, 2, 1), (2048, 8, 1), (33, 3, 5), (1, 4, 2)])
def test_a_weighted_sum_is_one_launch(ctx, n, used, tokens):
    _, out = weighted(ctx, n, used, tokens)
    assert found(out) == [["MUL", *["ADD"] * (used - 1)]]
    same_bits(ctx, [out], 1)


def test_a_sum_of_some_parts_or_in_another_order_is_left_alone(ctx):
    x, _ = weighted(ctx, 16, 3, 2)
    first, second, third = (ctx.view_2d(x, 16, 2, x.nb[2], i * x.nb[1]) for i in range(3))
    assert found(ctx.add(first, third)) == []
    assert found(ctx.add(ctx.add(second, first), third)) == []


def test_a_product_that_others_read_is_written(ctx):
    x, out = weighted(ctx, 16, 3, 2)
    assert found(out, ctx.sqr(x)) == []
    with cupy_kernels.filled(ctx, {}):
        assert len(cupy_kernels.build_grouped(gs.Graph(out).nodes, needed={out, x}).launches) == 3


def sum_over_weights() -> None:
    """The sum lies over the weights, which each of its elements reads."""
    ctx = gs.Context()
    x, out = weighted(ctx, 8, 4, 2)
    values = cupy_kernels.leaves(ctx, RNG)
    want = cupy_kernels.compute(ctx, out, values)
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.filled(ctx, values, 64) as buffer:
            gs.bind_resident(out, buffer, x.src[1].offset)
            cupy_kernels.run(cupy_kernels.build_grouped(gs.Graph(out).nodes, needed={out}), order)
            np.testing.assert_array_equal(out.numpy(), want)


def test_a_sum_over_its_weights():
    sum_over_weights()


def test_a_sum_over_weights_that_are_still_read_is_found(monkeypatch):
    monkeypatch.setattr(routing, "apart", lambda *args: True)
    with pytest.raises(AssertionError):
        sum_over_weights()
