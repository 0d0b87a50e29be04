"""The queue of a store with several threads: what is read together, and what begins only after reads have ended."""

import os
import threading

import numpy as np
import pytest
from overtaking import Held

import ggml_sched as gs
from ggml_sched.backends.store import store as store_module
from ggml_sched.backends.store.files import BLOCK, ROOM, aligned
from ggml_sched.backends.store.queue import StoreQueue

SECONDS = 30
"""After which a test that still waits fails."""


class Gate:
    """A part of a read that begins, and ends when the test lets it."""

    def __init__(self):
        self.began, self.end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self):
        self.began.set()
        assert self.end.wait(SECONDS)
        self.ended.set()


@pytest.fixture
def queue():
    queue = StoreQueue("disk", 2)
    yield queue
    queue.close()


def begun(*gates):
    return all(gate.began.wait(SECONDS) for gate in gates)


def test_as_many_reads_run_together_as_there_are_threads(queue):
    first, second, third = gates = [Gate() for _ in range(3)]
    queue.put_reads(gates)
    assert begun(first, second) and not third.began.is_set()
    second.end.set()
    assert begun(third) and not first.ended.is_set()
    first.end.set()
    third.end.set()
    assert queue.synchronize() is None and all(gate.ended.is_set() for gate in gates)


def test_a_mark_passes_when_all_reads_before_it_have_ended_and_waits_for_no_later_one(queue):
    first, second, later = Gate(), Gate(), Gate()
    queue.put_reads([first, second])
    mark = queue.mark()
    queue.put_reads([later])
    assert begun(first, second)
    second.end.set()
    assert begun(later) and not mark.latch.is_open
    first.end.set()
    queue.wait(mark)
    assert not later.ended.is_set()
    later.end.set()


def test_other_tasks_begin_after_the_reads_before_them_and_end_before_the_next(queue):
    first, later, order = Gate(), Gate(), []
    queue.put_reads([first])
    queue.put(lambda: order.append((first.ended.is_set(), later.began.is_set())))
    queue.put_reads([later])
    assert begun(first)
    assert not later.began.wait(0.05)
    first.end.set()
    assert begun(later)
    later.end.set()
    assert queue.synchronize() is None and order == [(True, False)]


def test_a_wait_for_something_else_holds_up_what_is_queued_after_it_and_no_read_before_it(queue):
    first, later, there = Gate(), Gate(), threading.Event()
    queue.put_reads([first])
    queue.put_wait(lambda: there.wait(SECONDS))
    queue.put_reads([later])
    assert begun(first)
    first.end.set()
    assert first.ended.wait(SECONDS) and not later.began.wait(0.05)
    there.set()
    assert begun(later)
    later.end.set()


def test_a_failed_read_lets_marks_pass_and_what_follows_is_skipped_until_its_error_is_raised(queue):
    first, ran = Gate(), []
    queue.put_reads([first, lambda: 1 / 0])
    mark = queue.mark()
    assert begun(first) and not mark.latch.is_open
    queue.put(lambda: ran.append("skipped"))
    queue.put_reads([lambda: ran.append("skipped")])
    first.end.set()
    queue.wait(mark)
    assert isinstance(queue.synchronize(), ZeroDivisionError) and not ran
    queue.put_reads([lambda: ran.append("read")])
    assert queue.synchronize() is None and ran == ["read"]


def test_a_wait_that_finds_no_error_any_more_returns_after_it_was_noted(queue):
    held, noted, seen = Held(), [], []

    def note(error):
        held.wait()
        noted.append(error)

    queue.put(lambda: 1 / 0)
    held.run(lambda: queue.synchronize(note), lambda: seen.append((queue.synchronize(), len(noted))))
    assert seen == [(None, 1)]


def test_closing_waits_for_the_reads_that_run_and_skips_the_rest(queue):
    first, second, ran = Gate(), Gate(), []
    queue.put_reads([first, second, lambda: ran.append(1)])
    assert begun(first, second)
    threading.Timer(0.02, lambda: (first.end.set(), second.end.set())).start()
    queue.close()
    assert first.ended.is_set() and second.ended.is_set() and not ran
    assert isinstance(queue.synchronize(), gs.BackendError)


def test_time_in_which_two_reads_run_counts_once(queue, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("ggml_sched.backends.store.queue.time.perf_counter", lambda: clock[0])
    first, second = Gate(), Gate()
    queue.put_reads([first, second])
    assert begun(first, second)
    clock[0] = 2.0
    first.end.set()
    assert first.ended.wait(SECONDS)
    clock[0] = 5.0
    second.end.set()
    assert queue.synchronize() is None and queue.seconds == 5.0


# -- weights in parts ------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch):
    """Weights of more than a few blocks are read in parts."""
    monkeypatch.setattr(store_module, "PART", 4 * BLOCK)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("size", [1, 4 * BLOCK, 8 * BLOCK - 1, 8 * BLOCK, 100_003])
@pytest.mark.parametrize("first", [0, 1888, 4 * BLOCK, 4 * BLOCK + 1])
def test_parts_have_all_bytes_of_a_weight_and_write_no_others(parts, tmp_path, first, size, direct):
    content = os.urandom(first + size + 77)
    (tmp_path / "file").write_bytes(content)
    found = []
    with gs.FileStore(direct=direct) as store, gs.CpuBackend(1) as cpu:
        store.listener = found.append
        weight = gs.Context().tensor("i8", size, "w")
        with store.open_file(tmp_path / "file") as buffer:
            gs.bind_resident(weight, buffer, first)
            memory = aligned(size + ROOM + 64)
            memory[:] = 7
            place = cpu.buffer_from_ptr(memory)
            at = store.shift(weight, place.base)
            copy = gs.Context().tensor("i8", size, "copy")
            gs.bind_resident(copy, place, at)
            store.fetch(weight, 0, size, copy, (0, size + ROOM))
            store.synchronize()
            assert memory[at : at + size].tobytes() == content[first : first + size]
            assert (memory[size + ROOM :] == 7).all()
            if direct is False:
                assert (memory[:at] == 7).all() and (memory[at + size :] == 7).all()
            assert store.traffic.fetches == 1 and store.traffic.nbytes == size
            assert [(one.tensor, one.nbytes) for one in found] == [("w", size)]


def test_large_weights_are_read_by_two_threads_and_small_ones_by_one(parts, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(100 * BLOCK))
    read = []
    with gs.FileStore() as store, gs.CpuBackend(1) as cpu:
        buffer, place = store.open_file(tmp_path / "file"), cpu.buffer_from_ptr(aligned(100 * BLOCK))
        real = buffer.file.preadv
        meeting = threading.Barrier(2)

        def preadv(fd, out, offset):
            read.append((offset, len(out)))
            meeting.wait(SECONDS)
            return real(fd, out, offset)

        vars(buffer.file)["preadv"] = preadv
        for size, n in ((8 * BLOCK, 2), (16 * BLOCK, 4)):
            weight, copy = gs.Context().tensor("i8", size, "w"), gs.Context().tensor("i8", size, "copy")
            gs.bind_resident(weight, buffer, 0)
            gs.bind_resident(copy, place, 0)
            read.clear()
            store.fetch(weight, 0, size, copy, (0, size))
            store.synchronize()
            assert sorted(read) == [(k * 4 * BLOCK, 4 * BLOCK) for k in range(n)]
        del vars(buffer.file)["preadv"]
        buffer.close()


def test_a_part_that_cannot_be_read_is_a_fetch_error_of_its_weight(parts, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(16 * BLOCK))
    with gs.FileStore() as store, gs.CpuBackend(1) as cpu:
        buffer, place = store.open_file(tmp_path / "file"), cpu.buffer_from_ptr(aligned(16 * BLOCK))
        real = buffer.file.preadv

        def preadv(fd, out, offset):
            if offset >= 8 * BLOCK:
                raise OSError(5, "Input/output error")
            return real(fd, out, offset)

        weight, copy = gs.Context().tensor("i8", 16 * BLOCK, "w"), gs.Context().tensor("i8", 16 * BLOCK, "copy")
        gs.bind_resident(weight, buffer, 0)
        gs.bind_resident(copy, place, 0)
        vars(buffer.file)["preadv"] = preadv
        store.fetch(weight, 0, 16 * BLOCK, copy, (0, 16 * BLOCK))
        with pytest.raises(gs.FetchError) as raised:
            store.synchronize()
        assert raised.value.tensor == "w" and raised.value.code == 5 and raised.value.start >= 8 * BLOCK
        assert store.traffic.fetches == 0
        del vars(buffer.file)["preadv"]
        store.fetch(weight, 0, 16 * BLOCK, copy, (0, 16 * BLOCK))
        store.synchronize()
        assert np.array_equal(place.memory[: 16 * BLOCK], np.fromfile(tmp_path / "file", np.uint8))
        buffer.close()
