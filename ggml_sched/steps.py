"""The steps of a compute: load an input, copy a tensor, run nodes.

Each has `run()` and `free()`.  Steps that move data know the version of what they moved last, so
that data which nobody has changed, in memory which nobody else uses, is not moved again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggml_sched._core import Tensor
from ggml_sched.backend import Backend, GraphView, tensor_copy

__all__ = ["CopyStep", "ExpertsStep", "LoadStep", "RunStep", "Step"]


class Step:
    """One thing that a compute does."""

    __slots__ = ()

    def run(self) -> None:
        """Do it; complete on return as far as the backend's own queue goes."""

    def free(self) -> None:
        """Release what the step holds."""


class LoadStep(Step):
    """Copy what the caller set into an input's place in the arena.

    `keeps`: nothing else uses that place, so it is loaded again only after a new `set`.
    """

    __slots__ = ("keeps", "seen", "tensor")

    def __init__(self, tensor: Tensor, keeps: bool = False) -> None:
        self.tensor, self.keeps, self.seen = tensor, keeps, None

    def run(self) -> None:
        tensor = self.tensor
        if tensor.stash is None or (self.keeps and self.seen == tensor.data_version):
            return
        version = tensor.data_version
        view = memoryview(tensor.stash)
        if len(view):
            tensor.backend.set_tensor_async(tensor, view)
        self.seen = version


class CopyStep(Step):
    """Copy a tensor to its stand-in on another backend, or back.

    `keeps`: the stand-in's memory is its own, so an unchanged source is not copied again.
    """

    __slots__ = ("dst", "keeps", "seen", "src")

    def __init__(self, src: Tensor, dst: Tensor, keeps: bool = False) -> None:
        self.src, self.dst, self.keeps, self.seen = src, dst, keeps, None

    def run(self) -> None:
        version = self.src.data_version
        if self.keeps and self.seen == version:
            return
        self.src.backend.synchronize()
        tensor_copy(self.src, self.dst)
        self.seen = version


class ExpertsStep(Step):
    """Copy only those experts of a mixture that `ids` names.

    `src` and `dst` are expert weights [k, m, n_expert]; ids out of range are left to the kernel to refuse.
    """

    __slots__ = ("dst", "ids", "src", "used")

    def __init__(self, src: Tensor, dst: Tensor, ids: Tensor) -> None:
        self.src, self.dst, self.ids, self.used = src, dst, ids, ()

    def run(self) -> None:
        self.ids.backend.synchronize()
        n_expert = self.src.ne[2]
        self.used = tuple(int(i) for i in np.unique(self.ids.numpy()) if 0 <= i < n_expert)
        there, here = self.src.backend, self.dst.backend
        there.synchronize()
        size = self.src.nb[2]
        staging = bytearray(size)
        for i in self.used:
            there.get_tensor(self.src, staging, i * size)
            here.set_tensor(self.dst, staging, i * size)


class RunStep(Step):
    """Compute nodes on one backend; prepared by the backend on first use.

    `nodes` are the graph's, `twins` what the backend computes in their place.
    """

    __slots__ = ("backend", "nodes", "prepared", "twins")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.nodes: list[Tensor] = []
        self.twins: list[Tensor] = []
        self.prepared: tuple | None = None

    def add(self, node: Tensor, twin: Tensor) -> None:
        self.nodes.append(node)
        self.twins.append(twin)

    def run(self) -> None:
        if self.prepared is None:
            self.prepared = (self.backend.graph_plan_create(GraphView(self.twins)),)
        self.backend.graph_plan_compute(self.prepared[0])

    def observe(self, callback: Callable[[Tensor], object]) -> bool:
        """Run node by node; the callback sees each when its data is there.  False when it said stop."""
        for node, twin in zip(self.nodes, self.twins, strict=True):
            self.backend.graph_compute(GraphView((twin,)))
            self.backend.synchronize()
            if callback(node) is False:
                return False
        return True

    def free(self) -> None:
        if self.prepared is not None:
            prepared, self.prepared = self.prepared[0], None
            self.backend.graph_plan_free(prepared)
