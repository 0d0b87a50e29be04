"""Random graphs with weights in stores, and their results where all weights are on the CPU.

`StoredGraph(seed)` describes one; `build(home)` makes it with each weight on the backend that `home(k)` returns, and
`set` gives its inputs values.  A weight may be used by several nodes, through a view, and by GET_ROWS.
"""

import random

import numpy as np

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues, DeferredStore

WIDTH = 32


class StoredGraph:
    """A random chain of products with up to `n_weights` weights; `weights` are their values."""

    def __init__(self, seed: int, n_weights: int = 9) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.rows = rng.randrange(1, 5)
        self.embeds = rng.random() < 0.6
        numbers = np.random.default_rng(seed)
        self.heights = [WIDTH * rng.choice((1, 1, 2, 5)) for _ in range(rng.randrange(2, n_weights + 1))]
        self.weights = [numbers.standard_normal((height, WIDTH)).astype(np.float32) / 8 for height in self.heights]
        self.table = numbers.standard_normal((40, WIDTH)).astype(np.float32)
        self.steps = [(rng.randrange(len(self.weights)), rng.choice(("all", "all", "view", "bias")), rng.random() < 0.3)
                      for _ in range(rng.randrange(2, 14))]

    def build(self, home):
        """(graph, inputs, output, buffers): weight number k is on `home(k)`, the table of GET_ROWS is number -1."""
        tensors, buffers = {}, []
        for k in range(-1, len(self.weights)):
            ctx = gs.Context(f"weight {k}")
            rows = 40 if k < 0 else self.heights[k]
            tensors[k] = ctx.tensor("f32", (WIDTH, rows), f"w{k}")
            buffers.append(home(k).alloc_tensors(ctx))
            home(k).set_tensor(tensors[k], (self.table if k < 0 else self.weights[k]).tobytes())
        ctx = gs.Context()
        ids = ctx.tensor("i32", self.rows, "ids", input=True)
        x = ctx.tensor("f32", (WIDTH, self.rows), "x", input=True)
        inputs = [ids, x] if self.embeds else [x]
        y = ctx.add(ctx.get_rows(tensors[-1], ids), x) if self.embeds else ctx.silu(x)
        for k, how, sums in self.steps:
            w = tensors[k]
            if how == "bias":
                row = ctx.view_2d(w, WIDTH, 1, w.nb[1], (self.heights[k] - 1) * w.nb[1])
                z = ctx.add(y, row)
            else:
                first = self.heights[k] - WIDTH if how == "view" else 0
                z = ctx.mul_mat(ctx.view_2d(w, WIDTH, WIDTH, w.nb[1], first * w.nb[1]) if how == "view" else w, y)
                z = ctx.view_2d(z, WIDTH, self.rows, z.nb[1], 0)
            y = ctx.tanh(ctx.add(ctx.cont(z), y) if sums else ctx.cont(z))
        return gs.Graph(ctx.set_output(y)), inputs, y, buffers

    def set(self, inputs, turn: int) -> None:
        """Give the inputs the values of turn number `turn`."""
        rng = np.random.default_rng((self.seed, turn))
        for t in inputs:
            t.set(rng.integers(0, 40, self.rows).astype(np.int32) if t.name == "ids"
                  else rng.standard_normal((self.rows, WIDTH)).astype(np.float32))

    def expected(self, turns: int) -> list[bytes]:
        """The results of the turns, with all weights on a CPU backend."""
        with gs.CpuBackend(1) as cpu:
            graph, inputs, output, _ = self.build(lambda k: cpu)
            found = []
            with gs.Scheduler([cpu]) as scheduler:
                scheduler.alloc(graph)
                for turn in range(turns):
                    self.set(inputs, turn)
                    scheduler.compute(graph)
                    found.append(output.numpy().tobytes())
        return found


def deferred_devices(seed: int, margin: int = 0):
    """(queues, stores, devices): one or two of each, for a random order of their tasks."""
    rng = random.Random(seed)
    queues = DeferredQueues(seed)
    stores = [DeferredStore(f"disk{k}", queues, margin, rng.random() < 0.7) for k in range(rng.choice((1, 1, 2)))]
    devices = [DeferredBackend(f"GPU{k}", queues) for k in range(rng.choice((0, 0, 1)))]
    devices.append(DeferredBackend("CPU", queues))
    return queues, stores, devices
