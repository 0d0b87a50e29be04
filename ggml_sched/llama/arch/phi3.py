"""Phi-3 and Phi-4 mini.

Differs from llama: one matrix for query, key and value, one for gate and up, rope that pairs elements of the two halves
of a head, and for long contexts two tables of frequency factors.  Files have a window without the layers that it is
for; llama.cpp ignores it, and so does this module.  Corresponds to llama.cpp's llm_build_phi3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, Metadata, base_hparams
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    h, meta = base_hparams(file, "phi3", mode="neox"), Metadata(file, "phi3")
    if h.experts:
        raise meta.fail("experts, which architecture 'phi3' does not have")
    # The presence of the tables decides: early converters did not write the scaling type "longrope".
    return replace(h, longrope=any(f"rope_factors_{kind}.weight" in file.tensors for kind in ("long", "short")))


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        prefix, n_ff = f"blk.{layer}.", h.layers[layer].n_ff
        yield from common.attention(h, layer)
        yield from common.norm(h, prefix + "ffn_norm", h.n_embd, layer)
        yield from common.linear(prefix + "ffn_up", h.n_embd, 2 * n_ff, layer)
        yield from common.linear(prefix + "ffn_down", n_ff, h.n_embd, layer)


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    q, k, v = b.query_key_value(x, layer)
    q = b.name(b.ctx.scale(b.rope(q, "Qcur", layer), b.hparams.attn_scale), "Qcur_scaled", layer)
    k = b.rope(k, "Kcur", layer)
    return b.linear(b.attention(q, k, v, layer, scale=1.0), f"blk.{layer}.attn_output", "attn_out", layer)


def build(b: Builder) -> Tensor:
    return common.pre_norm_layers(b, b.embed(), attend)
