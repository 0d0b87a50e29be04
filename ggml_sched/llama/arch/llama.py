"""Llama, Llama 2 and 3, TinyLlama, Mistral, and with experts Mixtral.

Pre-norm layers of grouped-query attention, with rope on pairs of adjacent elements, and of a swiglu unit or experts.
Corresponds to llama.cpp's llm_build_llama.
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
    return base_hparams(file, "llama")


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        yield from common.attention(h, layer)
        yield from common.feed_forward(h, layer)


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    q, k, v = b.query_key_value(x, layer)
    q, k = b.rope(q, "Qcur", layer), b.rope(k, "Kcur", layer)
    return b.linear(b.attention(q, k, v, layer), f"blk.{layer}.attn_output", "attn_out", layer)


def build(b: Builder) -> Tensor:
    return common.pre_norm_layers(b, b.embed(), attend)
