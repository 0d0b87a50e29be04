"""Verification: checks a plan and its program by code that shares nothing with the planner.

    facts       the content of a plan as plain values
    structure   splits and runs cover the nodes in order, on backends that support them; residents stay in place
    memory      ranges lie inside their arenas, and no two live ranges overlap
    dataflow    a symbolic execution of several computes: every read finds the bytes that the graph's order gives, and
                waits order every conflict

Lifetimes are computed from the graph and the steps of the program, not taken from the planner; an in-place reuse is
checked as an overlap that must be allowed.  A check runs only if the checks before it found no problem, because each
relies on what those ensure.
"""

from __future__ import annotations

from ggml_sched.errors import HazardError
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.verify.dataflow import check_dataflow
from ggml_sched.planning.verify.facts import Facts
from ggml_sched.planning.verify.memory import check_memory, lives
from ggml_sched.planning.verify.problem import REASONS, Problem
from ggml_sched.planning.verify.structure import check_structure

__all__ = ["REASONS", "Facts", "Problem", "check", "check_dataflow", "check_memory", "check_structure",
           "facts_of", "lives", "require_sound", "verify"]


def facts_of(plan: Plan) -> Facts:
    """The content of a plan as plain values."""
    return Facts.of(plan.graph, plan.data, plan.backends, plan.program)


def verify(plan: Plan) -> None:
    """Check a plan and its program; raises HazardError if they are unsound."""
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
