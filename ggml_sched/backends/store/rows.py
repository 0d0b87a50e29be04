"""GET_ROWS of stored weights: reads only the rows that the ids name, and lets another backend convert them.

The rows are read to a compact weight, and a twin of the node gets all rows of the compact weight, in order.  A row's
result does not depend on other rows, so the results are bit-equal to what the other backend computes from the whole
weight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ggml_sched._graph import Context, Graph, Tensor, Type, bind_resident, label
from ggml_sched.backend import Buffer
from ggml_sched.backends.cpu.buffer import CpuBuffer, HostBackend, address_of
from ggml_sched.errors import BackendError, each
from ggml_sched.graph.hostdata import array_over

if TYPE_CHECKING:
    from ggml_sched.backends.store.store import Store

__all__ = ["RowsPlan", "fits", "read_together", "rows_size"]

GAP = 128 << 10
"""The most bytes between two rows that are read together: a disk reads about as many in the time that a second read
would cost in addition to its bytes."""


def fits(node: Tensor) -> bool:
    """Whether a node is a GET_ROWS of a matrix whose rows lie one after another, to a dense result."""
    if node.op != "GET_ROWS":
        return False
    weight, ids = node.src
    return (weight.ne[2] == weight.ne[3] == 1 and weight.nb[1] == _row_size(weight) and ids.type == Type.I32
            and node.is_contiguous)


def rows_size(nodes: Sequence[Tensor], margin: int) -> int:
    """The bytes of work memory that a store with this margin takes for the GET_ROWS among these nodes.  For each node
    these are three arrays of rows (as read, with those between them; without repetitions; in the order of the ids) and
    the numbers of the rows."""
    return sum(node.src[1].n_elements * (3 * _row_size(node.src[0]) + 4) + margin + 256
               for node in nodes if node.op == "GET_ROWS")


def read_together(rows: Sequence[int], size: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide ascending numbers of rows, each of `size` bytes, into parts that are read at once: yields the indices
    [first, stop) of each.  Between two rows of a part there are at most GAP bytes, and a part spans at most `most`
    rows."""
    first = 0
    for k in range(1, len(rows) + 1):
        if (k == len(rows) or (rows[k] - rows[k - 1] - 1) * size > GAP or rows[k] - rows[first] >= most):
            yield first, k
            first = k


def _row_size(weight: Tensor) -> int:
    return weight.ne[0] // weight.type.block_size * weight.type.type_size


class RowsPlan:
    """The GET_ROWS nodes of a split of `store`, which the backend `rows` computes; `run` is for the store's thread.

    BackendError for a node that computes and that `fits` does not accept.
    """

    def __init__(self, store: Store, rows: HostBackend, nodes: tuple[Tensor, ...]) -> None:
        self._store, self._rows = store, rows
        self._nodes = [node for node in nodes if node.computes]
        self._parts: list[_Rows] | None = None
        for node in self._nodes:
            if not fits(node):
                what = f"is a store, and does not compute {label(node)} ({node.op})"
                raise BackendError(f"backend {store.name!r} {what}")

    def run(self) -> None:
        """Read and convert the rows."""
        if self._parts is None:
            self._parts = [_Rows(self._store, self._rows, node) for node in self._nodes]
        for part in self._parts:
            part.run()

    def free(self) -> None:
        parts, self._parts = self._parts, None
        each([part.free for part in parts or ()])


class _Rows:
    """One GET_ROWS node, and its twin that reads the compact weight.

    The compact weights of all nodes of a store use the same memory in turn: `Store.rows_memory`.
    """

    def __init__(self, store: Store, rows: HostBackend, node: Tensor) -> None:
        self._store, self._backend, self._node = store, rows, node
        self._weight, self._ids = node.src
        n = self._ids.n_elements
        context = Context(f"rows of {self._weight.name}")
        self._compact = context.tensor(self._weight.type, (self._weight.ne[0], n), self._weight.name)
        self._order = context.tensor("i32", n)
        self._numbers = np.arange(n, dtype=np.int32).view(np.uint8)
        self._twin = context.get_rows(self._compact, self._order)
        self._graph = Graph(self._twin)
        self._behind = -(-self._compact.nbytes // 64) * 64
        """The offset of the numbers of the rows in `Store.rows_memory`, after the rows."""
        self._result: Buffer | None = None
        self._bound: Buffer | None = None
        self._plan: object = None

    def _bind(self, buffer: Buffer) -> None:
        """Use this memory for the compact weight from now on."""
        self.free()
        bind_resident(self._compact, buffer, 0)
        bind_resident(self._order, buffer, self._behind)
        self._result = self._backend.buffer_from_ptr(_memory(self._node))
        bind_resident(self._twin, self._result, self._node.offset)
        self._plan = self._backend.graph_plan_create(self._graph)
        self._bound = buffer

    def run(self) -> None:
        ids = np.ravel(array_over(self._ids, _memory(self._ids), self._ids.offset), order="C")
        n_rows = self._weight.ne[1]
        wrong = ids[(ids < 0) | (ids >= n_rows)]
        if len(wrong):
            raise BackendError(f"backend {self._store.name!r}: node {label(self._node)} (GET_ROWS): id {wrong[0]} does "
                               f"not name one of {n_rows} rows")
        if not len(ids):
            return
        different, inverse = np.unique(ids, return_inverse=True)
        size = _row_size(self._weight)
        found = self._read(different, size)
        buffer = self._store.rows_memory(self._behind + self._numbers.nbytes)
        if buffer is not self._bound:
            self._bind(buffer)
        memory = _memory(self._compact)
        memory[: len(ids) * size].reshape(len(ids), size)[:] = found[np.ravel(inverse)]
        memory[self._behind : self._behind + self._numbers.nbytes] = self._numbers
        if self._plan is None:
            self._backend.graph_compute(self._graph)
        else:
            self._backend.graph_plan_compute(self._plan)

    def _read(self, different: np.ndarray, size: int) -> np.ndarray:
        """Read the rows with these ascending numbers; returns their bytes, u8 [n, size]."""
        weight, store = self._weight, self._store
        found = np.empty((len(different), size), np.uint8)
        for first, stop in read_together(different.tolist(), size, self._ids.n_elements):
            numbers = different[first:stop] - different[first]
            began, n = time.perf_counter(), (int(numbers[-1]) + 1) * size
            start = weight.offset + int(different[first]) * size
            staging = np.empty(n + store.margin, np.uint8)
            at = store.shift_at(weight.buffer, start, address_of(staging))
            with store.naming(weight):
                store.read(weight.buffer, start, staging, at, n, (0, staging.nbytes))
            store.note_part(weight, n, began)
            found[first:stop] = staging[at : at + n].reshape(-1, size)[numbers]
        return found

    def free(self) -> None:
        plan, self._plan, self._bound = self._plan, None, None
        result, self._result = self._result, None
        if plan is not None:
            self._backend.graph_plan_free(plan)
        if result is not None:
            result.close()


def _memory(tensor: Tensor) -> np.ndarray:
    """The bytes of the buffer of a tensor in host memory."""
    buffer = tensor.buffer
    assert isinstance(buffer, CpuBuffer)
    return buffer.memory
