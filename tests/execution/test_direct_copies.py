"""Direct copies to plain memory equal copies through the backend's methods, which all other memory uses."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from devices import device

import ggml_sched as gs
from ggml_sched.backends.cpu import run_nodes
from ggml_sched.execution import _steps


def asked():
    """A backend that records the tensors set and read."""
    return device(records={"set_tensor_async", "get_tensor_async"})


def tensors(backend, method: str) -> list[str]:
    return [call.args[0].name for call in backend.calls if call.method == method]


@contextmanager
def summed(backend) -> Iterator[tuple[gs.Graph, gs.Scheduler]]:
    """The allocated graph x + y, whose inputs are set, and its scheduler."""
    ctx = gs.Context()
    x, y = ctx.tensor("f32", 8, "x"), ctx.tensor("f32", 8, "y")
    graph = gs.Graph(ctx.set_output(ctx.add(x, y)))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.arange(8, dtype=np.float32))
        y.set(np.ones(8, np.float32))
        yield graph, scheduler


def test_a_backend_that_brings_data_its_own_way_is_asked():
    with asked() as backend, summed(backend) as (graph, scheduler):
        assert not graph.nodes[0].buffer.plain
        scheduler.compute(graph)
        assert sorted(tensors(backend, "set_tensor_async")) == ["x", "y"]
        out = np.empty(8, np.float32)
        assert not graph.nodes[0].fetch(out)
        backend.get_tensor(graph.nodes[0], out)
        assert tensors(backend, "get_tensor_async") and out.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_buffer_that_writes_its_own_way_is_asked():
    written = []

    class Own(gs.backends.cpu.CpuBuffer):
        def write(self, offset, data):
            written.append(offset)
            super().write(offset, data)

    backend = device(answers={"alloc_buffer": lambda inherited, size: Own(backend, inherited(size).memory)})
    with backend, summed(backend) as (graph, scheduler):
        scheduler.compute(graph)
        assert len(written) == 2 and graph.nodes[0].numpy().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_read_only_memory_is_not_plain():
    with gs.CpuBackend(1) as backend:
        memory = np.zeros(64, np.uint8)
        assert backend.buffer_from_ptr(memory).plain
        memory.flags.writeable = False
        assert not backend.buffer_from_ptr(memory).plain


def test_a_compute_waits_for_backends_that_may_not_be_done():
    with device(records={"synchronize"}) as backend, summed(backend) as (graph, scheduler):
        backend.take()
        scheduler.compute(graph)
        assert backend.count("synchronize")


def test_a_backend_whose_wait_is_replaced_is_waited_for():
    """The method of an object, not of its class."""
    with gs.CpuBackend(1) as backend, summed(backend) as (graph, scheduler):
        waits = []
        backend.synchronize = lambda: waits.append(1)
        scheduler.compute(graph)
        assert waits
        del backend.synchronize


def test_a_backend_whose_way_to_bring_data_is_replaced_is_asked():
    """The method is replaced after its buffers were allocated."""
    with gs.CpuBackend(1) as backend, summed(backend) as (graph, scheduler):
        scheduler.compute(graph)
        brought = []
        backend.set_tensor_async = lambda tensor, data, offset=0: brought.append(tensor.name)
        for leaf in graph.leafs:
            leaf.set(np.full(8, 7, np.float32))
        scheduler.compute(graph)
        assert sorted(brought) == ["x", "y"]
        del backend.set_tensor_async


def test_staged_bytes_are_what_set_keeps():
    with gs.CpuBackend(1) as backend, summed(backend) as (graph, scheduler):
        x = graph.leafs[0]
        before = x.data_version
        assert x.stage(np.full(8, 5, np.float32).tobytes()) and x.data_version == before + 1
        assert x.numpy().tolist() == [5] * 8
        scheduler.compute(graph)
        assert graph.nodes[0].numpy().tolist() == [6] * 8


def test_what_does_not_wait_on_the_host_is_not_staged(ctx):
    weight, leaf = ctx.tensor("f32", 4, "w"), ctx.tensor("f32", 4, "x")
    view = ctx.reshape(leaf, 2, 2)
    out = ctx.set_output(ctx.add(leaf, weight))
    data = bytes(16)
    with gs.CpuBackend(1) as backend, gs.Context("weights"):
        assert not leaf.stage(data)                     # no address
        memory = backend.alloc_buffer(64)
        gs.bind_resident(weight, memory, 0)
        graph = gs.Graph(out, view)
        with gs.Scheduler([backend]) as scheduler:
            scheduler.alloc(graph)
            versions = [t.data_version for t in (weight, leaf, out)]
            assert not weight.stage(data)               # its memory is its own
            assert not view.stage(data) and not out.stage(data)
            assert not leaf.stage(data[:8]) and not leaf.stage(bytes(32))
            assert versions == [t.data_version for t in (weight, leaf, out)]
            assert leaf.stage(data)
        assert not leaf.stage(data)                     # the scheduler is closed


def test_bytes_are_not_kept_for_a_leaf_that_has_its_data_at_once(ctx):
    """A leaf of a graph allocator, whose memory is exclusively its own: code that reads it expects the data there."""
    x = ctx.tensor("f32", 4, "x")
    graph = gs.Graph(ctx.add(x, ctx.sqr(x)))
    with gs.TensorAllocator.from_memory(np.zeros(4096, np.uint8), 1) as tallocr:
        gs.GraphAllocator().alloc_graph(tallocr, graph)
        assert not x.stage(bytes(16))


@pytest.mark.parametrize("size", [4, 7, 9])
def test_another_number_of_bytes_is_not_fetched(size):
    with gs.CpuBackend(1) as backend, summed(backend) as (graph, scheduler):
        scheduler.compute(graph)
        out = np.full(size, 3, np.float32)
        assert not graph.nodes[0].fetch(out) and (out == 3).all()
        whole = np.empty(8, np.float32)
        assert graph.nodes[0].fetch(whole) and whole.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        with pytest.raises(BufferError):
            graph.nodes[0].fetch(bytes(32))
        with pytest.raises((BufferError, ValueError)):
            graph.nodes[0].fetch(np.empty(16, np.float32)[::2])
        scheduler.close()
        assert not graph.nodes[0].fetch(whole)          # no address


class Kept(bytearray):
    """Bytes whose references can be observed."""


class Slow(gs.CpuBackend):
    """A device that copies data when it is synchronized, and holds no reference to the data until then."""

    is_host = False

    def __init__(self) -> None:
        super().__init__(1, "slow")
        self.queued: list[Callable[[], None]] = []
        self.lost = 0

    def set_tensor_async(self, tensor, data, offset=0):
        if isinstance(data.obj, Kept):
            self.queued.append(partial(self._take, weakref.ref(data.obj), tensor.buffer, tensor.offset + offset))
        else:
            super().set_tensor_async(tensor, data, offset)

    def _take(self, given, buffer, at):
        data = given()
        if data is None:
            self.lost += 1
        else:
            buffer.write(at, memoryview(data))

    def cpy_tensor_from(self, src, dst):
        return False

    def event_record(self, event):
        """A wait for this event waits for the device."""

    def event_synchronize(self, event):
        self.synchronize()

    def graph_plan_create(self, graph):
        return None

    def graph_compute(self, graph):
        self.queued.append(partial(run_nodes, graph.nodes, lambda buffer: buffer.memory))

    def synchronize(self):
        queued, self.queued = self.queued, []
        for work in queued:
            work()


@pytest.mark.parametrize("watched", [False, True])
def test_what_is_on_its_way_stays_alive_until_the_device_was_waited_for(ctx, watched, monkeypatch):
    staged = _steps.staged
    monkeypatch.setattr(_steps, "staged", lambda src, dst: Kept(staged(src, dst)))
    x = ctx.tensor("f32", 8, "x")
    y = ctx.sqr(x)
    z = ctx.set_output(ctx.scale(y, 2.0))
    graph = gs.Graph(z)
    with Slow() as slow, gs.CpuBackend(1) as host, gs.Scheduler([slow, host]) as scheduler:
        scheduler.set_tensor_backend(y, host)
        scheduler.set_tensor_backend(z, slow)
        scheduler.alloc(graph)
        x.set(np.arange(8, dtype=np.float32))
        for _ in range(2):
            scheduler.compute(graph, **({"callback": bool, "ask": lambda node: False} if watched else {}))
            assert not slow.lost and z.numpy().tolist() == [2 * k * k for k in range(8)]


def test_data_that_a_step_brings_is_kept_for_the_caller():
    """By name what `run_in_order` says: memory that is not plain may take it later."""
    with asked() as backend, summed(backend) as (graph, scheduler):
        x, alive = graph.leafs[0], []
        load = _steps.BoundLoad(backend, x, x, 0, 0, None)
        _steps.run_in_order([load], alive)
        assert tensors(backend, "set_tensor_async") == ["x"] and any(data is x.stash for data in alive)


@pytest.mark.parametrize("name", ["set_tensor_async", "get_tensor", "synchronize"])
def test_a_backend_that_was_given_a_way_of_its_own_is_asked(name):
    """An attribute of the object, not of its class."""
    with gs.CpuBackend(1) as backend:
        assert backend.alloc_buffer(64).plain
        setattr(backend, name, partial(getattr(gs.CpuBackend, name), backend))
        assert not backend.alloc_buffer(64).plain
        delattr(backend, name)


def test_a_buffer_whose_memory_is_somewhere_else_is_not_plain():
    class Elsewhere(gs.backends.cpu.CpuBuffer):
        memory = property(lambda self: None)

    with gs.CpuBackend(1) as backend:
        assert not Elsewhere(backend, np.zeros(64, np.uint8)).plain


def test_memory_that_was_given_back_is_neither_read_nor_written():
    """`close` calls `free`; after a direct call of `free`, direct copies raise as the backend's methods do."""
    with gs.CpuBackend(1) as backend, summed(backend) as (graph, scheduler):
        scheduler.compute(graph)
        x, out = graph.leafs[0], graph.nodes[0]
        x.buffer.free()
        assert not out.fetch(np.empty(8, np.float32))
        with pytest.raises(gs.BackendError, match="closed"):
            scheduler.compute(graph)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="a class in Python gives no buffer before 3.12")
def test_a_destination_may_close_the_source_while_it_is_filled():
    with gs.CpuBackend(1) as backend, summed(backend) as (graph, scheduler):
        scheduler.compute(graph)

        class Closes:
            def __buffer__(self, flags):
                scheduler.close()
                return memoryview(bytearray(32))

        assert not graph.nodes[0].fetch(Closes())
