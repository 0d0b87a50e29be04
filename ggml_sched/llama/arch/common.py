"""Weights that architectures share."""

from __future__ import annotations

from collections.abc import Iterator

from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.weights import Spec

__all__ = ["around_layers", "attention", "feed_forward", "linear"]


def linear(prefix: str, n_in: int, n_out: int, layer: int | None = None,
           required: bool = True) -> Iterator[Spec]:
    """A matrix, and a bias that may be missing."""
    yield Spec(f"{prefix}.weight", (n_in, n_out), layer, required)
    yield Spec(f"{prefix}.bias", (n_out,), layer, required=False)


def around_layers(h: Hparams) -> Iterator[Spec]:
    """Embedding, last norm, output (missing when tied), factors of rope frequencies."""
    yield Spec("token_embd.weight", (h.n_embd, h.n_vocab))
    yield Spec("output_norm.weight", (h.n_embd,))
    yield from linear("output", h.n_embd, h.n_vocab, required=False)
    yield Spec("rope_freqs.weight", (h.rope.n_dims // 2,), required=False)


def attention(h: Hparams, layer: int) -> Iterator[Spec]:
    """Norm, query, key, value and output."""
    prefix = f"blk.{layer}.attn_"
    yield Spec(prefix + "norm.weight", (h.n_embd,), layer)
    yield from linear(prefix + "q", h.n_embd, h.n_embd_head_k * h.n_head, layer)
    yield from linear(prefix + "k", h.n_embd, h.n_embd_k, layer)
    yield from linear(prefix + "v", h.n_embd, h.n_embd_v, layer)
    yield from linear(prefix + "output", h.n_embd_head_v * h.n_head, h.n_embd, layer)


def feed_forward(h: Hparams, layer: int) -> Iterator[Spec]:
    """Norm, and a gated unit or experts."""
    prefix = f"blk.{layer}.ffn_"
    yield Spec(prefix + "norm.weight", (h.n_embd,), layer)
    if h.n_expert:
        yield Spec(prefix + "gate_inp.weight", (h.n_embd, h.n_expert), layer)
        yield Spec(prefix + "gate_exps.weight", (h.n_embd, h.n_ff, h.n_expert), layer)
        yield Spec(prefix + "up_exps.weight", (h.n_embd, h.n_ff, h.n_expert), layer)
        yield Spec(prefix + "down_exps.weight", (h.n_ff, h.n_embd, h.n_expert), layer)
        return
    yield from linear(prefix + "gate", h.n_embd, h.n_ff, layer)
    yield from linear(prefix + "up", h.n_embd, h.n_ff, layer)
    yield from linear(prefix + "down", h.n_ff, h.n_embd, layer)
