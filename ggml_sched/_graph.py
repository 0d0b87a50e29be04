"""The names that Python code uses from `ggml_sched.core.graph`."""

from ggml_sched.core.graph.context import Context, ContextBase
from ggml_sched.core.graph.graph import Graph
from ggml_sched.core.graph.tensor import (
    ALL_SOURCES,
    BackendBase,
    BufferBase,
    ContextState,
    Lease,
    NodeTable,
    Tensor,
    apply_staged,
    bind_resident,
    check_graph_plan,
    checked_alloc_size,
    computed,
    label,
    lone_surrogate,
    measure_buffer,
    new_buffer,
    no_address,
    register_tensor_data,
    staged_leafs,
    wait_for_queued,
)
from ggml_sched.core.graph.types import Type, inplace_ops, op_names, op_numbers

__all__ = [
    "ALL_SOURCES", "BackendBase", "BufferBase", "Context", "ContextBase", "Graph", "ContextState", "Lease",
    "NodeTable", "Tensor", "Type", "apply_staged", "bind_resident", "check_graph_plan", "checked_alloc_size",
    "computed", "inplace_ops", "label", "lone_surrogate", "measure_buffer", "new_buffer", "no_address", "op_names",
    "op_numbers", "register_tensor_data", "staged_leafs", "wait_for_queued",
]
