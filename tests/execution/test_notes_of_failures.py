"""A failure inside a backend says which backend it was, and which nodes it was computing or which tensor was copied."""

import re

import numpy as np
import pytest
from devices import device, weights_on

import ggml_sched as gs
from ggml_sched.backends.cpu.buffer import HostBackend
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues


class NodeByNode(HostBackend):
    """Fails to compute square roots; other nodes keep the bytes of their memory."""

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


def compute(scheduler, graph):
    scheduler.compute(graph)


def compute_observed(scheduler, graph):
    scheduler.compute(graph, lambda node: True)


def compute_queued(scheduler, graph):
    scheduler.compute_async(graph)
    scheduler.synchronize()


@pytest.mark.parametrize("run", [compute, compute_queued])
def test_the_exception_of_compute_node_has_a_note_with_that_node_alone(run):
    with gs.Scheduler([NodeByNode("mine")], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            run(scheduler, two_nodes())
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


@pytest.mark.parametrize("run", [compute, compute_queued])
def test_an_exception_of_queued_work_has_a_note_with_its_backend(run):
    late = DeferredBackend("late", DeferredQueues(0))
    late.graph_plan_compute = lambda plan: late.queue.append(lambda: 1 / 0)
    with gs.Scheduler([late], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            run(scheduler, two_nodes())
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


def test_an_exception_of_observed_nodes_that_were_queued_has_a_note_with_them():
    late = DeferredBackend("late", DeferredQueues(0))
    late.graph_compute = lambda graph: late.queue.append(lambda: 1 / 0)
    with gs.Scheduler([late], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            compute_observed(scheduler, two_nodes())
        assert caught.value.__notes__ == ["backend 'late' was computing 'first' (SQR)"]


def test_an_exception_while_backends_are_compared_has_a_note_with_the_node():
    with gs.CpuBackend(1) as cpu, pytest.raises(ZeroDivisionError) as caught:
        gs.compare(two_nodes(), cpu, NodeByNode("mine"))
    assert caught.value.__notes__ == ["backend 'mine' was computing 'last' (SQRT)"]


EVERY_COMPUTE = pytest.mark.parametrize("run", [compute, compute_observed, compute_queued])


@EVERY_COMPUTE
def test_the_exception_of_a_load_has_a_note_with_its_tensor_and_backend(run):
    weak = device(name="weak", fails={"set_tensor_async"})
    with weak, gs.Scheduler([weak], zero=True) as scheduler:
        weak.fail_next("set_tensor_async", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError) as caught:
            run(scheduler, two_nodes())
        assert caught.value.__notes__ == ["'x' was being loaded from the host to backend 'weak'"]


@EVERY_COMPUTE
@pytest.mark.parametrize("which, method", [("gpu", "get_tensor_async"), ("host", "cpy_tensor_from"),
                                           ("gpu", "cpy_tensor_to"), ("host", "set_tensor_async")])
def test_the_exception_of_a_copy_has_a_note_with_its_tensor_and_both_backends(run, which, method):
    refuse = {"cpy_tensor_from": lambda inherited, src, dst: False, "cpy_tensor_to": lambda inherited, src, dst: False}
    weak = {name: device(name=name, reads=(), refuses={op}, fails={"get_tensor_async", "set_tensor_async"},
                         answers=refuse) for name, op in (("gpu", "SQRT"), ("host", "SQR"))}
    with weak["gpu"], weak["host"], gs.Scheduler([*weak.values()]) as scheduler:
        graph = two_nodes()
        scheduler.alloc(graph)
        graph.leafs[0].set(np.ones(4))
        scheduler.compute(graph)        # loads the input, with the same methods as the copy
        weak[which].fail_next(method, ZeroDivisionError())
        with pytest.raises(ZeroDivisionError) as caught:
            run(scheduler, graph)
        assert caught.value.__notes__ == ["'first' was being copied from backend 'gpu' to backend 'host'"]


@EVERY_COMPUTE
def test_the_exception_of_a_copy_of_experts_has_a_note_with_the_weight_and_both_backends(run):
    host, gpu = device(name="host", fails={"get_tensor_async"}), device(name="gpu", reads=(), offloads={"MUL_MAT_ID"})
    ctx = gs.Context()
    ids = ctx.tensor("i32", (1, 2), "ids", input=True)
    out = ctx.tensor("f32", (8, 1, 2), "x", input=True)
    for k in range(3):                      # several layers: the experts of one would stay on the device
        out = ctx.mul_mat_id(weights_on(host, **{f"e{k}": np.ones((6, 8, 8), np.float32)})[f"e{k}"], out, ids)
    graph = gs.Graph(ctx.set_output(out))
    with host, gpu, gs.Scheduler([gpu, host], zero=True) as scheduler:
        assert any(step.kind == "copy experts" for step in scheduler.alloc(graph).program.steps)
        host.fail_next("get_tensor_async", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError) as caught:
            run(scheduler, graph)
        assert caught.value.__notes__ == ["'e0' was being copied from backend 'host' to backend 'gpu'"]


def test_the_exception_of_tensor_copy_has_a_note_with_the_tensor_and_both_backends():
    ctx, other = gs.Context(), gs.Context()
    with gs.CpuBackend(1, "here") as here, device(name="there", fails={"cpy_tensor_from"}) as there:
        x, y = ctx.tensor("f32", 4, "x"), other.tensor("f32", 4, "y")
        here.alloc_tensors(ctx)
        there.alloc_tensors(other)
        there.fail_next("cpy_tensor_from", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError) as caught:
            gs.tensor_copy(x, y)
    assert caught.value.__notes__ == ["'x' was being copied from backend 'here' to backend 'there'"]
