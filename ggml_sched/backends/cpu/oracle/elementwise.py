"""Arithmetic and functions of one element, and the gated units made of them.

All is computed in f32: sources of f16 and bf16 are converted to it, and results are rounded once to their type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ggml_sched.backends.cpu.oracle.operands import Operands, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import kernel, repeated
from ggml_sched.graph.quants.bits import round_away

if TYPE_CHECKING:
    from ggml_sched.backends.cpu.oracle.operands import Floats

_BINARY_OPS = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}


@kernel(*_BINARY_OPS)
def binary(of: Operands) -> Floats:
    found: Floats = _BINARY_OPS[of.node.op](of.f32(0), repeated(of.f32(1), of.dst.shape))
    return found


@kernel("ADD1")
def add1(of: Operands) -> Floats:
    return of.f32(0) + of.f32(1)


@kernel("SCALE")
def scale(of: Operands) -> Floats:
    bias = float_param(of.node, 1)
    scaled = of.f32(0) * float_param(of.node, 0)
    return scaled + bias if bias else scaled


@kernel("CLAMP")
def clamp(of: Operands) -> Floats:
    return np.maximum(np.minimum(of.f32(0), float_param(of.node, 1)), float_param(of.node, 0))


# -- functions ----------------------------------------------------------------------------

Function: TypeAlias = Callable[["Floats"], np.ndarray]
"""A function from a contiguous f32 array to an array of results."""

GELU_A, GELU_B = np.float32(0.044715), np.float32(math.sqrt(2 / math.pi))
MAX_HALF = np.float32(65504)


def _divisor(x: Floats, factor: float | np.float32 = -1) -> Floats:
    """The divisor of a sigmoid: 1 + exp(factor * x)."""
    found: Floats = np.exp(x * np.float32(factor)) + np.float32(1)
    return found


def _of_halves(formula: Function) -> Function:
    """The formula as ggml looks it up in a table from f16 to f16: argument and result are rounded to f16.  Values
    beyond the range of f16 are not rounded."""

    def rounded(x: Floats) -> Floats:
        return np.where(np.abs(x) <= MAX_HALF, x.astype(np.float16), x).astype(np.float32)

    return lambda x: rounded(formula(rounded(x)))


def _gelu_formula(x: Floats) -> Floats:
    found: Floats = (np.tanh((x * x * GELU_A + np.float32(1)) * x * GELU_B) + np.float32(1)) * np.float32(0.5) * x
    return found


_gelu_gate = _of_halves(_gelu_formula)
_gelu_quick = _of_halves(lambda x: x / _divisor(x, -1.702))


def _gelu(x: Floats) -> Floats:
    """gelu(x), as ggml has it: for x >= 10 it is x itself, unrounded, and for x <= -10 it is 0.  The function of GEGLU
    has no such limits."""
    return np.where(x >= 10, x, np.where(x <= -10, np.float32(0), _gelu_gate(x)))


def _gelu_erf(x: Floats) -> Floats:
    return ((_erf(x * math.sqrt(0.5)) + 1) * 0.5 * x).astype(np.float32)


@cache
def _erf_coefficients() -> np.ndarray:
    # erf(x) / x is even and smooth: a Chebyshev series in x**2 over [0, 36]; beyond 6, erf is 1 in f64.
    return np.polynomial.chebyshev.chebinterpolate(
        lambda u: [math.erf(v) / v for v in np.sqrt(np.maximum((u + 1) * 18, 1e-30))], 100)


def _erf(x: np.ndarray) -> np.ndarray:
    """erf in f64, to about 1e-14."""
    x = x.astype(np.float64)
    near = np.clip(x, -6, 6)
    series = np.polynomial.chebyshev.chebval(near * near / 18 - 1, _erf_coefficients())
    found: np.ndarray = np.clip(near * series, -1, 1)
    return found


def _hard_sigmoid(x: Floats) -> Floats:
    found: Floats = np.minimum(np.maximum((x + np.float32(3)) / np.float32(6), np.float32(0)), np.float32(1))
    return found


_FUNCTIONS: dict[str, Function] = {
    "ABS": np.absolute,
    "CEIL": np.ceil,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "EXP": np.exp,
    "EXPM1": np.expm1,
    "FLOOR": np.floor,
    "GELU": _gelu,
    "GELU_ERF": _gelu_erf,
    "GELU_QUICK": _gelu_quick,
    "HARDSIGMOID": _hard_sigmoid,
    "HARDSWISH": lambda x: x * _hard_sigmoid(x),
    "NEG": np.negative,
    "RELU": lambda x: np.maximum(x, np.float32(0)),
    "ROUND": round_away,
    "SGN": lambda x: (x > 0).astype(np.float32) - (x < 0),
    "SIGMOID": lambda x: np.float32(1) / _divisor(x),
    "SILU": lambda x: x / _divisor(x),
    # As in ggml, x itself above 20: there log1p(exp(x)) equals x in f32, and exp(x) would overflow for larger x.
    "SOFTPLUS": lambda x: np.where(x > 20, x, np.log1p(np.exp(x))),
    "STEP": lambda x: x > 0,
    "TANH": np.tanh,
    "TRUNC": np.trunc,
}
_OPS: dict[str, Function] = {"SQR": np.square, "SQRT": np.sqrt, "LOG": np.log,
                             **{f"UNARY:{name}": function for name, function in _FUNCTIONS.items()}}


@kernel(*_OPS)
def unary(of: Operands) -> Floats:
    return _OPS[of.node.op](of.dense(0))


@kernel("UNARY:XIELU")
def xielu(of: Operands) -> Floats:
    alpha_n, alpha_p, beta, eps = (float_param(of.node, i) for i in range(1, 5))
    x = of.dense(0)
    below = (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x
    return np.where(x > 0, (alpha_p * x + beta) * x, below)


# -- gated units --------------------------------------------------------------------------

_GATES: dict[str, Function] = {
    "REGLU": _FUNCTIONS["RELU"],
    "GEGLU": _gelu_gate,
    "SWIGLU": _FUNCTIONS["SILU"],
    "GEGLU_ERF": _gelu_erf,
    "GEGLU_QUICK": _gelu_quick,
}


def _halves(of: Operands) -> tuple[Floats, Floats]:
    """(the argument of the gate's function, contiguous; the factor): two sources, or the halves of one."""
    if of.has(1):
        return of.dense(0), of.f32(1)
    a, b = np.split(of.f32(0), 2, axis=-1)
    return (np.ascontiguousarray(b), a) if int_param(of.node, 1) else (np.ascontiguousarray(a), b)


@kernel(*(f"GLU:{kind}" for kind in _GATES))
def glu(of: Operands) -> Floats:
    x, factor = _halves(of)
    return _GATES[of.node.op.partition(":")[2]](x) * factor


@kernel("GLU:SWIGLU_OAI")
def swiglu_oai(of: Operands) -> Floats:
    """OpenAI's variant of SWIGLU (gpt-oss): argument and factor are limited, the sigmoid's argument is multiplied by
    alpha, and the factor increased by one."""
    alpha, limit = float_param(of.node, 2), float_param(of.node, 3)
    x, factor = _halves(of)
    x = np.minimum(x, limit)
    y = np.maximum(np.minimum(factor, limit), -limit) + np.float32(1)
    return y * x / _divisor(x, -alpha)
