"""Queued computes: results after `synchronize`, permitted overlap, and failures."""

import os
import threading
import warnings

import numpy as np
import pytest
from devices import PATIENCE, Chain, Gated, Stream, wait, weights_on
from forks import in_child

import ggml_sched as gs
from ggml_sched.execution import pipeline


def cpus(n):
    return [gs.CpuBackend(1, name=f"cpu{k}") for k in range(n)]


def lanes():
    return [t for t in threading.enumerate() if t.name.startswith("ggml-sched ")]


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("make", [lambda k: gs.CpuBackend(1, name=f"cpu{k}"), lambda k: Stream(f"stream{k}")],
                         ids=["cpu", "stream"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_queued_compute_uses_the_inputs_it_was_queued_with(n, make, copies):
    backends = [make(k) for k in range(n)]
    chain = Chain(backends, log=20)
    with chain.scheduler(backends, copies=copies) as scheduler:
        chain.queue_all(scheduler, 20)
        chain.x.set(np.full((4, 8), 1e6, np.float32))
        scheduler.synchronize()
        chain.check(19)
        chain.check_log(20)
        chain.compute(scheduler, 5)
    for backend in backends:
        backend.close()


def test_compute_async_returns_while_the_backend_is_at_work():
    gate, backend = threading.Event(), Gated("a")
    backend.before = lambda number: wait(gate)
    chain = Chain([backend])
    with chain.scheduler([backend]) as scheduler:
        chain.queue(scheduler, 1)
        gate.set()              # reached only because compute_async has returned
        scheduler.synchronize()
        chain.check(1)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_next_compute_starts_on_the_first_backend_while_the_last_is_at_work(copies):
    first, last = Gated("first"), Gated("last")
    begun = threading.Event()
    first.after = lambda number: begun.set() if number == 1 else None
    last.before = lambda number: wait(begun) if number == 0 else None
    chain = Chain([first, last], log=2)
    with chain.scheduler([first, last, *cpus(1)], copies=copies) as scheduler:
        chain.check_queued(scheduler, 2)
    assert first.threads.isdisjoint(last.threads) and len(first.threads) == 1


def test_what_is_still_to_be_copied_is_not_overwritten():
    """The last backend is slow to copy; the first must not run again before that copy is done."""
    first, last = Gated("first"), Gated("last")
    order = []
    first.before = lambda number: order.append(f"run {number}")

    def copy(src, dst):
        if src.name == "h0":
            order.append("copy")
        return type(last).cpy_tensor_from(last, src, dst)

    last.cpy_tensor_from = copy
    chain = Chain([first, last])
    with chain.scheduler([first, last]) as scheduler:
        chain.queue_all(scheduler, 3)
        scheduler.synchronize()
    assert order == ["run 0", "copy", "run 1", "copy", "run 2", "copy"]


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_the_first_exception_reaches_synchronize_and_the_rest_is_skipped(where, copies):
    backends = [Gated(f"b{k}") for k in range(3)]
    chain = Chain(backends, log=8)

    def fail(number):
        if number == 1:
            raise KeyError("the second compute")

    backends[where].before = fail
    with chain.scheduler(backends, copies=copies) as scheduler:
        chain.queue_all(scheduler, 4)
        with pytest.raises(KeyError, match="the second compute"):
            scheduler.synchronize()
        assert np.array_equal(chain.log.numpy()[0], chain.expected(0)[0])
        assert not chain.log.numpy()[1:].any() and backends[where].count == 2
        scheduler.synchronize()
        for k in range(4, 8):
            chain.queue(scheduler, k)
        scheduler.synchronize()
        assert np.array_equal(chain.log.numpy()[4:], [chain.expected(k)[0] for k in range(4, 8)])


def test_compute_raises_what_queued_computes_raised_and_then_works():
    backend = Gated("a")
    chain = Chain([backend])
    backend.before = lambda number: 1 / 0 if number == 0 else None
    with chain.scheduler([backend]) as scheduler:
        chain.queue(scheduler, 1)
        with pytest.raises(ZeroDivisionError):
            scheduler.compute(chain.graph)
        scheduler.compute(chain.graph)
        chain.check(1)


def test_a_compute_begins_when_the_queued_ones_have_ended():
    backend = Gated("a")
    chain = Chain([backend])
    entered, gate, seen = threading.Event(), threading.Event(), []

    def before(number):
        seen.append(f"begin {number}")
        if number == 0:
            entered.set()
            wait(gate)

    backend.before, backend.after = before, lambda number: seen.append(f"end {number}")
    with chain.scheduler([backend]) as scheduler:
        chain.queue(scheduler, 1)
        wait(entered)
        threading.Timer(0.05, gate.set).start()
        scheduler.compute(chain.graph)
        assert seen == ["begin 0", "end 0", "begin 1", "end 1"]


def weight_read_last(a, b):
    """A graph on two gated backends whose last node reads a weight of the host: (graph, x, w, scheduler)."""
    host = gs.CpuBackend(1, name="host")
    for device in (a, b):
        device.supports_buffer = lambda buffer, device=device: buffer.backend is device
    w = weights_on(host, w=np.eye(4, dtype=np.float32))["w"]
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    first = ctx.sqr(x)
    between = ctx.sqr(first)
    graph = gs.Graph(ctx.set_output(ctx.mul_mat(w, between)))
    scheduler = gs.Scheduler([a, b, host])
    for node, backend in ((first, b), (between, a), (graph.nodes[-1], b)):
        scheduler.set_tensor_backend(node, backend)
    scheduler.alloc(graph)
    x.set(np.full((2, 4), 2, np.float32))
    return graph, w, scheduler


def test_memory_is_closed_when_the_queued_computes_that_use_it_have_ended():
    a, b = Gated("a"), Gated("b")
    graph, w, scheduler = weight_read_last(a, b)
    reached, go_on = threading.Event(), threading.Event()
    b.before = lambda number: (reached.set(), wait(go_on))
    with scheduler:
        scheduler.compute_async(graph)
        wait(reached)
        threading.Timer(0.05, go_on.set).start()
        w.buffer.close()
        assert b.count == 2
        scheduler.synchronize()
        assert np.array_equal(graph.nodes[-1].numpy(), np.full((2, 4), 16))
        with pytest.raises(gs.PlacementError, match=r"'w'.*has no memory any more"):
            scheduler.compute(graph)
        assert scheduler.compute(gs.Graph(graph.nodes[0]))


def test_memory_closed_in_the_middle_of_a_compute_is_a_typed_error():
    a, b = Gated("a"), Gated("b")
    graph, w, scheduler = weight_read_last(a, b)
    with scheduler:
        with pytest.raises(gs.PlacementError, match=r"'w'.*lost its memory"):
            scheduler.compute(graph, lambda node: w.buffer.close() if w.buffer else None)
        assert scheduler.compute(gs.Graph(graph.nodes[0]))


def test_no_thread_from_the_host(monkeypatch):
    backend = gs.CpuBackend(1)
    chain = Chain([backend])

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with chain.scheduler([backend]) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(gs.BackendError, match="gives no thread"):
                chain.queue(scheduler, 1)
        chain.queue(scheduler, 2)
        scheduler.synchronize()
        chain.check(2)


# -- calls that change addresses wait ---------------------------------------------------------


@pytest.mark.parametrize("act", ["alloc", "reset", "close", "set_tensor_backend", "reserve", "compute", "numpy",
                                 "other scheduler"])
def test_changes_wait_for_what_is_queued(act):
    backends = [Gated("a"), Gated("b")]
    chain, larger = Chain(backends, log=3), Chain(backends, rows=64)
    gate, done = threading.Event(), []
    backends[1].before = lambda number: wait(gate) if number == 0 else None
    backends[1].after = done.append
    scheduler = gs.Scheduler(backends)
    scheduler.alloc(chain.graph)
    chain.queue_all(scheduler, 3)
    threading.Timer(0.05, gate.set).start()
    if act in ("alloc", "reserve"):
        getattr(scheduler, act)(larger.graph)
    elif act == "compute":
        scheduler.compute(chain.graph)
    elif act == "set_tensor_backend":
        scheduler.set_tensor_backend(chain.out, backends[0])
    elif act == "numpy":
        chain.check(2)
    elif act == "other scheduler":
        gs.Scheduler(cpus(1) + backends).alloc(chain.graph)
    else:
        getattr(scheduler, act)()
    assert len(done) >= 3
    chain.check_log(3)
    scheduler.close()


def test_no_more_than_so_many_computes_are_in_flight(monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_IN_FLIGHT", 2)
    gate, backend, queued = threading.Event(), Gated("a"), []
    backend.before = lambda number: wait(gate)
    chain = Chain([backend], log=5)
    scheduler = gs.Scheduler([backend])
    scheduler.alloc(chain.graph)

    def queue_all():
        for k in range(5):
            chain.queue(scheduler, k)
            queued.append(k)

    thread = threading.Thread(target=queue_all)
    thread.start()
    thread.join(0.05)
    assert len(queued) <= 2
    gate.set()
    thread.join(PATIENCE)
    scheduler.synchronize()
    chain.check_log(5)
    scheduler.close()


# -- threads ------------------------------------------------------------------------------------


def test_threads_start_late_and_end_with_close_or_the_last_reference():
    before = len(lanes())
    backends = cpus(2)
    chain = Chain(backends)
    scheduler = gs.Scheduler(backends)
    scheduler.alloc(chain.graph)
    chain.set(1)
    scheduler.compute(chain.graph)
    assert len(lanes()) == before
    chain.queue(scheduler, 1)
    mine = lanes()[before:]
    assert {t.name for t in mine} == {"ggml-sched cpu0", "ggml-sched cpu1"} and all(t.daemon for t in mine)
    scheduler.close()
    scheduler.close()
    assert len(lanes()) == before
    with pytest.raises(gs.Error, match="closed"):
        scheduler.compute_async(chain.graph)
    scheduler = gs.Scheduler(backends)
    scheduler.alloc(chain.graph)
    chain.queue(scheduler, 1)
    mine = lanes()[before:]
    del scheduler
    for thread in mine:
        thread.join(PATIENCE)
    assert len(lanes()) == before


def test_two_schedulers_in_two_threads():
    results = {}

    def work(name):
        backends = cpus(2)
        chain = Chain(backends, log=30)
        with chain.scheduler(backends, copies=2) as scheduler:
            chain.queue_all(scheduler, 30)
            scheduler.synchronize()
            results[name] = np.array_equal(chain.log.numpy(), [chain.expected(k)[0] for k in range(30)])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {0: True, 1: True}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("busy", [False, True])
def test_after_a_fork_the_child_has_threads_of_its_own(busy):
    backends = [Gated("a"), Gated("b")]
    gate = threading.Event()
    chain = Chain(backends)
    scheduler = gs.Scheduler(backends)
    scheduler.alloc(chain.graph)
    chain.queue(scheduler, 1)
    scheduler.synchronize()
    if busy:
        backends[0].before = lambda number: wait(gate)
        chain.queue(scheduler, 2)

    def compute() -> None:
        backends[0].before = lambda number: None
        if busy:
            with pytest.raises(gs.BackendError):
                scheduler.synchronize()
        chain.queue(scheduler, 3)
        scheduler.synchronize()
        chain.check(3)
        scheduler.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)     # newer Pythons warn about forks with threads
        assert in_child(compute) == 0
    gate.set()
    scheduler.synchronize()
    chain.check(2 if busy else 1)
    scheduler.close()


# -- events ---------------------------------------------------------------------------------------


def test_a_device_with_events_is_waited_for_on_the_device():
    a, b = Stream("a"), Stream("b")
    chain = Chain([a, b], log=3)
    with chain.scheduler([a, b], copies=2) as scheduler:
        chain.check_queued(scheduler, 3)
    assert a.calls.count("push") >= 3 and "wait" in b.calls and "record" in a.calls
    a.close()
    b.close()


def test_default_events_wait_when_they_are_recorded():
    waited = []

    class Minimal(gs.Backend):
        def synchronize(self):
            waited.append(self.name)

        def event_synchronize(self, event):
            assert event.backend is self
            passed.append(self.name)

    passed = []
    a, b = Minimal("a"), Minimal("b")
    event = a.event_new()
    assert isinstance(event, gs.Event) and event.backend is a
    a.event_record(event)
    assert waited == ["a"]
    b.event_wait(event)
    assert waited == passed == ["a"] and a.cpy_tensor_async(None, None) is False
