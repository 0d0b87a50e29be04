"""Phi-2 (and Phi-1.5).

Attention and a gelu unit in parallel, both of the same layer norm; rope rotates a part of each head, and every matrix
and norm has a bias.  Corresponds to llama.cpp's llm_build_phi2.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, base_hparams
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    return base_hparams(file, "phi2", norm="layer", mode="neox")


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        prefix = f"blk.{layer}."
        yield from common.attention(h, layer)
        yield from common.linear(prefix + "ffn_up", h.n_embd, h.layers[layer].n_ff, layer)
        yield from common.linear(prefix + "ffn_down", h.layers[layer].n_ff, h.n_embd, layer)


def build(b: Builder) -> Tensor:
    x = b.embed()
    for layer in range(b.hparams.n_layer):
        prefix = f"blk.{layer}."
        residual = x
        normed = b.norm(x, prefix + "attn_norm", "attn_norm", layer)
        q, k, v = b.query_key_value(normed, layer)
        q = b.name(b.ctx.scale(b.rope(q, "Qcur", layer), b.hparams.attn_scale), "Qcur_scaled", layer)
        k = b.rope(k, "Kcur", layer)
        x = b.linear(b.attention(q, k, v, layer, scale=1.0), prefix + "attn_output", "attn_out", layer)
        x, residual, normed = b.wanted(layer, x, residual, normed)
        x = b.ctx.add(x, b.plain(normed, layer))
        x = b.add(x, residual, "l_out", layer)
    return x
