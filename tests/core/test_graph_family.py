"""Families of graphs: what two examples say about a third is what building it would give; or they say nothing."""

from __future__ import annotations

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched._graph import GraphFamily


def graph(n: int, m: int = 4, *, scale: float = 2.0, keep: bool = False, cache=None) -> gs.Graph:
    """Sizes that grow with n as extents, strides and offsets, and a tensor that does not."""
    ctx = gs.Context("example")
    x = ctx.tensor("f32", (8, n), "x", input=True)
    w = cache if cache is not None else ctx.tensor("f32", (8, m), "w")
    y = ctx.mul_mat(x, w)                               # [n, m]
    tail = ctx.view_2d(y, 3, m, y.nb[1], (n - 3) * 4)
    z = ctx.set_output(ctx.set_name(ctx.scale(ctx.cont(tail), scale), "z"))
    if keep:
        ctx.keep_until(x, z)
    return gs.Graph(z)


@pytest.mark.parametrize("n", [3, 4, 5, 7, 100])
def test_a_third_graph_is_the_one_that_building_gives(n):
    cache = gs.Context().tensor("f32", (8, 4), "cache")
    family = GraphFamily(graph(5, cache=cache), graph(9, cache=cache), 5, 9)
    made, built = family.at(n), graph(n, cache=cache)
    assert made.fingerprint == built.fingerprint and made.wiring == built.wiring
    for a, b in zip(made.tensors, built.tensors, strict=True):
        assert (a.name, a.op, a.type, a.ne, a.nb, a.view_offs, a.op_params, a.flags) == (
            b.name, b.op, b.type, b.ne, b.nb, b.view_offs, b.op_params, b.flags)
    assert [t.name for t in made.nodes] == [t.name for t in built.nodes]
    assert cache in made.tensors and not set(made.nodes) & set(family.at(n).nodes)


def test_examples_may_have_views_at_the_start():
    """Whose offset is a parameter that is cut."""
    for known in ((3, 5), (5, 3)):
        family = GraphFamily(*(graph(n) for n in known), *known)
        for n in (3, 4, 9):
            assert family.at(n).fingerprint == graph(n).fingerprint


def test_made_graphs_compute():
    family = GraphFamily(graph(5), graph(9), 5, 9)
    random = np.random.default_rng(0)
    with gs.Scheduler([gs.CpuBackend()]) as scheduler:
        for n in (4, 12):
            x, w = random.standard_normal((n, 8), np.float32), random.standard_normal((4, 8), np.float32)
            made = family.at(n)
            scheduler.alloc(made)
            tensors = {t.name: t for t in made.tensors}
            tensors["x"].set(x)
            tensors["w"].set(w)
            scheduler.compute(made)
            assert np.allclose(tensors["z"].numpy(), 2 * (w @ x.T)[:, -3:], atol=1e-5)


def test_made_graphs_outlive_their_examples():
    made = GraphFamily(graph(5), graph(9), 5, 9).at(20)
    assert made.tensors[0].ne[1] == 20 and gs.Graph(made.nodes[-1]).fingerprint == made.fingerprint


@pytest.mark.parametrize("n", [2, 1, 0, -4, 1 << 61, -(1 << 61)])
def test_sizes_that_cannot_be_are_refused(n):
    family = GraphFamily(graph(5), graph(9), 5, 9)
    with pytest.raises(gs.GraphError):
        family.at(n)
    assert family.at(6).fingerprint == graph(6).fingerprint


def test_numbers_off_the_line_are_refused():
    ctx = gs.Context()

    def one(k):
        return gs.Graph(ctx.scale(ctx.tensor("f32", k, "x"), 2.0))

    # From 1 to 2 the extent grows by 3: at 1.5 nobody knows; and over four numbers no step is whole.
    with pytest.raises(gs.GraphError, match="no size for"):
        GraphFamily(one(1), one(4), 0, 2).at(1)
    with pytest.raises(TypeError):
        GraphFamily(one(1), one(4), 0, 2).at(0.5)


@pytest.mark.parametrize("other", [
    {"scale": 3.0}, {"m": 5, "scale": 3.0}, {"keep": True}])
def test_examples_that_differ_in_more_than_sizes_are_refused(other):
    with pytest.raises(gs.GraphError, match="differ in more than sizes"):
        GraphFamily(graph(5), graph(9, **other), 5, 9)


def test_examples_wired_otherwise_are_refused():
    ctx = gs.Context()
    x, y = ctx.tensor("f32", 4, "x"), ctx.tensor("f32", 4, "y")
    u, v = ctx.tensor("f32", 8, "x"), ctx.tensor("f16", 8, "y")
    for a, b in (((x, y), (u, v)), ((x, x), (x, y))):
        with pytest.raises(gs.GraphError, match="differ"):
            GraphFamily(gs.Graph(ctx.add(*a)), gs.Graph(ctx.add(*b)), 1, 2)
    with pytest.raises(gs.GraphError, match="differ"):
        GraphFamily(gs.Graph(ctx.add(x, y)), gs.Graph(ctx.sub(x, y)), 1, 2)
    with pytest.raises(ValueError, match="nothing about others"):
        GraphFamily(graph(5), graph(9), 3, 3)
