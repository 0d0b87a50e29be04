"""Arenas that grow: old and new memory in a backend that cannot hold both."""

import numpy as np
import pytest
from devices import device

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


def test_old_memory_and_what_lived_in_it_come_back_when_new_memory_cannot_be_had():
    """The old memory is freed first, as both do not fit side by side."""
    def alloc_buffer(inherited, size):
        if size > backend.largest:
            raise gs.OutOfMemory(f"no {size} bytes in one piece", backend.name, size, backend.largest)
        return inherited(size)

    backend = device(answers={"memory_available": lambda inherited: backend.free, "alloc_buffer": alloc_buffer},
                     attributes={"free": 1 << 20, "largest": 1 << 20})
    graphs, inputs = [], []
    for elements in (100, 1000):
        ctx = gs.Context()
        inputs.append(ctx.tensor("f32", (elements,), "x", input=True))
        graphs.append(gs.Graph(ctx.set_output(ctx.scale(inputs[-1], 2.0))))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graphs[0])
        inputs[0].set(np.arange(100))
        before = scheduler.buffer_size(backend)
        backend.free, backend.largest = 7500, 2000
        with pytest.raises(gs.OutOfMemory, match="in one piece"):
            scheduler.alloc(graphs[1])
        assert scheduler.buffer_size(backend) == before
        assert inputs[0].buffer is not None and not inputs[0].buffer.closed and inputs[1].buffer is None
        scheduler.compute(graphs[0])
        assert graphs[0].nodes[-1].numpy().tolist() == [2.0 * k for k in range(100)]
