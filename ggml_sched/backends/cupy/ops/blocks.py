"""Launches of dequantize.cu and activations.cu that make dense rows of f32 or f16; and checks of alignment."""

from __future__ import annotations

from math import prod

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.regions import Region, Scratch, is_aligned
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["is_multiple", "loads_whole", "to_dense"]


def to_dense(b: Builder, t: Tensor, part: Region, out: Scratch, to: Type) -> None:
    """Append the launch that writes rows of a tensor to `out`, without gaps, as type `to` (f32 or f16).  `part`: the
    region of these rows."""
    n, units = prod(part.ne), prod(part.ne) // 32
    if t.type.is_quantized:
        b.flat(f"dequantize.{t.type.name.lower()}", units, part, out, np.int64(units), np.int32(to),
               np.int32(is_packed(t)))
    else:
        b.flat(f"activations.to_{to.name.lower()}", n, part, out, np.int64(n), np.int32(t.type))


def loads_whole(t: Tensor) -> bool:
    """Whether the words that kernels load from a tensor's blocks lie at multiples of the words' size."""
    size = t.type.type_size
    return not t.type.is_quantized or is_aligned(t, min(size & -size, 16))


def is_multiple(region: Region, unit: int) -> bool:
    """Whether all rows of a region start at multiples of `unit` bytes."""
    outer = zip(region.ne[1:], region.nb[1:], strict=True)
    return region.address % unit == 0 and not any(nb % unit for n, nb in outer if n > 1)
