"""Memory of a CUDA device and copies to and from it, on emulated devices whose work runs as late as possible."""

import threading
from collections import deque

import cupy_devices as devices
import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy.staging import Downloads, Uploads

RNG = np.random.default_rng(3)
SEEDS = (0, 1, 2, 5)


def weight(backend, n: int = 64, name: str = "w"):
    """A resident vector."""
    ctx = gs.Context(name)
    tensor = ctx.tensor("f32", n, name)
    backend.alloc_tensors(ctx)
    return tensor


def values(n: int = 64) -> np.ndarray:
    return RNG.standard_normal(n).astype(np.float32)


def queue_set(tensor, array) -> None:
    tensor.backend.set_tensor_async(tensor, memoryview(array).cast("B"))


def queue_get(tensor, out) -> None:
    tensor.backend.get_tensor_async(tensor, memoryview(out).cast("B"))


# -- staging --------------------------------------------------------------------------


def test_bytes_larger_than_the_ring_arrive():
    device = devices.device()
    stream = device.stream()
    ring, downloads = Uploads(device, stream, 4096), Downloads(device, stream, 1024)
    memory, data = device.alloc(10_001), RNG.integers(0, 256, 10_001, np.uint8)
    ring.put(memory.ptr, data[:1])
    ring.put(memory.ptr, data)
    back = np.zeros(10_001, np.uint8)
    downloads.get(back, memory.ptr)
    stream.synchronize()
    downloads.finish(downloads.number)
    assert np.array_equal(back, data) and not downloads.is_waiting(downloads.number)


def test_a_small_load_is_one_copy():
    device = devices.device()
    stream = device.stream()
    ring, memory = Uploads(device, stream, 4096), device.alloc(1024)
    before = device.counts.copies_in
    for _ in range(10):
        ring.put(memory.ptr, np.zeros(600, np.uint8))
    assert device.counts.copies_in - before == 10


def test_nothing_is_fetched_before_the_host_waits(cuda):
    a, out = weight(cuda), np.full(64, 7, np.float32)
    queue_set(a, values())
    waits = cuda.device.counts.waits
    queue_get(a, out)
    assert (out == 7).all() and cuda.device.counts.waits == waits
    cuda.synchronize()
    assert not (out == 7).any()
    waits = cuda.device.counts.waits
    cuda.synchronize()
    assert cuda.device.counts.waits == waits, "waited for an empty queue"


@pytest.mark.parametrize("seed", SEEDS)
def test_more_than_the_staging_holds(seed):
    """Queued at once; the caller's memory may change after each call."""
    with devices.backend(seed=seed, staging=4096) as cuda:
        vectors = [weight(cuda, 200) for _ in range(40)]
        for i, t in enumerate(vectors):
            given = np.full(200, i, np.float32)
            queue_set(t, given)
            given[:] = -1
        outs = [np.empty(200, np.float32) for _ in vectors]
        for t, out in zip(vectors, outs, strict=True):
            queue_get(t, out)
        cuda.synchronize()
        assert [out[0] for out in outs] == [out[-1] for out in outs] == list(range(40))


# -- events ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_an_event_stands_for_what_was_queued_before_it(seed):
    with devices.backend(seed=seed) as cuda:
        a, first, second = weight(cuda), np.zeros(64, np.float32), np.zeros(64, np.float32)
        one, two = values(), values()
        queue_set(a, one)
        queue_get(a, first)
        event = cuda.event_new()
        cuda.event_record(event)
        queue_set(a, two)
        queue_get(a, second)
        cuda.event_synchronize(event)
        assert np.array_equal(first, one) and not second.any()
        cuda.synchronize()
        assert np.array_equal(second, two)


def test_a_wait_that_another_thread_completes_ends_with_the_results_copied(cuda, monkeypatch):
    w, given, out, seen = weight(cuda), values(), np.zeros(64, np.float32), []
    w.set(given)
    finish, threads = Downloads.finish, []

    def wait():
        cuda.synchronize()
        seen.append(out.copy())

    def finish_while_another_thread_waits(self, number):
        if not threads:
            threads.append(threading.Thread(target=wait))
            threads[0].start()
            threads[0].join(0.2)        # it ends here only if it does not wait
        finish(self, number)

    monkeypatch.setattr(Downloads, "finish", finish_while_another_thread_waits)
    queue_get(w, out)
    cuda.synchronize()
    threads[0].join()
    assert np.array_equal(seen, [given])


def test_an_event_passes_while_another_thread_copies_the_results_before_it(cuda, monkeypatch):
    w, given, out, threads = weight(cuda), values(), np.zeros(64, np.float32), []
    w.set(given)
    queue_get(w, out)
    event = cuda.event_here()

    class Waiting(deque):
        """Before it is read that there is a copy, another thread finishes it, unless it has to wait."""

        def __bool__(self):
            found = len(self) > 0
            if not threads:
                threads.append(threading.Thread(target=cuda.synchronize))
                threads[0].start()
                threads[0].join(0.2)
            return found

    monkeypatch.setattr(cuda._downloads, "_waiting", Waiting(cuda._downloads._waiting))
    cuda.event_synchronize(event)
    threads[0].join()
    assert np.array_equal(out, given)


def test_results_whose_copying_was_interrupted_are_copied_by_the_next_wait(cuda, monkeypatch):
    w, given, out = weight(cuda), values(), np.zeros(64, np.float32)
    w.set(given)
    queue_get(w, out)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Downloads, "finish", interrupted)
        cuda.synchronize()
    cuda.synchronize()
    assert np.array_equal(out, given)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("peers", [True, False])
def test_copies_between_devices_follow_events(seed, peers):
    with devices.pair(seed, peers) as (first, second):
        a, b = weight(first), weight(second)
        x, y = values(), values()
        b.set(y)
        queue_set(a, x)
        event = first.event_new()
        first.event_record(event)
        second.event_wait(event)
        if not peers:
            assert not second.cpy_tensor_from(a, b) and not first.cpy_tensor_to(a, b)
            assert not first.cpy_tensor_async(a, b)
        else:
            waits = devices.waits(first, second)
            assert second.cpy_tensor_from(a, b)
            done = second.event_new()
            second.event_record(done)
            first.event_wait(done)
            queue_set(a, y)
            assert devices.waits(first, second) == waits, "a copy between devices made the host wait"
            assert np.array_equal(b.numpy(), x)
            assert first.cpy_tensor_async(a, b)
            first.synchronize()
            assert np.array_equal(b.numpy(), y)
        for turn in range(4):
            queue_set(a, x + turn)
            gs.tensor_copy(a, b)
            assert np.array_equal(b.numpy(), x + turn)


def test_an_event_brings_copies_to_host_memory(cuda, cpu):
    a, b, x = weight(cuda), weight(cpu), values()
    b.set(np.zeros(64, np.float32))
    queue_set(a, x)
    assert cuda.cpy_tensor_async(a, b)
    assert not b.numpy().any()
    event = cuda.event_new()
    cuda.event_record(event)
    cpu.event_wait(event)
    assert np.array_equal(b.numpy(), x)
    b.set(2 * x)
    assert cuda.cpy_tensor_from(b, a)
    b.set(x)            # the bytes were taken
    assert np.array_equal(a.numpy(), 2 * x)


def test_what_is_under_way_to_host_memory_is_waited_for_before_it_is_read_from_there(cuda, cpu):
    a, b, c, d, x = weight(cuda), weight(cpu), weight(cuda), weight(cpu), values()
    for tensor in (b, d):
        tensor.set(np.zeros(64, np.float32))
    queue_set(a, x)
    assert cuda.cpy_tensor_to(a, b)
    waits = devices.waits(cuda)
    assert cuda.cpy_tensor_from(d, c) and devices.waits(cuda) == waits, "it waited for what goes elsewhere"
    assert cuda.cpy_tensor_from(b, c)
    assert np.array_equal(c.numpy(), x)


@pytest.mark.parametrize("seed", range(4))
def test_another_device_waits_for_what_an_event_brings_to_host_memory(seed):
    with devices.pair(seed) as (first, second), gs.CpuBackend(1) as cpu:
        a, b, c, x = weight(first), weight(cpu), weight(second), values()
        b.set(np.zeros(64, np.float32))
        queue_set(a, x)
        assert first.cpy_tensor_async(a, b)
        event = first.event_new()
        first.event_record(event)
        second.event_wait(event)
        assert second.cpy_tensor_from(b, c)
        assert np.array_equal(c.numpy(), x)


def test_gaps_between_elements_stay_as_they_are(cuda, cpu):
    ctx = [gs.Context() for _ in range(2)]
    a, b = (c.tensor("f32", (8, 4)) for c in ctx)
    cuda.alloc_tensors(ctx[0])
    cpu.alloc_tensors(ctx[1])
    part = [c.view_2d(t, 4, 4, t.nb[1]) for c, t in zip(ctx, (a, b), strict=True)]
    x = RNG.standard_normal((4, 8)).astype(np.float32)
    for there, here, source, target in ((a, b, *part), (b, a, *reversed(part))):
        there.set(x)
        here.set(np.zeros((4, 8), np.float32))
        gs.tensor_copy(source, target)
        expected = x.copy()
        expected[:, 4:] = 0
        assert np.array_equal(here.numpy(), expected)


# -- memory ---------------------------------------------------------------------------


def test_memory_is_counted_and_given_back():
    with devices.backend(memory=10_000) as cuda:
        assert cuda.memory_available() == 10_000
        buffer = cuda.alloc_buffer(6000)
        assert cuda.used == 6000 and cuda.memory_available() == 4000 and buffer.base % 256 == 0
        with pytest.raises(gs.OutOfMemory, match="5000 bytes needed, 4000 of 10000 left") as caught:
            cuda.alloc_buffer(5000)
        assert (caught.value.backend, caught.value.needed, caught.value.available) == (cuda.name, 5000, 4000)
        buffer.close()
        cuda.alloc_buffer(10_000).close()
        with pytest.raises(ValueError):
            cuda.alloc_buffer(-1)
        assert cuda.alloc_buffer(0).size == 0


def test_a_device_without_memory_is_an_error_that_everything_survives():
    device = devices.device(memory=1 << 20)
    with devices.backend(device) as cuda:
        free = cuda.memory_available()
        a, x = weight(cuda), values()
        a.set(x)
        with pytest.raises(gs.OutOfMemory) as caught:
            cuda.alloc_buffer(1 << 20)
        assert caught.value.needed == 1 << 20 and caught.value.available < free
        assert cuda.name in str(caught.value) and cuda.used == a.nbytes
        assert np.array_equal(a.numpy(), x)
        cuda.alloc_buffer(cuda.memory_available() // 2).close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_buffer_closes_after_the_copies_that_use_it(seed):
    """The emulated device refuses to touch memory that is gone."""
    with devices.pair(seed) as (first, second):
        a, b, x = weight(first), weight(second), values()
        a.set(x)
        assert second.cpy_tensor_from(a, b)
        a.buffer.close()
        assert np.array_equal(b.numpy(), x)
        c = weight(first)
        assert second.cpy_tensor_async(b, c)
        c.buffer.close()
        second.synchronize()
        first.synchronize()


def test_ranges_outside_a_buffer_and_closed_buffers(cuda):
    buffer = cuda.alloc_buffer(64)
    for use in (lambda: buffer.write(60, memoryview(bytes(8))), lambda: buffer.read(-1, memoryview(bytearray(4)))):
        with pytest.raises(gs.BackendError, match="lie outside a buffer of 64 bytes"):
            use()
    buffer.clear(3)
    out = bytearray(64)
    buffer.read(0, memoryview(out))
    assert bytes(out) == bytes([3]) * 64
    with pytest.raises(ValueError):
        buffer.clear(256)
    buffer.close()
    for use in (lambda: buffer.write(0, memoryview(bytes(8))), lambda: buffer.read(0, memoryview(bytearray(4))),
                lambda: buffer.clear(0)):
        with pytest.raises(gs.BackendError, match="is closed"):
            use()
