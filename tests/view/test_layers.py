"""Sections: layers from names, once each and in order; parts of equal length where names have no numbers."""

import configs
import pytest
from shown_plans import recorded, small

import ggml_sched as gs
from ggml_sched.view.layers import sections_of


def check_cover(plan, found):
    assert [s.first for s in found] == [0, *(s.stop for s in found[:-1])] and found[-1].stop == len(plan.data.sequence)


@pytest.mark.parametrize("name", [n for n in configs.graph_names() if n.endswith("decode")])
@pytest.mark.parametrize("configuration", ["c1", "c4"])
def test_the_layers_of_a_model_are_sections_once_each_and_in_order(name, configuration):
    plan = recorded(name, configuration)
    found = sections_of(plan)
    check_cover(plan, found)
    n = plan.graph.meta["n_layer"]
    assert [s.label for s in found] == ["in", *map(str, range(n)), "out"]


def test_each_named_node_is_in_its_layer():
    plan = recorded("llama-2-7b-decode", "c2half")
    label = {i: s.label for s in sections_of(plan) for i in plan.data.sequence[s.first : s.stop]}
    for t in plan.graph.nodes:
        if t.name.startswith(("Qcur-", "ffn_out-")):
            assert label[plan.graph.id_of(t)] == t.name.split(" ")[0].partition("-")[2]
    copies = [i for i in plan.data.sequence if i >= plan.data.n_tensors]
    assert copies and {label[i] for i in copies} == {"16"}, "copies are of the layer that reads them"


def test_without_numbers_the_sections_are_equal_parts():
    plan = small(nodes=1000)
    found = sections_of(plan)
    check_cover(plan, found)
    assert [s.label for s in found] == [f"part {k}" for k in range(1, len(found) + 1)] and len(found) == 1000 // 64
    assert max(s.stop - s.first for s in found) - min(s.stop - s.first for s in found) <= 1


def test_a_short_plan_without_layers_is_one_section():
    plan = small(nodes=5)
    assert [(s.label, s.first, s.stop) for s in sections_of(plan)] == [("", 0, 5)]


def test_layers_that_do_not_follow_one_another_are_no_sections():
    """Names of two interleaved stacks: their runs would be single nodes."""
    ctx = gs.Context()
    t = ctx.tensor("f32", (8,), "x", input=True)
    for k in range(200):
        t = ctx.set_name(ctx.sqr(t), f"h-{k % 3}")
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        plan = scheduler.plan(gs.Graph(t))
    assert [s.label for s in sections_of(plan)] == ["part 1", "part 2", "part 3"]
