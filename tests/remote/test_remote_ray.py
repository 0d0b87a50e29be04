"""Workers as actors of a real Ray, which a fixture starts and ends; skipped where Ray is not installed."""

import contextlib
import time

import numpy as np
import pytest
from remote_workers import logits_of, two_halves

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.remote import RemoteBackend
from ggml_sched.testing.contract import CASES, BackendContract

ray = pytest.importorskip("ray", reason="needs the extra ray")


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    """A local Ray with room for the clusters of all tests.

    Its workers look for modules in the driver's folder first, where a tree of sources need not be compiled.
    """
    with contextlib.chdir(tmp_path_factory.mktemp("ray")):
        ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
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
        known = self.cluster.backends[worker]
        return RemoteBackend(known.session, known.worker, known.device, known.facts, name)

    def new_backend(self):
        return self.backend_of(0, "mine")

    def second_backend(self):
        return self.backend_of(1, "second")


def test_a_model_has_the_bits_of_local_backends(cluster):
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))


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
