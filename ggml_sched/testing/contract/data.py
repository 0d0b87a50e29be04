"""Tests of data: bytes that are written to, read from and copied between backends."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backend import overrides
from ggml_sched.testing.contract.base import NBYTES, Contract, same, small, values

__all__ = ["DataContract"]


class DataContract(Contract):
    """Setting, reading and copying tensors."""

    def test_a_tensor_gives_the_bytes_that_were_set(self, device: gs.Backend) -> None:
        ctx, x, y = small()
        device.alloc_tensors(ctx)
        a, b = values(1), values(2)
        device.set_tensor(x, a)
        device.set_tensor(y, b.tobytes())
        got = np.empty((4, 8), np.float32)
        device.get_tensor(x, got)
        assert got.tobytes() == a.tobytes()
        same(x, a)
        same(y, b)

    def test_parts_of_a_tensor_are_set_and_fetched(self, device: gs.Backend) -> None:
        ctx, x, _ = small()
        device.alloc_tensors(ctx)
        a = values(1)
        device.set_tensor(x, a)
        device.set_tensor(x, np.array([7, 8], np.float32), 20)
        part = bytearray(12)
        device.get_tensor(x, part, 16)
        assert np.frombuffer(part, np.float32).tolist() == [a.flat[4], 7, 8]
        device.set_tensor(x, b"", NBYTES)
        device.get_tensor(x, bytearray(), 0)

    def test_setting_a_tensor_leaves_the_bytes_around_it(self, device: gs.Backend) -> None:
        _, x, y = small()
        step = -(-max(NBYTES, device.alloc_size(x)) // device.alignment) * device.alignment
        with device.alloc_buffer(3 * step) as buffer:
            buffer.clear(0x11)
            gs.bind_resident(x, buffer, step)
            x.set(values(1))
            around = bytearray(3 * step)
            buffer.read(0, memoryview(around))
            assert {*around[:step], *around[2 * step :]} == {0x11}
            assert around[step : step + NBYTES] == values(1).tobytes()

    def test_views_read_and_write_a_part_of_their_root(self, device: gs.Backend) -> None:
        ctx, x, _ = small()
        row = ctx.view_1d(x, 8, 64)
        turned = ctx.transpose(x)
        device.alloc_tensors(ctx)
        a = values(1)
        x.set(a)
        same(row, a[2])
        same(turned, a.T)
        row.set(np.zeros(8, np.float32))
        a[2] = 0
        same(x, a)

    def test_queued_sets_and_gets_are_done_in_order_after_synchronize(self, device: gs.Backend) -> None:
        ctx, x, _ = small()
        device.alloc_tensors(ctx)
        a, got = values(1), bytearray(64)
        given, zeros = a.tobytes(), bytes(8)
        device.set_tensor_async(x, memoryview(given))
        device.set_tensor_async(x, memoryview(zeros), 8)
        device.get_tensor_async(x, memoryview(got), 4)
        device.synchronize()
        a.flat[2:4] = 0
        assert bytes(got) == a.tobytes()[4:68]

    def test_data_that_it_takes_at_once_may_change_afterwards(self, device: gs.Backend) -> None:
        if not device.takes_at_once:
            pytest.skip(f"{device!r} does not declare takes_at_once")
        ctx, x, _ = small()
        device.alloc_tensors(ctx)
        given = bytearray(values(1).tobytes())
        device.set_tensor_async(x, memoryview(given))
        given[:] = bytes(NBYTES)
        same(x, values(1))

    def test_memory_of_a_host_backend_is_that_of_the_process(self, device: gs.Backend) -> None:
        ctx, x, _ = small()
        buffer = device.alloc_tensors(ctx)
        if not device.is_host or not buffer.base:
            pytest.skip(f"{device!r} does not declare is_host, or its buffers have no addresses")
        x.set(values(1))
        assert ctypes.string_at(buffer.base + x.offset, NBYTES) == values(1).tobytes()

    def test_arrays_over_host_memory_have_the_data(self, device: gs.Backend) -> None:
        """A buffer's `memory` is an array of all its bytes; a tensor in it is viewed without a copy where the backend
        `is_host`."""
        _, x, _ = small()
        buffer = device.alloc_buffer(4 * max(NBYTES, device.alignment))
        if not device.is_host or not isinstance(getattr(buffer, "memory", None), np.ndarray):
            pytest.skip(f"{device!r} does not declare is_host, or its buffers have no array `memory`")
        gs.bind_resident(x, buffer, 2 * device.alignment)
        view = np.asarray(x, copy=False)
        for k in range(2):
            x.set(values(k))
            assert np.array_equal(view, values(k))

    @pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, NBYTES + 1), (NBYTES, 1), (NBYTES + 1, 0), (1 << 62, 4)])
    def test_ranges_outside_a_tensor_are_refused(self, backend: gs.Backend, offset: int, size: int) -> None:
        ctx, x, _ = small()
        backend.alloc_tensors(ctx)
        for move, data in ((backend.set_tensor, bytes(size)), (backend.get_tensor, bytearray(size))):
            with pytest.raises(ValueError):
                move(x, data, offset)

    def test_tensors_without_an_address_or_of_another_backend_are_refused(self, backend: gs.Backend) -> None:
        ctx, x, _ = small()
        moves = ((backend.set_tensor, bytes(4)), (backend.get_tensor, bytearray(4)))
        for move, data in moves:
            with pytest.raises(gs.PlacementError):
                move(x, data)
        gs.DryBackend("another").alloc_tensors(ctx)
        for move, data in moves:
            with pytest.raises(gs.PlacementError):
                move(x, data)

    def test_clear_fills_a_buffer_to_its_end(self, device: gs.Backend) -> None:
        buffer = device.alloc_buffer((1 << 20) + 5)
        buffer.clear(0x5A)
        out = bytearray(3)
        buffer.read((1 << 20) + 2, memoryview(out))
        assert out == b"ZZZ"
        buffer.clear()
        buffer.read(0, memoryview(out))
        assert out == bytes(3)

    # -- copies -------------------------------------------------------------------------

    def test_tensors_are_copied_from_and_to_other_backends(self, device: gs.Backend) -> None:
        with gs.CpuBackend(1, "host") as host, self.new_backend() as second:
            for other in (host, second):
                _, x, y = small()
                gs.bind_resident(x, other.alloc_buffer(NBYTES), 0)
                gs.bind_resident(y, device.alloc_buffer(4 * max(NBYTES, device.alignment)), 2 * device.alignment)
                a = values(1)
                x.set(a)
                gs.tensor_copy(x, y)
                same(y, a)
                x.set(np.zeros_like(a))
                gs.tensor_copy(y, x)
                gs.tensor_copy(x, x)
                same(x, a)

    def test_a_copy_leaves_the_bytes_between_the_elements(self, device: gs.Backend) -> None:
        """Only the elements of a view with gaps are copied: the bytes in the gaps belong to other tensors."""
        def part(backend: gs.Backend) -> tuple[gs.Tensor, gs.Tensor]:
            ctx, x, _ = small()
            view = ctx.view_2d(x, 4, 4, x.nb[1], 8)
            backend.alloc_tensors(ctx)
            return x, view

        with gs.CpuBackend(1, "host") as host, self.new_backend() as second:
            for here, there in ((device, host), (host, device), (device, second), (device, device)):
                (x, source), (y, target) = part(here), part(there)
                x.set(values(1))
                y.set(values(2))
                gs.tensor_copy(source, target)
                want = values(2)
                want[:, 2:6] = values(1)[:, 2:6]
                same(y, want)

    def test_queued_copies_are_done_in_order(self, device: gs.Backend) -> None:
        """A set, a copy between parts of tensors (which begin inside their buffers), and another set are queued without
        waits."""
        if not overrides(device, "cpy_tensor_async"):
            pytest.skip(f"{device!r} does not declare cpy_tensor_async")
        (ctx, x, _), (other, y, _) = small(), small()
        part, into = ctx.view_2d(x, 4, 3, x.nb[1], 40), other.view_2d(y, 4, 3, y.nb[1], 40)
        with self.new_backend() as second:
            for k, (tensor, backend) in enumerate(((x, device), (y, second)), 1):
                step = max(NBYTES, backend.alignment)
                gs.bind_resident(tensor, backend.alloc_buffer(4 * step), k * step)
                tensor.set(values(0))
            given = [memoryview(values(k).tobytes()) for k in (1, 2)]
            device.set_tensor_async(x, given[0])
            if not device.cpy_tensor_async(part, into):
                pytest.skip(f"{device!r} does not copy to another {type(second).__name__} in its queue")
            device.set_tensor_async(x, given[1])
            event = device.event_new()
            device.event_record(event)
            device.event_synchronize(event)
            want = values(0)
            want[1:4, 2:6] = values(1)[1:4, 2:6]
            same(y, want)
            same(x, values(2))

    def test_copies_need_equal_layouts_and_addresses(self, backend: gs.Backend) -> None:
        ctx = gs.Context()
        x, other_shape, other_type, same = (
            ctx.tensor(t, ne) for t, ne in (("f32", (8, 4)), ("f32", (4, 8)), ("f16", (8, 4)), ("f32", (8, 4))))
        backend.alloc_tensors(ctx)
        free = ctx.tensor("f32", (8, 4), "free")
        for other in (other_shape, other_type, ctx.transpose(other_shape)):
            with pytest.raises(ValueError):
                gs.tensor_copy(x, other)
        for pair in ((same, free), (free, same)):
            with pytest.raises(gs.PlacementError):
                gs.tensor_copy(*pair)
