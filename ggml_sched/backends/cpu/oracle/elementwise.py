"""Arithmetic, element by element: add sub mul div, add1, scale, sqr sqrt log, clamp.

All in f32; f16 and bf16 are converted on the way in and out, rounded once.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu.oracle.job import Job, float_param
from ggml_sched.backends.cpu.oracle.registry import FLOATS, Fits, kernel, types

_UNARY = types(None, FLOATS, like=0)
_BINARY = types(None, FLOATS, FLOATS, like=0)


def _repeats(fits: Fits, i: int) -> Fits:
    """`fits`, and source i repeats to the result's extents."""

    def check(node: Tensor) -> bool:
        if not fits(node):
            return False
        if node.n_elements == 0:
            return True
        return all(have and want % have == 0 for have, want in zip(node.src[i].ne, node.ne, strict=True))

    return check


_BINARY_OPS = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}


@kernel(*_BINARY_OPS, fits=_repeats(_BINARY, 1), inplace=0b11)
def binary(job: Job) -> None:
    function = _BINARY_OPS[job.node.op]
    if job.node.n_elements:
        job.operand(1, job.dst.shape)
    for part in job.parts():
        part.do(function, part.f32(0), part.f32(1), part.out())


@kernel("ADD1", fits=lambda node: _BINARY(node) and node.src[1].n_elements == 1, inplace=0b11)
def add1(job: Job) -> None:
    for part in job.parts():
        part.do(np.add, part.f32(0), part.f32(1), part.out())


@kernel("SCALE", fits=_UNARY, inplace=0b1)
def scale(job: Job) -> None:
    factor, bias = np.array(float_param(job.node, 0)), np.array(float_param(job.node, 1))
    for part in job.parts():
        out = part.out()
        part.do(np.multiply, part.f32(0), factor, out)
        if bias:
            part.do(np.add, out, bias, out)


@kernel("SQR", fits=_UNARY, inplace=0b1)
def sqr(job: Job) -> None:
    for part in job.parts():
        part.do(np.square, part.f32(0), part.out())


@kernel("SQRT", fits=_UNARY, inplace=0b1)
def sqrt(job: Job) -> None:
    for part in job.parts():
        part.do(np.sqrt, part.f32(0), part.out())


@kernel("LOG", fits=_UNARY, inplace=0b1)
def log(job: Job) -> None:
    for part in job.parts():
        part.do(np.log, part.f32(0, dense=True), part.out(dense=True))


@kernel("CLAMP", fits=_UNARY, inplace=0b1)
def clamp(job: Job) -> None:
    low, high = np.array(float_param(job.node, 0)), np.array(float_param(job.node, 1))
    for part in job.parts():
        out = part.out()
        part.do(np.minimum, part.f32(0), high, out=out)
        part.do(np.maximum, out, low, out=out)
