"""Whatever a network does: the right results, or a typed error within the deadline, and nothing is left on a worker."""

import functools
import gc
import math
import random
from collections import Counter

import numpy as np
import pytest
from remote_workers import products, simulated, two_halves

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama.synthetic import random_model
from ggml_sched.remote.simulated import Faults, SimulatedNetwork
from ggml_sched.remote.worker import Worker

N_SEEDS = 40
DEADLINE = 10.0
WORKERS = ("w0", "w1", "w2")
N_COMPUTES = 8
TOKENS, PROMPT = (3, 14, 15, 9, 26, 5, 35, 8, 9), 3
"""Of which the first PROMPT are evaluated together."""


def begin_faults(network, rng, n):
    """Let faults happen from now on.  What ends a worker or a way does so within its next `n` messages."""
    some = {"loss": rng.choice([0, 0.05, 0.3]), "repeat": rng.choice([0, 0.2]), "late": rng.choice([0, 0.01, 3.0])}
    kind, worker, when = rng.choice(["none", "death", "death", "hang", "cut"]), rng.choice(WORKERS), rng.randrange(n)
    if kind == "death":
        some["deaths"] = {worker: network.handled[worker] + when}
    elif kind == "hang":
        some["hangs"] = {worker: network.handled[worker] + when}
    elif kind == "cut":
        a, b = rng.sample(["driver", *WORKERS], 2)
        some["cut"] = {way: network.carried.get(way, 0) + when for way in ((a, b), (b, a))[: rng.choice([1, 2])]}
    network.begin(Faults(**some))


class Clock:
    """The simulated seconds of the longest call."""

    def __init__(self, network):
        self.network, self.longest = network, 0.0

    def __call__(self, function, *args, **how):
        start = self.network.now()
        try:
            return function(*args, **how)
        finally:
            self.longest = max(self.longest, self.network.now() - start)


def until_quiet(cluster):
    """Wait until nothing is queued; each worker that is lost meanwhile may end one wait."""
    for _ in range(len(WORKERS) + 1):
        try:
            for backend in cluster.backends:
                if backend.lost is None:
                    backend.synchronize()
            return
        except gs.BackendLost:
            pass
    raise AssertionError("more losses than workers")


def check_nothing_is_left(cluster, seed):
    """The workers that are not lost hold nothing of what was closed, and after the session's end nothing of it."""
    workers, session = cluster.session.transport.handlers, cluster.session
    until_quiet(cluster)
    if any(worker.used != [0] for worker in workers.values()):
        gc.collect()        # what an exception has kept is freed with the next message
        until_quiet(cluster)
    for name, worker in workers.items():
        if name not in session.lost:
            assert worker.used == [0], (seed, name, worker.used)
            assert not any(s.buffers or s.splits for s in worker.sessions.values()), (seed, name)
    session.close()
    for name, worker in workers.items():
        if name not in session.lost:
            assert not worker.sessions, (seed, name)


# -- products ---------------------------------------------------------------------------------------


def computed(cluster, backends, rng, clock, faults_after):
    """Compute products on some backends, faults beginning after so many computes; how many results were right."""
    ctx, held, right = gs.Context(), [], 0
    network = cluster.session.transport
    try:
        graph, x, y, held = products(ctx, *backends)
        factor = math.factorial(len(backends) + 1)
        with gs.Scheduler([*dict.fromkeys(backends)], copies=rng.choice([1, 3])) as scheduler:
            scheduler.alloc(graph)
            for k in range(N_COMPUTES):
                if k == faults_after:
                    begin_faults(network, rng, N_COMPUTES)
                x.set(np.full((2, 16), k, np.float32))
                clock(rng.choice([scheduler.compute, scheduler.compute_async]), graph)
                if rng.random() < 0.7 or k == N_COMPUTES - 1:
                    clock(scheduler.synchronize)
                    assert np.array_equal(clock(y.numpy), np.full((2, 16), factor * k, np.float32)), "a stale result"
                right = k + 1
    except gs.BackendLost:
        pass
    finally:
        for weights, w in held:
            w.buffer.close()
            weights.close()
    return right

def attempt(seed):
    """Compute products on three workers through faults, then on those that are left; how many results were right before
    the first loss."""
    rng = random.Random(seed)
    with simulated(len(WORKERS), seed, None, DEADLINE, delay=0.001) as cluster:
        clock = Clock(cluster.session.transport)
        path = rng.choice(["ab", "ba", "ca", "bc", "aba", "cac", "abca", "bcbc"])
        after = rng.choice([None, *range(1, N_COMPUTES - 1)])
        if after is None:
            begin_faults(cluster.session.transport, rng, 40)
        right = computed(cluster, [cluster.backends["abc".index(step)] for step in path], rng, clock, after)
        lost = {*cluster.lost}
        assert right == N_COMPUTES or lost, seed
        rest = [backend for backend in cluster.backends if backend not in lost]
        if lost and rest:
            assert computed(cluster, rest, rng, clock, None) == N_COMPUTES or {*cluster.lost} > lost, seed
        # A call may wait for what was queued before it, and then for its own.
        assert clock.longest <= 3 * DEADLINE, seed
        check_nothing_is_left(cluster, seed)
    return right


# -- tokens of a model ------------------------------------------------------------------------------


@functools.cache
def model_file():
    return random_model("llama", 1)


@functools.cache
def local_logits(*chunks):
    """The logits of a local model after its tokens were evaluated in chunks of these sizes."""
    with gs.CpuBackend(1) as cpu, llama.load(model_file(), [cpu], n_ctx=64) as model:
        done = 0
        for size in chunks:
            logits, done = model.eval(TOKENS[done : done + size])[-1], done + size
        return logits


def attempt_of_model(seed):
    """Evaluate tokens over workers through faults, and go on with those that are left; how many tokens had the right
    logits before the first loss."""
    rng = random.Random(seed)
    with simulated(len(WORKERS), seed, None, DEADLINE, delay=0.001) as cluster:
        clock = Clock(cluster.session.transport)
        model, n, chunks, first = None, rng.choice([2, 3]), (), None
        after = rng.choice([None, *range(PROMPT, len(TOKENS) - 2)])
        if after is None:
            begin_faults(cluster.session.transport, rng, 80)
        while sum(chunks) < len(TOKENS):
            rest = [backend for backend in cluster.backends if backend.lost is None][:n]
            if not rest:
                break
            try:
                if model is None:
                    model = clock(llama.load, model_file(), rest, n_ctx=64)
                elif any(backend.lost is not None for backend in model.backends):
                    model = clock(model.moved, rest)
                    chunks = (sum(chunks),) if chunks else ()
                if after is not None and sum(chunks) >= after:
                    after = begin_faults(cluster.session.transport, rng, len(TOKENS) - after)
                done = sum(chunks)
                logits = clock(model.eval, TOKENS[done : done + (1 if chunks else PROMPT)])[-1]
                chunks = *chunks, 1 if chunks else PROMPT
                assert np.array_equal(logits, local_logits(*chunks)), (seed, chunks)
            except gs.BackendLost:
                assert cluster.lost, seed
                first = sum(chunks) if first is None else first
        if model is not None:
            model.close()
        # Loading again and the evaluation of what was evaluated before are several waits.
        check_nothing_is_left(cluster, seed)
    return len(TOKENS) if first is None else first


# -- many seeds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_faults_of_the_network_end_in_results_or_in_backend_lost(seed):
    attempt(seed)


@pytest.mark.parametrize("seed", range(N_SEEDS // 4))
def test_a_model_ends_in_the_right_logits_or_goes_on_without_the_lost(seed):
    attempt_of_model(seed)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(0, 5000, 250))
def test_five_thousand_runs_with_faults(start):
    """A fifth of them with a model.  Many end in the middle of their computes."""
    ends = Counter()
    for seed in range(start, start + 250):
        right, n = (attempt_of_model(seed), len(TOKENS)) if seed % 5 == 0 else (attempt(seed), N_COMPUTES)
        ends["whole" if right == n else "middle" if right else "start"] += 1
    assert ends["middle"] >= 60 and ends["whole"] >= 50, ends


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
            assert cluster.backends[0].ask("memory", 0) is None


def test_a_model_that_has_lost_a_worker_is_moved_where_its_weights_have_room_once():
    """And after it had no room elsewhere; a backend of this process is never lost."""
    data = llama.random_llama()
    with simulated(2) as cluster, llama.load(data, cluster.backends[:1], n_ctx=64):
        held = cluster.session.transport.handlers["w0"].used[0]
    with simulated(2, memory=held + held // 8) as cluster, gs.CpuBackend(1, name="local") as local:
        model = llama.load(data, [*cluster.backends, local], n_ctx=64, place=lambda name, layer: cluster.backends[
            int(layer is not None and layer % 4 == 3)])
        handlers, network = cluster.session.transport.handlers, cluster.session.transport
        assert handlers["w0"].used[0] > held // 2 and handlers["w1"].used[0]
        model.eval([1, 2, 3])
        network.begin(Faults(deaths={"w1": network.handled["w1"]}))
        with pytest.raises(gs.BackendLost):
            model.eval([4])
        with gs.CpuBackend(1, name="small", memory=1 << 16) as small, pytest.raises(gs.OutOfMemory):
            model.moved([small])
        rest = [backend for backend in model.backends if backend.lost is None]
        assert rest == [cluster.backends[0], local]
        with model.moved(rest[:1]) as moved, llama.load(data, [local], n_ctx=64) as want:
            assert moved.sequence(0).tokens == [1, 2, 3] and model.closed
            want.eval([1, 2, 3])
            assert np.array_equal(moved.eval([4]), want.eval([4]))


@pytest.mark.parametrize("lost", [False, True])
def test_a_model_that_a_fit_has_placed_moves_with_the_host_that_load_has_made(lost):
    data = llama.small_model()
    with simulated(2) as cluster:
        graphs = llama.model_graphs(data, 64, 32, backends=cluster.backends)
        fit = gs.fit(graphs, [gs.Device(backend.name, 1 << 30, 1e9, 1e9, backend=backend)
                              for backend in cluster.backends], gs.Link(5e8, 1e-6))
        model = llama.load(data, cluster.backends, place=fit)
        want = model.eval(TOKENS[:3])[-1]
        model.truncate(2)
        host = model.backends[-1]
        assert host not in cluster.backends
        if lost:
            network = cluster.session.transport
            network.begin(Faults(deaths={"w1": network.handled["w1"]}))
            with pytest.raises(gs.BackendLost):
                cluster.backends[1].ask("memory", 0)
        rest = [backend for backend in model.backends if backend.lost is None]
        assert len(rest) == 3 - lost
        with gs.CpuBackend(1, name="small", memory=1 << 12) as small, pytest.raises(gs.OutOfMemory):
            model.moved([small])
        with model.moved(rest) as moved:
            assert np.allclose(moved.eval(TOKENS[2:3])[0], want, atol=1e-4 * np.abs(want).max())
        assert host.closed


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
