"""DeepSeek 2 and its lite variant.

Multi-head latent attention: keys and values are computed from a small latent vector and a part rotated by rope, both
shared by all heads.  A file has either the matrix that expands the latent vector (attn_kv_b: the cache stores keys and
values), or its two halves (attn_k_b is applied to the queries, attn_v_b to the result, and the cache stores the latent
vector; in the code, `absorbed`).  The first layers have one feed-forward unit; the others have routed experts, of which
each token uses a few, and shared experts that every token uses.
Corresponds to llama.cpp's llm_build_deepseek2.
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
from ggml_sched.llama.hparams import MAX_MAGNITUDE, Experts, Hparams, Latent, Metadata, base_hparams
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    h, meta = base_hparams(file, "deepseek2"), Metadata(file, "deepseek2")
    n_kv = meta.integer("attention.kv_lora_rank")
    absorbed = "blk.0.attn_k_b.weight" in file.tensors or meta.integer("attention.key_length_mla", 0, low=0) > 0
    head_k = meta.integer("attention.key_length_mla", None if absorbed else h.n_embd_head_k)
    head_v = meta.integer("attention.value_length_mla", None if absorbed else h.n_embd_head_v)
    rope = h.rope
    assert rope is not None
    if not rope.n_dims < head_k:
        raise meta.error(f"rope turns {rope.n_dims} of the {head_k} elements of a key: none are left")
    if absorbed and (h.n_head_kv != 1 or h.n_embd_head_k != n_kv + rope.n_dims or h.n_embd_head_v != n_kv):
        raise meta.error(f"latent vectors of {n_kv} elements do not fit {h.n_head_kv} heads of {h.n_embd_head_k} and "
                        f"{h.n_embd_head_v}")
    # YaRN's magnitude multiplies the whole attention score, not only the part that rope rotates.
    stretch = 0.1 * math.log(1 / rope.freq_scale)
    mscale = rope.attn_factor * (1 + stretch) * (1 + rope.log_mul * stretch)
    if not abs(mscale) < MAX_MAGNITUDE:
        raise meta.error(f"rope scaling multiplies scores by the square of {mscale:g}")
    rope = replace(rope, k_first=0 if absorbed else head_k - rope.n_dims)
    latent = Latent(meta.integer("attention.q_lora_rank", 0, low=0), n_kv, head_k, head_v, absorbed)
    return replace(h, latent=latent, rope=rope, layers=tuple(replace(layer, rope=rope) for layer in h.layers),
                   attn_scale=mscale * mscale / math.sqrt(head_k), experts=_experts(meta, h))


def _experts(meta: Metadata, h: Hparams) -> Experts | None:
    n_dense = meta.integer("leading_dense_block_count", h.n_layer if h.experts is None else 0, low=0, high=h.n_layer)
    if n_dense == h.n_layer:
        return None
    if h.experts is None:
        raise meta.error(f"{n_dense} of {h.n_layer} layers are dense, and there are no experts")
    if meta.integer("expert_group_count", 1, low=0) > 1:
        raise meta.error("groups of experts, which are not supported")
    gating = meta.integer("expert_gating_func", 1, low=0)
    if gating not in (0, 1, 2):
        raise meta.error(f"a gating function numbered {gating}; known: 1, softmax, and 2, sigmoid")
    n_ff, n_shared = meta.integer("expert_feed_forward_length"), meta.integer("expert_shared_count", 0, low=0)
    return replace(h.experts, n_ff=n_ff, n_dense_layers=n_dense, n_shared=n_shared, n_ff_shared=n_ff * n_shared,
                   gating="sigmoid" if gating == 2 else "softmax", normalise=meta.boolean("expert_weights_norm", False),
                   scale=meta.number("expert_weights_scale", 0.0) or 1.0)


def weights(h: Hparams) -> Iterator[Spec]:
    assert h.latent is not None and h.rope is not None
    m, e, n_rot = h.latent, h.experts, h.rope.n_dims
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        prefix, n_head = f"blk.{layer}.", h.layers[layer].n_head
        yield from common.norm_weights(h, prefix + "attn_norm", h.n_embd, layer)
        if m.n_q:
            yield Spec(prefix + "attn_q_a.weight", (h.n_embd, m.n_q), layer)
            yield Spec(prefix + "attn_q_a_norm.weight", (m.n_q,), layer)
            yield Spec(prefix + "attn_q_b.weight", (m.n_q, m.head_k * n_head), layer)
        else:
            yield Spec(prefix + "attn_q.weight", (h.n_embd, m.head_k * n_head), layer)
        yield Spec(prefix + "attn_kv_a_mqa.weight", (h.n_embd, m.n_kv + n_rot), layer)
        yield Spec(prefix + "attn_kv_a_norm.weight", (m.n_kv,), layer)
        if m.absorbed:
            yield Spec(prefix + "attn_k_b.weight", (m.head_k - n_rot, m.n_kv, n_head), layer)
            yield Spec(prefix + "attn_v_b.weight", (m.n_kv, m.head_v, n_head), layer)
        else:
            yield Spec(prefix + "attn_kv_b.weight", (m.n_kv, (m.head_k - n_rot + m.head_v) * n_head), layer)
        yield Spec(prefix + "attn_output.weight", (m.head_v * n_head, h.n_embd), layer)
        yield from common.norm_weights(h, prefix + "ffn_norm", h.n_embd, layer)
        if e is None or layer < e.n_dense_layers:
            yield from common.gated_weights(prefix + "ffn_", h.n_embd, h.layers[layer].n_ff, layer)
            continue
        yield from common.expert_weights(h, layer)
        yield Spec(prefix + "exp_probs_b.bias", (e.n,), layer, required=False)
        if e.n_shared:
            yield from common.gated_weights(prefix + "ffn_", h.n_embd, e.n_ff_shared, layer, "_shexp")


def attend(b: Builder, x: Tensor, layer: int) -> Tensor:
    ctx, h, m, n = b.ctx, b.hparams, b.hparams.latent, b.n_tokens
    assert m is not None and h.rope is not None
    prefix, n_head, n_rot = f"blk.{layer}.attn_", h.layers[layer].n_head, h.rope.n_dims
    n_still = m.head_k - n_rot
    if m.n_q:
        q = b.norm(b.linear(x, prefix + "q_a", "q_a", layer), prefix + "q_a_norm", "q_a_normed", layer)
        q = b.linear(q, prefix + "q_b", "q", layer)
    else:
        q = b.linear(x, prefix + "q", "q", layer)
    size = q.nb[0]
    q_still = ctx.view_3d(q, n_still, n_head, n, m.head_k * size, q.nb[1])
    q_turned = b.rope(ctx.view_3d(q, n_rot, n_head, n, m.head_k * size, q.nb[1], n_still * size), "q_pe", layer)
    both = b.linear(x, prefix + "kv_a_mqa", "kv_cmpr_pe", layer)
    latent = ctx.view_2d(both, m.n_kv, n, both.nb[1])
    k_turned = b.rope(ctx.view_3d(both, n_rot, 1, n, both.nb[1], both.nb[1], m.n_kv * size), "k_pe", layer)
    latent = b.norm(latent, prefix + "kv_a_norm", "kv_cmpr", layer)
    if m.absorbed:
        q_still = ctx.mul_mat(b.weights[prefix + "k_b.weight"], ctx.permute(q_still, 0, 2, 1, 3))
        # The rotated part comes first in a row of the cache, as in llama.cpp's.
        q = b.name(ctx.concat(q_turned, ctx.permute(q_still, 0, 2, 1, 3), 0), "Qcur", layer)
        v = ctx.reshape_3d(latent, m.n_kv, 1, n)
        k = b.name(ctx.concat(k_turned, v, 0), "Kcur", layer)
        x = b.attention(q, k, v, layer, unpack=b.weights[prefix + "v_b.weight"])
    else:
        kv = b.linear(latent, prefix + "kv_b", "kv", layer)
        width = (n_still + m.head_v) * size
        k_still = ctx.view_3d(kv, n_still, n_head, n, width, width * n_head)
        v = b.name(ctx.cont(ctx.view_3d(kv, m.head_v, n_head, n, width, width * n_head, n_still * size)), "Vcur", layer)
        q = b.name(ctx.concat(q_still, q_turned, 0), "Qcur", layer)
        k = b.name(ctx.concat(k_still, ctx.repeat(k_turned, q_turned), 0), "Kcur", layer)
        x = b.attention(q, k, v, layer)
    return b.linear(x, prefix + "output", "attn_out", layer)


def feed_forward(b: Builder, x: Tensor, layer: int) -> Tensor:
    e = b.hparams.experts
    if e is None or layer < e.n_dense_layers:
        return b.gated(x, layer)
    y = experts(b, x, layer)
    return b.add(y, b.gated(x, layer, suffix="_shexp"), "ffn_out", layer) if e.n_shared else y


def build(b: Builder) -> Tensor:
    return common.layers(b, b.embed(), attend, feed_forward)
