"""An independent check of a plan and its program: slow, obvious, and knowing nothing of how they were made.

    facts       what a plan claims, as plain values
    structure   splits and runs cover the nodes in order, on backends that support them; residents stay
    memory      ranges lie inside their arenas, and nothing live overlaps
    dataflow    executed symbolically, over several computes, every read finds the bytes that the graph's order
                gives, and everything that must come first is waited for

Owns no state.  Liveness is computed from the graph and the steps of the program, not from the planner's lifetimes;
taking over memory in place is checked as an overlap with a good excuse.  A check runs only when those before it found
nothing: reads mean nothing where splits have gaps.
"""

from __future__ import annotations

from ggml_sched.errors import HazardError
from ggml_sched.planning.plan import Plan, register_plan_methods
from ggml_sched.planning.verify.dataflow import check_dataflow
from ggml_sched.planning.verify.facts import Facts
from ggml_sched.planning.verify.memory import check_memory, lives
from ggml_sched.planning.verify.problem import REASONS, Problem
from ggml_sched.planning.verify.structure import check_structure

__all__ = ["REASONS", "Facts", "Problem", "check", "check_dataflow", "check_memory", "check_structure",
           "facts_of", "lives", "require_sound", "verify"]


def facts_of(plan: Plan) -> Facts:
    """What a plan claims, as plain values."""
    return Facts.of(plan.graph, plan.data, plan.backends, plan.program)


def verify(plan: Plan) -> None:
    """HazardError for an unsound plan."""
    require_sound(facts_of(plan))


def require_sound(facts: Facts) -> None:
    """Raise HazardError for the first problem of a plan, with its reason code as `.reason`."""
    found = check(facts)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise HazardError(f"{found[0]}{more}", found[0].reason)


def check(facts: Facts) -> list[Problem]:
    """The problems of the first check that finds any; an empty list for a sound plan."""
    return check_structure(facts) or check_memory(facts) or check_dataflow(facts)


register_plan_methods(facts=facts_of, verify=verify)
