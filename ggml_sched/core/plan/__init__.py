"""Planning: from a graph and the support of backends to a plan."""

from ggml_sched.core.plan.plan_data import (
    PlanData,
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
from ggml_sched.core.plan.request import Devices, Policy, Request

__all__ = [
    "Devices", "PlanData", "Policy", "Request", "any_computes", "bind_plan", "loads_alone", "make_plan", "needed_of",
    "new_lease", "plan_from_values", "plan_values", "replay_plan", "rewired", "stand_in", "written_leafs",
]
