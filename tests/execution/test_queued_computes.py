"""`compute(wait=False)`: queued on the caller's thread; a read of a result or the next call waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.execution.pipeline import MAX_IN_FLIGHT
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues


class Chain:
    """y = 2 (x + x), its two nodes on the given backends."""

    def __init__(self, sched: gs.Scheduler, first: gs.Backend, second: gs.Backend) -> None:
        self.ctx = gs.Context()
        self.x = self.ctx.tensor("f32", 8, "x", input=True)
        node = self.ctx.add(self.x, self.x)
        self.y = self.ctx.set_output(self.ctx.set_name(self.ctx.scale(node, 2.0), "y"))
        self.graph = gs.Graph(self.y)
        sched.set_tensor_backend(node, first)
        sched.set_tensor_backend(self.y, second)
        sched.alloc(self.graph)

    def set(self, value: float) -> None:
        self.x.set(np.full(8, value, np.float32))


@contextmanager
def broken_kernels(monkeypatch) -> Iterator[None]:
    """Makes every compute within the context fail."""

    def broken(self, nodes):
        raise gs.BackendError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(gs.CpuBackend, "graph_plan_compute", broken)
        patched.setattr(gs.CpuBackend, "graph_compute", broken)
        yield


def test_on_one_device_nothing_is_waited_for_but_what_is_read():
    world = DeferredQueues(1)
    with DeferredBackend("L", world) as late, gs.Scheduler([late]) as sched:
        chain = Chain(sched, late, late)
        for i in range(5):
            chain.set(i)
            assert sched.compute(chain.graph, wait=False)
        assert world.waits == 0
        assert (chain.y.numpy() == 16).all()
        assert world.waits > 0
        waits = world.waits
        sched.compute(chain.graph)
        assert world.waits == waits + 1 and (chain.y.numpy() == 16).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("copies", [1, 2])
def test_devices_use_memory_again_only_after_the_compute_before(seed, copies):
    world = DeferredQueues(seed)
    with DeferredBackend("A", world) as a, DeferredBackend("B", world) as b, \
            gs.Scheduler([a, b], copies=copies) as sched:
        chain = Chain(sched, a, b)
        for i in range(6):
            chain.set(i)
            if i == 3:
                sched.compute_async(chain.graph)
            else:
                sched.compute(chain.graph, wait=False)
            if i % 2:
                assert (chain.y.numpy() == 4 * i).all()
        sched.synchronize()
        assert (chain.y.numpy() == 20).all()


def test_with_a_backend_that_computes_at_once_too():
    world = DeferredQueues(3)
    with DeferredBackend("L", world) as late, gs.CpuBackend(1) as cpu, gs.Scheduler([late, cpu]) as sched:
        for pair in ((late, cpu), (cpu, late)):
            chain = Chain(sched, *pair)
            for i in range(4):
                chain.set(i)
                sched.compute(chain.graph, wait=False)
            assert (chain.y.numpy() == 12).all()


@pytest.mark.parametrize("then", ["synchronize", "compute", "compute_async", "read"])
def test_an_error_is_raised_by_what_waits_next_and_leaves_no_results(then, monkeypatch):
    world = DeferredQueues(0)
    with DeferredBackend("A", world) as a, DeferredBackend("B", world) as b, gs.Scheduler([a, b]) as sched:
        chain = Chain(sched, a, b)
        chain.set(1)
        sched.compute(chain.graph)

        with broken_kernels(monkeypatch):
            sched.compute(chain.graph, wait=False)
            if then == "read":
                with pytest.raises(gs.BackendError, match="broken"):
                    chain.y.numpy()
                sched.synchronize()
            else:
                with pytest.raises(gs.BackendError, match="broken"):
                    if then != "synchronize":
                        getattr(sched, then)(chain.graph)
                    sched.synchronize()
            with pytest.raises(gs.HazardError, match="has not been computed.*broken"):
                chain.y.numpy()
        chain.set(5)
        sched.compute(chain.graph, wait=False)
        assert (chain.y.numpy() == 20).all()


def test_an_error_that_is_found_by_waiting_leaves_no_results_either(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain = Chain(sched, late, late)
        chain.set(1)
        sched.compute(chain.graph)

        with broken_kernels(monkeypatch):
            with pytest.raises(gs.BackendError, match="broken"):
                sched.compute(chain.graph)
            with pytest.raises(gs.HazardError, match="has not been computed"):
                chain.y.numpy()
        sched.compute(chain.graph)
        assert (chain.y.numpy() == 4).all()


def test_an_error_raised_by_another_call_leaves_no_results_either(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched, gs.Scheduler([late]) as other:
        chain, another = Chain(sched, late, late), Chain(other, late, late)
        chain.set(1)
        another.set(2)

        for wait in (late.synchronize, lambda: other.compute(another.graph)):
            with broken_kernels(monkeypatch):
                sched.compute(chain.graph, wait=False)
                with pytest.raises(gs.BackendError, match="broken"):
                    wait()
            with pytest.raises(gs.HazardError, match="'y'.*not been computed.*broken"):
                chain.y.numpy()
            sched.synchronize()
            for leave in (False, True):
                sched.compute(chain.graph, wait=leave)
                assert (chain.y.numpy() == 4).all()


def test_taking_turns_raises_what_went_wrong_before_anything_else_is_computed(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain, other = Chain(sched, late, late), Chain(sched, late, late)
        other.set(1)
        sched.alloc(chain.graph)
        chain.set(1)

        with broken_kernels(monkeypatch):
            sched.compute(chain.graph, wait=False)
            with pytest.raises(gs.BackendError, match="broken"):
                sched.compute(other.graph)
        sched.synchronize()
        sched.compute(other.graph)
        assert (other.y.numpy() == 4).all()


def test_results_that_are_there_outlive_an_error_that_comes_later():
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain = Chain(sched, late, late)
        chain.set(1)
        sched.compute(chain.graph, wait=False)
        sched.synchronize()
        late.error = gs.BackendError("of others")
        with pytest.raises(gs.BackendError, match="of others"):
            late.synchronize()
        assert (chain.y.numpy() == 4).all()


def test_switching_graphs_and_closing_wait():
    world = DeferredQueues(1)
    with DeferredBackend("L", world) as late:
        sched = gs.Scheduler([late])
        chains = [Chain(sched, late, late) for _ in range(3)]
        for i in range(6):
            sched.alloc(chains[i % 3].graph)
            chains[i % 3].set(i)
            sched.compute(chains[i % 3].graph, wait=False)
        assert (chains[2].y.numpy() == 20).all()
        sched.compute(chains[2].graph, wait=False)
        sched.close()
        assert not late.queue
        sched.close()


def test_data_that_was_set_is_kept_until_a_call_waits():
    """A backend may read the data that late, although new data has been set since."""
    world = DeferredQueues(0)
    with DeferredBackend("L", world) as late, gs.Scheduler([late]) as sched:
        chain = Chain(sched, late, late)
        pipeline = sched._pipeline
        for i in range(3):
            chain.set(i)
            sched.compute(chain.graph, wait=False)
        stashes = [item for alive in pipeline._kept for item in alive if isinstance(item, bytes)]
        assert [np.frombuffer(data, np.float32)[0] for data in stashes] == [0, 1, 2]
        sched.synchronize()
        assert not pipeline._kept


def test_data_is_kept_for_a_bounded_number_of_computes():
    world = DeferredQueues(0)
    with DeferredBackend("L", world) as late, gs.Scheduler([late]) as sched:
        chain = Chain(sched, late, late)
        for i in range(300):
            chain.set(i)
            sched.compute(chain.graph, wait=False)
        assert len(sched._pipeline._kept) <= MAX_IN_FLIGHT
        assert (chain.y.numpy() == 4 * 299).all()
