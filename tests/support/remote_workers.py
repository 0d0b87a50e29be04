"""Workers in this process or in others, and a small model over them."""

import os
import random
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama import arch
from ggml_sched.llama.synthetic import random_model
from ggml_sched.remote.cluster import cluster_of
from ggml_sched.remote.simulated import Faults, SimulatedNetwork
from ggml_sched.remote.worker import Worker

__all__ = ["ARCHITECTURES", "check_architecture", "killed_generations", "logits_of", "products", "simulated",
           "two_halves"]


@contextmanager
def simulated(n=2, seed=0, faults=None, deadline=10.0, backends=lambda: [gs.CpuBackend(1)], memory=None, **network):
    """A cluster of `n` workers on a simulated network, whose faults begin once it is connected."""
    carrier = SimulatedNetwork([Worker(f"w{i}", backends(), memory) for i in range(n)], seed, **network)
    with cluster_of(carrier, deadline) as cluster:
        carrier.begin(faults or Faults())
        yield cluster


def logits_of(backends, tokens=(1, 2, 3), n=3, source=None, **how):
    """The logits after some tokens, and after each of `n` more, of the small model or another one."""
    with llama.load(source or llama.small_model(), backends, n_ctx=64, **how) as model:
        rows = [model.eval(list(tokens))[-1]]
        rows += [model.eval([7 + k])[-1] for k in range(n)]
        return np.array(rows)


ARCHITECTURES = [
    pytest.param(name, marks=() if name in ("llama", "gemma3", "gpt-oss", "deepseek2", "mamba") else pytest.mark.soak)
    for name in arch.ARCHITECTURES]


def check_architecture(name, backends):
    """A random model over two remote backends has the bits of the same split over two local ones."""
    def logits(where):
        with llama.load(random_model(name, 1), where, n_ctx=64) as model:
            return [model.eval([3, 14, 15, 9, 26]), *(model.eval([t]) for t in (3, 5))]

    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        for far, local in zip(logits(backends), logits([a, b]), strict=True):
            assert np.array_equal(far, local)


def products(ctx, *backends, n=16, rows=2):
    """A graph that multiplies by 2 on the first backend, by 3 on the next, ...: (graph, input, result, weights)."""
    held = []
    x = y = ctx.tensor("f32", (n, rows), "x", input=True)
    for k, backend in enumerate(backends):
        weights = gs.Context(f"weights {k}")
        w = weights.tensor("f32", (n, n), f"w{k}")
        backend.alloc_tensors(weights)
        w.set(np.eye(n, dtype=np.float32) * (k + 2))
        held.append((weights, w))
        y = ctx.mul_mat(w, ctx.relu(y) if k else y)
    return gs.Graph(ctx.set_output(y)), x, y, held


def two_halves(ctx, first, second):
    """`products` of two backends: inputs of k give 6 k."""
    return products(ctx, first, second)


def killed_generations(cluster, pid_of, n, seed):
    """Generate `n` times over two workers of a cluster, and kill one of them by SIGKILL while a token in the middle is
    computed; `pid_of(worker)` is its process.  How many generations ended by that.

    A generation has the right tokens, up to its end or to BackendLost; the model then goes on over the other worker and
    one that comes in place of the killed one.
    """
    rng, n_tokens, lost = random.Random(seed), 24, 0
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b, \
            llama.load(llama.small_model(), [a, b], n_ctx=64) as local:
        want = list(local.generate([1, 2, 3], n_tokens))
    model = llama.load(llama.small_model(), cluster.backends, n_ctx=64)
    for k in range(n):
        model.reset()
        doomed, at, tokens = rng.choice(model.backends), rng.randrange(1, n_tokens - 6), []
        # Within the next tokens: they take about a millisecond each.
        timer = threading.Timer(rng.random() * 3e-3, os.kill, (pid_of(doomed.worker), signal.SIGKILL))
        try:
            for token in model.generate([1, 2, 3], n_tokens):
                tokens.append(token)
                if len(tokens) == at:
                    timer.start()
            assert tokens == want, f"generation {k}"
        except gs.BackendLost as error:
            assert error.worker == doomed.worker and tokens == want[: len(tokens)] and len(tokens) >= at
            lost += 1
        timer.join()
        while doomed.lost is None:      # it was killed after the last token
            try:
                doomed.ask("memory", 0)
            except gs.BackendLost:
                break
        joined, = cluster.join(doomed.name.partition(":")[0], threads=1)
        model = model.moved([joined if backend is doomed else backend for backend in model.backends])
    model.close()
    return lost
