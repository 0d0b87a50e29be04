"""Buffers and the addresses of tensors."""

from __future__ import annotations

import pytest

import ggml_sched as gs
from ggml_sched.testing.contract.base import NBYTES, Contract, small, values

__all__ = ["MemoryContract"]


class MemoryContract(Contract):
    """Names, alignment, buffers, addresses, and running out of memory."""

    def test_it_has_a_name_and_an_alignment_that_is_a_power_of_two(self, backend: gs.Backend) -> None:
        assert isinstance(backend.name, str) and backend.name
        assert backend.alignment >= 1 and backend.alignment & (backend.alignment - 1) == 0
        assert backend.name in repr(backend)

    def test_tensors_get_its_memory(self, backend: gs.Backend) -> None:
        ctx, x, _ = small()
        assert gs.get_backend(x) is None
        buffer = backend.alloc_tensors(ctx)
        assert gs.get_backend(x) is backend is x.backend and x.buffer is buffer and buffer.backend is backend

    def test_it_reads_its_own_buffers_and_none_of_unknown_backends(self, backend: gs.Backend) -> None:
        assert backend.supports_buffer(backend.alloc_buffer(64))
        assert not backend.supports_buffer(gs.DryBackend("unknown").alloc_buffer(64))

    def test_buffers_are_as_large_as_requested_and_aligned(self, backend: gs.Backend) -> None:
        for size in (1, backend.alignment - 1 or 1, 1000):
            with backend.alloc_buffer(size) as buffer:
                assert buffer.size >= size and buffer.backend is backend
                assert buffer.base % backend.alignment == 0, f"base {buffer.base:#x}"

    def test_alloc_size_is_an_integer_of_at_least_the_tensors_bytes(self, backend: gs.Backend) -> None:
        ctx, x, y = small()
        before = backend.alloc_size(x)
        buffer = backend.alloc_tensors(ctx)
        assert isinstance(before, int) and before >= x.nbytes
        for case in self.cases:
            small_ones = [t for t in case.made()[0].ctx.tensors if backend.alloc_size(t) < t.nbytes]
            assert small_ones == [], f"{case.name}: less than nbytes"
        assert backend.alloc_size(x) == before == backend.alloc_size(y) == buffer.alloc_size(x)

    def test_alloc_tensors_gives_each_tensor_an_aligned_range_of_its_own(self, backend: gs.Backend) -> None:
        ctx, x, _ = small()
        view = ctx.view_1d(x, 8, 32)
        size = backend.alloc_tensors_size(ctx)
        buffer = backend.alloc_tensors(ctx, usage="any")
        assert buffer.size >= size and buffer.usage == "any"
        roots = [t for t in ctx.tensors if t.view_src is None]
        spans = sorted((t.offset, t.offset + backend.alloc_size(t)) for t in roots)
        assert all(start % backend.alignment == 0 for start, _ in spans) and spans[-1][1] <= buffer.size
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert view.buffer is buffer and view.offset == x.offset + 32
        assert backend.alloc_tensors_size(ctx) == 0

    def test_tensors_made_later_get_a_buffer_of_their_own(self, backend: gs.Backend) -> None:
        ctx, x, _ = small()
        first = backend.alloc_tensors(ctx)
        later = ctx.tensor("f32", (4,))
        second = backend.alloc_tensors(ctx)
        assert later.buffer is second and x.buffer is first
        first.close()
        assert x.buffer is None and later.buffer is second

    def test_closing_a_buffer_leaves_the_others_as_they_are(self, device: gs.Backend) -> None:
        first, second = device.alloc_buffer(NBYTES), device.alloc_buffer(NBYTES)
        second.write(0, memoryview(values(1).tobytes()))
        first.close()
        with device.alloc_buffer(NBYTES) as third:
            third.clear(0xFF)
            out = bytearray(NBYTES)
            second.read(0, memoryview(out))
            assert out == values(1).tobytes()

    def test_memory_available_counts_buffers(self, backend: gs.Backend) -> None:
        free = backend.memory_available()
        if free is None:
            pytest.skip(f"{backend!r} does not know how much memory is available")
        with backend.alloc_buffer(4096):
            left = backend.memory_available()
            assert left is not None and 0 <= left <= free

    def test_out_of_memory_changes_nothing(self) -> None:
        """The bound is too small for the two tensors, and large enough for a buffer of `alignment` bytes."""
        ctx, x, y = small()
        with self._limited(1 << 16) as roomy:
            bound = roomy.alloc_tensors_size(ctx) - roomy.alignment
        with self._limited(bound) as backend:
            with pytest.raises(gs.OutOfMemory) as caught:
                backend.alloc_tensors(ctx)
            assert (caught.value.backend, caught.value.available) == (backend.name, bound)
            assert caught.value.needed == backend.alloc_tensors_size(ctx)
            assert x.buffer is y.buffer is None
            with backend.alloc_buffer(backend.alignment):
                pass
            with gs.CpuBackend(1, "another") as another:
                another.alloc_tensors(ctx)
                assert x.backend is another

    def test_memory_that_was_freed_is_available_again(self) -> None:
        with self._limited(4096) as backend:
            for _ in range(3):
                assert backend.memory_available() != 0
                with backend.alloc_buffer(4096), pytest.raises(gs.OutOfMemory):
                    assert backend.memory_available() in (0, None)
                    backend.alloc_buffer(64)

    def test_closing_is_idempotent(self, backend: gs.Backend) -> None:
        buffer = backend.alloc_buffer(64)
        with buffer:
            assert not buffer.closed
        assert buffer.closed
        buffer.close()
        backend.close()
        backend.close()

    # -- helpers ----------------------------------------------------------------------------------

    def _limited(self, memory: int) -> gs.Backend:
        """`limited_backend(memory)`; skips the test where there is none."""
        backend = self.limited_backend(memory)
        if backend is None:
            pytest.skip("the backend has no bound on its memory: see limited_backend")
        return backend
