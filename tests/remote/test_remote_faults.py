"""Whatever a network does: the right results, or a typed error within the deadline, and nothing is left on a worker."""

import math
import random

import numpy as np
import pytest
from remote_workers import products, simulated, two_halves

import ggml_sched as gs
from ggml_sched.remote.simulated import Faults, SimulatedNetwork
from ggml_sched.remote.worker import Worker

N_SEEDS = 40
DEADLINE = 10.0


def faults_of(seed):
    rng = random.Random(seed)
    some = {
        "loss": rng.choice([0, 0.05, 0.3]), "repeat": rng.choice([0, 0.2]), "late": rng.choice([0, 0.01, 3.0]),
    }
    kind = rng.randrange(6)
    when = rng.randrange(40)
    worker = f"w{rng.randrange(3)}"
    if kind == 0:
        some["deaths"] = {worker: when}
    elif kind == 1:
        some["hangs"] = {worker: when}
    elif kind == 2:
        ends = rng.sample(["driver", "w0", "w1", "w2"], 2)
        some["cut"] = {tuple(ends): when, tuple(reversed(ends)): when}
    return Faults(**some)


def attempt(seed):
    """Compute on three workers until a fault ends it; returns how many computes gave their results, and the error."""
    ctx, done, error, longest = gs.Context(), 0, None, 0.0
    with simulated(3, seed, faults_of(seed), DEADLINE, delay=0.001) as cluster:
        network = cluster.session.transport
        workers = network.handlers
        try:
            path = random.Random(seed).choice(["ab", "ba", "ca", "bc", "aba", "cac", "abca", "bcbc"])
            graph, x, y, held = products(ctx, *(cluster.backends["abc".index(step)] for step in path))
            factor = math.factorial(len(path) + 1)
            with gs.Scheduler(cluster.backends, copies=random.Random(seed).choice([1, 3])) as scheduler:
                scheduler.alloc(graph)
                start = network.now()
                for k in range(8):
                    start, longest = network.now(), max(longest, network.now() - start)
                    x.set(np.full((2, 16), k, np.float32))
                    if k % 3:
                        scheduler.compute_async(graph)
                    else:
                        scheduler.compute(graph)
                        assert np.array_equal(y.numpy(), np.full((2, 16), factor * k, np.float32)), "a stale result"
                        done += 1
            for _, w in held:
                w.buffer.close()
            cluster.session.wait()
            # What is closed is freed on the workers, and not only with the session.
            assert all(worker.used == [0] for worker in workers.values()), seed
        except gs.Error as raised:
            error = raised
        # A call may wait for an envelope that was queued before, and then for its own.
        assert longest <= 3 * DEADLINE
        lost = {*cluster.session.lost}
    left = {name: (worker.used, len(worker.sessions)) for name, worker in workers.items() if name not in lost}
    return done, error, left


def check(seed):
    done, error, left = attempt(seed)
    assert done == 3 or isinstance(error, gs.BackendLost), (seed, done, error)
    if error is None:
        assert all(used == [0] and not sessions for used, sessions in left.values()), (seed, left)


@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_faults_of_the_network_end_in_results_or_in_backend_lost(seed):
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(0, 5000, 250))
def test_five_thousand_runs_with_faults(start):
    for seed in range(start, start + 250):
        check(seed)


def test_the_error_names_the_worker_and_what_it_computed(ctx):
    with simulated(2, deadline=DEADLINE) as cluster:
        graph, x, _y, _held = two_halves(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            network = cluster.session.transport
            network.begin(Faults(hangs={"w1": network.handled["w1"]}))
            start = network.now()
            said = "worker 'w1' has not answered within 10 s while it computed"
            with pytest.raises(gs.BackendLost, match=said) as raised:
                scheduler.compute(graph)
            assert network.now() - start <= DEADLINE + 1
            assert raised.value.worker == "w1" and raised.value.computing
            with pytest.raises(gs.BackendLost):
                scheduler.compute(graph)
            assert cluster.lost == (cluster.backends[1],)
            # The other worker goes on.
            assert cluster.backends[0].memory_available() is None


def test_a_lost_worker_does_not_keep_the_others_waiting(ctx):
    """Segments that were to come by way of a lost worker are given up."""
    with simulated(3, deadline=DEADLINE) as cluster:
        graph, x, _y, _held = two_halves(ctx, cluster.backends[1], cluster.backends[2])
        other = gs.Context()
        graph2, x2, y2, _held2 = two_halves(other, cluster.backends[0], cluster.backends[2])
        with gs.Scheduler(cluster.backends) as one, gs.Scheduler([cluster.backends[0], cluster.backends[2]]) as two:
            one.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            one.compute(graph)
            network = cluster.session.transport
            network.begin(Faults(deaths={"w1": network.handled["w1"]}))
            with pytest.raises(gs.BackendLost, match="'w1' has died"):
                one.compute(graph)
            two.alloc(graph2)
            x2.set(np.ones((2, 16), np.float32))
            two.compute(graph2)
            assert np.array_equal(y2.numpy(), np.full((2, 16), 6.0, np.float32))


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_an_envelope_that_returns_to_a_worker_survives_the_loss_of_its_answer(ctx, lost):
    """Its first worker has executed two of its segments, and must still know what it sent after the first one."""

    class Deaf(SimulatedNetwork):
        drops = 0

        def receive(self, timeout):
            message = super().receive(timeout)
            if message is not None and self.drops:
                self.drops -= 1
                return None
            return message

    network = Deaf([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)])
    with gs.remote.cluster_of(network, DEADLINE) as cluster:
        one, two = cluster.backends
        graph, x, y, _held = products(ctx, one, two, one)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            for k in range(3):
                x.set(np.full((2, 16), k, np.float32))
                network.drops = lost
                scheduler.compute(graph)
                assert np.array_equal(y.numpy(), np.full((2, 16), 24.0 * k, np.float32))
