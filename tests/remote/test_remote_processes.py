"""Workers in processes: a model's bits, deaths in the middle of generations, and processes that end with the driver."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from remote_workers import ARCHITECTURES, check_architecture, killed_generations, logits_of, two_halves
from small_llama import written_in_parts

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama import open_gguf
from ggml_sched.remote.files import SMALLEST, Files, digest_of
from ggml_sched.remote.session import Session

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs sockets of the file system")


@pytest.fixture(scope="module")
def cluster():
    with gs.remote.connect(workers=2, threads=1, transport="processes") as cluster:
        yield cluster


def test_a_model_has_the_bits_of_local_backends(cluster):
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_the_bits_of_local_backends(cluster, arch):
    check_architecture(arch, cluster.backends)


def test_large_data_pass_both_ways_at_once(cluster):
    backend = cluster.backends[0]
    ctx = gs.Context()
    w = ctx.tensor("f32", (1 << 20, 4), "w")
    with backend.alloc_tensors(ctx):
        data = np.arange(4 << 20, dtype=np.float32).reshape(4, 1 << 20)
        for _ in range(3):
            w.set(data)
            assert np.array_equal(w.numpy(), data)


def test_a_copy_between_workers_does_not_pass_through_the_driver(cluster):
    contexts = [gs.Context() for _ in range(2)]
    one, two = (ctx.tensor("f32", (1 << 18,), "t") for ctx in contexts)
    buffers = [backend.alloc_tensors(ctx) for backend, ctx in zip(cluster.backends, contexts, strict=True)]
    data = np.arange(1 << 18, dtype=np.float32)
    one.set(data)
    before = cluster.session.bytes_sent
    gs.tensor_copy(one, two)
    assert cluster.session.bytes_sent - before < 2000
    assert np.array_equal(two.numpy(), data)
    for buffer in buffers:
        buffer.close()


def test_killed_workers_end_generations_with_a_typed_error_and_the_rest_goes_on():
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=20) as cluster:
        processes = cluster.session.transport.processes
        want = logits_of([gs.CpuBackend(1, name="local")])
        with llama.load(llama.small_model(), cluster.backends, n_ctx=64) as model:
            model.eval([9, 8, 7])
            generation = model.generate([1, 2, 3], 60)
            next(generation)
            os.kill(processes["w1"].pid, signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(gs.BackendLost, match="worker 'w1' has died: its process ended with status -9"):
                list(generation)
            assert time.monotonic() - start < 20
            rest = [backend for backend in cluster.backends if backend.lost is None]
            held = model.sequence(0).tokens
            with model.moved(rest) as moved, llama.load(llama.small_model(), [gs.CpuBackend(1)], n_ctx=64) as local:
                assert moved.backends == (cluster.backends[0],) and moved.sequence(0).tokens == held
                local.eval(held)
                assert np.array_equal(moved.eval([5]), local.eval([5]))
        assert np.array_equal(logits_of(cluster.backends[:1]), want)
        joined = cluster.join("w2", threads=1)
        with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
            assert np.array_equal(logits_of([cluster.backends[0], *joined]), logits_of([a, b]))


def test_a_stopped_worker_is_lost_at_the_deadline(ctx):
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=2) as cluster:
        graph, x, _y, _held = two_halves(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            process = cluster.session.transport.processes["w1"]
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(gs.BackendLost, match="'w1' has not answered within 2 s") as raised:
                    scheduler.compute(graph)
                assert raised.value.worker == "w1"
            finally:
                os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("arguments, kind, said", [
    ({"workers": "gpu"}, TypeError, r"such as \['gpu'\]"), ({"workers": 2.0}, TypeError, "names, not 2.0"),
    ({"workers": True}, TypeError, "names, not True"), ({"workers": -1}, ValueError, "one worker or more"),
    ({"workers": [".."]}, ValueError, "not '.' or '..'"), ({"workers": [1, 2]}, ValueError, "texts"),
    ({"workers": [[]]}, ValueError, "texts"), ({"workers": ["x" * 300]}, ValueError, "has 300 bytes, at most 40"),
    ({"memory": -1}, ValueError, "negative"), ({"memory": 1.5}, TypeError, "number of bytes, not 1.5"),
    ({"threads": 0}, ValueError, "1 or more"), ({"threads": "2"}, TypeError, "not '2'"),
    ({"backends": []}, ValueError, "one name or more"), ({"backends": [1]}, ValueError, "one name or more"),
    ({"deadline": None}, TypeError, "not None"), ({"deadline": float("nan")}, ValueError, "more than 0"),
    ({"options": {"num_gpus": 1}}, ValueError, "options: for Ray"), ({"options": 3}, TypeError, "mapping, not 3"),
    ({"address": "auto"}, ValueError, "address 'auto': for Ray"), ({"address": 3}, TypeError, "text, not 3")])
def test_wrong_arguments_are_errors_before_a_worker_starts(monkeypatch, arguments, kind, said):
    def started(*arguments, **keywords):
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(kind, match=said):
        gs.remote.connect(**{"transport": "processes", "workers": 1, **arguments})


@pytest.mark.parametrize("factory, said", [
    ("gc:enable", "gc:enable returned None"), ("builtins:list", "builtins:list returned []"),
    ("gc:get_threshold", "gc:get_threshold returned [700, "), ("ggml_sched:CpuBackend", "<CpuBackend 'CPU'>"),
    ("no_such_module:f", "ModuleNotFoundError: No module named"), ("gc:f", "AttributeError: module 'gc' has no"),
    ("nope", "backend 'nope'; known: cpu")])
def test_the_error_of_a_worker_without_backends_says_why(capfd, factory, said):
    with pytest.raises(gs.BackendError, match="worker 'w1' does not start: ") as raised:
        gs.remote.connect(workers=["w1"], backends=[factory], transport="processes")
    assert said in str(raised.value) and capfd.readouterr().err == ""


def test_a_factory_that_raises_is_the_error_with_its_traceback_on_standard_error(capfd):
    with pytest.raises(gs.BackendError, match="worker 'w0' does not start: TypeError: "):
        gs.remote.connect(workers=1, backends=["operator:neg"], transport="processes")
    assert "in backends_of\n" in capfd.readouterr().err


def test_a_worker_has_any_name_that_a_file_may_have():
    names = ["-x", "a b", "ü", "y" * 40]
    with gs.remote.connect(workers=names, threads=1, transport="processes") as cluster:
        assert [worker.name for worker in cluster.workers] == names
        cluster.session.transport.processes["y" * 40].kill()
        cluster.session.transport.processes["y" * 40].wait()
        assert cluster.join("y" * 40)[0].worker == "y" * 40 + "~2"
        for arguments, kind in ((("y" * 41,), ValueError), (("..",), ValueError), (("n", "cpu"), ValueError),
                                (("n", ["cpu"], 0), ValueError), (("n", ["cpu"], 1, -1), ValueError)):
            with pytest.raises(kind):
                cluster.join(*arguments)
    assert len(cluster.session.transport.processes) == 5


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3])
def test_an_interrupt_while_workers_start_is_that_of_the_caller_alone(tmp_path, seconds):
    code = ("import ggml_sched as gs, ggml_sched.remote.processes\n"
            "try:\n"
            "    print('starts', flush=True)\n"
            "    with gs.remote.connect(workers=3, threads=1, transport='processes'):\n"
            "        __import__('time').sleep(60)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')")
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              start_new_session=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert driver.stdout.readline() == "starts\n"
    time.sleep(seconds)
    os.killpg(driver.pid, signal.SIGINT)        # as a terminal does
    start = time.monotonic()
    assert driver.communicate(timeout=60) == ("interrupted\n", "")     # the pipes end once all workers have ended
    assert driver.returncode == 0 and time.monotonic() - start < 8 and not [*tmp_path.iterdir()]


def test_workers_end_with_the_driver_however_it_ends(tmp_path):
    code = ("import os, ggml_sched as gs\n"
            "cluster = gs.remote.connect(workers=2, threads=1, transport='processes')\n"
            "print(*(p.pid for p in cluster.session.transport.processes.values()), flush=True)\n"
            "os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "TMPDIR": str(tmp_path)})
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 20
    while pids and time.monotonic() < end:
        for pid in [*pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                continue
            pids.remove(pid)
        time.sleep(0.02)
    assert not pids
    assert not [*tmp_path.iterdir()]        # the folder of their sockets


def test_a_worker_whose_connection_ends_leaves_the_folder_to_a_driver_that_lives():
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=20) as cluster:
        transport = cluster.session.transport
        transport._mesh._lose("w1")     # as after a message of a size that none has
        assert transport.processes["w1"].wait(20) == 0
        joined, = cluster.join("w1", threads=1)
        assert (joined.name, joined.lost) == ("w1:CPU", None)


def test_a_worker_that_does_not_start_is_an_error():
    with pytest.raises(gs.BackendError, match="worker 'w0' does not start: ModuleNotFoundError: No mod"):
        gs.remote.connect(workers=1, backends=["no.such.module:factory"], transport="processes")


def test_a_worker_that_cannot_make_its_backend_says_so_in_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "ggml_sched.remote.serve", "--name", "w", "--folder", str(tmp_path),
                           "--backend", "nothing:Nowhere"], capture_output=True, text=True, check=False)
    said = "worker 'w' does not start: ModuleNotFoundError: No module named 'nothing'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_a_child_of_a_fork_does_not_use_its_parents_workers(cluster):
    pid = os.fork()
    if not pid:
        try:
            cluster.backends[0].ask("memory", 0)
            os._exit(1)
        except gs.BackendError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cluster.backends[0].ask("memory", 0) is None


def test_workers_read_the_weights_of_a_file_that_they_have(cluster, tmp_path):
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        want = logits_of([a, b])
    size = llama.small_model().stat().st_size
    before = cluster.session.bytes_sent
    assert np.array_equal(logits_of(cluster.backends), want)
    assert cluster.session.bytes_sent - before < size / 4
    # From bytes the weights are streamed.
    before = cluster.session.bytes_sent
    with llama.load(llama.small_model().read_bytes(), cluster.backends, n_ctx=64) as model:
        assert np.array_equal(model.eval([1, 2, 3])[-1], want[0])
    assert cluster.session.bytes_sent - before > size / 2


@pytest.fixture(scope="module")
def filled(cluster):
    """filled(path, start, data): whether a worker fills a tensor from a file, which then has these bytes; the tensor is
    as it was if not."""
    backend = cluster.backends[0]

    def fill(path, start, data):
        ctx = gs.Context()
        t = ctx.tensor("i8", (len(data),), "t")
        with backend.alloc_tensors(ctx):
            found = backend.load_from_file(t, str(path), start, memoryview(data))
            assert t.numpy().tobytes() == (bytes(data) if found else bytes(len(data)))
            return found

    return fill


@pytest.fixture
def model(tmp_path):
    """A model file: (path, its bytes, its largest tensor)."""
    path = tmp_path / "model.gguf"
    path.write_bytes(llama.random_llama())
    with open_gguf(path) as file:
        info = max(file.tensors.values(), key=lambda info: info.nbytes)
    return path, path.read_bytes(), info


def test_a_worker_reads_whole_tensors_whose_digest_the_driver_knows(filled, model):
    path, data, info = model
    start, end = info.offset, info.offset + info.nbytes
    assert filled(path, start, data[start:end])
    assert not filled(path, start, bytes([data[start] ^ 1]) + data[start + 1 : end])
    # Parts of a tensor, or bytes around it, could be guessed piece by piece.
    for first, last in ((start, end - 1), (start + 1, end), (start, start + 1), (start, start + SMALLEST),
                        (0, SMALLEST), (0, 4), (start - 32, end)):
        assert not filled(path, first, data[first:last])


def test_an_output_that_is_then_filled_from_a_file_has_the_files_bytes(cluster, model, ctx):
    path, data, info = model
    backend, tensor = cluster.backends[0], data[info.offset :][: info.nbytes]
    x = ctx.tensor("i8", (info.nbytes,), "x")
    y = ctx.set_output(ctx.cpy(x, ctx.tensor("i8", (info.nbytes,), "y")))
    with backend.alloc_tensors(ctx):
        backend.graph_plan_compute(plan := backend.graph_plan_create(gs.Graph(y)))
        assert backend.load_from_file(y.view_src, str(path), info.offset, memoryview(tensor))
        assert y.numpy().tobytes() == tensor
        backend.graph_plan_free(plan)


def test_a_small_tensor_is_not_looked_for_in_a_file(cluster, model):
    """Its bytes could be guessed."""
    path, data, _ = model
    with open_gguf(path) as file:
        info = min(file.tensors.values(), key=lambda info: info.nbytes)
    assert Files().read(str(path), info.offset, info.nbytes, digest_of(data[info.offset :][: info.nbytes])) is None


def test_what_is_no_model_file_is_refused_at_once(filled, model, tmp_path):
    path, data, info = model
    tensor = data[info.offset :][: info.nbytes]
    for name, contents in (("text", b"s" * len(data)), ("head", b"GGUF" + data[4:20] + data[20:].swapcase()),
                           ("short", data[: info.offset]), ("empty", b"")):
        (tmp_path / name).write_bytes(contents)
        assert not filled(tmp_path / name, info.offset, tensor), name
    for name in ("none", "", "model.gguf\0", "x" * 4000):
        assert not filled(str(tmp_path / name), info.offset, tensor), name
    assert not filled("/dev/zero", info.offset, tensor)
    assert not filled(tmp_path, info.offset, tensor)
    start = time.monotonic()
    os.mkfifo(tmp_path / "pipe")
    assert not filled(tmp_path / "pipe", info.offset, tensor)       # nothing writes into it
    assert time.monotonic() - start < 20


def test_a_file_that_is_replaced_is_read_anew(filled, model):
    path, data, info = model
    tensor = data[info.offset :][: info.nbytes]
    assert filled(path, info.offset, tensor)
    path.write_bytes(b"no model" + bytes(len(data)))
    assert not filled(path, info.offset, tensor)
    path.write_bytes(data)
    assert filled(path, info.offset, tensor)


def test_workers_read_the_parts_of_a_split_model(cluster, tmp_path):
    data = llama.random_llama()
    first = written_in_parts(tmp_path, 3, data)
    before = cluster.session.bytes_sent
    found = logits_of(cluster.backends, source=first)
    assert cluster.session.bytes_sent - before < len(data) / 4
    assert np.array_equal(found, logits_of(cluster.backends, source=data))


def test_a_scheduler_without_a_lost_backend_plans_over_the_others(ctx):
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=20) as cluster, \
            gs.CpuBackend(1) as cpu:
        x = ctx.tensor("f32", (16, 2), "x", input=True)
        graph = gs.Graph(ctx.set_output(ctx.relu(x)))
        first, second = cluster.backends
        with gs.Scheduler([first, second, cpu], budgets={second: 1 << 20}) as scheduler:
            scheduler.set_tensor_backend(graph.nodes[0], first)
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            os.kill(cluster.session.transport.processes["w0"].pid, signal.SIGKILL)
            with pytest.raises(gs.BackendLost):
                scheduler.compute(graph)
            with scheduler.without(first) as rest:
                assert rest.backends == (second, cpu)
                rest.set_tensor_backend(graph.nodes[0], second)
                rest.compute(graph)
                assert np.array_equal(graph.nodes[0].numpy(), np.ones((2, 16), np.float32))
            with pytest.raises(ValueError, match="no backend would be left"):
                scheduler.without(first, second, cpu)


@pytest.mark.parametrize("is_file", [False, True])
def test_loading_reports_its_progress(cluster, model, is_file):
    """Of what is sent, and of what the workers read."""
    path, data, _ = model
    with open_gguf(path) as file:
        total = sum(info.nbytes for info in file.tensors.values())
    seen = []
    with llama.load(path if is_file else data, cluster.backends, n_ctx=64,
                    progress=lambda *found: seen.append(found)):
        done = [n for n, _ in seen]
        assert {of for _, of in seen} == {total}
        assert done[0] == 0 and done[-1] == total and len(done) > 10
        assert all(a < b for a, b in zip(done, done[1:], strict=False))


@pytest.mark.parametrize("is_file", [False, True])
def test_a_loss_while_a_model_is_loaded_names_the_tensor(model, is_file):
    path, data, _ = model

    class Killing:
        n = 0

        def __call__(self, done, total):
            self.n += 1
            if self.n == 12:
                cluster.session.transport.processes["w0"].kill()
                cluster.session.transport.processes["w0"].wait()

    with gs.remote.connect(workers=1, threads=1, transport="processes", deadline=20) as cluster:
        with pytest.raises(gs.BackendLost) as raised:
            llama.load(path if is_file else data, cluster.backends, n_ctx=64, progress=Killing())
        assert ".weight" in raised.value.computing
        assert re.search(r"while it (was sent|read) \S+\.weight", str(raised.value))


def test_a_worker_joins_again_under_its_name(ctx):
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=20) as cluster:
        with pytest.raises(ValueError, match="they differ"):
            cluster.join("w1", threads=1)
        want = logits_of(cluster.backends)
        old = cluster.backends[1]
        for k in range(2):
            links = dict(cluster.session.links)
            cluster.session.transport.processes[old.worker].kill()
            cluster.session.transport.processes[old.worker].wait()
            joined, = cluster.join("w1", threads=1)
            assert joined.name == "w1:CPU" and joined.worker == f"w1~{k + 2}"
            assert joined.lost is None and old.lost is not None
            assert set(cluster.session.links) == set(links)
            assert np.array_equal(logits_of([cluster.backends[0], joined]), want)
            with pytest.raises(gs.BackendLost):
                old.alloc_buffer(64)
            old = joined


def test_no_worker_joins_a_closed_cluster():
    cluster = gs.remote.connect(workers=1, threads=1, transport="processes")
    cluster.close()
    with pytest.raises(gs.BackendError, match="worker 'w1' cannot join: the cluster is closed"):
        cluster.join("w1", threads=1)
    assert cluster.session.transport.workers == ("w0",)
    cluster.close()


def test_a_worker_joins_after_an_interrupt_of_its_joining(ctx, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with gs.remote.connect(workers=1, threads=1, transport="processes", deadline=20) as cluster:
        session, kept = cluster.session, cluster.backends[0].alloc_buffer(64)
        cluster.backends[0].put("clear", kept.number, 7)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Session, "_await", interrupted)
            cluster.join("w1", threads=1)
        out = bytearray(64)
        kept.read(0, memoryview(out))
        assert set(out) == {7}
        session.transport.processes["w1"].wait(20)
        with pytest.raises(gs.BackendLost):
            session.call("w1", ["ask", "answer", "hello", []])
        joined, = cluster.join("w1", threads=1)
        assert joined.name == "w1:CPU" and joined.ask("memory", 0) is None
        assert np.array_equal(logits_of([cluster.backends[0], joined]), logits_of([joined]))


def test_workers_killed_in_the_middle_of_generations():
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=30) as cluster:
        processes = cluster.session.transport.processes
        assert killed_generations(cluster, lambda worker: processes[worker].pid, 4, 3) >= 3


@pytest.mark.soak
def test_workers_killed_in_the_middle_of_a_hundred_generations():
    with gs.remote.connect(workers=2, threads=1, transport="processes", deadline=30) as cluster:
        processes = cluster.session.transport.processes
        assert killed_generations(cluster, lambda worker: processes[worker].pid, 100, 4) >= 80
