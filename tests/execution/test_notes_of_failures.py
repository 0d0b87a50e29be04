"""A failure inside a backend says which backend it was, and which nodes it was computing."""

import re

import numpy as np
import pytest
from devices import device

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues


class Buffer(gs.Buffer):
    def __init__(self, backend, size):
        super().__init__(backend, size)
        self.memory = np.zeros(size, np.uint8)

    def write(self, offset, data):
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, out):
        out[:] = self.memory[offset : offset + len(out)]


class NodeByNode(gs.Backend):
    """Fails to compute square roots; other nodes keep the bytes of their memory."""

    def alloc_buffer(self, size):
        return Buffer(self, size)

    def compute_node(self, node):
        if node.op == "SQRT":
            1 / 0  # noqa: B018


def two_nodes() -> gs.Graph:
    """The graph first = x^2, last = sqrt(first)."""
    ctx = gs.Context()
    first = ctx.set_name(ctx.sqr(ctx.tensor("f32", 4, "x", input=True)), "first")
    return gs.Graph(ctx.set_output(ctx.set_name(ctx.sqrt(first), "last")))


@pytest.mark.parametrize("callback, which", [(None, r"the 2 nodes 'first' \(SQR\) .. 'last' \(SQRT\)"),
                                             (lambda node: True, r"'first' \(SQR\)")])
def test_the_exception_of_a_backend_has_a_note_with_its_nodes(callback, which):
    broken = device(name="broken", before={"graph_compute": lambda graph: 1 / 0},
                    answers={"graph_plan_create": lambda inherited, graph: None})
    with broken, gs.Scheduler([broken], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            scheduler.compute(two_nodes(), callback)
        (note,) = caught.value.__notes__
        assert re.fullmatch(f"backend 'broken' was computing {which}", note)


@pytest.mark.parametrize("queued", [False, True])
def test_the_exception_of_compute_node_has_a_note_with_that_node_alone(queued):
    with gs.Scheduler([NodeByNode("mine")], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            if queued:
                scheduler.compute_async(two_nodes())
                scheduler.synchronize()
            else:
                scheduler.compute(two_nodes())
        assert caught.value.__notes__ == ["backend 'mine' was computing 'last' (SQRT)"]


def test_compute_node_is_called_for_nodes_that_are_no_views_in_order():
    seen = []

    class Recording(NodeByNode):
        def compute_node(self, node):
            seen.append(node.op)

    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 2), "x")
    Recording("mine").graph_compute(gs.Graph(ctx.sqrt(ctx.sqr(ctx.view_1d(x, 4)))))
    assert seen == ["SQR", "SQRT"]


def test_an_exception_of_queued_work_has_a_note_with_its_backend():
    late = DeferredBackend("late", DeferredQueues(0))
    late.graph_plan_compute = lambda plan: late.queue.append(lambda: 1 / 0)
    with gs.Scheduler([late], zero=True) as scheduler:
        scheduler.compute_async(two_nodes())
        with pytest.raises(ZeroDivisionError) as caught:
            scheduler.synchronize()
        assert caught.value.__notes__ == ["backend 'late' raised this for work that was queued before"]


def test_an_exception_of_queued_nodes_has_a_note_with_the_nodes_alone(monkeypatch):
    late = DeferredBackend("late", DeferredQueues(0))
    late.graph_plan_create = lambda graph: None
    monkeypatch.setattr(gs.CpuBackend, "graph_compute", lambda self, graph: 1 / 0)
    with gs.Scheduler([late], zero=True) as scheduler:
        scheduler.compute_async(two_nodes())
        with pytest.raises(ZeroDivisionError) as caught:
            scheduler.synchronize()
        assert caught.value.__notes__ == ["backend 'late' was computing the 2 nodes 'first' (SQR) .. 'last' (SQRT)"]


def test_an_exception_while_backends_are_compared_has_a_note_with_the_node():
    with gs.CpuBackend(1) as cpu, pytest.raises(ZeroDivisionError) as caught:
        gs.compare(two_nodes(), cpu, NodeByNode("mine"))
    assert caught.value.__notes__ == ["backend 'mine' was computing 'last' (SQRT)"]
