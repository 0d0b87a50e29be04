"""Flaky backends: at random they raise, return rubbish, and report wrong memory.

Failures are drawn from the backend's own generator, so a seed decides them all (those of a backend's own thread come
from another generator, since the order of threads varies).  `mood` is their probability, 0 for a backend that behaves.
"""

from __future__ import annotations

import random
import threading

from instrumented import POISON

import ggml_sched as gs
from ggml_sched.backends.cpu import CpuBuffer
from ggml_sched.backends.cpu.buffer import allocate


class Whim(Exception):
    """An error of a backend that is no gs.Error."""


class MoodyBuffer(CpuBuffer):
    def init_tensor(self, tensor):
        self.backend.raises("init_tensor")

    def free(self):
        super().free()
        # Raised while memory is freed, which must not leak it.
        self.backend.raises("free")


class MoodyBackend(gs.CpuBackend):
    """`rubbish` counts the invalid results since it was last set to 0."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(1, name=name)
        self.mood = 0.0
        self.rubbish = 0
        self.reads: tuple[str, ...] = ()
        self._main = threading.current_thread()
        self._draws = random.Random(seed), random.Random(~seed)

    # -- failures ------------------------------------------------------------------

    @property
    def _draw(self) -> random.Random:
        return self._draws[threading.current_thread() is not self._main]

    def raises(self, where: str) -> None:
        """Raise an error at random."""
        if self.mood and self._draw.random() < self.mood:
            raise self._draw.choice((
                Whim(f"{self.name}: {where}"), gs.BackendError(f"{self.name}: {where}"),
                gs.OutOfMemory(f"{self.name}: {where}", self.name, 1, 0)))

    def answer(self, where: str, honest, *rubbish):
        """The right result; at random an error or a wrong result."""
        self.raises(where)
        if self.mood and rubbish and self._draw.random() < self.mood:
            self.rubbish += 1
            return self._draw.choice(rubbish)
        return honest

    # -- queries of the planner --------------------------------------------------

    def supports_op(self, node):
        return self.answer("supports_op", super().supports_op(node), False, None, "yes", 0)

    def supports_buffer(self, buffer):
        return self.answer("supports_buffer", buffer.backend is self or buffer.backend.name in self.reads)

    def offload_op(self, node):
        return self.answer("offload_op", False, True, None, [1])

    def inplace_sources(self, op):
        return self.answer("inplace_sources", super().inplace_sources(op), None, "all", 1.5, 0, -(2**70))

    def alloc_size(self, tensor):
        return self.answer("alloc_size", tensor.nbytes, None, -1, tensor.nbytes - 1, 2**63, 1.5, "many", 2**62)

    def memory_available(self):
        return self.answer("memory_available", None, 0, 1, -5)

    # -- memory -----------------------------------------------------------------

    def alloc_buffer(self, size):
        self.raises("alloc_buffer")
        if self.mood and self._draw.random() < self.mood:
            self.rubbish += 1
            closed = gs.Buffer(self, size)
            closed.close()
            foreign = gs.DryBackend("other").alloc_buffer(size)
            return self._draw.choice((None, 7, b"memory", closed, gs.Buffer(self, size // 2), foreign, self))
        buffer = MoodyBuffer(self, allocate(size, self.name))
        buffer.memory[:] = POISON
        self.used += size
        return buffer

    # -- data and computing -------------------------------------------------------

    def set_tensor_async(self, tensor, data, offset=0):
        self.raises("set_tensor_async")
        super().set_tensor_async(tensor, data, offset)

    def get_tensor_async(self, tensor, out, offset=0):
        self.raises("get_tensor_async")
        super().get_tensor_async(tensor, out, offset)

    def cpy_tensor_from(self, src, dst):
        self.raises("cpy_tensor_from")
        return super().cpy_tensor_from(src, dst) if self._draw.random() < 0.7 else False

    def synchronize(self):
        self.raises("synchronize")

    def event_new(self):
        self.raises("event_new")
        return super().event_new()

    def event_record(self, event):
        self.raises("event_record")
        super().event_record(event)

    def event_wait(self, event):
        self.raises("event_wait")
        super().event_wait(event)

    def graph_plan_create(self, graph):
        self.raises("graph_plan_create")
        return super().graph_plan_create(graph)

    def graph_plan_free(self, plan):
        super().graph_plan_free(plan)
        self.raises("graph_plan_free")

    def graph_plan_compute(self, plan):
        self.raises("graph_plan_compute")
        super().graph_plan_compute(plan)

    def graph_compute(self, graph):
        self.raises("graph_compute")
        super().graph_compute(graph)
