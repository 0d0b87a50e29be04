"""`compute(wait=False)`: queued on the caller's thread; a read of a result or the next call waits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from devices import PATIENCE, Chain, resident
from overtaking import Held

import ggml_sched as gs
from ggml_sched.execution.pipeline import MAX_IN_FLIGHT
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues


def chain_on(sched: gs.Scheduler, first: gs.Backend, second: gs.Backend) -> Chain:
    """A chain over two backends, allocated."""
    chain = Chain((first, second))
    chain.pin(sched)
    sched.alloc(chain.graph)
    return chain


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
        chain = chain_on(sched, late, late)
        before = world.waits
        for i in range(5):
            chain.set(i)
            assert sched.compute(chain.graph, wait=False)
        assert world.waits == before
        chain.check(4)
        assert world.waits > before
        waits = world.waits
        sched.compute(chain.graph)
        assert world.waits == waits + 1
        chain.check(4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("copies", [1, 2])
def test_devices_use_memory_again_only_after_the_compute_before(seed, copies):
    world = DeferredQueues(seed)
    with DeferredBackend("A", world) as a, DeferredBackend("B", world) as b, \
            gs.Scheduler([a, b], copies=copies) as sched:
        chain = chain_on(sched, a, b)
        for i in range(6):
            chain.set(i)
            if i == 3:
                sched.compute_async(chain.graph)
            else:
                sched.compute(chain.graph, wait=False)
            if i % 2:
                chain.check(i)
        sched.synchronize()
        chain.check(5)


def test_with_a_backend_that_computes_at_once_too():
    world = DeferredQueues(3)
    with DeferredBackend("L", world) as late, gs.CpuBackend(1) as cpu, gs.Scheduler([late, cpu]) as sched:
        for pair in ((late, cpu), (cpu, late)):
            chain = chain_on(sched, *pair)
            for i in range(4):
                chain.set(i)
                sched.compute(chain.graph, wait=False)
            chain.check(3)


@pytest.mark.parametrize("then", ["synchronize", "compute", "compute_async", "read"])
def test_an_error_is_raised_by_what_waits_next_and_leaves_no_results(then, monkeypatch):
    world = DeferredQueues(0)
    with DeferredBackend("A", world) as a, DeferredBackend("B", world) as b, gs.Scheduler([a, b]) as sched:
        chain = chain_on(sched, a, b)
        chain.set(1)
        sched.compute(chain.graph)

        with broken_kernels(monkeypatch):
            sched.compute(chain.graph, wait=False)
            if then == "read":
                with pytest.raises(gs.BackendError, match="broken"):
                    chain.out.numpy()
                sched.synchronize()
            else:
                with pytest.raises(gs.BackendError, match="broken"):
                    if then != "synchronize":
                        getattr(sched, then)(chain.graph)
                    sched.synchronize()
            with pytest.raises(gs.HazardError, match="has not been computed.*broken"):
                chain.out.numpy()
        chain.set(5)
        sched.compute(chain.graph, wait=False)
        chain.check(5)


def test_an_error_that_is_found_by_waiting_leaves_no_results_either(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain = chain_on(sched, late, late)
        chain.set(1)
        sched.compute(chain.graph)

        with broken_kernels(monkeypatch):
            with pytest.raises(gs.BackendError, match="broken"):
                sched.compute(chain.graph)
            with pytest.raises(gs.HazardError, match="has not been computed"):
                chain.out.numpy()
        sched.compute(chain.graph)
        chain.check(1)


def test_an_error_raised_by_another_call_leaves_no_results_either(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched, gs.Scheduler([late]) as other:
        chain, another = chain_on(sched, late, late), chain_on(other, late, late)
        chain.set(1)
        another.set(2)

        for wait in (late.synchronize, lambda: other.compute(another.graph)):
            with broken_kernels(monkeypatch):
                sched.compute(chain.graph, wait=False)
                with pytest.raises(gs.BackendError, match="broken"):
                    wait()
            with pytest.raises(gs.HazardError, match="'h1'.*not been computed.*broken"):
                chain.out.numpy()
            sched.synchronize()
            for leave in (False, True):
                sched.compute(chain.graph, wait=leave)
                chain.check(1)


class Overtaken(DeferredBackend):
    """Another thread waits at the same time as the caller's, and gets the exceptions of queued work."""

    def synchronize(self):
        with suppress(gs.BackendError):
            super().synchronize()


def test_a_compute_whose_steps_were_dropped_raises_though_another_thread_got_the_exception(monkeypatch):
    with Overtaken("A", DeferredQueues(0)) as late, gs.CpuBackend(1) as cpu:
        for backends in ([late], [late, cpu]):
            with gs.Scheduler(backends) as sched, gs.Scheduler([late]) as other:
                chain, another = chain_on(sched, late, backends[-1]), chain_on(other, late, late)
                chain.set(1)
                another.set(2)
                sched.compute(chain.graph)
                for callback in (None, lambda node: True):
                    chain.set(3)
                    with broken_kernels(monkeypatch):
                        other.compute(another.graph, wait=False)
                        while late.is_ready:
                            late.run_next()
                    with pytest.raises(gs.BackendError, match="'A'.*another thread failed.*dropped: broken"):
                        sched.compute(chain.graph, callback)
                    with pytest.raises(gs.HazardError, match="not been computed.*another thread.*broken"):
                        chain.out.numpy()
                    sched.compute(chain.graph, callback)
                    chain.check(3)


@pytest.mark.parametrize("call", ["set", "get", "copy here", "copy there"])
def test_a_transfer_that_was_dropped_raises_though_another_thread_got_the_exception(call, monkeypatch):
    world = DeferredQueues(0)
    with (Overtaken("A", world) as late, DeferredBackend("B", world, copies=False) as beside,
          gs.Scheduler([late]) as other):
        x, y = resident(late, "x", np.zeros(8, np.float32)), resident(beside, "y", np.zeros(8, np.float32))
        monkeypatch.setattr(late, "cpy_tensor_to", late.queue_copy)
        transfer = {"set": lambda: late.set_tensor(x, np.ones(8, np.float32)),
                    "get": lambda: late.get_tensor(x, bytearray(32)),
                    "copy here": lambda: gs.tensor_copy(y, x), "copy there": lambda: gs.tensor_copy(x, y)}[call]
        chain = chain_on(other, late, late)
        chain.set(1)
        with broken_kernels(monkeypatch):
            other.compute(chain.graph, wait=False)
            with pytest.raises(gs.BackendError, match="'A'.*another thread failed.*dropped: broken"):
                transfer()
        transfer()


def test_a_wait_that_finds_no_error_any_more_finds_it_counted(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain = chain_on(sched, late, late)
        chain.set(1)
        held, failed = Held(), []

        def note(error):
            held.wait()
            DeferredBackend.note_failure(late, error)

        monkeypatch.setattr(late, "note_failure", note)

        def first():
            with suppress(gs.BackendError):
                late.synchronize()

        def second():
            late.synchronize()
            failed.append(late.failed[0])

        with broken_kernels(monkeypatch):
            sched.compute(chain.graph, wait=False)
            held.run(first, second)
        assert failed == [1]


def test_taking_turns_raises_what_went_wrong_before_anything_else_is_computed(monkeypatch):
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain, other = chain_on(sched, late, late), chain_on(sched, late, late)
        other.set(1)
        sched.alloc(chain.graph)
        chain.set(1)

        with broken_kernels(monkeypatch):
            sched.compute(chain.graph, wait=False)
            with pytest.raises(gs.BackendError, match="broken"):
                sched.compute(other.graph)
        sched.synchronize()
        sched.compute(other.graph)
        other.check(1)


def test_results_that_are_there_outlive_an_error_that_comes_later():
    with DeferredBackend("A", DeferredQueues(0)) as late, gs.Scheduler([late]) as sched:
        chain = chain_on(sched, late, late)
        chain.set(1)
        sched.compute(chain.graph, wait=False)
        sched.synchronize()
        late.error = gs.BackendError("of others")
        with pytest.raises(gs.BackendError, match="of others"):
            late.synchronize()
        chain.check(1)


def test_switching_graphs_and_closing_wait():
    world = DeferredQueues(1)
    with DeferredBackend("L", world) as late:
        sched = gs.Scheduler([late])
        chains = [chain_on(sched, late, late) for _ in range(3)]
        for i in range(6):
            sched.alloc(chains[i % 3].graph)
            chains[i % 3].set(i)
            sched.compute(chains[i % 3].graph, wait=False)
        chains[2].check(5)
        sched.compute(chains[2].graph, wait=False)
        sched.close()
        assert not late.queue
        sched.close()


def test_data_that_was_set_is_kept_until_a_call_waits():
    """A backend may read the data that late, although new data has been set since."""
    world = DeferredQueues(0)
    with DeferredBackend("L", world) as late, gs.Scheduler([late]) as sched:
        chain = chain_on(sched, late, late)
        pipeline = sched._pipeline
        for i in range(3):
            chain.set(i)
            sched.compute(chain.graph, wait=False)
        stashes = [item for alive in pipeline._kept for item in alive if isinstance(item, bytes)]
        assert [np.frombuffer(data, np.float32)[-1] for data in stashes] == [0, 1, 2]
        sched.synchronize()
        assert not pipeline._kept


def test_data_is_kept_for_a_bounded_number_of_computes():
    world = DeferredQueues(0)
    with DeferredBackend("L", world) as late, gs.Scheduler([late]) as sched:
        chain = chain_on(sched, late, late)
        for i in range(300):
            chain.set(i)
            sched.compute(chain.graph, wait=False)
        assert len(sched._pipeline._kept) <= MAX_IN_FLIGHT
        chain.check(299)


# -- reads while computes are queued -----------------------------------------------------------------


@pytest.mark.parametrize("queued_before", [False, True])
def test_a_callback_that_reads_leaves_nothing_of_its_compute_queued(queued_before):
    world = DeferredQueues(0)
    with DeferredBackend("first", world) as first, DeferredBackend("second", world) as second, \
            gs.Scheduler([first, second]) as sched:
        ctx = gs.Context()
        x = ctx.tensor("f32", 16, "x", input=True)
        a = ctx.set_output(ctx.scale(x, 2.0))
        b = ctx.scale(a, 3.0)
        c = ctx.set_output(ctx.scale(b, 5.0))
        for node, backend in ((a, first), (b, first), (c, second)):
            sched.set_tensor_backend(node, backend)
        graph = gs.Graph(c)
        sched.alloc(graph)
        x.set(np.ones(16, np.float32))
        if queued_before:
            sched.compute_async(graph)
            sched.synchronize()
        sched.compute(graph, callback=lambda node: node.numpy() is not None, ask=lambda node: node is a)
        assert not first.queue and not second.queue
        assert np.all(c.numpy() == 30)


def test_a_compute_that_is_queued_while_another_thread_waits_stays_queued():
    """As a reader on another thread waits: what a later compute has to wait for is known still."""
    reads, goes_on = threading.Event(), threading.Event()

    class Slow(gs.CpuBackend):
        asynchronous = True
        is_slow = False

        def synchronize(self):
            if self.is_slow and threading.current_thread() is reader:
                reads.set()
                assert goes_on.wait(PATIENCE)

    with Slow(1, name="slow") as slow, gs.Scheduler([slow]) as sched:
        weight = resident(slow, "w", np.full(4, 2, np.float32))
        ctx = gs.Context()
        x = ctx.tensor("f32", 4, "x", input=True)
        out = ctx.set_output(ctx.mul(x, weight))
        graph = gs.Graph(out)
        sched.alloc(graph)
        x.set(np.ones(4, np.float32))
        sched.compute_async(graph)
        slow.is_slow, pipeline = True, sched._pipeline
        reader = threading.Thread(target=pipeline.drain)
        reader.start()
        assert reads.wait(PATIENCE)
        sched.compute_async(graph)          # the other thread has not waited for this one
        goes_on.set()
        reader.join()
        assert not pipeline.is_idle
        sched.synchronize()
        assert pipeline.is_idle and np.all(out.numpy() == 2)
