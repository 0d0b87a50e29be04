"""Roles: names and weights say them, other nodes inherit them, and their colours differ for every reader."""

import itertools

import numpy as np
import pytest
from shown_plans import recorded, small

import ggml_sched as gs
from ggml_sched.view.ink import DARK, LIGHT, ink_on
from ggml_sched.view.roles import DEEP, ROLES, role_of_name, roles_of

SEEN = {"normal": np.eye(3),
        "deuteranopia": [[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.011820, .042940, .968881]],
        "protanopia": [[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]]}
"""Linear RGB as it is seen (Machado, Oliveira, Fernandes 2009)."""


def name_of(role):
    return None if role is None else ROLES[role].name


@pytest.mark.parametrize("name, role", [
    ("Qcur-3", "attention"), ("kq_soft_max-0", "attention"), ("attn_norm-1", "residual stream, norms"),
    ("ffn_gate-7", "feed-forward"), ("ffn_moe_topk-2", "experts"), ("ffn_inp-2", "residual stream, norms"),
    ("result_output", "output"), ("result_norm", "residual stream, norms"), ("normed", None), ("node_12", None)])
def test_a_node_s_name_says_its_role(name, role):
    assert name_of(role_of_name(name)) == role


@pytest.mark.parametrize("name, role", [
    ("blk.0.attn_q.weight", "attention"), ("blk.31.attn_norm.weight", "residual stream, norms"),
    ("blk.0.ffn_down.weight", "feed-forward"), ("blk.0.ffn_down_exps.weight", "experts"),
    ("blk.0.ffn_gate_inp.weight", "experts"), ("blk.5.ssm_in.weight", "recurrent"), ("output.weight", "output"),
    ("output_norm.weight", "residual stream, norms"), ("token_embd.weight", "residual stream, norms"), ("w", None)])
def test_a_weight_s_name_says_its_role(name, role):
    assert name_of(role_of_name(name, weight=True)) == role


@pytest.mark.parametrize("name", ["phi2-2.7b-decode", "mamba-1.4b-decode", "mixtral-8x7b-prefill512"])
def test_nodes_without_a_name_have_the_role_of_the_weights_that_they_read(name):
    graph = recorded(name, "c1").graph
    roles = roles_of(graph)
    assert ROLES.index(next(r for r in ROLES if r.name == "other")) not in {roles[graph.id_of(t)] for t in graph.nodes}
    for t in graph.nodes:
        weights = [s for s in t.src if s is not None and s.name.startswith("blk.") and "norm" not in s.name]
        if weights and role_of_name(t.name) is None:
            assert roles[graph.id_of(t)] == role_of_name(weights[0].name, weight=True), t.name


def test_without_names_a_role_is_a_class_of_ops():
    ctx = gs.Context()
    x = ctx.tensor("f32", (8, 8), input=True)
    graph = gs.Graph(ctx.add(ctx.mul_mat(x, x), ctx.rms_norm(x, 1e-5)))
    names = {t.op: ROLES[roles_of(graph)[graph.id_of(t)]].name for t in graph.tensors}
    assert names == {"NONE": "inputs", "MUL_MAT": "matrix products", "RMS_NORM": "norms, reductions",
                     "ADD": "element by element"}
    plan = small()
    assert {ROLES[role].name for role in roles_of(plan.graph)} == {"inputs", "element by element"}


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= .04045, c / 12.92, ((c + .055) / 1.055) ** 2.4)


def lab(rgb):
    """Oklab (Ottosson 2020) of linear RGB."""
    to_cones = np.array([[.4122214708, .5363325363, .0514459929], [.2119034982, .6806995451, .1073969566],
                         [.0883024619, .2817188376, .6299787005]])
    to_lab = np.array([[.2104542553, .7936177850, -.0040720468], [1.9779984951, -2.4285922050, .4505937099],
                       [.0259040371, .7827717662, -.8086757660]])
    return to_lab @ np.cbrt(to_cones @ np.clip(rgb, 0, 1))


def contrast(one, other):
    low, high = sorted(linear(c) @ [.2126, .7152, .0722] + .05 for c in (one, other))
    return high / low


@pytest.mark.parametrize("seen, least", [("normal", 0.15), ("deuteranopia", 0.09), ("protanopia", 0.09)])
def test_every_two_roles_of_a_model_can_be_told_apart(seen, least):
    colours = dict.fromkeys(role.colour for role in ROLES)
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(lab(SEEN[seen] @ linear(one)) - lab(SEEN[seen] @ linear(other))) >= least, (one, other)


@pytest.mark.parametrize("paper", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper_and_texts_are_legible(paper):
    assert min(contrast(role.colour, paper["paper"]) for role in ROLES) >= 1.5
    assert min(contrast(paper[name], paper[back]) for name in ("ink", "pale") for back in ("paper", "back")) >= 4.5
    assert contrast(paper["limit"], paper["paper"]) >= 4.5
    assert min(contrast(ink_on(paper[name]), paper[name]) for name in ("device", "host")) >= 4


def test_names_on_colours_are_legible():
    assert all(contrast(ink_on(role.colour), role.colour) >= 4 for role in ROLES)
    assert 0 < len(DEEP) < len(ROLES)
    for colour in (*(role.colour for role in ROLES), *LIGHT.values(), *DARK.values(), "#000000", "#767676"):
        assert ink_on(colour) == max(("#ffffff", "#14181d"), key=lambda ink: contrast(ink, colour))
