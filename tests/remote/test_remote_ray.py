"""Workers as actors of a real Ray, which a fixture starts and ends; skipped where Ray is not installed."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time

import forks
import numpy as np
import pytest
from random_over_workers import check_random_graphs
from remote_workers import ARCHITECTURES, check_architecture, killed_generations, logits_of, products, two_halves

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama.synthetic import random_model
from ggml_sched.remote import RemoteBackend
from ggml_sched.testing.contract import CASES, BackendContract

ray = pytest.importorskip("ray", reason="needs the extra ray")

from ggml_sched.remote import rays  # noqa: E402 - it needs Ray
from ggml_sched.remote.cluster import cluster_of  # noqa: E402
from ggml_sched.remote.transport import WorkerOptions  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    """A local Ray with room for the clusters of all tests, whatever other Ray runs on this machine.

    Its workers look for modules in the driver's folder first, where a tree of sources need not be compiled.
    """
    with contextlib.chdir(tmp_path_factory.mktemp("ray")), forks.unlimited():
        ray.init("local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                 _system_config={"worker_niceness": 0})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(local_ray):
    with gs.remote.connect(workers=2, threads=1) as cluster:
        yield cluster
    assert ray.is_initialized()     # connect did not start it, so it did not end it


class TestContract(BackendContract):
    """The suite over the backends of two actors; a few cases of ops, as a call takes a millisecond."""

    cases = [case for k, case in enumerate(CASES) if k % 40 == 0]

    @pytest.fixture(autouse=True)
    def workers(self, cluster):
        self.cluster = cluster

    def backend_of(self, worker, name):
        return RemoteBackend(self.cluster.workers[worker], name=name)

    def new_backend(self):
        return self.backend_of(0, "mine")

    def second_backend(self):
        return self.backend_of(1, "second")


def test_a_model_has_the_bits_of_local_backends(cluster):
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_the_bits_of_local_backends(cluster, arch):
    check_architecture(arch, cluster.backends)


def test_random_graphs(cluster):
    assert check_random_graphs(cluster.backends, 1, 25) > 12


@pytest.mark.soak
def test_many_random_graphs(cluster):
    for seed in range(100, 110):
        check_random_graphs(cluster.backends, seed, 50)


def test_a_compute_is_one_call_of_the_driver(cluster, ctx):
    graph, x, y, _held = two_halves(ctx, *cluster.backends)
    with gs.Scheduler(cluster.backends) as scheduler:
        for k in range(3):
            scheduler.alloc(graph)
            x.set(np.full((2, 16), k, np.float32))
            before = cluster.session.messages
            scheduler.compute(graph, wait=False)
            assert np.array_equal(y.numpy(), np.full((2, 16), 6.0 * k, np.float32))
            assert cluster.session.messages - before == 1 or k == 0


def test_workers_report_their_nodes_and_resources_are_rays(cluster):
    nodes = cluster.session.transport.nodes
    assert set(nodes) == {"w0", "w1"} and len(set(nodes.values())) == 1
    assert ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0) >= 2


def test_a_killed_actor_is_lost_and_another_joins():
    with gs.remote.connect(workers=2, threads=1, deadline=60) as cluster, \
            llama.load(llama.small_model(), cluster.backends, n_ctx=64) as model:
        generation = model.generate([1, 2, 3], 60)
        next(generation)
        ray.kill(cluster.session.transport.actor("w1"))
        start = time.monotonic()
        with pytest.raises(gs.BackendLost, match="worker 'w1' has died"):
            list(generation)
        assert time.monotonic() - start < 60
        joined = cluster.join("w2", threads=1)
        with model.moved([cluster.backends[0], *joined]) as moved, gs.CpuBackend(1, name="a") as a, \
                gs.CpuBackend(1, name="b") as b, llama.load(llama.small_model(), [a, b], n_ctx=64) as local:
            local.eval(moved.sequence(0).tokens)
            assert np.array_equal(moved.eval([5]), local.eval([5]))


# -- the relay and calls ---------------------------------------------------------------------------


@pytest.fixture
def took(cluster):
    """What took the relay, and what was called, since the fixture was used last."""
    transport = cluster.session.transport
    last = [0, 0]

    def since():
        now = [transport.messages_relayed, transport.messages_called]
        passed = tuple(a - b for a, b in zip(now, last, strict=True))
        last[:] = now
        return passed

    since()
    return since


@pytest.mark.parametrize(("path", "way"), [((0,), (1, 0)), ((1,), (1, 0)), ((0, 1), (1, 0)), ((1, 0), (0, 1)),
                                           ((0, 1, 0), (0, 1))])
def test_a_compute_in_the_order_of_the_actors_takes_the_relay(cluster, ctx, took, path, way):
    graph, x, y, _held = products(ctx, *(cluster.backends[k] for k in path))
    with gs.Scheduler(cluster.backends) as scheduler:
        for k in range(3):
            scheduler.alloc(graph)
            x.set(np.full((2, 16), k, np.float32))
            took()
            scheduler.compute(graph, wait=False)
            assert np.array_equal(y.numpy(), np.full((2, 16), {1: 2, 2: 6, 3: 24}[len(path)] * k, np.float32))
            assert took() == way or k == 0


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_each_token_of_a_model_takes_the_relay(cluster, took, tied):
    with llama.load(random_model("llama", 1, tied=tied), cluster.backends, n_ctx=64) as model:
        model.eval([1, 2, 3])
        model.eval([4])
        took()
        for k in range(8):
            model.eval([5 + k])
        assert took() == (8, 0)


def test_more_queued_computes_than_places_in_the_relay(cluster, ctx, took):
    graph, x, y, _held = products(ctx, *cluster.backends)
    n = 3 * rays.IN_RELAY
    with gs.Scheduler(cluster.backends, copies=4) as scheduler:
        scheduler.alloc(graph)
        took()
        for k in range(n):
            x.set(np.full((2, 16), k, np.float32))
            scheduler.compute_async(graph)
        scheduler.synchronize()
        assert np.array_equal(y.numpy(), np.full((2, 16), 6 * (n - 1), np.float32))
        relayed, called = took()
        # How many of each depends on how soon the first actor takes one, and the session asks again for late answers.
        assert relayed >= 1 and relayed + called >= n


def test_a_message_that_is_too_large_for_the_relay_is_a_call(cluster, took):
    ctx = gs.Context()
    w = ctx.tensor("i8", (2 * rays.RELAY_BYTES,), "w")
    with cluster.backends[0].alloc_tensors(ctx):
        data = np.resize(np.arange(100, dtype=np.int8), 2 * rays.RELAY_BYTES)
        took()
        w.set(data)
        assert took() == (0, 1)
        assert np.array_equal(w.numpy(), data)


def test_a_message_whose_answer_is_too_large_for_the_relay_is_a_call(cluster, took):
    ctx = gs.Context()
    w = ctx.tensor("i8", (2 * rays.RELAY_BYTES,), "w")
    with cluster.backends[0].alloc_tensors(ctx) as buffer:
        w.set(np.ones(2 * rays.RELAY_BYTES, np.int8))
        for n_bytes, way in ((2 * rays.RELAY_BYTES, (0, 1)), (rays.RELAY_BYTES // 2, (1, 0))):
            out = bytearray(n_bytes)
            took()
            buffer.read(0, memoryview(out))
            assert took() == way
            assert out == b"\1" * n_bytes


def test_activations_that_are_too_large_for_the_relay_pass_between_workers_by_calls(cluster, took):
    """The driver sends and reads little."""
    ctxs = [gs.Context() for _ in range(2)]
    one, two = (ctx.tensor("i8", (2 * rays.RELAY_BYTES,), "w") for ctx in ctxs)
    with cluster.backends[0].alloc_tensors(ctxs[0]), cluster.backends[1].alloc_tensors(ctxs[1]):
        one.set(np.ones(2 * rays.RELAY_BYTES, np.int8))
        took()
        gs.tensor_copy(one, two)
        cluster.session.wait()
        relayed, called = took()
        assert relayed == 0 and called >= 1
        assert two.numpy().all()


def test_calls_alone_where_no_relay_can_be_compiled(local_ray, monkeypatch, caplog):
    def refused(*_, **__):
        raise NotImplementedError("no graphs here")

    monkeypatch.setattr(ray.dag.ClassMethodNode, "experimental_compile", refused)
    with gs.remote.connect(workers=2, threads=1) as cluster, gs.CpuBackend(1, name="a") as a, \
            gs.CpuBackend(1, name="b") as b:
        assert "no graphs here" in caplog.text
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))
        assert cluster.session.transport.messages_relayed == 0


def test_calls_alone_on_request(local_ray):
    carrier = rays.RayActors(dict.fromkeys(("w0", "w1"), WorkerOptions(threads=1)), relayed=False)
    with cluster_of(carrier) as cluster, gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))
        assert carrier.messages_relayed == 0


def test_a_hanging_actor_is_lost_in_time_and_the_others_go_on(ctx):
    """In a new relay, or by calls where Ray does not end the loops of the old one, in which the actor was stopped."""
    with gs.remote.connect(workers=3, threads=1, deadline=10) as cluster:
        transport = cluster.session.transport
        graph, x, _y, _held = products(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            os.kill(ray.get(transport.actor("w1").process.remote()), signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(gs.BackendLost, match="worker 'w1' has not answered within 10 s"):
                scheduler.compute(graph)
            assert time.monotonic() - start < 40        # 10 s on an idle machine
        first, _, third = cluster.backends
        joined, = cluster.join("w3", threads=1)
        relayed, called = transport.messages_relayed, transport.messages_called
        assert np.array_equal(logits_of([first, third, joined]), logits_of([first, third, joined]))
        if transport._relay.broken:
            assert transport.messages_called > called + 6
        else:
            assert transport.messages_relayed > relayed + 6
        start = time.monotonic()
    assert time.monotonic() - start < 30


def test_killed_actors_in_the_middle_of_generations():
    with gs.remote.connect(workers=2, threads=1) as cluster:
        assert killed_generations(cluster, lambda worker: pid_of(cluster, worker), 3, 5) >= 2


@pytest.mark.soak
def test_killed_actors_in_the_middle_of_a_hundred_generations():
    with gs.remote.connect(workers=2, threads=1) as cluster:
        assert killed_generations(cluster, lambda worker: pid_of(cluster, worker), 100, 6) >= 80


def test_a_cluster_that_does_not_start_leaves_nothing(local_ray):
    before = ray.available_resources().get("CPU", 0)
    with pytest.raises(gs.BackendError, match="worker 'w0' does not start: ModuleNotFoundError: No module") as raised:
        gs.remote.connect(workers=1, backends=["no_such_module:function"])
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)
    with pytest.raises(gs.BackendError, match="worker 'w0' does not start: .*BackendError: gc:enable returned None: "):
        gs.remote.connect(workers=1, backends=["gc:enable"])
    with pytest.raises(ValueError, match="they differ"):
        gs.remote.connect(workers=["a", "a"])
    end = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < before and time.monotonic() < end:
        time.sleep(0.1)
    assert ray.available_resources().get("CPU", 0) >= before


# -- what goes wrong -------------------------------------------------------------------------------


def carried(relayed=True, deadline=8):
    carrier = rays.RayActors(dict.fromkeys(("w0", "w1"), WorkerOptions(threads=1)), relayed=relayed)
    return cluster_of(carrier, deadline)


def pid_of(cluster, worker):
    return ray.get(cluster.session.transport.actor(worker).process.remote())


def test_workers_join_after_one_did_not_start_and_after_an_unseen_death(local_ray):
    with carried() as cluster:
        with pytest.raises(gs.BackendError, match="worker 'x' does not start"):
            cluster.join("x", backends=["none"])
        ray.kill(cluster.session.transport.actor("w1"))
        joined, = cluster.join("x", threads=1)
        assert joined.ask("memory", 0) is None
        with pytest.raises(gs.BackendLost, match="worker 'w1' has died"):
            cluster.backends[1].ask("memory", 0)
        assert cluster.session.transport.workers == ("w0", "w1", "x")


def test_an_interrupt_of_a_wait_at_the_relay_leaves_the_relay(local_ray, monkeypatch):
    with carried() as cluster:
        backend, transport = cluster.backends[0], cluster.session.transport

        def interrupted(reference, **_):
            reference._ray_get_called = True        # as Ray does before it waits
            raise KeyboardInterrupt

        with backend.alloc_buffer(64) as buffer:
            backend.put("clear", buffer.number, 1)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(rays.ray, "get", interrupted)
                backend.synchronize()
            # Its message may be lost, and is sent again as a call.
            relayed, called = transport.messages_relayed, transport.messages_called
            out = bytearray(1)
            for _ in range(3):
                buffer.read(0, memoryview(out))
                assert out == b"\1"
            assert transport.messages_relayed == relayed + 3 and transport.messages_called == called + 1


def test_what_a_relay_carried_when_it_ended_is_sent_again_as_calls(local_ray):
    """Without a wait: the transport says that messages were lost."""
    with carried(deadline=100) as cluster:
        backend, transport = cluster.backends[0], cluster.session.transport
        with backend.alloc_buffer(64) as buffer:
            os.kill(pid_of(cluster, "w1"), signal.SIGKILL)
            start = time.monotonic()
            backend.put("clear", buffer.number, 1)
            backend.synchronize()
            out = bytearray(1)
            buffer.read(0, memoryview(out))
            assert out == b"\1" and transport.losses == 1
            assert time.monotonic() - start < 50


def test_the_death_of_an_actor_that_has_called_another_is_seen(local_ray, ctx):
    """The answer of the call that it made is lost with it."""
    with carried(relayed=False, deadline=30) as cluster:
        graph, x, _y, _held = two_halves(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            second = pid_of(cluster, "w1")
            os.kill(second, signal.SIGSTOP)
            first = pid_of(cluster, "w0")
            scheduler.compute_async(graph)
            cluster.session.flush()
            cluster.session.transport.receive(2)        # the first one's part is done
            os.kill(first, signal.SIGKILL)
            time.sleep(1)
            os.kill(second, signal.SIGCONT)
            with pytest.raises(gs.BackendLost, match="worker 'w0' has died"):
                scheduler.synchronize()
        assert cluster.backends[1].ask("memory", 0) is None


def test_an_actor_that_raises_what_it_must_not_is_lost(local_ray):
    with carried(relayed=False) as cluster:
        cluster.session.transport.post("w0", 5)     # no bytes
        assert cluster.session.transport.receive(60) is None    # else the answer to the next call may come before
        with pytest.raises(gs.BackendLost, match="worker 'w0' has died: TypeError"):
            cluster.backends[0].ask("memory", 0)
        assert cluster.backends[1].ask("memory", 0) is None


def test_a_cluster_that_is_garbage_ends_its_actors(local_ray):
    before = ray.available_resources()["CPU"]
    carried()
    gc.collect()
    end = time.monotonic() + 30
    while ray.available_resources()["CPU"] < before and time.monotonic() < end:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] >= before


def semaphores(raylet):
    """Those of a Ray in shared memory: others may run on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith((f"sem.hdr{raylet}-", f"sem.obj{raylet}-"))}


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a folder of shared memory")
@pytest.mark.parametrize("is_closed", [True, False])
def test_the_actors_of_a_cluster_that_is_gone_leave_nothing_in_shared_memory(local_ray, is_closed):
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    before = semaphores(raylet)
    cluster = carried()
    mine = semaphores(raylet) - before
    if is_closed:
        cluster.close()
    del cluster
    gc.collect()
    assert mine
    end = time.monotonic() + 30
    while mine & semaphores(raylet) and time.monotonic() < end:
        time.sleep(0.1)
    assert not mine & semaphores(raylet)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a folder of shared memory")
def test_a_cluster_that_a_process_leaves_open_leaves_nothing_in_shared_memory(local_ray):
    code = ("import ggml_sched as gs, ray\n"
            "cluster = gs.remote.connect(workers=2, threads=1)\n"
            "print(ray._private.worker._global_node.all_processes['raylet'][0].process.pid)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and not done.stderr
    assert not semaphores(int(done.stdout))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_closing_in_a_child_of_a_fork_leaves_the_actors(cluster):
    pid = os.fork()
    if not pid:
        cluster.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cluster.backends[0].ask("memory", 0) is None


def test_after_a_shutdown_of_ray_workers_are_lost_and_no_other_ray_starts(local_ray):
    code = ("import ggml_sched as gs, ray\n"
            "cluster = gs.remote.connect(workers=1, threads=1)\n"
            "backend = cluster.backends[0]\n"
            "buffer = backend.alloc_buffer(64)\n"
            "ray.shutdown()\n"
            "try:\n"
            "    backend.ask('memory', 0)\n"
            "except gs.BackendLost as error:\n"
            "    print(error)\n"
            "try:\n"
            "    cluster.join('w1', threads=1)\n"
            "except gs.BackendError as error:\n"
            "    print(error)\n"
            "buffer.close()\n"
            "cluster.close()\n"
            "cluster.close()\n"
            "print(ray.is_initialized())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [
        "worker 'w0' has died: Ray was shut down", "worker 'w1' does not start: Ray was shut down",
        "False"], done.stderr
    assert not done.stderr


def test_workers_import_the_installed_package_where_the_drivers_folder_has_another(local_ray, tmp_path):
    (tmp_path / "ggml_sched").mkdir()
    (tmp_path / "ggml_sched" / "__init__.py").write_text("raise ImportError('not compiled')\n", encoding="utf-8")
    code = ("import ggml_sched as gs\n"
            "with gs.remote.connect(workers=1, threads=1) as cluster:\n"
            "    print(cluster.backends[0].name)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.stdout.splitlines() == ["w0:CPU"], done.stderr


def test_resources_that_the_ray_of_this_machine_does_not_have_are_an_error_at_once(local_ray):
    code = ("import time\n"
            "import ggml_sched as gs\n"
            "for options in ({'num_gpus': 64}, {'resources': {'big': 1}}):\n"
            "    start = time.monotonic()\n"
            "    try:\n"
            "        gs.remote.connect(workers=1, options=options)\n"
            "    except gs.BackendError as error:\n"
            "        print(error)\n"
            "    assert time.monotonic() - start < 50\n"
            "with gs.remote.connect(workers=1, options={'num_cpus': 1}) as cluster:\n"
            "    try:\n"
            "        cluster.join('w1')\n"
            "    except gs.BackendError as error:\n"
            "        print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [
        "worker 'w0' does not start: it needs 64 GPU, and the Ray of this machine has 0",
        "worker 'w0' does not start: it needs 1 big, and the Ray of this machine has 0",
        "worker 'w1' does not start: it needs 1 CPU, and the Ray of this machine has 1, of which other workers have 1",
    ], done.stderr


def test_a_ray_that_does_not_answer_is_a_typed_error(monkeypatch):
    def refused(*_, **__):
        raise ConnectionError("no such host")

    monkeypatch.setattr(rays.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(rays.ray, "init", refused)
    with pytest.raises(gs.BackendError, match="Ray at here:1 does not start or answer: no such host"):
        gs.remote.connect("here:1")


def test_a_driver_that_is_an_actor_itself(local_ray):
    class Driver:
        def tokens(self):
            import ggml_sched as gs
            from ggml_sched import llama

            with gs.remote.connect(workers=2, threads=1) as cluster, \
                    llama.load(llama.small_model(), cluster.backends, n_ctx=64) as model:
                return list(model.generate([1, 2, 3], 4)), cluster.session.transport.messages_relayed

    driver = ray.remote(num_cpus=0)(Driver).remote()
    try:
        tokens, n_relayed = ray.get(driver.tokens.remote(), timeout=120)
    finally:
        ray.kill(driver)
    assert tokens == [410, 314, 1532, 7] and n_relayed > 8
