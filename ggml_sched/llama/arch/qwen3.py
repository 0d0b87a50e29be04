"""Qwen3, dense.

As llama, with an RMS norm of each head's query and key before rope, which pairs elements of the two halves of a head.
Corresponds to llama.cpp's llm_build_qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, base_hparams
from ggml_sched.llama.weights import Spec

__all__ = ["attend", "build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    return base_hparams(file, "qwen3", mode="neox")


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        yield from common.attention(h, layer)
        yield Spec(f"blk.{layer}.attn_q_norm.weight", (h.n_embd_head_k,), layer)
        yield Spec(f"blk.{layer}.attn_k_norm.weight", (h.n_embd_head_k,), layer)
        yield from common.feed_forward(h, layer)


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    prefix = f"blk.{layer}.attn_"
    q, k, v = b.query_key_value(x, layer)
    q = b.rope(b.norm(q, prefix + "q_norm", "Qcur_normed", layer), "Qcur", layer)
    k = b.rope(b.norm(k, prefix + "k_norm", "Kcur_normed", layer), "Kcur", layer)
    return b.linear(b.attention(q, k, v, layer), prefix + "output", "attn_out", layer)


def build(b: Builder) -> Tensor:
    return common.pre_norm_layers(b, b.embed(), attend)
