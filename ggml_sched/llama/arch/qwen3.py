"""Qwen3, dense.

As llama, with an RMS norm of each head's query and key before rope, which turns halves.
Corresponds to llama.cpp's llm_build_qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.weights import Spec

__all__ = ["build", "weights"]


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        yield from common.attention(h, layer)
        yield Spec(f"blk.{layer}.attn_q_norm.weight", (h.n_embd_head_k,), layer)
        yield Spec(f"blk.{layer}.attn_k_norm.weight", (h.n_embd_head_k,), layer)
        yield from common.feed_forward(h, layer)


def build(b: Builder) -> Tensor:
    h = b.hparams
    x = b.embed()
    for layer in range(h.n_layer):
        prefix = f"blk.{layer}."
        residual = x
        x = b.rms_norm(x, prefix + "attn_norm.weight", "attn_norm", layer)
        q, k, v = b.query_key_value(x, layer)
        q = b.rope(b.rms_norm(q, prefix + "attn_q_norm.weight", "Qcur_normed", layer), "neox", "Qcur", layer)
        k = b.rope(b.rms_norm(k, prefix + "attn_k_norm.weight", "Kcur_normed", layer), "neox", "Kcur", layer)
        x = b.linear(b.attention(q, k, v, layer), prefix + "attn_output", "attn_out", layer)
        residual = b.name(b.ctx.add(x, residual), "ffn_inp", layer)
        x = b.rms_norm(residual, prefix + "ffn_norm.weight", "ffn_norm", layer)
        x = b.feed_forward(x, layer)
        x = b.name(b.ctx.add(x, residual), "l_out", layer)
    return b.output(b.rms_norm(x, "output_norm.weight", "result_norm"))
