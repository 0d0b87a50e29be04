"""The threads of compiled kernels: bits, life, forks, and several plans, backends and threads at a time."""

import gc
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from forks import in_child
from op_results import place, random, raw

import ggml_sched as gs
from ggml_sched._graph import bind_resident
from ggml_sched.backends.cpu._kernels import CallList, Pool, WorkMemory

RNG = np.random.default_rng(12)


def shared_work(ctx: gs.Context) -> tuple[gs.Graph, dict]:
    """A graph whose nodes are large enough for every one to be cut into parts."""
    x, w = ctx.tensor("f32", (256, 700), "x"), ctx.tensor("f16", (256, 512), "w")
    h = ctx.rms_norm(ctx.mul_mat(w, x), 1e-5)
    out = ctx.soft_max(ctx.mul(ctx.silu(h), h))
    return gs.Graph(out), {x: random(RNG, 256, 700), w: random(RNG, 256, 512)}


def made(n_threads: int, name: str = "CPU") -> tuple[gs.CpuBackend, gs.Graph, dict]:
    ctx = gs.Context()
    graph, values = shared_work(ctx)
    backend = gs.CpuBackend(n_threads, name)
    place(ctx, backend)
    for tensor, array in values.items():
        tensor.set(array)
    return backend, graph, values


def threads_of_the_pool(backend: gs.CpuBackend) -> int:
    return backend._pool.alive


def test_a_plan_made_for_few_threads_runs_with_many():
    backend, graph, _ = made(1)
    plan = backend.graph_plan_create(graph)
    backend.graph_plan_compute(plan)
    want = raw(graph.nodes[-1])
    backend.set_n_threads(6)
    backend.graph_plan_compute(plan)
    assert raw(graph.nodes[-1]) == want and threads_of_the_pool(backend) == 5
    backend.close()


def test_threads_start_with_the_first_work_and_end_with_close():
    backend, graph, _ = made(3)
    assert threads_of_the_pool(backend) == 0
    backend.graph_compute(graph)
    assert threads_of_the_pool(backend) == 2
    backend.set_n_threads(2)
    assert threads_of_the_pool(backend) == 0
    backend.graph_compute(graph)
    assert threads_of_the_pool(backend) == 1
    backend.close()
    backend.close()
    assert threads_of_the_pool(backend) == 0
    for use in (backend.graph_compute, backend.graph_plan_create, lambda _: backend.alloc_buffer(1),
                lambda _: backend.buffer_from_ptr(bytearray(1))):
        with pytest.raises(gs.BackendError, match="closed"):
            use(graph)


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_a_collected_backend_leaves_no_thread_behind():
    gc.collect()
    before = tasks()
    for _ in range(5):
        backend, graph, values = made(4)
        backend.graph_compute(graph)
        plan = backend.graph_plan_create(graph)
        backend.graph_plan_compute(plan)
        assert tasks() >= before + 3
        del backend, graph, values, plan
        gc.collect()
    assert tasks() <= before


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_threads_sleep_when_no_plan_runs():
    backend, graph, _ = made(3)
    backend.graph_compute(graph)
    time.sleep(0.05)
    spent = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - spent < 0.1
    backend.close()


def test_small_calls_start_no_thread(ctx):
    x = ctx.tensor("f32", (64, 4))
    out = ctx.rms_norm(ctx.add(x, x), 1e-5)
    with gs.CpuBackend(4) as backend:
        place(ctx, backend)
        backend.graph_compute(gs.Graph(out))
        assert threads_of_the_pool(backend) == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_signals_are_for_the_threads_of_the_program():
    backend, graph, _ = made(3)
    backend.graph_compute(graph)
    blocked = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "ggml-sched-cpu\n":
            line = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
            blocked.append(int(line.split()[1], 16))
    assert len(blocked) >= 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGPROF):
        assert all(mask >> (number - 1) & 1 for mask in blocked), number
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    backend.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_locked", [False, True], ids=["idle", "as if another thread were computing"])
def test_a_fork_after_use_has_threads_of_its_own(is_locked):
    backend, graph, _ = made(3)
    out = graph.nodes[-1]
    plan = backend.graph_plan_create(graph)
    backend.graph_plan_compute(plan)
    want = raw(out)

    def use():
        assert threads_of_the_pool(backend) == 0
        out.set(np.zeros(out.n_elements))
        backend.graph_plan_compute(plan)
        assert raw(out) == want and threads_of_the_pool(backend) == 2
        backend.set_n_threads(2)
        backend.graph_compute(graph)
        assert raw(out) == want
        backend.close()

    for _ in range(2):
        with backend._lock if is_locked else nullcontext():
            assert in_child(use) == 0
    backend.graph_plan_compute(plan)
    assert raw(out) == want
    backend.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_while_another_thread_computes():
    backend, graph, _ = made(3)
    backend.graph_compute(graph)
    want, stop = raw(graph.nodes[-1]), threading.Event()
    plan = backend.graph_plan_create(graph)

    def work():
        while not stop.is_set():
            backend.graph_plan_compute(plan)

    def use():
        backend.graph_plan_compute(plan)
        assert raw(graph.nodes[-1]) == want

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            assert in_child(use) == 0
    finally:
        stop.set()
        thread.join()
    backend.close()


def in_threads(*works) -> None:
    errors: list[BaseException] = []

    def guarded(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - brought to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_plans_of_one_backend_have_work_memory_of_their_own_and_run_at_the_same_time():
    backend = gs.CpuBackend(2)
    jobs = []
    for _ in range(3):
        ctx = gs.Context()
        graph, values = shared_work(ctx)
        place(ctx, backend)
        for tensor, array in values.items():
            tensor.set(array)
        backend.graph_compute(graph)
        jobs.append((graph.nodes[-1], raw(graph.nodes[-1]), backend.graph_plan_create(graph)))
        assert jobs[-1][2].work_size > 0

    def run(out, want, plan):
        for _ in range(10):
            backend.graph_plan_compute(plan)
            assert raw(out) == want

    in_threads(*(lambda job=job: run(*job) for job in jobs))
    backend.close()


def test_two_backends_in_two_threads():
    pairs = [made(2, "one"), made(3, "two")]

    def run(backend, graph, _values):
        backend.graph_compute(graph)
        want = raw(graph.nodes[-1])
        for _ in range(10):
            backend.graph_compute(graph)
            assert raw(graph.nodes[-1]) == want

    in_threads(*(lambda pair=pair: run(*pair) for pair in pairs))
    for backend, *_ in pairs:
        backend.close()


def test_closing_while_another_thread_computes_waits_for_it():
    backend, graph, _ = made(3)
    plan = backend.graph_plan_create(graph)
    backend.graph_plan_compute(plan)
    ended: list[str] = []

    def work():
        try:
            for _ in range(1000):
                backend.graph_plan_compute(plan)
        except gs.BackendError as error:
            ended.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.02)
    backend.close()
    thread.join(60)
    assert not thread.is_alive() and (not ended or "closed" in ended[0])


HERE = Path(__file__).resolve().parent
KERNELS, INCLUDE = HERE.parents[1] / "ggml_sched/backends/cpu/kernels", HERE.parents[1] / "include"


def compile_with_pool(source: Path, to: Path, *options: str) -> None:
    if not sys.platform.startswith("linux") or shutil.which("gcc") is None or not INCLUDE.exists():
        pytest.skip("needs Linux, GCC and the source tree")
    subprocess.run(["gcc", "-O1", "-g", "-std=gnu11", *options, f"-I{KERNELS}", f"-I{INCLUDE}", "-o", to, source,
                    KERNELS / "pool.c", "-pthread"], check=True, capture_output=True)


def test_other_threads_take_the_share_of_one_that_is_slow(tmp_path):
    compile_with_pool(HERE / "pool_shares.c", tmp_path / "shares")
    done = subprocess.run([tmp_path / "shares"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_thread_sanitizer_sees_no_race(tmp_path):
    """Four threads run, stop, query the pool and change its number of threads."""
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    try:
        compile_with_pool(tmp_path / "empty.c", tmp_path / "empty", "-fsanitize=thread")
        subprocess.run([tmp_path / "empty"], capture_output=True, check=True)
    except subprocess.CalledProcessError:
        pytest.skip("this GCC has no thread sanitizer, or it does not run here")
    compile_with_pool(HERE / "pool_races.c", tmp_path / "races", "-fsanitize=thread")
    done = subprocess.run([tmp_path / "races"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]


def test_a_list_of_calls_refuses_what_is_not_in_it(ctx):
    x = ctx.tensor("f32", (4,))
    with gs.CpuBackend(1) as backend:
        node = ctx.neg(x)
        place(ctx, backend)
        pool, calls = Pool(1), CallList("CPU", [node], lambda buffer: buffer.memory, WorkMemory("CPU"))
        assert calls.add(0, 1) == 1 and calls.n_calls == 1 and calls.node_of(0) is node
        for bad in ((0, 2), (-1, 1), (1, 0)):
            with pytest.raises(IndexError):
                calls.run(pool, *bad)
        with pytest.raises(IndexError):
            calls.node_of(1)
        for bad in ((0, 2), (-1, 1), (1, 0)):
            with pytest.raises(IndexError):
                calls.add(*bad)
        calls.run(pool, 0, 1)
        pool.close()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_nothing_is_computed_behind_a_call_that_failed(ctx, n_threads):
    table, ids, x = ctx.tensor("f32", (32, 4)), ctx.tensor("i32", (3,)), ctx.tensor("f32", (256, 700))
    picked, later = ctx.set_name(ctx.get_rows(table, ids), "picked"), ctx.sqr(x)
    with gs.CpuBackend(n_threads) as backend:
        place(ctx, backend)
        ids.set(np.int32([0, 9, 3]))
        x.set(random(RNG, 256, 700))
        before = raw(later)
        plan = backend.graph_plan_create(gs.Graph(picked, later))
        with pytest.raises(gs.BackendError, match="'picked'.*id 9 "):
            backend.graph_plan_compute(plan)
        assert raw(later) == before
        ids.set(np.int32([0, 1, 3]))
        backend.graph_plan_compute(plan)
        assert raw(later) != before


def test_memory_that_is_not_what_it_seems_is_left_to_others(ctx):
    """Read-only, too short, not on the host, or closed: nodes there have no compiled call."""
    def read_only(memory: np.ndarray) -> np.ndarray:
        memory = memory.view()
        memory.flags.writeable = False
        return memory

    def gone(memory: np.ndarray) -> np.ndarray:
        raise gs.BackendError("no memory")

    x, y = ctx.tensor("f32", (64,)), ctx.tensor("f32", (64,))
    node = ctx.add(x, y)
    with gs.CpuBackend(1) as backend:
        buffers = [backend.alloc_buffer(t.nbytes) for t in (x, y, node)]
        for tensor, buffer in zip((x, y, node), buffers, strict=True):
            bind_resident(tensor, buffer, 0)

        def added(which: int, lie) -> int:
            def memory_of(buffer):
                return lie(buffer.memory) if buffer is buffers[which] else buffer.memory

            return CallList("CPU", [node], memory_of, WorkMemory("CPU")).add(0, 1)

        assert added(0, lambda memory: memory) == 1
        for which in range(3):
            assert added(which, lambda memory: memory[:128]) == added(which, np.copy) == added(which, gone) == 0
        assert [added(which, read_only) for which in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("type", ["f32", "q4_0"])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 8, 13, 16])
def test_the_rows_of_a_small_matrix_are_shared_by_threads_for_any_number_of_columns(ctx, type, columns):
    node = ctx.mul_mat(ctx.tensor(type, (768, 768)), ctx.tensor("f32", (768, columns)))
    with gs.CpuBackend(1) as backend:
        place(ctx, backend)
        calls = CallList("CPU", [node], lambda buffer: buffer.memory, WorkMemory("CPU"))
        assert calls.add(0, 1) == 1
        assert calls.n_parts(calls.n_calls - 1) >= 3
        with pytest.raises(IndexError):
            calls.n_parts(calls.n_calls)


@pytest.mark.parametrize(("n_head", "n_kv_head", "n_rows", "parts"),
                         [(9, 3, 16, 6), (4, 1, 16, 4), (9, 3, 512, 72), (8, 8, 8, 8)])
def test_query_rows_of_few_key_heads_are_shared_by_threads(ctx, n_head, n_kv_head, n_rows, parts):
    q = ctx.tensor("f32", (64, n_rows, n_head))
    k, v = (ctx.tensor("f16", (64, 1500, n_kv_head)) for _ in range(2))
    node = ctx.flash_attn_ext(q, k, v, ctx.tensor("f16", (1500, n_rows)), 1.0)
    with gs.CpuBackend(1) as backend:
        place(ctx, backend)
        calls = CallList("CPU", [node], lambda buffer: buffer.memory, WorkMemory("CPU"))
        assert calls.add(0, 1) == 1 and calls.n_parts(0) == parts


def test_elements_without_end_are_left_to_others(ctx):
    one = ctx.tensor("f32", (1,))
    views = [ctx.restore("VIEW", "f32", (n, 1, 1, 1), (0, 0, 0, 0), (one,), view_src=one) for n in (1 << 20, 1 << 37)]
    nodes = [ctx.sum_rows(view) for view in views]
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        calls = CallList("CPU", nodes, lambda buffer: buffer.memory, WorkMemory("CPU"))
        assert calls.add(0, 2) == 1


def test_kernels_of_other_names_are_refused():
    with pytest.raises(ValueError, match="'CPU'.*'fast'.*compiled, numpy"):
        gs.CpuBackend(1, kernels="fast")
