"""The weights of a buffer that are rearranged (repack.py), and reads and writes of their bytes in ggml's order.

A `Part` is such a weight.  As soon as it has an address its bytes are rearranged, until a node needs ggml's order, to
which they are then converted for good (`straighten`).  Invariant: reads and writes of the buffer take and return bytes
in ggml's order; only kernels that are made for rearranged weights read the rearranged bytes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import MAX_BLOCKS, Launch, struct
from ggml_sched.backends.cupy.repack import FIELDS, packs, repack, together, unpack

__all__ = ["PackedRows", "Part", "packing"]

PIECE = 1 << 20
"""About how many bytes the host rearranges at a time."""

FIELD_SIZES = np.dtype([("size", "<i4", 4)])
"""`struct Fields` of repack.cu."""
BLOCK, BYTES = 256, 8192
"""Threads of a thread block of repack.cu, and the bytes that the block rearranges at once."""

Get = Callable[[int, int], np.ndarray]
"""`get(start, size)`: bytes of the buffer, as they are stored."""
Put = Callable[[int, np.ndarray], None]
"""`put(start, data)`: store bytes in the buffer as they are."""
Pack = Callable[[int, int], None]
"""`pack(start, size)`: rearrange stored bytes, whole bundles in ggml's order."""


class Part(NamedTuple):
    """A rearranged weight: bytes [start, stop) of the buffer; or its last bytes, if `straighten` was interrupted.

    `bundle`: bytes of a bundle, the consecutive blocks that are rearranged together.
    """

    start: int
    stop: int
    kind: Type
    ne: tuple[int, ...]

    @property
    def bundle(self) -> int:
        return together(self.kind) * self.kind.type_size


class PackedRows:
    """The rearranged weights of one buffer, by their offsets."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: dict[int, Part] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, tensor: Tensor) -> None:
        """Add a tensor if its type and rows can be rearranged.  It has no data yet: writes will rearrange the data."""
        if tensor.offset not in self._parts and tensor.is_contiguous and packs(tensor.type, tensor.ne[0]):
            start = tensor.offset
            self._parts[start] = Part(start, start + tensor.nbytes, tensor.type, tensor.ne)
            insort(self._starts, start)

    def find(self, root: Tensor) -> Part | None:
        """The part that is all of `root`, which is no view; None if there is none."""
        part = self._parts.get(root.offset) if self._parts else None
        return part if part is not None and (part.kind, part.ne) == (root.type, root.ne) else None

    def drop(self, start: int) -> None:
        """Remove the part at `start`, because its tensor is freed."""
        if self._parts.pop(start, None) is not None:
            self._starts.remove(start)

    def straightened(self, part: Part, stop: int) -> None:
        """Note that a part is in ggml's order up to `stop`; idempotent."""
        parts = {start: one for start, one in self._parts.items() if one.stop != part.stop}
        if stop < part.stop:
            parts[stop] = part._replace(start=stop)
        self._starts, self._parts = sorted(parts), parts

    def under(self, tensor: Tensor) -> list[Part]:
        """The parts that share bytes with a tensor."""
        if not self._parts or not tensor.nbytes:
            return []
        return [part for _, _, part in self.pieces(tensor.offset, tensor.nbytes) if part is not None]

    def pieces(self, start: int, size: int) -> Iterator[tuple[int, int, Part | None]]:
        """Cut a range of bytes where rearranged parts begin and end: (start, stop, the part or None) of each piece."""
        stop = start + size
        while start < stop:
            i = bisect_right(self._starts, start) - 1
            part = self._parts[self._starts[i]] if i >= 0 else None
            if part is not None and start < part.stop:
                end = min(stop, part.stop)
            else:
                part = None
                end = min(stop, self._starts[i + 1]) if i + 1 < len(self._starts) else stop
            yield start, end, part
            start = end


def _in_bundles(part: Part, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a range of bytes of a part into pieces: (start, size, start of the first bundle that the piece touches, end
    of the last).  A bundle of which the range has only some bytes is a piece of its own."""
    at, stop, bundle = start, start + size, part.bundle
    while at < stop:
        first = at - (at - part.start) % bundle
        whole = (stop - first) // bundle * bundle
        n = min(whole, max(PIECE // bundle, 1) * bundle) if at == first and whole else bundle - (at - first)
        n = min(n, stop - at)
        yield at, n, first, at + n + -(at + n - part.start) % bundle
        at += n


def write(part: Part, start: int, data: np.ndarray, get: Get, put: Put, pack: Pack) -> None:
    """Write bytes, given in ggml's order, to a part.  The device rearranges whole bundles.  Bundles of which only some
    bytes are written are fetched first, and rearranged on the host."""
    for at, n, first, last in _in_bundles(part, start, len(data)):
        if at == first and at + n == last:
            put(at, data[at - start :][:n])
            pack(at, n)
            continue
        rows = np.empty((last - first) // part.bundle * part.bundle, np.uint8)
        for edge in {first, last - part.bundle}:
            if edge < at or edge + part.bundle > at + n:
                rows[edge - first :][: part.bundle] = unpack(get(edge, part.bundle), part.kind)
        rows[at - first :][:n] = data[at - start :][:n]
        put(first, repack(rows.reshape(-1, part.bundle), part.kind).reshape(-1))


def read(part: Part, start: int, out: np.ndarray, get: Get) -> None:
    """Fill `out` with the bytes of a part from offset `start` on, in ggml's order."""
    for at, n, first, last in _in_bundles(part, start, len(out)):
        rows = unpack(get(first, last - first).reshape(-1, part.bundle), part.kind).reshape(-1)
        out[at - start :][:n] = rows[at - first :][:n]


def packing(address: int, size: int, kind: Type) -> Launch:
    """The launch that rearranges `size` bytes of weights of a type, whole bundles in ggml's order."""
    n = together(kind)
    bundles = size // (n * kind.type_size)
    blocks = -(-bundles // (BYTES // (n * kind.type_size)))
    sizes = (*FIELDS[kind], 0, 0, 0)[:4]
    return Launch("repack.pack", (min(blocks, MAX_BLOCKS), 1, 1), (BLOCK, 1, 1), (
        np.uint64(address), np.int64(bundles), np.int32(n), np.int32(kind.type_size),
        struct(FIELD_SIZES, size=sizes)), 0)


def straighten(part: Part, get: Get, put: Put, done: Callable[[int], None]) -> None:
    """Convert a part to ggml's order, in place; after each piece, `done(stop)` gets the end of the converted bytes.

    After an interrupt the rest, which `done` has not reported, is still rearranged.
    """
    step = max(PIECE // part.bundle, 1) * part.bundle
    for first in range(part.start, part.stop, step):
        stop = min(first + step, part.stop)
        rows = unpack(get(first, stop - first).reshape(-1, part.bundle), part.kind).reshape(-1)
        try:
            put(first, rows)
            done(stop)
        except BaseException:       # an interrupt: how much of this piece was written is unknown
            put(first, rows)
            done(stop)
            raise
