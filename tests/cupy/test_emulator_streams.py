"""The emulated device detects errors between host and device, or between streams: missing events, reused staging, freed
memory, calls that CUDA forbids during capture.  Mostly with copies, which race as kernels do.
"""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_emulator import EmulatedDevice, Simulator
from cupy_sources import Bench, needs_compiler

from ggml_sched.backends.cupy.device import DeviceError, DeviceOutOfMemory, Stream
from ggml_sched.backends.cupy.regions import VIEW
from ggml_sched.errors import BackendError

SEEDS = range(12)


def full(value: int, n: int = 64) -> np.ndarray:
    return np.full(n, value, np.uint8)


def pinned(device: EmulatedDevice, value: int = 0, n: int = 64) -> np.ndarray:
    array = device.pinned(n)
    array[:] = value
    return array


def read(stream: Stream, memory, n: int = 64) -> np.ndarray:
    out = np.empty(n, np.uint8)
    stream.copy_out(out, memory.ptr)
    return out


@pytest.fixture
def device():
    with EmulatedDevice() as made:
        yield made


@pytest.fixture
def stream(device):
    return device.stream()


@pytest.fixture
def other(device):
    return device.stream()


@pytest.fixture
def memory(device):
    return device.alloc(64)


@pytest.fixture
def event(device):
    return device.event()


@pytest.fixture
def staging(device):
    """Pinned memory, which no other name of a test holds: the fixture does."""
    return pinned(device)


# -- order ------------------------------------------------------------------------------------------------------------

def crossing(seed: int, with_event: bool) -> bool:
    """Whether a second stream copies what a first one has copied in."""
    with EmulatedDevice(seed) as device:
        first, second, event = device.stream(), device.stream(), device.event()
        source, target = device.alloc(64), device.alloc(64)
        first.copy_in(source.ptr, full(1))
        first.copy_in(source.ptr, full(7))
        first.record(event)
        if with_event:
            second.wait(event)
        second.copy(target.ptr, source.ptr, 64)
        return (read(second, target) == 7).all()


def test_a_copy_between_streams_without_an_event_shows():
    assert not all(crossing(seed, False) for seed in SEEDS)


def test_events_order_streams():
    assert all(crossing(seed, True) for seed in SEEDS)


def test_a_wait_is_for_the_place_of_its_moment():
    """Recording the event again later moves no wait."""
    for seed in SEEDS:
        with EmulatedDevice(seed) as device:
            first, second, event = device.stream(), device.stream(), device.event()
            source, target = device.alloc(64), device.alloc(64)
            first.copy_in(source.ptr, full(1))
            first.record(event)
            second.wait(event)
            second.copy(target.ptr, source.ptr, 64)
            done = device.event()
            second.record(done)
            first.wait(done)
            first.copy_in(source.ptr, full(2))
            first.record(event)
            assert (read(second, target) == 1).all()


def test_nothing_runs_before_the_host_waits(device, stream, memory):
    out = pinned(device, 9)
    stream.copy_in(memory.ptr, full(3))
    stream.copy_out(out, memory.ptr)
    assert (out == 9).all()
    stream.synchronize()
    assert (out == 3).all()


def test_streams_that_wait_for_each_other_in_turn_run():
    for seed in SEEDS:
        with EmulatedDevice(seed) as device:
            streams = [device.stream() for _ in range(3)]
            memory = [device.alloc(64) for _ in range(3)]
            streams[0].copy_in(memory[0].ptr, full(5))
            for i in range(60):
                event = device.event()
                streams[i % 3].record(event)
                streams[(i + 1) % 3].wait(event)
                streams[(i + 1) % 3].copy(memory[(i + 1) % 3].ptr, memory[i % 3].ptr, 64)
            assert (read(streams[0], memory[0]) == 5).all()


def trace(seed: int) -> bytes:
    """The data that a race leaves, which depends on the seed."""
    with EmulatedDevice(seed) as device:
        streams, memory = [device.stream() for _ in range(3)], device.alloc(64)
        for i in range(30):
            streams[i % 3].fill(memory.ptr + i, i, 64 - i)
        return read(streams[0], memory).tobytes()


def test_a_seed_always_gives_the_same_order():
    assert all(trace(seed) == trace(seed) for seed in SEEDS)
    assert len({trace(seed) for seed in SEEDS}) > 3


# -- staging ----------------------------------------------------------------------------------------------------------

def test_staging_that_is_written_again_too_early_shows(device, stream, event, memory):
    staging = pinned(device, 1)
    stream.copy_in(memory.ptr, staging)
    stream.record(event)
    staging[:] = 2
    assert (read(stream, memory) == 2).all(), "the copy had not run yet"
    staging[:] = 3
    stream.copy_in(memory.ptr, staging)
    stream.record(event)
    event.synchronize()
    staging[:] = 4
    assert (read(stream, memory) == 3).all()


def test_pageable_memory_may_be_written_at_once(stream, memory):
    data = full(1)
    stream.copy_in(memory.ptr, data)
    data[:] = 2
    assert (read(stream, memory) == 1).all()


def test_pinned_memory_that_is_dropped_before_its_copy_ran_is_an_error(device, stream, memory):
    staging = pinned(device, 1)
    stream.copy_in(memory.ptr, staging[:32])
    del staging
    with pytest.raises(DeviceError, match="pinned memory was freed before a copy of 32 bytes ran"):
        stream.synchronize()


def test_parts_of_pinned_memory_are_pinned(device, stream, memory):
    staging = pinned(device, 1)
    stream.copy_in(memory.ptr, staging[16:32].view(np.float32))
    staging[16:32] = 8
    assert (read(stream, memory, 16) == 8).all()
    assert staging.ctypes.data % 256 == 0


@pytest.mark.parametrize("host", [np.zeros((8, 8), np.uint8)[:, ::2], [1, 2], b"abc"])
def test_copies_take_contiguous_arrays(stream, memory, host):
    with pytest.raises(ValueError, match="contiguous"):
        stream.copy_in(memory.ptr, host)
    readonly = full(1)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        stream.copy_out(readonly, memory.ptr)


# -- events -----------------------------------------------------------------------------------------------------------

def test_an_event_passes_with_what_was_before_it(stream, event, memory):
    assert event.query()
    event.synchronize()
    stream.wait(event)                  # never recorded: nothing to wait for
    stream.fill(memory.ptr, 1, 64)
    stream.record(event)
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_an_event_that_is_queried_often_enough_passes(device, stream, event, memory):
    stream.fill(memory.ptr, 1, 64)
    stream.record(event)
    assert sum(1 for _ in iter(event.query, True)) > 3
    assert device.counts.waits == 0


# -- memory -----------------------------------------------------------------------------------------------------------

def test_new_memory_is_full_of_garbage_and_aligned(device):
    for n in (0, 1, 255, 100_000):
        memory = device.alloc(n)
        assert memory.ptr % 256 == 0 and memory.size == n
        assert (read(device.stream(), memory, n) == 0xA5).all()


def test_memory_runs_out_by_numbers():
    with EmulatedDevice(memory=4096) as device:
        kept = device.alloc(3000)
        with pytest.raises(DeviceOutOfMemory, match="2000 bytes needed, 1024 bytes free") as caught:
            device.alloc(2000)
        assert (caught.value.needed, caught.value.free) == (2000, 1024)
        assert pickle.loads(pickle.dumps(caught.value)).free == 1024
        assert isinstance(caught.value, BackendError)
        assert device.memory() == (1024, 4096)
        kept.free()
        kept.free()
        assert device.memory() == (4096, 4096)
        device.alloc(4096)


def test_freeing_waits_for_what_is_queued(device, stream, memory):
    out = pinned(device)
    stream.fill(memory.ptr, 6, 64)
    stream.copy_out(out, memory.ptr)
    memory.free()
    assert (out == 6).all() and device.counts.waits == 1


def test_copies_by_addresses_are_of_pinned_memory():
    with EmulatedDevice() as device:
        stream, memory, staging, plain = device.stream(), device.alloc(256), device.pinned(64), np.zeros(64, np.uint8)
        staging[:] = np.arange(64)
        start = staging.ctypes.data
        stream.pinned_in(memory.ptr, start, 32)
        stream.pinned_out(start + 32, memory.ptr + 8, 16)
        stream.synchronize()
        assert staging[32:48].tolist() == list(range(8, 24))
        for host, n in ((plain.ctypes.data, 8), (start + 60, 8), (start, 0)):
            with pytest.raises(DeviceError, match="not in pinned memory"):
                stream.pinned_in(memory.ptr, host, n)
            with pytest.raises(DeviceError, match="not in pinned memory"):
                stream.pinned_out(host, memory.ptr, n)
        with pytest.raises(DeviceError):
            stream.pinned_in(memory.ptr + 250, start, 8)
        assert (device.counts.copies_in, device.counts.copies_out) == (1, 1)


@pytest.mark.parametrize("use", ["copy_in", "copy_out", "copy", "fill"])
def test_copies_to_freed_memory_are_errors(device, stream, memory, use):
    other = device.alloc(64)
    memory.free()
    with pytest.raises(DeviceError, match="64 bytes at 0x[0-9a-f]+, which is in memory that was freed"):
        {"copy_in": lambda: stream.copy_in(memory.ptr, full(1)),
         "copy_out": lambda: stream.copy_out(full(1), memory.ptr),
         "copy": lambda: stream.copy(other.ptr, memory.ptr, 64),
         "fill": lambda: stream.fill(memory.ptr, 0, 64)}[use]()


def test_copies_beyond_an_allocation_are_errors(device, stream):
    memory = device.alloc(100)
    with pytest.raises(DeviceError, match="64 bytes from byte 50 of 100 of emulated0"):
        stream.copy_in(memory.ptr + 50, full(1))
    with pytest.raises(DeviceError, match="in no memory of a device"):
        stream.fill(full(0).ctypes.data, 0, 1)
    with pytest.raises(DeviceError, match="overlaps"):
        stream.copy(memory.ptr, memory.ptr + 10, 20)


KERNELS = """
struct View { char* p; long long ne[4]; long long nb[4]; };
extern "C" __global__ void touch(float* y, const float* x, int n) { if (x && n) y[0] = x[0]; }
extern "C" __global__ void view(View v, int n) { if (n) *(float*)v.p = 1.0f; }
extern "C" __global__ void fail(int n) { if (n) __trap(); }
"""


@needs_compiler
def test_kernels_that_get_freed_memory_are_errors(device, tmp_path):
    bench = Bench(KERNELS, tmp_path, device)
    memory, other = device.alloc(64), device.alloc(64)
    view = np.zeros(1, VIEW)
    view["p"] = memory.ptr + 16
    bench.run("view", 1, 1, view, np.int32(1))
    bench.run("touch", 1, 1, other, memory, np.int32(1))
    bench.stream.begin_capture()
    bench.launch("view", 1, 1, view, np.int32(1))
    graph = bench.stream.end_capture()
    graph.launch(bench.stream)
    memory.free()
    graph.launch(bench.stream)
    with pytest.raises(DeviceError, match=r"probe\.view: argument 0 points into memory that was freed"):
        bench.stream.synchronize()
    with pytest.raises(DeviceError, match=r"probe\.touch: argument 1 points into memory that was freed"):
        bench.run("touch", 1, 1, other, memory, np.int32(1))


@needs_compiler
def test_kernels_that_get_host_memory_are_errors(tmp_path):
    host = np.zeros(4, np.float32)
    with EmulatedDevice() as device:
        bench = Bench(KERNELS, tmp_path, device)
        memory, staging = device.alloc(64), pinned(device)
        with pytest.raises(DeviceError, match=r"probe\.touch: argument 1 points into no memory of a device"):
            bench.run("touch", 1, 1, memory, np.uint64(host.ctypes.data), np.int32(1))
        bench.run("touch", 1, 1, memory, np.uint64(staging.ctypes.data), np.int32(0))
        bench.run("touch", 1, 1, memory, np.uint64(0), np.int32(0))
    with EmulatedDevice(host_access=True) as device:
        Bench(KERNELS, tmp_path, device).run("touch", 1, 1, device.alloc(64), np.uint64(host.ctypes.data), np.int32(1))


@needs_compiler
def test_a_device_works_after_an_error(device, tmp_path):
    bench = Bench(KERNELS, tmp_path, device)
    memory = device.alloc(64)
    bench.launch("fail", 1, 1, np.int32(1))
    bench.stream.fill(memory.ptr, 3, 64)
    with pytest.raises(DeviceError, match=r"probe\.fail"):
        bench.stream.synchronize()
    assert (read(bench.stream, memory) == 3).all()


# -- capture ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("what", ["synchronize", "device", "event", "query", "alloc", "free", "pinned", "pageable in",
                                  "pageable out", "another", "outside event", "other capture's event", "graph"])
def test_what_a_gpu_refuses_while_a_stream_is_captured(device, stream, other, memory, what):
    outside, inside, staging = device.event(), device.event(), pinned(device, 5)
    other.fill(device.alloc(64).ptr, 1, 64)
    other.record(outside)
    stream.begin_capture()
    stream.record(inside)
    graph = None
    if what == "graph":
        stream.copy_in(memory.ptr, staging)
        graph = stream.end_capture()
        stream.begin_capture()
    actions = {
        "synchronize": stream.synchronize, "device": device.synchronize, "event": outside.synchronize,
        "query": outside.query, "alloc": lambda: device.alloc(1), "free": memory.free,
        "pinned": lambda: device.pinned(1), "pageable in": lambda: stream.copy_in(memory.ptr, full(1)),
        "pageable out": lambda: stream.copy_out(full(1), memory.ptr), "another": other.begin_capture,
        "outside event": lambda: stream.wait(outside), "other capture's event": lambda: other.wait(inside),
        "graph": lambda: graph.launch(stream)}
    with pytest.raises(DeviceError):
        actions[what]()
    assert stream.is_capturing
    if what == "other capture's event":
        stream.end_capture()
    else:
        with pytest.raises(DeviceError, match="the capture was broken by"):
            stream.end_capture()
    assert not stream.is_capturing
    stream.copy_in(memory.ptr, staging)     # and it works again
    stream.begin_capture()
    stream.copy_in(memory.ptr, staging)
    stream.end_capture().launch(stream)
    assert (read(stream, memory) == 5).all()


def test_another_thread_cannot_wait_for_a_stream_that_is_captured(stream):
    stream.begin_capture()
    with ThreadPoolExecutor(1) as pool, pytest.raises(DeviceError, match="another thread captures"):
        pool.submit(stream.synchronize).result()
    with pytest.raises(DeviceError, match="the capture was broken by waiting for the stream"):
        stream.end_capture()


def test_a_replay_reads_memory_of_its_own_time(device, stream, staging):
    first, second = device.alloc(64), device.alloc(64)
    stream.begin_capture()
    stream.copy_in(first.ptr, staging)
    stream.copy(second.ptr, first.ptr, 64)
    graph = stream.end_capture()
    stream.synchronize()
    assert (read(stream, second) == 0xA5).all(), "capturing runs nothing"
    for value in (1, 2):
        staging[:] = value
        graph.launch(stream)
        assert (read(stream, second) == value).all()
    graph.free()
    graph.free()
    with pytest.raises(DeviceError, match="freed"):
        graph.launch(stream)


@needs_compiler
def test_a_capture_keeps_the_arguments_of_its_moment(tmp_path):
    source = 'extern "C" __global__ void put(int* y, int n) { *y = n; }'
    with EmulatedDevice() as device:
        bench = Bench(source, tmp_path, device)
        target, function = device.alloc(64), bench.function("put")
        packed = function.pack([np.uint64(target.ptr), np.int32(1)])
        bench.stream.begin_capture()
        function.launch((1,), (1,), packed, 0, bench.stream)
        graph = bench.stream.end_capture()
        packed.values[1][0] = 2
        graph.launch(bench.stream)
        assert bench.down(target, np.zeros(1, np.int32))[0] == 1


def test_events_are_not_waited_for_outside_of_the_capture_they_were_recorded_in(stream, event):
    stream.begin_capture()
    stream.record(event)
    stream.wait(event)
    stream.end_capture()
    for ask in (event.query, event.synchronize):
        with pytest.raises(DeviceError, match="recorded while its stream was captured"):
            ask()
    stream.record(event)
    assert event.query()


def test_another_thread_may_wait_while_one_captures(device, stream, other, memory):
    stream.begin_capture()
    stream.fill(memory.ptr, 1, 64)
    failed = []

    def elsewhere() -> None:
        try:
            other.fill(memory.ptr, 2, 64)
            other.synchronize()
            device.alloc(16)
        except DeviceError as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failed
    stream.end_capture()


# -- counts -----------------------------------------------------------------------------------------------------------

@needs_compiler
def test_what_the_host_asks_for_is_counted(device, tmp_path):
    bench = Bench(KERNELS, tmp_path, device)
    stream, memory, staging = bench.stream, device.alloc(64), pinned(device)
    stream.copy_in(memory.ptr, staging)
    bench.launch("view", 1, 1, np.zeros(1, VIEW), np.int32(0))
    stream.synchronize()
    stream.synchronize()                # nothing to wait for
    stream.begin_capture()
    bench.launch("view", 1, 1, np.zeros(1, VIEW), np.int32(0))
    graph = stream.end_capture()
    for _ in range(5):
        graph.launch(stream)
    read(stream, memory)
    counts = device.counts
    assert (counts.launches, counts.graph_launches, counts.captures) == (2, 5, 1)
    assert (counts.waits, counts.copies_in, counts.copies_out, counts.copies) == (2, 1, 1, 0)


def test_a_dry_device_counts_and_runs_nothing():
    with EmulatedDevice(memory=1 << 40, dry=True) as device:
        stream, event, staging = device.stream(), device.event(), pinned(device, 3)
        memory = [device.alloc(1 << 35) for _ in range(3)]
        assert device.memory()[0] == (1 << 40) - 3 * (1 << 35)
        assert memory[1].ptr >= memory[0].ptr + (1 << 35)
        function = device.function("any.kernel")
        stream.begin_capture()
        function.launch((1,), (32,), function.pack([np.int32(1)]), 0, stream)
        stream.copy_in(memory[0].ptr, staging)
        graph = stream.end_capture()
        for _ in range(10):
            graph.launch(stream)
            stream.record(event)
        event.synchronize()
        stream.copy_out(staging, memory[0].ptr)
        assert event.query() and (staging == 3).all()
        assert (device.counts.graph_launches, device.counts.waits) == (10, 0)
        with pytest.raises(DeviceError, match="bytes from byte"):
            stream.copy_in(memory[0].ptr + (1 << 35) - 8, staging)


# -- several devices --------------------------------------------------------------------------------------------------

def test_peers_copy_and_wait_for_each_other():
    for seed in SEEDS:
        simulator = Simulator(seed)
        first = EmulatedDevice(simulator=simulator)
        second = EmulatedDevice(peers=[first])
        assert first.can_access(second) and second.can_access(first) and first.can_access(first)
        here, there, event = first.stream(), second.stream(), first.event()
        source, target = first.alloc(64), second.alloc(64)
        here.copy_in(source.ptr, full(4))
        here.record(event)
        there.wait(event)
        there.copy(target.ptr, source.ptr, 64)
        assert (read(there, target) == 4).all()
        assert second.counts.copies == 1
        second.close()
        first.close()


def test_devices_that_are_no_peers_do_not_copy():
    simulator = Simulator()
    first, second = EmulatedDevice(simulator=simulator), EmulatedDevice(simulator=simulator)
    stranger = EmulatedDevice()
    assert not first.can_access(second) and not first.can_access(stranger)
    source, target = first.alloc(64), second.alloc(64)
    stream = first.stream()
    with pytest.raises(DeviceError, match="emulated0 copies from emulated1 to emulated0, and they are no peers"):
        stream.copy(source.ptr, target.ptr, 64)
    with pytest.raises(DeviceError, match="a stream of emulated0 gets memory of emulated1"):
        stream.fill(target.ptr, 0, 64)
    with pytest.raises(DeviceError, match="an event of emulated1 is recorded on a stream of emulated0"):
        stream.record(second.event())
    with pytest.raises(DeviceError, match="peers are devices of one simulator"):
        EmulatedDevice(simulator=simulator, peers=[stranger])


# -- the end ----------------------------------------------------------------------------------------------------------

def test_closing_runs_the_rest_and_gives_all_back():
    device = EmulatedDevice()
    stream, memory, event = device.stream(), device.alloc(64), device.event()
    out = pinned(device)
    stream.fill(memory.ptr, 2, 64)
    stream.copy_out(out, memory.ptr)
    device.close()
    device.close()
    memory.free()
    assert (out == 2).all() and device.used == 0
    for use in (device.stream, device.event, device.memory, device.synchronize, stream.synchronize,
                stream.begin_capture, event.synchronize, lambda: device.alloc(1), lambda: device.pinned(1),
                lambda: stream.fill(memory.ptr, 0, 1), lambda: stream.record(event), lambda: device.function("x.y")):
        with pytest.raises(DeviceError, match="emulated0 is closed"):
            use()


def test_closing_in_a_capture_leaves_the_thread_free():
    device = EmulatedDevice()
    device.stream().begin_capture()
    device.close()
    with EmulatedDevice(simulator=device.simulator) as other:
        other.alloc(1)
