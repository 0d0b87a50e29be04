"""Graphviz drawings of large graphs: a box for each layer and split, opened where asked for."""

import re
import shutil
import subprocess

import pytest
from shown_plans import recorded, small

LABELS = re.compile(r'^ *(\w+) \[label="((?:[^"\\]|\\.)*)"', re.M)


def statements(dot):
    return dict(LABELS.findall(dot))


@pytest.mark.parametrize("name, configuration, policy", [
    ("llama-2-7b-prefill512", "c4", "default"), ("llama-2-7b-prefill512", "c4", "seed"),
    ("mixtral-8x7b-decode", "c2half", "default"), ("mamba-1.4b-decode", "c1", "default")])
def test_layers_are_one_box_for_each_split_that_computes_them(name, configuration, policy):
    plan = recorded(name, configuration, policy)
    dot = plan.to_dot()
    boxes = statements(dot)
    assert dot.count("subgraph cluster_") == len(plan.splits)
    assert len(boxes) <= 2 * plan.graph.meta["n_layer"] + 4 * len(plan.splits)
    nodes = [int(n) for label in boxes.values() for n in re.findall(r"(\d+) nodes?", label)]
    assert sum(nodes) == sum(t.computes for t in plan.graph.nodes)
    edges = re.findall(r"^ *(\w+) -> (\w+)", dot, re.M)
    assert {end for edge in edges for end in edge} <= boxes.keys()
    assert len(edges) < 8 * len(boxes) and all(one != other for one, other in edges)


def test_copies_between_boxes_are_counted_with_their_bytes():
    plan = recorded("llama-2-7b-prefill512", "c4")
    shown = re.findall(r"style=dashed, label=\"(\d+) cop(?:y|ies), ([\d.]+) (\w+)", plan.to_dot())
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    assert sum(int(n) for n, _, _ in shown) == len(plan.copies)
    assert sum(float(size) * units[unit] for _, size, unit in shown) == pytest.approx(plan.copy_bytes, rel=0.01)


@pytest.mark.parametrize("expand", [None, [5]])
def test_inputs_lead_to_one_box_of_each_backend(expand):
    """And not to every layer that reads them, as all do."""
    dot = recorded("llama-160m-decode", "c2half").to_dot(expand)
    home = dict(re.findall(r'^ *(s\w+) \[label.*fillcolor="(#\w+)"', dot, re.M))
    names = {key for key, label in statements(dot).items() if re.match(r"(attn_)?inp_|\d+ inputs", label)}
    led = [(one, home[other]) for one, other in re.findall(r"^ *(\w+) -> (s\w+);", dot, re.M) if one in names]
    assert len(names) == (1 if expand is None else 5) and led and len(led) == len({*led})
    copied = {(one, home[other]) for one, other in re.findall(r"^ *(\w+) -> (s\w+) \[style=dashed", dot, re.M)}
    assert not copied & {*led}


def test_layers_that_are_named_are_opened():
    plan = recorded("llama-2-7b-decode", "c2half")
    dot = plan.to_dot([0, "31"])
    names = {label.partition("\\n")[0] for label in statements(dot).values()}
    assert {"Qcur-0", "blk.0.attn_q.weight", "ffn_out-31", "layer 1", "layer 30"} <= {n.split(" (")[0] for n in names}
    assert not {"layer 0", "layer 31", "Qcur-1"} & names
    everything = plan.to_dot(True)
    assert len(statements(everything)) == len(plan.graph.tensors) and "layer 0" not in everything


def test_a_layer_that_the_graph_does_not_have_is_an_error():
    with pytest.raises(ValueError, match="no layer '32'; layers are 0, 1, 2, .*31, in, out"):
        recorded("llama-2-7b-decode", "c2half").to_dot([32])


def test_small_graphs_and_graphs_without_layers_are_drawn_node_by_node():
    assert len(statements(small(nodes=60).to_dot())) == 61
    assert "part 1" in small(nodes=400).to_dot()


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz: apt-get install graphviz")
@pytest.mark.parametrize("expand", [None, [5]])
def test_graphviz_draws_it(expand, tmp_path):
    plan = recorded("llama-2-7b-prefill512", "c4")
    subprocess.run(["dot", "-Tsvg", "-o", str(tmp_path / "plan.svg")], input=plan.to_dot(expand), text=True, check=True,
                   timeout=60)
    assert "layer 6" in (tmp_path / "plan.svg").read_text(encoding="utf-8")
