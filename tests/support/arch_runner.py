"""Evaluates batches by building and computing graphs directly, without Model; attention masks come from plain loops."""

from __future__ import annotations

import numpy as np

import ggml_sched as gs
from ggml_sched.llama import arch as architectures
from ggml_sched.llama import open_gguf
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.defaults import spread_layers
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.shift import build_shifts
from ggml_sched.llama.weights import load_weights


class Runner:
    """Weights, a cache and a scheduler.  `owner[row]` is the (sequence, position) of the token in that cache row, or
    None."""

    def __init__(self, data, n_ctx: int = 64, *, flash: bool = False, kv_type="f32", n_seq: int = 1, backends=None,
                 place=None) -> None:
        self.backends = backends or [gs.CpuBackend()]
        with open_gguf(data) as file:
            _, self.arch = architectures.find(file)
            self.hparams = self.arch.hparams(file)
            place = place or spread_layers(self.backends, self.hparams.n_layer)
            self.weights = load_weights(file, self.arch.weights(self.hparams), place)
        self.flash = flash
        self.cache = KVCache(self.hparams, n_ctx, place, kv_type, n_seq, flash=flash)
        self.scheduler = gs.Scheduler(self.backends, plan_cache=8)
        self.owner: list = [None] * n_ctx
        self.graphs: dict = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc) -> None:
        self.graphs.clear()
        self.scheduler.close()
        self.cache.close()
        self.weights.close()

    def graph(self, shape: Shape):
        if shape not in self.graphs:
            self.graphs[shape] = build_graph(self.arch, self.hparams, self.weights, self.cache, shape, self.flash)
        return self.graphs[shape]

    def run(self, tokens, positions=None, *, sequences=0, rows=None, outputs=None, embeddings: bool = False,
            state_row: int = 0):
        """The results of `outputs` (None: of all tokens), [m, n_vocab] or [m, n_embd]; None for an empty list."""
        n = len(tokens)
        sequences = np.broadcast_to(np.asarray(sequences, np.int32), n)
        if positions is None:
            seen = [o[1] for o in self.owner if o and o[0] == sequences[0]]
            positions = np.arange(n) + (max(seen) + 1 if seen else 0)
        if rows is None:
            rows = [i for i, o in enumerate(self.owner) if o is None][:n]
        outputs = np.arange(n) if outputs is None else np.asarray(outputs, np.int32).reshape(-1)
        for row, owner in zip(rows, zip(sequences.tolist(), np.asarray(positions).tolist(), strict=True), strict=True):
            self.owner[row] = owner
        n_kv = self.cache.padded(max(i for i, o in enumerate(self.owner) if o) + 1)
        batch = self.graph(Shape(n, n_kv, len(outputs), embeddings))

        def mask_of(window: int, half: bool) -> bytes:
            return np.array([[0 if o is not None and o[0] == s and 0 <= p - o[1] < (window or 1 << 30) else -np.inf
                              for o in self.owner[:n_kv]] for s, p in zip(sequences, positions, strict=True)],
                            np.float16 if half else np.float32).tobytes()

        self.scheduler.alloc(batch.graph)
        batch.set_inputs(Batch(np.asarray(tokens, np.int32), np.asarray(positions, np.int32), sequences,
                               outputs.astype(np.int32)), np.asarray(rows, np.int64), mask_of, state_row)
        self.scheduler.compute(batch.graph)
        return batch.output.numpy().reshape(len(outputs), -1) if len(outputs) else None

    def shift(self, deltas) -> None:
        shift, = build_shifts(self.hparams, self.weights, self.cache, False)
        self.scheduler.alloc(shift.graph)
        shift.deltas.set(np.asarray(deltas, np.int32))
        self.scheduler.compute(shift.graph)
