"""Memory that queued computes use stays allocated until they are done: calls that free or rebind it wait.

A compute is held up until a call wants its memory; when that call returns, every queued compute has ended.
"""

import threading

import numpy as np
import pytest
from devices import PATIENCE, Gated

import ggml_sched as gs

COMPUTES = 3


class World:
    """x @ w + cache on one slow backend: `w` placed by a tensor allocator, `cache` by its buffer."""

    def __init__(self) -> None:
        self.backend = Gated("slow")
        self.ctx, self.weights, self.caches = gs.Context("ctx"), gs.Context("weights"), gs.Context("caches")
        self.x = self.ctx.tensor("f32", (4, 2), "x", input=True)
        self.w = self.weights.tensor("f32", (4, 4), "w")
        self.cache = self.caches.tensor("f32", (4, 2), "cache")
        self.allocator = gs.TensorAllocator.from_backend(self.backend, 4096)
        self.allocator.alloc(self.w)
        self.cache_buffer = self.backend.alloc_tensors(self.caches, "any")
        self.w.set(np.eye(4))
        self.cache.set(np.full((2, 4), 10.0))
        self.out = self.ctx.set_output(self.ctx.add(self.ctx.mul_mat(self.w, self.x), self.cache))
        self.graph = gs.Graph(self.out)
        self.scheduler = gs.Scheduler([self.backend])
        self.scheduler.alloc(self.graph)
        self.results: list[np.ndarray] = []
        self.gate = threading.Event()
        arena = self.out.buffer
        place = slice(self.out.offset, self.out.offset + self.out.nbytes)
        self.backend.before = lambda number: self.gate.wait(PATIENCE)
        self.backend.after = lambda number: self.results.append(arena.memory[place].view(np.float32).copy())

    def queue(self) -> None:
        for k in range(COMPUTES):
            self.x.set(np.full((2, 4), float(k)))
            self.scheduler.compute_async(self.graph)

    def end(self) -> None:
        self.gate.set()
        self.scheduler.close()


def bind(world, tensor):
    """Bind a tensor to a new buffer."""
    buffer = world.backend.alloc_buffer(4096)
    gs.bind_resident(tensor, buffer, 0)
    return buffer


def tensor_allocator(world):
    allocator = gs.TensorAllocator.from_backend(world.backend, 4096)
    allocator.alloc(world.x)
    return allocator.buffer


def graph_allocator(world):
    allocator = gs.TensorAllocator.from_backend(world.backend, 4096)
    gs.GraphAllocator().alloc_graph(allocator, world.graph)
    return allocator.buffer


def another_scheduler(world):
    world.other = gs.Scheduler([world.backend])
    world.other.alloc(world.graph)


ACTS = {
    "give the context memory of its own": lambda world: world.backend.alloc_tensors(world.ctx),
    "bind an input": lambda world: bind(world, world.x),
    "take a weight's address": lambda world: gs.bind_resident(world.cache, None, 0),
    "give a weight another address": lambda world: bind(world, world.cache),
    "place an input in an allocator": tensor_allocator,
    "place the graph in an allocator": graph_allocator,
    "free a weight": lambda world: world.allocator.free(world.w),
    "reset the weights' allocator": lambda world: world.allocator.reset(),
    "close the weights' allocator": lambda world: world.allocator.close(),
    "close a cache's buffer": lambda world: world.cache_buffer.close(),
    "close the weights' buffer": lambda world: world.w.buffer.close(),
    "close the arena": lambda world: world.x.buffer.close(),
    "allocate the graph in another scheduler": another_scheduler,
}


@pytest.mark.parametrize("act", ACTS)
def test_memory_of_queued_computes_is_not_taken_from_under_them(act):
    world = World()
    world.queue()
    threading.Timer(0.05, world.gate.set).start()
    buffer = ACTS[act](world)
    assert len(world.results) == COMPUTES, "it did not wait"
    for k, result in enumerate(world.results):
        assert np.array_equal(result, np.full(8, 10.0 + k))
    if buffer is not None:
        assert not buffer.memory.any(), "a queued compute wrote to the new memory"
    world.end()


@pytest.mark.parametrize("act", ACTS)
def test_calls_do_not_wait_for_computes_that_ended(act):
    """Also where the scheduler that queued them was closed."""
    for gone in (False, True):
        world = World()
        world.gate.set()
        world.queue()
        world.scheduler.synchronize()
        if gone:
            world.scheduler.close()
            world.scheduler = gs.Scheduler([world.backend])
        world.backend.synchronize = lambda: pytest.fail("there is nothing to wait for")
        if not (gone and act == "close the arena"):
            ACTS[act](world)
        del world.backend.synchronize
        world.end()


def test_a_failing_compute_does_not_hide_behind_the_wait():
    """The wait raises nothing; the failure is raised where the caller reads results."""
    world = World()

    def fail(number):
        world.gate.wait(PATIENCE)
        raise gs.BackendError("as asked for")

    world.backend.before = fail
    world.queue()
    threading.Timer(0.05, world.gate.set).start()
    world.cache_buffer.close()
    with pytest.raises(gs.BackendError, match="as asked for"):
        world.scheduler.synchronize()
    world.end()


def test_a_backend_may_close_what_its_own_compute_uses():
    """Waiting would be a deadlock."""
    world = World()
    world.gate.set()
    closed = []
    world.backend.after = lambda number: closed.append(world.cache_buffer.close())
    world.x.set(np.zeros((2, 4)))
    world.scheduler.compute_async(world.graph)
    world.scheduler.synchronize()
    assert closed and world.cache_buffer.closed
    world.end()


def test_the_context_computes_at_its_new_place():
    world = World()
    world.queue()
    world.gate.set()
    buffer = world.backend.alloc_tensors(world.ctx)
    world.backend.after = lambda number: None
    world.x.set(np.full((2, 4), 5.0))
    world.scheduler.compute(world.graph)
    assert world.out.buffer is buffer and np.array_equal(world.out.numpy(), np.full((2, 4), 15.0))
    world.end()


def test_setting_a_result_waits_for_the_computes_that_write_it():
    world = World()
    world.queue()
    threading.Timer(0.05, world.gate.set).start()
    world.out.set(np.full((2, 4), 7.0))
    assert len(world.results) == COMPUTES and (world.out.numpy() == 7).all()
    world.end()
