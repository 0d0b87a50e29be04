"""GPT-2.

Learned position embeddings, layer norms, one matrix for query, key and value, a gelu unit, and a bias at every matrix.
Corresponds to llama.cpp's llm_build_gpt2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, base_hparams
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    h = base_hparams(file, "gpt2", norm="layer", mode=None)
    return replace(h, n_positions=h.n_ctx_train)


def weights(h: Hparams) -> Iterator[Spec]:
    yield from common.around_layers(h)
    yield Spec("position_embd.weight", (h.n_embd, h.n_ctx_train))
    for layer in range(h.n_layer):
        prefix = f"blk.{layer}."
        yield from common.attention(h, layer)
        yield from common.norm(h, prefix + "ffn_norm", h.n_embd, layer)
        yield from common.linear(prefix + "ffn_up", h.n_embd, h.layers[layer].n_ff, layer)
        yield from common.linear(prefix + "ffn_down", h.layers[layer].n_ff, h.n_embd, layer)


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    q, k, v = b.query_key_value(x, layer)
    return b.linear(b.attention(q, k, v, layer), f"blk.{layer}.attn_output", "attn_out", layer)


def build(b: Builder) -> Tensor:
    x = b.embed()
    positions = b.name(b.ctx.get_rows(b.weights["position_embd.weight"], b.positions()), "pos_embd")
    x = b.name(b.ctx.add(x, positions), "inpL")
    return common.pre_norm_layers(b, x, attend, Builder.plain)
