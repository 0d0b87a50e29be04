"""Two products and their gated unit as one kernel: which nodes it fuses, and that it gives the bits of the three single
kernels."""

from __future__ import annotations

import cupy_kernels
import numpy as np
import op_results
import pytest
from op_results import random, width

import ggml_sched as gs
from ggml_sched.backends.cupy import ops

RNG = np.random.default_rng(13)


def feed_forward(kind: str, n_tokens: int = 1, op: str = "swiglu_split", rows: int = 37):
    ctx, k = gs.Context(), width(64, kind)
    x = ctx.tensor("f32", (k, n_tokens))
    a, b = ctx.mul_mat(ctx.tensor(kind, (k, rows)), x), ctx.mul_mat(ctx.tensor(kind, (k, rows)), x)
    return ctx, getattr(ctx, op)(a, b)


def experts(kind: str, n_tokens: int = 1, n_experts: int = 5):
    ctx, k = gs.Context(), width(64, kind)
    x, ids = ctx.tensor("f32", (k, 1, n_tokens)), ctx.tensor("i32", (2, n_tokens), "ids")
    a, b = (ctx.mul_mat_id(ctx.tensor(kind, (k, 19, n_experts)), x, ids) for _ in range(2))
    return ctx, ctx.swiglu_split(a, b)


def values_of(ctx: gs.Context) -> dict:
    return {t: RNG.integers(0, 5, t.ne[::-1]).astype(np.int32) if t.name == "ids" else random(RNG, *t.ne)
            for t in ctx.tensors if t.op == "NONE"}


def check(ctx: gs.Context, out: gs.Tensor, n_launches: int, exact: bool = False) -> None:
    """The group's bits are those of its members one by one, whatever the order of threads; they stay unwritten."""
    graph, values = gs.Graph(out), values_of(ctx)
    (group,) = ops.fusion_groups(graph.nodes)
    members = [graph.nodes[i] for i in group]
    assert members[-1] is out
    for order in cupy_kernels.ORDERS:
        with cupy_kernels.placed(ctx, order, 64, 0x3F):
            for tensor, array in values.items():
                tensor.set(array)
            before = [op_results.raw(t) for t in members]
            builder = cupy_kernels.Builder("EMULATED", needed={out}, exact=exact)
            ops.build_group(builder, group, members)
            assert len(builder.launches) == n_launches
            assert cupy_kernels.run(builder, order)["position"] == 0
            assert [op_results.raw(t) for t in members[:-1]] == before[:-1]
            got = op_results.raw(out)
            cupy_kernels.run(cupy_kernels.build(members, exact=exact), order)
            want = out.numpy()
            np.testing.assert_allclose(np.frombuffer(got, np.float32), want.ravel(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["f32", "f16", "q4_0", "q6_K", "mxfp4"])
def test_a_feed_forward_of_one_token_is_two_launches_at_most(kind):
    check(*feed_forward(kind), n_launches=2 if kind in op_results.QUANTISED else 1)
    check(*feed_forward(kind), n_launches=1, exact=True)


@pytest.mark.parametrize("op", ["swiglu_split", "geglu_split", "reglu_split"])
@pytest.mark.parametrize("n_tokens, rows", [(1, 1), (3, 8), (8, 9)])
def test_gates_and_several_tokens(op, n_tokens, rows):
    check(*feed_forward("q8_0", n_tokens, op, rows), n_launches=2)


@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("kind", ["bf16", "q4_K"])
def test_chosen_experts(kind, n_tokens):
    check(*experts(kind, n_tokens), n_launches=2 if kind == "q4_K" else 1)


def test_what_is_no_feed_forward_of_few_tokens_is_left_alone():
    assert not ops.fusion_groups(gs.Graph(feed_forward("q4_0", 9)[1]).nodes)
    ctx = gs.Context()
    x, y = ctx.tensor("f32", (64, 1)), ctx.tensor("f32", (64, 1))
    w, v, small = ctx.tensor("q4_0", (64, 8)), ctx.tensor("q4_0", (64, 8)), ctx.tensor("q8_0", (64, 8))

    def groups(a: gs.Tensor, b: gs.Tensor, *more: gs.Tensor) -> list:
        return ops.fusion_groups(gs.Graph(ctx.swiglu_split(a, b), *more).nodes)

    assert groups(ctx.mul_mat(w, x), ctx.mul_mat(v, x))
    assert not groups(ctx.mul_mat(w, x), ctx.mul_mat(v, y))         # other columns
    assert not groups(ctx.mul_mat(w, x), ctx.mul_mat(small, x))     # other types
    both = ctx.mul_mat(w, x)
    assert not groups(both, both)
    read = ctx.mul_mat(w, x)
    assert not groups(read, ctx.mul_mat(v, x), ctx.sqr(read))       # another node reads a product


def test_members_that_are_needed_are_computed_one_by_one():
    ctx, out = feed_forward("q4_0")
    nodes = [node for node in gs.Graph(out).nodes if node.computes]
    with gs.CpuBackend(1) as backend, backend.alloc_tensors(ctx):
        whole = cupy_kernels.Builder("EMULATED", needed={out, nodes[0]})
        ops.build_group(whole, range(3), nodes)
        assert [launch.kernel.split(".")[0] for launch in whole.launches].count("elementwise") == 1


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_of_no_expert_is_found_in_the_group(bad):
    ctx, out = experts("f32")
    nodes = [node for node in gs.Graph(out).nodes if node.computes]
    values = values_of(ctx)
    for t in values:
        if t.name == "ids":
            values[t][..., 1] = bad
    with gs.CpuBackend(1) as backend, op_results.place(ctx, backend):
        for tensor, array in values.items():
            tensor.set(array)
        builder = cupy_kernels.Builder("EMULATED", needed={out})
        ops.build_group(builder, (3, 4, 5), nodes)
        fault = cupy_kernels.run(builder)
        assert (fault["position"], fault["source"], fault["value"], fault["limit"]) == (6, 2, bad, 5)
