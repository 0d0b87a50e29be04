"""The last plans for llama.cpp, as `Plan`s.

The hook keeps the graph and the plan of each allocator's and scheduler's last call.  Here both become the values that
this package's planner makes: a `Graph` of the same tensors, and a `Plan` whose backends have no memory, and answer
support queries as ggml's backends did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ggml_sched._core import plan_from_values
from ggml_sched.graph.graphfile import graph_from_dict
from ggml_sched.llama_cpp.install import hook
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.recorded import recorded_backends

if TYPE_CHECKING:
    from ggml_sched.planning.recorded import PlanFile

__all__ = ["last_plans", "plan_of"]


def last_plans() -> tuple[Plan, ...]:
    """The result of `ggml_sched.llama_cpp.plans`."""
    return tuple(plan_of(found) for found in hook().last_planned())


def plan_of(found: dict[str, Any]) -> Plan:
    """A dict of `_hook.last_planned` as a `Plan`."""
    graph = graph_from_dict(found["graph"], where="a graph of llama.cpp's")
    backends = recorded_backends(cast("PlanFile", found), graph)
    assigned_by = "llama.cpp" if found["is_scheduler"] else "ggml's scheduler"
    data = plan_from_values(found["plan"], len(graph.nodes))
    return Plan(graph, data, backends, "default", assigned_by=assigned_by)
