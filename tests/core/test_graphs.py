"""Graphs: order, files, errors, immutability."""

import copy
import gzip
import json
import os
import pickle
import re
import tracemalloc

import numpy as np
import pytest
from configs import DATA, graph_file, graph_names, graph_path
from hypothesis import given
from processes import run_python
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict


def names(tensors) -> list[str]:
    return [t.name for t in tensors]


# -- order --------------------------------------------------------------------------------


def named(ctx, name: str, t: gs.Tensor) -> gs.Tensor:
    return ctx.set_name(t, name)


def test_sources_come_first_from_left_to_right(ctx):
    a, b, c = (ctx.tensor("f32", 4, name) for name in "abc")
    x = named(ctx, "x", ctx.sqr(a))
    y = named(ctx, "y", ctx.sqr(b))
    z = named(ctx, "z", ctx.add(y, x))
    out = named(ctx, "out", ctx.mul(z, ctx.add(x, c)))
    graph = gs.Graph(out)
    assert names(graph.nodes) == ["y", "x", "z", "", "out"]
    assert names(graph.leafs) == ["b", "a", "c"]
    assert graph.tensors == graph.leafs + graph.nodes
    assert len(graph) == 5


def test_order_does_not_depend_on_the_order_of_creation(ctx):
    a = ctx.tensor("f32", 4, "a")
    first, second = named(ctx, "first", ctx.sqr(a)), named(ctx, "second", ctx.sqrt(a))
    assert names(gs.Graph(ctx.add(second, first)).nodes)[:2] == ["second", "first"]
    assert names(gs.Graph(ctx.add(first, second)).nodes)[:2] == ["first", "second"]


def test_a_shared_source_is_visited_where_it_is_first_met(ctx):
    a = ctx.tensor("f32", 4, "a")
    shared = named(ctx, "shared", ctx.sqr(a))
    deep = shared
    for i in range(3):
        deep = named(ctx, f"deep {i}", ctx.sqr(deep))
    graph = gs.Graph(named(ctx, "out", ctx.add(deep, shared)))
    assert names(graph.nodes) == ["shared", "deep 0", "deep 1", "deep 2", "out"]


def test_several_outputs_follow_one_another(ctx):
    a = ctx.tensor("f32", 4, "a")
    x, y, z = (named(ctx, name, ctx.sqr(a)) for name in "xyz")
    assert names(gs.Graph(z, x, y).nodes) == ["z", "x", "y"]
    assert names(gs.Graph(x, x, z, x).nodes) == ["x", "z"]


def test_tensors_that_no_output_needs_are_left_out(ctx):
    a, b = ctx.tensor("f32", 4, "a"), ctx.tensor("f32", 4, "b")
    x, unused = ctx.sqr(a), ctx.sqr(b)
    graph = gs.Graph(x)
    assert unused not in graph and b not in graph and x in graph and a in graph
    assert "x" not in graph


def test_a_leaf_as_output(ctx):
    a = ctx.tensor("f32", 4, "a")
    graph = gs.Graph(a)
    assert (graph.nodes, graph.leafs) == ((), (a,))


def test_a_node_that_writes_comes_before_those_that_read_its_result(ctx):
    """cpy lists its destination as a source; a plain view of it does not wait for the write."""
    a, cache = ctx.tensor("f32", 4, "a"), ctx.tensor("f32", 8, "cache")
    window = named(ctx, "window", ctx.view_1d(cache, 4, 16))
    stored = named(ctx, "stored", ctx.cpy(a, window))
    graph = gs.Graph(named(ctx, "out", ctx.sqr(stored)))
    assert names(graph.nodes) == ["window", "stored", "out"]
    assert names(graph.leafs) == ["a", "cache"]


def slow_order(outputs) -> tuple[list, list]:
    """ggml_visit_parents, by recursion; then a node's alloc dependencies."""
    seen, nodes, leafs = set(), [], []

    def visit(t):
        if t in seen:
            return
        seen.add(t)
        for s in t.src:
            if s is not None:
                visit(s)
        if t.view_src is not None:
            visit(t.view_src)
        for s in t.deps:
            visit(s)
        (leafs if t.op == "NONE" else nodes).append(t)

    for t in outputs:
        visit(t)
    return nodes, leafs


@quick(200)
@given(recipes(40))
def test_order_is_that_of_a_recursive_walk(recipe):
    built = Built(recipe)
    nodes, leafs = slow_order(built.ends)
    assert list(built.graph.nodes) == nodes
    assert list(built.graph.leafs) == leafs


def test_a_chain_of_50000_nodes_needs_no_recursion():
    script = """
import ggml_sched as gs
ctx = gs.Context()
t = ctx.tensor("f32", 4, "x")
for i in range(50_000):
    t = ctx.add(t, t)
graph = gs.Graph(t)
assert len(graph) == 50_000
with gs.Scheduler([gs.DryBackend("A", accepts_computes=True), gs.DryBackend("B")]) as sched:
    sched.compute(graph)
del graph
ctx.close()
del ctx     # only the last tensor holds the chain now
del t
print("done")
"""
    ran = run_python("-c", script)
    assert (ran.stdout, ran.stderr) == ("done\n", "")


# -- what a graph refuses --------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, "x", gs.Context(), [], object()])
def test_a_graph_is_made_of_tensors(wrong):
    with pytest.raises(TypeError):
        gs.Graph(wrong)


def test_from_order_refuses_wrong_orders(ctx):
    a = ctx.tensor("f32", 4, "a")
    x = named(ctx, "x", ctx.sqr(a))
    y = named(ctx, "y", ctx.sqr(x))
    stranger = ctx.tensor("f32", 4, "stranger")
    good = gs.Graph.from_order([y, a, x], [x, y], [a])
    assert (good.nodes, good.tensors) == ((x, y), (y, a, x))
    for tensors, nodes, leafs, message in [
        ([a, x, y], [y, x], [a], "'y'.*'x'"),                       # too early
        ([a, x, y], [x, y], [], "'x'.*'a'"),                        # its source is nowhere
        ([a, x, y], [x, x, y], [a], "'x'.*twice"),
        ([a, x, y], [x, y], [a, a], "'a'.*twice"),
        ([a, x, y], [x, y, a], [a], "'a'.*twice"),
        ([a, x, x, y], [x, y], [a], "'x'.*twice"),
        ([a, y], [y], [a], "'y'.*'x'"),                             # a source is missing
        ([a, x, y], [x, y], [a, stranger], "'stranger'"),
        ([a, x, y], [x, y, stranger], [a], "'stranger'"),
    ]:
        with pytest.raises(gs.GraphError, match=message):
            gs.Graph.from_order(tensors, nodes, leafs)
    assert gs.Graph(y).nodes == (x, y)          # a refusal leaves the tensors usable


def test_closed_contexts_are_refused_everywhere(ctx):
    other = gs.Context("other")
    a = other.tensor("f32", 4, "a")
    x = ctx.sqr(a)
    graph = gs.Graph(x)
    other.close()
    other.close()
    assert other.closed and other.tensors == ()
    for call in (lambda: gs.Graph(x), lambda: gs.Graph(a), lambda: ctx.sqr(a),
                 lambda: gs.Graph.from_order([a, x], [x], [a])):
        with pytest.raises(gs.GraphError, match="'a'.*'other'"):
            call()
    for call in (lambda: other.tensor("f32", 4), lambda: other.sqr(x),
                 lambda: other.restore("NONE", "f32", (1,), (4,))):
        with pytest.raises(gs.GraphError, match="'other' is closed"):
            call()
    with gs.Scheduler([gs.DryBackend("A")]) as sched:
        for call in (sched.plan, sched.alloc, sched.compute, sched.reserve):
            with pytest.raises(gs.GraphError, match="'other'"):
                call(graph)
    with gs.TensorAllocator.measure(64) as tallocr:
        with pytest.raises(gs.GraphError, match="'other'"):
            gs.GraphAllocator().alloc_graph(tallocr, graph)
        with pytest.raises(gs.GraphError, match="'other'"):
            tallocr.alloc(a)


def test_closing_a_context_after_allocating_is_noticed(ctx):
    weights = gs.Context("weights")
    w = weights.tensor("f32", 4, "w")
    backend = gs.CpuBackend(1)
    backend.alloc_tensors(weights)
    graph = gs.Graph(ctx.sqr(w))
    with gs.Scheduler([backend]) as sched:
        sched.compute(graph)
        weights.close()
        with pytest.raises(gs.GraphError, match="'weights'"):
            sched.compute(graph)


def test_a_tensor_is_not_made_by_hand():
    with pytest.raises(TypeError):
        gs.Tensor()


@pytest.mark.parametrize("wrong", [None, "x", 7, object()])
def test_what_is_no_tensor_is_no_part_of_a_graph(ctx, wrong):
    a = ctx.tensor("f32", 4)
    x = ctx.sqr(a)
    for tensors, nodes, leafs in (([a, wrong, x], [x], [a]), ([a, x], [x, wrong], [a]), ([a, x], [x], [wrong, a])):
        with pytest.raises(TypeError, match="a graph is made of Tensors"):
            gs.Graph.from_order(tensors, nodes, leafs)
    with pytest.raises(TypeError, match="a graph is made of Tensors"):
        gs.Graph(x, wrong)
    with pytest.raises(TypeError, match="a graph is made of Tensors"):
        gs.Graph(x).with_order([wrong])


def test_a_list_of_outputs_is_refused_in_few_words(ctx):
    outputs = [ctx.sqr(ctx.tensor("f32", 4)) for _ in range(100)]
    with pytest.raises(TypeError, match=r"not a list of 100: give each output as an argument, Graph\(y\) or") as raised:
        gs.Graph(outputs)
    assert len(str(raised.value)) < 120


# -- nothing changes ---------------------------------------------------------------------------


def test_graphs_and_tensors_are_immutable(ctx):
    a = ctx.tensor("f32", 4, "a")
    x = ctx.sqr(a)
    graph = gs.Graph(x)
    for name in ("nodes", "leafs", "tensors", "fingerprint"):
        with pytest.raises(AttributeError):
            setattr(graph, name, ())
    for name in ("name", "type", "op", "ne", "nb", "src", "view_src", "view_offs", "flags", "op_params",
                 "buffer", "offset", "backend", "resident", "nbytes"):
        with pytest.raises(AttributeError):
            setattr(x, name, None)
    assert isinstance(graph.nodes, tuple) and isinstance(x.src, tuple) and isinstance(x.flags, frozenset)


def test_flags_set_later_do_not_reach_an_existing_graph(ctx):
    """A graph is immutable, so its plan stays valid."""
    a = ctx.tensor("f32", 4, "a")
    x = ctx.sqr(a)
    y = ctx.relu(x)
    graph = gs.Graph(y)
    with gs.Scheduler([gs.DryBackend("A")]) as sched:
        plan = sched.plan(graph)
        before, said = plan.buffer_sizes, plan.explain(x)
        ctx.set_output(x)
        # Report and verify use the flags that the plan was made for.
        plan.verify()
        assert graph_from_dict(graph_to_dict(graph)).fingerprint == graph.fingerprint
        assert plan.explain(x) == said and graph.flags_of(x) == frozenset() == x.flags - {"output"}
        sched.reset()
        assert sched.plan(graph).buffer_sizes == before
        assert sched.plan(gs.Graph(y)).buffer_sizes > before
    assert gs.Graph(y).fingerprint != graph.fingerprint
    assert gs.Graph(y).flags_of(x) == {"output"}
    with pytest.raises(gs.GraphError, match="stranger"):
        graph.flags_of(ctx.tensor("f32", 4, "stranger"))


# -- fingerprints ------------------------------------------------------------------------------


def pair(change: str = "") -> gs.Graph:
    ctx = gs.Context("whatever")
    kind, extent = "f16" if change == "type" else "f32", 5 if change == "shape" else 4
    a = ctx.tensor(kind, extent, "a", input=change == "input")
    b = ctx.tensor(kind, extent, "b")
    x = ctx.sqr(a)
    y = ctx.add(x, a if change == "edge" else b)
    if change == "swap":
        y = ctx.add(b, x)
    view = ctx.view_1d(y, 2, 4 if change == "offset" else 0)
    z = ctx.sqrt(view) if change == "op" else ctx.sqr(view)
    if change == "kind":
        z = ctx.relu(view)
    if change == "stride":
        z = ctx.restore("SQR", "f32", (2, 1, 1, 1), (4, 16, 16, 16), (view,))
    z = ctx.scale(z, 3.0 if change == "parameter" else 2.0, 1.0 if change == "another parameter" else 0.0)
    slots = (z, None, b) if change == "slot" else (z, b)
    z = ctx.restore("SOFT_MAX", z.type, z.ne, z.nb, slots)
    if change == "output":
        ctx.set_output(x)
    ends = (ctx.sqr(b), z) if change == "another end" else (z,)
    return gs.Graph(*ends)


CHANGES = ["type", "shape", "stride", "input", "edge", "swap", "slot", "offset", "op", "kind", "parameter",
           "another parameter", "output", "another end"]


def test_equal_graphs_have_equal_fingerprints():
    assert pair().fingerprint == pair().fingerprint
    assert isinstance(pair().fingerprint, int)


def test_every_difference_changes_the_fingerprint():
    prints = {change: pair(change).fingerprint for change in ["", *CHANGES]}
    assert len(set(prints.values())) == len(prints), prints


def test_equal_graphs_may_come_by_their_views_in_different_ways():
    """Extents, strides and offset describe a view completely, whatever op method made it."""
    prints = set()
    for words in ((), (2, 1, 0, 3), (7,)):
        ctx = gs.Context()
        a = ctx.tensor("f32", (4, 4), "a")
        view = ctx.restore("PERMUTE", "f32", (4, 4, 1, 1), (16, 4, 64, 64), (a,), view_src=a, op_params=words)
        prints.add(gs.Graph(ctx.cont(view)).fingerprint)
    assert len(prints) == 1


def test_parameters_are_no_part_of_the_wiring(ctx):
    """A plan that was reserved serves a graph that differs in them."""
    a = ctx.tensor("f32", 4)
    one, other = gs.Graph(ctx.scale(a, 2.0)), gs.Graph(ctx.scale(a, 3.0))
    assert one.wiring == other.wiring and one.fingerprint != other.fingerprint


def test_silu_and_relu_differ(ctx):
    a = ctx.tensor("f32", 4)
    assert gs.Graph(ctx.silu(a)).fingerprint != gs.Graph(ctx.relu(a)).fingerprint


def test_order_is_part_of_the_fingerprint(ctx):
    a = ctx.tensor("f32", 4)
    x, y = ctx.sqr(a), ctx.sqrt(a)
    one = gs.Graph.from_order([a, x, y], [x, y], [a])
    two = gs.Graph.from_order([a, x, y], [y, x], [a])
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize("name", ["w\ud800", "\udfffw", "x\udcff y"])
def test_half_a_character_in_a_name_is_refused_where_the_name_is_given(name):
    """No file or terminal takes it, and messages of these name no tensor."""
    where = re.escape(repr(name)) + rf".* the lone surrogate U\+{max(map(ord, name)):04X}"
    ctx = gs.Context()
    t = ctx.tensor("f32", 4, "t")
    for call in (lambda: ctx.tensor("f32", 4, name), lambda: ctx.set_name(t, name),
                 lambda: ctx.restore("NONE", t.type, t.ne, t.nb, name=name)):
        with pytest.raises(gs.GraphError, match="tensor " + where):
            call()
    with pytest.raises(ValueError, match="backend " + where):
        gs.DryBackend(name)
    assert t.name == "t" and len(ctx.tensors) == 1
    assert ctx.set_name(t, "\ud7ff\ue000\U0001f600").name == "\ud7ff\ue000\U0001f600"       # characters


@pytest.mark.parametrize("name", graph_names()[::4])
def test_one_edge_of_a_real_graph(name):
    data = copy.deepcopy(graph_file(name))
    before = graph_from_dict(data).fingerprint
    assert graph_from_dict(data).fingerprint == before
    node = next(t for t in data["tensors"] if t["op"] == "ADD" and t["src"][0] != t["src"][1])
    node["src"][1] = node["src"][0]
    assert graph_from_dict(data).fingerprint != before


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if k % 3 == 2 else pytest.mark.soak)
                                  for k, name in enumerate(graph_names())])
def test_a_real_graph_survives_the_round_trip(name, tmp_path):
    graph = gs.load_graph(graph_path(name))
    original = graph_file(name)
    written = graph_to_dict(graph)
    assert written["meta"] == original["meta"]
    assert (written["nodes"], written["leafs"]) == (original["nodes"], original["leafs"])
    assert written["tensors"] == original["tensors"]
    for suffix in (".json", ".json.gz"):
        path = tmp_path / f"graph{suffix}"
        gs.save_graph(graph, path)
        again = gs.load_graph(path)
        assert again.fingerprint == graph.fingerprint
        assert graph_to_dict(again) == written
        copied = tmp_path / f"copy{suffix}"
        gs.save_graph(again, copied)
        assert copied.read_bytes() == path.read_bytes()
        gs.save_graph(again, os.fsencode(copied))
        assert gs.load_graph(os.fsencode(copied)).fingerprint == graph.fingerprint


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_an_existing_file_of_a_graph_stays_where_the_new_one_cannot_be_written(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"graph{suffix}"
    path.write_bytes(b"before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        gs.save_graph(gs.Graph(), path)
    assert path.read_bytes() == b"before" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", graph_names())
def test_the_depth_first_order_of_a_reloaded_graph(name):
    """Building the graph anew from its last nodes, in ggml's order, meets the sources in the file's order."""
    graph = gs.load_graph(graph_path(name))
    read = {s for t in graph.nodes for s in t.src}
    ends = [t for t in graph.nodes if t not in read]
    anew = gs.Graph(*ends)
    assert set(anew.nodes) == set(graph.nodes)
    place = {t: i for i, t in enumerate(anew.nodes)}
    assert all(place[s] < place[t] for t in anew.nodes for s in t.src if s in place)
    nodes, leafs = slow_order(ends)
    assert (list(anew.nodes), list(anew.leafs)) == (nodes, leafs)


@quick(60)
@given(recipes(30))
def test_random_graphs_survive_the_round_trip(recipe):
    graph = Built(recipe).graph
    data = json.loads(json.dumps(graph_to_dict(graph)))
    again = graph_from_dict(data)
    assert again.fingerprint == graph.fingerprint
    assert graph_to_dict(again) == data
    for ours, theirs in zip(graph.tensors, again.tensors, strict=True):
        for fact in ("name", "op", "type", "ne", "nb", "nbytes", "flags", "op_params", "view_offs"):
            assert getattr(ours, fact) == getattr(theirs, fact)


def test_file_order_and_empty_slots_are_kept():
    """Ids may come in any order in the file; -1 is an empty source slot."""
    data = {"meta": {"any": 1}, "nodes": [0], "leafs": [2, 1], "tensors": [
        {"name": "out", "op": "SOFT_MAX", "type": "f32", "ne": [4, 1, 1, 1], "nb": [4, 16, 16, 16],
         "src": [2, -1, 1]},
        {"name": "sinks", "op": "NONE", "type": "f32", "ne": [1, 1, 1, 1], "nb": [4, 4, 4, 4]},
        {"name": "x", "op": "NONE", "type": "f32", "ne": [4, 1, 1, 1], "nb": [4, 16, 16, 16],
         "flags": ["input"]},
    ]}
    graph = graph_from_dict(data)
    out, sinks, x = graph.tensors
    assert out.src == (x, None, sinks) and graph.leafs == (x, sinks) and x.flags == {"input"}
    assert graph_to_dict(graph) == data


def test_residents_are_placed_and_only_they():
    backend = gs.DryBackend("dry", alignment=64)
    asked = []

    def place(t):
        asked.append(t)
        return backend

    graph = gs.load_graph(graph_path("llama-160m-decode"), place=place)
    assert {t.resident for t in asked} == {"weight", "kv"}
    for t in graph.tensors:
        assert (t.buffer is not None) == bool(t.resident or (t.view_src is not None and t.view_src.resident))
        assert not t.buffer or (t.backend is backend and t.offset % 64 == 0 or t.view_src is not None)
    spans = sorted((id(t.buffer), t.offset, t.offset + t.nbytes) for t in asked)
    for (buffer, _, end), (other, start, _) in zip(spans, spans[1:], strict=False):
        assert buffer != other or end <= start
    with pytest.raises(gs.BackendError):
        asked[0].numpy()
    with pytest.raises(TypeError, match="not a Backend"):
        gs.load_graph(graph_path("llama-160m-decode"), place=lambda t: "CPU")


def small_file() -> dict:
    def tensor(name, op="NONE", **fields):
        return {"name": name, "op": op, "type": "f32", "ne": [4, 2, 1, 1], "nb": [4, 16, 32, 32], **fields}

    return {
        "meta": {"model": "small"},
        "tensors": [
            tensor("w", resident="weight"),
            tensor("x", flags=["input"]),
            tensor("sum", "ADD", src=[1, 0]),
            tensor("view", "VIEW", src=[2], view_src=2, view_offs=16, ne=[4, 1, 1, 1], nb=[4, 16, 16, 16]),
            tensor("out", "SCALE", src=[3], op_params=[1056964608], flags=["output"], ne=[4, 1, 1, 1],
                   nb=[4, 16, 16, 16]),
        ],
        "nodes": [2, 3, 4], "leafs": [1, 0],
    }


def test_the_small_file_is_right():
    graph = graph_from_dict(small_file())
    assert names(graph.nodes) == ["sum", "view", "out"] and graph_to_dict(graph) == small_file()


WRONG = {
    "cycle of two": (lambda d: d["tensors"][2].update(src=[4, 0]), gs.GraphError, "cycle"),
    "reads itself": (lambda d: d["tensors"][2].update(src=[2, 0]), gs.GraphError, "cycle"),
    "views itself": (lambda d: d["tensors"][3].update(view_src=3, src=[]), gs.GraphError, "cycle"),
    "id too large": (lambda d: d["tensors"][2].update(src=[1, 5]), gs.FileFormatError, "tensor 2.*5"),
    "id negative": (lambda d: d["tensors"][2].update(src=[1, -2]), gs.FileFormatError, "-2"),
    "id huge": (lambda d: d["tensors"][2].update(src=[1, 2**70]), gs.FileFormatError, "tensor 2"),
    "id is text": (lambda d: d["tensors"][2].update(src=[1, "0"]), gs.FileFormatError, "tensor 2"),
    "id is a bool": (lambda d: d["tensors"][2].update(src=[1, True]), gs.FileFormatError, "True"),
    "src is a number": (lambda d: d["tensors"][2].update(src=1), gs.FileFormatError, "src"),
    "11 sources": (lambda d: d["tensors"][2].update(src=[0] * 11), gs.GraphError, "11 sources"),
    "view_src wrong": (lambda d: d["tensors"][3].update(view_src=9), gs.FileFormatError, "view_src"),
    "view too far": (lambda d: d["tensors"][3].update(view_offs=17), gs.GraphError, "17"),
    "view negative": (lambda d: d["tensors"][3].update(view_offs=-4), gs.GraphError, "-4"),
    "view_offs huge": (lambda d: d["tensors"][3].update(view_offs=2**63 - 1), gs.GraphError, "tensor 3"),
    "view_offs too wide": (lambda d: d["tensors"][3].update(view_offs=2**80), gs.FileFormatError, "tensor 3"),
    "view_offs a float": (lambda d: d["tensors"][3].update(view_offs=1.5), gs.FileFormatError, "tensor 3"),
    "unknown op": (lambda d: d["tensors"][2].update(op="FROBNICATE"), gs.GraphError, "FROBNICATE"),
    "op is a list": (lambda d: d["tensors"][2].update(op=["ADD"]), gs.FileFormatError, "tensor 2"),
    "no op": (lambda d: d["tensors"][2].pop("op"), gs.FileFormatError, "tensor 2.*'op'"),
    "unknown type": (lambda d: d["tensors"][2].update(type="q3_9"), gs.GraphError, "q3_9"),
    "unknown type number": (lambda d: d["tensors"][2].update(type=4), gs.GraphError, "4"),
    "type is null": (lambda d: d["tensors"][2].update(type=None), gs.FileFormatError, "tensor 2"),
    "five dimensions": (lambda d: d["tensors"][2].update(ne=[1] * 5), gs.GraphError, "5"),
    "no dimensions": (lambda d: d["tensors"][2].update(ne=[]), gs.GraphError, "0"),
    "ne negative": (lambda d: d["tensors"][2].update(ne=[-1, 2, 1, 1]), gs.GraphError, "-1"),
    "ne a float": (lambda d: d["tensors"][2].update(ne=[1.5, 2, 1, 1]), gs.FileFormatError, "tensor 2"),
    "ne text": (lambda d: d["tensors"][2].update(ne="4211"), gs.FileFormatError, "tensor 2"),
    "ne an object": (lambda d: d["tensors"][2].update(ne={"0": 4}), gs.FileFormatError, "tensor 2"),
    "ne beyond 64 bits": (lambda d: d["tensors"][2].update(ne=[2**64, 1, 1, 1]), gs.GraphError, "2\\*\\*63"),
    "strides overflow": (lambda d: d["tensors"][2].update(ne=[4, 3, 1, 1], nb=[4, 2**62, 4, 4]),
                         gs.GraphError, "bytes"),
    "broken blocks": (lambda d: d["tensors"][2].update(type="q4_0"), gs.GraphError, "whole q4_0 blocks"),
    "op_params too long": (lambda d: d["tensors"][4].update(op_params=[1] * 17), gs.GraphError, "op_params"),
    "op_params too large": (lambda d: d["tensors"][4].update(op_params=[2**31]), gs.GraphError, "op_params"),
    "op_params a number": (lambda d: d["tensors"][4].update(op_params=7), gs.FileFormatError, "tensor 4"),
    "unknown flag": (lambda d: d["tensors"][4].update(flags=["shiny"]), gs.GraphError, "shiny"),
    "flags a number": (lambda d: d["tensors"][4].update(flags=1), gs.FileFormatError, "tensor 4"),
    "a tensor is a list": (lambda d: d["tensors"].__setitem__(2, []), gs.FileFormatError, "tensor 2"),
    "a tensor is null": (lambda d: d["tensors"].__setitem__(2, None), gs.FileFormatError, "tensor 2"),
    "no tensors": (lambda d: d.pop("tensors"), gs.FileFormatError, "'tensors'"),
    "no nodes": (lambda d: d.pop("nodes"), gs.FileFormatError, "'nodes'"),
    "no leafs": (lambda d: d.pop("leafs"), gs.FileFormatError, "'leafs'"),
    "nodes an object": (lambda d: d.update(nodes={}), gs.FileFormatError, "'nodes'"),
    "nodes out of range": (lambda d: d.update(nodes=[2, 3, 9]), gs.FileFormatError, "nodes.*9"),
    "nodes too early": (lambda d: d.update(nodes=[3, 2, 4]), gs.GraphError, "'view'"),
    "a node twice": (lambda d: d.update(nodes=[2, 2, 3, 4]), gs.GraphError, "twice"),
    "a leaf missing": (lambda d: d.update(leafs=[1]), gs.GraphError, "'w'"),
    "half a character in a name": (lambda d: d["tensors"][0].update(name="w\ud800"), gs.GraphError,
                                   r"tensor 0: tensor 'w\\ud800': the name has the lone surrogate U\+D800"),
    "half a character in a kind": (lambda d: d["tensors"][0].update(resident="\udfff"), gs.GraphError,
                                   r"tensor 0: .* is resident as '\\udfff'"),
    "half a character in meta": (lambda d: d.update(meta={"model": "\ud800"}), gs.FileFormatError, r"meta .*U\+D800"),
    "half a character in meta's keys": (lambda d: d.update(meta={"a": [{"\ud800": 1}]}), gs.FileFormatError, "meta"),
    "meta a list": (lambda d: d.update(meta=[]), gs.FileFormatError, "meta"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused_by_name(case, tmp_path):
    change, error, message = WRONG[case]
    data = small_file()
    change(data)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(error or gs.Error, match=message) as raised:
        gs.load_graph(path)
    assert "wrong.json" in str(raised.value) or isinstance(raised.value, gs.GraphError)


def test_meta_nested_as_deep_as_json_can_be_read_is_a_graph_or_refused(tmp_path):
    text, path = json.dumps(small_file() | {"meta": {"a": 0}}), tmp_path / "deep.json"
    for depth in range(700, 1000):
        path.write_text(text.replace('"a": 0', f'"a": {"[" * depth}{"]" * depth}'))
        try:
            assert len(gs.load_graph(path).nodes) == 3
        except gs.FileFormatError as error:
            assert "recursion" in str(error)


def test_graphs_with_values_that_json_does_not_have_are_pickled_and_fitted():
    """Bytes that are no text, as os.fsdecode makes one of them, and numbers of NumPy: no file has them."""
    ctx = gs.Context()
    graph = gs.Graph(ctx.set_output(ctx.sqr(ctx.tensor("f32", 4, "x", input=True))))
    graph.meta.update(count=np.int64(3), file="x\udcff")
    plan = pickle.loads(pickle.dumps(gs.Scheduler([gs.DryBackend("CPU")]).plan(graph)))
    assert plan.graph.meta == {"count": 3, "file": "x\udcff"}
    gs.fit([graph], [gs.Device("CPU", 1 << 30, 1e10, 1e11, host=True)]).verify()


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe\x00", b"[" * 200_000,
    b'{"tensors": ' + b"9" * 100_000 + b"}", b'{"tensors": NaN, "nodes": [], "leafs": []}'])
def test_files_that_are_not_graphs(text, tmp_path):
    for name, content in (("x.json", text), ("x.json.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(gs.FileFormatError, match="x.json"):
            gs.load_graph(tmp_path / name)


def test_a_missing_file_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        gs.load_graph(tmp_path / "nowhere.json")


def test_a_plain_file_called_gz(tmp_path):
    (tmp_path / "x.gz").write_text(json.dumps(small_file()))
    with pytest.raises(gs.FileFormatError):
        gs.load_graph(tmp_path / "x.gz")


def test_a_small_file_takes_little_memory(tmp_path):
    """Memory grows with the size of the file, not with the largest permitted size."""
    (tmp_path / "small.json").write_text(json.dumps(small_file()))
    tracemalloc.start()
    try:
        gs.load_graph(tmp_path / "small.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_files_that_unpack_to_more_than_is_read_are_refused(tmp_path, monkeypatch):
    for name, text in (("x.json", b" " * 3000), ("x.json.gz", gzip.compress(b" " * 3000))):
        (tmp_path / name).write_bytes(text)
        monkeypatch.setattr("ggml_sched.graph.graphfile.MAX_FILE_BYTES", 2999)
        with pytest.raises(gs.FileFormatError, match=f"{name}: more than 2999 bytes"):
            gs.load_graph(tmp_path / name)


def test_residents_that_63_bits_do_not_address_are_refused():
    size = 2**60 - 1
    data = {"meta": {}, "nodes": [], "leafs": [0, 1, 2], "tensors": [
        {"name": name, "op": "NONE", "type": "f32", "ne": [size, 1, 1, 1], "nb": [4, *[4 * size] * 3],
         "resident": "weight"} for name in "abc"]}
    backend = gs.DryBackend("A")
    with pytest.raises(gs.GraphError, match="'b'.*'A'"):
        graph_from_dict(data, lambda t: backend)


def test_truncated_gzip_files(tmp_path):
    good = graph_path("llama-160m-decode").read_bytes()
    path = tmp_path / "truncated.json.gz"
    for length in [0, 1, 2, 9, 10, 11, 18, len(good) // 2, len(good) - 8, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(gs.FileFormatError):
            gs.load_graph(path)


def test_the_samples_stay_small():
    assert sum(path.stat().st_size for path in DATA.glob("g*/*")) < 1 << 20
