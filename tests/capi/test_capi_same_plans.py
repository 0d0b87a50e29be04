"""A plan made through the C API is, to the byte, the plan that Python makes of the same graph and answers."""

import pytest
from capi_calls import CGraph, CPlan, Refused, arrays_of, functions
from capi_problems import problem_of, python_plan, values_of
from configs import CONFIGURATIONS, configured_graph, graph_names
from hypothesis import given
from random_graphs import quick
from random_problems import problems

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


@pytest.mark.spread("name", "configuration")
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", graph_names())
def test_of_sample_graphs(name, configuration):
    graph, config = configured_graph(name, configuration)
    same_values(graph, config.backends, POLICIES["default"])
    if configuration == "c4":
        same_values(graph, config.backends, POLICIES["seed"])


@pytest.mark.parametrize("policy", [Policy(stream=True), Policy(n_copies=3), Policy(reuse="whole", leafs_first=False),
                                    Policy(reuse="front", offsets="best fit")], ids=str)
def test_by_other_policies(policy):
    graph, config = configured_graph(graph_names()[0], "c2half")
    same_values(graph, config.backends, policy)


@quick(120)
@given(problems())
def test_of_random_problems(problem):
    graph, backends, assigned, policy = problem
    try:
        want = plan_values(python_plan(graph, backends, policy, assigned))
    except gs.Error as failed:
        with pytest.raises(Refused) as refused:
            c_values(graph, backends, policy, assigned)
        assert refused.value.status == STATUS_OF[type(failed)]
        assert refused.value.error.message[:len("tensor ")] == "tensor "
    else:
        assert c_values(graph, backends, policy, assigned) == {"groups": [], **want}
