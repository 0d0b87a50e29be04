"""Gemma 3, text.

Differs from Gemma 2: no soft-capping, an RMS norm of each head's query and key; five of six layers have a window, and
their rope has another frequency base.  Corresponds to llama.cpp's llm_build_gemma3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import gemma2
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, Metadata, base_hparams, with_windows
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]

LAYERS_OF_27B = 62


def hparams(file: GGUFFile) -> Hparams:
    h, meta = base_hparams(file, "gemma3", mode="neox"), Metadata(file, "gemma3")
    scale = 1 / math.sqrt(h.n_embd / h.n_head if h.n_layer == LAYERS_OF_27B else h.n_embd_head_k)
    h = replace(h, embd_scale=math.sqrt(h.n_embd), attn_scale=scale,
                final_softcap=meta.number("final_logit_softcapping", 0.0))
    window = meta.integer("attention.sliding_window", 0, low=0)
    if not window:
        return h
    return with_windows(h, meta, window, 6, replace(h.rope, freq_base=10000.0, freq_scale=1.0))


def weights(h: Hparams) -> Iterator[Spec]:
    yield from gemma2.weights(h)
    for layer in range(h.n_layer):
        yield Spec(f"blk.{layer}.attn_q_norm.weight", (h.n_embd_head_k,), layer)
        yield Spec(f"blk.{layer}.attn_k_norm.weight", (h.n_embd_head_k,), layer)


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    q, k, v = b.query_key_value(x, layer)
    q = b.norm(q, f"blk.{layer}.attn_q_norm", "Qcur_normed", layer)
    k = b.norm(k, f"blk.{layer}.attn_k_norm", "Kcur_normed", layer)
    return gemma2.attended(b, q, k, v, layer)


def build(b: Builder) -> Tensor:
    return gemma2.build_layers(b, attend)
