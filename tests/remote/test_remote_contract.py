"""The contract suite over remote backends, and random graphs over workers beside a local host."""

import pytest
from devices import poisoned
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes
from random_over_workers import overlaps
from random_results import REFUSALS, check_three_computes
from remote_workers import simulated

import ggml_sched as gs
from ggml_sched.remote import RemoteBackend
from ggml_sched.remote.simulated import Faults
from ggml_sched.testing.contract import CASES, BackendContract

FEW = [case for k, case in enumerate(CASES) if k % 16 == 0]
REFUSED = st.sets(st.sampled_from(REFUSALS), max_size=6)


class Remote(BackendContract):
    """Backends of two workers; each test has the same ones under names of its own."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def workers(cls):
        with cls.connected() as cls.cluster:
            yield
        del cls.cluster

    def backend_of(self, worker, name):
        return RemoteBackend(self.cluster.workers[worker], name=name)

    def new_backend(self):
        return self.backend_of(0, "mine")

    def second_backend(self):
        return self.backend_of(1, "second")


class TestSimulated(Remote):
    cases = CASES[::4]

    @staticmethod
    def connected():
        return simulated(2, backends=lambda: [gs.CpuBackend(2)])


class TestLossy(Remote):
    """On a network that loses, repeats and reorders messages."""

    cases = FEW

    @staticmethod
    def connected():
        return simulated(2, 3, Faults(loss=0.05, repeat=0.1, late=0.5), deadline=1000.0)


class TestProcesses(Remote):
    cases = FEW

    @staticmethod
    def connected():
        return gs.remote.connect(workers=2, threads=1, transport="processes")


@quick(25)
@given(recipes(), st.integers(2, 4), st.lists(REFUSED, min_size=3, max_size=3), st.integers(0, 3), st.booleans(),
       st.integers(0, 100), st.booleans())
def test_random_graphs_over_workers(recipe, n_backends, refused, queued, has_host, seed, is_lossy):
    """Random residency and refused ops over workers whose memory is poisoned; three computes, with the bits of every
    tensor in memory of its own."""
    built = Built(recipe, n_backends)
    n = n_backends - has_host
    ops = iter([*refused[: n_backends - 1], set()])
    faults = Faults(loss=0.02, repeat=0.1, late=0.5) if is_lossy else None
    with simulated(n, seed, faults, 1000.0, lambda: [poisoned("there", next(ops))]) as cluster:
        backends = [*cluster.backends]
        if has_host:
            backends.append(poisoned("here", next(ops)))
        for backend, home in zip(backends, built.homes, strict=True):
            backend.alloc_tensors(home)
        with gs.Scheduler(backends, copies=max(queued, 1)) as scheduler:
            try:
                scheduler.alloc(built.graph).verify()
            except gs.UnsupportedOp:
                # A view whose elements overlap does not travel: only a host computes with it.
                assert not has_host and any(overlaps(t) for t in built.graph.tensors)
                return
            check_three_computes(built, recipe, scheduler, queued, f"{n} workers")
