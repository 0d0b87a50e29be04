"""Columns rounded to 8 bits for one product serve later products, as long as the columns do not change."""

from collections.abc import Sequence

import cupy_devices
import cupy_kernels
import numpy as np
import op_results
import pytest
from op_results import random

import ggml_sched as gs

RNG = np.random.default_rng(16)


def check(ctx: gs.Context, outs: Sequence[gs.Tensor], n_rounded: int, groups: bool = False) -> None:
    """Assert that outputs have the bits of nodes built one by one, and the number of rounding kernels."""
    graph, values = gs.Graph(*outs), cupy_kernels.leaves(ctx, RNG)
    for order in cupy_kernels.ORDERS:
        got = []
        for together in (False, True):
            with cupy_kernels.filled(ctx, values, 64, 0x3F):
                if together:
                    builder = (cupy_kernels.build_grouped if groups else cupy_kernels.build)(graph.nodes)
                    rounded = [launch.kernel for launch in builder.launches].count("activations.quantize")
                    assert rounded == n_rounded
                    cupy_kernels.run(builder, order)
                else:
                    for node in graph.nodes:
                        cupy_kernels.run(cupy_kernels.build([node]), order)
                got.append([op_results.raw(out) for out in outs])
        assert got[0] == got[1]


def weights(ctx: gs.Context, n: int, kind: str = "q4_0") -> list[gs.Tensor]:
    return [ctx.tensor(kind, (64, 9)) for _ in range(n)]


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_queries_keys_and_values_share_what_was_rounded(ctx, columns):
    x = ctx.sqr(ctx.tensor("f32", (64, columns)))
    outs = [ctx.mul_mat(w, x) for w in (*weights(ctx, 2), *weights(ctx, 1, "q8_0"))]
    check(ctx, outs, n_rounded=1)


def test_work_memory_of_its_own_ends_it(ctx):
    x, y = (ctx.sqr(ctx.tensor("f32", (64, 1))) for _ in range(2))
    a, b, c = weights(ctx, 3)
    check(ctx, [ctx.mul_mat(a, x), ctx.mul_mat(b, y), ctx.mul_mat(c, x)], n_rounded=3)


@pytest.mark.parametrize("slots", [1, 2])
def test_experts_of_prompts_have_their_lists_beside_it(ctx, slots):
    x, ids = ctx.sqr(ctx.tensor("f32", (64, slots, 12))), ctx.tensor("i32", (2, 12), "ids")
    outs = [ctx.mul_mat_id(ctx.tensor("q4_0", (64, 9, 4)), x, ids) for _ in range(2)]
    check(ctx, [ctx.mul_mat(weights(ctx, 1)[0], x), outs[0]], n_rounded=1)
    check(ctx, outs, n_rounded=1)


def test_columns_that_a_node_writes_are_rounded_again(ctx):
    x = ctx.sqr(ctx.tensor("f32", (64, 2)))
    a, b = weights(ctx, 2)
    first = ctx.mul_mat(a, x)
    changed = ctx.cpy(ctx.view_1d(first, 1, 8), ctx.view_1d(x, 1, 64 * 4 + 12))
    second = ctx.mul_mat(b, x)
    graph = gs.Graph(first, changed, second)
    assert [node.op for node in graph.nodes if node.computes] == ["SQR", "MUL_MAT", "CPY", "MUL_MAT"]
    check(ctx, [first, changed, second], n_rounded=2)


def test_inputs_may_be_set_between_two_nodes(ctx):
    x = ctx.tensor("f32", (64, 1))
    check(ctx, [ctx.mul_mat(w, x) for w in weights(ctx, 2)], n_rounded=2)


def test_gate_and_up_share_it_too(ctx):
    x = ctx.sqr(ctx.tensor("f32", (64, 1)))
    a, b, c, d = weights(ctx, 4)
    gated = ctx.swiglu_split(ctx.mul_mat(a, x), ctx.mul_mat(b, x))
    check(ctx, [ctx.mul_mat(c, x), gated, ctx.mul_mat(d, x)], n_rounded=1, groups=True)


def test_what_a_group_writes_is_rounded_anew_where_other_columns_lay():
    """The sum, which others read too, gets the memory of columns that are done with."""
    home, ctx = gs.Context("weights"), gs.Context("nodes")
    first, second = weights(home, 2)
    scale = home.tensor("f32", 64)
    a, b = (ctx.tensor("f32", (64, 1), name, input=True) for name in "ab")
    x = ctx.sqr(a)
    product = ctx.mul_mat(first, x)
    total = ctx.add(b, b)
    normed = ctx.mul(ctx.rms_norm(total, 1e-5), scale)
    outs = [ctx.set_output(out) for out in (product, normed, ctx.mul_mat(second, total))]
    graph = gs.Graph(*outs)
    with cupy_devices.backend() as cuda, cuda.alloc_tensors(home), gs.Scheduler([cuda]) as sched:
        for tensor in home.tensors:
            tensor.set(random(RNG, *tensor.ne))
        plan = sched.alloc(graph)
        assert x.offset == total.offset and len(plan.data.groups) == 1
        for tensor in (a, b):
            tensor.set(random(RNG, *tensor.ne))
        got = []
        for callback in (None, lambda node: True):
            sched.compute(graph, callback)
            got.append([op_results.raw(out) for out in outs])
        assert got[0] == got[1]
