"""The table of kernels: for each op name its builder, the nodes that it accepts, and the sources it may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.job import Job
from ggml_sched.graph import quants

__all__ = ["FLOATS", "KERNELS", "WEIGHTS", "Kernel", "kernel", "types"]

FLOATS = frozenset({Type.F32, Type.F16, Type.BF16})
WEIGHTS = FLOATS | quants.QUANTIZED
F32 = frozenset({Type.F32})
I32 = frozenset({Type.I32})

Fits = Callable[[Tensor], bool]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`build` adds a node's calls to its Job; `fits` says whether it can, by types and shapes;
    bit i of `inplace`: source i may be the destination, of equal layout, without changing a bit."""

    build: Callable[[Job], None]
    fits: Fits
    inplace: int


KERNELS: dict[str, Kernel] = {}


def kernel(*ops: str, fits: Fits, inplace: int = 0) -> Callable:
    """Register the builder of these ops."""

    def register(build: Callable[[Job], None]) -> Callable[[Job], None]:
        for op in ops:
            KERNELS[op] = Kernel(build, fits, inplace)
        return build

    return register


def types(dst: frozenset | None, *src: frozenset, optional: tuple[frozenset, ...] = (),
          like: int | None = None) -> Fits:
    """A check: result and sources have types of these sets, `optional` sources may be missing.

    `dst` None: the result has the type of source 0.  `like`: the result has the extents of that source.
    """

    allowed = (*src, *optional)

    def fits(node: Tensor) -> bool:
        if not len(src) <= len(node.src) <= len(allowed):
            return False
        for i, tensor in enumerate(node.src):
            if tensor is None:
                if i < len(src):
                    return False
            elif tensor.type not in allowed[i]:
                return False
        if node.type not in ({node.src[0].type} if dst is None else dst):
            return False
        return like is None or node.ne == node.src[like].ne

    return fits
