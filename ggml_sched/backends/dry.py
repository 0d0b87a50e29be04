"""DryBackend: addresses but no memory, so that a 70B model on four GPUs can be planned on a laptop.

Writes are accepted and do nothing; reading data raises BackendError, and so does a compute on dry backends alone.
`fail_at` makes the n-th of these operations fail, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ggml_sched._graph import Graph, Tensor, label
from ggml_sched.backend import ALL_SOURCES, Buffer, CountingBackend, GraphView, checked_bytes
from ggml_sched.errors import OutOfMemory
from ggml_sched.testing.faults import FaultPoints

__all__ = ["DryBackend", "DryStore"]


_ROW_OPS = ("NORM", "GROUP_NORM", "L2_NORM", "DUP", "CONT", "REPEAT")
"""Ops that the CPU kernels of this package compute in place, and ggml never does; all gated units (GLU) are further
ones."""


class DryBuffer(Buffer):
    """A range of addresses without memory."""

    def write(self, offset: int, data: memoryview) -> None:
        pass

    def free(self) -> None:
        cast("DryBackend", self.backend).buffer_sizes.drop(self)


class DryBackend(FaultPoints, CountingBackend):
    """A device for planning.

    `alignment` in bytes; `max_buffer_size` bounds one buffer and `memory` all buffers together, in
    bytes (None: no bound); `supports_op(tensor) -> bool` (None: everything is supported).  `accepts_computes`: computes
    on dry backends alone do nothing instead of raising BackendError, for tests and for timing a scheduler.
    """

    has_memory = False

    def __init__(
        self,
        name: str,
        alignment: int = 32,
        max_buffer_size: int | None = None,
        memory: int | None = None,
        supports_op: Callable[[Tensor], bool] | None = None,
        accepts_computes: bool = False,
    ) -> None:
        super().__init__(name, alignment)
        self.max_buffer_size: int | None = checked_bytes(self.name, "max_buffer_size", max_buffer_size)
        self.memory: int | None = checked_bytes(self.name, "memory", memory)
        self.accepts_computes: bool = bool(accepts_computes)
        if supports_op is not None:
            vars(self)["supports_op"] = supports_op     # hides the method of the class

    def alloc_buffer(self, size: int) -> DryBuffer:
        self.check_fault("alloc", f"a buffer of {size} bytes", size)
        if self.max_buffer_size is not None and size > self.max_buffer_size:
            raise OutOfMemory(
                f"backend {self.name!r}: a buffer of {size} bytes exceeds its maximum of "
                f"{self.max_buffer_size}",
                self.name, size, self.max_buffer_size)
        self._check_room(size)
        buffer = DryBuffer(self, size)
        self.buffer_sizes.add(buffer)
        return buffer

    def inplace_sources(self, op: str) -> int:
        """The sources that CpuBackend may overwrite (more than ggml, see _ROW_OPS), so that plans for a DryBackend have
        the sizes of real ones."""
        return ALL_SOURCES if op in _ROW_OPS or op.startswith("GLU:") else super().inplace_sources(op)

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self.check_fault("copy", f"setting {label(tensor)}")

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        self.check_fault("copy", f"getting {label(tensor)}")
        super().get_tensor_async(tensor, out, offset)

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        self.check_fault("copy", f"copying {label(src)}")
        return True

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        return isinstance(dst.backend, DryBackend)

    def graph_compute(self, graph: Graph | GraphView) -> None:
        self.check_fault("compute", "a compute")


class DryStore(DryBackend):
    """A store for planning: its weights have addresses, and are fetched to other backends in each compute.

    `margin`: the bytes that a fetched copy takes beyond the bytes of the weight; `supports_op`: the default supports no
    node that needs computing.
    """

    is_store = True
    asynchronous = True

    def __init__(self, name: str = "store", margin: int = 0, alignment: int = 1, memory: int | None = None,
                 supports_op: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__(name, alignment, memory=memory, supports_op=supports_op or (lambda node: not node.computes))
        self.margin: int = cast("int", checked_bytes(self.name, "margin", margin))

    def fetch(self, weight: Tensor, start: int, nbytes: int, copy: Tensor, room: tuple[int, int]) -> None:
        self.check_fault("copy", f"fetching {label(weight)}")
