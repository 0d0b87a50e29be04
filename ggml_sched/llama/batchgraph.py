"""The graph of one shape of batch, and the code that sets its inputs for a batch.

Owns the arrays in which input values are computed, so that a token costs no allocation.  Invariant: the graph depends
on its `Shape` alone; every value that changes from token to token is an input.
Corresponds to llama.cpp's llm_graph_result and llm_graph_input_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ggml_sched._graph import Graph, Tensor, Type
from ggml_sched.llama._cells import Cells, TokenInputs
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.errors import ContextFull

__all__ = ["BatchGraph", "Inputs", "LargestShapes", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What determines a model's graph: the numbers of tokens, KV cache rows that attention reads, and output tokens.

    `embeddings`: whether the output is the normed hidden state of each output token, instead of its logits.
    """

    n_tokens: int
    n_kv: int
    n_outputs: int
    embeddings: bool = False


class LargestShapes:
    """The largest shape of each kind of batch, for `n_seq` sequences of the caller's, batches of `n_batch` tokens and
    `n_kv` cache rows.  Memory is reserved for these shapes, and graphs of a kind get the plan of its largest by replay.

    The kinds are: one token; a token for each sequence at most, with all outputs, as a server decodes; batches with no
    output, with at most one output for each sequence, with more outputs, and with all tokens as outputs.  The kinds are
    reserved separately, because the logits of many outputs need much memory, and few callers want those.  The sequence
    in which embeddings are evaluated counts as one more.
    """

    __slots__ = ("_n_seq", "all", "each", "few", "most", "none", "token")

    def __init__(self, n_seq: int, n_batch: int, n_kv: int) -> None:
        self._n_seq = n_seq
        each = min(n_seq + 1, n_batch)
        self.token: Shape = Shape(1, n_kv, 1)
        self.each: Shape = Shape(each, n_kv, each)
        self.none: Shape = Shape(n_batch, n_kv, 0)
        self.few: Shape = Shape(n_batch, n_kv, max(min(n_seq + 1, n_batch - 1), 1))
        self.most: Shape = Shape(n_batch, n_kv, max(n_batch - 1, 1))
        self.all: Shape = Shape(n_batch, n_kv, n_batch)

    def of(self, shape: Shape) -> Shape:
        """The largest shape of the kind of `shape`."""
        n = shape.n_outputs
        if n == shape.n_tokens:
            found = self.token if n == 1 else self.each if n <= self._n_seq + 1 else self.all
        else:
            found = self.none if not n else self.few if n <= self.few.n_outputs else self.most
        return replace(found, embeddings=True) if shape.embeddings else found

    def usual(self, recurrent: bool) -> list[Shape]:
        """The shapes that every use of a model needs: of one token, of a token for each sequence if there are several
        (a recurrent model evaluates one sequence at a time), and of a prompt."""
        each = () if recurrent or self._n_seq == 1 else (self.each,)
        return list(dict.fromkeys((self.token, *each, self.few)))


@dataclass(slots=True)
class Inputs:
    """The input tensors of a graph; None for an input that the graph does not have."""

    tokens: Tensor
    positions: Tensor | None = None
    k_rows: Tensor | None = None
    v_rows: dict[int, Tensor] = field(default_factory=dict)
    """{width of a row of V: i64 [width * n_tokens]}: the index of each value in the transposed V cache.  Empty where V
    is not transposed, because `k_rows` then has the rows of V, too."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """{attention window in tokens: mask [n_kv, n_tokens]}; window 0 means that attention has none."""
    outputs: Tensor | None = None
    """i32 [n_outputs]; None where every token is an output, or none is."""
    state_row: Tensor | None = None
    """i32 [1]: the row of the recurrent state that the batch's sequence has"""


class BatchGraph:
    """The graph for batches of one shape; `output`: logits [n_vocab, n_outputs] or embeddings [n_embd, n_outputs], None
    without outputs.  `n_positions`: how many positions the model has learned vectors for; 0: it has none."""

    __slots__ = ("_each", "_masks", "_places", "_state", "graph", "inputs", "n_positions", "output", "shape")

    def __init__(self, graph: Graph, output: Tensor | None, shape: Shape, inputs: Inputs, n_ctx: int,
                 n_positions: int = 0) -> None:
        self.graph: Graph = graph
        self.output: Tensor | None = output
        self.shape: Shape = shape
        self.inputs: Inputs = inputs
        self.n_positions: int = n_positions
        self._masks = [(window, t, t.type == Type.F16) for window, t in inputs.masks.items()]
        self._state = np.zeros(1, np.int32)
        # A transposed V cache is a matrix with `width` rows and n_ctx columns, one for each row of the K cache: value j
        # of the token in row r of the K cache has index j * n_ctx + r.
        self._places = [(t, np.arange(width, dtype=np.int64) * n_ctx, np.empty((shape.n_tokens, width), np.int64))
                        for width, t in inputs.v_rows.items()]
        # Where all tokens are outputs, as those are of several generations: each token is one of its own sequence.
        self._each = None if shape.n_outputs != shape.n_tokens else TokenInputs(
            inputs.tokens, inputs.positions, inputs.k_rows, [(t, n_ctx) for t in inputs.v_rows.values()],
            [(t, window) for window, t in inputs.masks.items()], inputs.state_row)

    def set_inputs(self, batch: Batch, rows: np.ndarray, mask_of: Callable[[int, bool], bytes],
                   state_row: int = 0) -> None:
        """Set the inputs, which must have addresses, for a batch of this shape.

        `rows` i64 [n_tokens]: the cache row of each token; `mask_of(window, half)`: the mask for a window (0: none), as
        `Cells.mask` returns it; `state_row`: the row of the recurrent state of the batch's only sequence.
        ValueError for a batch of another shape, ContextFull for a position for which the model has no learned vector.
        """
        shape, inputs = self.shape, self.inputs
        if len(batch.tokens) != shape.n_tokens or len(batch.outputs) != shape.n_outputs:
            raise ValueError(f"{len(batch.tokens)} tokens with {len(batch.outputs)} outputs for a graph of {shape}")
        inputs.tokens.set(batch.tokens)
        if inputs.positions is not None:
            if self.n_positions:
                self._check_learned(int(batch.positions.max(initial=0)))
            inputs.positions.set(batch.positions)
        if inputs.k_rows is not None:
            inputs.k_rows.set(rows)
            for t, columns, places in self._places:
                np.add(rows[:, None], columns, out=places)
                t.set(places.reshape(-1))
        for window, t, half in self._masks:
            mask = mask_of(window, half)
            if not t.stage(mask):
                t.set(np.frombuffer(mask, np.float16 if half else np.float32))
        if inputs.outputs is not None:
            inputs.outputs.set(batch.outputs)
        if inputs.state_row is not None:
            self._state[0] = state_row
            inputs.state_row.set(self._state)

    def set_each(self, cells: Cells, tokens: list[int], positions: list[int], sequences: list[int],
                 rows: list[int]) -> bool:
        """`set_inputs` for tokens that are all outputs, faster, because it makes no NumPy arrays.

        False if `TokenInputs` cannot set an input, because it has no address or has memory of its own.
        """
        if self.n_positions:
            self._check_learned(max(positions))
        return self._each is not None and self._each.set(cells, tokens, positions, sequences, rows)

    def _check_learned(self, position: int) -> None:
        if position >= self.n_positions and self.inputs.positions is not None:
            raise ContextFull(f"position {position} is beyond the {self.n_positions} that this model has learned",
                              position, self.shape.n_tokens, self.n_positions)
