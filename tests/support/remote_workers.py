"""Workers in this process or in others, and a small model over them."""

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

__all__ = ["ARCHITECTURES", "check_architecture", "logits_of", "products", "simulated", "two_halves"]


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
