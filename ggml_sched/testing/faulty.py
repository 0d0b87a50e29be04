"""Backends whose n-th allocation, copy or compute fails; all else gives real results, which a test compares.

    class FaultyBackend(Faulty, MyBackend):
        pass

    faulty = FaultyBackend("mine")
    faulty.fail_at("copy", 3)       # the third copy from now on raises BackendError
"""

from __future__ import annotations

from typing import Any

from ggml_sched._graph import Graph, Tensor, label
from ggml_sched.backend import Backend, GraphView
from ggml_sched.backends.cpu import CpuBackend
from ggml_sched.testing.faults import FaultPoints

__all__ = ["Faulty", "FaultyCpuBackend"]


class Faulty(FaultPoints, Backend):
    """A mixin before a backend class: adds the fault injection of `FaultPoints.fail_at` to its methods."""

    def alloc_buffer(self, size: int) -> Any:
        self.check_fault("alloc", f"a buffer of {size} bytes", size)
        return super().alloc_buffer(size)

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self.check_fault("copy", f"setting {label(tensor)}")
        super().set_tensor_async(tensor, data, offset)

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        self.check_fault("copy", f"getting {label(tensor)}")
        super().get_tensor_async(tensor, out, offset)

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        self.check_fault("copy", f"copying {label(src)}")
        return super().cpy_tensor_from(src, dst)

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        if not _is_default(super().cpy_tensor_to, Backend.cpy_tensor_to):
            self.check_fault("copy", f"copying {label(src)}")
        return super().cpy_tensor_to(src, dst)

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        if not _is_default(super().cpy_tensor_async, Backend.cpy_tensor_async):
            self.check_fault("copy", f"copying {label(src)}")
        return super().cpy_tensor_async(src, dst)

    def graph_compute(self, graph: Graph | GraphView) -> None:
        self.check_fault("compute", "a compute")
        super().graph_compute(graph)

    def graph_plan_compute(self, plan: Any) -> None:
        if not _is_default(super().graph_plan_compute, Backend.graph_plan_compute):
            self.check_fault("compute", "a compute")    # the default calls graph_compute, which counts it
        super().graph_plan_compute(plan)


def _is_default(method: object, default: object) -> bool:
    """Whether a bound method is the default of `Backend`: that does nothing, or calls a method that counts."""
    return getattr(method, "__func__", None) is default


class FaultyCpuBackend(Faulty, CpuBackend):
    """A CpuBackend with the fault injection of `FaultPoints.fail_at`."""
