"""Weights of a mapped file move to huge pages while the model is used, where memory allows it."""

import gc
import io
import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest
from ggml_here import IS_HERE, WHY_NOT
from ggml_here import backend as ggml_backend
from small_llama import contents, written

import ggml_sched as gs
from ggml_sched.llama import huge_pages, load, random_llama
from ggml_sched.llama.gguf import GGUFFile, open_gguf
from ggml_sched.llama.huge_pages import LOOKS, PIECE, STEPS, HugePages, huge_page_size
from ggml_sched.llama.memory import Memory

SHAPES = {"n_vocab": 8192, "n_embd": 512, "n_layer": 3, "n_head": 8, "n_ff": 2048, "n_ctx": 128}
MODEL = random_llama(7, **SHAPES)
EMBEDDING = 8192 * 512 * 4
HUGE = huge_page_size()


@pytest.fixture
def huge():
    """Skips where Linux has no huge pages to give, now or at all."""
    if not HUGE:
        pytest.skip("this system gives no huge pages")
    size = 100 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:: mmap.PAGESIZE] = 1
    if in_huge_pages(array.ctypes.data, array.ctypes.data + size) < size - 2 * HUGE:
        pytest.skip("Linux has no huge pages left")


@pytest.fixture
def small(monkeypatch):
    """Every file counts as one that is in small pages, however Linux has it in memory, and memory as ample."""
    monkeypatch.setattr(huge_pages, "_small", lambda ranges: ranges)
    monkeypatch.setattr(huge_pages, "host_memory", lambda: 1 << 40)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(MODEL)
    return file


@pytest.fixture
def buffer():
    return gs.Buffer(gs.DryBackend("A"), 0)


def mapped(size) -> tuple[mmap.mmap, int]:
    """Private memory that is not zero, in small pages, and the address of its first huge page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(memory, np.uint32)[:] = np.arange(size // 4)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    return memory, -(-base // HUGE) * HUGE


def in_huge_pages(first, stop) -> int:
    return sum(huge for start, end, _, huge in huge_pages._mappings() if start < stop and first < end)


def on(model) -> Memory:
    (memory,) = model.memory().values()
    return memory


def mapped_bytes() -> int:
    """Bytes of address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


# -- in a model -----------------------------------------------------------------------------


def test_weights_move_in_parts_after_the_first_evaluation_and_logits_keep_their_bits(path, huge, small):
    tokens = np.random.default_rng(1).integers(0, 8192, STEPS + 2)
    with load(path, n_ctx=128, huge_pages=False) as model:
        want = [model.eval([token]) for token in tokens]
        assert on(model).mapped == on(model).weights
    with load(path, n_ctx=128) as model:
        weights, mapped_now = on(model).weights, []
        for token, logits in zip(tokens, want, strict=True):
            assert np.array_equal(model.eval([token]), logits)
            mapped_now.append(on(model).mapped)
        assert mapped_now[0] == weights > mapped_now[1]
        assert mapped_now == sorted(mapped_now, reverse=True)
        assert all(before - after <= weights / STEPS + HUGE
                   for before, after in zip(mapped_now, mapped_now[1:], strict=False))
        # All but the embedding, of which a token reads one row, and what is left of a huge page at each end.
        assert EMBEDDING <= mapped_now[-1] <= EMBEDDING + 4 * HUGE
        moved = sum(in_huge_pages(buffer.base, buffer.base + buffer.size)
                    for buffers in model.weights.buffers.values() for buffer in buffers)
        assert moved >= weights - mapped_now[-1] > 0
        assert not model._runner.moves


class Copying(gs.CpuBackend):
    """Copies what it is given, so that its buffer is not the mapping."""

    def buffer_from_ptr(self, source, *arguments):
        return super().buffer_from_ptr(np.array(source), *arguments)


@pytest.mark.parametrize("options", [{"huge_pages": False}, {"use_mmap": False}, {"backends": [Copying(1)]},
                                     {"memory": "1GiB"}])
def test_no_weight_moves_where_none_shall(path, small, monkeypatch, options):
    monkeypatch.setattr(GGUFFile, "prefer_huge_pages", lambda file: pytest.fail("advised"))
    with load(path, n_ctx=128, **options) as model:
        assert not model._runner.moves
        before = on(model).mapped
        for token in range(4):
            model.eval([token])
        assert on(model).mapped == before and not model._runner.moves


def test_weights_of_another_backend_that_are_copies_stay(path, huge, small):
    backends = [Copying(1, name="A"), gs.CpuBackend(1, name="B")]
    with load(path, backends, n_ctx=128) as model:
        for token in range(STEPS + 2):
            model.eval([token])
        copies, mapping = (sum(buffer.moved for buffer in model.weights.buffers[backend]) for backend in backends)
        assert not copies and mapping


def test_a_model_that_is_loaded_again_has_the_same_setting(path, huge, small):
    with load(path, n_ctx=128, huge_pages=False) as first, first.moved([gs.CpuBackend(1)]) as model:
        assert not model._runner.moves


def test_a_closed_model_has_freed_its_huge_pages(path, huge, small):
    def lived() -> int:
        with load(path, n_ctx=128) as model:
            for token in range(STEPS + 2):
                model.eval([token])
            assert on(model).mapped < EMBEDDING + 4 * HUGE
        return mapped_bytes()

    lived()
    assert abs(lived() - lived()) < EMBEDDING


def test_a_closed_model_that_is_still_named_has_freed_its_huge_pages(tmp_path, huge, small):
    metadata, tensors = contents(MODEL)
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(written(metadata | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(8192)]}, tensors))
    gc.collect()
    gc.disable()
    try:
        before, models = mapped_bytes(), []
        for _ in range(2):
            with load(path, n_ctx=128) as model:
                for token in range(STEPS + 2):
                    model.eval([token])
                assert on(model).mapped < EMBEDDING + 4 * HUGE
            models.append(model)
        assert models[0].metadata["tokenizer.ggml.tokens"][8191] == "t8191"
        assert mapped_bytes() - before < path.stat().st_size
    finally:
        gc.enable()


def test_a_prompt_in_several_batches_is_one_evaluation(path, huge, small):
    with load(path, n_ctx=128, n_batch=8) as model:
        model.eval(list(range(40)))
        assert on(model).mapped == on(model).weights
        model.eval([1])
        assert on(model).mapped < on(model).weights


def test_what_changes_sequences_without_an_evaluation_moves_nothing(path, huge, small):
    state = io.BytesIO()
    with load(path, n_ctx=128, n_seq=2) as model:
        model.eval([1])
        model.sequence(0).save(state)
    with load(path, n_ctx=128, n_seq=2) as model:
        model.sequence(0).restore(io.BytesIO(state.getvalue()))
        model.sequence(0).copy_to(1)
        model.eval([1])
        model.sequence(0).copy_to(1)
        assert on(model).mapped == on(model).weights
        model.embed([1])
        assert on(model).mapped < on(model).weights


def test_models_of_one_file_keep_their_own_pages(path, huge, small):
    with load(path, n_ctx=128) as a, load(path, n_ctx=128) as b:
        for token in range(STEPS + 2):
            want = a.eval([token])
        assert on(b).mapped == on(b).weights
        for token in range(STEPS + 2):
            seen = b.eval([token])
        a.close()
        assert np.array_equal(seen, want) and np.isfinite(b.eval([5])).all()


@pytest.mark.skipif(not IS_HERE, reason=WHY_NOT)
def test_weights_that_ggml_has_repacked_stay_in_the_file(tmp_path, huge, small):
    file = tmp_path / "m.gguf"
    file.write_bytes(random_llama(7, **SHAPES, dtype="q4_0"))
    with ggml_backend(1) as backend, load(file, [backend], n_ctx=128) as model:
        for token in range(STEPS + 2):
            model.eval([token])
        packed = model.weights["blk.0.ffn_up.weight"]
        if packed.buffer.packs.get(packed.offset) is None:
            pytest.skip("this ggml repacks no weights")
        assert on(model).mapped == on(model).weights


@pytest.mark.skipif(not IS_HERE, reason=WHY_NOT)
def test_a_copy_that_ggml_repacks_later_drops_no_byte_that_has_moved(path, huge, small):
    with ggml_backend(1) as backend, load(path, [backend], n_ctx=128) as model:
        for token in range(STEPS + 2):
            model.eval([token])
        weight = model.weights["blk.0.ffn_up.weight"]
        assert weight.buffer.moved > 0
        before = weight.numpy()
        backend.plain_unread(weight)
        assert np.array_equal(weight.numpy(), before)


# -- what moves, and when moving ends --------------------------------------------------------


def test_what_reads_bytes_while_they_move_finds_them(huge):
    memory, first = mapped(24 * HUGE)
    array = np.frombuffer(memory, np.uint8)
    start = first - array.ctypes.data
    read = array[start : start + 22 * HUGE].view(np.uint64)
    want, seen, ended = read.sum(), [], threading.Event()

    def reads() -> None:
        while not ended.is_set():
            seen.append(read.sum())

    thread = threading.Thread(target=reads)
    thread.start()
    try:
        for i in range(22):
            assert huge_pages._move(first + i * HUGE, HUGE)
    finally:
        ended.set()
        thread.join()
    assert set(seen) == {want} and read.sum() == want
    assert in_huge_pages(first, first + 22 * HUGE) >= 22 * HUGE


def test_ranges_in_huge_pages_stay(huge, monkeypatch, buffer):
    memory, first = mapped(10 * HUGE)
    assert huge_pages._move(first, 4 * HUGE)
    monkeypatch.setattr(huge_pages, "_move", lambda address, size: pytest.fail("moved"))
    assert HugePages({buffer: [(first, first + 4 * HUGE)]}).remaining == 0
    assert not HugePages({buffer: [(first, first + 4 * HUGE)]}).step()
    assert HugePages({buffer: [(first + 5 * HUGE, first + 8 * HUGE)]}).remaining == 3 * HUGE
    del memory


def test_ranges_count_as_small_unless_half_of_their_memory_is_in_huge_pages(tmp_path, monkeypatch):
    def smaps(start: int, name: str, huge: int) -> str:
        return (f"{start:x}-{start + (8 << 20):x} r--p 0 08:01 7  /a b:\nSize: 8192 kB\nRss: 4096 kB\n"
                f"{name}: {huge} kB\nVmFlags: rd mr\n")

    names = ("AnonHugePages", "FilePmdMapped", "ShmemPmdMapped", "ShmemPmdMapped", "THPeligible")
    sizes = (2048, 2048, 4096, 1024, 4096)
    starts = [i << 24 for i in range(len(names))]
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: 1 << 21)
    monkeypatch.setattr(huge_pages, "PAGES", str(tmp_path / "smaps"))
    ranges = [(start + 1, start + 9) for start in starts]
    assert not huge_pages._small(ranges)
    (tmp_path / "smaps").write_text("".join(map(smaps, starts, names, sizes)))
    assert huge_pages._small(ranges) == ranges[3:]
    (tmp_path / "smaps").write_text("x-y\n")
    assert not huge_pages._small(ranges)


def test_only_whole_huge_pages_move(small, monkeypatch, buffer):
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: 1 << 21)
    moved = []
    monkeypatch.setattr(huge_pages, "_move", lambda address, size: moved.append((address, size)) or True)
    page = 1 << 21
    pages = HugePages({buffer: [(page + 1, 3 * page - 1), (5 * page + 8, 8 * page + 8), (9 * page, 10 * page)]})
    assert pages.remaining == 3 * page
    while pages.step():
        pass
    assert sorted(moved) == [(6 * page, page), (7 * page, page), (9 * page, page)]
    assert buffer.moved == 3 * page


def test_little_is_in_memory_twice(small, monkeypatch, buffer):
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: 1 << 21)
    moved = []
    monkeypatch.setattr(huge_pages, "_move", lambda address, size: moved.append(size) or True)
    assert HugePages({buffer: [(0, 64 << 30)]}).step()
    assert sum(moved) == 2 << 30 and max(moved) == PIECE


def test_moving_ends_where_memory_is_scarce(small, monkeypatch, buffer):
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: 1 << 21)
    monkeypatch.setattr(huge_pages, "_move", lambda address, size: True)
    size, moved = 64 << 21, LOOKS * 2 << 21         # the free memory is read once in LOOKS steps
    free = iter([4 * size, 4 * (size - moved), 4 * (size - 2 * moved) - 1, None])
    monkeypatch.setattr(huge_pages, "host_memory", lambda: next(free))
    pages = HugePages({buffer: [(0, size)]})
    assert all(pages.step() for _ in range(2 * LOOKS)) and buffer.moved == 2 * moved
    assert not pages.step() and buffer.moved == 2 * moved and pages.remaining == 0
    assert not HugePages({buffer: [(0, size)]}).step()
    monkeypatch.setattr(huge_pages, "host_memory", lambda: 4 * size - 1)
    assert not HugePages({buffer: [(0, size)]}).step()


@pytest.mark.parametrize("failing", ["mmap", "madvise", "mprotect", "mremap"])
def test_what_linux_refuses_ends_moving_and_loses_nothing(huge, monkeypatch, failing, buffer):
    real = huge_pages._libc()
    memory, first = mapped(10 * HUGE)
    before = memory[:]
    huge_pages._move(first, HUGE)       # imports and tables of functions are made
    bytes_before = mapped_bytes()

    class Refusing:
        def __getattr__(self, name):
            if name != failing:
                return getattr(real, name)
            if name == "madvise":       # small pages, as where memory is in pieces
                return lambda address, size, advice: real.madvise(address, size, mmap.MADV_NOHUGEPAGE)
            return lambda *arguments: 1 if name == "mprotect" else huge_pages.FAILED

    monkeypatch.setattr(huge_pages, "_libc", Refusing)
    pages = HugePages({buffer: [(first + HUGE, first + 8 * HUGE)]})
    assert not pages.step() and buffer.moved == 0 and pages.remaining == 0
    assert mapped_bytes() < bytes_before + HUGE and memory[:] == before


def test_half_of_the_memory_in_huge_pages_is_enough(huge):
    for n, enough in ((2, True), (3, False)):
        memory = mmap.mmap(-1, 6 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = np.frombuffer(memory, np.uint8).ctypes.data
        first = -(-base // HUGE) * HUGE
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(mmap.MADV_HUGEPAGE, first - base, HUGE)
        assert huge_pages._has_huge_pages(first, n * HUGE) == enough


def test_what_surrounds_whole_huge_pages_is_given_back(huge, monkeypatch):
    real = huge_pages._libc()

    class Unaligned:
        def __getattr__(self, name):
            return getattr(real, name)

        def mmap(self, address, size, *arguments):
            taken = real.mmap(address, size + mmap.PAGESIZE, *arguments)
            real.munmap(taken, mmap.PAGESIZE)
            return taken + mmap.PAGESIZE

    memory, first = mapped(10 * HUGE)
    before = memory[:]
    bytes_before = mapped_bytes()
    monkeypatch.setattr(huge_pages, "_libc", Unaligned)
    assert all(huge_pages._move(first + i * HUGE, HUGE) for i in range(8))
    assert mapped_bytes() < bytes_before + HUGE and memory[:] == before


def test_a_system_may_refuse_the_advice(path):
    class Refusing:
        def madvise(self, advice: int) -> None:
            raise OSError("no huge pages")

    with open_gguf(path) as file:
        mapping, file._mapping = file._mapping, Refusing()
        file.prefer_huge_pages()
        file._mapping = mapping


def test_an_interrupted_move_leaves_no_copy(huge, monkeypatch):
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    memory, first = mapped(10 * HUGE)
    before = memory[:]
    bytes_before = mapped_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(huge_pages.ctypes, "memmove", interrupt)
        huge_pages._move(first, 8 * HUGE)
    assert mapped_bytes() < bytes_before + HUGE and memory[:] == before


def test_a_system_without_huge_pages_has_none_to_move_to(tmp_path, monkeypatch, buffer):
    def size(enabled: str | None, nbytes: str) -> int:
        for name, text in (("enabled", enabled), ("hpage_pmd_size", nbytes)):
            (tmp_path / name).unlink(missing_ok=True)
            if text is not None:
                (tmp_path / name).write_text(text)
        huge_page_size.cache_clear()
        return huge_page_size()

    monkeypatch.setattr(huge_pages, "SETTINGS", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_mappings", lambda: pytest.fail("read"))
    try:
        assert size("always [madvise] never\n", "2097152\n") == size("[always] madvise never\n", "2097152\n") == 1 << 21
        assert size("always madvise [never]\n", "2097152\n") == size(None, "2097152\n") == 0
        assert size("always [madvise] never\n", f"{512 << 20}\n") == size("[always] madvise never\n", "many\n") == 0
        assert HugePages({buffer: [(0, 1 << 30)]}).remaining == 0
        monkeypatch.setattr(sys, "platform", "darwin")
        assert size("[always] madvise never\n", "2097152\n") == 0
    finally:
        huge_page_size.cache_clear()


ONE_PAGE = """
import ctypes, mmap, os
from ggml_sched.llama import huge_pages
size = huge_pages.huge_page_size()
memory = mmap.mmap(-1, 3 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
first = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // size) * size
"""


def test_moved_bytes_cannot_be_written(huge):
    code = ONE_PAGE + "assert huge_pages._move(first, size); print('moved', flush=True); ctypes.memset(first, 1, 1)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout == "moved\n" and ended.returncode < 0


def test_bytes_move_in_a_forked_process_although_it_copies_other_pages_meanwhile(huge):
    code = ONE_PAGE + ("child = os.fork(); moved = huge_pages._move(first, size)\n"
                       "child and os.waitpid(child, 0); print(moved)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\nTrue\n"
