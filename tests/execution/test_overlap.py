"""Queued computes overlap: while one backend works on a compute, another already works on the next."""

import threading
import time

import numpy as np
import pytest
from devices import device

import ggml_sched as gs

NAPS = 0.004, 0.02, 0.1         # seconds; on a busy machine a short sleep ends before the other thread runs at all


def sleeper(name, concurrent, seconds):
    """A backend that computes nothing, and sleeps: `naps` are the times, `crowded` whether two calls overlapped."""
    inside = threading.Lock()

    def enter(work, *args):
        if not inside.acquire(False):
            backend.crowded = True
            return work(*args)
        try:
            return work(*args)
        finally:
            inside.release()

    def nap():
        begin = time.perf_counter()
        time.sleep(seconds)
        backend.naps.append((begin, time.perf_counter()))

    backend = device(name=name, answers={"set_tensor_async": enter, "get_tensor_async": enter, "cpy_tensor_from": enter,
                                         "graph_plan_compute": lambda inherited, plan: enter(nap)},
                     attributes={"concurrent_copies": concurrent, "naps": [], "crowded": False})
    return backend


def overlapping(first, second):
    """How many sleeps of one backend overlap with one of the other."""
    return sum(any(a < d and c < b for c, d in second.naps) for a, b in first.naps)


def compute_queued(ctx, order, copies, n, first, host):
    """Queue `n` computes of a graph over both backends, each with inputs of its own, and wait for all."""
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    if order == "the host last":
        nodes = ((ctx.sqr(x), first),)
        nodes += ((ctx.add(nodes[0][0], x), host),)
    elif order == "the host first":
        nodes = ((ctx.sqr(x), host),)
        nodes += ((ctx.add(nodes[0][0], x), first),)
    else:
        y = ctx.tensor("f32", (8, 2), "y", input=True)
        nodes = ((ctx.sqr(y), first), (ctx.sqr(x), host))
        nodes += ((ctx.add(nodes[0][0], nodes[1][0]), first if copies > 1 else host),)
    graph = gs.Graph(ctx.set_output(nodes[-1][0]))
    with gs.Scheduler([first, host], copies=copies) as scheduler:
        for node, backend in nodes:
            scheduler.set_tensor_backend(node, backend)
        scheduler.alloc(graph).verify()
        for _ in range(n):
            for leaf in graph.leafs:
                leaf.set(np.ones(leaf.ne[1::-1], np.float32))
            scheduler.compute_async(graph)
        scheduler.synchronize()


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("order", ["the host last", "the host first", "in between"])
def test_two_equal_backends_work_at_the_same_time(ctx, order, copies, concurrent):
    """Whichever of them is the host, where inputs are placed: what the caller sets does not queue behind it."""
    n = 12
    for seconds in NAPS:
        first, host = sleeper("device", concurrent, seconds), sleeper("host", concurrent, seconds)
        compute_queued(ctx, order, copies, n, first, host)
        if not concurrent:
            assert not (first.crowded or host.crowded)
        if overlapping(first, host) >= n - 3 and overlapping(host, first) >= n - 3:
            return
    pytest.fail(f"{overlapping(first, host)} and {overlapping(host, first)} of {n} computes overlap")
