"""The default policy on real models: no more splits than today's ggml, no larger arenas, no tensor copied twice.

test_verify.py checks that these plans are sound.
"""

import json
from statistics import fmean

import pytest
from configs import CONFIGURATIONS, DATA, configured_graph, graph_names

import ggml_sched as gs

UPSTREAM = json.loads((DATA / "golden" / "upstream-2026.json").read_text())
ALIGNMENT = 32


@pytest.fixture(scope="module", params=[(n, c) for n in graph_names() for c in CONFIGURATIONS],
                ids=lambda case: "-".join(case))
def planned(request):
    name, configuration = request.param
    graph, config = configured_graph(name, configuration, ALIGNMENT)
    with gs.Scheduler(config.backends) as sched:
        yield name, configuration, graph, sched.plan(graph), config


def test_splits_are_at_most_those_of_todays_ggml(planned):
    name, configuration, _, plan, _ = planned
    assert len(plan.splits) <= UPSTREAM[name][configuration]["splits"]


def test_no_tensor_is_copied_twice_to_one_backend_or_to_its_own(planned):
    plan = planned[3]
    copies = [(copy.tensor, copy.backend) for copy in plan.copies]
    assert len(set(copies)) == len(copies)
    assert not [t for t, backend in copies if plan.backend_of(t) is backend]


def test_arenas_are_no_larger_than_those_of_todays_ggml_and_optimal_on_one_backend(planned):
    name, configuration, _, plan, _ = planned
    assert all(live <= size for live, size in zip(plan.live_bytes, plan.buffer_sizes, strict=True))
    assert sum(plan.buffer_sizes) <= sum(UPSTREAM[name][configuration]["buffer_bytes"])
    if configuration == "c1":
        assert plan.live_bytes[0] <= UPSTREAM[name]["live_bytes_lower_bound_align32"]
        assert plan.optimal == (True,) and plan.buffer_sizes == plan.live_bytes


@pytest.mark.parametrize("configuration", ["c2half", "c2full", "c4"])
def test_on_average_the_arenas_are_7_percent_smaller_than_those_of_todays_ggml(configuration):
    ratios = []
    for name in graph_names():
        graph, config = configured_graph(name, configuration, ALIGNMENT)
        with gs.Scheduler(config.backends) as sched:
            ratios.append(sum(sched.plan(graph).buffer_sizes) / sum(UPSTREAM[name][configuration]["buffer_bytes"]))
    assert fmean(ratios) <= 0.93


def test_layers_run_where_their_weights_are(planned):
    """A matrix product with a weight never sends that weight anywhere."""
    _, _, graph, plan, _ = planned
    for t in graph.nodes:
        if t.op in ("MUL_MAT", "MUL_MAT_ID") and t.src[0].resident == "weight":
            assert plan.backend_of(t) is t.src[0].backend
    assert not [copy for copy in plan.copies if copy.tensor.resident == "weight" and copy.nbytes > 1 << 20]


def test_every_tensor_has_an_explanation(planned):
    _, _, graph, plan, _ = planned
    for t in graph.tensors[::97]:
        text = plan.explain(t)
        assert plan.backend_of(t) is None or plan.backend_of(t).name in text
    assert str(plan) and plan.to_dot().startswith("digraph")


def test_planning_again_gives_the_same_plan(planned):
    name, configuration, graph, plan, config = planned
    again = gs.Scheduler(config.backends, plan_cache=0).plan(graph)
    assert [(s.backend, s.start, s.stop, s.inputs) for s in again.splits] == [
        (s.backend, s.start, s.stop, s.inputs) for s in plan.splits]
    assert [again.offset_of(t) for t in graph.tensors] == [plan.offset_of(t) for t in graph.tensors]
