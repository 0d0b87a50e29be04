"""`policy="seed"` places real models' graphs over several backends as the first generation did."""

from functools import cache

import pytest
from configs import configured_graph, golden, golden_names, graph_names

import ggml_sched as gs

CASES = [(name, c) for c in ("c1", "c2full", "c4") for name in golden_names(c)]
MODELS_WITHOUT_GOLDEN = [name for name in graph_names() if name not in golden_names("c1")]


@cache
def planned(name: str, configuration: str) -> tuple[gs.Graph, gs.Plan, tuple[gs.Backend, ...]]:
    graph, config = configured_graph(name, configuration)
    with gs.Scheduler(config.backends, policy="seed") as sched:
        return graph, sched.plan(graph), config.backends


@pytest.fixture(scope="module", autouse=True)
def _plans_are_forgotten_in_the_end():
    yield
    planned.cache_clear()


@pytest.mark.parametrize(("name", "configuration"), CASES)
def test_placement_offsets_splits_and_copies_are_those_of_the_first_generation(name, configuration):
    graph, plan, _ = planned(name, configuration)
    expected, ids = golden(name, configuration), {t: i for i, t in enumerate(graph.tensors)}
    offsets = [plan.offset_of(t) for t in graph.nodes]
    assert expected["measure_alloc"] == [
        [ids[t], plan.backend_of(t).name, "resident" if offset is None else offset]
        for t, offset in zip(graph.nodes, offsets, strict=True)]
    assert list(plan.buffer_sizes) == expected["sched_buffer_bytes"]
    assert all(0 <= live <= size for live, size in zip(plan.live_bytes, plan.buffer_sizes, strict=True))
    for split, before in zip(plan.splits, [0, *(split.stop for split in plan.splits)], strict=False):
        assert split.start == before < split.stop and split.nodes == graph.nodes[split.start:split.stop]
    assert plan.splits[-1].stop == len(graph.nodes)
    if "splits" not in expected:
        return      # the first generation died after the measuring pass
    ours = [{"backend": s.backend.name, "first": ids[s.nodes[0]], "last": ids[s.nodes[-1]], "n_nodes": len(s.nodes)}
            for s in plan.splits]
    assert ours == [{key: split[key] for key in ours[0]} for split in expected["splits"]]
    assert [[copy.tensor.name, copy.name] for copy in plan.copies] == expected["copies"]
    assert plan.copy_bytes == sum(copy.nbytes for copy in plan.copies) == expected["copy_bytes"]


def check_plan_is_usable(graph: gs.Graph, plan: gs.Plan, backends) -> None:
    """Properties without a reference: every computed tensor has a backend and lies inside its buffer."""
    size_of = dict(zip(backends, plan.buffer_sizes, strict=True))
    for t in graph.nodes:
        backend = plan.backend_of(t)
        offset = plan.offset_of(t)
        assert backend in backends
        if offset is not None:
            assert 0 <= offset <= offset + t.nbytes <= size_of[backend]
        else:
            assert t.view_src is not None and t.view_src.resident
    assert sum(len(split) for split in plan.splits) == len(graph.nodes)


@pytest.mark.parametrize("name", graph_names())
def test_half_the_layers_on_the_host_plans(name):
    """Here the first generation died on every one of these graphs."""
    graph, plan, backends = planned(name, "c2half")
    check_plan_is_usable(graph, plan, backends)
    assert {split.backend for split in plan.splits} == set(backends)
    assert plan.copies


@pytest.mark.parametrize("configuration", ["c1", "c2full", "c4"])
@pytest.mark.parametrize("name", MODELS_WITHOUT_GOLDEN)
def test_graphs_that_killed_the_first_generation_plan(name, configuration):
    graph, plan, backends = planned(name, configuration)
    check_plan_is_usable(graph, plan, backends)


@pytest.mark.parametrize("name", ["llama-160m-decode", "mixtral-8x7b-prefill512"])
def test_allocating_gives_the_planned_addresses(name):
    graph, config = configured_graph(name, "c4")
    with gs.Scheduler(config.backends, policy="seed") as sched:
        plan = sched.plan(graph)
        assert sched.alloc(graph).splits == plan.splits
        for backend, size in zip(config.backends, plan.buffer_sizes, strict=True):
            assert sched.buffer_size(backend) == size
        for t in graph.nodes:
            if plan.offset_of(t) is not None:
                assert (t.backend, t.offset) == (plan.backend_of(t), plan.offset_of(t))
        sched.compute(graph)
    assert all(t.buffer is None for t in graph.nodes if plan.offset_of(t) is not None)
