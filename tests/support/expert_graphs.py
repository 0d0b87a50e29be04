"""Graphs with layers of experts, whose weights are in memory or in the slots of a store."""

import numpy as np

import ggml_sched as gs
from ggml_sched._graph import bind_resident
from ggml_sched.backends.store import ExpertSlots, Stored
from ggml_sched.experts import LeastRecentlyUsed

__all__ = ["ExpertGraph"]


class ExpertGraph:
    """`n_layers` layers, each of which lets `n_used` of `n_experts` experts compute each of `n_tokens` tokens.

    The numbers of the experts of each layer are an input, `ids[layer]`, or with `routed` computed by nodes.  Weights
    lie one after another in `data`, or in the file `path`, which is then written.  `n_slots` None: all in memory.
    """

    def __init__(self, n_slots, n_layers=3, n_experts=6, n_used=2, n_tokens=2, width=64, policy=None, path=None,
                 routed=False, seed=0, cpu=None, direct=None, offset=0):
        rng = np.random.default_rng(seed)
        self.shape = (n_layers, n_experts, n_used, n_tokens, width)
        count = n_layers * 2 * n_experts * width * width
        self.values = (rng.standard_normal(count) / np.sqrt(width)).astype(np.float32)
        self.data = np.concatenate([np.zeros(offset, np.uint8), self.values.view(np.uint8)])
        self.cpu = cpu or gs.CpuBackend(1)
        self.weights, self.ctx = gs.Context("weights"), gs.Context()
        names = [f"layer{k}.{what}" for k in range(n_layers) for what in ("up", "down")]
        size = self.values.nbytes // len(names)
        tensors = [self.weights.tensor("f32", (width, width, n_experts), name) for name in names]
        self.slots = self.store = None
        if n_slots is None:
            buffer = self.cpu.buffer_from_ptr(self.data, usage="weights")
            for k, tensor in enumerate(tensors):
                bind_resident(tensor, buffer, offset + k * size)
        else:
            if path is None:
                self.store = gs.Store("memory")
                self.source = self.store.buffer_from_ptr(self.data, usage="weights")
            else:
                path.write_bytes(self.data.tobytes())
                self.store = gs.FileStore("file", direct=direct)
                self.source = self.store.open_file(path)
            banks = [(f"layer{k}", [Stored(tensors[2 * k + i], self.source, offset + (2 * k + i) * size)
                                    for i in range(2)]) for k in range(n_layers)]
            self.slots = ExpertSlots(self.store, self.cpu, n_slots, policy or LeastRecentlyUsed(), banks)
        ctx = self.ctx
        self.x = x = ctx.tensor("f32", (width, n_tokens), "x", input=True)
        self.ids, self.scores = [], []
        for k in range(n_layers):
            if routed:
                self.scores.append(ctx.tensor("f32", (n_experts, n_tokens), f"scores{k}", input=True))
                order = ctx.argsort(self.scores[-1], "desc")
                ids = ctx.view_2d(order, n_used, n_tokens, order.nb[1])
            else:
                ids = ctx.tensor("i32", (n_used, n_tokens), f"ids{k}", input=True)
                self.ids.append(ids)
            y = ctx.silu(ctx.mul_mat_id(tensors[2 * k], ctx.reshape_3d(x, width, 1, n_tokens), ids))
            y = ctx.mul_mat_id(tensors[2 * k + 1], y, ids)
            parts = [ctx.view_2d(y, width, n_tokens, y.nb[2], i * y.nb[1]) for i in range(n_used)]
            x = ctx.add(x, ctx.cont(parts[0]))
            for part in parts[1:]:
                x = ctx.add(x, part)
        self.y = ctx.set_output(x)
        self.graph = gs.Graph(self.y)
        self.scheduler = gs.Scheduler([*([] if self.store is None else [self.store]), self.cpu])

    def compute(self, chosen):
        """The bytes of the result; `chosen` has for each layer the experts of each token, [n_tokens][n_used]."""
        _, n_experts, _, n_tokens, width = self.shape
        self.scheduler.alloc(self.graph)
        self.x.set(np.linspace(-1, 1, n_tokens * width, dtype=np.float32).reshape(n_tokens, width))
        for k, experts in enumerate(chosen):
            if self.ids:
                self.ids[k].set(np.array(experts, np.int32))
            else:
                scores = np.zeros((n_tokens, n_experts), np.float32)
                for token, row in enumerate(experts):
                    scores[token, row] = np.arange(len(row), 0, -1)
                self.scores[k].set(scores)
        self.scheduler.compute(self.graph)
        return self.y.numpy().tobytes()

    def choices(self, n, seed=0):
        """`n` random choices for `compute`, the same for every graph of this shape."""
        n_layers, n_experts, n_used, n_tokens, _ = self.shape
        rng = np.random.default_rng(seed)
        return [[[rng.permutation(n_experts)[:n_used].tolist() for _ in range(n_tokens)] for _ in range(n_layers)]
                for _ in range(n)]

    def close(self):
        self.scheduler.close()
        if self.slots is not None:
            self.slots.close()
            self.source.close()
            self.store.close()
        self.cpu.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
