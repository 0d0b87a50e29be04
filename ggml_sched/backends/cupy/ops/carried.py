"""Norms that are computed by the launches of the matrix products before and after them, instead of by launches of their
own.

    product, norm of the sum with another row, products      as      product, products

Of the blocks of the first product with the same 32 rows of the result, the one that ends last adds the other row,
multiplies by the norm's factors, rounds to 8 bits and writes the sum of squares (matvec.cuh).  The products after the
norm divide their sums by the root of the mean square, and the first of them writes the norm's result.  To round before
the division instead of after it changes only the last bits.  The rounded row lies in one of the ROWS slots of STATE in
the device's memory (launch.py), which are used in turn.

Owns the choice of launches.  Invariants: the remaining launches write all that the launches of the plan wrote; no block
writes a result to memory that another block of the same launch may still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np

from ggml_sched.backends.cupy.launch import N_COUNTERS, ROW_ELEMENTS, ROWS, Argument, Launch, RowState
from ggml_sched.backends.cupy.ops.matrix import NORM, PRODUCT_AT
from ggml_sched.backends.cupy.ops.norm import ADDED, KEPT, NORM_AT, SCALED, SHIFTED
from ggml_sched.backends.cupy.regions import Region, Scratch

__all__ = ["carry"]

Step = TypeVar("Step")

NORM_BEHIND, NORM_BEFORE = 1, 2
"""`enum Role` of matvec.cuh."""
SQUARES = 32
"""The elements of a row for which one sum of squares is stored."""
WARPS, WARP_ROWS = 4, 2
"""In matvec.cuh: warps of a block; rows of a warp."""


class Span(NamedTuple):
    """A range of device memory: from address `start` to address `stop`, which is outside."""

    start: int
    stop: int

    def meets(self, others: Sequence[Span]) -> bool:
        return any(self.start < other.stop and other.start < self.stop for other in others)


def carry(steps: Sequence[Step | Launch]) -> list[Step | Launch]:
    """The steps of a plan without the launches of norms that products can compute."""
    found = list(steps)
    last_reader = [-1] * ROWS       # for each slot of STATE: the position in `found` of its last reader; -1: none
    slot = 0
    i = 0
    while i < len(found) - 2:
        product, norm = found[i], found[i + 1]
        behind = _norm_between(product, norm) if isinstance(product, Launch) and isinstance(norm, Launch) else None
        readers = [] if behind is None else _readers(found, i + 1)
        if behind is not None and readers and last_reader[slot] < i and _may_follow(found[i + 2], behind, readers, i):
            assert isinstance(product, Launch)
            found[i] = _with(product, behind.struct(NORM_BEHIND), slot, rounds=True)
            for at in readers:
                reader = found[at]
                assert isinstance(reader, Launch)
                found[at] = _with(reader, behind.struct(NORM_BEFORE, at == i + 2), slot)
            del found[i + 1]
            last_reader[slot] = readers[-1] - 1
            slot = (slot + 1) % ROWS
        i += 1
    return found


class _Between(NamedTuple):
    """A norm after a product: the addresses of the product's result, the row that is added to it, the norm's factors,
    the sum (`kept`; 0: it is not written) and the norm's result; `n`: elements of the row."""

    product: int
    other: int
    factor: int
    kept: int
    out: int
    n: int
    eps: float

    def span(self, start: int) -> Span:
        return Span(start, start + 4 * self.n)

    def struct(self, role: int, writes: bool = False) -> np.ndarray:
        """`struct Norm` of matvec.cuh, for the product before the norm or one after it (`role`).  `writes`: it writes
        the norm's result."""
        value = np.zeros(1, NORM)
        value["n"], value["eps"], value["role"], value["factor"] = self.n, self.eps, role, self.factor
        if role == NORM_BEHIND:
            value["x"], value["kept"] = self.other, self.kept
        elif writes:
            value["out"] = self.out
            value["x"], value["y"] = (self.kept, 0) if self.kept else (self.product, self.other)
        return value


# -- what may be left out -------------------------------------------------------------------------


def _norm_between(product: Launch, norm: Launch) -> _Between | None:
    """The norm, if launch `product` is a product with one column, and launch `norm` the RMS norm of its sum with
    another row, also rounded to 8 bits; else None."""
    if norm.kernel != "norm.norm_rows" or not _is_single(product):
        return None
    rows = int(_sizes(product)["rows"])
    number = {name: float(cast("np.float32", norm.args[NORM_AT[name]])) for name in ("rows", "mode", "eps", "around")}
    around = int(number["around"])
    if (number["mode"] or number["rows"] != 1 or _is_null(norm.args[NORM_AT["q"]])
            or around & (ADDED | SCALED | SHIFTED) != ADDED | SCALED
            or rows % (4 * SQUARES) or rows // SQUARES > N_COUNTERS or rows > ROW_ELEMENTS):
        return None
    names = ("a", "b", "factor", "d", *(("kept",) if around & KEPT else ()))
    views = {name: cast("Region", norm.args[NORM_AT[name]]) for name in names}
    if any(view.scratch or view.ne[0] != rows or view.nb[0] != 4 for view in views.values()):
        return None
    at = {name: view.address for name, view in views.items()}
    result = _address(product, "d")
    if result not in (at["a"], at["b"]) or at["a"] == at["b"]:
        return None
    found = _Between(result, at["b"] if result == at["a"] else at["a"], at["factor"], at.get("kept", 0), at["d"], rows,
                     number["eps"])
    # Some blocks write the sum while others still read the product's inputs, so these must not overlap.
    if found.kept:
        reads = [_inputs(product), found.span(found.factor)]
        others = [found.span(at) for at in (found.product, found.other) if at != found.kept]
        if found.span(found.kept).meets([*reads, *others]):
            return None
    return found


def _is_null(arg: object) -> bool:
    return isinstance(arg, np.generic) and not arg


def _equal(a: Argument, b: Argument) -> bool:
    """Whether two arguments are the same address in scratch memory."""
    return isinstance(a, Scratch) and a == b


def _sizes(product: Launch) -> np.void:
    """The `struct Product` of a product's launch."""
    return cast("np.void", cast("np.ndarray", product.args[PRODUCT_AT["p"]])[0])


def _norm_of(product: Launch) -> np.void:
    return cast("np.void", cast("np.ndarray", product.args[PRODUCT_AT["norm"]])[0])


def _address(product: Launch, name: str) -> int:
    """The argument `name`, an address; 0 for an address in scratch memory."""
    arg = product.args[PRODUCT_AT[name]]
    return int(arg) if isinstance(arg, np.uint64) else 0


def _inputs(product: Launch) -> Span:
    """The bytes of a product's column; none if it is in scratch memory."""
    x = _address(product, "x")
    return Span(x, x + 4 * int(_sizes(product)["k"]) if x else 0)


def _is_of_a_column(launch: Launch) -> bool:
    """Whether the kernel of a launch is one of matvec.cuh for one column, and not an `exact` one."""
    kernel = launch.kernel
    return kernel.startswith("matvec_") and kernel.endswith("_1") and ".exact_" not in kernel


def _is_single(launch: Launch) -> bool:
    """Whether a launch is a single product with one column, with no gated unit, experts, rounded result or norm."""
    if not _is_of_a_column(launch):
        return False
    p = _sizes(launch)
    return (int(p["columns"]) == int(p["matrices"]) == 1 and not p["more"]["first"].any()
            and all(_is_null(launch.args[PRODUCT_AT[name]]) for name in ("second", "ids", "rounded"))
            and not _norm_of(launch)["role"])


def _readers(steps: Sequence[Step | Launch], norm_at: int) -> list[int]:
    """The positions of the steps that read a norm's rounded result, up to the next step that uses its memory otherwise;
    none if one of these steps is no product with one column."""
    norm = steps[norm_at]
    assert isinstance(norm, Launch)
    q, runs = norm.args[NORM_AT["q"]], norm.args[NORM_AT["runs"]]
    found = []
    for i, step in enumerate(steps[norm_at + 1 :], norm_at + 1):
        if not isinstance(step, Launch):
            continue
        is_product = step.kernel.startswith(("matvec_", "matmul_", "mma_"))
        if is_product and _equal(step.args[PRODUCT_AT["x"]], q) and _equal(step.args[PRODUCT_AT["runs"]], runs):
            if not _is_of_a_column(step) or int(_sizes(step)["columns"]) != 1 or _norm_of(step)["role"]:
                return []
            found.append(i)
        elif any(_equal(arg, q) for arg in step.args):
            break
    return found


def _may_follow(launch: Step | Launch, norm: _Between, readers: Sequence[int], product_at: int) -> bool:
    """Whether the launch after a norm is the first that reads the norm's result, and may also write that result."""
    if readers[0] != product_at + 2 or not isinstance(launch, Launch):
        return False
    p, is_unit = _sizes(launch), not _is_null(launch.args[PRODUCT_AT["second"]])
    each = WARP_ROWS if p["part"] else WARPS * (1 if is_unit else WARP_ROWS)
    parts = [(int(p["rows"]), _address(launch, "d"))]
    parts += [(int(more["rows"]), int(more["d"])) for more in p["more"] if more["first"]]
    if not _is_null(launch.args[PRODUCT_AT["ids"]]) or int(p["matrices"]) != 1 or any(rows % each for rows, _ in parts):
        return False
    # Some blocks write the launch's results while others still read and write the norm's row: these must not overlap.
    own = [norm.span(at) for at in (norm.factor, norm.out, *((norm.kept,) if norm.kept else (
        norm.product, norm.other)))]
    return not any(Span(d, d + 4 * rows).meets(own) for rows, d in parts)


# -- launches -------------------------------------------------------------------------------------


def _with(launch: Launch, norm: np.ndarray, slot: int, rounds: bool = False) -> Launch:
    """A product's launch with its part of a norm, which comes after the product (`rounds`) or before it.  `slot`: the
    number of the rounded row in `STATE`."""
    args: list[Argument] = list(launch.args)
    names = ("rounded", "rounded_runs") if rounds else ("x", "runs")
    for name, part in zip((*names, "squares"), ("q", "runs", "squares"), strict=True):
        args[PRODUCT_AT[name]] = RowState(slot, part)
    args[PRODUCT_AT["norm"]] = norm
    return launch._replace(args=tuple(args))
