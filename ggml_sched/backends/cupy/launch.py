"""Launches, each a value that describes one start of a kernel; and `Builder`, to which ops append a split's launches.

Owns the interface between ops and devices.  A launch has a kernel ("module.function"), a grid, a block and arguments.
All arguments are final except some addresses, which are known later: of the split's work memory (`Scratch`), of the
error word (`ErrorWord`), and of the rest of `STATE` after it (`Counters`, `RowState`).  Invariant: every argument has
the exact C type of the kernel's parameter: NumPy scalars and structs, never Python numbers, which have no width.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ggml_sched._graph import BufferBase, Tensor
from ggml_sched._graph import label as label_of
from ggml_sched.backends.cupy.device import ALIGNMENT, block_of
from ggml_sched.backends.cupy.regions import Pointer, Region, Scratch, joined, unit_of
from ggml_sched.errors import BackendError, PlacementError
from ggml_sched.graph.hostdata import endless

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["FAULT", "MAX_GRID", "N_COUNTERS", "ROWS", "ROW_ELEMENTS", "STATE", "Argument", "Builder", "Counters",
           "ErrorWord", "Launch", "RowState", "scratch_size", "struct"]

FAULT = np.dtype([("position", "<i4"), ("source", "<i4"), ("value", "<i8"), ("limit", "<i8")])
"""`struct Fault` of common.cuh, the error word: all zeros while nothing is wrong."""

N_COUNTERS = 4096
"""The number of counters in `STATE`.  By a counter a block of threads finds out whether it is the last to end of the
blocks that compute the same rows or columns."""

ROW_ELEMENTS = 1 << 14
"""The longest row that a product rounds for the norm after it (ops/carried.py)."""
ROWS = 2
"""How many such rounded rows the device keeps: one is read while the next is written."""
ROUNDED_ROW = np.dtype([("q", "i1", ROW_ELEMENTS), ("runs", "<f4", (ROW_ELEMENTS // 16, 2)),
                        ("squares", "<f4", ROW_ELEMENTS // 32)])
"""A row rounded to 8 bits, as activations.cu stores it, and the sum of the squares of each 32 elements."""

AT_PART = {"q": 0, "runs": ROW_ELEMENTS, "squares": ROW_ELEMENTS + ROW_ELEMENTS // 2}
AT_ROWS = ALIGNMENT + 4 * N_COUNTERS
STATE = np.dtype({"names": ["fault", "counters", "rounded"],
                  "formats": [FAULT, ("<u4", N_COUNTERS), (ROUNDED_ROW, ROWS)], "offsets": [0, ALIGNMENT, AT_ROWS]})
"""Memory of the device that outlives launches: the error word; the counters, which are 0 before and after each launch;
and the rounded rows that one product leaves for the norm and the product after it."""

MAX_BLOCKS = 1 << 16
"""The most blocks of a grid over elements or rows; kernels loop over the rest."""

MAX_GRID = 65535
"""The most blocks of a grid in its second direction, and in its third: CUDA's limit."""

FLAT = 256
"""Threads of a block in launches over elements (`Builder.flat`), whose kernels have no barriers."""


class ErrorWord(NamedTuple):
    """An argument: the device address of the error word, a `FAULT`."""


class Counters(NamedTuple):
    """An argument: the device address of the counters of `STATE`."""


class RowState(NamedTuple):
    """An argument: the device address of a field, `part`, of rounded row number `slot` of `STATE`."""

    slot: int
    part: str

    @property
    def offset(self) -> int:
        """Bytes from the start of `STATE` to this field."""
        return AT_ROWS + self.slot * ROUNDED_ROW.itemsize + AT_PART[self.part]


Value: TypeAlias = np.generic | np.ndarray
"""An argument with its final bytes: a NumPy scalar, or a struct as an array of shape (1,)."""
Argument: TypeAlias = Value | Region | Scratch | ErrorWord | Counters | RowState


class Launch(NamedTuple):
    """One kernel with its arguments; `shared` is dynamic shared memory in bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Argument, ...]
    shared: int = 0

    def bound(self, work: int, error: int) -> tuple[Value, ...]:
        """The arguments with their final bytes.  `work`: the address of the work memory; `error`: that of the error
        word, with which `STATE` begins."""
        return tuple(np.uint64(error) if isinstance(arg, ErrorWord)
                     else np.uint64(error + ALIGNMENT) if isinstance(arg, Counters)
                     else np.uint64(error + arg.offset) if isinstance(arg, RowState)
                     else arg.bound(work) if isinstance(arg, (Region, Scratch)) else arg for arg in self.args)


def scratch_size(*sizes: int) -> int:
    """Bytes that allocations of scratch memory of these sizes take together."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def struct(dtype: np.dtype, **fields: npt.ArrayLike) -> np.ndarray:
    """An argument: a struct by value with these fields, the others 0."""
    value = np.zeros(1, dtype)
    for name, field in fields.items():
        value[name] = field
    return value


class Builder:
    """The launches of one split.

    `name`: the backend's, for errors; `owns(buffer)`: whether kernels may use a buffer; `needed`: nodes whose data is
    read outside of their fusion group (None: all); `exact`: no activation is rounded to 8 bits; `blas`: launches of
    "blas.gemm" are possible (see ops/library.py); `tensor`: `Device.has_tensor_cores`; `rounded`: nodes whose results
    products read rounded to 8 bits.  All nodes use the same scratch memory; `work_size`: the most bytes that one needs.
    """

    error: ErrorWord = ErrorWord()

    def __init__(self, name: str = "CUDA", *, owns: Callable[[BufferBase], bool] | None = None,
                 needed: Container[Tensor] | None = None, n_multiprocessors: int = 132, exact: bool = False,
                 blas: bool = False, tensor: bool = True, rounded: Container[Tensor] = ()) -> None:
        self.name = name
        self.owns = owns
        self.needed = needed
        self.n_multiprocessors = n_multiprocessors
        self.exact = exact
        self.blas = blas
        self.tensor = tensor
        self.rounded = rounded
        self.launches: list[Launch] = []
        self.work_size: int = 0
        self.position: np.int32 = np.int32(0)
        self._node: Tensor | None = None
        self._regions: dict[Tensor, Region] = {}
        self._tolerated = 0
        self._used = 0
        self._kept: tuple[object, Region, int, tuple[Scratch, ...], int] | None = None

    # -- nodes ------------------------------------------------------------------

    def begin(self, position: int, node: Tensor, inplace: int = 0) -> None:
        """Begin `node`, number `position` for the error word: later launches belong to it, and its scratch memory is
        empty.  `inplace`: the sources that the result may overwrite (`Op.inplace`)."""
        self.position = np.int32(position)
        self._node = node
        self._tolerated = inplace
        self.reset()
        self.written(node)

    def describe(self, node: Tensor) -> str:
        return f"backend {self.name!r}: node {label_of(node)} ({node.op})"

    def is_needed(self, node: Tensor) -> bool:
        """Whether a node outside of its fusion group reads the data of `node`: then a fused kernel must write it."""
        return self.needed is None or node in self.needed

    # -- memory -----------------------------------------------------------------

    def region(self, t: Tensor) -> Region:
        """The region of a tensor, computed once; PlacementError or BackendError that names the tensor if kernels cannot
        use its memory."""
        found = self._regions.get(t)
        if found is None:
            found = self._regions[t] = self._region(t)
        return found

    def _region(self, t: Tensor) -> Region:
        buffer = t.buffer
        label = self.describe(self._node if self._node is not None else t)
        if buffer is None:
            raise PlacementError(f"{label}: {label_of(t)} has no address")
        if self.owns is not None and not self.owns(buffer):
            raise PlacementError(f"{label}: {label_of(t)}: it is on backend {buffer.backend.name!r}")
        if not 0 <= t.offset <= buffer.size - t.nbytes:
            raise PlacementError(f"{label}: {label_of(t)} of {t.nbytes} bytes at {t.offset} lies outside its "
                                 f"buffer of {buffer.size}")
        wrong = endless(t)
        if wrong is not None:
            raise BackendError(f"{label}: {wrong}")
        address = buffer.base + t.offset
        if t.n_elements and address % unit_of(t):
            raise BackendError(f"{label}: {label_of(t)} of type {t.type} lies at {address}, no multiple of "
                               f"{unit_of(t)} bytes")
        return Region(address, t.ne, t.nb)

    def source(self, node: Tensor, i: int) -> Region:
        """The region from which to read source i of the node: a copy, made here, if the source overlaps the result in
        a way that the op does not tolerate."""
        t = node.src[i]
        region = self.region(t)
        if not self._clashes(node, i, region.address):
            return region
        size, block = t.type.type_size, t.type.block_size
        nb, total = [], size
        for n in (t.ne[0] // block, *t.ne[1:]):
            nb.append(total)
            total *= n
        copy = Region(self.scratch(total).offset, t.ne, tuple(nb), scratch=True)
        self.move(region, copy, (t.ne[0] // block, *t.ne[1:]), size)
        return copy

    def pointer(self, t: Tensor) -> Pointer:
        """The device address of a tensor."""
        return self.region(t).pointer()

    def _clashes(self, node: Tensor, i: int, address: int) -> bool:
        """Whether writing the result may change source i before it has been read completely."""
        t, start = node.src[i], self.region(node).address
        if address >= start + node.nbytes or start >= address + t.nbytes:
            return False
        same = address == start and (t.type, t.ne, t.nb) == (node.type, node.ne, node.nb)
        return not (same and self._tolerated >> i & 1)

    def scratch(self, nbytes: int) -> Scratch:
        """Work memory at a multiple of 256 bytes, exclusive to this node until the next one begins."""
        start = self._used
        if self._kept is not None and start < self._kept[4]:
            self._kept = None
        self._used = start + scratch_size(nbytes)
        self.work_size = max(self.work_size, self._used)
        return Scratch(start)

    def reset(self) -> None:
        """Let the next node use the scratch memory from its start."""
        self._used = 0

    def keep(self, what: object, region: Region, nbytes: int, value: tuple[Scratch, ...]) -> None:
        """Let later nodes reuse data in scratch memory that this node computed from the `nbytes` bytes at `region`:
        `kept(what, region)` returns `value`, until a node allocates over the data, or writes to those bytes."""
        self._kept = (what, region, nbytes, value, self._used)

    def kept(self, what: object, region: Region) -> tuple[Scratch, ...] | None:
        """The value that an earlier node gave to `keep`; None if there is none.  This node's scratch memory begins
        after the data."""
        if self._kept is None or self._kept[:2] != (what, region):
            return None
        _, _, _, value, end = self._kept
        self._used = max(self._used, end)
        return value

    def written(self, node: Tensor) -> None:
        """Drop what `keep` has kept, if it was computed from memory that `node` writes."""
        if self._kept is None or node.buffer is None:
            return
        _, region, nbytes, *_ = self._kept
        start = self.region(node).address
        if region.scratch or (start < region.address + nbytes and region.address < start + node.nbytes):
            self._kept = None

    # -- launches ---------------------------------------------------------------

    def launch(self, kernel: str, grid: Sequence[int], block: Sequence[int], *args: Argument, shared: int = 0) -> None:
        """Append a launch; TypeError for an argument without a width."""
        for arg in args:
            is_struct = isinstance(arg, np.ndarray) and arg.shape == (1,)
            if not is_struct and not isinstance(
                    arg, (np.generic, Region, Scratch, ErrorWord, Counters, RowState)):
                raise TypeError(f"{kernel}: {arg!r} is no kernel argument: numpy scalars and structs have a width")
        self.launches.append(Launch(kernel, block_of(grid, kernel), block_of(block, kernel), args, shared))

    def flat(self, kernel: str, n: int, *args: Argument) -> None:
        """Append a launch over `n` elements, by n threads, or by fewer that loop; n == 0: none."""
        if n:
            block = min(FLAT, -(-n // 32) * 32)
            self.launch(kernel, (min(-(-n // block), MAX_BLOCKS),), (block,), *args)

    def each(self, kernel: str, node: Tensor, *args: Argument) -> None:
        """Append a launch over the node's elements, with the regions of its sources and its own, the number of
        elements, and `args`."""
        n = node.n_elements
        self.flat(kernel, n, *(self.source(node, i) for i in range(len(node.src))), self.region(node), np.int64(n),
                  *args)

    def rows(self, kernel: str, n: int, width: int, *args: Argument, shared: int = 0, each: int = 4,
             most: int = 1024) -> None:
        """Append a launch with a block for each of `n` rows of `width` elements.  A thread takes about `each` elements;
        a block has `most` threads at most."""
        if n:
            threads = min(most, max(32, -(-width // (32 * each)) * 32))
            self.launch(kernel, (min(n, MAX_BLOCKS),), (threads,), *args, shared=shared)

    def move(self, a: Region, d: Region, ne: Sequence[int], size: int, repeat: bool = False) -> None:
        """Append a copy of elements of `size` bytes from a to d; both have extents `ne`; with `repeat`, a has its own
        and repeats to `ne`.

        Neighbouring elements are copied as one wider element where addresses and strides allow.
        """
        ne = tuple(ne)
        source = a.ne if repeat else ne
        if 0 in ne:
            return
        if source == ne:
            ne, (a, d) = joined(ne, (a, d), size)
            source = ne
        word = size
        if a.nb[0] == d.nb[0] == size and source[0] == ne[0]:
            row = ne[0] * size
            outer = [nb for n, x, y in zip(ne[1:], a.nb[1:], d.nb[1:], strict=True) if n > 1 for nb in (x, y)]
            word = next(w for w in (16, 8, 4, 2, 1) if not any(v % w for v in (row, a.address, d.address, *outer)))
            ne, source = ((row // word, *extents[1:]) for extents in (ne, source))
            a, d = (p._replace(nb=(word, *p.nb[1:])) for p in (a, d))
        self.flat("copies.move", prod(ne), a.shaped(source), d.shaped(ne), np.int64(prod(ne)), np.int32(word))
