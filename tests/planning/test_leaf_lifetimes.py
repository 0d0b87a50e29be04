"""Plans whose leafs are born with their first readers: tensors that outlive a compute still live from the start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, make_plan
from ggml_sched.planning.plan import Plan


@pytest.mark.parametrize("offsets", ["best fit", "packed"])
def test_places_of_a_copy_are_nobody_elses_before_it_is_made(offsets):
    """Queued computes fill them in turn, at any time: they get none of the bytes that earlier results had."""
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    x, y = ctx.tensor("f32", (64, 64), "x", input=True), ctx.tensor("f32", 64, "y", input=True)
    early = ctx.mean(ctx.sum_rows(ctx.mul_mat(x, x)))
    there = ctx.relu(y)
    graph = gs.Graph(early, ctx.add(there, ctx.sqr(y)))
    policy = Policy(offsets=offsets, leafs_first=False, places=2)
    assigned = {t: b if t in (y, there) else a for t in graph.nodes}
    data = make_plan(Request(graph, Devices((a, b)), assigned), policy)
    assert data.slot_copies
    Plan(graph, data, (a, b), "late leafs").verify()


@quick(100)
@given(recipes(), st.integers(1, 3), st.booleans(), st.sampled_from(["packed", "best fit"]),
       st.lists(st.tuples(st.integers(0, 63), st.integers(0, 2)), min_size=3, max_size=3), st.booleans())
def test_random_plans_are_sound(recipe, places, stream, offsets, wishes, keeps):
    built = Built(recipe, 3)
    backends = tuple(gs.DryBackend(f"A{k}") for k in range(3))
    for home, backend in zip(built.homes, backends, strict=True):
        backend.alloc_tensors(home, "weights" if keeps else "any")
    assigned = {built.graph.nodes[k % len(built.graph)]: backends[b] for k, b in wishes}
    request = Request(built.graph, Devices(backends), assigned)
    policy = Policy(offsets=offsets, leafs_first=False, places=places, stream=stream)
    Plan(built.graph, make_plan(request, policy), backends, "late leafs").verify()
