"""Functions that several architectures use: for the lists of their weights, and `layers`, which builds the usual
layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ggml_sched._graph import Tensor
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.weights import Spec

__all__ = ["around_layers", "attention_weights", "expert_weights", "gated_weights", "layers", "linear_weights",
           "norm_weights"]


def linear_weights(prefix: str, n_in: int, n_out: int, layer: int | None = None,
                   required: bool = True) -> Iterator[Spec]:
    """A matrix and its bias, which may be missing in a file; `layer`: None for a matrix outside the layers."""
    yield Spec(f"{prefix}.weight", (n_in, n_out), layer, required)
    yield Spec(f"{prefix}.bias", (n_out,), layer, required=False)


def norm_weights(h: Hparams, prefix: str, width: int, layer: int | None = None) -> Iterator[Spec]:
    """The weight of a norm of rows of `width` elements, and its bias if the model has layer norms, not RMS norms."""
    yield Spec(f"{prefix}.weight", (width,), layer)
    if h.norm == "layer":
        yield Spec(f"{prefix}.bias", (width,), layer)


def around_layers(h: Hparams) -> Iterator[Spec]:
    """The weights outside the layers: embedding, last norm, output matrix (a file whose output is tied to the embedding
    has none), and factors of rope frequencies."""
    yield Spec("token_embd.weight", (h.n_embd, h.n_vocab))
    yield from norm_weights(h, "output_norm", h.n_embd)
    yield from linear_weights("output", h.n_embd, h.n_vocab, required=False)
    if h.rope is None:
        return
    yield Spec("rope_freqs.weight", (h.rope.n_dims // 2,), required=False)
    # A file may have these two tables without using them: they are required only in a model with longrope.
    yield Spec("rope_factors_long.weight", (h.rope.n_dims // 2,), required=h.longrope)
    yield Spec("rope_factors_short.weight", (h.rope.n_dims // 2,), required=h.longrope)


def attention_weights(h: Hparams, layer: int) -> Iterator[Spec]:
    """The weights of attention: norm, query, key and value (or one matrix for the three), and output."""
    at, prefix = h.layers[layer], f"blk.{layer}.attn_"
    n_q = h.n_embd_head_k * at.n_head
    yield from norm_weights(h, prefix + "norm", h.n_embd, layer)
    if h.fused_qkv:
        yield from linear_weights(prefix + "qkv", h.n_embd, n_q + at.n_embd_k + at.n_embd_v, layer)
    else:
        yield from linear_weights(prefix + "q", h.n_embd, n_q, layer)
        yield from linear_weights(prefix + "k", h.n_embd, at.n_embd_k, layer)
        yield from linear_weights(prefix + "v", h.n_embd, at.n_embd_v, layer)
    yield from linear_weights(prefix + "output", h.n_embd_head_v * at.n_head, h.n_embd, layer)


def gated_weights(prefix: str, n_embd: int, n_ff: int, layer: int, suffix: str = "") -> Iterator[Spec]:
    """The matrices of a gated feed-forward unit; their names are gate, up and down, each with `suffix`."""
    yield from linear_weights(f"{prefix}gate{suffix}", n_embd, n_ff, layer)
    yield from linear_weights(f"{prefix}up{suffix}", n_embd, n_ff, layer)
    yield from linear_weights(f"{prefix}down{suffix}", n_ff, n_embd, layer)


def expert_weights(h: Hparams, layer: int, biased: bool = False) -> Iterator[Spec]:
    """The weights of a layer's experts: the router's matrix, and for all experts together the matrices of their gated
    units; `biased`: also a bias for each of these matrices."""
    assert h.experts is not None
    e, prefix = h.experts, f"blk.{layer}.ffn_"
    matrices = (("gate_inp", (h.n_embd, e.n)), ("gate_exps", (h.n_embd, e.n_ff, e.n)),
                ("up_exps", (h.n_embd, e.n_ff, e.n)), ("down_exps", (e.n_ff, h.n_embd, e.n)))
    for name, ne in matrices:
        yield Spec(f"{prefix}{name}.weight", ne, layer)
        if biased:
            yield Spec(f"{prefix}{name}.bias", ne[1:], layer)


Block: TypeAlias = Callable[[Builder, Tensor, int], Tensor]
"""`block(b, x, layer)`: appends a part of a layer to the graph; x is [n_embd, n_tokens], and so is the result."""


def layers(b: Builder, x: Tensor, attend: Block, feed_forward: Block, ffn_norm: str | None = "ffn_norm",
           post_norm: bool = False) -> Tensor:
    """All layers of a model: each computes x + attend(norm(x)), and from that x + feed_forward(norm(x)).

    `attend(b, x, layer)` builds attention including its output matrix, `feed_forward(b, x, layer)` the feed-forward
    unit; each returns a tensor of the shape of x[n_embd, n_tokens].  `ffn_norm` is the name of the weight of the norm
    before the feed-forward unit; None: the unit reads the same norm of x as attention.  `post_norm`: the results of
    `attend` and `feed_forward` are normed before they are added.
    """
    for layer in range(b.hparams.n_layer):
        prefix = f"blk.{layer}."
        residual, normed = x, b.norm(x, prefix + "attn_norm", "attn_norm", layer)
        x = attend(b, normed, layer)
        if ffn_norm is None:
            x, residual, normed = b.wanted(layer, x, residual, normed)
            x = b.add(b.ctx.add(x, feed_forward(b, normed, layer)), residual, "l_out", layer)
            continue
        x, residual = b.wanted(layer, x, residual)
        if post_norm:
            x = b.norm(x, prefix + "post_attention_norm", "attn_post_norm", layer)
        residual = b.add(x, residual, "sa_out" if post_norm else "ffn_inp", layer)
        name = "ffn_norm" if ffn_norm == "ffn_norm" else "attn_post_norm"
        x = feed_forward(b, b.norm(residual, prefix + ffn_norm, name, layer), layer)
        if post_norm:
            x = b.norm(x, prefix + "post_ffw_norm", "ffn_post_norm", layer)
        x = b.add(x, residual, "l_out", layer)
    return x
