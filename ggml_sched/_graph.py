"""The names that Python code uses from `ggml_sched.core.graph`."""

from ggml_sched.core.graph.context import Context, ContextBase
from ggml_sched.core.graph.graph import Graph
from ggml_sched.core.graph.tensor import (
    ALL_SOURCES,
    BackendBase,
    BufferBase,
    Home,
    Lease,
    NodeTable,
    Tensor,
    any_staged,
    bind_resident,
    checked_alloc_size,
    computed,
    measure_buffer,
    new_buffer,
    register_tensor_data,
    wait_for_queued,
)
from ggml_sched.core.graph.types import Type, inplace_ops, op_names, op_numbers

__all__ = [
    "ALL_SOURCES", "BackendBase", "BufferBase", "Context", "ContextBase", "Graph", "Home", "Lease",
    "NodeTable", "Tensor", "Type", "any_staged", "bind_resident", "checked_alloc_size", "computed",
    "inplace_ops", "measure_buffer", "new_buffer", "op_names", "op_numbers", "register_tensor_data",
    "wait_for_queued",
]
