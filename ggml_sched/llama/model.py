"""A model that runs: weights, KV cache, graphs and the scheduler that runs them.

Owns all of these and closes them.  Invariant: `n_past` tokens are in the cache, and a call that
raises leaves that as it was.  Corresponds to llama.cpp's llama_model and llama_context.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.backend import Backend
from ggml_sched.llama import arch as architectures
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.builder import BatchGraph, Shape, build_graph
from ggml_sched.llama.errors import ContextFull, ModelBusy, ModelClosed
from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.placement import Place, checked, spread_layers
from ggml_sched.llama.sampling import greedy
from ggml_sched.llama.weights import Weights, load_weights

__all__ = ["Model", "load"]

KEPT_GRAPHS = 8
"""Graphs of different shape that are kept: a prompt's, and those of growing caches."""


def load(path, backends: Sequence[Backend] | None = None, n_ctx: int = 512, n_batch: int = 512,
         place: Place | None = None, *, policy: str = "default", kv_type="f32",
         use_mmap: bool = True, flash: bool = False) -> Model:
    """Load a GGUF model from a path, a buffer of bytes or a binary file object.

    `backends`, best first, default to one CpuBackend, which the model closes; given ones stay the caller's.
    `place(name, layer)` says on which of them a weight or KV tensor lives (`layer` is None outside the
    layers); without it layers are spread evenly.  Sequences of up to `n_ctx` tokens are evaluated
    `n_batch` at a time.  `kv_type`: "f32", "f16" or "bf16".  `use_mmap=False` copies the weights.  `flash`: attention
    by the flash node instead of a softmax.

    Raises FileFormatError for a file that is not a model this package runs, UnsupportedOp when no
    backend computes one of its nodes, OutOfMemory and PlacementError as the backends do.
    """
    n_ctx, n_batch = index(n_ctx), index(n_batch)
    for name, value in (("n_ctx", n_ctx), ("n_batch", n_batch)):
        if not 1 <= value <= 1 << 30:
            raise ValueError(f"{name} = {value} is not in 1 .. 2**30")
    if str(kv_type) not in ("f32", "f16", "bf16"):
        raise ValueError(f"kv_type = {str(kv_type)!r}; known: f32, f16, bf16")
    owned: list[Backend] = []
    if backends is None:
        from ggml_sched import CpuBackend

        owned = backends = [CpuBackend()]
    backends = tuple(backends)
    if not backends:
        raise ValueError("a model needs one backend or more")
    model = None
    try:
        with open_gguf(path) as file:
            _, arch = architectures.find(file)
            hparams = arch.hparams(file)
            place = checked(place or spread_layers(backends, hparams.n_layer), backends)
            weights = load_weights(file, arch.weights(hparams), place, use_mmap)
            model = Model(hparams, arch, weights, backends, owned)
        model._prepare(n_ctx, n_batch, place, policy, kv_type, flash)
        return model
    except BaseException:
        if model is not None:
            model.close()
        for backend in owned:
            backend.close()
        raise


class Model:
    """A loaded model and the state of one sequence; made by `load`.

    `hparams`, `n_vocab`, `n_ctx`, `n_batch`, `n_past`, `scheduler`, `backends`, `weights`, `cache`.
    A context manager.  One thread at a time: another one gets ModelBusy.
    """

    def __init__(self, hparams: Hparams, arch, weights: Weights, backends: tuple[Backend, ...],
                 owned: Sequence[Backend]) -> None:
        self.hparams = hparams
        self.weights = weights
        self.backends = backends
        self.cache: KVCache | None = None
        self.scheduler = None
        self.n_ctx = self.n_batch = self.n_past = 0
        self._arch = arch
        self._owned = list(owned)
        self._graphs: OrderedDict[tuple[int, int], BatchGraph] = OrderedDict()
        self._busy = threading.Lock()
        self._closed = False
        self._dirty = False  # the cache may hold rows of a failed evaluation

    def _prepare(self, n_ctx: int, n_batch: int, place: Place, policy: str, kv_type, flash: bool) -> None:
        from ggml_sched import Scheduler

        self.n_ctx, self.n_batch = n_ctx, min(n_batch, n_ctx)
        self.cache = KVCache(self.hparams, n_ctx, place, Type[str(kv_type).upper()], flash=flash)
        self.scheduler = Scheduler(self.backends, policy=policy, plan_cache=KEPT_GRAPHS)
        # What no backend computes is reported now, not at the first token.
        self.scheduler.plan(self.batch_graph(1, self.cache.padded(1)).graph)

    # -- facts ----------------------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        return self.hparams.n_vocab

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        h = self.hparams
        state = "closed" if self._closed else f"{self.n_past} of {self.n_ctx} tokens"
        return f"<Model {h.arch}: {h.n_layer} layers of {h.n_embd}, vocabulary of {h.n_vocab}, {state}>"

    # -- running ----------------------------------------------------------------------

    def eval(self, tokens) -> np.ndarray:
        """Continue the sequence with `tokens`: float32 logits [len(tokens), n_vocab].

        Raises ContextFull when they do not fit, ValueError for an unknown token; after any exception the
        sequence is as it was.
        """
        with self._exclusive():
            ids = self._check(tokens)
            logits = np.empty((len(ids), self.n_vocab), np.float32)
            before = self.n_past
            try:
                if self._dirty:
                    self.cache.clear_rows(range(before, self.n_ctx))
                    self._dirty = False
                for start in range(0, len(ids), self.n_batch):
                    part = ids[start : start + self.n_batch]
                    logits[start : start + len(part)] = self._eval_batch(part)
                    self.n_past += len(part)
            except BaseException:
                self.n_past = before
                self._dirty = True
                raise
            return logits

    def reset(self) -> None:
        """Forget the sequence."""
        with self._exclusive():
            self.cache.clear()
            self.n_past = 0
            self._dirty = False

    def generate(self, tokens, n: int, sampler: Callable[[np.ndarray], int] = greedy) -> Iterator[int]:
        """Continue the sequence with `tokens` and yield n tokens chosen by `sampler`.

        The last one that was yielded is not part of the sequence yet.
        """
        for _ in range(n):
            logits = self.eval(tokens)
            if not len(logits):
                raise ValueError("generating needs one token to start from")
            token = int(sampler(logits[-1]))
            yield token
            tokens = [token]

    def batch_graph(self, n_tokens: int, n_kv: int) -> BatchGraph:
        """The graph of n_tokens tokens that attend to n_kv rows; the last few are kept."""
        key = n_tokens, n_kv
        graph = self._graphs.get(key)
        if graph is None:
            shape = Shape(n_tokens, n_kv, n_tokens)
            graph = build_graph(self._arch, self.hparams, self.weights, self.cache, shape, self.cache.flash)
            self._graphs[key] = graph
            while len(self._graphs) > KEPT_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def _eval_batch(self, ids: np.ndarray) -> np.ndarray:
        batch = self.batch_graph(len(ids), self.cache.padded(self.n_past + len(ids)))
        self.scheduler.alloc(batch.graph)
        rows = np.arange(self.n_past, self.n_past + len(ids))

        def mask_of(window: int) -> np.ndarray:
            age = rows[:, None] - np.arange(batch.shape.n_kv)
            return (age >= 0) & (age < window) if window else age >= 0

        batch.set_inputs(Batch(ids, rows.astype(np.int32), np.zeros(len(ids), np.int32),
                               np.arange(len(ids), dtype=np.int32)), rows, mask_of)
        self.scheduler.compute(batch.graph)
        return batch.output.numpy().reshape(len(ids), self.n_vocab)

    def _check(self, tokens) -> np.ndarray:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
            raise TypeError(f"tokens are a sequence of ints, not {ids.dtype} {list(ids.shape)}")
        bad = np.flatnonzero((ids < 0) | (ids >= self.n_vocab)) if ids.size else ()
        if len(bad):
            raise ValueError(f"token {ids[bad[0]]} at {bad[0]} is not in 0 .. {self.n_vocab - 1}")
        if len(ids) > self.n_ctx - self.n_past:
            raise ContextFull(f"{len(ids)} tokens after {self.n_past} do not fit a context of {self.n_ctx}",
                              self.n_past, len(ids), self.n_ctx)
        return ids.astype(np.int32)

    @contextmanager
    def _exclusive(self):
        if not self._busy.acquire(blocking=False):
            raise ModelBusy("the model is in use; one thread at a time")
        try:
            if self._closed:
                raise ModelClosed("the model is closed")
            yield
        finally:
            self._busy.release()

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Give all memory back; idempotent.  Backends that the caller gave stay open."""
        if not self._busy.acquire(blocking=False):
            raise ModelBusy("the model is in use; it cannot be closed now")
        try:
            if self._closed:
                return
            self._closed = True
            self._graphs.clear()
            if self.scheduler is not None:
                self.scheduler.close()
            if self.cache is not None:
                self.cache.close()
            self.weights.close()
            for backend in self._owned:
                backend.close()
        finally:
            self._busy.release()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
