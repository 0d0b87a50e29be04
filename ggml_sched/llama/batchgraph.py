"""The graph of one shape of batch: its inputs, and how they get the values of a batch.

Owns the arrays that values are put together in, so that a token costs no allocation.  Invariant: the graph depends
on its `Shape` alone; everything that changes from token to token comes through its inputs.
Corresponds to llama.cpp's llm_graph_result and llm_graph_input_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ggml_sched._graph import Graph, Tensor, Type
from ggml_sched.llama._cells import Cells, TokenInputs
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.errors import ContextFull

__all__ = ["BatchGraph", "Inputs", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph depends on: tokens, rows of the cache that attention reads, rows of results.

    `embeddings`: the normed state of each output token instead of its logits.
    """

    n_tokens: int
    n_kv: int
    n_outputs: int
    embeddings: bool = False


@dataclass(slots=True)
class Inputs:
    """The tensors that a graph reads from outside; None where it has no need of one."""

    tokens: Tensor
    positions: Tensor | None = None
    k_rows: Tensor | None = None
    v_rows: dict[int, Tensor] = field(default_factory=dict)
    """Where V is transposed: the place of each element, by the width of V's rows; otherwise k_rows serve V."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """[n_kv, n_tokens] by window."""
    outputs: Tensor | None = None
    """i32 [n_outputs], None where all tokens are wanted, or none is."""
    state_row: Tensor | None = None
    """i32 [1]"""


class BatchGraph:
    """`graph`, its `shape`, and its `output`: [n_vocab, n_outputs], [n_embd, n_outputs], or None without outputs."""

    __slots__ = ("_masks", "_places", "_state", "_token", "graph", "inputs", "n_positions", "output", "shape")

    def __init__(self, graph: Graph, output: Tensor | None, shape: Shape, inputs: Inputs, n_ctx: int,
                 n_positions: int = 0) -> None:
        self.graph, self.output, self.shape, self.inputs = graph, output, shape, inputs
        self.n_positions = n_positions
        self._masks = [(window, t, t.type == Type.F16) for window, t in inputs.masks.items()]
        self._state = np.zeros(1, np.int32)
        # V is transposed: element j of the token in row r belongs at j * n_ctx + r.
        self._places = [(t, np.arange(width, dtype=np.int64) * n_ctx, np.empty((shape.n_tokens, width), np.int64))
                        for width, t in inputs.v_rows.items()]
        self._token = None if shape.n_tokens != 1 else TokenInputs(
            inputs.tokens, inputs.positions, inputs.k_rows, [(t, n_ctx) for t in inputs.v_rows.values()],
            [(t, window) for window, t in inputs.masks.items()], inputs.state_row)

    def set_inputs(self, batch: Batch, rows: np.ndarray, mask_of: Callable[[int, bool], bytes],
                   state_row: int = 0) -> None:
        """Give the inputs, which have addresses by now, the values for a batch of this shape.

        `rows` i64 [n_tokens]: the row of the cache that each token goes to; `mask_of(window, half)`: the mask by which
        tokens see no further back than a window (0: however far), as `Cells.mask` makes it; `state_row`: the state of
        the one sequence that a recurrent model's batch has.  ValueError for a batch of another shape, ContextFull for a
        position beyond those that the model has learned.
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

    def set_token(self, cells: Cells, token: int, position: int, sequence: int, row: int) -> bool:
        """`set_inputs` for one token of a sequence, with no array for each value; False where an input has no address,
        or is not one that waits on the host."""
        if self.n_positions:
            self._check_learned(position)
        return self._token is not None and self._token.set(cells, token, position, sequence, row)

    def _check_learned(self, position: int) -> None:
        if position >= self.n_positions and self.inputs.positions is not None:
            raise ContextFull(f"position {position} is beyond the {self.n_positions} that this model has learned",
                              position, self.shape.n_tokens, self.n_positions)
