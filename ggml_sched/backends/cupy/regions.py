"""Regions: where the elements of an array lie (address, extents, strides), as kernels take them.

Invariant: a `Region` only describes bytes; the builder checks that kernels may use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ggml_sched._graph import Tensor

__all__ = ["VIEW", "Region", "Pointer", "Scratch", "is_aligned", "joined", "spread", "unit_of"]

VIEW = np.dtype([("p", "<u8"), ("ne", "<i8", 4), ("nb", "<i8", 4)])
"""`struct View` of common.cuh."""


class Scratch(NamedTuple):
    """An argument: the address `offset` bytes from the start of the work memory."""

    offset: int

    def bound(self, work: int) -> np.uint64:
        return np.uint64(work + self.offset)


Pointer: TypeAlias = np.uint64 | Scratch
"""An argument: an address of the device."""


class Region(NamedTuple):
    """Where elements lie: from `address` on, with extents `ne` and strides `nb` in bytes, innermost first.  A kernel
    gets it as a `View`.

    `scratch`: `address` is an offset in the work memory, whose address is known only when the launch is packed.
    """

    address: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    scratch: bool = False

    def bound(self, work: int) -> np.ndarray:
        """The region as `View`; `work`: the address of the work memory."""
        return np.array([(self.address + self.scratch * work, self.ne, self.nb)], VIEW)

    def pointer(self) -> Pointer:
        return Scratch(self.address) if self.scratch else np.uint64(self.address)

    def moved(self, offset: int) -> Region:
        """The region `offset` bytes further on, with the same extents and strides."""
        return self._replace(address=self.address + offset)

    def shaped(self, ne: Sequence[int], nb: Sequence[int] | None = None) -> Region:
        """A region at the same address with other extents, and strides if given."""
        return self._replace(ne=tuple(ne), nb=self.nb if nb is None else tuple(nb))


def unit_of(t: Tensor) -> int:
    """How many bytes general kernels load at once: a tensor's address and strides must be multiples of it."""
    if not t.type.is_quantized:
        return t.type.type_size
    return 2 - t.type.type_size % 2


def is_aligned(t: Tensor, unit: int) -> bool:
    """Whether the offset of a tensor in its root and its strides are multiples of `unit` bytes."""
    return not any(v % unit for v in (t.view_offs, *(nb for n, nb in zip(t.ne, t.nb, strict=True) if n > 1)))


def joined(ne: tuple[int, ...], regions: Sequence[Region], size: int) -> tuple[tuple[int, ...], list[Region]]:
    """Describe regions of equal extents `ne` by fewer extents: neighbouring axes without gaps in all regions are
    joined.

    `size`: bytes of an element, which become the stride of axis 0 if all extents are 1.
    """
    extents, strides = [1], [[size] * len(regions)]
    for axis, n in enumerate(ne):
        here = [region.nb[axis] for region in regions]
        if n == 1:
            continue
        if extents == [1]:
            extents, strides = [n], [here]
        elif all(nb == extents[-1] * last for nb, last in zip(here, strides[-1], strict=True)):
            extents[-1] *= n
        else:
            extents.append(n)
            strides.append(here)
    more = 4 - len(extents)
    extents += [1] * more
    strides += [[0] * len(regions)] * more
    return tuple(extents), [region.shaped(extents, nb)
                            for region, nb in zip(regions, zip(*strides, strict=True), strict=True)]


def spread(region: Region, ne: tuple[int, ...]) -> Region | None:
    """The region with extents `ne`: extents of 1 repeat, by strides of 0; None if a longer extent would have to
    repeat."""
    if any(have not in (1, want) for have, want in zip(region.ne, ne, strict=True)):
        return None
    return region.shaped(ne, [nb if have == want else 0
                                for have, want, nb in zip(region.ne, ne, region.nb, strict=True)])
