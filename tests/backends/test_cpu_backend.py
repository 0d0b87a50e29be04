"""Memory, buffers over the caller's memory, plans, threads and errors of the CPU backend."""

import ctypes
import gc
import mmap
import tracemalloc
from functools import partial

import devices
import numpy as np
import pytest
from op_results import place, random, raw

import ggml_sched as gs
from ggml_sched.backends.cpu import CpuBuffer
from ggml_sched.backends.cpu.oracle.registry import KERNELS, Kernel
from ggml_sched.testing.contract.cases import CASES

RNG = np.random.default_rng(8)


def chain(type: str = "f32", n: int = 300):
    """(context, graph, inputs): a few ops large enough to be cut into parts."""
    ctx = gs.Context()
    w, x, f = ctx.tensor(type, (n, 2 * n), "w"), ctx.tensor("f32", (n, n), "x"), ctx.tensor("f32", (n,), "f")
    h = ctx.mul(ctx.rms_norm(x, 1e-5), f)
    out = ctx.soft_max(ctx.silu(ctx.mul_mat(w, h)))
    return ctx, gs.Graph(out), {w: random(RNG, n, 2 * n), x: random(RNG, n, n), f: random(RNG, n)}


def set_all(values) -> None:
    for tensor, array in values.items():
        tensor.set(array)


# -- memory -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 1 << 20])
def test_buffers_are_real_aligned_zeroed_memory(size):
    with gs.CpuBackend() as backend:
        assert backend.alignment == 64 and backend.is_host and backend.is_cpu
        buffer = backend.alloc_buffer(size)
        assert buffer.base % 64 == 0 and buffer.size == size and buffer.memory.nbytes == size
        assert not buffer.memory.any() and (size == 0 or buffer.memory.ctypes.data == buffer.base)
        if size:
            buffer.write(size - 1, memoryview(b"\x07"))
            assert ctypes.c_ubyte.from_address(buffer.base + size - 1).value == 7
            out = bytearray(1)
            buffer.read(size - 1, memoryview(out))
            assert out == b"\x07"
        buffer.clear(3)
        assert (buffer.memory == 3).all()


def test_memory_limit():
    backend = gs.CpuBackend(memory=1000)
    first = backend.alloc_buffer(600)
    with pytest.raises(gs.OutOfMemory, match="500 bytes needed, 400 of 1000") as caught:
        backend.alloc_buffer(500)
    assert (caught.value.backend, caught.value.needed, caught.value.available) == ("CPU", 500, 400)
    first.close()
    first.close()
    assert backend.used == 0
    backend.alloc_buffer(1000).close()


@pytest.mark.parametrize("make", [gs.CpuBackend, gs.Store, partial(gs.DryBackend, "dry")], ids=["cpu", "store", "dry"])
def test_a_buffer_that_is_dropped_without_a_close_counts_no_longer(make):
    with make(memory=1000) as backend:
        kept, dropped = backend.alloc_buffer(100), backend.alloc_buffer(600)
        assert backend.used == 700
        del dropped
        gc.collect()
        assert backend.used == 100 and backend.memory_available() == 900
        again = backend.alloc_buffer(900)
        again.me = again                # collected in a cycle
        del again
        gc.collect()
        assert backend.used == 100
        kept.close()
        assert backend.used == 0


@pytest.mark.parametrize("has_hash", [True, False])
def test_equal_buffers_are_counted_each(has_hash):
    class Equal(CpuBuffer):
        def __eq__(self, other):
            return isinstance(other, Equal)

        __hash__ = (lambda self: 1) if has_hash else None

    class Backend(gs.CpuBackend):
        buffer_class = Equal

    with Backend(1) as backend:
        first, second, dropped = (backend.alloc_buffer(size) for size in (100, 200, 400))
        assert backend.used == 700
        first.close()
        assert backend.used == 600
        del dropped
        gc.collect()
        assert backend.used == 200
        second.close()
        assert backend.used == 0


@pytest.mark.parametrize("size", [1 << 60, (1 << 63) - 1])
def test_more_than_there_is(size):
    backend = gs.CpuBackend()
    with pytest.raises(gs.OutOfMemory) as caught:
        backend.alloc_buffer(size)
    assert caught.value.needed == size and backend.used == 0
    with pytest.raises(ValueError):
        backend.alloc_buffer(-1)


def test_a_closed_buffer_raises_and_old_arrays_stay_valid():
    backend = gs.CpuBackend()
    ctx = gs.Context()
    t = ctx.tensor("f32", (4,), "t")
    buffer = backend.alloc_tensors(ctx)
    t.set(np.arange(4))
    view = buffer.memory[:16].view(np.float32)
    buffer.close()
    gc.collect()
    assert view.tolist() == [0, 1, 2, 3]
    for use in (
        lambda: buffer.memory,
        lambda: buffer.write(0, memoryview(b"x")),
        lambda: buffer.clear(),
        lambda: buffer.read(0, memoryview(bytearray(1))),
    ):
        with pytest.raises(gs.BackendError, match="closed"):
            use()
    with pytest.raises(gs.PlacementError, match="'t'"):
        t.numpy()
    with pytest.raises(gs.PlacementError, match="'t'"):
        backend.set_tensor(t, b"1234")


@pytest.mark.parametrize("offset, size", [(-1, 1), (9, 1), (8, 1), (0, 9), (1 << 62, 1)])
def test_ranges_outside_a_buffer(offset, size):
    buffer = gs.CpuBackend().alloc_buffer(8)
    with pytest.raises(gs.BackendError, match="outside"):
        buffer.write(offset, memoryview(bytes(size)))
    with pytest.raises(gs.BackendError, match="outside"):
        buffer.read(offset, memoryview(bytearray(size)))


# -- the caller's memory ------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(64, np.float32),
        lambda: np.zeros((8, 8), np.float32),
        lambda: np.zeros(128, np.float16),
        lambda: bytearray(256),
        lambda: mmap.mmap(-1, 256),
        lambda: (ctypes.c_float * 64)(),
        lambda: memoryview(bytearray(256)),
    ],
    ids=["f32", "2-d", "f16", "bytearray", "mmap", "ctypes", "memoryview"],
)
def test_buffer_over_the_callers_memory(make):
    backend, source = gs.CpuBackend(), make()
    buffer = backend.buffer_from_ptr(source)
    assert isinstance(buffer, CpuBuffer) and buffer.size == 256 and buffer.writable and backend.used == 0
    buffer.write(4, memoryview(np.float32([1.5])))
    seen = (
        np.frombuffer(source, np.uint8)
        if not isinstance(source, np.ndarray)
        else source.reshape(-1).view(np.uint8)
    )
    assert seen[4:8].view(np.float32)[0] == 1.5 and seen.ctypes.data == buffer.base
    assert backend.buffer_from_ptr(source, 100).size == 100
    with pytest.raises(ValueError, match="257 bytes of memory that holds 256"):
        backend.buffer_from_ptr(source, 257)
    with pytest.raises(ValueError):
        backend.buffer_from_ptr(source, -1)


def test_buffer_over_an_address():
    backend, block = gs.CpuBackend(), np.arange(100, dtype=np.uint8)
    buffer = backend.buffer_from_ptr(block.ctypes.data + 3, 50)
    assert buffer.base == block.ctypes.data + 3 and buffer.memory[0] == 3
    buffer.close()
    assert block[3] == 3  # never freed
    for bad in (lambda: backend.buffer_from_ptr(block.ctypes.data), lambda: backend.buffer_from_ptr("text")):
        with pytest.raises(TypeError):
            bad()
    for address, size in ((0, 5), (-5, 5), (1 << 64, 1), (4096, -1), (4096, 1 << 63)):
        with pytest.raises(ValueError):
            backend.buffer_from_ptr(address, size)
    assert backend.buffer_from_ptr(0, 0).size == 0


def test_arrays_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        gs.CpuBackend().buffer_from_ptr(np.zeros((4, 4))[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        gs.CpuBackend().buffer_from_ptr(memoryview(bytearray(8))[::2])


def test_the_object_is_kept_alive_and_pinned():
    backend = gs.CpuBackend()
    source = bytearray(range(64))
    buffer = backend.buffer_from_ptr(source)
    with pytest.raises(BufferError):
        source.append(1)
    buffer.close()
    gc.collect()
    source.append(1)


def test_read_only_weights(tmp_path):
    path = tmp_path / "weights"
    x = random(RNG, 16, 4)
    path.write_bytes(x.tobytes())
    ctx = gs.Context()
    w, v = ctx.tensor("f32", (16, 4), "w"), ctx.tensor("f32", (16, 2), "v")
    out, into = ctx.mul_mat(w, v), ctx.scale(w, 2.0, inplace=True)
    backend = gs.CpuBackend()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    buffer = backend.buffer_from_ptr(mapped, usage="weights")
    gs.bind_resident(w, buffer, 0)
    rest = backend.alloc_tensors(ctx)
    assert not buffer.writable
    y = random(RNG, 16, 2)
    v.set(y)
    backend.graph_compute(gs.Graph(out))
    np.testing.assert_allclose(out.numpy(), y @ x.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(gs.BackendError, match="read-only"):
        w.set(x)
    with pytest.raises(gs.BackendError, match="read-only"):
        backend.graph_compute(gs.Graph(into))
    with pytest.raises(gs.BackendError, match="read-only"):
        buffer.clear()
    with pytest.raises(BufferError):
        mapped.close()
    buffer.close()
    rest.close()
    gc.collect()  # the tracebacks of the errors above hold views of the mapping
    mapped.close()


# -- computing ----------------------------------------------------------------------


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
def test_plans_and_threads_change_no_bit(type):
    ctx, graph, values = chain(type, 320)
    out, seen = graph.nodes[-1], set()
    for n_threads in (1, 2, 5):
        with gs.CpuBackend(n_threads) as backend:
            place(ctx, backend, 64 * n_threads, 0xAA)
            set_all(values)
            backend.graph_compute(graph)
            seen.add(raw(out))
            plan = backend.graph_plan_create(graph)
            for threads in (n_threads, 3, 8, 1, 4, 4):
                backend.set_n_threads(threads)
                assert backend.n_threads == threads
                out.set(np.zeros(out.n_elements))
                backend.graph_plan_compute(plan)
                seen.add(raw(out))
    assert len(seen) == 1


def test_all_plans_of_a_backend_share_work_memory_of_the_size_that_the_largest_needs():
    ctx, graph, values = chain("f16")
    backend = gs.CpuBackend(1)
    backend.alloc_tensors(ctx)
    set_all(values)
    assert backend._work.held == 0
    plans = [backend.graph_plan_create(graph) for _ in range(3)]
    for plan in plans:
        backend.graph_plan_compute(plan)
    backend.graph_compute(graph)
    assert backend._work.held == plans[0].work_size > 64
    assert backend._work.held == backend.host_work(graph.nodes)
    small, smaller, less = chain("f16", 32)
    backend.alloc_tensors(small)
    set_all(less)
    backend.graph_compute(smaller)
    assert backend._work.held == plans[0].work_size
    backend.close()
    assert backend._work.held == 0


def test_a_plan_whose_buffer_is_closed_raises():
    ctx, graph, values = chain()
    backend = gs.CpuBackend(1)
    buffer = backend.alloc_tensors(ctx)
    plan = backend.graph_plan_create(graph)
    buffer.close()
    with pytest.raises(gs.PlacementError, match="'CPU'.*closed"):
        backend.graph_plan_compute(plan)
    with pytest.raises(gs.PlacementError, match="no address"):
        backend.graph_compute(graph)
    with pytest.raises(gs.PlacementError, match="no address"):
        backend.graph_plan_create(graph)
    backend.graph_plan_free(plan)
    backend.graph_plan_free(plan)
    with pytest.raises(gs.BackendError, match="freed"):
        backend.graph_plan_compute(plan)


@pytest.mark.parametrize("method, calls", [("graph_compute", 1), ("compute_node", 5)])
@pytest.mark.parametrize("mixed_in", [False, True])
def test_what_a_subclass_overrides_to_compute_is_called(method, calls, mixed_in):
    seen = []

    def count(self, what):
        seen.append(what)
        if method == "graph_compute":
            gs.CpuBackend.graph_compute(self, what)

    if mixed_in:
        Counted = type("Counted", (type("Counting", (), {method: count}), gs.CpuBackend), {})
    else:
        Counted = type("Counted", (gs.CpuBackend,), {method: count})
    assert not Counted.has_graph_plans and gs.CpuBackend.has_graph_plans
    ctx, graph, values = chain()
    with Counted(1) as backend, gs.Scheduler([backend]) as scheduler:
        backend.alloc_tensors(ctx, usage="any")
        set_all(values)
        for n in (1, 2):
            scheduler.compute(graph)
            assert len(seen) == n * calls


def test_a_subclass_with_graph_plans_of_its_own_computes_by_them():
    class Inherits(gs.CpuBackend):
        def graph_compute(self, graph):
            raise AssertionError("the graph plan computes")

    class Plans(Inherits):
        def graph_plan_compute(self, plan):
            gs.CpuBackend.graph_plan_compute(self, plan)

    class Named(Plans):
        pass

    assert not Inherits.has_graph_plans and Plans.has_graph_plans and Named.has_graph_plans
    ctx, graph, values = chain()
    with Named(1) as backend, gs.Scheduler([backend]) as scheduler:
        backend.alloc_tensors(ctx)
        set_all(values)
        scheduler.compute(graph)


def test_a_graph_may_be_a_view_of_nodes_or_a_list():
    ctx, graph, values = chain()
    backend = gs.CpuBackend(1)
    backend.alloc_tensors(ctx)
    set_all(values)
    backend.graph_compute(graph)
    want = raw(graph.nodes[-1])
    for form in (gs.GraphView(graph.nodes), list(graph.nodes)):
        graph.nodes[-1].set(np.zeros(graph.nodes[-1].n_elements))
        backend.graph_compute(form)
        assert raw(graph.nodes[-1]) == want
    backend.graph_compute([])
    backend.graph_plan_compute(backend.graph_plan_create([]))


def test_tensors_of_another_backend_are_named(ctx):
    a, b = ctx.tensor("f32", (4,), "a"), ctx.tensor("f32", (4,), "b")
    node = ctx.set_name(ctx.add(a, b), "sum")
    here, there = gs.CpuBackend(1, "here"), gs.CpuBackend(1, "there")
    gs.bind_resident(b, there.alloc_buffer(64), 0)
    here.alloc_tensors(ctx)
    for run in (here.graph_compute, here.graph_plan_create):
        with pytest.raises(gs.PlacementError, match="'here'.*'sum'.*'b'.*'there'"):
            run(gs.Graph(node))

    sharing = devices.device(
        name="sharing", answers={"supports_buffer": lambda inherited, buffer: buffer.backend.is_host})
    a.set(np.ones(4))
    b.set(np.ones(4))
    sharing.graph_compute(gs.Graph(node))
    assert node.numpy().tolist() == [2, 2, 2, 2]


def test_a_failing_kernel_is_named_and_chained(monkeypatch):
    def failing(error):
        def compute(of):
            raise error

        return Kernel(compute, 1)

    ctx, graph, values = chain()
    backend = gs.CpuBackend(1, kernels="numpy")
    backend.alloc_tensors(ctx)
    for error, kind in (
        (ZeroDivisionError("why"), gs.BackendError),
        (MemoryError(), gs.OutOfMemory),
        (gs.BackendError("mine"), gs.BackendError),
    ):
        monkeypatch.setitem(KERNELS, "UNARY:SILU", failing(error))
        plan = backend.graph_plan_create(graph)
        for run in (lambda: backend.graph_compute(graph), lambda plan=plan: backend.graph_plan_compute(plan)):
            with pytest.raises(kind) as caught:
                run()
            if not isinstance(error, gs.Error):
                assert "'CPU'" in str(caught.value) and "UNARY:SILU" in str(caught.value)
                assert caught.value.__cause__ is error
    monkeypatch.undo()
    backend.graph_compute(graph)


def test_elements_without_end_in_few_bytes_are_refused(ctx):
    """Strides of 0 describe any number of elements; computing them would not end."""
    x = ctx.tensor("f32", 4, "x")
    views = [ctx.view_4d(x, *ne, 0, 0, 0) for ne in ((4, 2**40, 1, 1), (4, 2**20, 2**20, 2**18))]
    views.append(ctx.restore("VIEW", "f32", (2**31 - 1, 2**30, 1, 1), (0, 0, 0, 0), (x,), x))
    nodes = [ctx.sum(v) for v in views]
    for v in views:
        for write in (lambda v=v: ctx.cpy(v, v), lambda v=v: ctx.scale(v, 2.0, inplace=True)):
            with pytest.raises(gs.GraphError, match="share bytes"):
                write()
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        x.set(np.ones(4))
        for node in nodes:
            for run in (backend.graph_compute, backend.graph_plan_create):
                with pytest.raises(gs.BackendError, match=r"'CPU'.*node.*tensor.*elements in 1?[46] bytes"):
                    run(gs.GraphView([node]))
        for v in views:
            for call in (v.numpy, lambda v=v: v.set(np.broadcast_to(np.float32(0), v.ne[::-1]))):
                with pytest.raises(gs.BackendError, match=r"('x|tensor).*elements in 1?[46] bytes"):
                    call()
        some = ctx.view_2d(x, 4, 1 << 16, 0)
        assert some.numpy().sum() == 4 << 16, "elements may share bytes, as those of a broadcast do"


def test_an_array_that_the_host_cannot_hold_is_a_typed_error(ctx, monkeypatch):
    x = ctx.tensor("f32", 4, "x")
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)

        def full(*args, **kwargs):
            raise MemoryError

        monkeypatch.setattr(np, "array", full)
        with pytest.raises(gs.OutOfMemory, match="'x'.* 4 elements"):
            x.numpy()
        monkeypatch.undo()
        assert x.numpy().tolist() == [0] * 4


def test_another_number_of_threads_is_checked_against_the_bound_of_host_memory():
    ctx, graph, _ = chain("q8_0", 320)
    with gs.CpuBackend(1) as backend:
        place(ctx, backend, 64, 0)
        enough = backend.host_work(graph.nodes)
        with gs.Scheduler([backend], host_work={backend: enough}) as scheduler:
            scheduler.alloc(graph)
            backend.set_n_threads(4)
            assert backend.host_work(graph.nodes) > enough
            with pytest.raises(gs.OutOfMemory):
                scheduler.alloc(graph)
            backend.set_n_threads(1)
            scheduler.alloc(graph)


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_numbers_of_threads_out_of_range(n):
    with pytest.raises(ValueError):
        gs.CpuBackend(n)
    backend = gs.CpuBackend()
    assert backend.n_threads >= 1
    with pytest.raises(ValueError):
        backend.set_n_threads(n)
    with pytest.raises(TypeError):
        backend.set_n_threads(1.5)


def test_copies_between_cpu_backends_leave_the_gaps_of_a_view_alone(ctx):
    a, b = ctx.tensor("f32", (4, 4)), ctx.tensor("f32", (4, 4))
    left, right = (ctx.view_2d(t, 2, 4, t.nb[1], 4) for t in (a, b))
    one, two = gs.CpuBackend(1, "one"), gs.CpuBackend(1, "two")
    gs.bind_resident(a, one.alloc_buffer(64), 0)
    gs.bind_resident(b, two.alloc_buffer(64), 0)
    x, y = random(RNG, 4, 4), random(RNG, 4, 4)
    a.set(x)
    b.set(y)
    assert two.cpy_tensor_from(left, right) and one.cpy_tensor_to(left, right)
    y[:, 1:3] = x[:, 1:3]
    assert np.array_equal(b.numpy(), y)
    assert not two.cpy_tensor_from(left, b)


def test_memory_at_any_address_gives_the_same_bits():
    """The caller's memory may start anywhere, even between the multiples of an element's size."""
    ctx, graph, values = chain("f16", 65)
    seen = set()
    for shift in (0, 1, 4, 32):
        backend = gs.CpuBackend(1)
        memory = np.zeros(1 << 20, np.uint8)
        buffer = backend.buffer_from_ptr(memory[-memory.ctypes.data % 64 + shift :])
        at = 0
        for tensor in ctx.tensors:
            if tensor.view_src is None:
                gs.bind_resident(tensor, buffer, at)
                at += -(-tensor.nbytes // 64) * 64
        set_all(values)
        backend.graph_compute(graph)
        seen.add(raw(graph.nodes[-1]))
    assert len(seen) == 1


def test_a_node_that_no_kernel_computes_is_named(ctx, monkeypatch):
    monkeypatch.delitem(KERNELS, "SCALE")
    out = ctx.set_name(ctx.scale(ctx.tensor("f32", (4,), "x"), 2.0), "twice")
    with gs.CpuBackend(1, kernels="numpy") as backend:
        backend.alloc_tensors(ctx)
        with pytest.raises(gs.UnsupportedOp, match="twice"):
            backend.graph_compute(gs.Graph(out))


def test_calls_on_arrays_between_compiled_ones_are_made_in_their_turn():
    """Rows that begin inside an element have no compiled kernel."""
    found = []
    for kernels in ("compiled", "numpy"):
        ctx = gs.Context()
        x = ctx.tensor("f32", (8,), "x")
        middle = ctx.cont(ctx.view_2d(ctx.scale(x, 2.0), 2, 2, 10, 0))
        out = ctx.scale(middle, 3.0)
        with gs.CpuBackend(1, kernels=kernels) as backend:
            backend.alloc_tensors(ctx)
            x.set(np.arange(1, 9, dtype=np.float32))
            plan = backend.graph_plan_create(gs.Graph(out))
            assert plan.n_compiled == (2 if kernels == "compiled" else 0)
            backend.graph_plan_compute(plan)
            found.append(out.numpy().tobytes())
    assert found[0] == found[1] and any(found[0])


@pytest.mark.parametrize("make", [gs.DryBackend, lambda name, **bound: gs.CpuBackend(1, name, **bound)])
def test_a_bound_in_bytes_that_is_none_names_the_backend(make):
    with pytest.raises(TypeError, match="backend 'D': memory is a number of bytes, not '1G'"):
        make("D", memory="1G")
    with pytest.raises(ValueError, match="backend 'D': memory of -1 bytes is negative"):
        make("D", memory=-1)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_bound_of_host_memory_holds_for_every_op(n_threads):
    """Of compiled calls it is exact; a node of the oracle has a bound from its bytes."""
    with gs.CpuBackend(n_threads) as backend:
        for case in CASES:
            leafs, out = case.made()
            graph = gs.Graph(out)
            bound = backend.host_work(graph.nodes)
            with backend.alloc_tensors(leafs.ctx):
                plan = backend.graph_plan_create(graph)
                n_nodes = sum(node.computes for node in graph.nodes)
                assert plan.work_size <= bound or not n_nodes, case.name
                if plan.n_compiled == n_nodes:
                    assert plan.work_size == bound, case.name
                backend.graph_plan_free(plan)


def test_host_work_counts_tables_of_angles_once_for_all_nodes_and_plans_that_share_them(ctx):
    n, half = 300, 32
    x, at = ctx.tensor("f32", (2 * half, 1, n), "x"), ctx.tensor("i32", (n,), "at")
    one = gs.Graph(ctx.rope(ctx.rope(x, at, 2 * half), at, 2 * half))
    two = gs.Graph(ctx.rope(ctx.rope(x, at, 2 * half), at, 2 * half, freq_base=500.0))
    with gs.CpuBackend(1) as backend, backend.alloc_tensors(ctx, usage="any"):
        table = n * 2 * half * 4
        assert backend.host_work(two.nodes) == backend.host_work(one.nodes) + table > 2 * table
        plans = [backend.graph_plan_create(graph) for graph in (one, two, two)]
        for plan in plans:
            backend.graph_plan_compute(plan)
            assert backend.host_work_held == plan.work_size
        assert backend.host_work_held == backend.host_work(two.nodes)


def test_host_work_counts_the_table_of_positions_that_a_node_has_rewritten(ctx):
    n, half = 300, 32
    x = ctx.tensor("f32", (2 * half, 1, n), "x")
    first, second, other = (ctx.tensor("i32", (n,), name) for name in ("first", "second", "other"))
    nodes = (ctx.rope(x, first, 2 * half), ctx.rope(x, second, 2 * half), ctx.cpy(other, first),
             ctx.rope(x, first, 2 * half))
    graph = gs.Graph(*nodes)
    with gs.CpuBackend(1) as backend, backend.alloc_tensors(ctx, usage="any"):
        backend.graph_compute(graph)
        assert backend.host_work_held == backend.host_work(graph.nodes) > 2 * n * 2 * half * 4


def test_host_work_counts_the_copies_of_sources_that_overlap_the_result(ctx):
    x = ctx.tensor("f32", (1000, 8), "x")
    rows = [ctx.view_2d(x, 1000, 7, x.nb[1], k * x.nb[1]) for k in (0, 1)]
    shift, same = gs.Graph(ctx.cpy(*rows)), gs.Graph(ctx.cpy(rows[0], rows[0]))
    with gs.CpuBackend(1) as backend, backend.alloc_tensors(ctx, usage="any"):
        x.set(np.arange(8000, dtype=np.float32))
        plans = [backend.graph_plan_create(shift) for _ in range(2)]
        backend.graph_plan_compute(plans[0])
        assert (x.numpy() == np.arange(8000).reshape(8, 1000)[[0, *range(7)]]).all()
        nbytes, work = rows[0].nbytes, plans[0].work_size
        assert backend.host_work(same.nodes) <= work < nbytes
        assert backend.host_work(shift.nodes) == work + nbytes
        for n_left, plan in zip((2, 1), plans, strict=True):
            assert backend.host_work_held == work + n_left * nbytes
            backend.graph_plan_free(plan)
        assert backend.host_work_held == work


def check_host_work(backend, node):
    """The host work of a node's graph is no less than what a compute takes, which is more than 1 MiB."""
    graph = gs.Graph(node)
    backend.graph_compute(graph)
    tracemalloc.start()
    backend.graph_compute(graph)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert backend.host_work(graph.nodes) >= peak > 1 << 20, node


def test_host_work_counts_elements_that_share_memory(ctx):
    """The oracle copies rows that a view repeats: they take as much as rows that each have memory of their own."""
    n = 1024
    row, half, query = ctx.tensor("f32", (n,)), ctx.tensor("f16", (n,)), ctx.tensor("f32", (64, 1, 4))
    rows, keys = ctx.view_2d(row, n, n, 0), ctx.view_3d(half, 64, 4096, 4, 0, 0)
    blocks = ctx.view_3d(ctx.tensor("q4_0", (n,)), n, 1, n, n // 32 * 18, 0)
    nodes = [ctx.sum(rows), ctx.sum_rows(rows), ctx.mean(rows), ctx.argmax(rows), ctx.top_k(rows, 1),
             ctx.mul_mat(ctx.tensor("f32", (n, 1)), rows), ctx.mul_mat(blocks, ctx.view_3d(row, n, 1, n, 4 * n, 0)),
             ctx.flash_attn_ext(query, keys, keys)]
    with gs.CpuBackend(1, kernels="numpy") as backend, backend.alloc_tensors(ctx, usage="any"):
        for node in nodes:
            check_host_work(backend, node)
        endless = ctx.view_4d(row, n, 1 << 20, 1 << 20, 1 << 10, 0, 0, 0)
        assert backend.host_work((ctx.sum(endless),)) == 1 << 62


def test_host_work_counts_what_the_oracle_takes(ctx):
    """Of a node that only it computes, and of every node of a backend without compiled kernels."""
    w, x = ctx.tensor("q4_0", (1024, 1024)), ctx.tensor("f32", (1024, 8))
    product = ctx.mul_mat(w, x)
    q = ctx.tensor("f32", (1000, 2, 1))        # transposed: no compiled kernel reads it
    k, v = (ctx.tensor("f32", (2, 1000, 1)) for _ in range(2))
    attention = ctx.flash_attn_ext(ctx.permute(q, 1, 0, 2, 3), k, v)
    with gs.CpuBackend(1, kernels="numpy") as backend, backend.alloc_tensors(ctx, usage="any"):
        for node in (product, attention):
            check_host_work(backend, node)
