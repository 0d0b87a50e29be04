"""The contract suite over every backend of the package and two in pure Python; defaults of the base classes.

`Minimal` has only the methods that are required, `Queued` copies at `synchronize`, as a device with a stream does.
"""

import runpy
from pathlib import Path

import cupy_devices
import ggml_here
import numpy as np
import pytest
from fusing import Fusing
from op_results import random

import ggml_sched as gs
from ggml_sched.backends.cpu import run_nodes
from ggml_sched.testing.contract import CASES, BackendContract
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

RNG = np.random.default_rng(9)
FEW = [case for k, case in enumerate(CASES) if k % 16 == 0]
"""Cases for backends whose kernels other tests cover."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "python_backend.py"


class NumpyBuffer(gs.Buffer):
    """Memory of its own; counts the calls of its hooks."""

    def __init__(self, backend, size):
        super().__init__(backend, size)
        self.bytes = np.full(size, 0xEE, np.uint8)
        self.log = []

    def write(self, offset, data):
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, out):
        out[:] = self.bytes[offset : offset + len(out)]

    def init_tensor(self, tensor):
        self.log.append(("init", tensor))

    def free_tensor(self, tensor):
        self.log.append(("free", tensor))

    def free(self):
        self.log.append("closed")
        self.bytes = None


class Minimal(gs.Backend):
    """The two required methods of a backend, over the two of its buffer."""

    def alloc_buffer(self, size):
        if size > 1 << 30:
            raise gs.OutOfMemory(f"no {size} bytes", self.name, size, 1 << 30)
        return NumpyBuffer(self, size)

    def graph_compute(self, graph):
        run_nodes(graph.nodes, lambda buffer: buffer.bytes, name=self.name)


class Queued(Minimal):
    """Copies happen at `synchronize`."""

    def __init__(self, name="queued"):
        super().__init__(name)
        self.queue = []

    def set_tensor_async(self, tensor, data, offset=0):
        self.queue.append(lambda: tensor.buffer.write(tensor.offset + offset, data))

    def get_tensor_async(self, tensor, out, offset=0):
        self.queue.append(lambda: tensor.buffer.read(tensor.offset + offset, out))

    def synchronize(self):
        while self.queue:
            self.queue.pop(0)()

    def graph_compute(self, graph):
        self.synchronize()
        super().graph_compute(graph)


# -- the contract -----------------------------------------------------------------------


class TestCpu(BackendContract):
    def new_backend(self):
        return gs.CpuBackend(2)

    def second_backend(self):
        return gs.CpuBackend(1, "second")

    def limited_backend(self, memory):
        return gs.CpuBackend(1, memory=memory)


class TestNumpyKernels(BackendContract):
    cases = FEW

    def new_backend(self):
        return gs.CpuBackend(1, kernels="numpy")


@pytest.mark.skipif(not ggml_here.IS_HERE, reason="needs ggml's libraries")
class TestGgml(BackendContract):
    cases = CASES if ggml_here.IS_HERE else FEW

    def new_backend(self):
        return ggml_here.backend(2)

    def limited_backend(self, memory):
        return ggml_here.backend(2, memory=memory)


class TestCuda(BackendContract):
    cases = FEW

    def new_backend(self):
        return cupy_devices.new()

    def limited_backend(self, memory):
        return cupy_devices.new(memory=memory)


class TestDry(BackendContract):
    cases = FEW

    def new_backend(self):
        return gs.DryBackend("dry", 64)

    def limited_backend(self, memory):
        return gs.DryBackend("dry", memory=memory)


class TestDryOfSmallBuffers(BackendContract):
    cases = FEW

    def new_backend(self):
        return gs.DryBackend("dry", max_buffer_size=1 << 20)


class TestDeferred(BackendContract):
    cases = FEW

    def new_backend(self):
        return DeferredBackend("mine", DeferredQueues(1))

    def second_backend(self):
        return DeferredBackend("second", DeferredQueues(2))


class TestMinimal(BackendContract):
    cases = FEW

    def new_backend(self):
        return Minimal("minimal")


class TestQueued(BackendContract):
    cases = FEW

    def new_backend(self):
        return Queued()


@pytest.mark.skipif(not EXAMPLE.exists(), reason="needs the source tree")
class TestExample(BackendContract):
    """The backend of examples/python_backend.py."""

    cases = FEW

    def new_backend(self):
        return runpy.run_path(EXAMPLE)["ArrayBackend"]("arrays")


class TestFusing(BackendContract):
    """A backend that computes each sum of a sum as one kernel, in the worst way that a fused kernel may."""

    cases = FEW

    def new_backend(self):
        return Fusing("fusing", lambda graph: [
            (k - 1, k) for k, node in enumerate(graph.nodes) if k and node.op == "ADD" and node.src[0].op == "ADD"])


# -- what the base classes do -------------------------------------------------------------


def small():
    ctx = gs.Context("small")
    a, b = ctx.tensor("f32", (8, 4), "a"), ctx.tensor("f32", (8, 4), "b")
    return ctx, a, b, ctx.set_name(ctx.add(a, b), "sum")


def test_bytes_are_never_cut_from_a_float():
    for wrong in ({"memory": 1.5}, {"max_buffer_size": 1.5}, {"alignment": 1.5}):
        with pytest.raises(TypeError):
            gs.DryBackend("dry", **wrong)
    _, a, *_ = small()
    with pytest.raises(TypeError):
        gs.bind_resident(a, gs.DryBackend("dry").alloc_buffer(1024), 2.7)
    with pytest.raises(TypeError):
        gs.CpuBackend(1, memory=1.5)


def test_required_methods_say_that_they_are_missing():
    bare = gs.Backend("bare")
    with pytest.raises(NotImplementedError, match="'bare'"):
        bare.alloc_buffer(8)
    with pytest.raises(NotImplementedError, match="'bare'"):
        bare.graph_compute(gs.GraphView(()))
    buffer = gs.Buffer(bare, 8)
    with pytest.raises(gs.BackendError, match="'bare'"):
        buffer.write(0, memoryview(b"x"))
    with pytest.raises(gs.BackendError, match="'bare'"):
        buffer.read(0, memoryview(bytearray(1)))


def test_a_hook_that_raises_leaves_nothing_placed():
    closed = []

    class Failing(NumpyBuffer):
        def init_tensor(self, tensor):
            if tensor.name == "b":
                raise RuntimeError("hook")

        def free(self):
            closed.append(self)

    class FailingBackend(Minimal):
        def alloc_buffer(self, size):
            return Failing(self, size)

    ctx, a, b, out = small()
    with pytest.raises(RuntimeError, match="hook"):
        FailingBackend("failing").alloc_tensors(ctx)
    assert a.buffer is b.buffer is out.buffer is None and len(closed) == 1
    # They have not lost memory that they had: they never had any.
    plan = gs.Scheduler([gs.DryBackend("other")]).plan(gs.Graph(out))
    assert plan.offset_of(a) is not None


def test_a_context_larger_than_one_buffer_is_refused_whatever_the_backend_would_give():
    backend = Minimal("minimal")
    backend.max_buffer_size = 300
    ctx, a, _, _ = small()
    with pytest.raises(gs.OutOfMemory, match="need 384 bytes in one buffer; backend 'minimal' allows 300"):
        backend.alloc_tensors(ctx)
    assert a.buffer is None


def test_hooks_see_each_placed_tensor_once():
    ctx, a, b, out = small()
    ctx.view_1d(a, 4)
    buffer = Minimal("minimal").alloc_tensors(ctx)
    assert buffer.log == [("init", a), ("init", b), ("init", out)]
    buffer.close()
    buffer.close()
    assert buffer.log[-1:] == ["closed"] and buffer.log.count("closed") == 1


def test_a_dry_backend_takes_data_and_gives_none():
    ctx, a, b, out = small()
    dry = gs.DryBackend("dry")
    dry.alloc_tensors(ctx)
    a.set(random(RNG, 8, 4))
    dry.graph_compute(gs.Graph(out))
    with pytest.raises(gs.BackendError, match="'dry'"):
        out.numpy()


def test_copies_try_the_destination_then_the_source_then_the_host():
    calls = []

    class Talking(Minimal):
        able = ()

        def cpy_tensor_from(self, src, dst):
            calls.append((self.name, "from"))
            return "from" in self.able

        def cpy_tensor_to(self, src, dst):
            calls.append((self.name, "to"))
            return "to" in self.able

        def synchronize(self):
            calls.append((self.name, "synchronize"))

        def set_tensor_async(self, tensor, data, offset=0):
            calls.append((self.name, "set"))

        def get_tensor_async(self, tensor, out, offset=0):
            calls.append((self.name, "get"))

    src, dst = Talking("src"), Talking("dst")
    ctx, a, b, out = small()
    gs.bind_resident(a, src.alloc_buffer(128), 0)
    gs.bind_resident(b, dst.alloc_buffer(128), 0)
    expected = {
        ((), ("from",)): [("dst", "from"), ("dst", "synchronize")],
        (("to",), ()): [("dst", "from"), ("src", "to"), ("src", "synchronize")],
        ((), ()): [
            ("dst", "from"), ("src", "to"), ("src", "get"), ("src", "synchronize"), ("dst", "set"),
            ("dst", "synchronize"),
        ],
    }
    for (src.able, dst.able), want in expected.items():
        calls.clear()
        gs.tensor_copy(a, b)
        assert calls == want
    calls.clear()
    gs.tensor_copy(a, a)
    assert not calls


def test_exceptions_of_a_python_backend_reach_the_caller():
    class Broken(Minimal):
        def graph_compute(self, graph):
            raise KeyError("compute")

        def cpy_tensor_from(self, src, dst):
            raise KeyError("copy")

        def alloc_size(self, tensor):
            raise KeyError("alloc_size")

    class BrokenBuffer(NumpyBuffer):
        def write(self, offset, data):
            raise KeyError("write")

    broken = Broken("broken")
    ctx, a, b, out = small()
    with pytest.raises(KeyError, match="alloc_size"):
        broken.alloc_tensors(ctx)
    buffer = BrokenBuffer(broken, 512)
    for i, t in enumerate((a, b, out)):
        gs.bind_resident(t, buffer, 128 * i)
    for use, what in (
        (lambda: broken.graph_compute(gs.Graph(out)), "compute"),
        (lambda: gs.tensor_copy(a, b), "copy"),
        (lambda: a.set(np.zeros((4, 8))), "write"),
    ):
        with pytest.raises(KeyError, match=what):
            use()


def test_larger_alloc_sizes_are_respected():
    class Padded(Minimal):
        def alloc_size(self, tensor):
            return tensor.nbytes + 100

    padded = Padded("padded")
    ctx, a, b, out = small()
    assert padded.alloc_tensors_size(ctx) == 3 * 256
    padded.alloc_tensors(ctx)
    assert (a.offset, b.offset, out.offset) == (0, 256, 512)


def test_the_default_plan_is_the_graph():
    ctx, a, b, out = small()
    graph = gs.Graph(out)
    assert Minimal("minimal").graph_plan_create(graph) is graph


@pytest.mark.parametrize("make", [TestCpu, TestNumpyKernels, TestGgml, TestCuda, TestMinimal, TestQueued])
def test_computing_without_addresses_names_the_tensor(make):
    if make is TestGgml and not ggml_here.IS_HERE:
        pytest.skip("needs ggml's libraries")
    ctx, a, b, out = small()
    with make().new_backend() as backend, pytest.raises(gs.PlacementError, match="'sum'.*no address"):
        backend.graph_compute(gs.Graph(out))


REAL = (TestCpu, TestGgml, TestCuda, TestMinimal, TestQueued)


@pytest.mark.skipif(not ggml_here.IS_HERE, reason="needs ggml's libraries")
@pytest.mark.parametrize("there", REAL)
@pytest.mark.parametrize("here", REAL)
def test_copies_between_any_two(here, there):
    with here().new_backend() as device, there().new_backend() as source:
        _, a, b, _ = small()
        gs.bind_resident(a, source.alloc_buffer(128), 0)
        gs.bind_resident(b, device.alloc_buffer(1024), device.alignment)
        x = random(RNG, 8, 4)
        a.set(x)
        gs.tensor_copy(a, b)
        assert np.array_equal(b.numpy(), x)
        gs.tensor_copy(b, a)
        assert np.array_equal(a.numpy(), x)
