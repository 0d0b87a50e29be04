"""Runs batches: places tokens in the cache, keeps a graph for each shape, lets the scheduler compute it.

Owns weights, cache, cells, graphs and scheduler, and closes them.  Invariant: rows that a failed evaluation may have
written are zeroed before the next one, so that a masked row never brings a NaN into a product.  Corresponds to
llama.cpp's llama_context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ggml_sched.backend import Backend
from ggml_sched.errors import each
from ggml_sched.llama.adapter import BatchGraph, Shape, build_graph, clear_rows, read_rows, write_rows
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.cells import Cells
from ggml_sched.llama.errors import SequenceError
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["Runner"]

KEPT_GRAPHS = 8
"""Graphs of different shape that are kept: a prompt's, and those of growing caches."""


class Runner:
    """`compute(batch)` and what it needs."""

    def __init__(self, arch, hparams: Hparams, weights: Weights, cache: KVCache, backends: Sequence[Backend],
                 n_seq: int, policy: str, flash: bool) -> None:
        from ggml_sched import Scheduler

        self.arch, self.hparams, self.weights, self.cache, self.flash = arch, hparams, weights, cache, flash
        # One more, for what is evaluated on the side.
        self.cells = Cells(cache.n_ctx, n_seq + 1)
        self.graphs: OrderedDict[Shape, BatchGraph] = OrderedDict()
        self.scheduler = Scheduler(backends, policy=policy, plan_cache=KEPT_GRAPHS)
        self._placed: list[np.ndarray] = []     # rows of the evaluation that is running
        self._dirty: list[np.ndarray] = []      # rows of those that failed

    def graph(self, shape: Shape) -> BatchGraph:
        """The graph of a shape; the last few are kept."""
        graph = self.graphs.get(shape)
        if graph is None:
            graph = build_graph(self.arch, self.hparams, self.weights, self.cache, shape, self.flash)
            self.graphs[shape] = graph
            while len(self.graphs) > KEPT_GRAPHS:
                self.graphs.popitem(last=False)
        else:
            self.graphs.move_to_end(shape)
        return graph

    # -- an evaluation: begin, compute any number of batches, then commit or undo -------------------------------

    def begin(self, sequences: Iterable[int]) -> None:
        """What failed before is wiped; recurrent states of these sequences are kept until it is over."""
        if self._dirty:
            clear_rows(self.cache, np.concatenate(self._dirty))
            self._dirty.clear()
        self._placed.clear()

    def pieces(self, sequences: np.ndarray, n_batch: int) -> Iterator[tuple[int, int]]:
        """A batch cut into parts [start, stop) of n_batch tokens at most, and of one sequence for a recurrent model."""
        ends = [len(sequences)]
        if self.is_recurrent:
            ends = [*(np.flatnonzero(np.diff(sequences)) + 1).tolist(), *ends]
        start = 0
        for end in ends:
            for first in range(start, end, n_batch):
                yield first, min(first + n_batch, end)
            start = end

    def compute(self, batch: Batch, out: np.ndarray, embeddings: bool = False) -> None:
        """Place the batch, compute it and write its outputs, f32 [m, n_vocab or n_embd], to `out`."""
        rows = self.cells.place(batch.positions, batch.sequences)
        self._placed.append(rows)
        n_kv = self.cache.padded(self.cells.rows_in_use())
        graph = self.graph(Shape(len(rows), n_kv, len(batch.outputs), embeddings))
        self.scheduler.alloc(graph.graph)
        graph.set_inputs(batch, rows, lambda window: self.cells.mask(batch.positions, batch.sequences, n_kv, window),
                         int(batch.sequences[0]))
        self.scheduler.compute(graph.graph)
        if len(out):
            if graph.output.ne[1] != len(out):
                out[...] = graph.output.numpy().reshape(-1, out.shape[1])[batch.outputs]
                return
            graph.output.backend.get_tensor(graph.output, out)

    def undo(self) -> None:
        """Everything is as it was at `begin`."""
        for rows in self._placed:
            self.cells.release(rows)
        self._dirty += self._placed
        self._placed = []

    # -- states --------------------------------------------------------------------------------------------------

    is_recurrent = False
    state_bytes = 0

    @property
    def kv_type(self) -> str:
        return str(self.cache.k[0].type)

    @property
    def row_bytes(self) -> int:
        """Of all layers together."""
        return sum(k.nb[1] for k in self.cache.k) + sum(v.nb[1] for v in self.cache.v)

    def read_rows(self, rows: np.ndarray) -> bytes:
        return read_rows(self.cache, rows)

    def write_rows(self, rows: np.ndarray, data: bytes) -> None:
        write_rows(self.cache, rows, data)

    def read_state(self, seq: int) -> bytes:
        return b""

    def write_state(self, seq: int, data: bytes) -> None:
        pass

    def clear_state(self, seq: int) -> None:
        """The recurrent state of a sequence at its beginning."""

    def copy_state(self, src: int, dst: int) -> None:
        """The recurrent state of one sequence for another."""

    def turn(self, deltas: np.ndarray) -> None:
        """Rotate the keys of each row by so many positions."""
        raise SequenceError("not yet")

    def clear(self) -> None:
        """Nothing is in the cache."""
        self.cache.clear()
        self.cells.clear()
        self._dirty.clear()

    def close(self) -> None:
        """Give all memory back, whatever raises."""
        self.graphs.clear()
        each([self.scheduler.close, self.cache.close, self.weights.close])
