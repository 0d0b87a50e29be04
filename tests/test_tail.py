"""A smaller result that takes over a larger source gives the tail of that memory back."""

import numpy as np

import ggml_sched as gs


def heir_of_a_part(ctx):
    """A large result of which only the front is used on, by a node that runs in place; then room is needed."""
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    large = ctx.set_name(ctx.repeat(x, ctx.tensor("f32", (64, 16), "like")), "large")
    front = ctx.relu(ctx.view_1d(large, 64))
    room = ctx.repeat(front, ctx.tensor("f32", (64, 12), "like"))
    out = ctx.set_output(ctx.add(ctx.repeat(front, room), ctx.sqr(room)))
    return gs.Graph(out), x, large, out


def test_the_tail_serves_later_nodes():
    graph, x, large, _ = heir_of_a_part(gs.Context())
    plan = gs.Scheduler([gs.DryBackend("A")]).plan(graph)
    plan.verify()
    position, rest = plan.data.trimmed(graph.id_of(large))
    assert rest == 64 * 4 and plan.data.sequence[position] == graph.id_of(graph.nodes[2])
    # Without the tail: large (4096), then room and its repetition (3072 each) beside it.
    assert plan.buffer_sizes[0] < x.nbytes + large.nbytes + 2 * 3072
    assert plan.live_bytes[0] <= plan.buffer_sizes[0]


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


def test_a_row_that_a_backend_wants_larger_does_not_reach_into_memory_given_back():
    """An heir of the same layout may still ask for more bytes than the one before it."""
    class Wide(gs.DryBackend):
        def alloc_size(self, t):
            return t.nbytes * 4 if t.op == "SQR" else t.nbytes

    ctx = gs.Context()
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    large = ctx.repeat(x, ctx.tensor("f32", (64, 16), "like"))
    front = ctx.relu(ctx.view_1d(large, 64))
    room = ctx.repeat(x, ctx.tensor("f32", (64, 8), "other"))
    graph = gs.Graph(room, ctx.set_output(ctx.mul(ctx.repeat(ctx.sqr(front), room), room)))
    plan = gs.Scheduler([Wide("A")]).plan(graph)
    plan.verify()
