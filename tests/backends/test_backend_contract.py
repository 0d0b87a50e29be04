"""One contract for every backend: what each slot does, and what its default does.

Runs over the CPU backend, ggml's (where the `ggml` package is installed), CUDA's on a fake device (where there is a C++
compiler), a dry one, and two written in Python alone: `Minimal` has only the methods that are required, `Queued` runs
copies late, as a device with a stream does.
"""

from __future__ import annotations

import cupy_devices
import numpy as np
import pytest
from op_results import random

import ggml_sched as gs
from ggml_sched.backends.cpu import run_nodes

RNG = np.random.default_rng(9)


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


def ggml_backend(**options):
    pytest.importorskip("ggml", reason="needs ggml-python")
    return gs.GgmlBackend(n_threads=2, **options)


def cuda_backend(**options):
    return cupy_devices.new(**options)


MAKERS = {
    "cpu": lambda: gs.CpuBackend(2),
    "cuda": cuda_backend,
    "ggml": ggml_backend,
    "minimal": lambda: Minimal("minimal"),
    "queued": Queued,
    "dry": lambda: gs.DryBackend("dry", 64),
}
REAL = [name for name in MAKERS if name != "dry"]


@pytest.fixture(params=MAKERS)
def backend(request):
    with MAKERS[request.param]() as made:
        yield made


@pytest.fixture(params=REAL)
def real(request):
    with MAKERS[request.param]() as made:
        yield made


def small():
    ctx = gs.Context("small")
    a, b = ctx.tensor("f32", (8, 4), "a"), ctx.tensor("f32", (8, 4), "b")
    return ctx, a, b, ctx.set_name(ctx.add(a, b), "sum")


# -- facts ----------------------------------------------------------------------------


def test_facts(backend):
    assert isinstance(backend.name, str) and backend.alignment & (backend.alignment - 1) == 0
    ctx, a, b, out = small()
    assert gs.get_backend(a) is None
    buffer = backend.alloc_tensors(ctx)
    assert gs.get_backend(a) is backend is a.backend and a.buffer is buffer and buffer.backend is backend
    assert backend.supports_buffer(buffer) and not backend.supports_buffer(
        gs.DryBackend("other").alloc_buffer(8)
    )
    assert backend.supports_op(out) and not backend.offload_op(out)
    assert isinstance(backend.inplace_sources("ADD"), int) and backend.inplace_sources("MUL_MAT") == 0
    assert backend.alloc_size(a) >= a.nbytes and buffer.alloc_size(a) == backend.alloc_size(a)


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


# -- memory ---------------------------------------------------------------------------


def test_alloc_tensors_places_everything_once(backend):
    ctx, a, b, out = small()
    view = ctx.view_1d(a, 8, 32)
    size = backend.alloc_tensors_size(ctx)
    buffer = backend.alloc_tensors(ctx, usage="any")
    assert buffer.size == size and buffer.usage == "any"
    spans = sorted((t.offset, t.offset + t.nbytes) for t in (a, b, out))
    assert all(start % backend.alignment == 0 for start, _ in spans) and spans[-1][1] <= size
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert view.buffer is buffer and view.offset == a.offset + 32
    assert backend.alloc_tensors_size(ctx) == 0
    late = ctx.tensor("f32", (4,))
    second = backend.alloc_tensors(ctx)
    assert late.buffer is second and a.buffer is buffer
    buffer.close()
    assert a.buffer is None and view.offset is None and late.buffer is second


@pytest.mark.parametrize(
    "make",
    [
        lambda: gs.CpuBackend(1, memory=300),
        lambda: ggml_backend(memory=300),
        lambda: cuda_backend(memory=300),
        lambda: gs.DryBackend("dry", memory=300),
        lambda: gs.DryBackend("dry", max_buffer_size=300),
    ],
)
def test_out_of_memory_changes_nothing(make):
    backend = make()
    ctx, a, b, out = small()
    with pytest.raises(gs.OutOfMemory) as caught:
        backend.alloc_tensors(ctx)
    assert caught.value.needed == 3 * max(128, backend.alignment)
    assert caught.value.available == 300 and caught.value.backend == backend.name
    assert a.buffer is b.buffer is out.buffer is None
    other = MAKERS["minimal"]()
    other.alloc_tensors(ctx)
    assert a.backend is other


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


def test_closing_twice(backend):
    buffer = backend.alloc_buffer(64)
    with buffer:
        assert not buffer.closed
    assert buffer.closed
    buffer.close()
    backend.close()
    backend.close()


# -- data -----------------------------------------------------------------------------


def test_set_and_get(real):
    ctx, a, b, out = small()
    real.alloc_tensors(ctx)
    x, y = random(RNG, 8, 4), random(RNG, 8, 4)
    real.set_tensor(a, x)
    real.set_tensor(b, y.tobytes())
    got = np.empty((4, 8), np.float32)
    real.get_tensor(a, got)
    assert np.array_equal(got, x) and np.array_equal(b.numpy(), y)
    real.set_tensor(a, np.float32([7, 8]), 20)
    part = bytearray(12)
    real.get_tensor(a, part, 16)
    assert np.frombuffer(part, np.float32).tolist() == [x.flat[4], 7, 8]
    real.set_tensor(a, b"", 128)
    real.get_tensor(a, bytearray(), 0)


def test_async_set_and_get_are_done_after_synchronize(real):
    ctx, a, b, out = small()
    real.alloc_tensors(ctx)
    x, got = random(RNG, 8, 4), bytearray(64)
    real.set_tensor_async(a, memoryview(x).cast("B"))
    real.set_tensor_async(a, memoryview(bytes(8)), 8)
    real.get_tensor_async(a, memoryview(got), 4)
    real.synchronize()
    x.flat[2:4] = 0
    assert bytes(got) == x.tobytes()[4:68]


@pytest.mark.parametrize("offset, size", [(-1, 4), (0, 129), (128, 1), (129, 0), (1 << 62, 4)])
def test_ranges_outside_a_tensor(backend, offset, size):
    ctx, a, b, out = small()
    backend.alloc_tensors(ctx)
    for move, data in ((backend.set_tensor, bytes(size)), (backend.get_tensor, bytearray(size))):
        with pytest.raises(ValueError, match="outside tensor 'a' of 128 bytes"):
            move(a, data, offset)


def test_tensors_without_an_address_or_elsewhere(backend):
    ctx, a, b, out = small()
    for move, data in ((backend.set_tensor, bytes(4)), (backend.get_tensor, bytearray(4))):
        with pytest.raises(gs.PlacementError, match="'a' has no address"):
            move(a, data)
    gs.DryBackend("elsewhere").alloc_tensors(ctx)
    for move, data in ((backend.set_tensor, bytes(4)), (backend.get_tensor, bytearray(4))):
        with pytest.raises(gs.PlacementError, match="'a' is on backend 'elsewhere'"):
            move(a, data)


def test_a_dry_backend_takes_data_and_gives_none():
    ctx, a, b, out = small()
    dry = gs.DryBackend("dry")
    dry.alloc_tensors(ctx)
    a.set(random(RNG, 8, 4))
    dry.graph_compute(gs.Graph(out))
    with pytest.raises(gs.BackendError, match="'dry'"):
        out.numpy()


def test_clear(real):
    buffer = real.alloc_buffer((1 << 20) + 5)
    buffer.clear(0x5A)
    out = bytearray(3)
    buffer.read((1 << 20) + 2, memoryview(out))
    assert out == b"ZZZ"


# -- copies between backends ------------------------------------------------------------


@pytest.mark.parametrize("there", REAL)
def test_copies(real, there):
    source, (_, a, b, _) = MAKERS[there](), small()
    gs.bind_resident(a, source.alloc_buffer(128), 0)
    gs.bind_resident(b, real.alloc_buffer(256), 64)
    x = random(RNG, 8, 4)
    a.set(x)
    gs.tensor_copy(a, b)
    assert np.array_equal(b.numpy(), x)
    gs.tensor_copy(b, a)
    gs.tensor_copy(a, a)
    assert np.array_equal(a.numpy(), x)


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
            ("dst", "from"),
            ("src", "to"),
            ("src", "get"),
            ("src", "synchronize"),
            ("dst", "set"),
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


def test_copies_need_equal_layouts_and_addresses(backend):
    ctx = gs.Context()
    a, b, c, d = (
        ctx.tensor(t, ne) for t, ne in (("f32", (8, 4)), ("f32", (4, 8)), ("f16", (8, 4)), ("f32", (8, 4)))
    )
    backend.alloc_tensors(ctx)
    free = ctx.tensor("f32", (8, 4), "free")
    for other in (b, c, ctx.transpose(b)):
        with pytest.raises(ValueError, match="layouts differ"):
            gs.tensor_copy(a, other)
    for pair in ((a, free), (free, a)):
        with pytest.raises(gs.PlacementError, match="'free' has no address"):
            gs.tensor_copy(*pair)
    assert d.buffer is not None


# -- computing --------------------------------------------------------------------------


def test_compute_and_plans(real):
    ctx, a, b, out = small()
    double = ctx.scale(out, 2.0)
    graph = gs.Graph(double)
    real.alloc_tensors(ctx)
    x, y = random(RNG, 8, 4), random(RNG, 8, 4)
    a.set(x)
    b.set(y)
    real.graph_compute(graph)
    assert np.array_equal(double.numpy(), 2 * (x + y))
    plan = real.graph_plan_create(graph)
    for factor in (1, 3):
        a.set(factor * x)
        real.graph_plan_compute(plan)
        assert np.array_equal(double.numpy(), np.float32(2) * (np.float32(factor) * x + y))
    real.graph_plan_free(plan)
    real.graph_compute(gs.GraphView(graph.nodes[1:]))
    real.graph_compute(gs.GraphView(()))


def test_the_default_plan_is_the_graph(real):
    if type(real) not in (Minimal, Queued):
        pytest.skip("has plans of its own")
    ctx, a, b, out = small()
    graph = gs.Graph(out)
    assert real.graph_plan_create(graph) is graph


def test_computing_without_addresses_raises(real):
    ctx, a, b, out = small()
    with pytest.raises(gs.PlacementError, match="'sum'.*no address"):
        real.graph_compute(gs.Graph(out))


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
