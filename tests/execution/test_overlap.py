"""Queued computes overlap: while one backend works on a compute, another already works on the next."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ggml_sched as gs

NAP = 0.004


class Plain(gs.Buffer):
    def __init__(self, backend, size):
        super().__init__(backend, size)
        self.bytes = np.zeros(size, np.uint8)

    def write(self, offset, data):
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, out):
        np.frombuffer(out, np.uint8)[:] = self.bytes[offset : offset + len(out)]


class Sleeper(gs.Backend):
    """Computes nothing, and sleeps; records the times, and asserts that no two calls overlap."""

    def __init__(self, name, concurrent):
        super().__init__(name)
        self.concurrent_copies = concurrent
        self.naps: list[tuple[float, float]] = []
        self.inside = threading.Lock()
        self.crowded = False

    def alloc_buffer(self, size):
        return Plain(self, size)

    def _enter(self, work):
        if not self.inside.acquire(False):
            self.crowded = True
            return work()
        try:
            return work()
        finally:
            self.inside.release()

    def set_tensor_async(self, tensor, data, offset=0):
        self._enter(lambda: super(Sleeper, self).set_tensor_async(tensor, data, offset))

    def get_tensor_async(self, tensor, out, offset=0):
        self._enter(lambda: super(Sleeper, self).get_tensor_async(tensor, out, offset))

    def graph_compute(self, graph):
        def nap():
            begin = time.perf_counter()
            time.sleep(NAP)
            self.naps.append((begin, time.perf_counter()))

        self._enter(nap)


def overlapping(first, second):
    """How many sleeps of one backend overlap with one of the other."""
    return sum(any(a < d and c < b for c, d in second.naps) for a, b in first.naps)


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("order", ["the host last", "the host first", "in between"])
def test_two_equal_backends_work_at_the_same_time(order, copies, concurrent):
    """Whichever of them is the host, where inputs are placed: what the caller sets does not queue behind it."""
    device, host = Sleeper("device", concurrent), Sleeper("host", concurrent)
    ctx = gs.Context()
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    if order == "the host last":
        nodes = ((ctx.sqr(x), device),)
        nodes += ((ctx.add(nodes[0][0], x), host),)
    elif order == "the host first":
        nodes = ((ctx.sqr(x), host),)
        nodes += ((ctx.add(nodes[0][0], x), device),)
    else:
        y = ctx.tensor("f32", (8, 2), "y", input=True)
        nodes = ((ctx.sqr(y), device), (ctx.sqr(x), host))
        nodes += ((ctx.add(nodes[0][0], nodes[1][0]), device if copies > 1 else host),)
    graph = gs.Graph(ctx.set_output(nodes[-1][0]))
    n = 12
    with gs.Scheduler([device, host], copies=copies) as scheduler:
        for node, backend in nodes:
            scheduler.set_tensor_backend(node, backend)
        scheduler.alloc(graph).verify()
        for _ in range(n):
            for leaf in graph.leafs:
                leaf.set(np.ones(leaf.ne[1::-1], np.float32))
            scheduler.compute_async(graph)
        scheduler.synchronize()
    assert overlapping(device, host) >= n - 3 and overlapping(host, device) >= n - 3
    if not concurrent:
        assert not (device.crowded or host.crowded)
