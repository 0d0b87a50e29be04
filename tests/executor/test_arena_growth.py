"""Arenas that grow: old and new memory in a backend that cannot hold both."""

import ggml_sched as gs


def test_an_arena_grows_although_old_and_new_do_not_fit_side_by_side():
    backend = gs.DryBackend("A", memory=2000)
    graphs = []
    for elements in (150, 200):
        ctx = gs.Context()
        x = ctx.tensor("f32", (elements,), "x", input=True)
        graphs.append(gs.Graph(ctx.set_output(ctx.scale(x, 2.0))))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graphs[0])
        scheduler.alloc(graphs[1])
        assert backend.used == scheduler.buffer_size(backend) > 1500
    assert backend.used == 0
