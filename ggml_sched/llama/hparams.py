"""The hyperparameters of a model, from a file's metadata.

Owns the checks.  Invariant: every number of an `Hparams` is of its type, finite, in its range
and consistent with the others, so that building a graph needs no further checks.  Corresponds to
llama.cpp's llama_hparams and load_hparams.

A feature of some architectures (windows, experts, latent attention, recurrent states) is absent by default; the
`hparams` function of an architecture's module sets it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ggml_sched.llama.gguf import Array, GGUFFile
from ggml_sched.llama.metadata import MAX_POSITION, Metadata

__all__ = ["MAX_MAGNITUDE", "Experts", "Hparams", "Latent", "Layer", "Metadata", "Rope", "Ssm", "base_hparams",
           "with_windows"]

MAX_MAGNITUDE = 1e6
"""The largest factor by which rope may multiply its result; a file with a larger one is refused."""
TINY = 1e-6
"""The smallest base of rope's frequencies and the smallest scaling factor that are used: neither may be 0."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The arguments of the rope op, named as in ggml.

    Where the op extrapolates by YaRN (`ext_factor` not 0), it multiplies `attn_factor` by YaRN's magnitude itself.
    """

    n_dims: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mode: str = "normal"
    k_first: int = 0
    """The index of the first of the n_dims elements that rope rotates, in each head of a row of the K cache."""
    log_mul: float = 0.0
    """YaRN's parameter mscale_all_dim, of DeepSeek models; 0 for others."""

    @property
    def yarn_magnitude(self) -> float:
        """The factor by which the op multiplies its result, besides attn_factor; 1 unless it extrapolates by YaRN."""
        return 1.0 + 0.1 * math.log(1.0 / self.freq_scale) if self.ext_factor else 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """The hyperparameters that may differ from layer to layer: numbers of heads, widths, attention's window in tokens
    (0: none)."""

    n_head: int = 0
    n_head_kv: int = 0
    n_ff: int = 0
    n_embd_k: int = 0
    """The width of a row of the K cache; 0 without attention."""
    n_embd_v: int = 0
    window: int = 0
    rope: Rope | None = None
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of each layer: each token uses `n_used` of `n`; `n_ff` is the inner width of an expert."""

    n: int
    n_used: int
    n_ff: int
    n_dense_layers: int = 0
    """The number of layers, from the first on, that have one feed-forward unit instead of experts."""
    n_shared: int = 0
    """Experts that every token uses; files store them as one expert, `n_shared` times as wide."""
    n_ff_shared: int = 0
    gating: str = "softmax"
    """How scores become weights: "softmax" over all experts, "sigmoid" of each, "chosen": softmax over the chosen."""
    normalise: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention: a token's keys and values are computed from a latent vector of n_kv
    elements and a part rotated by rope."""

    n_q: int
    """The rank of the queries' low-rank projection; 0 where queries are computed by one matrix."""
    n_kv: int
    head_k: int
    """The width of a head's key as attention defines it, with its rotated part of rope.n_dims elements."""
    head_v: int
    absorbed: bool
    """Whether the cache stores the latent vector, as one head; otherwise it stores the keys and values."""


@dataclass(frozen=True, slots=True)
class Ssm:
    """Sizes of a selective state space layer (mamba): width of the convolution, inner width, elements of the state for
    each inner element, and the rank of the time step dt."""

    n_conv: int
    n_inner: int
    n_state: int
    n_dt: int
    norm: bool = False
    """Whether dt, B and C are normed (FalconMamba)."""


@dataclass(frozen=True, slots=True)
class Hparams:
    """The hyperparameters of a model; `n_embd_head_k` and `_v` are the widths of one head in the K and V caches."""

    arch: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_embd_head_k: int
    n_embd_head_v: int
    norm_eps: float
    attn_scale: float
    layers: tuple[Layer, ...]
    rope: Rope | None = None
    norm: str = "rms"
    """Which norm all layers have: "rms" or "layer"."""
    experts: Experts | None = None
    latent: Latent | None = None
    ssm: Ssm | None = None
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    embd_scale: float = 1.0
    n_positions: int = 0
    """The number of learned position vectors; 0 for a model without."""
    fused_qkv: bool = False
    """Whether the matrices of query, key and value are stored as one."""
    longrope: bool = False
    """Whether there are two tables of rope factors: for contexts up to rope.n_ctx_orig, and for longer ones."""

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_head(self) -> int:
        """The largest number of query heads of a layer."""
        return max(layer.n_head for layer in self.layers)

    @property
    def n_head_kv(self) -> int:
        return max(layer.n_head_kv for layer in self.layers)

    @property
    def n_ff(self) -> int:
        return max(layer.n_ff for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        """Whether some layer has a recurrent state."""
        return any(layer.recurrent for layer in self.layers)


def base_hparams(file: GGUFFile, arch: str, *, norm: str = "rms", mode: str | None = "normal") -> Hparams:
    """The hyperparameters under the names that most architectures share.

    `mode`: of rope, None for a model without rope.  Raises FileFormatError for a missing or invalid hyperparameter.
    """
    meta = Metadata(file, arch)
    n_embd = meta.integer("embedding_length")
    # A layer has at least one tensor: `high` bounds the memory that a hostile file can make us allocate for its layers.
    n_layer = meta.integer("block_count", high=max(len(file.tensors), 1))
    heads = meta.integers("attention.head_count", n_layer)
    heads_kv = meta.integers("attention.head_count_kv", n_layer) if meta.has("attention.head_count_kv") else heads
    widths = meta.integers("feed_forward_length", n_layer)
    for n_head, n_head_kv in zip(heads, heads_kv, strict=True):
        if n_head % n_head_kv:
            raise meta.error(f"{n_head} heads do not share {n_head_kv} heads of keys and values evenly")
    if n_embd % heads[0] and not meta.has("attention.key_length"):
        raise meta.error(f"an embedding of {n_embd} does not split into {heads[0]} heads")
    head = n_embd // heads[0] or None
    head_k = meta.integer("attention.key_length", head)
    head_v = meta.integer("attention.value_length", head)
    n_ctx_train = meta.integer("context_length", high=MAX_POSITION)
    rope = read_rope(meta, head_k, n_ctx_train, mode) if mode else None
    return Hparams(
        arch=arch,
        n_vocab=n_vocab(meta),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_embd_head_k=head_k,
        n_embd_head_v=head_v,
        norm=norm,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon" if norm == "rms" else "attention.layer_norm_epsilon",
                             high=1.0),
        attn_scale=1.0 / math.sqrt(head_k),
        layers=tuple(Layer(n_head, n_head_kv, n_ff, head_k * n_head_kv, head_v * n_head_kv, 0, rope)
                     for n_head, n_head_kv, n_ff in zip(heads, heads_kv, widths, strict=True)),
        rope=rope,
        experts=read_experts(meta, widths[0]),
        fused_qkv="blk.0.attn_qkv.weight" in file.tensors,
        longrope=mode is not None and meta.string("rope.scaling.type", "linear") == "longrope",
    )


def n_vocab(meta: Metadata) -> int:
    """The size of the vocabulary: from the metadata, else the number of listed tokens, else of the embedding's rows."""
    tensors = meta.file.tensors
    rows = tensors["token_embd.weight"].ne[1:2] if "token_embd.weight" in tensors else ()
    tokens = meta.file.metadata.get("tokenizer.ggml.tokens")
    default = len(tokens) if isinstance(tokens, Array) and len(tokens) else rows[0] if rows else None
    return meta.integer("vocab_size", default, high=MAX_POSITION)


def read_experts(meta: Metadata, n_ff: int) -> Experts | None:
    """The experts of a model, by the metadata that Mixtral's files have; None for a model without.  `n_ff`: the width
    of an expert."""
    n, n_used = meta.integer("expert_count", 0, low=0), meta.integer("expert_used_count", 0, low=0)
    if n_used > n or (n and not n_used):
        raise meta.error(f"{n_used} of {n} experts are used")
    return Experts(n, n_used, n_ff) if n else None


def with_windows(h: Hparams, meta: Metadata, window: int, period: int, rope: Rope | None = None) -> Hparams:
    """The hyperparameters with sliding windows: in all but the last of each `period` layers, or in the layers that the
    file names.

    `rope`: the arguments of rope in layers with a window, None for those of all layers; if the file has a frequency
    base for such layers, it replaces the one of `rope`.
    """
    rope = rope or h.rope
    assert rope is not None     # models without rope have no windows
    rope = replace(rope, freq_base=meta.number("rope.freq_base_swa", rope.freq_base, low=TINY))
    has = meta.pattern("attention.sliding_window_pattern", h.n_layer, period)
    return replace(h, layers=tuple(replace(layer, window=window, rope=rope) if windowed else layer
                                   for layer, windowed in zip(h.layers, has, strict=True)))


# -- rope ---------------------------------------------------------------------------------


def read_rope(meta: Metadata, head_k: int, n_ctx_train: int, mode: str) -> Rope:
    n_dims = meta.integer("rope.dimension_count", head_k, high=head_k)
    if n_dims % 2:
        raise meta.error(f"rope turns {n_dims} dimensions: not an even number")
    kind = meta.string("rope.scaling.type", "linear")
    # Older files have the factor of linear scaling under another name, rope.scale_linear.
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)) or 1.0
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise meta.error(f"rope scaling {kind!r}; known: none, linear, yarn, longrope")
    freq_scale = 1.0 if kind == "none" else 1.0 / max(factor, TINY)
    # Like llama.cpp for these architectures, this does not read rope.scaling.yarn_ext_factor and similar keys.
    ext_factor = 1.0 if kind == "yarn" else 0.0
    log_mul = 0.0
    if meta.arch == "deepseek2":
        # Files of this architecture store log_mul multiplied by 0.1.
        log_mul = meta.number("rope.scaling.yarn_log_multiplier", 0.0, high=100.0) / 0.1
    # With log_mul the factor is the quotient of the magnitudes by mscale and mscale_all_dim: 1, as files of DeepSeek 2
    # have one number for both.
    attn_factor = magnitude(1.0 / freq_scale) if ext_factor and not log_mul else 1.0
    rope = Rope(
        n_dims=n_dims,
        n_ctx_orig=meta.integer("rope.scaling.original_context_length", n_ctx_train, high=MAX_POSITION),
        freq_base=meta.number("rope.freq_base", 10000.0, low=TINY),
        freq_scale=freq_scale,
        ext_factor=ext_factor,
        attn_factor=attn_factor * meta.number("rope.scaling.attn_factor", 1.0, high=MAX_MAGNITUDE),
        mode=mode,
        log_mul=log_mul,
    )
    if not rope.yarn_magnitude > 0:
        raise meta.error(f"rope scaling by {factor:g} turns YaRN's magnitude to {rope.yarn_magnitude:g}")
    return replace(rope, attn_factor=rope.attn_factor / rope.yarn_magnitude)


def magnitude(factor: float) -> float:
    """YaRN's multiplier of rope's result, for contexts `factor` times as long as the original one."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
