"""What was planned for llama.cpp, as `Plan`s.

The hook keeps the graph and the plan of each allocator's and scheduler's last call.  Here they become the values that
this package's planner makes: a `Graph` of the same tensors, and a `Plan` with backends without memory, which answer
support queries as ggml's backends did.
"""

from __future__ import annotations

from ggml_sched._core import plan_from_values
from ggml_sched.graph.graphfile import graph_from_dict
from ggml_sched.llama_cpp.install import hook
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.recorded import recorded_backends

__all__ = ["held_memory", "last_plans"]


def last_plans() -> tuple[Plan, ...]:
    """What `ggml_sched.llama_cpp.plans` returns."""
    return tuple(_plan(found) for found in (*hook().last_planned(), *hook().last_scheduled()))


def held_memory() -> dict[str, int]:
    """What `ggml_sched.llama_cpp.memory` returns."""
    held: dict[str, int] = {}
    for found in (*hook().last_planned(), *hook().last_scheduled()):
        for arena in found["arenas"]:
            held[arena["name"]] = held.get(arena["name"], 0) + arena["nbytes"]
    return {name: nbytes for name, nbytes in held.items() if nbytes}


def _plan(found: dict) -> Plan:
    """One dict of `_hook.last_planned` as a `Plan`."""
    values, arenas = found["plan"], found["arenas"]
    graph = graph_from_dict(found["graph"], where="a graph of llama.cpp's")
    largest = [max((0, *sizes)) for _, _, _, sizes in values["arenas"]]
    described = {
        "backends": [
            {"name": arena["name"], "alignment": arena["alignment"],
             # A tensor that is larger than the largest buffer has one of its own.
             "max_buffer_size": max(arena["max_size"], largest[b]) if arena["max_size"] else None,
             "concurrent_copies": False, "inplace": arena["inplace"], "reads": tuple(found["reads"][b])}
            for b, arena in enumerate(arenas)],
        "plan": values,
        "needs": _needs(found),
        "residents": {i: said for i, said in found["residents"].items()
                      if "view_src" not in found["graph"]["tensors"][i]},
    }
    backends = recorded_backends(described, graph)
    return Plan(graph, plan_from_values(values, len(graph.nodes)), backends, "default")


def _needs(found: dict) -> list[tuple[bool, int]]:
    """For each id of the plan: whether its backend supports it, and its bytes there if more than its own, else 0."""
    values, refused = found["plan"], set(found["refused"])
    copied = [row[0] for row in values["copies"]]
    like = [*range(values["n_tensors"]), *copied, *(copied[c] for c in values["places"])]
    return [(i not in refused, found["nbytes"].get((home, like[i]), 0)) for i, home in enumerate(values["home"])]
