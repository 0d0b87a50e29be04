"""The weights of a buffer that are rearranged (repack.py), and reads and writes of their bytes in ggml's order.

A `PackedWeight` is such a weight.  As soon as it has an address its bytes are rearranged, until a node needs ggml's
order, to which they are then converted for good (`straighten`).  Invariant: reads and writes of the buffer take and
return bytes in ggml's order; only kernels that are made for rearranged weights read the rearranged bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import MAX_BLOCKS, Launch, struct
from ggml_sched.backends.cupy.repack import FIELDS, packs, repack, together, unpack

__all__ = ["PackedRows", "PackedWeight", "packing"]

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
"""`pack(start, size)`: rearrange stored bytes, which are whole bundles, and in ggml's order until then."""


class PackedWeight(NamedTuple):
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


Piece = tuple[int, int, PackedWeight | None]
"""Bytes (start, stop) of a buffer, and the rearranged weight that they lie in, if any."""


class PackedRows:
    """The rearranged weights of one buffer, by their offsets."""

    def __init__(self) -> None:
        self._now: tuple[list[int], dict[int, PackedWeight]] = [], {}
        """The offsets in order, and {offset: weight}.  Every change replaces both: other threads read them."""

    def __len__(self) -> int:
        return len(self._now[1])

    def _set(self, weights: dict[int, PackedWeight]) -> None:
        self._now = sorted(weights), weights

    def add(self, tensor: Tensor) -> None:
        """Add a tensor if its type and rows can be rearranged.  It has no data yet: writes will rearrange the data.
        Weights that were there are removed, as an allocator that is reset says nothing of its tensors."""
        if self.find(tensor) is not None:
            return
        for weight in self.under(tensor):
            self.drop(weight.start)
        if tensor.is_contiguous and packs(tensor.type, tensor.ne[0]):
            start = tensor.offset
            self._set({**self._now[1], start: PackedWeight(start, start + tensor.nbytes, tensor.type, tensor.ne)})

    def find(self, root: Tensor) -> PackedWeight | None:
        """The rearranged weight that is `root`, which is no view; None if it is not rearranged."""
        weight = self._now[1].get(root.offset)
        return weight if weight is not None and (weight.kind, weight.ne) == (root.type, root.ne) else None

    def drop(self, start: int) -> None:
        """Remove the weight at `start`, because its tensor is freed."""
        self._set({other: weight for other, weight in self._now[1].items() if other != start})

    def straightened(self, weight: PackedWeight, stop: int) -> None:
        """Note that a weight is in ggml's order again up to byte `stop`; idempotent."""
        left = {start: one for start, one in self._now[1].items() if one.stop != weight.stop}
        if stop < weight.stop:
            left[stop] = weight._replace(start=stop)
        self._set(left)

    def under(self, tensor: Tensor) -> list[PackedWeight]:
        """The rearranged weights that share bytes with a tensor."""
        if not len(self) or not tensor.nbytes:
            return []
        return [weight for _, _, weight in self.pieces(tensor.offset, tensor.nbytes) if weight is not None]

    def pieces(self, start: int, size: int) -> Iterator[Piece]:
        """Cut a range of bytes where rearranged weights begin and end, as they are now."""
        starts, weights = self._now
        stop = start + size
        while start < stop:
            i = bisect_right(starts, start) - 1
            weight = weights[starts[i]] if i >= 0 else None
            if weight is not None and start < weight.stop:
                end = min(stop, weight.stop)
            else:
                weight = None
                end = min(stop, starts[i + 1]) if i + 1 < len(starts) else stop
            yield start, end, weight
            start = end


def _in_bundles(weight: PackedWeight, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a range of bytes of a weight into pieces: (start, size, start of the first bundle that the piece touches, end
    of the last).  A bundle of which the range has only some bytes is a piece of its own."""
    at, stop, bundle = start, start + size, weight.bundle
    while at < stop:
        first = at - (at - weight.start) % bundle
        whole = (stop - first) // bundle * bundle
        n = min(whole, max(PIECE // bundle, 1) * bundle) if at == first and whole else bundle - (at - first)
        n = min(n, stop - at)
        yield at, n, first, at + n + -(at + n - weight.start) % bundle
        at += n


def write(weight: PackedWeight, start: int, data: np.ndarray, get: Get, put: Put, pack: Pack) -> None:
    """Write bytes, given in ggml's order, to a weight.  The device rearranges whole bundles.  Bundles of which only
    some bytes are written are fetched first, and rearranged on the host."""
    for at, n, first, last in _in_bundles(weight, start, len(data)):
        if at == first and at + n == last:
            put(at, data[at - start :][:n])
            pack(at, n)
            continue
        rows = np.empty((last - first) // weight.bundle * weight.bundle, np.uint8)
        for edge in {first, last - weight.bundle}:
            if edge < at or edge + weight.bundle > at + n:
                rows[edge - first :][: weight.bundle] = unpack(get(edge, weight.bundle), weight.kind)
        rows[at - first :][:n] = data[at - start :][:n]
        put(first, repack(rows.reshape(-1, weight.bundle), weight.kind).reshape(-1))


def read(weight: PackedWeight, start: int, out: np.ndarray, get: Get) -> None:
    """Fill `out` with the bytes of a weight from offset `start` on, in ggml's order."""
    for at, n, first, last in _in_bundles(weight, start, len(out)):
        rows = unpack(get(first, last - first).reshape(-1, weight.bundle), weight.kind).reshape(-1)
        out[at - start :][:n] = rows[at - first :][:n]


def packing(address: int, size: int, kind: Type) -> Launch:
    """The launch that rearranges `size` bytes of weights of a type, which are whole bundles, and in ggml's order until
    then."""
    n = together(kind)
    bundles = size // (n * kind.type_size)
    blocks = -(-bundles // (BYTES // (n * kind.type_size)))
    sizes = (*FIELDS[kind], 0, 0, 0)[:4]
    return Launch("repack.pack", (min(blocks, MAX_BLOCKS), 1, 1), (BLOCK, 1, 1), (
        np.uint64(address), np.int64(bundles), np.int32(n), np.int32(kind.type_size),
        struct(FIELD_SIZES, size=sizes)), 0)


def straighten(weight: PackedWeight, get: Get, put: Put, done: Callable[[int], None]) -> None:
    """Convert a weight to ggml's order, in place; after each piece, `done(stop)` gets the end of the converted bytes.

    After an interrupt the rest, which `done` has not reported, is still rearranged.
    """
    step = max(PIECE // weight.bundle, 1) * weight.bundle
    for first in range(weight.start, weight.stop, step):
        stop = min(first + step, weight.stop)
        rows = unpack(get(first, stop - first).reshape(-1, weight.bundle), weight.kind).reshape(-1)
        try:
            put(first, rows)
            done(stop)
        except BaseException:       # an interrupt: how much of this piece was written is unknown
            put(first, rows)
            done(stop)
            raise
