"""Launches of elementwise.cu: arithmetic, functions of one element, gated units."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder, Op, Place, ScratchView, joined, spread
from ggml_sched.backends.cupy.ops._oracle import float_param, int_param, kind, like_oracle

__all__ = ["OPS"]

PARAMETERS = np.dtype([("p", "<f4", 4)])
"""`struct Parameters`."""

_BINARY = ("ADD", "SUB", "MUL", "DIV")

_PLAIN = ("SCALE", "SQR", "SQRT", "LOG", "CLAMP")

_FUNCTIONS = ("ABS", "CEIL", "ELU", "EXP", "EXPM1", "FLOOR", "GELU", "GELU_ERF", "GELU_QUICK", "HARDSIGMOID",
              "HARDSWISH", "NEG", "RELU", "ROUND", "SGN", "SIGMOID", "SILU", "SOFTPLUS", "STEP", "TANH", "TRUNC",
              "XIELU")

_NUMBERS = {name: np.int32(i) for i, name in enumerate((*_PLAIN, *_FUNCTIONS, "GELU_GATE"))}
"""`enum Unary`."""

_FIRST_PARAMETER = {"UNARY:XIELU": 1, "GLU:SWIGLU_OAI": 2}
"""Where op_params begin that functions read."""

_GATES = {"REGLU": "RELU", "GEGLU": "GELU_GATE", "SWIGLU": "SILU", "GEGLU_ERF": "GELU_ERF", "GEGLU_QUICK": "GELU_QUICK",
          "SWIGLU_OAI": "SILU"}


def _parameters(node: Tensor) -> np.ndarray:
    first = _FIRST_PARAMETER.get(node.op, 0)
    return np.array([(tuple(float_param(node, first + i) for i in range(4)),)], PARAMETERS)


def _views(node: Tensor, *sources: Place, to: Place) -> list[np.ndarray | ScratchView]:
    """Views of the sources and the result, with as few extents as their layouts allow: indices are cheap then."""
    full = [spread(source, node.ne) for source in sources]
    if None not in full:
        _, places = joined(node.ne, (*full, to), 0)
        return [place.arg() for place in places]
    return [place.arg() for place in (*sources, to)]


def _binary(b: Builder, node: Tensor) -> None:
    if node.n_elements == 0:
        return
    number = _BINARY.index(node.op) if node.op in _BINARY else 0        # ADD1 adds one element to all
    views = _views(node, b.source_place(node, 0), b.source_place(node, 1), to=b.place(node))
    b.flat("elementwise.binary", node.n_elements, *views, np.int64(node.n_elements), np.int32(number),
           kind(node.src[0]), kind(node.src[1]), kind(node))


def _unary(b: Builder, node: Tensor) -> None:
    if node.n_elements:
        views = _views(node, b.source_place(node, 0), to=b.place(node))
        b.flat("elementwise.unary", node.n_elements, *views, np.int64(node.n_elements),
               _NUMBERS[node.op.rpartition(":")[2]], kind(node.src[0]), kind(node), _parameters(node))


def _glu(b: Builder, node: Tensor) -> None:
    if node.n_elements == 0:
        return
    gate = b.source_place(node, 0)
    if len(node.src) == 2 and node.src[1] is not None:
        factor = b.source_place(node, 1)
    else:
        gate = gate.shaped(node.ne)
        factor = gate.moved(node.ne[0] * gate.nb[0])
        if int_param(node, 1):
            gate, factor = factor, gate
    name = node.op.rpartition(":")[2]
    b.flat("elementwise.glu", node.n_elements, *_views(node, gate, factor, to=b.place(node)), np.int64(node.n_elements),
           _NUMBERS[_GATES[name]], np.int32(name == "SWIGLU_OAI"), kind(node), _parameters(node))


OPS: dict[str, Op] = {
    **{op: like_oracle(op, _binary) for op in (*_BINARY, "ADD1")},
    **{op: like_oracle(op, _unary) for op in (*_PLAIN, *(f"UNARY:{name}" for name in _FUNCTIONS))},
    **{f"GLU:{name}": like_oracle(f"GLU:{name}", _glu) for name in _GATES},
}
