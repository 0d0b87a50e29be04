"""Mixins that record the calls of any backend, and let some of them fail."""

import gc
import weakref

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backends.cpu.buffer import HostBackend
from ggml_sched.graph.hostdata import array_over
from ggml_sched.testing.faulty import Faulty, FaultyCpuBackend
from ggml_sched.testing.recording import Call, Recording


class Squares(HostBackend):
    """Computes squares, node by node."""

    def supports_op(self, node):
        return node.op == "SQR"

    def compute_node(self, node):
        x, y = (t.buffer.memory[t.offset : t.offset + t.nbytes].view(np.float32) for t in (node.src[0], node))
        np.multiply(x, x, y)


class RecordedSquares(Recording, Squares):
    pass


class RecordedCpu(Recording, gs.CpuBackend):
    pass


class FaultySquares(Faulty, Squares):
    pass


def graph(*, root: bool = False):
    """x -> 'square' = x^2, and with `root` -> 'root' = sqrt(square)."""
    ctx = gs.Context()
    x = ctx.tensor("f32", 4, "x", input=True)
    y = ctx.set_name(ctx.sqr(x), "square")
    return x, gs.Graph(ctx.set_output(ctx.set_name(ctx.sqrt(y), "root") if root else y))


def test_calls_are_recorded_in_order_with_their_arguments():
    x, g = graph()
    with gs.Scheduler([mine := RecordedSquares("mine")]) as scheduler:
        scheduler.alloc(g)
        x.set(np.arange(4, dtype=np.float32))
        scheduler.compute(g)
    first, second = mine.calls
    assert first.method == "alloc_buffer" and second == Call("compute_node", (g.nodes[0],))
    assert str(second) == "compute_node('square')"
    assert [node.name for node in mine.computed] == ["square"]
    assert mine.take() == [first, second] and mine.calls == []


def test_nodes_of_graph_plans_are_recorded_as_often_as_they_are_computed():
    x, g = graph(root=True)
    with RecordedCpu(1) as cpu, gs.Scheduler([cpu], zero=True) as scheduler:
        for _ in range(2):
            scheduler.compute(g)
        assert [node.name for node in cpu.computed] == ["square", "root"] * 2
        assert cpu.count("graph_plan_create") == 1 and cpu.count("graph_plan_compute") == 2


def test_graphs_of_plans_that_were_freed_are_kept_until_their_calls_are_taken():
    with RecordedCpu(1) as cpu:
        plans, nodes = [], []
        for name in ("freed", "kept"):
            ctx = gs.Context()
            g = gs.Graph(ctx.set_name(ctx.sqr(ctx.tensor("f32", 4, "x")), name))
            cpu.alloc_tensors(ctx, "any")
            plans.append(cpu.graph_plan_create(g))
            nodes.append(weakref.ref(g.nodes[0]))
            cpu.graph_plan_compute(plans[-1])
        del ctx, g
        cpu.graph_plan_free(plans.pop(0))
        assert [node.name for node in cpu.computed] == ["freed", "kept"]
        cpu.take()
        gc.collect()
        assert nodes[0]() is None and nodes[1]() is not None
        cpu.graph_plan_compute(plans[0])
        assert [node.name for node in cpu.computed] == ["kept"]


def test_a_plan_whose_release_failed_is_still_known():
    class Busy(gs.CpuBackend):
        fails = True

        def graph_plan_free(self, plan):
            if self.fails:
                raise gs.BackendError("the plan is in use")
            super().graph_plan_free(plan)

    class RecordedBusy(Recording, Busy):
        pass

    with RecordedBusy(1) as cpu:
        ctx = gs.Context()
        g = gs.Graph(ctx.set_name(ctx.sqr(ctx.tensor("f32", 4, "x")), "square"))
        cpu.alloc_tensors(ctx, "any")
        plan, node = cpu.graph_plan_create(g), weakref.ref(g.nodes[0])
        with pytest.raises(gs.BackendError, match="in use"):
            cpu.graph_plan_free(plan)
        cpu.take()
        cpu.graph_plan_compute(plan)
        assert [node.name for node in cpu.computed] == ["square"]
        cpu.fails = False
        cpu.graph_plan_free(plan)
        cpu.take()
        del ctx, g, plan
        gc.collect()
        assert node() is None


def test_methods_with_the_default_are_not_recorded():
    """The scheduler does not call all of them."""
    with pytest.raises(ValueError, match="'event_record' is not recorded"):
        RecordedSquares("mine").count("event_record")
    with pytest.raises(ValueError, match="'supports_op' is not recorded"):
        RecordedSquares("mine").count("supports_op")


def test_a_recorded_backend_gives_the_same_results():
    x, g = graph()
    for backend in (Squares("mine"), RecordedSquares("mine")):
        with gs.Scheduler([backend]) as scheduler:
            scheduler.alloc(g)
            x.set(np.arange(4, dtype=np.float32))
            scheduler.compute(g)
            assert g.nodes[-1].numpy().tolist() == [0, 1, 4, 9]


@pytest.mark.parametrize("make", [lambda: FaultySquares("mine"), lambda: FaultyCpuBackend(1, "mine")])
def test_each_kind_fails_once_and_the_backend_works_afterwards(make):
    x, g = graph()
    with make() as faulty, gs.Scheduler([faulty]) as scheduler:
        faulty.fail_at("alloc", 1)
        with pytest.raises(gs.OutOfMemory):
            scheduler.alloc(g)
        scheduler.alloc(g)
        faulty.fail_at("compute", 2)
        for n in range(3):
            x.set(np.arange(4, dtype=np.float32))
            if n == 1:
                with pytest.raises(gs.BackendError, match="'mine'"):
                    scheduler.compute(g)
            else:
                scheduler.compute(g)
                assert g.nodes[-1].numpy().tolist() == [0, 1, 4, 9]
        faulty.fail_at("copy", 1)
        with pytest.raises(gs.BackendError, match="getting 'square'"):
            g.nodes[-1].numpy()


@pytest.mark.parametrize("method", ["cpy_tensor_from", "cpy_tensor_to", "cpy_tensor_async"])
def test_every_kind_of_copy_fails(method):
    class Copies(Squares):
        """Copies by one method alone."""

        cpy_tensor_from = cpy_tensor_to = gs.Backend.cpy_tensor_from

    def copy(self, src, dst):
        array_over(dst, dst.buffer.memory, dst.offset)[...] = array_over(src, src.buffer.memory, src.offset)
        return True

    setattr(Copies, method, copy)
    faulty = type("FaultyCopies", (Faulty, Copies), {})("mine")
    ctx = gs.Context()
    x, y = ctx.tensor("f32", 4, "x"), ctx.tensor("f32", 4, "y")
    faulty.alloc_tensors(ctx)
    x.set(np.arange(4))
    faulty.fail_at("copy", 1)
    with pytest.raises(gs.BackendError, match="copying 'x' failed"):
        getattr(faulty, method)(x, y)
    assert getattr(faulty, method)(x, y) and y.numpy().tolist() == [0, 1, 2, 3]


def test_recorded_methods_take_arguments_by_name():
    class Recorded(Recording, Squares):
        pass

    backend = Recorded("mine")
    with backend.alloc_buffer(size=64) as buffer:
        assert buffer.size == 64
    assert backend.take()[0] == Call("alloc_buffer", (64,))
