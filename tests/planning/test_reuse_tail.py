"""A result smaller than the source that it reuses in place frees the tail of that memory."""

import json

import numpy as np
import pytest
from devices import device

import ggml_sched as gs
from ggml_sched.planning.planfile import plan_from_dict, plan_to_dict


def heir_of_a_part(ctx, rows=4):
    """A large result of which only the front is used on, by a node that runs in place; then room is needed."""
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    large = ctx.set_name(ctx.repeat(x, ctx.tensor("f32", (64, 16), "like")), "large")
    front = ctx.relu(ctx.view_1d(large, 64))
    room = ctx.repeat(front, ctx.tensor("f32", (64, rows), "like"))
    out = ctx.set_output(ctx.add(ctx.repeat(front, room), ctx.sqr(room)))
    return gs.Graph(out), x, large, out


def test_the_tail_serves_later_nodes():
    graph, x, large, _ = heir_of_a_part(gs.Context())
    plan = gs.Scheduler([gs.DryBackend("A")]).plan(graph)
    plan.verify()
    position, rest = plan.data.trimmed(graph.id_of(large))
    assert rest == 64 * 4 and plan.data.sequence[position] == graph.id_of(graph.nodes[2])
    # Without the tail, room and its repetition (1024 each) would lie beside all of large.
    assert plan.buffer_sizes == plan.live_bytes == (x.nbytes + large.nbytes,)


@pytest.mark.parametrize("rest", [0, 192, 512, 4096])
def test_no_plan_file_changes_what_can_be_read_by_another_tail(rest):
    """`front` can be read at the end; if its memory had kept 512 bytes, `room` would have overwritten a part of it."""
    graph, _, large, _ = heir_of_a_part(gs.Context())
    backends = [gs.DryBackend("A")]
    plan = gs.Scheduler(backends).plan(graph)
    data = json.loads(json.dumps(plan_to_dict(plan)))
    data["plan"]["rest"][graph.id_of(large)] = rest
    if rest < plan.data.trimmed(graph.id_of(large))[1]:
        with pytest.raises(gs.FileFormatError, match=f"it has 4096, of which {rest} stay"):
            plan_from_dict(data, graph, backends)
        return
    loaded = plan_from_dict(data, graph, backends)
    loaded.verify()
    assert loaded.facts.overwritten == plan.facts.overwritten


def test_a_heir_that_would_keep_more_than_it_saves_gets_memory_of_its_own():
    graph, x, large, _ = heir_of_a_part(gs.Context(), rows=12)
    taker = graph.nodes[2]
    plan = gs.Scheduler([gs.DryBackend("A")]).plan(graph)
    plan.verify()
    # In place, its 256 bytes would cut the memory of large (4096) in two, too small for the 3072 that come next.
    assert not plan.data.is_inplace(graph.id_of(taker))
    assert plan.buffer_sizes == plan.live_bytes == (256 + 2 * 3072,)


def test_of_two_sources_the_one_that_keeps_less_memory_taken_is_taken_over(ctx):
    x = ctx.tensor("f32", (64, 1), "x", input=True)
    large = ctx.repeat(x, ctx.tensor("f32", (64, 16), "like"))
    part = ctx.relu(ctx.view_1d(large, 64))                         # the front of large
    small = ctx.mul_mat(ctx.tensor("f32", (64, 64), "w", input=True), x)
    both = ctx.add(ctx.reshape(part, 64), ctx.reshape(small, 64))   # of one layout: either may be reused in place
    room = ctx.repeat(both, ctx.tensor("f32", (64, 16), "like"))
    graph = gs.Graph(ctx.set_output(ctx.add(room, ctx.reshape(both, 64))))
    for policy, first in (("default", small), ("seed", part)):
        plan = gs.Scheduler([gs.DryBackend("A")], policy=policy).plan(graph)
        plan.verify()
        owner = graph.id_of(both)
        while plan.data.root(owner) >= 0:
            owner = plan.data.root(owner)
        assert owner == graph.id_of(first if first is small else large), policy


def test_results_are_the_same_and_the_first_generation_gives_nothing_back():
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    results = []
    for policy in ("default", "seed"):
        graph, x, large, out = heir_of_a_part(gs.Context())
        with gs.Scheduler([gs.CpuBackend()], policy=policy) as scheduler:
            plan = scheduler.alloc(graph)
            plan.verify()
            assert policy == "default" or plan.data.trimmed(graph.id_of(large)) is None
            x.set(values)
            for _ in range(2):
                scheduler.compute(graph)
            results.append(out.numpy())
    np.testing.assert_array_equal(*results)


def taker_of_the_middle(ctx, rows=16, width=64, at=5):
    """A large result of which four rows are used on, by a node that runs in place."""
    x = ctx.tensor("f32", (width, 1), "x", input=True)
    large = ctx.set_name(ctx.repeat(x, ctx.tensor("f32", (width, rows), "like")), "large")
    middle = ctx.view_2d(large, width, 4, large.nb[1], at * large.nb[1])
    taker = ctx.set_name(ctx.relu(middle), "taker")
    out = ctx.set_output(ctx.add(ctx.sqr(taker), x))
    return gs.Graph(out), x, large, taker, out


def test_a_view_at_an_aligned_offset_hands_its_part_over():
    results = []
    for policy in ("default", "seed"):
        graph, x, large, taker, out = taker_of_the_middle(gs.Context())
        with gs.Scheduler([gs.CpuBackend()], policy=policy) as scheduler:
            plan = scheduler.alloc(graph)
            plan.verify()
            assert plan.data.is_inplace(graph.id_of(taker)) == (policy == "default")
            if policy == "default":
                # The node that reuses that one's memory lies there, too.
                assert plan.offset_of(taker) == plan.offset_of(large) + 5 * 256 == plan.offset_of(out)
                assert plan.buffer_sizes == (x.nbytes + large.nbytes,)
            x.set(np.arange(64, dtype=np.float32) - 30)
            for _ in range(2):
                scheduler.compute(graph)
            results.append(out.numpy())
    np.testing.assert_array_equal(*results)


def test_a_view_at_an_offset_that_is_not_aligned_keeps_its_part():
    graph, _, _, taker, _ = taker_of_the_middle(gs.Context(), width=24)
    plan = gs.Scheduler([gs.DryBackend("A", alignment=64)]).plan(graph)
    plan.verify()
    assert not plan.data.is_inplace(graph.id_of(taker))
    finer = gs.Scheduler([gs.DryBackend("A", alignment=32)]).plan(graph)
    finer.verify()
    assert finer.data.is_inplace(graph.id_of(taker))


def test_an_heir_that_would_keep_more_taken_than_it_saves_gets_memory_of_its_own(ctx):
    """It takes the last row, and lives on while another large tensor is needed."""
    x = ctx.tensor("f32", (64, 1), "x", input=True)
    large = ctx.repeat(x, ctx.tensor("f32", (64, 16), "like"))
    taker = ctx.relu(ctx.view_1d(large, 64, 15 * 256))
    room = ctx.get_rows(ctx.sqr(ctx.repeat(taker, large)), ctx.tensor("i32", 1, "ids", input=True))
    graph = gs.Graph(ctx.set_output(ctx.add(room, taker)))
    plan = gs.Scheduler([gs.DryBackend("A")]).plan(graph)
    plan.verify()
    assert not plan.data.is_inplace(graph.id_of(taker))
    assert plan.buffer_sizes[0] == x.nbytes + 32 + large.nbytes + taker.nbytes


def test_a_row_that_a_backend_wants_larger_does_not_reach_into_memory_given_back(ctx):
    """A result of the same layout may have a larger alloc_size than its source."""
    def alloc_size(inherited, tensor):
        return inherited(tensor) * (4 if tensor.op == "SQR" else 1)

    x = ctx.tensor("f32", (64, 4), "x", input=True)
    large = ctx.repeat(x, ctx.tensor("f32", (64, 16), "like"))
    front = ctx.relu(ctx.view_1d(large, 64))
    room = ctx.repeat(x, ctx.tensor("f32", (64, 8), "other"))
    graph = gs.Graph(room, ctx.set_output(ctx.mul(ctx.repeat(ctx.sqr(front), room), room)))
    plan = gs.Scheduler([device(gs.DryBackend, "A", answers={"alloc_size": alloc_size})]).plan(graph)
    plan.verify()
