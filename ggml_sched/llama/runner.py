"""Runs batches: places tokens in the cache, caches a graph for each shape, and computes it with the scheduler.

Owns weights, cache, cells, graphs and scheduler, and closes them.  Invariant: rows of the cache that a failed
evaluation may have written are zeroed before the next one: attention multiplies masked rows by 0, and 0 times NaN is
NaN.  Corresponds to llama.cpp's llama_context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ggml_sched.backend import Backend, check_failures, overrides
from ggml_sched.errors import OutOfMemory, UnsupportedOp, each
from ggml_sched.llama._cells import Cells
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.batchgraph import LargestShapes
from ggml_sched.llama.builder import BatchGraph, Shape, build_graph
from ggml_sched.llama.errors import SequenceError
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.huge_pages import HugePages
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

if TYPE_CHECKING:
    from ggml_sched import Arenas, Scheduler, Tensor
    from ggml_sched.llama.arch import Architecture
    from ggml_sched.llama.limited import Held
    from ggml_sched.llama.routing import Recorder
    from ggml_sched.llama.shift import Rotation, ShiftGraph
    from ggml_sched.placement.answer import Fit

__all__ = ["Runner"]

KEPT_GRAPHS = 8
"""How many graphs are kept: of prompts, and of single tokens that read different numbers of cache rows."""
KEPT_UNDER_LIMIT = 3
"""How many graphs are kept under a limit of memory, in which weights are worth more: of a token, of a full batch of a
prompt and of the rest of a prompt."""


class Runner:
    """Computes batches of a model; has its weights, its cache and the graphs of the last shapes."""

    def __init__(self, arch: Architecture, hparams: Hparams, weights: Weights, cache: KVCache,
                 backends: Sequence[Backend], n_seq: int, policy: str, n_batch: int,
                 fit: Fit | None = None, held: Held | None = None, arenas: Arenas | None = None,
                 huge_pages: bool = True) -> None:
        from ggml_sched import Scheduler

        self.hparams = hparams
        self.weights = weights
        self.cache = cache
        self.is_recurrent: bool = hparams.recurrent
        self.arch = arch
        # `embed` evaluates its tokens in one more sequence, which the caller does not see.
        self.n_seq: int = n_seq + 1
        self.n_batch = n_batch
        self.cells: Cells = Cells(cache.n_ctx, self.n_seq)
        self.graphs: OrderedDict[Shape, BatchGraph] = OrderedDict()
        # `backends` are in the order in which layers are spread over them; a scheduler needs the host last.
        ordered = sorted(backends, key=lambda backend: backend.is_host)
        # Bytes that the fit leaves for arenas: a weight's copy is streamed if keeping the copy would exceed them.
        budgets = {} if fit is None else dict(zip(backends, fit.budgets(), strict=True))
        if held is not None:
            budgets.update(held.budgets)
            ordered = ordered if held.store is None else [held.store, *ordered]
        self._n_kept = KEPT_GRAPHS if held is None else KEPT_UNDER_LIMIT
        self.scheduler: Scheduler = Scheduler(ordered, policy=policy, plan_cache=self._n_kept, budgets=budgets,
                                              host_work=None if held is None else held.host_work, arenas=arenas)
        self.fit: Fit | None = fit
        self.held: Held | None = held
        self._by_name = {backend.name: backend for backend in backends}
        self.recorder: Recorder | None = None
        # Whether weights are to move to huge pages before an evaluation.
        self.moves: bool = huge_pages and any(buffer.file_backed for buffers in weights.buffers.values()
                                              for buffer in buffers)
        self._has_begun: bool = False           # whether an evaluation has begun
        self._pages: HugePages | None = None    # what moves the weights, from the second evaluation on
        self.dirty: list[np.ndarray] = []       # cache rows that failed evaluations may have written
        self._largest = LargestShapes(n_seq, n_batch, cache.padded(cache.n_ctx)).of
        self._reserved: set[Shape] = set()      # shapes with reserved memory: each the largest of its kind
        self._shifts: list[ShiftGraph] | None = None     # None: not built yet; empty: positions cannot move
        self._kept: set[int] = set()            # sequences whose recurrent state has a backup copy
        self._each: BatchGraph | None = None    # the graph that `compute_each` has computed last
        # Whether a backend can use that the graphs of the next computes are announced.
        self._expects = any(overrides(backend, "expect_graph") for backend in backends)
        # Whether `compute_each` waits: not if all backends are asynchronous, because reading its logits waits.
        self._waits = not all(backend.asynchronous for backend in backends)

    def graph(self, shape: Shape) -> BatchGraph:
        """The graph of a shape; the last ones are kept, so that most calls build none."""
        graph = self.graphs.get(shape)
        if graph is None:
            last = self._each           # which is not in `graphs` any more once others were used often
            graph = self.graphs[shape] = last if last is not None and last.shape == shape else self._build(shape)
            while len(self.graphs) > self._n_kept:
                self.graphs.popitem(last=False)
        else:
            self.graphs.move_to_end(shape)
        return graph

    def _build(self, shape: Shape) -> BatchGraph:
        graph = build_graph(self.arch, self.hparams, self.weights, self.cache, shape, self.cache.flash)
        if self.fit is not None:
            for node, device in self.fit.nodes(graph.graph).items():
                self.scheduler.set_tensor_backend(node, self._by_name[device.name])
        if len(self._by_name) > 1 and self.weights.homes:
            from ggml_sched.llama.limited import assigned

            for node, backend in assigned(graph.graph, self.weights.homes):
                self.scheduler.set_tensor_backend(node, backend)
        return graph

    def interleave(self, done: Callable[[str], object]) -> None:
        """Interleave the rows of weights that matrix products read, where a backend can; `done(name)` is called after
        each.  To be called before a graph is planned.

        Raises UnsupportedOp if no backend interleaves any of them, and OutOfMemory.
        """
        token = self.graph(Shape(1, self.cache.padded(1), 1)).graph
        multiplied = {node.src[0] for node in token.nodes if node.op in ("MUL_MAT", "MUL_MAT_ID")}
        by_backend: dict[Backend, list[Tensor]] = {}
        for tensor in self.weights.tensors.values():
            if tensor in multiplied:
                by_backend.setdefault(tensor.backend, []).append(tensor)
        total = 0
        for backend, tensors in by_backend.items():
            interleave = getattr(backend, "interleave", None)
            if interleave is not None:
                total += interleave(tensors, lambda tensor: done(tensor.name))
        if not total:
            raise UnsupportedOp("interleave=True: no backend interleaves the rows of any of this model's weights")

    def reserve(self) -> None:
        """Plan the graph of one token and the fewest cache rows, and reserve memory for one that reads all rows.

        The plan raises UnsupportedOp for a node that no backend computes, while the model is loaded.  Afterwards tokens
        need neither planning nor larger buffers, however many rows they read.  Under a limit of memory all shapes whose
        graphs fit the limit are reserved, so that buffers never grow.
        """
        shortest, longest = (Shape(1, self.cache.padded(n), 1) for n in (1, self.cache.n_ctx))
        self.scheduler.plan(self.graph(shortest).graph)
        if self.held is not None:
            self._reserved.update(self._largest(shape) for shape in self.held.shapes)
            self._shifts = self._build_shifts() if self.held.shifts else None
            graphs = [self._build(shape).graph for shape in self.held.shapes]
            self.scheduler.reserve(*graphs, *(shift.graph for shift in self._shifts or ()))
        elif longest != shortest:
            self._reserve(longest)

    # -- an evaluation: begin, compute any number of batches, and undo unless all went well ---------------------

    def begin(self, sequences: Iterable[int]) -> None:
        """Zero rows of failed evaluations, and back up the recurrent states of these sequences for `undo`."""
        if self.dirty:
            self.cache.clear_rows(np.unique(np.concatenate(self.dirty)))
            self.dirty.clear()
        if self.is_recurrent:
            self._kept.clear()
            # Wait for earlier computes now; the copies of states, and the next compute, then need no waits in between.
            self.scheduler.synchronize()
            for seq in set(sequences):
                self.cache.copy_state(seq, self.n_seq + seq)
                self._kept.add(seq)

    def move_weights(self) -> None:
        """Move a part of the mapped weights to huge pages, but none before the first evaluation, whose token would come
        later.  Weights of which a graph reads single rows, such as the embedding of a token, stay."""
        if not self._has_begun:
            self._has_begun = True
            return
        if self._pages is None:
            token = self.graph(Shape(1, self.cache.padded(1), 1)).graph
            names = {source.root.name for node in token.nodes
                     for source in (node.src[1:] if node.op == "GET_ROWS" else node.src) if source is not None}
            self._pages = HugePages(self.weights.mapped_ranges(names & self.weights.tensors.keys()))
        self.moves = self._pages.step()

    def pieces(self, sequences: np.ndarray, n_batch: int) -> Iterator[tuple[int, int]]:
        """Parts [start, stop) of a batch of tokens of these sequences, each evaluated by one compute.

        A part has n_batch tokens at most; for a recurrent model they are of one sequence, as its graph has one state.
        """
        ends = [len(sequences)]
        if self.is_recurrent:
            ends = [*(np.flatnonzero(np.diff(sequences)) + 1).tolist(), *ends]
        start = 0
        for end in ends:
            for first in range(start, end, n_batch):
                yield first, min(first + n_batch, end)
            start = end

    def compute(self, batch: Batch, out: np.ndarray, embeddings: bool = False) -> None:
        """Place the batch in the cache, compute it, and write its outputs, f32 [m, n_vocab or n_embd], to `out`."""
        rows = self.cells.place(batch.positions, batch.sequences)
        n_kv = self.cache.padded(self.cells.rows_in_use())
        graph = self.graph(Shape(len(rows), n_kv, len(batch.outputs), embeddings))
        with self.scheduler.lease():
            try:
                self._allocate(graph)
                graph.set_inputs(batch, rows, partial(self.cells.mask, batch.positions, batch.sequences, n_kv),
                                 int(batch.sequences[0]))
                self._run(graph, True)
            except OutOfMemory as error:
                self._note_outputs(error, graph.shape)
                raise
            if graph.output is not None and len(out):
                graph.output.backend.get_tensor(graph.output, out)

    def compute_each(self, tokens: list[int], positions: list[int], sequences: list[int], out: np.ndarray) -> None:
        """`compute` for one token of each of n sequences; their logits, f32 [n, n_vocab], are written to `out`.

        It makes few calls and arrays, because each costs microseconds here: the kernels of the tokens before have
        evicted the interpreter's data from the CPU's caches.
        """
        rows, n = self.cells.place_each(positions, sequences), len(tokens)
        n_kv = self.cache.padded(self.cells.rows_in_use())
        graph = self._each
        if graph is None or graph.shape.n_kv != n_kv or graph.shape.n_tokens != n:
            graph = self._each = self.graph(Shape(n, n_kv, n))
        failures = None if self._waits else [backend.failed[0] for backend in self.scheduler.backends]
        with self.scheduler.lease():
            try:
                self._compute_each(graph, tokens, positions, sequences, rows)
            except OutOfMemory as error:
                self._note_outputs(error, graph.shape)
                raise
            output = graph.output
            if output is not None and not output.fetch(out):
                output.backend.get_tensor(output, out)
            if failures is not None:    # the compute was not waited for
                if len(failures) > 1:
                    self.scheduler.synchronize()    # raises what backends other than the output's have kept
                for backend, before in zip(self.scheduler.backends, failures, strict=True):
                    check_failures(backend, before)

    def _compute_each(self, graph: BatchGraph, tokens: list[int], positions: list[int], sequences: list[int],
                      rows: list[int]) -> None:
        """Compute the graph of tokens that have these cache rows; called under a lease of the scheduler."""
        if not graph.set_each(self.cells, tokens, positions, sequences, rows):
            self._allocate(graph)
            if not graph.set_each(self.cells, tokens, positions, sequences, rows):
                # An input has memory that TokenInputs does not write: `set_inputs` writes it, or raises the error.
                ids, places, owners = (np.array(values, np.int32) for values in (tokens, positions, sequences))
                graph.set_inputs(Batch(ids, places, owners, np.arange(len(tokens), dtype=np.int32)), np.array(rows),
                                 partial(self.cells.mask, places, owners, graph.shape.n_kv), sequences[0])
        self._run(graph, self._waits)

    def _run(self, graph: BatchGraph, wait: bool) -> None:
        if self._expects:
            self._expect(graph.shape)
        recorder = self.recorder
        if recorder is None:
            self.scheduler.compute(graph.graph, wait=wait)
        else:
            self.scheduler.compute(graph.graph, recorder.note, recorder.ask)

    def _expect(self, shape: Shape) -> None:
        """Announce the graphs that will probably follow one of this shape, so that backends of other processes get what
        planning them takes with the messages of this compute.

        They are the graph of one token and, where all tokens are outputs, that of an equal batch with more rows of the
        cache (`KVCache.padded`), once half of the rows that the last step has added are in use.
        """
        n_used = self.cells.rows_in_use()
        following = [Shape(1, self.cache.padded(n_used + 1), 1)]
        if shape.n_outputs == shape.n_tokens:
            n_kv = self.cache.padded(n_used + max(self.cache.half_a_step, shape.n_tokens))
            following.append(Shape(shape.n_tokens, n_kv, shape.n_outputs, shape.embeddings))
        for other in following:
            if other not in self.graphs:
                self.scheduler.expect(self.graph(other).graph)

    def _allocate(self, graph: BatchGraph) -> None:
        """Allocate the graph's tensors, in arenas that fit the largest graph of its kind."""
        largest = self._largest(graph.shape)
        if largest not in self._reserved:
            self._reserve(largest)
        self.scheduler.alloc(graph.graph)

    def _note_outputs(self, error: OutOfMemory, shape: Shape) -> None:
        """Say how to evaluate a batch of more outputs than the graphs of the fit have, or those that were planned under
        the limit, as arenas, work memory and slots may not hold what they take."""
        if self.fit is not None:
            most = max(plan.graph.nodes[-1].ne[1] for plan in self.fit.plans)
            why, more = "the graphs of the placement have", ", and model_graphs(all_outputs=True) are graphs to place"
        elif self.held is not None:
            most = max(planned.n_outputs for planned in self.held.shapes)
            why, more = "the limit leaves room for", ", and a larger limit leaves room"
        else:
            return
        if shape.n_outputs > most:
            error.add_note(f"the batch has {shape.n_outputs} outputs, {why} {most} at most: eval(last_only=True) "
                           f"computes one output, load(n_batch=) bounds the tokens of a batch{more} for all outputs")

    def _reserve(self, shape: Shape) -> None:
        """Reserve memory and a plan for a shape.  OutOfMemory is ignored: smaller shapes may still fit."""
        self._reserved.add(shape)
        with suppress(OutOfMemory):
            self.scheduler.reserve(self._build(shape).graph)

    def undo(self, lengths: Mapping[int, int]) -> None:
        """Restore sequences as they were at `begin`: `lengths` maps each to its number of tokens.  Idempotent."""
        for seq, n in lengths.items():
            self.dirty.append(self.cells.rows_of(seq, n))
            self.cells.remove(seq, n)
        self.put_back()

    def put_back(self) -> None:
        """Restore the recurrent states that `begin` has backed up."""
        for seq in self._kept:
            self.cache.copy_state(self.n_seq + seq, seq)

    # -- states --------------------------------------------------------------------------------------------------

    @staticmethod
    def n_states(hparams: Hparams, n_seq: int) -> int:
        """The number of rows of state tensors: for n_seq sequences and the hidden one, and a backup for each.

        1 for a model without recurrent layers, which has no such tensors.
        """
        return 2 * (n_seq + 1) if hparams.recurrent else 1

    def clear_state(self, seq: int) -> None:
        """Set the recurrent state of a sequence to that of an empty one."""
        if self.is_recurrent:
            self.cache.clear_state(seq)

    def copy_state(self, src: int, dst: int) -> None:
        """Copy the recurrent state of sequence src to sequence dst."""
        if self.is_recurrent:
            self.cache.copy_state(src, dst)

    def sizes(self) -> tuple[int, int]:
        """Bytes of a row of the cache, all layers together, and of a recurrent state."""
        return (sum(width for _, width in self.cache.shapes_of_rows(1)),
                sum(width for width, in self.cache.shapes_of_states()))

    def read_each(self, seq: int, rows: np.ndarray) -> Iterator[bytes]:
        """The bytes of these rows of the cache, in their order, for each layer those of the keys and of the values, and
        then of the recurrent state of a sequence.  A part is read only when the iteration comes to it."""
        for part in self.cache.read_each(rows):
            yield part.tobytes()
        if self.is_recurrent:
            for part in self.cache.read_state(seq):
                yield part.tobytes()

    def rotation(self, rows: np.ndarray) -> Rotation:
        """What rotates the keys in these rows of the cache to other positions.  SequenceError for a model whose keys
        rope does not rotate; OutOfMemory."""
        from ggml_sched.llama.shift import Rotation

        if self._shifts is None:
            shifts = self._build_shifts()
            self.scheduler.reserve(*(shift.graph for shift in shifts))
            self._shifts = shifts
        if not self._shifts:
            raise SequenceError(f"positions of a {self.hparams.arch} model cannot move: no key turns with them")
        return Rotation(self.cache, rows, self._shifts, self._rotate)

    def _rotate(self, shift: ShiftGraph, deltas: np.ndarray) -> None:
        """Compute a graph of a context shift.  After an exception the keys of all rows with a difference other than 0
        may be lost."""
        with self.scheduler.lease():
            self.scheduler.alloc(shift.graph)
            shift.deltas.set(deltas)
            self.scheduler.compute(shift.graph)

    def _build_shifts(self) -> list[ShiftGraph]:
        from ggml_sched.llama.shift import build_shifts

        return build_shifts(self.hparams, self.weights, self.cache, self.held is not None)

    def clear(self) -> None:
        """Empty the cache."""
        self.cache.clear()
        self.cells.clear()
        self.dirty.clear()

    def close(self) -> None:
        """Free all memory, even if freeing a part of it raises."""
        self.graphs.clear()
        self._each = None
        self._shifts = None
        each([self.scheduler.close, self.cache.close, self.weights.close])
