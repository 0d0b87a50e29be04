"""Launches that turn rows of blocks into dense rows of a plain type (dequantize.cu), and what aligned loads need."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder, Location
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["decoded", "is_multiple", "loads_whole"]


def decoded(b: Builder, t: Tensor, location: Location, to: Type) -> Location:
    """A tensor of blocks as dense f32 or f16 in scratch memory."""
    size = to.type_size
    nb = (size, size * t.ne[0], size * t.ne[0] * t.ne[1], size * t.ne[0] * t.ne[1] * t.ne[2])
    out = Location(b.scratch(size * t.n_elements).offset, t.ne, nb, scratch=True)
    units = t.n_elements // 32
    b.flat(f"dequantize.{t.type.name.lower()}", units, location.arg(), out.pointer(), np.int64(units), np.int32(to),
           np.int32(is_packed(t)))
    return out


def loads_whole(t: Tensor) -> bool:
    """Whether the words that kernels load from blocks lie at multiples of their size."""
    size = t.type.type_size
    unit = min(size & -size, 16) if t.type.is_quantized else 1
    return not any(v % unit for v in (t.view_offs, *(nb for n, nb in zip(t.ne, t.nb, strict=True) if n > 1)))


def is_multiple(location: Location, unit: int) -> bool:
    """Whether all rows start at multiples of `unit` bytes."""
    outer = zip(location.ne[1:], location.nb[1:], strict=True)
    return location.address % unit == 0 and not any(nb % unit for n, nb in outer if n > 1)
