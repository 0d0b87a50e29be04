"""An interrupt at any instruction of queued computes leaves a scheduler that works, and no thread that waits."""

import contextlib
import threading

import numpy as np
import pytest
from interrupting import interrupted

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

STEP = 3
"""The distance between the instructions that are tried: a prime, so that all of a loop's are."""


def lanes() -> list[gs.Backend]:
    return [gs.CpuBackend(1, name=f"cpu{k}") for k in range(2)]


def devices() -> list[gs.Backend]:
    queues = DeferredQueues(1)
    return [DeferredBackend("a", queues), DeferredBackend("b", queues), gs.CpuBackend(1)]


def ends(call, timeout: float = 60) -> bool:
    """Whether a call ends on a thread of its own: not if an interrupt has left it something to wait for."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


@pytest.mark.parametrize("home", ["execution/pipeline", "threading.py"])
@pytest.mark.parametrize("make", [lanes, devices])
def test_queued_computes_can_be_interrupted_anywhere(make, home):
    backends, ctx = make(), gs.Context()
    x = ctx.tensor("f32", (8,), "x", input=True)
    middle = ctx.sqr(x)
    y = ctx.set_output(ctx.add(middle, x))
    graph, seen = gs.Graph(y), []
    scheduler = gs.Scheduler(backends, copies=2)
    scheduler.set_tensor_backend(middle, backends[1])
    scheduler.alloc(graph)

    def compute() -> None:
        scheduler.compute_async(graph)
        scheduler.compute_async(graph)
        scheduler.synchronize()

    def again() -> None:
        with contextlib.suppress(KeyboardInterrupt, gs.Error):      # kept from the interrupted call
            scheduler.synchronize()
        compute()
        seen.append(y.numpy().copy())

    def check(value: float, where: str | None) -> None:
        x.set(np.full(8, value, np.float32))
        assert ends(again), where
        np.testing.assert_array_equal(seen.pop(), np.full(8, value * value + value, np.float32), err_msg=str(where))

    x.set(np.ones(8, np.float32))
    compute()                   # starts the threads
    at, n = 1, 0
    while where := interrupted(compute, at, home=home):
        check(float(n % 7 + 2), where)
        at, n = at + STEP, n + 1
    assert n or home != "execution/pipeline"
    assert ends(scheduler.close)
    for backend in backends:
        backend.close()


def test_an_interrupt_after_a_failure_leaves_no_results(monkeypatch):
    backend, ctx = lanes()[0], gs.Context()
    x = ctx.tensor("f32", (8,), "x", input=True)
    y = ctx.set_output(ctx.sqr(x))
    graph = gs.Graph(y)
    fails = [False]
    before = backend.graph_plan_compute

    def compute(plan) -> None:
        if fails[0]:
            raise ArithmeticError("planted")
        before(plan)

    monkeypatch.setattr(backend, "graph_plan_compute", compute)
    with gs.Scheduler([backend]) as scheduler:
        def synchronize() -> None:
            with contextlib.suppress(ArithmeticError):
                scheduler.synchronize()

        scheduler.alloc(graph)
        x.set(np.ones(8, np.float32))
        scheduler.compute(graph)
        at, where = 1, ""
        while where is not None:
            fails[0] = True
            scheduler.compute_async(graph)
            where = interrupted(synchronize, at)
            with pytest.raises(gs.HazardError):
                y.numpy()
            fails[0] = False
            synchronize()
            with pytest.raises(gs.HazardError):
                y.numpy()
            scheduler.compute(graph)
            assert y.numpy()[0] == 1
            at += 1
        assert at > 20
    backend.close()
