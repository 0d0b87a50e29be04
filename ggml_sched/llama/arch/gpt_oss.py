"""gpt-oss.

Attention sinks, a window in every second layer, and experts with biases; a token weighs its chosen experts by a softmax
over these alone.  Corresponds to llama.cpp's llm_build_openai_moe_iswa.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.experts import experts
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, Metadata, base_hparams, with_windows
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    h, meta = base_hparams(file, "gpt-oss", mode="neox"), Metadata(file, "gpt-oss")
    if h.experts is None:
        raise meta.fail("no experts, which architecture 'gpt-oss' needs")
    n_ff = meta.integer("expert_feed_forward_length")
    h = replace(h, experts=replace(h.experts, n_ff=n_ff, gating="chosen", normalise=False),
                attn_scale=1 / math.sqrt(h.rope.n_dims))
    return with_windows(h, meta, meta.integer("attention.sliding_window"), 2)


def weights(h: Hparams) -> Iterator[Spec]:
    e = h.experts
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        prefix, at = f"blk.{layer}.", h.layers[layer]
        yield from common.attention(h, layer)
        yield Spec(prefix + "attn_sinks.weight", (at.n_head,), layer)
        yield from common.norm(h, prefix + "post_attention_norm", h.n_embd, layer)
        yield from common.expert_weights(h, layer)
        yield Spec(prefix + "ffn_gate_inp.bias", (e.n,), layer)
        yield Spec(prefix + "ffn_gate_exps.bias", (e.n_ff, e.n), layer)
        yield Spec(prefix + "ffn_up_exps.bias", (e.n_ff, e.n), layer)
        yield Spec(prefix + "ffn_down_exps.bias", (h.n_embd, e.n), layer)


def build(b: Builder) -> Tensor:
    x = b.embed()
    for layer in range(b.hparams.n_layer):
        prefix = f"blk.{layer}."
        residual = x
        q, k, v = b.query_key_value(b.norm(x, prefix + "attn_norm", "attn_norm", layer), layer)
        q, k = b.rope(q, "Qcur", layer), b.rope(k, "Kcur", layer)
        x = b.attention(q, k, v, layer, sinks=b.weights[prefix + "attn_sinks.weight"])
        x = b.linear(x, prefix + "attn_output", "attn_out", layer)
        x, residual = b.wanted(layer, x, residual)
        residual = b.add(x, residual, "ffn_inp", layer)
        x = b.norm(residual, prefix + "post_attention_norm", "attn_post_norm", layer)
        x = b.add(experts(b, x, layer, "swiglu_oai"), residual, "l_out", layer)
    return x
