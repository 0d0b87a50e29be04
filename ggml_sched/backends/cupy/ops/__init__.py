"""The ops of the device: for each file of kernels (.cu) a module with the nodes that it computes, and their launches.

registry.py has the table of all ops, and builds a node; fused.py finds groups of nodes that one kernel computes, and
builds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import scratch_size
from ggml_sched.backends.cupy.ops import (  # noqa: F401 - those that are not used below register their ops
    attention,
    copies,
    elementwise,
    matrix,
    norm,
    projections,
    recurrent,
    reduce,
    rope,
    routing,
    rows,
    soft_max,
    sort,
)
from ggml_sched.backends.cupy.ops.fused import GROUPS, build_group, fusion_groups
from ggml_sched.backends.cupy.ops.registry import OPS, build, supports

__all__ = ["GROUPS", "OPS", "build", "build_group", "fusion_groups", "supports", "work_size"]


def work_size(nodes: Sequence[Tensor], exact: bool, by_library: bool, tensor: bool) -> int:
    """The most bytes of scratch memory that one of these nodes needs.  Matrix products are computed without rounding to
    8 bits (`exact`), by cuBLAS where it pays (`by_library`), on tensor cores (`tensor`).  Copies of sources that
    overlap results are not counted: no plan lets them overlap."""
    needed = 0
    for node in nodes:
        op = OPS.get(node.op)
        if node.computes and op is not None:
            size = matrix.work(node, exact, by_library, tensor) if node.op in matrix.PRODUCTS else op.work(node)
            needed = max(needed, size)
    return scratch_size(needed)
