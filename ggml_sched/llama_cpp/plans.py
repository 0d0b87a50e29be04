"""What was planned for llama.cpp, as `Plan`s.

The library keeps the graph and the plan of each allocator's last call.  Here they become values of ours again: a
graph of the same tensors, and backends without memory that answer as ggml's did.
"""

from __future__ import annotations

from ggml_sched._core import plan_from_values
from ggml_sched.backends.recorded import recorded_backends
from ggml_sched.graphfile import graph_from_dict
from ggml_sched.llama_cpp.install import hook
from ggml_sched.plan import Plan

__all__ = ["plans"]


def plans() -> tuple[Plan, ...]:
    """The plan of each graph allocator that llama.cpp has now, oldest first: of the graph that it was asked for last.

    Print, explain and verify them, draw pictures; there is no memory behind their backends.  Any thread may ask.
    HookError if nothing is installed.
    """
    return tuple(_plan(found) for found in hook().last_planned())


def _plan(found: dict) -> Plan:
    """One of them."""
    values, arenas = found["plan"], found["arenas"]
    graph = graph_from_dict(found["graph"], where="a graph of llama.cpp's")
    everybody = tuple(range(len(arenas)))
    largest = [max((0, *sizes)) for _, _, _, sizes in values["arenas"]]
    described = {
        "backends": [
            {"name": arena["name"], "alignment": arena["alignment"],
             # A tensor that is larger than a buffer may be has one of its own.
             "max_buffer_size": max(arena["max_size"], largest[b]) if arena["max_size"] else None,
             "concurrent_copies": False, "inplace": arena["inplace"], "reads": everybody}
            for b, arena in enumerate(arenas)],
        "plan": values,
        "needs": [(True, found["nbytes"].get((values["home"][i], i), 0)) for i in range(values["n_tensors"])],
        "residents": {i: ("any", (b, *(other for other in everybody if other != b)))
                      for i, b in enumerate(found["resident"])
                      if b >= 0 and "view_src" not in found["graph"]["tensors"][i]},
    }
    backends = recorded_backends(described, graph)
    return Plan(graph, plan_from_values(values, len(graph.nodes)), backends, "default")
