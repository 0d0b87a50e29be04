"""The bytes that a loaded model holds on each backend.

Owns nothing: sums the sizes of open buffers.  Corresponds to what llama.cpp logs as the sizes of its model buffers, KV
buffers and compute buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ggml_sched.backend import Backend
    from ggml_sched.execution.scheduler import Scheduler
    from ggml_sched.llama.kvcache import KVCache
    from ggml_sched.llama.weights import Weights

__all__ = ["Memory", "memory_of"]


class Memory(NamedTuple):
    """The bytes that a model holds on one backend: the sizes of its open buffers."""

    weights: int
    """Bytes of the weights, in the file's mapping or copied, and of all slots of experts.  Weights that are copied and
    have interleaved rows count twice; of those of a mapping the pages were released."""
    mapped: int
    """Those bytes of `weights` that are in the file's mapping: the operating system can drop these pages, and several
    processes share them.  What has moved to huge pages, or has interleaved rows, is no longer
    among them."""
    cache: int
    """Bytes of the KV cache, for all `n_ctx` tokens, and of recurrent states."""
    arena: int
    """Bytes of the scheduler's arena, which holds the results of a batch, and the weights that are being fetched.
    Models that share an arena each count all of it."""
    work: int = 0
    """Bytes of the kernels' work memory, which lies outside the arena."""

    @property
    def total(self) -> int:
        """The sum of `weights`, `cache`, `arena` and `work`."""
        return self.weights + self.cache + self.arena + self.work


def memory_of(backend: Backend, weights: Weights, cache: KVCache, scheduler: Scheduler, closed: bool = False) -> Memory:
    """The bytes that weights, cache and scheduler hold on a backend.  `closed`: whether the model is closed; then the
    backend's work memory does not count."""
    slots = 0 if weights.slots is None or weights.slots.home is not backend else weights.slots.nbytes
    loaded = [buffer for buffer in weights.buffers.get(backend, ()) if not buffer.closed]
    cached = [buffer for of, buffer in cache.buffers.items() if of is backend and not buffer.closed]
    copied = [buffer for buffer in loaded if not buffer.file_backed]
    interleaved = sum(form.nbytes for buffer in copied if (form := getattr(buffer, "interleaved", None)) is not None)
    return Memory(sum(buffer.size for buffer in loaded) + interleaved + slots,
                  sum(buffer.size - buffer.moved for buffer in loaded if buffer.file_backed),
                  sum(buffer.size for buffer in cached), scheduler.buffer_size(backend),
                  0 if closed else backend.work_held + backend.host_work_held)
