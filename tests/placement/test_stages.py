"""Stages and atoms: cut at articulation points that all graphs have, and few atoms a stage for every kind of model."""

from pathlib import Path

import pytest
from placed_models import Parts, decoder

import ggml_sched as gs
from ggml_sched.placement.atoms import MAX_ATOMS, find_atoms
from ggml_sched.placement.facts import facts
from ggml_sched.placement.outline import outline, places_of, shared_values
from ggml_sched.placement.stages import find_models, large_bytes
from ggml_sched.placement.wiring import Wiring

GRAPHS = Path(__file__).parents[1] / "data" / "graphs"
KINDS = {"gpt2-124m": 12, "llama-160m": 12, "llama-2-7b": 32, "llama-2-7b-fa": 32, "mamba-1.4b": 48,
         "mixtral-8x7b": 32, "phi2-2.7b": 32, "tinyllama-1.1b": 22}
"""{model: layers}."""
SOME_KINDS = [pytest.param(kind, marks=() if kind in ("gpt2-124m", "mamba-1.4b", "mixtral-8x7b") else pytest.mark.soak)
              for kind in KINDS]
"""Attention, recurrence and experts; the others differ from the first in sizes."""
WHOLE_LAYERS = ("mamba-1.4b", "phi2-2.7b")
"""Models whose layers have no cut inside: recurrent, and with attention beside the feed-forward part."""


def outlines(*graphs, pins=None):
    """The outlines of the only model of some graphs, and the bytes that count as large."""
    wirings = [Wiring(facts(graph)) for graph in graphs]
    (model,) = find_models(wirings)
    shared = [shared_values(w, of, [w.root[stage.incoming[g]] for stage in model.stages[1:]])
              for g, (w, of) in enumerate(zip(wirings, model.stage_of, strict=True))]
    places = [places_of(model, g) for g in range(len(graphs))]
    counted = set()
    made = [outline(wirings, model, k, shared, places, {}, counted, pins or {}, lambda op: False)
            for k in range(len(model.stages))]
    total = sum({name: r.nbytes for each in made for name, r in zip(each.names, each.residents, strict=True)}.values())
    return made, large_bytes(total)


def names_of(atoms, made):
    return [{made.names[r] for r in members} for members in atoms.members]


def both(kind):
    return [gs.load_graph(GRAPHS / f"{kind}-{run}.json.gz") for run in ("decode", "prefill512")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_every_kind_of_model_is_cut_from_the_next(kind):
    made, large = outlines(*both(kind))
    per_layer = 1 if kind in WHOLE_LAYERS else 2
    embeddings = 2 if kind == "gpt2-124m" else 1
    assert len(made) == embeddings + per_layer * KINDS[kind] + 1
    atoms = [len(find_atoms(each, large).members) for each in made]
    assert max(atoms) <= (4 if kind == "mamba-1.4b" else 5)
    assert len({each.key for each in made}) <= 8


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_every_node_and_every_resident_is_in_a_stage(kind):
    graphs = both(kind)
    wirings = [Wiring(facts(graph)) for graph in graphs]
    (model,) = find_models(wirings)
    for g, w in enumerate(wirings):
        nodes = [i for stage in model.stages for i in stage.nodes[g]]
        assert sorted(nodes) == list(range(len(w)))
        for stage in model.stages:
            assert stage.nodes[g] == sorted(stage.nodes[g])
    made, _ = outlines(*graphs)
    assert {name for each in made for name in each.names} == {
        t.name for t in graphs[0].leafs if t.resident and t in {s.root for n in graphs[0].nodes for s in n.src}}


def test_a_state_read_early_and_written_late_is_in_its_own_layers_stage():
    made, _ = outlines(*both("mamba-1.4b"))
    for layer in range(48):
        assert {"cache_r_l", "cache_s_l"} == {name.removesuffix(str(layer)) for name in made[1 + layer].names
                                              if name.startswith("cache")}


def test_cuts_are_those_that_all_graphs_have():
    parts = Parts()
    x = parts.embedding(64, 1)
    one = parts.feed_forward(x, "a", 128)
    joined = parts.ctx.add(parts.feed_forward(one, "b", 128), one)      # no cut between a and b in this graph
    whole = gs.Graph(parts.ctx.mul_mat(parts.resident("out", 64, 64), joined))
    parts = Parts()
    x = parts.embedding(64, 1)
    x = parts.feed_forward(parts.feed_forward(x, "a", 128), "b", 128)
    cut = gs.Graph(parts.ctx.mul_mat(parts.resident("out", 64, 64), x))
    assert [set(each.names) for each in outlines(cut)[0]] == [
        {"embd"}, {"a.norm", "a.up", "a.down"}, {"b.norm", "b.up", "b.down"}, {"out"}]
    parts = Parts()
    x = parts.embedding(64, 1)
    up = parts.ctx.mul_mat(parts.resident("a.up", 64, 128), parts.norm(x, "a.norm"))
    over = parts.ctx.mul_mat(parts.resident("a.down", 128, 64), up)
    both_read = parts.ctx.add(parts.feed_forward(over, "b", 128), x)    # x passes around a and b
    around = gs.Graph(parts.ctx.mul_mat(parts.resident("out", 64, 64), both_read))
    assert [set(each.names) for each in outlines(cut, around)[0]] == [
        {"embd"}, {"a.norm", "a.up", "a.down", "b.norm", "b.up", "b.down"}, {"out"}]
    assert len(outlines(whole)[0]) == 4


def test_a_node_beside_the_paths_is_in_the_stage_of_what_it_reads_wherever_it_stands():
    parts = Parts()
    x = parts.embedding(64, 1)
    out = parts.ctx.mul_mat(parts.resident("out", 64, 64), parts.feed_forward(x, "a", 128))
    kept = parts.ctx.cpy(x, parts.resident("kept", 64, 1, kind="kv"))
    graph = gs.Graph(out, kept)
    assert graph.nodes[-1] is kept
    (model,) = find_models([Wiring(facts(graph))])
    assert model.stages[0].nodes == ([0, len(graph.nodes) - 1],)


def test_graphs_without_a_common_resident_are_models_of_their_own():
    other = Parts()
    x = other.embedding(32, 1, name="other")
    graphs = [decoder(), gs.Graph(other.feed_forward(x, "other.ffn", 64)), decoder(tokens=4)]
    models = find_models([Wiring(facts(graph)) for graph in graphs])
    assert [model.graphs for model in models] == [(0, 2), (1,)]


def test_a_bias_goes_with_the_matrix_before_it_and_a_norm_with_the_matrix_after_it():
    made, large = outlines(*both("phi2-2.7b"))
    assert names_of(find_atoms(made[5], large), made[5]) == [
        {"blk.4.attn_norm.weight", "blk.4.attn_norm.bias", "blk.4.attn_qkv.weight", "blk.4.attn_qkv.bias"},
        {"cache_k_l4", "cache_v_l4"}, {"blk.4.attn_output.weight", "blk.4.attn_output.bias"},
        {"blk.4.ffn_up.weight", "blk.4.ffn_up.bias"}, {"blk.4.ffn_down.weight", "blk.4.ffn_down.bias"}]


def test_routers_are_apart_from_their_experts():
    made, large = outlines(*both("mixtral-8x7b"))
    atoms = names_of(find_atoms(made[2], large), made[2])
    assert {"blk.0.ffn_norm.weight", "blk.0.ffn_gate_inp.weight"} in atoms
    assert len(atoms) == 4


def test_a_router_without_an_atom_goes_with_the_smallest_and_not_with_its_experts():
    made, large = outlines(*both("mixtral-8x7b"))
    atoms = names_of(find_atoms(made[2], large, 3), made[2])
    assert len(atoms) == 3
    assert [len(names) for names in atoms] == [3, 1, 1]     # equal sizes: the first, and the norm before it
    parts = Parts()
    low = parts.ctx.mul_mat(parts.resident("low.b", 8, 512), parts.ctx.mul_mat(
        parts.resident("low.a", 512, 8), parts.embedding(512, 1)))
    x = parts.ctx.add(parts.ctx.mul_mat(parts.resident("w", 512, 512), low), low)
    (stage,) = [each for each in outlines(gs.Graph(parts.ctx.mul_mat(parts.resident("out", 512, 512), x)))[0]
                if "w" in each.names]
    assert len(find_atoms(stage, 1 << 18).members) == 1     # small matrices choose no experts


@pytest.mark.parametrize("count", [8, 12, 200])
def test_more_atoms_than_seven_are_joined_to_their_neighbours(count):
    parts = Parts()
    x = parts.embedding(64, 1)
    total = x
    for i in range(count):
        total = parts.ctx.add(total, parts.ctx.mul_mat(parts.resident(f"w{i}", 64, 64 if i % 3 else 60), x)
                              if i % 3 else parts.ctx.mul_mat(parts.resident(f"w{i}", 64, 64), x))
    made, large = outlines(gs.Graph(total))
    (stage,) = [each for each in made if "w0" in each.names]
    atoms = find_atoms(stage, large)
    assert len(atoms.members) <= MAX_ATOMS
    assert sorted(r for members in atoms.members for r in members) == list(range(len(stage.names)))


def test_pinned_residents_are_atoms_without_a_choice():
    made, large = outlines(decoder(), pins={"l0.attn.q": 1, "l0.attn.o": 0, "l0.attn.k": 1})
    atoms = find_atoms(made[1], large)
    names = names_of(atoms, made[1])
    assert {"l0.attn.q", "l0.attn.k"} <= names[atoms.pins.index(1)]
    assert names[atoms.pins.index(0)] == {"l0.attn.o"}
    assert atoms.free == len(atoms.members) - 2


@pytest.mark.parametrize("damage", ["", "twice"])
def test_residents_without_a_name_or_with_one_name_are_an_error(damage):
    parts = Parts()
    x = parts.embedding(64, 1)
    x = parts.ctx.mul_mat(parts.resident(damage, 64, 64), x)
    x = parts.ctx.mul_mat(parts.resident(damage, 64, 64), x)
    with pytest.raises(gs.GraphError, match="name"):
        Wiring(facts(gs.Graph(x)))


def test_residents_of_one_name_and_different_sizes_are_an_error():
    with pytest.raises(gs.GraphError, match="'l0.ffn.up' has 32768 bytes, and 65536"):
        find_models([Wiring(facts(decoder(hidden=hidden))) for hidden in (256, 128)])


def test_a_graph_of_cache_writes_alone_is_one_stage():
    parts = Parts()
    cache = parts.resident("cache", 8, 4, kind="kv")
    graph = gs.Graph(parts.ctx.scale(cache, 0.0, inplace=True))
    (model,) = find_models([Wiring(facts(graph))])
    assert [stage.nodes for stage in model.stages] == [([0],)]
