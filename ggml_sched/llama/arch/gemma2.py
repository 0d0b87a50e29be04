"""Gemma 2.

Attention scores and logits are soft-capped, every second layer has a window (4096 tokens in the published models), and
the results of attention and of the geglu unit are normed before they are added.
Corresponds to llama.cpp's llm_build_gemma2_iswa.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, Metadata, base_hparams, with_windows
from ggml_sched.llama.weights import Spec

__all__ = ["attended", "build", "build_layers", "hparams", "weights"]

LAYERS_OF_27B = 46
"""The number of layers of Gemma 2 27B, the one model that scales queries by 1 / sqrt(n_embd / n_head)."""


def hparams(file: GGUFFile) -> Hparams:
    h, meta = base_hparams(file, "gemma2", mode="neox"), Metadata(file, "gemma2")
    if h.n_layer == LAYERS_OF_27B:
        h = replace(h, attn_scale=1 / math.sqrt(h.n_embd / h.n_head))
    h = replace(h, embd_scale=math.sqrt(h.n_embd), attn_softcap=meta.number("attn_logit_softcapping", 50.0),
                final_softcap=meta.number("final_logit_softcapping", 30.0))
    return with_windows(h, meta, meta.integer("attention.sliding_window", 4096), 2)


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        yield from common.attention(h, layer)
        yield from common.norm(h, f"blk.{layer}.post_attention_norm", h.n_embd, layer)
        yield from common.feed_forward(h, layer)
        yield from common.norm(h, f"blk.{layer}.post_ffw_norm", h.n_embd, layer)


def attended(b: Builder, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Attention over q and k rotated by rope, with q scaled before the product of both."""
    q, k = b.rope(q, "Qcur", layer), b.rope(k, "Kcur", layer)
    q = b.name(b.ctx.scale(q, b.hparams.attn_scale), "Qcur_scaled", layer)
    return b.linear(b.attention(q, k, v, layer, scale=1.0), f"blk.{layer}.attn_output", "attn_out", layer)


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    return attended(b, *b.query_key_value(x, layer), layer)


def build_layers(b: Builder, attend) -> Tensor:
    """Layers that norm the input and the result of attention and of the feed-forward unit."""
    x = b.embed()
    for layer in range(b.hparams.n_layer):
        prefix = f"blk.{layer}."
        residual = x
        x = attend(b, b.norm(x, prefix + "attn_norm", "attn_norm", layer), layer)
        x, residual = b.wanted(layer, x, residual)
        x = b.norm(x, prefix + "post_attention_norm", "attn_post_norm", layer)
        residual = b.add(x, residual, "sa_out", layer)
        x = b.gated(b.norm(residual, prefix + "ffn_norm", "ffn_norm", layer), layer, "geglu")
        x = b.norm(x, prefix + "post_ffw_norm", "ffn_post_norm", layer)
        x = b.add(x, residual, "l_out", layer)
    return x


def build(b: Builder) -> Tensor:
    return build_layers(b, attend)
