"""The types of `ggml_sched._core`."""

from ggml_sched.core.first_generation import Allocator, GraphAllocator, TensorAllocator, register_host_memory
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
from ggml_sched.core.pack import Packing, method_name, pack
from ggml_sched.core.plan import (
    Devices,
    PlanData,
    Policy,
    Request,
    any_computes,
    bind_plan,
    loads_alone,
    make_plan,
    needed_of,
    new_lease,
    plan_from_values,
    plan_values,
    replay_plan,
    rewired,
    stand_in,
    written_leafs,
)

__all__ = [
    "ALL_SOURCES", "Allocator", "BackendBase", "BufferBase", "Context", "ContextBase", "Devices", "Graph",
    "GraphAllocator", "Home", "Lease", "NodeTable", "Packing", "PlanData", "Policy", "Request",
    "Tensor", "TensorAllocator", "TensorSet", "Type", "any_computes", "any_staged", "bind_plan", "bind_resident",
    "checked_alloc_size", "computed", "inplace_ops", "loads_alone", "make_plan", "measure_buffer", "method_name",
    "needed_of", "new_buffer", "new_lease", "op_names", "op_numbers", "pack", "plan_from_values", "plan_values",
    "register_host_memory", "register_tensor_data", "replay_plan", "rewired", "stand_in", "wait_for_queued",
    "written_leafs",
]
