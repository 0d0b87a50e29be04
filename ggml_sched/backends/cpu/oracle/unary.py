"""Functions of one element, and the gated units made of them.

Invariant: they see contiguous f32 arrays only, because numpy evaluates exp and tanh
differently for strided ones.  Each `_name(part, x, out)` adds its calls; `out` may be
`x` itself, so x is read for the last time in the call that first writes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu.oracle.job import Job, Part, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import FLOATS, kernel, types


def _f(x: float | np.floating) -> np.ndarray:
    """A float32 that numpy need not convert at every call."""
    return np.array(x, np.float32)


ZERO, HALF, ONE, THREE, SIX = _f(0), _f(0.5), _f(1), _f(3), _f(6)
GELU_A, GELU_B, GELU_QUICK = _f(0.044715), _f(math.sqrt(2 / math.pi)), _f(-1.702)
GELU_END, MAX_HALF = _f(10), _f(65504)

Steps = Callable[[Part, np.ndarray, np.ndarray], None]


def _one(function: np.ufunc) -> Steps:
    return lambda part, x, out: part.do(function, x, out)


def _sigmoid_of(part: Part, x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Scratch with 1 + exp(factor * x), the divisor of sigmoids."""
    t = part.temp(x.shape)
    part.do(np.multiply, x, factor, t)
    part.do(np.exp, t, t)
    part.do(np.add, t, ONE, t)
    return t


def _sigmoid(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    part.do(np.divide, ONE, _sigmoid_of(part, x, _f(-1)), out)


def _silu(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    part.do(np.divide, x, _sigmoid_of(part, x, _f(-1)), out)


def _of_halves(formula: Steps) -> Steps:
    """A function of f16 to f16, as in ggml's tables: argument and result are rounded, except values beyond f16."""

    def steps(part: Part, x: np.ndarray, out: np.ndarray) -> None:
        rounded, half = part.temp(x.shape), part.temp(x.shape, np.float16)
        part.do(_round_to_half, x, half, rounded)
        formula(part, rounded, rounded)
        part.do(_round_to_half, rounded, half, out)

    return steps


def _round_to_half(x: np.ndarray, half: np.ndarray, out: np.ndarray) -> None:
    np.copyto(half, x, "unsafe")
    np.copyto(out, np.where(np.abs(x) <= MAX_HALF, half, x), "unsafe")


def _gelu_quick_formula(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    part.do(np.divide, x, _sigmoid_of(part, x, GELU_QUICK), out)


def _gelu_formula(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    t = part.temp(x.shape)
    part.do(np.multiply, x, x, t)
    part.do(np.multiply, t, GELU_A, t)
    part.do(np.add, t, ONE, t)
    part.do(np.multiply, t, x, t)
    part.do(np.multiply, t, GELU_B, t)
    part.do(np.tanh, t, t)
    part.do(np.add, t, ONE, t)
    part.do(np.multiply, t, HALF, t)
    part.do(np.multiply, t, x, out)


_gelu_quick, _gelu_gate = _of_halves(_gelu_quick_formula), _of_halves(_gelu_formula)


def _gelu(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    """gelu(x): x itself, unrounded, from 10 on, and 0 up to -10; the gate GEGLU has no such limits."""
    t = part.temp(x.shape)
    _gelu_gate(part, x, t)
    part.do(lambda: np.copyto(out, np.where(x >= GELU_END, x, np.where(x <= -GELU_END, ZERO, t)), "unsafe"))


def _gelu_erf(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    def run() -> None:
        t = _erf(x * math.sqrt(0.5))
        t += 1
        np.multiply(t * 0.5, x, out=out, casting="unsafe")

    part.do(run)


@cache
def _erf_coefficients() -> np.ndarray:
    # erf(x) / x is even and smooth: a Chebyshev series in x**2 over [0, 36]; beyond 6, erf is 1 in f64.
    return np.polynomial.chebyshev.chebinterpolate(
        lambda u: [math.erf(v) / v for v in np.sqrt(np.maximum((u + 1) * 18, 1e-30))], 100)


def _erf(x: np.ndarray) -> np.ndarray:
    """erf in f64, to about 1e-14."""
    x = x.astype(np.float64)
    near = np.clip(x, -6, 6)
    return np.clip(near * np.polynomial.chebyshev.chebval(near * near / 18 - 1, _erf_coefficients()), -1, 1)


def _elu(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    positive, t = part.temp(x.shape, bool), part.temp(x.shape)
    part.do(np.greater, x, ZERO, positive)
    part.do(np.expm1, x, t)
    part.do(np.copyto, t, x, where=positive)
    part.do(np.copyto, out, t)


def _step(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    part.do(np.greater, x, ZERO, out, casting="unsafe")


def _sgn(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    below = part.temp(x.shape)
    part.do(np.less, x, ZERO, below, casting="unsafe")
    part.do(np.greater, x, ZERO, out, casting="unsafe")
    part.do(np.subtract, out, below, out)


def _gate_hard(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    part.do(np.add, x, THREE, out)
    part.do(np.divide, out, SIX, out)
    part.do(np.maximum, out, ZERO, out=out)
    part.do(np.minimum, out, ONE, out=out)


def _hardswish(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    t = part.temp(x.shape)
    _gate_hard(part, x, t)
    part.do(np.multiply, x, t, out)


def _round(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    """Halves away from zero, as C's roundf."""

    def run() -> None:
        whole = np.trunc(x)
        away = (np.abs(x - whole) >= HALF).astype(np.float32)
        np.add(whole, np.copysign(away, x), out=out)

    part.do(run)


def _softplus(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    # ggml: x itself above 20, where exp would soon overflow and log1p changes nothing.
    large, t = part.temp(x.shape, bool), part.temp(x.shape)
    part.do(np.greater, x, _f(20), large)
    part.do(np.exp, x, t)
    part.do(np.log1p, t, t)
    part.do(np.copyto, t, x, where=large)
    part.do(np.copyto, out, t)


def _xielu(part: Part, x: np.ndarray, out: np.ndarray) -> None:
    alpha_n, alpha_p, beta, eps = (float_param(part.job.node, i) for i in range(1, 5))

    def run() -> None:
        above = (alpha_p * x + beta) * x
        below = (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x
        np.copyto(out, np.where(x > 0, above, below))

    part.do(run)


_FUNCTIONS: dict[str, Steps] = {
    "ABS": _one(np.absolute),
    "CEIL": _one(np.ceil),
    "ELU": _elu,
    "EXP": _one(np.exp),
    "EXPM1": _one(np.expm1),
    "FLOOR": _one(np.floor),
    "GELU": _gelu,
    "GELU_ERF": _gelu_erf,
    "GELU_QUICK": _gelu_quick,
    "HARDSIGMOID": _gate_hard,
    "HARDSWISH": _hardswish,
    "NEG": _one(np.negative),
    "RELU": lambda part, x, out: part.do(np.maximum, x, ZERO, out=out),
    "ROUND": _round,
    "SGN": _sgn,
    "SIGMOID": _sigmoid,
    "SILU": _silu,
    "SOFTPLUS": _softplus,
    "STEP": _step,
    "TANH": _one(np.tanh),
    "TRUNC": _one(np.trunc),
    "XIELU": _xielu,
}


@kernel(*(f"UNARY:{kind}" for kind in _FUNCTIONS), fits=types(None, FLOATS, like=0), inplace=0b1)
def unary(job: Job) -> None:
    function = _FUNCTIONS[job.node.op.partition(":")[2]]
    for part in job.parts():
        function(part, part.f32(0, dense=True), part.out(dense=True))


_GATES: dict[str, Steps] = {
    "REGLU": _FUNCTIONS["RELU"],
    "GEGLU": _gelu_gate,
    "SWIGLU": _silu,
    "GEGLU_ERF": _gelu_erf,
    "GEGLU_QUICK": _gelu_quick,
}
_GLU_TYPES = types(None, FLOATS, optional=(FLOATS,))


def _glu_fits(node: Tensor) -> bool:
    """Two sources of the result's shape, or one of twice its width."""
    if not _GLU_TYPES(node):
        return False
    if len(node.src) == 2 and node.src[1] is not None:
        return node.src[1].type == node.type and node.src[0].ne == node.src[1].ne == node.ne
    return node.src[0].ne == (2 * node.ne[0], *node.ne[1:])


def _halves(job: Job, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """(the gate's argument, the factor)."""
    if job.has(1):
        return part.f32(0), part.f32(1)
    both = part.f32(0)
    n = job.node.ne[0]
    a, b = both[..., :n], both[..., n:]
    return (b, a) if int_param(job.node, 1) else (a, b)


@kernel(*(f"GLU:{kind}" for kind in _GATES), fits=_glu_fits, inplace=0b11)
def glu(job: Job) -> None:
    function = _GATES[job.node.op.partition(":")[2]]
    for part in job.parts():
        x, factor = _halves(job, part)
        t = part.temp(x.shape)
        part.do(np.copyto, t, x)
        function(part, t, t)
        part.do(np.multiply, t, factor, part.out())


@kernel("GLU:SWIGLU_OAI", fits=_glu_fits, inplace=0b11)
def swiglu_oai(job: Job) -> None:
    """OpenAI's variant: both halves limited, a sigmoid of slope alpha, and the factor plus one."""
    alpha, limit = float_param(job.node, 2), float_param(job.node, 3)
    for part in job.parts():
        x, factor = _halves(job, part)
        t, y = part.temp(x.shape), part.temp(x.shape)
        part.do(np.minimum, x, _f(limit), out=t)
        part.do(np.minimum, factor, _f(limit), out=y)
        part.do(np.maximum, y, _f(-limit), out=y)
        part.do(np.add, y, ONE, y)
        part.do(np.multiply, y, t, y)
        part.do(np.divide, y, _sigmoid_of(part, t, _f(-alpha)), part.out())
