"""Random graphs over processes, and workers whose backends are ggml's, or several of different kinds."""

import sys

import ggml_here
import numpy as np
import pytest
from random_graphs import quick  # noqa: F401 - it needs hypothesis
from random_over_workers import check_random_graphs
from remote_workers import logits_of, simulated

import ggml_sched as gs
from ggml_sched.remote import RemoteBackend
from ggml_sched.testing.contract import CASES, BackendContract

needs_sockets = pytest.mark.skipif(sys.platform == "win32", reason="needs sockets of the file system")
needs_ggml = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


@pytest.fixture(scope="module")
def cluster():
    with gs.remote.connect(workers=3, threads=1, transport="processes") as cluster:
        yield cluster


@needs_sockets
@pytest.mark.parametrize("seed", range(3))
def test_random_graphs_over_processes(cluster, seed):
    assert check_random_graphs(cluster.backends, seed, 12) > 6
    for backend in cluster.backends:
        backend.synchronize()


@needs_sockets
@pytest.mark.soak
def test_many_random_graphs_over_processes(cluster):
    for seed in range(100, 140):
        check_random_graphs(cluster.backends, seed, 25)


def test_random_graphs_leave_nothing_on_workers():
    with simulated(3) as cluster:
        workers = cluster.session.transport.handlers.values()
        check_random_graphs(cluster.backends, 1, 12)
        cluster.backends[0].synchronize()
        assert all(worker.used == [0] and not worker.n_registered and not worker.n_buffers for worker in workers)


# -- workers with other backends ---------------------------------------------------------------------


def ggml_backend(name):
    return ggml_here.backend(1, name=name)


@needs_ggml
class TestGgmlOfAWorker(BackendContract):
    """The suite over a worker whose backend is ggml's."""

    cases = CASES[::9]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def workers(cls):
        with simulated(2, backends=lambda: [ggml_here.backend(1)]) as cls.cluster:
            yield
        del cls.cluster

    def backend_of(self, worker, name):
        return RemoteBackend(self.cluster.workers[worker], name=name)

    def new_backend(self):
        return self.backend_of(0, "mine")

    def second_backend(self):
        return self.backend_of(1, "second")


@needs_ggml
def test_a_model_over_workers_with_ggml_has_the_bits_of_ggml_here():
    with simulated(2, backends=lambda: [ggml_here.backend(1)]) as cluster, ggml_backend("a") as a, \
            ggml_backend("b") as b:
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))


@needs_ggml
@needs_sockets
def test_a_worker_with_two_kinds_of_backends_offers_both():
    with gs.remote.connect(workers=1, threads=1, backends=["cpu", "ggml"], transport="processes") as cluster:
        assert [backend.name for backend in cluster.backends] == ["w0:CPU", "w0:GGML"]
        carried = cluster.session.messages
        with gs.CpuBackend(1, name="a") as a, gs.GgmlBackend("CPU", 1, name="b") as b:
            assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))
        assert cluster.session.messages > carried
        check_random_graphs(cluster.backends[:1], 3, 6)


@needs_ggml
def test_workers_with_different_backends_compute_one_model():
    kinds = iter([[gs.CpuBackend(1)], [ggml_here.backend(1)]])
    with simulated(2, backends=lambda: next(kinds)) as cluster, gs.CpuBackend(1, name="a") as a, \
            ggml_backend("b") as b:
        assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))
