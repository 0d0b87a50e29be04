"""Every n-th allocation, copy and compute fails once: typed error, nothing leaked, state as before, retry works.

A scenario prepares a world, then acts.  The act is repeated on fresh worlds, with failure n = 1, 2, 3 ... of
each kind on each backend, until an act ends before its failure comes.
"""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
from devices import Chain, device

import ggml_sched as gs
from ggml_sched.backends.cpu import CpuBuffer
from ggml_sched.testing.faults import KINDS
from ggml_sched.testing.faulty import FaultyCpuBackend

LIVE: weakref.WeakSet = weakref.WeakSet()


class Faulty(FaultyCpuBackend):
    """Also knows its live buffers and prepared plans."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name=name)
        self.plans: weakref.WeakSet = weakref.WeakSet()

    def alloc_buffer(self, size: int) -> CpuBuffer:
        buffer = super().alloc_buffer(size)
        LIVE.add(buffer)
        return buffer

    def graph_plan_create(self, graph):
        plan = super().graph_plan_create(graph)
        self.plans.add(plan)
        return plan


class World:
    """A scheduler over 1 to 3 backends, and two chains; `small` has been computed when `warm`."""

    def __init__(self, n: int, copies: int = 1, warm: bool = False, reserve: bool = False,
                 policy: str = "default") -> None:
        self.backends = [Faulty(f"b{k}") for k in range(n)]
        self.small = Chain(self.backends, rows=2, log=4)
        self.large = Chain(self.backends, rows=40, log=4)
        self.scheduler = gs.Scheduler(self.backends, policy, copies=copies)
        self.residents = [b.used for b in self.backends]
        self.row = 0
        if reserve:
            self.scheduler.reserve(self.small.graph, self.large.graph)
        if warm:
            self.run(self.small)

    def run(self, chain: Chain, queued: bool = False, callback=None) -> None:
        self.scheduler.alloc(chain.graph)
        chain.set(3)
        chain.row.set(np.int64([self.row]))
        if queued:
            for k in range(3):
                chain.queue(self.scheduler, k)
            self.scheduler.synchronize()
        else:
            self.scheduler.compute(chain.graph, callback)

    def check(self, chain: Chain, k: int = 3) -> None:
        chain.check(k)
        assert np.array_equal(chain.log.numpy()[k if k != 3 else self.row], chain.expected(k)[0])

    @property
    def sizes(self) -> list[int]:
        return [self.scheduler.buffer_size(b) for b in self.backends]

    def check_accounts(self) -> None:
        """Assert that the backends' allocated memory is that of the weights and the scheduler's arenas."""
        assert [b.used for b in self.backends] == [r + s for r, s in zip(self.residents, self.sizes, strict=True)]

    def end(self) -> None:
        self.scheduler.close()
        assert [b.used for b in self.backends] == self.residents
        assert all(plan.freed for b in self.backends for plan in b.plans)
        for b in self.backends:
            b.close()


def alloc_and_compute(world):
    world.run(world.small)
    world.check(world.small)


def observed(world):
    world.run(world.small, callback=lambda node: None)
    world.check(world.small)


def reserve_growing(world):
    world.scheduler.reserve(world.small.graph, world.large.graph)
    world.run(world.large)
    world.check(world.large)


def two_graphs(world):
    for chain in (world.small, world.large, world.small, world.large):
        world.run(chain)
        world.check(chain)


def queued(world):
    world.run(world.large, queued=True)
    world.check(world.large, 2)


SCENARIOS = {
    "alloc and compute": (alloc_and_compute, {}),
    "alloc and compute, by the seed policy": (alloc_and_compute, {"policy": "seed"}),
    "observed": (observed, {}),
    "reserve, growing": (reserve_growing, {"warm": True}),
    "two graphs": (two_graphs, {"warm": True}),
    "two graphs, reserved": (two_graphs, {"reserve": True}),
    "queued": (queued, {"warm": True}),
    "queued, in a ring": (queued, {"copies": 2}),
    "warm": (alloc_and_compute, {"warm": True, "copies": 2}),
}


SIMILAR = {"alloc and compute, by the seed policy", "two graphs, reserved", "warm"}
"""Other scenarios make the same calls on several backends, with another policy, reserve or number of slots."""

FAILURES = [(kind, 1) for kind in KINDS] + [("alloc", 2), ("alloc", 3), ("copy", 2)]
"""A kind of operation, and how many of them fail in a row.

An arena that does not fit beside the old one is tried again in its place, so one failed allocation may be survived.
Two fail to grow; three, even to restore what was there.
"""


@pytest.mark.spread("name n_backends kind", "kind times n_backends")
@pytest.mark.parametrize("kind, times", FAILURES)
@pytest.mark.parametrize(("name", "n_backends"), [
    pytest.param(name, n, marks=pytest.mark.soak if n == 3 and name in SIMILAR else ()) for name in SCENARIOS
    for n in (1, 3)])
def test_every_failure(name, n_backends, kind, times):
    act, options = SCENARIOS[name]
    failures = survived = 0
    for where in range(n_backends):
        for n in range(1, 200):
            world = World(n_backends, **options)
            sizes = world.sizes
            current = world.scheduler._allocations.current
            backend = world.backends[where]
            backend.fail_at(kind, n, times)
            try:
                act(world)
            except gs.Error as error:
                assert isinstance(error, gs.OutOfMemory if kind == "alloc" else gs.BackendError)
                assert repr(backend.name) in str(error)
                failures += 1
            else:
                world.check_accounts()
                pending = backend.pending_failures.get(kind)
                backend.fail_at(kind, 0)
                world.end()
                if not pending:
                    survived += 1
                    continue
                break
            world.check_accounts()
            backend.fail_at(kind, 0)
            if kind == "alloc" and current is not None and world.sizes == sizes:
                # Nothing has grown: what was allocated still is, or is again, and computes.
                assert world.scheduler._allocations.current.data is current.data
                assert world.small.out.buffer is not None
                world.row = 1
                world.small.row.set(np.int64([1]))
                world.scheduler.compute(world.small.graph)
                world.check(world.small)
                world.row = 0
            act(world)
            world.check_accounts()
            world.end()
        else:
            pytest.fail("the act never ends")
    grows = not (options.get("reserve") or name == "warm")
    assert failures or kind == "alloc" and (not grows or survived)
    del world, current, backend
    gc.collect()
    assert not [b for b in LIVE if not b.closed and b.usage == "compute"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_backends", [1, 2, 3])
def test_every_failure_of_dry_backends(n_backends, kind):
    failures = 0
    for where in range(n_backends):
        for n in range(1, 100):
            backends = [gs.DryBackend(f"d{k}", accepts_computes=True) for k in range(n_backends)]
            chain = Chain(backends)
            residents = [b.used for b in backends]
            scheduler = gs.Scheduler(backends)
            backends[where].fail_at(kind, n)
            plan = None
            try:
                plan = scheduler.alloc(chain.graph)
                chain.set(1)
                scheduler.compute(chain.graph)
                scheduler.compute_async(chain.graph)
                scheduler.synchronize()
            except gs.Error as error:
                assert isinstance(error, gs.OutOfMemory if kind == "alloc" else gs.BackendError)
                failures += 1
                if plan is None:
                    assert [b.used for b in backends] == residents and chain.out.buffer is None
            else:
                break
            scheduler.alloc(chain.graph)
            chain.set(1)
            scheduler.compute(chain.graph)
            scheduler.close()
            assert [b.used for b in backends] == residents
    assert failures


def test_fail_at_refuses_what_it_does_not_know():
    backend = gs.DryBackend("d")
    with pytest.raises(ValueError, match="'free' is not one of alloc, copy, compute"):
        backend.fail_at("free", 1)
    with pytest.raises(ValueError, match="-1"):
        backend.fail_at("alloc", -1)
    with pytest.raises(ValueError, match="0 failures"):
        backend.fail_at("alloc", 1, 0)
    backend.fail_at("alloc", 2)
    backend.fail_at("alloc", 0)
    backend.alloc_buffer(8)
    backend.fail_at("alloc", 1)
    with pytest.raises(gs.OutOfMemory) as caught:
        backend.alloc_buffer(8)
    assert (caught.value.backend, caught.value.needed, caught.value.available) == ("d", 8, 0)
    backend.alloc_buffer(8)


# -- failures while giving back ------------------------------------------------------------------


def failing_to_free(name: str) -> gs.Backend:
    """A backend that fails, once, to free what its `fails` names ("plan" or "buffer"), having freed it."""
    def fail(what, freed):
        if backend.fails == what:
            backend.fails = None
            raise gs.BackendError(f"freeing a {what}")

    class Failing(CpuBuffer):
        def free(self):
            super().free()
            fail("buffer", self)

    backend = device(name=name, after={"graph_plan_free": partial(fail, "plan")},
                     attributes={"fails": None, "buffer_class": Failing})
    return backend


@pytest.mark.parametrize("act", ["alloc", "reserve", "reset", "close"])
@pytest.mark.parametrize("what", ["plan", "buffer"])
def test_failures_while_giving_back_leave_nothing_behind(what, act):
    backends = [failing_to_free("a"), failing_to_free("b")]
    small, large = Chain(backends, rows=2), Chain(backends, rows=40)
    residents = [b.used for b in backends]
    scheduler = gs.Scheduler(backends)
    scheduler.alloc(small.graph)
    small.set(1)
    scheduler.compute(small.graph)
    backends[0].fails = what
    calls = {"alloc": lambda: scheduler.alloc(large.graph), "reserve": lambda: scheduler.reserve(large.graph),
             "reset": scheduler.reset, "close": scheduler.close}
    if (what, act) == ("buffer", "reset"):
        scheduler.reset()       # buffers stay
        backends[0].fails = None
    else:
        with pytest.raises(gs.BackendError, match=f"freeing a {what}"):
            calls[act]()
    if act != "close":
        assert [b.used - r for b, r in zip(backends, residents, strict=True)] == [
            scheduler.buffer_size(b) for b in backends]
        for chain in (small, large):
            scheduler.alloc(chain.graph)
            chain.compute(scheduler, 2)
    scheduler.close()
    assert [b.used for b in backends] == residents


@pytest.mark.parametrize("where", [0, 1])
def test_a_backend_that_fails_to_synchronize_does_not_hide_the_first_error(where):
    backends = [Faulty("a"), Faulty("b")]
    chain = Chain(backends)
    waited = []
    scheduler = gs.Scheduler(backends)
    scheduler.alloc(chain.graph)
    chain.set(1)
    scheduler.compute(chain.graph)

    def fail_to_wait():
        waited.append(where)
        raise gs.BackendError("waiting")

    backends[0].fail_at("compute", 1)
    try:
        backends[where].synchronize = fail_to_wait
        with pytest.raises(gs.BackendError, match="a compute failed" if where else "waiting|a compute"):
            scheduler.compute(chain.graph)
        assert waited
    finally:
        del backends[where].synchronize
        backends[0].fail_at("compute", 0)
    scheduler.compute(chain.graph)
    chain.check(1)
    scheduler.close()
