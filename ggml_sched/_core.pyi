"""The types of `ggml_sched._core`."""

from ggml_sched._graph import *  # noqa: F403
from ggml_sched._plan import *  # noqa: F403

__all__ = [  # noqa: F405
    "ALL_SOURCES", "Allocator", "BackendBase", "BufferBase", "Context", "ContextBase", "Devices", "Graph",
    "GraphAllocator", "ContextState", "Lease", "NodeTable", "Packing", "PlanData", "Policy", "Request", "Tensor",
    "TensorAllocator", "Type", "apply_staged", "bind_plan", "bind_resident", "check_graph_plan",
    "checked_alloc_size", "computed", "inplace_ops", "label", "lone_surrogate", "make_plan", "measure_buffer",
    "method_name", "needed_of", "new_buffer", "new_lease", "no_address", "op_names", "op_numbers", "pack",
    "plan_from_values", "plan_values", "register_host_memory", "register_tensor_data", "replay_plan", "rewired",
    "staged_leafs", "stand_in", "wait_for_queued", "written_leafs",
]
