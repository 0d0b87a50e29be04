"""Flaky backends: at random they raise, give invalid answers, and report wrong memory.

Failures are drawn from the backend's own generator, so a seed decides them all (those of a backend's own thread come
from another generator, since the order of threads varies).
"""

import random
import threading

from devices import POISON

import ggml_sched as gs
from ggml_sched.backends.cpu import CpuBuffer
from ggml_sched.backends.cpu.buffer import allocate


class OtherError(Exception):
    """An error of a backend that is no gs.Error."""


class FlakyBuffer(CpuBuffer):
    def init_tensor(self, tensor):
        self.backend.may_raise("init_tensor")

    def free(self):
        super().free()
        # Raised while memory is freed, which must not leak it.
        self.backend.may_raise("free")


class FlakyBackend(gs.CpuBackend):
    """`rate` is the probability of a failure, 0 for a backend that behaves; `n_invalid` counts the invalid answers."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(1, name=name)
        self.rate = 0.0
        self.n_invalid = 0
        self.reads: tuple[str, ...] = ()
        self._main = threading.current_thread()
        self._draws = random.Random(seed), random.Random(~seed)

    @property
    def _draw(self) -> random.Random:
        return self._draws[threading.current_thread() is not self._main]

    def may_raise(self, where: str) -> None:
        """Raise an error at random."""
        if self.rate and self._draw.random() < self.rate:
            raise self._draw.choice((
                OtherError(f"{self.name}: {where}"), gs.BackendError(f"{self.name}: {where}"),
                gs.OutOfMemory(f"{self.name}: {where}", self.name, 1, 0)))

    def answer(self, where: str, valid, *invalid):
        """The valid answer; at random an error or an invalid answer."""
        self.may_raise(where)
        if self.rate and invalid and self._draw.random() < self.rate:
            self.n_invalid += 1
            return self._draw.choice(invalid)
        return valid

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

    def alloc_buffer(self, size):
        closed, foreign = gs.Buffer(self, size), gs.DryBackend("other").alloc_buffer(size)
        closed.close()
        found = self.answer("alloc_buffer", self.name, None, 7, b"memory", closed, gs.Buffer(self, size // 2), foreign,
                            self)
        if found is not self.name:
            return found
        buffer = FlakyBuffer(self, allocate(size, self.name))
        buffer.memory[:] = POISON
        self.buffer_sizes.add(buffer)
        return buffer

    def cpy_tensor_from(self, src, dst):
        self.may_raise("cpy_tensor_from")
        return super().cpy_tensor_from(src, dst) if self._draw.random() < 0.7 else False

    def graph_plan_free(self, plan):
        super().graph_plan_free(plan)
        self.may_raise("graph_plan_free")


def _raising(method: str):
    def call(self, *args):
        self.may_raise(method)
        return getattr(gs.CpuBackend, method)(self, *args)
    return call


for _method in ("set_tensor_async", "get_tensor_async", "synchronize", "event_new", "event_record", "event_wait",
                "graph_plan_create", "graph_plan_compute", "graph_compute"):
    setattr(FlakyBackend, _method, _raising(_method))
