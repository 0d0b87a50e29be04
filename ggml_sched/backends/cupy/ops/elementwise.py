"""Launches of elementwise.cu: arithmetic, functions of one element, gated units."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder, scratch_size, struct
from ggml_sched.backends.cupy.ops import rounding
from ggml_sched.backends.cupy.ops.blocks import is_multiple
from ggml_sched.backends.cupy.ops.matrix import PRODUCTS, is_few, most_work
from ggml_sched.backends.cupy.ops.registry import computes, float_param, int_param, kind, optional
from ggml_sched.backends.cupy.regions import Region, joined, spread

PARAMETERS = np.dtype([("p", "<f4", 4)])
"""`struct Parameters` of elementwise.cu."""

_BINARY = ("ADD", "SUB", "MUL", "DIV")

_PLAIN = ("SCALE", "SQR", "SQRT", "LOG", "CLAMP")

_FUNCTIONS = ("ABS", "CEIL", "ELU", "EXP", "EXPM1", "FLOOR", "GELU", "GELU_ERF", "GELU_QUICK", "HARDSIGMOID",
              "HARDSWISH", "NEG", "RELU", "ROUND", "SGN", "SIGMOID", "SILU", "SOFTPLUS", "STEP", "TANH", "TRUNC",
              "XIELU")

_NUMBERS = {name: np.int32(i) for i, name in enumerate((*_PLAIN, *_FUNCTIONS, "GELU_GATE"))}
"""`enum Unary` of elementwise.cu."""

_FIRST_PARAMETER = {"UNARY:XIELU": 1, "GLU:SWIGLU_OAI": 2}
"""{op: the index of the first of op_params that its function reads}, where that is not 0."""

_GATES = {"REGLU": "RELU", "GEGLU": "GELU_GATE", "SWIGLU": "SILU", "GEGLU_ERF": "GELU_ERF", "GEGLU_QUICK": "GELU_QUICK",
          "SWIGLU_OAI": "SILU"}


def _parameters(node: Tensor) -> np.ndarray:
    first = _FIRST_PARAMETER.get(node.op, 0)
    return struct(PARAMETERS, p=[float_param(node, first + i) for i in range(4)])


def _regions(node: Tensor, *regions: Region) -> list[Region]:
    """The regions of sources and result with neighbouring extents joined where layouts allow it, so that kernels
    compute indices with fewer divisions.

    If a source repeats along an extent that is longer than 1, the regions are returned as they are.
    """
    full = [whole for region in regions if (whole := spread(region, node.ne)) is not None]
    return joined(node.ne, full, 0)[1] if len(full) == len(regions) else list(regions)


def _by_4(node: Tensor, regions: list[Region]) -> list[Region] | None:
    """Regions whose elements are fours of f32, if all fours lie at multiples of 16 bytes; None otherwise."""
    if any(t.type != Type.F32 for t in (node, *node.src) if t is not None):
        return None
    for region in regions:
        if (region.ne != regions[0].ne or region.ne[0] % 4 or region.nb[0] != 4
                or not is_multiple(region, 16)):
            return None
    return [region.shaped((region.ne[0] // 4, *region.ne[1:]), (16, *region.nb[1:])) for region in regions]


def _by_element(b: Builder, node: Tensor, kernel: str, sources: tuple[Region, Region], *options: np.int32,
                kinds: tuple[np.int32, ...], parameters: tuple[np.ndarray, ...] = ()) -> None:
    """Append a launch of `kernel` over the elements of two sources; if possible over fours of them, by `kernel`_by_4,
    which takes no `kinds`."""
    regions = _regions(node, *sources, b.region(node))
    fours, n = _by_4(node, regions), node.n_elements
    if fours is None:
        b.flat(f"elementwise.{kernel}", n, *regions, np.int64(n), *options, *kinds, *parameters)
    else:
        b.flat(f"elementwise.{kernel}_by_4", n // 4, *fours, np.int64(n // 4), *options, *parameters)


@computes(*_BINARY, "ADD1")
def _binary(b: Builder, node: Tensor) -> None:
    number = np.int32(_BINARY.index(node.op) if node.op in _BINARY else 0)      # ADD1 adds one element to all
    _by_element(b, node, "binary", (b.source(node, 0), b.source(node, 1)), number,
                kinds=(kind(node.src[0]), kind(node.src[1]), kind(node)))


@computes(*_PLAIN, *(f"UNARY:{name}" for name in _FUNCTIONS))
def _unary(b: Builder, node: Tensor) -> None:
    b.flat("elementwise.unary", node.n_elements, *_regions(node, b.source(node, 0), b.region(node)),
           np.int64(node.n_elements), _NUMBERS[node.op.rpartition(":")[2]], kind(node.src[0]), kind(node),
           _parameters(node))


def _glu_work(node: Tensor) -> int:
    """Bytes of scratch memory of a gated unit that is fused with its products, and also written rounded to 8 bits for
    the next product; 0 if it is not fused."""
    products = [t for t in node.src if t is not None and t.op in PRODUCTS]
    if len(products) < 2 or not is_few(products[0]):
        return 0
    return scratch_size(most_work(products[0]), *rounding.size(node.n_elements))


@computes(*(f"GLU:{name}" for name in _GATES), work=_glu_work)
def _glu(b: Builder, node: Tensor) -> None:
    gate = b.source(node, 0)
    if optional(node, 1) is not None:
        factor = b.source(node, 1)
    else:
        gate = gate.shaped(node.ne)
        factor = gate.moved(node.ne[0] * gate.nb[0])
        if int_param(node, 1):
            gate, factor = factor, gate
    name = node.op.rpartition(":")[2]
    _by_element(b, node, "glu", (gate, factor), _NUMBERS[_GATES[name]], np.int32(name == "SWIGLU_OAI"),
                kinds=(kind(node),), parameters=(_parameters(node),))
