"""The names that Python code uses from `ggml_sched.core.plan`, `core.first_generation` and `core.pack`."""

from ggml_sched.core.first_generation.allocators import (
    Allocator,
    GraphAllocator,
    TensorAllocator,
    register_host_memory,
)
from ggml_sched.core.pack.api import Packing, method_name, pack
from ggml_sched.core.plan.plan_data import (
    PlanData,
    bind_plan,
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
from ggml_sched.core.plan.policy import Policy
from ggml_sched.core.plan.request import Devices, Request

__all__ = [
    "Allocator", "Devices", "GraphAllocator", "Packing", "PlanData", "Policy", "Request", "TensorAllocator",
    "bind_plan", "make_plan", "method_name", "needed_of", "new_lease", "pack", "plan_from_values", "plan_values",
    "register_host_memory", "replay_plan", "rewired", "stand_in", "written_leafs",
]
