"""Launches of norm.cu: norms of rows, alone or with the ops around them, and of groups of channels."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops import rounding
from ggml_sched.backends.cupy.ops.registry import computes, float_param, int_param, n_rows
from ggml_sched.backends.cupy.regions import Region

__all__ = ["ADDED", "KEPT", "MODES", "NORM_AT", "SCALED", "SHIFTED", "emit_norm"]

MODES = {"RMS_NORM": 0, "NORM": 1, "L2_NORM": 2}
"""`enum Mode` of norm.cu."""

THREADS = 512
"""The most threads of a block of norm_rows: its launch bound."""

ADDED, KEPT, SCALED, SHIFTED = 1, 2, 4, 8
"""`enum Around` of norm.cu."""

NORM_AT = {name: i for i, name in enumerate(
    ("a", "b", "kept", "factor", "shift", "d", "q", "runs", "rows", "mode", "eps", "around"))}
"""{argument of norm_rows: its position}."""


def emit_norm(b: Builder, norm: Tensor, result: Tensor, a: Region, *, added: Region | None = None,
              kept: Region | None = None, scale: Region | None = None, shift: Region | None = None) -> None:
    """Append the launch of result = norm(a + added) * scale + shift; of these, None are left out.  a + added is also
    written to `kept`, the result also rounded to 8 bits where products read it so.  Extents are those of `norm`."""
    d = b.region(result)
    around = ((added is not None) * ADDED + (kept is not None) * KEPT + (scale is not None) * SCALED
              + (shift is not None) * SHIFTED)
    views = (d if view is None else view for view in (added, kept, scale, shift))
    rows = n_rows(norm)
    b.rows("norm.norm_rows", rows, norm.ne[0], a, *views, d, *rounding.beside(b, result), np.int64(rows),
           np.int32(MODES[norm.op]), float_param(norm, 0), np.int32(around), most=THREADS)


@computes(*MODES)
def _norm(b: Builder, node: Tensor) -> None:
    emit_norm(b, node, node, b.source(node, 0))


@computes("GROUP_NORM")
def _group_norm(b: Builder, node: Tensor) -> None:
    """Groups of ceil(channels / n_groups) channels; as in ggml the last one may be smaller."""
    width = -(-node.ne[2] // int_param(node, 0))
    groups = -(-node.ne[2] // width)
    b.rows("norm.group_norm", groups * node.ne[3], node.ne[0] * node.ne[1] * width, b.source(node, 0), b.region(node),
           np.int64(groups), np.int64(width), float_param(node, 1))
