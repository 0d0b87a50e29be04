"""CPU backends that act as separate devices: own poisoned memory, configurable refused and offloaded ops."""

from __future__ import annotations

import numpy as np
from instrumented import POISON

import ggml_sched as gs
from ggml_sched.backend import Backend


class CpuDevice(gs.CpuBackend):
    """Computes on one thread, in memory of its own; reads the buffers of the backends that `reads` names without
    copies.

    `refuses` are ops that it does not support, `offloads` ops that it offloads although their weights are on the host.
    """

    def __init__(self, name, refuses=(), offloads=(), reads=(), max_buffer_size=None, memory=None,
                 alignment=None):
        super().__init__(n_threads=1, name=name, memory=memory)
        if alignment is not None:
            Backend.__init__(self, name, alignment)
        self.refuses, self.offloads, self.reads = refuses, offloads, reads
        self.max_buffer_size = max_buffer_size
        self.ran = []
        """Names of the nodes that ran here."""
        self.received = []
        """Names of tensors written by copies or sets, in order."""

    def alloc_buffer(self, size):
        buffer = super().alloc_buffer(size)
        buffer.clear(POISON)
        return buffer

    def supports_op(self, node):
        return node.op not in self.refuses and super().supports_op(node)

    def supports_buffer(self, buffer):
        return buffer.backend is self or buffer.backend.name in self.reads

    def offload_op(self, node):
        return node.op in self.offloads

    def set_tensor_async(self, tensor, data, offset=0):
        self.received.append(tensor.name.removeprefix(f"{self.name}#"))
        super().set_tensor_async(tensor, data, offset)

    def cpy_tensor_from(self, src, dst):
        self.received.append(src.name)
        return super().cpy_tensor_from(src, dst)

    def graph_compute(self, graph):
        self.ran += [node.name for node in graph.nodes]
        super().graph_compute(graph)

    def graph_plan_compute(self, plan):
        super().graph_plan_compute(plan)

    def graph_plan_create(self, graph):
        self.ran += [node.name for node in graph.nodes]
        return super().graph_plan_create(graph)


def devices(n, **options):
    """D0, D1, ... and the host, best first."""
    return tuple(CpuDevice(f"D{k}", **options) for k in range(n - 1)) + (CpuDevice("HOST"),)


def resident(backend, name, values, usage="weights"):
    """A resident tensor of a backend: f32, or i32 if the array holds integers."""
    values = np.asarray(values)
    ctx = gs.Context(name)
    t = ctx.tensor("i32" if values.dtype.kind == "i" else "f32", values.shape[::-1], name)
    backend.alloc_tensors(ctx, usage)
    t.set(values)
    return t


def alone(graph, values):
    """{tensor: array} for every tensor of a graph, each in memory of its own, computed without a scheduler.

    For graphs whose tensors have no memory yet.
    """
    with gs.CpuBackend(n_threads=1) as backend:
        buffers = []
        for t in graph.tensors:
            if t.view_src is None:
                buffer = backend.alloc_buffer(t.nbytes)
                buffers.append(buffer)
                gs.bind_resident(t, buffer, 0)
        for t, array in values.items():
            if t.backend is not None:
                t.set(array)
        backend.graph_compute(graph)
        found = {t: t.numpy() for t in graph.tensors}
        for t in graph.tensors:
            if t.view_src is None:
                gs.bind_resident(t, None, 0)
        for buffer in buffers:
            buffer.close()
    return found


def verified(plan):
    plan.verify()
    return plan
