"""The names of `ggml_sched.core.graph`."""

from ggml_sched.core.graph import (
    ALL_SOURCES,
    BackendBase,
    BufferBase,
    Context,
    ContextBase,
    Graph,
    Home,
    Lease,
    NodeTable,
    Tensor,
    TensorSet,
    Type,
    any_staged,
    bind_resident,
    checked_alloc_size,
    computed,
    inplace_ops,
    measure_buffer,
    new_buffer,
    op_names,
    op_numbers,
    register_tensor_data,
    wait_for_queued,
)

__all__ = [
    "ALL_SOURCES", "BackendBase", "BufferBase", "Context", "ContextBase", "Graph", "Home", "Lease",
    "NodeTable", "Tensor", "TensorSet", "Type", "any_staged", "bind_resident", "checked_alloc_size", "computed",
    "inplace_ops", "measure_buffer", "new_buffer", "op_names", "op_numbers", "register_tensor_data",
    "wait_for_queued",
]
