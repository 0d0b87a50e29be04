"""CUDA kernels beside the CPU's compiled ones: zeros of the same sign, NaN and infinity at the same places.

Near is not enough there: 1 / -0.0 is -inf, and what one backend computes may go on on the other.
"""

from __future__ import annotations

import cupy_kernels
import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import ops

SPECIAL = np.float32([0, -0.0, np.nan, np.inf, -np.inf, 1, -1, 1e-40, -1e-40, 3e38, -3e38, 0.5, -0.5, 2.5, -2.5, 3, -3,
                      9.5, -9.5])
PARAMETERS = {"SCALE": [(1.5, 0.0), (-1.0, 0.0), (1.5, -0.25), (1.0, -0.0)],
              "CLAMP": [(0.0, 1.0), (-1.0, 0.0), (-1.0, -0.0), (-0.5, 2.0), (-np.inf, np.inf)]}
UNARY = sorted(op for op in ops.OPS if op.startswith("UNARY:")) + ["SCALE", "SQR", "SQRT", "LOG", "CLAMP"]
GLU = sorted(op for op in ops.OPS if op.startswith("GLU:"))
XIELU = np.float32([0.8, 0.9, 0.5, -1e-6]).view(np.int32).tolist()
OAI = np.float32([1.702, 7.0]).view(np.int32).tolist()


def by_the_cpu(ctx: gs.Context, node: gs.Tensor, values: dict) -> np.ndarray:
    with gs.CpuBackend(1, kernels="compiled") as cpu, cpu.alloc_tensors(ctx):
        for tensor, array in values.items():
            tensor.set(array)
        cpu.graph_compute(gs.Graph(node))
        return node.numpy()


def assert_same(ctx: gs.Context, node: gs.Tensor, values: dict) -> np.ndarray:
    want, got = by_the_cpu(ctx, node, values), cupy_kernels.compute(ctx, node, values, exact=True)
    for what in (np.isnan, np.isinf, lambda x: (x == 0) & np.signbit(x), lambda x: (x == 0) & ~np.signbit(x)):
        there = what(want) != what(got)
        given = [array[there][:4] for array in values.values()]
        assert not there.any(), f"{node.op} of {given}: {got[there][:4]}, the CPU has {want[there][:4]}"
    finite = np.isfinite(want)
    assert np.allclose(got[finite], want[finite], rtol=2e-3, atol=1e-6)
    return got


def nodes(ctx: gs.Context, op: str, a: gs.Tensor) -> list[gs.Tensor]:
    kind, _, name = op.rpartition(":")
    if name == "XIELU":
        return [ctx.restore(op, "f32", a.ne, a.nb, (a,), op_params=(15, *XIELU))]
    if kind:
        return [ctx.unary(a, name)]
    return [getattr(ctx, op.lower())(a, *arguments) for arguments in PARAMETERS.get(op, [()])]


@pytest.mark.parametrize("op", UNARY)
def test_functions_of_one_element(op):
    ctx = gs.Context()
    a = ctx.tensor("f32", len(SPECIAL))
    for node in nodes(ctx, op, a):
        assert_same(ctx, node, {a: SPECIAL})


@pytest.mark.parametrize("op", GLU)
def test_gated_units(op):
    ctx, n = gs.Context(), len(SPECIAL)
    a, b = ctx.tensor("f32", (n, n)), ctx.tensor("f32", (n, n))
    parameters = {"GLU:SWIGLU_OAI": (5, 0, *OAI)}.get(op)
    node = ctx.glu_split(a, b, op[4:]) if parameters is None else ctx.restore(op, "f32", a.ne, a.nb, (a, b),
                                                                             op_params=parameters)
    gates, factors = np.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    assert_same(ctx, node, {a: gates, b: factors})


@pytest.mark.parametrize("name", ["SWIGLU", "GEGLU", "REGLU"])
def test_gated_units_of_products(name):
    """As one kernel: f32 weights of one element are the special values themselves."""
    ctx, n = gs.Context(), len(SPECIAL)
    gate, up, x = ctx.tensor("f32", (1, n)), ctx.tensor("f32", (1, n)), ctx.tensor("f32", (1, 1))
    node = ctx.glu_split(ctx.mul_mat(gate, x), ctx.mul_mat(up, x), name)
    gates, factors = np.meshgrid(SPECIAL, SPECIAL)
    for gate_values, up_values in zip(gates, factors, strict=True):
        values = {gate: gate_values, up: up_values, x: np.ones(1)}
        want, got = by_the_cpu(ctx, node, values), cupy_kernels.compute(ctx, node, values, exact=True)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        zero = (want == 0) | (got == 0)
        assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


def test_relu_of_zeros_and_nan():
    """As ggml has zeros; NaN goes through, so that it is seen."""
    ctx = gs.Context()
    a = ctx.tensor("f32", 70)
    x = np.zeros(70, np.float32)
    x[::2] = -0.0
    got = assert_same(ctx, ctx.unary(a, "RELU"), {a: x})
    assert not got.any() and not np.signbit(got).any()
    x[33] = np.nan
    assert np.flatnonzero(np.isnan(assert_same(ctx, ctx.unary(a, "RELU"), {a: x}))).tolist() == [33]
