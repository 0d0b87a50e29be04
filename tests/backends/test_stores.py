"""Stores: weights in host memory and in files, read by threads, with typed errors for what a disk can do."""

import errno
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from forks import in_child
from processes import run_python

import ggml_sched as gs
from ggml_sched.backends.store import queue as queue_module
from ggml_sched.backends.store.files import BLOCK, CHUNK, ROOM, StoredFile, aligned
from ggml_sched.backends.store.queue import StoreQueue
from ggml_sched.backends.store.rows import GAP, read_together
from ggml_sched.threads.workers import Crew

WIDTH = 96


@pytest.fixture
def data():
    rng = np.random.default_rng(3)
    return [(rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for _ in range(6)]


@pytest.fixture
def table():
    return np.random.default_rng(4).standard_normal((1000, WIDTH)).astype(np.float16)


@pytest.fixture
def path(tmp_path, data, table):
    """A file with the weights, each at a multiple of 32 that is none of a block."""
    path = tmp_path / "weights.bin"
    with open(path, "wb") as file:
        file.write(os.urandom(1888))
        for values in (*data, table):
            file.write(b"\0" * (-file.tell() % 32) + b"\0" * 32)
            file.write(values.tobytes())
    return path


def places(data, table):
    at, found = 1888, []
    for values in (*data, table):
        at += -at % 32 + 32
        found.append(at)
        at += values.nbytes
    return found


class Case:
    """A chain of products behind a GET_ROWS, with all weights in one store, on a CPU backend."""

    def __init__(self, store, data, table, path=None, windows=None, n_ids=5):
        self.store, self.cpu = store, gs.CpuBackend(1)
        weights = gs.Context("weights")
        tensors = [weights.tensor("f32", (WIDTH, WIDTH), f"w{k}") for k in range(len(data))]
        tensors.append(weights.tensor("f16", (WIDTH, len(table)), "table"))
        if path is None:
            self.buffer = store.alloc_tensors(weights)
            for t, values in zip(tensors, (*data, table), strict=True):
                store.set_tensor(t, values.tobytes())
        else:
            self.buffer = store.open_file(path)
            for t, place in zip(tensors, places(data, table), strict=True):
                gs.bind_resident(t, self.buffer, place)
        self.tensors, ctx = tensors, gs.Context()
        self.ids = ctx.tensor("i32", n_ids, "ids", input=True)
        x = ctx.get_rows(tensors[-1], self.ids)
        for t in tensors[:-1]:
            x = ctx.mul_mat(t, x)
        self.graph, self.output = gs.Graph(ctx.set_output(x)), x
        self.scheduler = gs.Scheduler([store, self.cpu], windows=None if windows is None else {self.cpu: windows})
        self.plan = self.scheduler.alloc(self.graph)

    def run(self, ids=(3, 999, 0, 3, 4)):
        self.ids.set(np.array(ids, np.int32))
        self.scheduler.compute(self.graph)
        return self.output.numpy()

    def close(self):
        self.scheduler.close()
        self.store.close()
        self.buffer.close()
        self.cpu.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


@pytest.fixture
def expected(data, table):
    with gs.CpuBackend(1) as cpu, gs.Scheduler([cpu]) as scheduler:
        weights, ctx = gs.Context("weights"), gs.Context()
        tensors = [weights.tensor("f32", (WIDTH, WIDTH), f"w{k}") for k in range(len(data))]
        tensors.append(weights.tensor("f16", (WIDTH, len(table)), "table"))
        cpu.alloc_tensors(weights)
        for t, values in zip(tensors, (*data, table), strict=True):
            cpu.set_tensor(t, values.tobytes())
        ids = ctx.tensor("i32", 5, "ids", input=True)
        x = ctx.get_rows(tensors[-1], ids)
        for t in tensors[:-1]:
            x = ctx.mul_mat(t, x)
        graph = gs.Graph(ctx.set_output(x))
        scheduler.alloc(graph)

        def run(*given):
            ids.set(np.array(given or (3, 999, 0, 3, 4), np.int32))
            scheduler.compute(graph)
            return x.numpy().copy()

        yield run


def rows():
    return gs.CpuBackend(1, name="rows")


STORES = {
    "memory": lambda: gs.Store(rows=rows()),
    "memory without rows": gs.Store,
    "file": lambda: gs.FileStore(rows=rows()),
    "file without rows": gs.FileStore,
    "file through the page cache": lambda: gs.FileStore(rows=rows(), direct=False),
}


@pytest.mark.parametrize("windows", [None, 0, 100_000, 10**9])
@pytest.mark.parametrize("kind", STORES)
def test_results_have_the_bits_of_weights_in_memory(kind, windows, data, table, path, expected):
    with Case(STORES[kind](), data, table, path if "file" in kind else None, windows) as case:
        case.plan.verify()
        for ids in ((3, 999, 0, 3, 4), (7, 8, 9, 7, 9), (999, 998, 997, 0, 1)):
            assert np.array_equal(case.run(ids), expected(*ids))
        for _ in range(3):
            case.scheduler.compute_async(case.graph)
        case.scheduler.synchronize()
        assert np.array_equal(case.output.numpy(), expected(999, 998, 997, 0, 1))


@pytest.mark.parametrize("rows, size, most, parts", [
    ([], 100, 0, []),
    ([7], 100, 1, [(0, 1)]),
    ([7, 8, 9], 100, 3, [(0, 3)]),
    ([0, 4, 5], 100, 5, [(0, 2), (2, 3)]),                      # 6 rows would be more memory than was planned
    ([0, 1, 3], GAP, 9, [(0, 3)]),                              # a gap of GAP bytes
    ([0, 1, 4], GAP, 9, [(0, 2), (2, 3)]),
    ([0, 1, 3], GAP + 1, 9, [(0, 2), (2, 3)]),
])
def test_rows_near_each_other_are_read_together_in_no_more_memory_than_all_take(rows, size, most, parts):
    assert [*read_together(rows, size, most)] == parts


def test_bytes_and_rows_are_counted_and_the_listener_gets_each_fetch(data, table, path):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        heard = []
        case.store.listener = heard.append
        case.run()
        fetched = len(data) * data[0].nbytes
        traffic = case.store.traffic
        # Rows 0, 3 and 4 are read once and together, with what lies between.
        assert traffic.fetches == len(data) and traffic.nbytes == fetched + 6 * WIDTH * 2
        assert traffic.seconds > 0 and traffic.stalled > 0
        assert [f.tensor for f in heard[:2]] == ["table"] * 2
        assert sorted(f.tensor for f in heard[2:]) == [f"w{k}" for k in range(len(data))]    # two are read together
        assert sum(f.nbytes for f in heard) == traffic.nbytes and all(f.began <= f.ended for f in heard)


def test_an_id_that_names_no_row_is_an_error_and_the_store_works_afterwards(data, table, path, expected):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        for wrong in (1000, -1):
            with pytest.raises(gs.BackendError, match=rf"GET_ROWS\): id {wrong} does not name one of 1000 rows"):
                case.run((3, wrong, 0, 3, 4))
        assert np.array_equal(case.run(), expected())


def test_weights_of_a_file_are_read_and_not_written(data, table, path):
    with Case(gs.FileStore(), data, table, path) as case:
        assert np.array_equal(case.tensors[2].numpy(), data[2])
        with pytest.raises(gs.BackendError, match="is read-only"):
            case.tensors[2].set(data[0])
        with pytest.raises(gs.BackendError, match="lie outside"):
            case.buffer.read(case.buffer.size - 3, memoryview(bytearray(4)))
        out = bytearray(data[0].nbytes)
        case.buffer.read(places(data, table)[0], memoryview(out))
        assert out == data[0].tobytes()


# -- reading files ----------------------------------------------------------------------------------------------


def test_reads_of_any_range_to_any_place_give_the_bytes_of_the_file(tmp_path):
    content = os.urandom(3 * BLOCK + 777)
    path = tmp_path / "file"
    path.write_bytes(content)
    rng = np.random.default_rng(0)
    for direct in (None, False):
        file = StoredFile(str(path), direct)
        for _ in range(300):
            start = int(rng.integers(0, len(content)))
            size = int(rng.integers(0, len(content) - start + 1))
            memory = np.full(size + 2 * ROOM, 0x55, np.uint8)
            first = int(rng.integers(0, ROOM))
            at = first + (file.shift(start, memory.ctypes.data + first) if rng.random() < 0.7 else 0)
            room = (first, first + size + ROOM) if rng.random() < 0.7 else (at, at + size)
            file.read(start, memory, at, size, room)
            assert memory[at : at + size].tobytes() == content[start : start + size]
            assert (memory[: room[0]] == 0x55).all() and (memory[room[1] :] == 0x55).all()
        file.close()
        assert file.closed
        with pytest.raises(gs.FetchError, match="the file is closed"):
            file.read(0, memory, 0, 1, (0, 1))


def test_the_room_of_a_copy_is_enough_for_whole_blocks_wherever_it_begins(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * BLOCK))
    file = StoredFile(str(path))
    if not file.is_direct:
        pytest.skip("the file system has no direct reads")
    calls = []
    file.preadv = lambda fd, out, offset: calls.append(fd) or os.preadv(fd, [out], offset)
    for start in (0, 1, 32, BLOCK - 1, BLOCK, BLOCK + 8):
        for address in (0, 8, 64, BLOCK - 64, BLOCK - 8):
            memory = aligned(BLOCK + 5 + ROOM + BLOCK)[address:]
            at = file.shift(start, memory.ctypes.data)
            assert at >= 0 and at + BLOCK + 5 <= BLOCK + 5 + ROOM
            calls.clear()
            file.read(start, memory, at, BLOCK + 5, (0, BLOCK + 5 + ROOM))
            assert calls == [file._direct]
    file.close()


def test_what_is_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        gs.FileStore().open_file(tmp_path / "nothing")
    with pytest.raises(gs.FetchError, match="not a regular file"):
        StoredFile("/dev/null")
    with pytest.raises(gs.FetchError, match="not a regular file"):
        gs.FileStore().open_file(tmp_path)


def test_a_named_pipe_is_an_error_and_not_a_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    run_python("-c", f"""
import signal
import ggml_sched as gs
signal.alarm(20)
try:
    gs.FileStore().open_file({str(tmp_path / "pipe")!r})
except gs.FetchError as error:
    assert "not a regular file" in str(error)
else:
    raise AssertionError
""")


def test_direct_reads_can_be_required(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    monkeypatch.setattr(os, "O_DIRECT", 1 << 30, raising=False)
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: (
        (_ for _ in ()).throw(OSError(errno.EINVAL, "Invalid argument")) if flags & 1 << 30 else real(path, flags)))
    store = gs.FileStore(direct=True)
    with pytest.raises(gs.FetchError, match="no direct reads: .*Invalid argument"):
        store.open_file(path)
    with gs.FileStore() as other, other.open_file(path) as buffer:
        assert not buffer.file.is_direct


# -- what a disk can do ----------------------------------------------------------------------------------------------


def faulty(case, answer):
    """Let `answer(read, number)` replace the reads of a case's file; `read(limit=None)` is the real one."""
    file, count = case.buffer.file, [0]

    def preadv(fd, out, offset):
        count[0] += 1
        return answer(lambda limit=None: os.preadv(fd, [out[:limit]], offset), count[0] - 1)

    file.preadv = preadv
    return count


def fails(code):
    def answer(read, number):
        raise OSError(code, os.strerror(code))

    return answer


@pytest.mark.parametrize("direct", [None, False])
def test_an_error_of_the_disk_is_typed_and_the_next_compute_is_right(direct, data, table, path, expected):
    with Case(gs.FileStore(rows=rows(), direct=direct), data, table, path) as case:
        case.run()
        faulty(case, lambda read, number: read() if number != 4 else fails(errno.EIO)(read, number))
        what = r"'w\d': .*bytes \d+ .. \d+ cannot be read: Input/output error"
        with pytest.raises(gs.FetchError, match=what) as raised:
            case.run()
        error = raised.value
        assert error.path == str(path) and error.code == errno.EIO and error.tensor.startswith("w")
        assert error.stop - error.start == data[0].nbytes
        assert np.array_equal(case.run(), expected())
        # Queued computes: the error is that of `synchronize`, once.
        faulty(case, lambda read, number: read() if number != 9 else fails(errno.EIO)(read, number))
        for _ in range(3):
            case.scheduler.compute_async(case.graph)
        with pytest.raises(gs.FetchError):
            case.scheduler.synchronize()
        case.scheduler.synchronize()
        assert np.array_equal(case.run(), expected())


@pytest.mark.parametrize("part", [1, 100, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("direct", [None, False])
def test_short_reads_are_continued(direct, part, data, table, path, expected):
    with Case(gs.FileStore(rows=rows(), direct=direct), data, table, path) as case:
        count = faulty(case, lambda read, number: read(part) if number % 3 == 0 else read())
        assert np.array_equal(case.run(), expected()) and count[0] > len(data)


def test_a_read_goes_on_while_another_thread_gives_up_direct_reads(tmp_path):
    path = tmp_path / "file"
    content = os.urandom(CHUNK + BLOCK)
    path.write_bytes(content)
    file = StoredFile(str(path))
    if not file.is_direct:
        pytest.skip("the file system has no direct reads")

    def preadv(fd, out, offset):
        got = os.preadv(fd, [out], offset)
        file.give_up_direct()       # as the other thread does between two chunks of this read
        return got

    file.preadv = preadv
    memory = aligned(len(content))
    file.read(0, memory, 0, len(content), (0, len(content)))
    assert memory.tobytes() == content and not file.is_direct
    file.reopen_direct()
    assert file.is_direct
    file.close()
    assert not file.is_direct


def test_a_file_system_that_refuses_direct_reads_later_is_read_through_the_page_cache(data, table, path, expected):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        if not case.buffer.file.is_direct:
            pytest.skip("the file system has no direct reads")
        faulty(case, lambda read, number: fails(errno.EINVAL)(read, number) if number == 2 else read())
        assert np.array_equal(case.run(), expected()) and not case.buffer.file.is_direct
        assert np.array_equal(case.run(), expected())


@pytest.mark.parametrize("direct", [None, False])
def test_a_file_that_was_shortened_is_an_error_that_names_the_weight_and_the_range(direct, data, table, path, expected):
    with Case(gs.FileStore(rows=rows(), direct=direct), data, table, path) as case:
        case.run()
        content, stamp = path.read_bytes(), os.stat(path).st_mtime_ns
        os.truncate(path, places(data, table)[3] + 100)
        with pytest.raises(gs.FetchError, match="was changed after it was opened|the file ends at byte"):
            case.run()
        path.write_bytes(content)
        with pytest.raises(gs.FetchError, match="was changed after it was opened"):
            case.run()
        os.utime(path, ns=(stamp, stamp))       # the very file again
        assert np.array_equal(case.run(), expected())


def test_a_file_that_was_replaced_is_still_the_one_that_was_opened(data, table, path, expected):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        other = path.with_name("other")
        other.write_bytes(os.urandom(path.stat().st_size))
        os.replace(other, path)
        assert np.array_equal(case.run(), expected())


def test_a_closed_file_is_an_error(data, table, path):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        case.run()
        case.buffer.close()
        with pytest.raises(gs.Error):
            case.run()


@pytest.mark.parametrize("windows", [None, 10**9])
@pytest.mark.parametrize("direct", [None, False])
def test_a_file_that_is_closed_while_it_is_read_is_an_error_of_the_package(direct, windows, data, table, path):
    with Case(gs.FileStore(rows=rows(), direct=direct), data, table, path, windows) as case:
        closed = threading.Event()

        def close(read, number):
            got = read()
            case.buffer.close()
            closed.set()
            return got

        faulty(case, close)
        with pytest.raises(gs.Error):
            case.run()
        assert closed.is_set()


def test_a_weight_whose_buffer_is_closed_between_two_steps_is_an_error_of_the_package(data, table, path):
    with Case(gs.FileStore(), data, table, path) as case:
        case.ids.set(np.zeros(5, np.int32))
        with pytest.raises(gs.Error):
            case.scheduler.compute(case.graph, callback=lambda node: case.buffer.close() or True)


# -- the thread ----------------------------------------------------------------------------------------------------


def names():
    return [thread.name for thread in threading.enumerate()]


def test_threads_start_with_the_first_fetch_and_end_with_the_store(data, table, path):
    before = names()
    case = Case(gs.FileStore("disk"), data, table, path)
    assert names() == before
    case.run()
    assert sorted(names()) == sorted([*before, *["ggml-sched disk"] * 4])
    case.close()
    assert names() == before
    with pytest.raises(gs.BackendError, match="'disk' is closed"):
        case.store.open_file(path)


def test_a_store_that_is_freed_ends_its_threads(data, table, path):
    before = names()
    case = Case(gs.FileStore("disk"), data, table, path)
    case.run()
    case.scheduler.close()
    del case
    gc.collect()
    limit = time.monotonic() + 10
    while names() != before and time.monotonic() < limit:
        time.sleep(0.01)
    assert names() == before


def in_thread(call):
    """(a thread that makes a call, the list that gets its result)."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


def test_a_wait_that_begins_while_the_queue_is_closed_ends_with_its_thread():
    queue, begun, go = StoreQueue("disk"), threading.Event(), threading.Event()
    queue.put(lambda: begun.set() or go.wait(20))
    queue.put(lambda: None)
    assert begun.wait(20)
    closing, _ = in_thread(queue.close)
    while not queue.is_closing:
        time.sleep(0.001)
    time.sleep(0.02)
    waiting, found = in_thread(queue.synchronize)
    waiting.join(0.1)
    assert waiting.is_alive()
    go.set()
    for thread in (waiting, closing):
        thread.join(20)
        assert not thread.is_alive()
    assert isinstance(found[0], gs.BackendError) and queue.synchronize() is None


def test_a_wait_that_the_end_of_the_thread_has_overtaken_ends():
    queue = StoreQueue("disk")
    queue.put(lambda: None)
    assert queue.synchronize() is None          # executed: to close the queue skips nothing
    crew = queue._crew
    put, crew.put = crew.put, lambda call: queue.close() or put(call)
    waiting, found = in_thread(queue.synchronize)
    waiting.join(10)
    assert not waiting.is_alive() and found == [None]


def test_closing_while_it_reads_skips_what_is_queued(data, table, path):
    case = Case(gs.FileStore(rows=rows()), data, table, path, windows=10**9)
    begun, go = threading.Event(), threading.Event()

    def slow(read, number):
        begun.set()
        assert go.wait(20)
        return read()

    count = faulty(case, slow)
    raised = []

    def compute():
        try:
            case.run()
        except gs.Error as error:
            raised.append(error)

    worker = threading.Thread(target=compute)
    worker.start()
    assert begun.wait(20)
    closer = threading.Thread(target=case.store.close)
    closer.start()
    while not case.store._queue.is_closing:
        time.sleep(0.001)
    go.set()
    closer.join(20)
    worker.join(20)
    assert not closer.is_alive() and not worker.is_alive() and count[0] <= 2
    assert "closed" in str(raised[0])
    case.close()


def test_an_interrupt_while_the_host_waits_leaves_all_usable(data, table, path, expected):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        case.run()

        def slow(read, number):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            return read()

        faulty(case, slow)
        with pytest.raises(KeyboardInterrupt):
            case.run()
        assert np.array_equal(case.run(), expected())


def test_a_child_process_reads_on_a_thread_of_its_own(data, table, path, expected):
    with Case(gs.FileStore(rows=rows()), data, table, path) as case:
        case.run()
        wanted = expected()

        def child():
            assert np.array_equal(case.run(), wanted)

        assert in_child(child) == 0
        assert np.array_equal(case.run(), wanted)


def test_a_process_may_end_while_a_store_reads():
    """The thread is a daemon: it neither keeps the process alive nor breaks its end."""
    program = """
import os, tempfile
import ggml_sched as gs
file = tempfile.NamedTemporaryFile()
file.write(os.urandom(1 << 24))
file.flush()
store, cpu, weights, memory = gs.FileStore(), gs.CpuBackend(1), gs.Context(), gs.Context()
buffer = store.open_file(file.name)
w = weights.tensor("i8", 1 << 24, "w")
gs.bind_resident(w, buffer, 0)
copy = memory.tensor("i8", (1 << 24) + store.margin, "copy")
place = cpu.alloc_tensors(memory)
for _ in range(200):
    store.fetch(w, 0, 1 << 24, copy, (0, copy.nbytes))
print("queued")
"""
    assert run_python("-c", program).stdout == "queued\n"


def test_an_event_of_a_store_passes_after_a_failure_and_what_is_behind_it_is_skipped():
    queue = StoreQueue("disk")
    ran = []
    queue.put(lambda: ran.append(1))
    queue.put(lambda: 1 / 0)
    queue.put(lambda: ran.append(2))
    queue.wait(queue.mark())
    assert ran == [1]
    assert isinstance(queue.synchronize(), ZeroDivisionError) and queue.synchronize() is None
    queue.put(lambda: ran.append(3))
    queue.wait(queue.mark())
    assert ran == [1, 3]
    queue.close()
    queue.close()
    with pytest.raises(gs.BackendError, match="'disk' is closed"):
        queue.put(ran.clear)


def test_two_threads_that_queue_the_first_task_share_a_crew(monkeypatch):
    made = []

    def slow(*arguments, **options):
        time.sleep(0.05)        # both threads are here, without a lock
        made.append(Crew(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(queue_module, "Crew", slow)
    with gs.Store("store") as store:
        threads = [threading.Thread(target=store.put, args=(lambda: None,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.synchronize()
        assert len(made) == 1


def test_a_host_without_threads_is_an_error_and_not_a_hang(monkeypatch, data, table, path):
    with Case(gs.FileStore("disk"), data, table, path) as case:
        monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(gs.BackendError, match="'disk': the host gives no thread to read on"):
            case.run()
        monkeypatch.undo()
        case.run()


def test_large_weights_are_read_in_pieces(tmp_path):
    path = tmp_path / "file"
    content = os.urandom(2 * CHUNK + 12345)
    path.write_bytes(content)
    file = StoredFile(str(path))
    memory = aligned(len(content) + ROOM)
    sizes = []
    real = file.preadv
    file.preadv = lambda fd, out, offset: sizes.append(len(out)) or real(fd, out, offset)
    file.read(100, memory, file.shift(100, memory.ctypes.data), len(content) - 100, (0, memory.nbytes))
    at = file.shift(100, memory.ctypes.data)
    assert memory[at : at + len(content) - 100].tobytes() == content[100:]
    assert max(sizes) <= CHUNK and len(sizes) >= 3
    file.close()
