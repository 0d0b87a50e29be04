"""A suite of tests for authors of backends, which checks what each method of a backend must do.

It needs pytest.  In a test module of your own:

    from ggml_sched.testing.contract import BackendContract

    class TestMyBackend(BackendContract):
        def new_backend(self):
            return MyBackend()

The suite computes with those ops of `OPS` that the backend supports.  Tests of features that a backend lacks are
skipped: memory (on a backend for planning only), ops, a bound on memory (`limited_backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import ggml_sched as gs

__all__ = ["OPS", "BackendContract"]

OPS: dict[str, Callable[[gs.Context, gs.Tensor, gs.Tensor], gs.Tensor]] = {
    "ADD": lambda ctx, x, y: ctx.add(x, y),
    "SUB": lambda ctx, x, y: ctx.sub(x, y),
    "MUL": lambda ctx, x, y: ctx.mul(x, y),
    "DIV": lambda ctx, x, y: ctx.div(x, y),
    "SCALE": lambda ctx, x, y: ctx.scale(x, 0.5),
    "SQR": lambda ctx, x, y: ctx.sqr(x),
    "UNARY:RELU": lambda ctx, x, y: ctx.relu(x),
    "UNARY:SILU": lambda ctx, x, y: ctx.silu(x),
    "RMS_NORM": lambda ctx, x, y: ctx.rms_norm(x, 1e-5),
    "SOFT_MAX": lambda ctx, x, y: ctx.soft_max(x),
    "CONT": lambda ctx, x, y: ctx.cont(ctx.transpose(x)),
    "CPY": lambda ctx, x, y: ctx.cpy(x, y),
    "SUM_ROWS": lambda ctx, x, y: ctx.sum_rows(x),
    "MUL_MAT": lambda ctx, x, y: ctx.mul_mat(x, y),
}
"""{op: a function that makes a node of that op from two f32 tensors with ne = (8, 4)}; ops of one source use the
first."""

NE = (8, 4)
NBYTES = 128


class BackendContract:
    """Subclass it and define `new_backend`; the name of the subclass begins with `Test`."""

    max_nmse = 1e-5
    """The largest sum((a - b)**2) / sum(a**2) that is allowed, for results b and those of the NumPy kernels, a."""

    def new_backend(self) -> gs.Backend:
        """A backend to test; the test closes it."""
        raise NotImplementedError("define new_backend()")

    def limited_backend(self, memory: int) -> gs.Backend | None:
        """A backend with `memory` bytes for all its buffers; None: the backend has no such bound."""
        return None

    @pytest.fixture
    def backend(self) -> Iterator[gs.Backend]:
        with self.new_backend() as made:
            yield made

    @pytest.fixture
    def device(self, backend: gs.Backend) -> gs.Backend:
        """The backend, if its addresses are those of real memory; tests of a dry backend are skipped."""
        if not backend.has_memory:
            pytest.skip(f"{backend!r} has no memory")
        return backend

    # -- properties --------------------------------------------------------------------------

    def test_a_tensor_knows_its_backend(self, backend):
        assert isinstance(backend.name, str)
        assert backend.alignment >= 1 and backend.alignment & (backend.alignment - 1) == 0
        ctx, x, _, _ = _small(backend)
        assert gs.get_backend(x) is None
        buffer = backend.alloc_tensors(ctx)
        assert gs.get_backend(x) is backend is x.backend and x.buffer is buffer and buffer.backend is backend

    def test_it_reads_its_own_buffers_and_none_of_unknown_backends(self, backend):
        assert backend.supports_buffer(backend.alloc_buffer(64))
        assert not backend.supports_buffer(gs.DryBackend("unknown").alloc_buffer(64))

    def test_answers_about_ops_have_the_types_that_the_planner_expects(self, backend):
        ctx, x, _, out = _small(backend)
        assert isinstance(backend.supports_op(out), bool) and isinstance(backend.offload_op(out), bool)
        assert isinstance(backend.inplace_sources(out.op), int)
        assert backend.inplace_sources("MUL_MAT") == 0, "no kernel multiplies matrices in place"
        buffer = backend.alloc_tensors(ctx)
        assert backend.alloc_size(x) >= x.nbytes and buffer.alloc_size(x) == backend.alloc_size(x)

    # -- memory -------------------------------------------------------------------------

    def test_alloc_tensors_gives_each_tensor_an_aligned_range_of_its_own(self, backend):
        ctx, x, y, out = _small(backend)
        view = ctx.view_1d(x, 8, 32)
        size = backend.alloc_tensors_size(ctx)
        buffer = backend.alloc_tensors(ctx, usage="any")
        assert buffer.size >= size and buffer.usage == "any"
        roots = [t for t in ctx.tensors if t.view_src is None]
        spans = sorted((t.offset, t.offset + t.nbytes) for t in roots)
        assert all(start % backend.alignment == 0 for start, _ in spans) and spans[-1][1] <= buffer.size
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert view.buffer is buffer and view.offset == x.offset + 32
        assert backend.alloc_tensors_size(ctx) == 0

    def test_tensors_made_later_get_a_buffer_of_their_own(self, backend):
        ctx, x, _, _ = _small(backend)
        first = backend.alloc_tensors(ctx)
        later = ctx.tensor("f32", (4,))
        second = backend.alloc_tensors(ctx)
        assert later.buffer is second and x.buffer is first
        first.close()
        assert x.buffer is None and later.buffer is second

    def test_out_of_memory_changes_nothing(self):
        backend = self.limited_backend(300)
        if backend is None:
            pytest.skip("the backend has no bound on its memory")
        with backend:
            ctx, x, y, out = _small(backend)
            with pytest.raises(gs.OutOfMemory) as caught:
                backend.alloc_tensors(ctx)
            needed = sum(-(-t.nbytes // backend.alignment) * backend.alignment for t in (x, y, out))
            assert caught.value.needed == needed and caught.value.available == 300
            assert caught.value.backend == backend.name
            assert x.buffer is y.buffer is out.buffer is None
            with gs.CpuBackend(1, "another") as another:
                another.alloc_tensors(ctx)
                assert x.backend is another

    def test_closing_is_idempotent(self, backend):
        buffer = backend.alloc_buffer(64)
        with buffer:
            assert not buffer.closed
        assert buffer.closed
        buffer.close()
        backend.close()
        backend.close()

    # -- data ---------------------------------------------------------------------------

    def test_a_tensor_gives_the_bytes_that_were_set(self, device):
        ctx, x, y, _ = _small(device)
        device.alloc_tensors(ctx)
        a, b = _values(1), _values(2)
        device.set_tensor(x, a)
        device.set_tensor(y, b.tobytes())
        got = np.empty((4, 8), np.float32)
        device.get_tensor(x, got)
        assert np.array_equal(got, a) and np.array_equal(y.numpy(), b)

    def test_parts_of_a_tensor_are_set_and_fetched(self, device):
        ctx, x, _, _ = _small(device)
        device.alloc_tensors(ctx)
        a = _values(1)
        device.set_tensor(x, a)
        device.set_tensor(x, np.array([7, 8], np.float32), 20)
        part = bytearray(12)
        device.get_tensor(x, part, 16)
        assert np.frombuffer(part, np.float32).tolist() == [a.flat[4], 7, 8]
        device.set_tensor(x, b"", NBYTES)
        device.get_tensor(x, bytearray(), 0)

    def test_queued_sets_and_gets_are_done_in_order_after_synchronize(self, device):
        ctx, x, _, _ = _small(device)
        device.alloc_tensors(ctx)
        a, got = _values(1), bytearray(64)
        device.set_tensor_async(x, memoryview(a.tobytes()))
        device.set_tensor_async(x, memoryview(bytes(8)), 8)
        device.get_tensor_async(x, memoryview(got), 4)
        device.synchronize()
        a.flat[2:4] = 0
        assert bytes(got) == a.tobytes()[4:68]

    def test_an_event_passes_after_what_was_queued_before_it(self, device):
        ctx, x, y, _ = _small(device)
        device.alloc_tensors(ctx)
        a, got = _values(1), bytearray(NBYTES)
        event = device.event_new()
        device.set_tensor_async(x, memoryview(a.tobytes()))
        device.get_tensor_async(x, memoryview(got))
        device.event_record(event)
        device.event_synchronize(event)
        assert bytes(got) == a.tobytes()
        device.event_wait(event)
        device.set_tensor(y, a)
        assert np.array_equal(y.numpy(), a)

    @pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, NBYTES + 1), (NBYTES, 1), (NBYTES + 1, 0), (1 << 62, 4)])
    def test_ranges_outside_a_tensor_are_refused(self, backend, offset, size):
        ctx, x, _, _ = _small(backend)
        backend.alloc_tensors(ctx)
        for move, data in ((backend.set_tensor, bytes(size)), (backend.get_tensor, bytearray(size))):
            with pytest.raises(ValueError, match="outside tensor"):
                move(x, data, offset)

    def test_tensors_without_an_address_or_of_another_backend_are_refused(self, backend):
        ctx, x, _, _ = _small(backend)
        moves = ((backend.set_tensor, bytes(4)), (backend.get_tensor, bytearray(4)))
        for move, data in moves:
            with pytest.raises(gs.PlacementError, match="has no address"):
                move(x, data)
        gs.DryBackend("another").alloc_tensors(ctx)
        for move, data in moves:
            with pytest.raises(gs.PlacementError, match="is on backend 'another'"):
                move(x, data)

    def test_clear_fills_a_buffer_to_its_end(self, device):
        buffer = device.alloc_buffer((1 << 20) + 5)
        buffer.clear(0x5A)
        out = bytearray(3)
        buffer.read((1 << 20) + 2, memoryview(out))
        assert out == b"ZZZ"

    # -- copies -------------------------------------------------------------------------

    def test_tensors_are_copied_from_and_to_other_backends(self, device):
        with gs.CpuBackend(1, "host") as host, self.new_backend() as second:
            for other in (host, second):
                _, x, y, _ = _small(device)
                gs.bind_resident(x, other.alloc_buffer(NBYTES), 0)
                gs.bind_resident(y, device.alloc_buffer(4 * max(NBYTES, device.alignment)), 2 * device.alignment)
                a = _values(1)
                x.set(a)
                gs.tensor_copy(x, y)
                assert np.array_equal(y.numpy(), a)
                x.set(np.zeros_like(a))
                gs.tensor_copy(y, x)
                gs.tensor_copy(x, x)
                assert np.array_equal(x.numpy(), a)

    def test_copies_need_equal_layouts_and_addresses(self, backend):
        ctx = gs.Context()
        x, other_shape, other_type, same = (
            ctx.tensor(t, ne) for t, ne in (("f32", (8, 4)), ("f32", (4, 8)), ("f16", (8, 4)), ("f32", (8, 4))))
        backend.alloc_tensors(ctx)
        free = ctx.tensor("f32", NE, "free")
        for other in (other_shape, other_type, ctx.transpose(other_shape)):
            with pytest.raises(ValueError, match="layouts differ"):
                gs.tensor_copy(x, other)
        for pair in ((same, free), (free, same)):
            with pytest.raises(gs.PlacementError, match="'free' has no address"):
                gs.tensor_copy(*pair)

    # -- computing ----------------------------------------------------------------------

    def _check_node(self, device, op, ctx, x, y, out):
        """Compute `out` from x and y of the context, and compare it with the NumPy kernel's result."""
        device.alloc_tensors(ctx)
        _compute(device, gs.Graph(out), x, y)
        self.check(out, _expected(op, _values(1), _values(2)))

    @pytest.mark.parametrize("op", OPS)
    def test_a_supported_op_computes_what_the_numpy_kernels_do(self, device, op):
        ctx, x, y, out = _node(device, op)
        self._check_node(device, op, ctx, x, y, out)

    @pytest.mark.parametrize("op", OPS)
    def test_an_op_that_may_be_computed_in_place_gives_the_same_bits_there(self, device, op):
        ctx, x, y, out = _node(device, op)
        mask = device.inplace_sources(out.op)
        sources = [i for i, source in enumerate(out.src)
                   if mask >> i & 1 and source in (x, y) and source.ne == out.ne and out.view_src is None]
        if not sources:
            pytest.skip(f"{device!r} does not compute {op} in place")
        device.alloc_tensors(ctx)
        _compute(device, gs.Graph(out), x, y)
        apart = out.numpy().tobytes()
        for i in sources:
            _, x, y, out = _node(device, op)
            step = -(-max(NBYTES, device.alloc_size(x)) // device.alignment) * device.alignment
            with device.alloc_buffer(2 * step) as buffer:
                gs.bind_resident(x, buffer, 0)
                gs.bind_resident(y, buffer, step)
                gs.bind_resident(out, buffer, out.src[i].offset)
                _compute(device, gs.Graph(out), x, y)
                assert out.numpy().tobytes() == apart, f"{op} over its source {i}"

    def test_graphs_views_of_graphs_and_plans_are_computed(self, device):
        op = _op_of(device)
        ctx, x, y, first = _node(device, op)
        second = OPS[op](ctx, y, x)
        graph = gs.Graph(first, second)
        device.alloc_tensors(ctx)
        a, b = _values(1), _values(2)
        _compute(device, graph, x, y)
        self.check(first, _expected(op, a, b))
        self.check(second, _expected(op, b, a))
        plan = device.graph_plan_create(graph)
        if plan is not None:
            for factor in (1, 3):
                x.set(factor * a)
                device.graph_plan_compute(plan)
                device.synchronize()
                self.check(first, _expected(op, np.float32(factor) * a, b))
            device.graph_plan_free(plan)
        x.set(b)
        device.graph_compute(gs.GraphView(graph.nodes[1:]))
        device.graph_compute(gs.GraphView(()))
        device.synchronize()
        self.check(second, _expected(op, b, b))

    def test_a_failed_compute_raises_and_the_backend_works_afterwards(self, device):
        op = _op_of(device)
        ctx, x, y, out = _node(device, op)
        with pytest.raises(Exception):  # noqa: B017 - a type of the backend's own choice
            device.graph_compute(gs.Graph(out))
            device.synchronize()
        self._check_node(device, op, ctx, x, y, out)

    @pytest.mark.parametrize("queued", [False, True])
    def test_a_scheduler_runs_it_beside_a_cpu(self, device, queued):
        op = _op_of(device)
        ctx = gs.Context()
        x, y = ctx.tensor("f32", NE, "x", input=True), ctx.tensor("f32", NE, "y", input=True)
        before = ctx.scale(x, 2.0)
        here = OPS[op](ctx, before, y)
        out = ctx.set_output(ctx.scale(here, 0.5))
        graph = gs.Graph(out)
        with gs.CpuBackend(1, f"beside {device.name}") as cpu, gs.Scheduler([device, cpu]) as scheduler:
            for node in graph.nodes:
                scheduler.set_tensor_backend(node, device if node is here else cpu)
            plan = scheduler.alloc(graph)
            plan.verify()
            assert plan.backend_of(here) is device and plan.backend_of(out) is cpu
            for k in range(3):
                a, b = _values(k), _values(k + 7)
                x.set(a)
                y.set(b)
                if queued:
                    scheduler.compute_async(graph)
                    scheduler.synchronize()
                else:
                    scheduler.compute(graph)
                self.check(out, np.float32(0.5) * _expected(op, np.float32(2) * a, b))

    def check(self, got: gs.Tensor, want: np.ndarray) -> None:
        """Assert that the results of a node are close enough to `want`."""
        values, want = got.numpy().astype(np.float64), want.astype(np.float64)
        nmse = np.sum((values - want) ** 2) / np.sum(want**2)
        assert nmse <= self.max_nmse, f"{got!r}: nmse {nmse:.2e}; {values.flat[:4]}, not {want.flat[:4]}"


def _values(seed: int) -> np.ndarray:
    """Positive values, so that every op of OPS is defined and no sum cancels."""
    return np.random.default_rng(seed).uniform(0.5, 2, (4, 8)).astype(np.float32)


def _compute(device: gs.Backend, graph: gs.Graph, x: gs.Tensor, y: gs.Tensor) -> None:
    """Set x and y to `_values` 1 and 2, and compute the graph."""
    x.set(_values(1))
    y.set(_values(2))
    device.graph_compute(graph)
    device.synchronize()


def _leafs() -> tuple[gs.Context, gs.Tensor, gs.Tensor]:
    ctx = gs.Context("contract")
    return ctx, ctx.tensor("f32", NE, "x"), ctx.tensor("f32", NE, "y")


def _op_of(backend: gs.Backend) -> str:
    """The first op of OPS that the backend supports."""
    for op, build in OPS.items():
        if backend.supports_op(build(*_leafs())):
            return op
    pytest.skip(f"{backend!r} supports none of {', '.join(OPS)}")


def _small(backend: gs.Backend) -> tuple[gs.Context, gs.Tensor, gs.Tensor, gs.Tensor]:
    """Two leafs and a node, without addresses; the node has an op that the backend supports, or ADD if none is."""
    ctx, x, y = _leafs()
    op = next((op for op, build in OPS.items() if backend.supports_op(build(*_leafs()))), "ADD")
    return ctx, x, y, ctx.set_name(OPS[op](ctx, x, y), "out")


def _node(backend: gs.Backend, op: str) -> tuple[gs.Context, gs.Tensor, gs.Tensor, gs.Tensor]:
    """Two leafs and a node of one op; skips the test where the backend does not support it."""
    ctx, x, y = _leafs()
    out = ctx.set_name(OPS[op](ctx, x, y), "out")
    if not backend.supports_op(out):
        pytest.skip(f"{backend!r} does not support {op}")
    return ctx, x, y, out


def _expected(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The values of a node by the NumPy kernels of the CPU backend."""
    ctx, x, y = _leafs()
    out = OPS[op](ctx, x, y)
    with gs.CpuBackend(1, kernels="numpy") as oracle, oracle.alloc_tensors(ctx):
        x.set(a)
        y.set(b)
        oracle.graph_compute(gs.Graph(out))
        return out.numpy().copy()
