"""The keys and values of the tokens seen so far.

Owns one buffer of each backend that holds layers.  Invariant: rows from `n_past` on are zero or
were written by an evaluation that is still running, so a masked row never brings a NaN into a
product.  `cache_k_l{i}` is [n_embd_k, n_ctx]; `cache_v_l{i}` is stored transposed, as [n_ctx, n_embd_v]
elements under the same extents.  Corresponds to llama.cpp's llama_kv_cache.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Context, Tensor
from ggml_sched.backend import Backend
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.placement import Place

__all__ = ["KVCache"]

PADDING = 32
"""Attention reads a multiple of this many rows, so that few different graphs arise while generating."""


class KVCache:
    """`k[l]` and `v[l]` for each layer."""

    def __init__(self, hparams: Hparams, n_ctx: int, place: Place, kv_type="f32") -> None:
        self.n_ctx = n_ctx
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.contexts: dict[Backend, Context] = {}
        self.buffers: dict[Backend, object] = {}
        try:
            for layer in range(hparams.n_layer):
                widths = ("k", hparams.n_embd_k, self.k), ("v", hparams.n_embd_v, self.v)
                for kind, width, tensors in widths:
                    name = f"cache_{kind}_l{layer}"
                    backend = place(name, layer)
                    ctx = self.contexts.setdefault(backend, Context(f"KV cache on {backend.name}"))
                    tensors.append(_cache_tensor(ctx, kv_type, width, n_ctx, name))
            for backend, ctx in self.contexts.items():
                self.buffers[backend] = backend.alloc_tensors(ctx, usage="any")
            self.clear()
        except BaseException:
            self.close()
            raise

    def clear(self) -> None:
        """All rows zero."""
        for buffer in self.buffers.values():
            buffer.clear(0)

    def clear_from(self, n_past: int) -> None:
        """Rows from n_past on zero: what a failed evaluation may have written."""
        for k, v in zip(self.k, self.v, strict=True):
            row = k.nb[1]
            k.backend.set_tensor(k, bytes(row * (self.n_ctx - n_past)), row * n_past)
            values = np.zeros(v.nbytes, np.uint8).reshape(v.ne[0], self.n_ctx, v.nb[0])
            v.backend.get_tensor(v, values.reshape(-1))
            values[:, n_past:] = 0
            v.backend.set_tensor(v, values.reshape(-1))

    def padded(self, n_rows: int) -> int:
        """How many rows attention reads when n_rows are in use."""
        return min(-(-n_rows // PADDING) * PADDING, self.n_ctx)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        for buffer in self.buffers.values():
            buffer.close()
        for ctx in self.contexts.values():
            ctx.close()
        self.buffers, self.contexts, self.k, self.v = {}, {}, [], []


def _cache_tensor(ctx: Context, kind, width: int, n_ctx: int, name: str) -> Tensor:
    with Context() as scratch:
        plain = scratch.tensor(kind, (width, n_ctx))  # checks the type and the size
        return ctx.restore("NONE", plain.type, plain.ne, plain.nb, name=name, resident="kv")
