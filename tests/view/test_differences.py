"""Differences of two plans: none between equal ones; sizes, copies, backends, rules and shared memory of others."""

from dataclasses import replace

import pytest
from shown_plans import recorded, refused, small

import ggml_sched as gs


def by_kind(found):
    kinds = {}
    for entry in found:
        kinds.setdefault(entry.kind, []).append(entry)
    return kinds


def test_equal_plans_have_none():
    plan = recorded("llama-2-7b-decode", "c2half")
    found = plan.differences(plan, ("one", "two"))
    assert not len(found) and str(found) == "one and two are equal"


def test_two_policies():
    seed, ours = (recorded("llama-2-7b-prefill512", "c4", policy) for policy in ("seed", "default"))
    found = seed.differences(ours)
    assert found.names == ("seed", "default")
    kinds = by_kind(found)
    sizes = {entry.what: (entry.one, entry.other) for entry in kinds["arena"]}
    for b, name in enumerate(("GPU0", "GPU1", "GPU2", "CPU")):
        for plan, words in zip((seed, ours), sizes[name], strict=True):
            assert words.startswith(f"{plan.buffer_sizes[b]:,} bytes")
    assert sizes["all together"] == tuple(f"{sum(plan.buffer_sizes):,} bytes" for plan in (seed, ours))
    assert [(e.one, e.other) for e in kinds["splits"]] == [(str(len(seed.splits)), str(len(ours.splits)))]
    copied = sum(int(entry.one.split()[0]) for entry in kinds["copies"] if entry.one != "none")
    changed = {(c.tensor.root.name, c.backend.name) for c in seed.copies}
    assert copied and changed
    moved = {i: k for entry in kinds["backend"] for i, k in entry.tensors}
    for i, t in enumerate(seed.graph.tensors):
        differs = seed.data.backend_index(i) != ours.data.backend_index(i)
        assert (i in moved) == (differs and (t.computes or t.op == "NONE")), t
    assert all(i == k for i, k in moved.items()), "both plans are of equal graphs"
    shared = kinds["shared memory"][0]
    assert (shared.one, shared.other) == ("in memory of their own", "in place of a source")
    assert all(ours.data.is_inplace(k) and not seed.data.is_inplace(i) for i, k in shared.tensors)
    assert shared.what == f"{len(shared.tensors)} tensors: ffn_swiglu-#"
    assert "what" in str(found) and "GPU1" in str(found)


def test_two_placements_on_other_backends():
    found = recorded("llama-2-7b-decode", "c4").differences(recorded("llama-2-7b-decode", "c2half"), ("four", "two"))
    sizes = {entry.what: entry.other for entry in by_kind(found)["arena"]}
    assert sizes["GPU1"] == "no such backend"
    moved = {(entry.one, entry.other) for entry in by_kind(found)["backend"]}
    assert ("GPU0", "CPU") in moved and ("GPU2", "GPU0") in moved


@pytest.mark.parametrize("name", ["GPU", "the caller", "unused"])
def test_backends_of_one_name_are_told_apart(name):
    def plan(home):
        backends = [gs.DryBackend(name), gs.DryBackend(name), gs.DryBackend("CPU")]
        weights, ctx = gs.Context(), gs.Context()
        weight = weights.tensor("f32", (64, 64), "w")
        backends[home].alloc_tensors(weights)
        x = ctx.tensor("f32", (64, 4), "x", input=True)
        with gs.Scheduler(backends) as scheduler:
            scheduler.set_tensor_backend(x, backends[2])
            return scheduler.plan(gs.Graph(ctx.set_output(ctx.mul_mat(weight, x))))

    first, second = (name, f"{name} (2)") if name == "GPU" else (f"{name} (2)", f"{name} (3)")
    kinds = by_kind(plan(0).differences(plan(1)))
    assert {entry.what for entry in kinds["arena"]} >= {first, second}
    assert [entry.what for entry in kinds["copies"]] == [f"CPU to {first}", f"CPU to {second}"]
    assert {(entry.one, entry.other) for entry in kinds["backend"]} == {(first, second)}


def test_tensors_that_one_graph_alone_has():
    found = by_kind(small(nodes=2).differences(small(nodes=4)))
    (entry,) = found["graph"]
    assert (entry.what, entry.one, entry.other) == ("2 tensors: SQR", "none", "there")
    assert entry.tensors == ((-1, 3), (-1, 4))


def test_a_rule_that_changed_is_named_where_the_backend_did_not():
    plan = refused()
    with gs.Scheduler(plan.backends) as scheduler:
        node = next(t for t in plan.graph.nodes if t.name == "ffn_up-0")
        scheduler.set_tensor_backend(node, plan.backend_of(node))
        other = scheduler.plan(plan.graph)
    (entry,) = plan.differences(other)
    assert (entry.kind, entry.what, entry.other) == ("rule", "ffn_up-0", "the caller assigned it (set_tensor_backend)")
    (entry,) = plan.differences(replace(other, assigned_by="the placement"))
    assert entry.other == "the placement assigned it"


def test_misuse():
    plan = small()
    with pytest.raises(ValueError, match="names of two plans, not 1"):
        plan.differences(plan, ("one",))
    with pytest.raises(TypeError, match="not a Plan: 3"):
        plan.differences(3)
