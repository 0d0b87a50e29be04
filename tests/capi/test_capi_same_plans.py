"""A plan made through the C API is, to the byte, the plan that Python makes of the same graph and answers."""

from __future__ import annotations

import zlib

import pytest
from capi_calls import CGraph, CPlan, Refused, arrays_of, functions
from capi_problems import problem_of, python_plan, values_of
from configs import CONFIGURATIONS, configured_graph, graph_names
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched._core import Policy, plan_values
from ggml_sched.planning.planner import POLICIES

STATUS_OF = {gs.UnsupportedOp: -6, gs.PlacementError: -5, gs.OutOfMemory: -3}


def c_values(graph: gs.Graph, backends, policy: Policy, assigned=None) -> dict:
    with CGraph(arrays_of(graph)) as g:
        assert g.finish().fingerprint() == (graph.fingerprint, graph.wiring)
        plan = CPlan.made(g, problem_of(graph, backends, policy, assigned))
    # The graph is gone: a plan stands alone.
    functions().plan_find_exclusive(plan.handle)
    values = values_of(plan.arrays())
    plan.free()
    return values


def same_values(graph: gs.Graph, backends, policy: Policy, assigned=None) -> dict:
    want = plan_values(python_plan(graph, backends, policy, assigned))
    found = c_values(graph, backends, policy, assigned)
    assert found == {"groups": [], **want}
    return want


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", graph_names())
def test_of_sample_graphs(name, configuration):
    graph, config = configured_graph(name, configuration)
    same_values(graph, config.backends, POLICIES["default"])
    if configuration == "c4":
        same_values(graph, config.backends, POLICIES["seed"])


@pytest.mark.parametrize("policy", [Policy(stream=True), Policy(places=3), Policy(reuse="whole", leafs_first=False),
                                    Policy(reuse="front", offsets="best fit")], ids=str)
def test_by_other_policies(policy):
    graph, config = configured_graph(graph_names()[0], "c2half")
    same_values(graph, config.backends, policy)


def number(what: tuple) -> int:
    return zlib.crc32(repr(what).encode())


class Moody(gs.DryBackend):
    """Says yes and no by a seed, the same to everybody who asks."""

    seed, friends, offers, largest = 0, (), (), None

    def says(self, what: str, t: gs.Tensor, of: int) -> bool:
        return number((self.seed, what, t.op, t.ne, int(t.type))) % 8 < of

    def supports_op(self, node):
        return self.says("supports", node, 7)

    def offload_op(self, node):
        return self.says("offload", node, 2)

    def alloc_size(self, tensor):
        return tensor.nbytes + 40 * self.says("size", tensor, 3)

    def inplace_sources(self, op):
        return number((self.seed, op)) & 3 if self.seed % 2 else super().inplace_sources(op)

    def supports_buffer(self, buffer):
        return buffer.backend is self or buffer.backend.name in self.friends

    def fusion_groups(self, graph):
        work = [k for k, t in enumerate(graph.nodes) if t.computes]
        return [work[i:i + 3] for i in self.offers if len(work) > i + 3]


@st.composite
def problems(draw):
    recipe = draw(recipes())
    n = draw(st.integers(1, 4))
    backends = []
    for k in range(n):
        # Mostly with a host that takes everything, so that there is a plan.
        kind = Moody if k < n - 1 or draw(st.integers(0, 3)) == 3 else gs.DryBackend
        backend = kind(f"b{k}", draw(st.sampled_from([1, 24, 64])))
        backend.seed, backend.largest = draw(st.integers(0, 5)), draw(st.sampled_from([None, None, 4096, 600, 64]))
        backend.friends = draw(st.sampled_from([(), ("b3",), ("b0", "b1"), ("b2",)]))
        backend.offers = draw(st.sampled_from([(), (0, 4), (1,), (0, 3, 6, 9)]))
        backends.append(backend)
    fields = draw(st.fixed_dictionaries({
        "reuse": st.sampled_from(["first", "whole", "front", "all"]),
        "offsets": st.sampled_from(["packed", "best fit"]),
        "placement": st.sampled_from(["default", "default", "seed"]), "leafs_first": st.booleans(),
        "stream": st.booleans(), "places": st.integers(1, 3)}))
    return recipe, backends, Policy(**fields), draw(st.lists(st.integers(0, 99), max_size=6))


@quick(120)
@given(problems())
def test_of_random_graphs_and_moody_backends(problem):
    recipe, backends, policy, chosen = problem
    built = Built(recipe, len(backends), keeps=policy.placement != "seed")
    for home, backend in zip(built.homes, backends, strict=True):
        if home.tensors:
            backend.alloc_tensors(home, "weights" if chosen else "any")
    for backend in backends[:-1]:
        # Not before residents have their buffers.
        backend.max_buffer_size = backend.largest
    graph = built.graph
    assigned = {graph.tensors[k % len(graph.tensors)]: backends[k % len(backends)] for k in chosen}
    try:
        want = plan_values(python_plan(graph, backends, policy, assigned))
    except gs.Error as failed:
        with pytest.raises(Refused) as refused:
            c_values(graph, backends, policy, assigned)
        assert refused.value.status == STATUS_OF[type(failed)]
        assert refused.value.error.message[:len("tensor ")] == "tensor "
    else:
        assert c_values(graph, backends, policy, assigned) == {"groups": [], **want}
