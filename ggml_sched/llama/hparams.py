"""The hyperparameters of a model, from a file's metadata.

Owns their checking.  Invariant: every number of an `Hparams` is of its type, finite, in its range
and consistent with the others, so that building a graph needs no further checks.  Corresponds to
llama.cpp's llama_hparams and load_hparams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ggml_sched.errors import FileFormatError
from ggml_sched.llama.gguf import Array, GGUFFile

__all__ = ["Hparams", "Metadata", "Rope", "read_hparams"]

MAX_EXTENT = 1 << 24
"""No width, head count or vocabulary is larger."""
MAX_POSITION = (1 << 31) - 1
MAX_F32 = 3.4028234e38


@dataclass(frozen=True, slots=True)
class Rope:
    """The arguments of the rope op."""

    n_dims: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Hparams:
    """A transformer's sizes; `n_embd_head_k` and `_v` are the widths of one head."""

    arch: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    norm_eps: float
    attn_scale: float
    rope: Rope
    n_expert: int = 0
    n_expert_used: int = 0

    @property
    def n_embd_k(self) -> int:
        """The width of a row of the K cache."""
        return self.n_embd_head_k * self.n_head_kv

    @property
    def n_embd_v(self) -> int:
        """The width of a row of the V cache."""
        return self.n_embd_head_v * self.n_head_kv


class Metadata:
    """Typed, checked reads of a file's metadata; `{arch}.` is put before the keys."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def fail(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.file.name}: {what}")

    def _get(self, key: str, default):
        key = f"{self.arch}.{key}"
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self.fail(f"no metadata {key!r}, which architecture {self.arch!r} needs")
        return key, value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_EXTENT) -> int:
        """An int in low .. high; given for each layer, it must be the same for all."""
        key, value = self._get(key, default)
        if isinstance(value, Array):
            values = set(value) if 1 <= len(value) <= 1 << 16 else set()
            if len(values) != 1:
                raise self.fail(f"metadata {key!r} differs from layer to layer, which is not supported")
            value = values.pop()
        if type(value) is not int or not low <= value <= high:
            raise self.fail(f"metadata {key!r} is {value!r}, not an integer in {low} .. {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0,
               high: float = MAX_F32) -> float:
        """A finite float in low .. high."""
        key, value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.fail(f"metadata {key!r} is {value!r}, not a number in {low:g} .. {high:g}")
        return float(value)

    def string(self, key: str, default: str | None = None) -> str:
        key, value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"metadata {key!r} is {value!r}, not a string")
        return value


def read_hparams(file: GGUFFile, arch: str) -> Hparams:
    """The hyperparameters under the names that most architectures share.

    Raises FileFormatError for a missing or senseless one.
    """
    meta = Metadata(file, arch)
    n_embd = meta.integer("embedding_length")
    n_head = meta.integer("attention.head_count")
    n_head_kv = meta.integer("attention.head_count_kv", n_head)
    if n_head % n_head_kv:
        raise meta.fail(f"{n_head} heads do not share {n_head_kv} heads of keys and values evenly")
    if n_embd % n_head and f"{arch}.attention.key_length" not in file.metadata:
        raise meta.fail(f"an embedding of {n_embd} does not split into {n_head} heads")
    head = n_embd // n_head or None
    head_k = meta.integer("attention.key_length", head)
    n_ctx_train = meta.integer("context_length", high=MAX_POSITION)
    n_expert = meta.integer("expert_count", 0, low=0)
    n_expert_used = meta.integer("expert_used_count", 0, low=0)
    if n_expert_used > n_expert or (n_expert and not n_expert_used):
        raise meta.fail(f"{n_expert_used} of {n_expert} experts are used")
    return Hparams(
        arch=arch,
        n_vocab=_n_vocab(meta),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        # More layers than tensors cannot be, and nothing is made for layers before this is known.
        n_layer=meta.integer("block_count", high=max(len(file.tensors), 1)),
        n_ff=meta.integer("feed_forward_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_embd_head_k=head_k,
        n_embd_head_v=meta.integer("attention.value_length", head),
        norm_eps=meta.number("attention.layer_norm_rms_epsilon", high=1.0),
        attn_scale=meta.number("attention.scale", 1.0 / math.sqrt(head_k)),
        rope=_rope(meta, head_k, n_ctx_train),
        n_expert=n_expert,
        n_expert_used=n_expert_used,
    )


def _n_vocab(meta: Metadata) -> int:
    tensors = meta.file.tensors
    rows = tensors["token_embd.weight"].ne[1:2] if "token_embd.weight" in tensors else ()
    tokens = meta.file.metadata.get("tokenizer.ggml.tokens")
    default = len(tokens) if isinstance(tokens, Array) and len(tokens) else rows[0] if rows else None
    return meta.integer("vocab_size", default, high=MAX_POSITION)


def _rope(meta: Metadata, head_k: int, n_ctx_train: int) -> Rope:
    n_dims = meta.integer("rope.dimension_count", head_k, high=head_k)
    if n_dims % 2:
        raise meta.fail(f"rope turns {n_dims} dimensions: not an even number")
    tiny = 1e-6
    kind = meta.string("rope.scaling.type", "linear")
    # Older files have the factor of linear scaling under a name of its own.
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise meta.fail(f"rope scaling {kind!r}; known: none, linear, yarn")
    attn_factor = meta.number("rope.scaling.yarn_attn_factor", 1.0)
    return Rope(
        n_dims=n_dims,
        n_ctx_orig=meta.integer("rope.scaling.original_context_length", n_ctx_train, high=MAX_POSITION),
        freq_base=meta.number("rope.freq_base", 10000.0, low=tiny),
        freq_scale=1.0 if kind == "none" else 1.0 / max(factor, tiny),
        ext_factor=meta.number("rope.scaling.yarn_ext_factor", 1.0, low=-1.0) if kind == "yarn" else 0.0,
        attn_factor=meta.number("rope.scaling.attn_factor", attn_factor),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
    )
