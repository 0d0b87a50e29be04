"""Random sequences of API calls over flaky backends, and invariants that hold after every sequence.

Every call succeeds, raises one of our errors, or passes on a backend's error; TypeError and ValueError only after a
backend has given an invalid answer.  Once the backends behave, all open objects compute right results, and when all are
closed, no backend has allocated memory.
"""

import contextlib
import random

import numpy as np
from flaky import FlakyBackend, OtherError
from random_graphs import Built, Recipe, decode
from random_results import check, in_memory_of_their_own

import ggml_sched as gs


class World:
    """One to three backends, a few graphs whose residents are placed, schedulers, and allocators."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.backends = [FlakyBackend(f"M{k}", rng.randrange(2**32)) for k in range(rng.randint(1, 3))]
        for backend in self.backends:
            backend.reads = tuple(b.name for b in self.backends if rng.random() < 0.2)
        self.recipes: list[Recipe] = [decode(rng.randbytes(10 + 4 * rng.randint(1, 10))) for _ in range(2)]
        self.built = [Built(recipe, len(self.backends)) for recipe in self.recipes]
        self.buffers: list[gs.Buffer] = []
        for built in self.built:
            for backend, home in zip(self.backends, built.homes, strict=True):
                self.buffers.append(backend.alloc_tensors(home, rng.choice(("weights", "any"))))
        self.schedulers: list[gs.Scheduler] = []
        self.allocators: list[gs.TensorAllocator] = []
        self.calls = self.raised = 0

    def fail(self, rate: float) -> None:
        for backend in self.backends:
            backend.rate = rate
            backend.n_invalid = 0

    # -- acts -------------------------------------------------------------------

    def act(self) -> None:
        """One random call, with a random probability of backend failures."""
        act = self.rng.choice(ACTS)
        self.fail(self.rng.choice((0.0, 0.003, 0.02, 0.1)))
        self.calls += 1
        try:
            act(self)
        except (gs.Error, OtherError):
            self.raised += 1
        except (TypeError, ValueError):
            if not any(backend.n_invalid for backend in self.backends):
                raise
            self.raised += 1
        finally:
            self.fail(0.0)

    def graph(self) -> gs.Graph:
        return self.rng.choice(self.built).graph

    def tensor(self) -> gs.Tensor:
        return self.rng.choice(self.graph().tensors)

    def scheduler(self) -> gs.Scheduler:
        if not self.schedulers:
            new_scheduler(self)
        return self.rng.choice(self.schedulers)

    def allocator(self) -> gs.TensorAllocator:
        if not self.allocators:
            new_allocator(self)
        return self.rng.choice(self.allocators)

    # -- the end ----------------------------------------------------------------

    def settle(self) -> None:
        """With backends that behave, every open object works, and closing them frees all memory."""
        self.fail(0.0)
        for allocator in self.allocators:
            allocator.close()
        for scheduler in self.schedulers:
            if scheduler.closed:
                continue
            with contextlib.suppress(gs.Error, OtherError):
                scheduler.synchronize()     # computes queued while backends failed
            scheduler.reset()               # drop plans made from wrong answers
            for recipe, built in zip(self.recipes, self.built, strict=True):
                if any(t.buffer is not None and t.lease is None for t in built.ctx.tensors):
                    continue    # a call gave it memory outside the arena
                for t in built.graph.tensors:
                    scheduler.set_tensor_backend(t, None)
                scheduler.alloc(built.graph)
                for t, values in built.values().items():
                    if t.buffer is not None:
                        t.set(values)
                scheduler.compute(built.graph)
                check(built, in_memory_of_their_own(recipe, len(self.backends)), f"after {self.calls} calls")
        for scheduler in self.schedulers:
            scheduler.close()
            scheduler.close()
        for buffer in self.buffers:
            buffer.close()
        assert [backend.used for backend in self.backends] == [0] * len(self.backends), "memory is still out"


# -- schedulers ------------------------------------------------------------------------------------


def new_scheduler(world):
    rng = world.rng
    world.schedulers.append(gs.Scheduler(
        rng.sample(world.backends, len(world.backends)), policy=rng.choice(("default", "seed")),
        copies=rng.randint(1, 3), plan_cache=rng.choice((0, 1, 8)), reorder=rng.random() < 0.2))


def plan(world):
    world.scheduler().plan(world.graph())


def reserve(world):
    world.scheduler().reserve(*(world.graph() for _ in range(world.rng.randint(0, 2))))


def alloc(world):
    world.scheduler().alloc(world.graph())


def compute(world):
    scheduler, graph = world.scheduler(), world.graph()
    scheduler.alloc(graph)
    fill(world, graph)
    scheduler.compute(graph)


def compute_seen(world):
    """Compute with a callback that reads, stops, or raises."""
    rng, graph, scheduler = world.rng, world.graph(), world.scheduler()
    scheduler.alloc(graph)
    fill(world, graph)

    def look(node):
        match rng.randrange(12):
            case 0:
                raise OtherError("callback")
            case 1:
                return False
            case 2:
                scheduler.plan(graph)       # refused: it is at work
            case _:
                node.numpy()

    scheduler.compute(graph, look, (lambda node: rng.random() < 0.7) if rng.random() < 0.5 else None)


def compute_queued(world):
    scheduler, graph = world.scheduler(), world.graph()
    scheduler.alloc(graph)
    for _ in range(world.rng.randint(1, 4)):
        fill(world, graph)
        scheduler.compute_async(graph)
    if world.rng.random() < 0.7:
        scheduler.synchronize()


def synchronize(world):
    world.scheduler().synchronize()


def assign(world):
    backend = world.rng.choice((None, *world.backends, gs.DryBackend("stranger")))
    world.scheduler().set_tensor_backend(world.tensor(), backend)


def ask(world):
    scheduler = world.scheduler()
    scheduler.get_tensor_backend(world.tensor())
    scheduler.buffer_size(world.rng.choice(world.backends))
    repr(scheduler)


def reset(world):
    world.scheduler().reset()


def close_scheduler(world):
    if world.rng.random() < 0.2:
        world.scheduler().close()


# -- data ------------------------------------------------------------------------------------------


def fill(world, graph):
    """Set the leafs of a graph, most of them."""
    for built in world.built:
        if built.graph is graph:
            for t, values in built.values().items():
                if t.buffer is not None and world.rng.random() < 0.9:
                    t.set(values)


def read(world):
    for _ in range(4):
        world.tensor().numpy()


def set_anything(world):
    t = world.tensor()
    value = world.rng.choice((0, 1, 1.5, 2**40, -1))
    try:
        t.set(np.full(t.ne[::-1], value))
    except (TypeError, ValueError):
        # Of another kind, or out of range.
        assert str(t.type) != "f32"


def copy(world):
    a, b = world.tensor(), world.tensor()
    if a.ne == b.ne and a.nb == b.nb and a.type == b.type:
        gs.tensor_copy(a, b)


# -- memory ----------------------------------------------------------------------------------------


def new_allocator(world):
    backend = world.rng.choice(world.backends)
    size = world.rng.choice((0, 64, 4096, 1 << 16))
    world.allocators.append(gs.TensorAllocator.from_backend(backend, size) if world.rng.random() < 0.7
                            else gs.TensorAllocator.measure_from_backend(backend))


def place_tensor(world):
    """Allocate a new tensor that is in no graph, whose tensors the schedulers allocate."""
    ctx = gs.Context()
    t = ctx.tensor("f32", world.rng.randint(0, 64))
    allocator = world.allocator()
    allocator.alloc(t)
    if world.rng.random() < 0.5:
        allocator.free(t)


def measure_graph(world):
    backend = world.rng.choice(world.backends)
    with gs.TensorAllocator.measure_from_backend(backend) as measuring:
        gs.GraphAllocator().alloc_graph(measuring, world.graph())


def reset_allocator(world):
    world.allocator().reset()


def close_allocator(world):
    world.allocators.remove(allocator := world.allocator())
    allocator.close()


def place_context(world):
    """Allocate a new context, and close its memory at once."""
    ctx = gs.Context()
    for _ in range(world.rng.randint(0, 3)):
        ctx.tensor("f32", world.rng.randint(0, 64))
    backend = world.rng.choice(world.backends)
    with backend.alloc_tensors(ctx):
        backend.alloc_tensors_size(ctx)


def compare(world):
    """Compare results with those of fresh clones whose leafs have the same data."""
    gs.compare(world.graph(), world.rng.choice(world.backends), world.rng.choice(world.backends))


ACTS = (new_scheduler, plan, plan, reserve, alloc, alloc, compute, compute, compute, compute_seen, compute_queued,
        compute_queued, synchronize, assign, ask, reset, close_scheduler, read, set_anything, copy, new_allocator,
        place_tensor, measure_graph, reset_allocator, close_allocator, place_context, compare)


def attempt(rng: random.Random) -> str:
    """A sequence of random calls, then the checks of `settle`."""
    world = World(rng)
    for _ in range(rng.randint(5, 30)):
        world.act()
    world.settle()
    return "raised" if world.raised else "quiet"
