"""Rearranged weights of a CUDA device: only the kernels of matrix products read the rearranged bytes."""

import threading
from bisect import bisect_right

import cupy_devices as devices
import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import packed, staging
from ggml_sched.backends.cupy import plan as plans
from ggml_sched.backends.cupy.repack import FIELDS, packs, repack, together

RNG = np.random.default_rng(6)
PACKED = sorted(FIELDS)


def test_an_empty_weight_shares_its_address_with_the_next(cuda):
    ctx = gs.Context("weights")
    empty, first, second, third = (ctx.tensor("q4_0", (256, n), str(n)) for n in (0, 8, 9, 10))
    with cuda.alloc_buffer(1 << 14) as buffer:
        buffer.usage = "weights"
        allocator = gs.TensorAllocator(buffer)
        for weight in (empty, first, second):
            allocator.alloc(weight)
        assert empty.offset == first.offset
        allocator.free(empty)
        assert buffer.is_packed(first)
        allocator.free(first)
        assert not buffer.is_packed(first) and buffer.is_packed(second)
        buffer.read(0, memoryview(bytearray(4096)))
        allocator.alloc(third)
        assert buffer.is_packed(third)


def width(kind: gs.Type) -> int:
    return 2 * together(kind) * kind.block_size


class Product:
    """out = w x, of weights of blocks, between two other tensors."""

    def __init__(self, backend, kind: gs.Type, rows: int = 5) -> None:
        self.ctx = gs.Context("product")
        self.before = self.ctx.tensor("f32", 33, "before")
        self.w = self.ctx.tensor(kind, (width(kind), rows), "w")
        self.after = self.ctx.tensor("f32", 33, "after")
        self.x = self.ctx.tensor("f32", (width(kind), 2), "x")
        self.ids = self.ctx.tensor("i32", 3, "ids")
        self.out = self.ctx.mul_mat(self.w, self.x)
        self.rows = self.ctx.get_rows(self.w, self.ids)
        self.copy = self.ctx.dup(self.w)
        self.graph = gs.Graph(self.out)
        self.buffer = backend.alloc_tensors(self.ctx)
        self.values = RNG.standard_normal((rows, width(kind))).astype(np.float32)
        self.w.set(self.values)
        self.x.set(RNG.standard_normal((2, width(kind))).astype(np.float32))
        self.ids.set(np.int32([4, 0, 4]))

    def raw(self) -> bytes:
        out = bytearray(self.w.nbytes)
        self.w.backend.get_tensor(self.w, out)
        return bytes(out)


def on_the_cpu(kind: gs.Type, product: Product) -> tuple[bytes, np.ndarray, np.ndarray]:
    """(bytes of the weights, product, rows)."""
    with gs.CpuBackend(1, kernels="numpy") as cpu:
        same = Product(cpu, kind)
        for a, b in ((same.w, product.values), (same.x, product.x.numpy()), (same.ids, np.int32([4, 0, 4]))):
            a.set(b)
        cpu.graph_compute(gs.Graph(same.out, same.rows))
        return same.raw(), same.out.numpy(), same.rows.numpy()


@pytest.mark.parametrize("kind", PACKED, ids=str)
def test_bytes_are_those_of_ggml_whatever_part_is_written_or_read(cuda, kind):
    product = Product(cuda, kind)
    assert product.buffer.is_packed(product.w) and not product.buffer.is_packed(product.x)
    expected = bytearray(on_the_cpu(kind, product)[0])
    assert product.raw() == expected
    n = len(expected)
    for start, stop in [(0, 1), (n - 1, n), (1, n - 1), *RNG.integers(0, n, (20, 2)).tolist()]:
        start, stop = sorted((start, stop))
        data = RNG.integers(0, 256, stop - start, np.uint8).tobytes()
        expected[start:stop] = data
        cuda.set_tensor(product.w, data, start)
        assert product.raw() == expected
        out = bytearray(stop - start)
        cuda.get_tensor(product.w, out, start)
        assert out == data
    # Through the buffer, with what lies around.
    product.before.set(np.zeros(33, np.float32))
    product.after.set(np.ones(33, np.float32))
    whole = bytearray(product.buffer.size)
    product.buffer.read(0, memoryview(whole))
    at = product.w.offset
    assert whole[at : at + n] == expected and bytes(whole[product.after.offset :][:4]) == b"\0\0\x80\x3f"
    product.buffer.write(0, memoryview(whole))
    assert product.raw() == expected


@pytest.mark.parametrize("kind", PACKED, ids=str)
def test_whole_bundles_are_rearranged_by_the_device(kind, monkeypatch):
    """Whatever the size of a piece; the host rearranges the bundles at the ends alone."""
    monkeypatch.setattr(packed, "PIECE", 3000)
    monkeypatch.setattr(packed, "MAX_BLOCKS", 2)
    rearranged = []
    monkeypatch.setattr(packed, "repack", lambda rows, kind: rearranged.append(rows.size) or repack(rows, kind))
    with devices.backend() as cuda:
        product = Product(cuda, kind, rows=40)
        n, unit = product.w.nbytes, together(kind) * kind.type_size
        data = RNG.integers(0, 256, n, np.uint8)
        cuda.set_tensor(product.w, data.tobytes())
        assert rearranged == [] and product.raw() == data.tobytes()
        data[5 : n - 5] += 1
        cuda.set_tensor(product.w, data[5 : n - 5].tobytes(), 5)
        assert rearranged == [unit, unit] and product.raw() == data.tobytes()


@pytest.mark.parametrize("kind", PACKED, ids=str)
def test_other_ops_get_the_order_that_they_know_and_plans_made_before_notice(kind, seed=0):
    with devices.backend(seed=seed, exact=True) as cuda:
        product = Product(cuda, kind)
        _, out, rows = on_the_cpu(kind, product)
        plan = cuda.graph_plan_create(product.graph)
        for _ in range(3):
            cuda.graph_plan_compute(plan)
            assert np.allclose(product.out.numpy(), out, rtol=1e-4, atol=1e-4)
        assert product.buffer.is_packed(product.w)
        cuda.graph_compute(gs.GraphView([product.rows]))
        assert np.array_equal(product.rows.numpy(), rows) and product.buffer.is_packed(product.w)
        cuda.graph_compute(gs.GraphView([product.copy]))
        assert not product.buffer.is_packed(product.w) and not product.buffer.is_packed(product.copy)
        assert np.array_equal(product.copy.numpy(), product.w.numpy())
        cuda.graph_compute(gs.GraphView([product.rows]))
        assert np.array_equal(product.rows.numpy(), rows)
        for run in range(3):
            product.out.set(np.zeros_like(out))
            cuda.graph_plan_compute(plan)
            assert np.allclose(product.out.numpy(), out, rtol=1e-4, atol=1e-4)
            assert (plan.graph is None) == (run == 0), "kernels run once before they are captured"
        assert plan.captures == 2 and product.raw() == on_the_cpu(kind, product)[0]


def test_a_plan_whose_rebuilding_was_interrupted_is_built_again(monkeypatch):
    with devices.backend(exact=True) as cuda:
        product = Product(cuda, gs.Type.Q4_0)
        twice = gs.Context("twice")
        graph = gs.Graph(twice.scale(product.out, 2.0))
        cuda.alloc_tensors(twice)
        plan = cuda.graph_plan_create(graph)
        for _ in range(3):
            cuda.graph_plan_compute(plan)
        expected = graph.nodes[-1].numpy().copy()
        cuda.graph_compute(gs.GraphView([product.copy]))
        build, left = plans.build, [None]

        def interrupted(*args):
            if not left:
                raise KeyboardInterrupt
            left.pop()
            build(*args)

        monkeypatch.setattr(plans, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cuda.graph_plan_compute(plan)
        monkeypatch.undo()
        for _ in range(3):
            graph.nodes[-1].set(np.zeros_like(expected))
            cuda.graph_plan_compute(plan)
            assert np.allclose(graph.nodes[-1].numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [0, 3, 9, 10, 12, 19])
def test_weights_whose_straightening_was_interrupted_are_whole(at, late, monkeypatch):
    """Before a piece was brought back, or after: of the copy, which has ten, or of what it is a copy of."""
    monkeypatch.setattr(packed, "PIECE", 200)
    with devices.backend(exact=True) as cuda:
        product = Product(cuda, gs.Type.Q4_0)
        raw, out, _ = on_the_cpu(gs.Type.Q4_0, product)
        plan = cuda.graph_plan_create(product.graph)
        for _ in range(3):
            cuda.graph_plan_compute(plan)
        put, pieces = staging.Uploads.put, []

        def interrupted(self, address, data):
            pieces.append(data)
            stops = len(pieces) == at + 1
            if not stops or late:
                put(self, address, data)
            if stops:
                raise KeyboardInterrupt

        monkeypatch.setattr(staging.Uploads, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cuda.graph_compute(gs.GraphView([product.copy]))
        monkeypatch.setattr(staging.Uploads, "put", put)
        assert product.raw() == raw
        for _ in range(3):
            product.out.set(np.zeros_like(out))
            cuda.graph_plan_compute(plan)
            assert np.allclose(product.out.numpy(), out, rtol=1e-4, atol=1e-4)
        cuda.graph_compute(gs.GraphView([product.copy]))
        assert np.array_equal(product.copy.numpy(), product.w.numpy()) and product.raw() == raw


@pytest.mark.parametrize("kind", PACKED, ids=str)
def test_weights_of_an_allocator_that_was_reset_are_forgotten(cuda, kind):
    """Others lie across them, in another order and of other types."""
    with cuda.alloc_buffer(1 << 16) as buffer:
        buffer.usage = "weights"
        allocator, old, new, ctx = gs.TensorAllocator(buffer), gs.Context(), gs.Context(), gs.Context()
        allocator.alloc(old.tensor(kind, (width(kind), 8)))
        allocator.reset()
        bias, w = new.tensor("f32", 8), new.tensor(kind, (width(kind), 8))
        for t in (bias, w):
            allocator.alloc(t)
        x = ctx.tensor("f32", width(kind))
        y = ctx.add(ctx.mul_mat(w, x), bias)
        given = RNG.standard_normal((8, width(kind))).astype(np.float32)
        with cuda.alloc_tensors(ctx):
            w.set(given)
            bias.set(np.ones(8, np.float32))
            x.set(np.ones(width(kind), np.float32))
            before = w.numpy()
            cuda.graph_compute(gs.Graph(y))
            assert np.allclose(y.numpy(), before.sum(1) + 1, rtol=1e-2, atol=1e-2)
            assert np.array_equal(w.numpy(), before)


def test_ranges_are_cut_while_another_thread_straightens(ctx, monkeypatch):
    """At any moment: here between two reads of the weights."""
    weights, rows = [ctx.tensor("q4_0", (256, 2), name) for name in "uvw"], packed.PackedRows()
    with devices.backend() as cuda:
        cuda.alloc_tensors(ctx)
        for w in weights:
            rows.add(w)
        found, last = list(map(rows.find, weights)), weights[2]
        expected = list(rows.pieces(last.offset, last.nbytes))

        def search(starts, start):
            for weight in found[:2]:
                rows.straightened(weight, weight.stop)
            return bisect_right(starts, start)

        monkeypatch.setattr(packed, "bisect_right", search)
        assert list(rows.pieces(last.offset, last.nbytes)) == expected
        assert len(rows) == 1


@pytest.mark.parametrize("when", ["before the first piece", "after the first piece"])
def test_weights_are_read_while_another_thread_straightens_them(when, monkeypatch):
    monkeypatch.setattr(packed, "PIECE", 300)
    kind = gs.Type.Q4_0
    with devices.backend() as cuda:
        product = Product(cuda, kind)
        expected, fetch = on_the_cpu(kind, product)[0], type(product.buffer)._fetch
        other = threading.Thread(target=lambda: cuda.graph_compute(gs.Graph(product.copy)))

        def straighten() -> None:
            if not other.ident:
                other.start()
                other.join()

        def fetch_while_straightened(self, start, size):
            if when == "before the first piece":
                straighten()
            found = fetch(self, start, size)
            straighten()
            return found

        monkeypatch.setattr(type(product.buffer), "_fetch", fetch_while_straightened)
        assert product.raw() == expected
        assert not product.buffer.is_packed(product.w) and product.raw() == expected


def test_a_part_of_a_bundle_is_written_while_another_thread_straightens(monkeypatch):
    """The rest of the bundle was fetched in the order before: it is not put back in that order."""
    with devices.backend() as cuda:
        product = Product(cuda, gs.Type.Q4_0)
        expected = bytearray(product.raw())
        other = threading.Thread(target=lambda: cuda.graph_compute(gs.Graph(product.copy)))

        def repack_while_straightened(*args):
            if not other.ident:
                other.start()
                other.join(0.5)         # it is not done: it waits until the bytes are queued
            return repack(*args)

        monkeypatch.setattr(packed, "repack", repack_while_straightened)
        product.buffer.write(product.w.offset + 3, memoryview(b"\x55" * 7))
        other.join()
        expected[3:10] = b"\x55" * 7
        assert product.raw() == expected and not product.buffer.is_packed(product.w)


@pytest.mark.parametrize("kind", PACKED, ids=str)
def test_weights_move_between_devices_and_orders(kind):
    with devices.pair() as (first, second), gs.CpuBackend(1) as cpu:
        product = Product(first, kind)
        expected = product.raw()
        for other in (second, cpu, first):
            ctx = gs.Context("copy")
            copy = ctx.tensor(kind, product.w.ne, "copy")
            other.alloc_tensors(ctx, usage="any")
            gs.tensor_copy(product.w, copy)
            out = bytearray(copy.nbytes)
            other.get_tensor(copy, out)
            assert out == expected
            product.w.set(np.zeros_like(product.values))
            gs.tensor_copy(copy, product.w)
            assert product.raw() == expected


@pytest.mark.parametrize("way", ["cpy_tensor_async", "cpy_tensor_from"])
def test_devices_do_not_copy_bytes_of_one_order_as_those_of_the_other(way):
    with devices.pair() as (first, second):
        product = Product(first, gs.Type.Q4_0)
        for other in (first, second):
            ctx = gs.Context("copy")
            copy = ctx.tensor("q4_0", product.w.ne, "copy")
            other.alloc_tensors(ctx, usage="any")
            for src, dst in ((product.w, copy), (copy, product.w)):
                backend = src.backend if way == "cpy_tensor_async" else dst.backend
                assert not getattr(backend, way)(src, dst)


def test_only_weights_whose_rows_allow_it_are_rearranged(ctx):
    with devices.backend() as cuda, devices.backend(repack=False) as plain:
        kinds = {str(kind): ctx.tensor(kind, (width(kind), 2), str(kind)) for kind in gs.Type
                 if packs(kind, width(kind)) if kind in FIELDS}
        short = ctx.tensor("q4_0", (32 * 7, 4), "short")
        f16 = ctx.tensor("f16", 256, "f16")
        buffer = cuda.alloc_tensors(ctx)
        assert all(buffer.is_packed(t) for t in kinds.values())
        assert not buffer.is_packed(short) and not buffer.is_packed(f16)
        buffer.close()
        for backend, usage in ((cuda, "any"), (plain, "weights")):
            buffer = backend.alloc_tensors(ctx, usage=usage)
            assert not any(buffer.is_packed(t) for t in kinds.values())
            buffer.close()


def test_views_of_whole_rows_are_multiplied_as_they_lie_and_others_straightened():
    for rows, is_packed in ((slice(1, 4), True), (None, False)):
        with devices.backend(exact=True) as cuda:
            product = Product(cuda, gs.Type.Q4_0)
            ctx, w, k = product.ctx, product.w, width(gs.Type.Q4_0)
            values = w.numpy()
            if rows is not None:
                view, x = ctx.view_2d(w, k, 3, w.nb[1], w.nb[1]), product.x.numpy()
                expected = x @ values[rows].T
            else:
                view = ctx.view_2d(w, 32, 5, w.nb[1], 18)
                x = product.x.numpy()[:, :32]
                expected = x @ values[:, 32:64].T
            more = gs.Context("more")
            other = more.tensor("f32", x.shape[::-1], "x")
            out = more.mul_mat(view, other)
            cuda.alloc_tensors(more)
            other.set(x)
            cuda.graph_compute(gs.GraphView([out]))
            assert np.allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4)
            assert product.buffer.is_packed(w) == is_packed
