"""What architectures share: lists of weights, and the layer that most of them use."""

from __future__ import annotations

from collections.abc import Iterator

from ggml_sched._graph import Tensor
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.experts import experts
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.weights import Spec

__all__ = ["around_layers", "attention", "expert_weights", "feed_forward", "gated", "linear", "mixed_or_gated", "norm",
           "pre_norm_layers", "qkv"]


def linear(prefix: str, n_in: int, n_out: int, layer: int | None = None,
           required: bool = True) -> Iterator[Spec]:
    """A matrix, and a bias that may be missing."""
    yield Spec(f"{prefix}.weight", (n_in, n_out), layer, required)
    yield Spec(f"{prefix}.bias", (n_out,), layer, required=False)


def norm(h: Hparams, prefix: str, width: int, layer: int | None = None) -> Iterator[Spec]:
    """The weight of a norm, and the bias of a layer norm."""
    yield Spec(f"{prefix}.weight", (width,), layer)
    if h.norm == "layer":
        yield Spec(f"{prefix}.bias", (width,), layer)


def around_layers(h: Hparams) -> Iterator[Spec]:
    """Embedding, last norm, output matrix (missing when tied to the embedding), factors of rope frequencies."""
    yield Spec("token_embd.weight", (h.n_embd, h.n_vocab))
    yield from norm(h, "output_norm", h.n_embd)
    yield from linear("output", h.n_embd, h.n_vocab, required=False)
    if h.rope is None:
        return
    yield Spec("rope_freqs.weight", (h.rope.n_dims // 2,), required=False)
    # A file may have these tables without using them; they are required only if it uses them.
    yield Spec("rope_factors_long.weight", (h.rope.n_dims // 2,), required=h.longrope)
    yield Spec("rope_factors_short.weight", (h.rope.n_dims // 2,), required=h.longrope)


def qkv(h: Hparams, layer: int) -> Iterator[Spec]:
    """The matrices of query, key and value, or one matrix for the three."""
    at, prefix = h.layers[layer], f"blk.{layer}.attn_"
    n_q = h.n_embd_head_k * at.n_head
    if h.fused_qkv:
        yield from linear(prefix + "qkv", h.n_embd, n_q + at.n_embd_k + at.n_embd_v, layer)
        return
    yield from linear(prefix + "q", h.n_embd, n_q, layer)
    yield from linear(prefix + "k", h.n_embd, at.n_embd_k, layer)
    yield from linear(prefix + "v", h.n_embd, at.n_embd_v, layer)


def attention(h: Hparams, layer: int) -> Iterator[Spec]:
    """The weights of attention: norm, query, key, value and output."""
    yield from norm(h, f"blk.{layer}.attn_norm", h.n_embd, layer)
    yield from qkv(h, layer)
    yield from linear(f"blk.{layer}.attn_output", h.n_embd_head_v * h.layers[layer].n_head, h.n_embd, layer)


def gated(prefix: str, n_embd: int, n_ff: int, layer: int, suffix: str = "") -> Iterator[Spec]:
    """The matrices of a gated unit; `suffix` is added to each name."""
    yield from linear(f"{prefix}gate{suffix}", n_embd, n_ff, layer)
    yield from linear(f"{prefix}up{suffix}", n_embd, n_ff, layer)
    yield from linear(f"{prefix}down{suffix}", n_ff, n_embd, layer)


def expert_weights(h: Hparams, layer: int) -> Iterator[Spec]:
    """A router and the experts' gated units."""
    e, prefix = h.experts, f"blk.{layer}.ffn_"
    yield Spec(prefix + "gate_inp.weight", (h.n_embd, e.n), layer)
    yield Spec(prefix + "gate_exps.weight", (h.n_embd, e.n_ff, e.n), layer)
    yield Spec(prefix + "up_exps.weight", (h.n_embd, e.n_ff, e.n), layer)
    yield Spec(prefix + "down_exps.weight", (e.n_ff, h.n_embd, e.n), layer)


def feed_forward(h: Hparams, layer: int) -> Iterator[Spec]:
    """The weights of the feed-forward norm and of `mixed_or_gated`."""
    yield from norm(h, f"blk.{layer}.ffn_norm", h.n_embd, layer)
    if h.experts:
        yield from expert_weights(h, layer)
    else:
        yield from gated(f"blk.{layer}.ffn_", h.n_embd, h.layers[layer].n_ff, layer)


def mixed_or_gated(b: Builder, x: Tensor, layer: int) -> Tensor:
    """Experts if the model has them, else a swiglu unit."""
    return experts(b, x, layer) if b.hparams.experts else b.gated(x, layer)


def pre_norm_layers(b: Builder, x: Tensor, attend, feed_forward=mixed_or_gated) -> Tensor:
    """Layers of x + attention(norm(x)), then x + feed_forward(norm(x)).

    `attend(b, x, layer)` builds attention including its output matrix, `feed_forward(b, x, layer)` the feed-forward
    unit; each returns a tensor of the shape of x.
    """
    for layer in range(b.hparams.n_layer):
        prefix = f"blk.{layer}."
        residual = x
        x = attend(b, b.norm(x, prefix + "attn_norm", "attn_norm", layer), layer)
        x, residual = b.wanted(layer, x, residual)
        residual = b.add(x, residual, "ffn_inp", layer)
        x = feed_forward(b, b.norm(residual, prefix + "ffn_norm", "ffn_norm", layer), layer)
        x = b.add(x, residual, "l_out", layer)
    return x
