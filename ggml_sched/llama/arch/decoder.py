"""Decoders of attention and feed-forward layers: most architectures, as rows of one table.

Owns what differs between these architectures.  Invariant: nodes are those of llama.cpp's graph of the same
architecture, in its order.  Corresponds to llama.cpp's llm_build_llama, _qwen2, _qwen3, _qwen3moe, _phi2, _phi3,
_gpt2, _gemma2_iswa, _gemma3 and llm_build_openai_moe_iswa.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.experts import experts
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Experts, Hparams, Metadata, base_hparams, with_windows
from ggml_sched.llama.weights import Spec

__all__ = ["DECODERS", "Decoder"]


def _same(h: Hparams, meta: Metadata) -> Hparams:
    return h


@dataclass(frozen=True, slots=True)
class Decoder:
    """An architecture: `hparams(file)`, `weights(hparams)` and `build(builder)`.

    With the defaults of all options: pre-norm layers of grouped-query attention, with rope on pairs of adjacent
    elements, and of a swiglu unit, or of experts where the file has them.
    """

    arch: str
    rope: str | None = "normal"
    """The mode of rope: "neox" pairs elements of the two halves of a head; None: learned position vectors instead."""
    norm: str = "rms"
    change: Callable[[Hparams, Metadata], Hparams] = _same
    """A function that adds the hyperparameters that only this architecture has to those that most files have."""
    qk_norm: bool = False
    """Whether each head's query and key are normed before rope."""
    scales_query: bool = False
    """Whether the query is scaled before its product with the keys; otherwise the product is scaled."""
    sinks: bool = False
    """Whether each head has an attention sink: a learned score in its soft-max, of a token without a value."""
    unit: str = "swiglu"
    """The feed-forward unit; "gelu" is one without a gate."""
    fused_gate: bool = False
    """Whether the gate and up matrices are stored as one."""
    ffn_norm: str | None = "ffn_norm"
    """The weight of the norm before the feed-forward unit; None: the unit reads the same normed input as attention."""
    post_norm: bool = False
    """Whether the results of attention and of the feed-forward unit are normed before they are added."""

    def hparams(self, file: GGUFFile) -> Hparams:
        h = base_hparams(file, self.arch, norm=self.norm, mode=self.rope)
        return self.change(h, Metadata(file, self.arch))

    def weights(self, h: Hparams) -> Iterator[Spec]:
        yield from common.around_layers(h)
        if h.n_positions:
            yield Spec("position_embd.weight", (h.n_embd, h.n_positions))
        for layer, at in enumerate(h.layers):
            blk = f"blk.{layer}."
            yield from common.attention_weights(h, layer)
            if self.qk_norm:
                yield Spec(blk + "attn_q_norm.weight", (h.n_embd_head_k,), layer)
                yield Spec(blk + "attn_k_norm.weight", (h.n_embd_head_k,), layer)
            if self.sinks:
                yield Spec(blk + "attn_sinks.weight", (at.n_head,), layer)
            if self.ffn_norm:
                yield from common.norm_weights(h, blk + self.ffn_norm, h.n_embd, layer)
            if self.post_norm:
                yield from common.norm_weights(h, blk + "post_attention_norm", h.n_embd, layer)
                yield from common.norm_weights(h, blk + "post_ffw_norm", h.n_embd, layer)
            if self.unit == "gelu" or self.fused_gate:
                n_up = at.n_ff * (2 if self.fused_gate else 1)
                yield from common.linear_weights(blk + "ffn_up", h.n_embd, n_up, layer)
                yield from common.linear_weights(blk + "ffn_down", at.n_ff, h.n_embd, layer)
            elif h.experts:
                yield from common.expert_weights(h, layer, biased=self.unit == "swiglu_oai")
            else:
                yield from common.gated_weights(blk + "ffn_", h.n_embd, at.n_ff, layer)

    def build(self, b: Builder) -> Tensor:
        x = b.embed()
        if b.hparams.n_positions:
            positions = b.name(b.ctx.get_rows(b.weights["position_embd.weight"], b.positions()), "pos_embd")
            x = b.name(b.ctx.add(x, positions), "inpL")
        return common.layers(b, x, self.attend, self.feed_forward, self.ffn_norm, self.post_norm)

    def attend(self, b: Builder, x: Tensor, layer: int) -> Tensor:
        prefix, scale = f"blk.{layer}.attn_", None
        q, k, v = b.query_key_value(x, layer)
        if self.qk_norm:
            q = b.norm(q, prefix + "q_norm", "Qcur_normed", layer)
            k = b.norm(k, prefix + "k_norm", "Kcur_normed", layer)
        if self.rope:
            q, k = b.rope(q, "Qcur", layer), b.rope(k, "Kcur", layer)
        if self.scales_query:
            q, scale = b.name(b.ctx.scale(q, b.hparams.attn_scale), "Qcur_scaled", layer), 1.0
        sinks = b.weights[prefix + "sinks.weight"] if self.sinks else None
        return b.linear(b.attention(q, k, v, layer, scale=scale, sinks=sinks), prefix + "output", "attn_out", layer)

    def feed_forward(self, b: Builder, x: Tensor, layer: int) -> Tensor:
        if self.unit == "gelu":
            return b.plain(x, layer)
        return experts(b, x, layer, self.unit) if b.hparams.experts else b.gated(x, layer, self.unit)


# -- hyperparameters of one architecture -------------------------------------------------------------------------------


def _learned_positions(h: Hparams, meta: Metadata) -> Hparams:
    return replace(h, n_positions=h.n_ctx_train)


def _gemma2(h: Hparams, meta: Metadata) -> Hparams:
    if h.n_layer == 46:     # the model of 27B; the others scale queries by 1 / sqrt(width of a head)
        h = replace(h, attn_scale=1 / math.sqrt(h.n_embd / h.n_head))
    h = replace(h, embd_scale=math.sqrt(h.n_embd), attn_softcap=meta.number("attn_logit_softcapping", 50.0),
                final_softcap=meta.number("final_logit_softcapping", 30.0))
    return with_windows(h, meta, meta.integer("attention.sliding_window", 4096), 2)


def _gemma3(h: Hparams, meta: Metadata) -> Hparams:
    width = h.n_embd / h.n_head if h.n_layer == 62 else h.n_embd_head_k     # the model of 27B has 62 layers
    h = replace(h, embd_scale=math.sqrt(h.n_embd), attn_scale=1 / math.sqrt(width),
                final_softcap=meta.number("final_logit_softcapping", 0.0))
    window = meta.integer("attention.sliding_window", 0, low=0)
    if not window:
        return h
    assert h.rope is not None
    return with_windows(h, meta, window, 6, replace(h.rope, freq_base=10000.0, freq_scale=1.0))


def _needed_experts(h: Hparams, meta: Metadata) -> Experts:
    if h.experts is None:
        raise meta.error(f"no experts, which architecture {h.arch!r} needs")
    return h.experts


def _gpt_oss(h: Hparams, meta: Metadata) -> Hparams:
    e, n_ff = _needed_experts(h, meta), meta.integer("expert_feed_forward_length")
    assert h.rope is not None
    h = replace(h, experts=replace(e, n_ff=n_ff, gating="chosen", normalise=False),
                attn_scale=1 / math.sqrt(h.rope.n_dims))
    return with_windows(h, meta, meta.integer("attention.sliding_window"), 2)


def _phi3(h: Hparams, meta: Metadata) -> Hparams:
    if h.experts:
        raise meta.error("experts, which architecture 'phi3' does not have")
    # Files with tables of rope factors have longrope: early converters did not write the scaling type "longrope".
    return replace(h, longrope=any(f"rope_factors_{kind}.weight" in meta.file.tensors for kind in ("long", "short")))


def _qwen3moe(h: Hparams, meta: Metadata) -> Hparams:
    e = _needed_experts(h, meta)
    # Older files lack the width of an expert: in them feed_forward_length is that of all experts of a token together.
    n_ff = meta.integer("expert_feed_forward_length", 0, low=0) or h.n_ff // e.n_used
    return replace(h, experts=replace(e, n_ff=n_ff))


DECODERS: dict[str, Decoder] = {decoder.arch: decoder for decoder in (
    Decoder("gemma2", "neox", change=_gemma2, scales_query=True, unit="geglu", post_norm=True),
    Decoder("gemma3", "neox", change=_gemma3, qk_norm=True, scales_query=True, unit="geglu", post_norm=True),
    Decoder("gpt-oss", "neox", change=_gpt_oss, sinks=True, unit="swiglu_oai", ffn_norm="post_attention_norm"),
    Decoder("gpt2", None, "layer", change=_learned_positions, unit="gelu"),
    Decoder("llama"),       # Llama, TinyLlama, Mistral, Mixtral
    Decoder("phi2", "neox", "layer", scales_query=True, unit="gelu", ffn_norm=None),
    # Files of phi3 have the size of a window, but not the layers that use it: llama.cpp and this table ignore it.
    Decoder("phi3", "neox", change=_phi3, scales_query=True, fused_gate=True),
    Decoder("qwen2", "neox"),
    Decoder("qwen3", "neox", qk_norm=True),
    Decoder("qwen3moe", "neox", change=_qwen3moe, qk_norm=True),
)}
