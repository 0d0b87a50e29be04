"""Small random models of every architecture, for first runs and tests without a download.

Invariant: the bytes of a model depend on the arguments alone.  Its tensors are those that the architecture's `weights`
lists, so that a new architecture needs only a line of metadata here.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.graph import quants
from ggml_sched.llama import arch as architectures
from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.weights import Spec

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggml_sched.llama.gguf_write import Weight
    from ggml_sched.llama.hparams import Hparams

    Dtype: TypeAlias = npt.DTypeLike | Callable[[str, np.ndarray], Weight]
    """How `random_model` stores matrices."""

__all__ = ["as_type", "is_matrix", "outline", "random_llama", "random_model"]

SIZES: dict[str, Any] = {
    "vocab_size": 64, "context_length": 128, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
LAYER_NORM: dict[str, Any] = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}

OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 8,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": {"block_count": 7, "attention.key_length": 16, "attention.value_length": 16,
               "attention.sliding_window": 8, "rope.freq_base": 1e6},
    "gpt2": {**LAYER_NORM, "attention.head_count_kv": 4},
    "gpt-oss": {**EXPERTS, "attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16},
    "mamba": {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 8,
              "feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None},
    "phi2": {**LAYER_NORM, "attention.head_count_kv": 4, "rope.dimension_count": 4},
    "phi3": {"attention.sliding_window": 8},
    "qwen3": {"attention.key_length": 16, "attention.value_length": 16},
    "qwen3moe": {**EXPERTS, "attention.key_length": 16, "attention.value_length": 16},
    "deepseek2": {**EXPERTS, "attention.head_count_kv": 4, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 16,
                  "attention.key_length": 16, "attention.value_length": 8, "rope.dimension_count": 8,
                  "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5},
}
"""{architecture: metadata of its models that SIZES lacks or has with other values; None: the key of SIZES is left out}.
"""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "phi3": ("rope_factors",), "qwen2": ("q.bias", "k.bias", "v.bias"), "phi2": (".bias",),
    "gpt2": ("qkv.bias", "attn_output.bias", "up.bias", "down.bias"), "gpt-oss": ("attn", "ffn")}
"""{architecture: parts of names}: optional tensors with such a part in their names are included, as in published
models."""


def random_llama(seed: int = 0, *, n_vocab: int = 320, n_embd: int = 128, n_layer: int = 4, n_head: int = 8,
                 n_head_kv: int = 2, n_ff: int = 352, n_ctx: int = 512, n_expert: int = 0, tied: bool = False,
                 arch: str = "llama", extra: Mapping[str, Any] | None = None,
                 dtype: Dtype = np.float32) -> bytes:
    """A GGUF file of a llama, or a similar architecture, of these sizes with random weights.

    `n_expert`: experts in each layer, of which a token uses two; `extra`: more metadata.  Other arguments as for
    `random_model`.
    """
    sizes = {"vocab_size": n_vocab, "context_length": n_ctx, "embedding_length": n_embd, "block_count": n_layer,
             "feed_forward_length": n_ff, "attention.head_count": n_head, "attention.head_count_kv": n_head_kv,
             "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": n_embd // n_head,
             "tokenizer.ggml.model": None}
    if n_expert:
        sizes |= {"expert_count": n_expert, "expert_used_count": min(2, n_expert)}
    return _file(*outline(arch, {**sizes, **(extra or {})}, tied=tied), seed, dtype)


def random_model(arch: str, seed: int = 0, *, metadata: Mapping[str, Any] | None = None, optional: Sequence[str] = (),
                 tied: bool = False, dtype: Dtype = np.float32) -> bytes:
    """A GGUF file of an architecture with random weights, scaled so that a model's values stay of the same size.

    `metadata`: keys (the prefix `{arch}.` may be left out) and values, None to leave a key out.  `optional`: parts of
    names of the optional tensors to include; `tied`: without an output matrix.  `dtype` is that of the matrices: a
    type's name ("f16", "q4_K"), a `Type`, a numpy dtype, or a function from a tensor's name and float32 array to a
    value for `write_gguf`.  ValueError where rows do not hold whole blocks of it.
    """
    values = {**SIZES, **OWN.get(arch, {}), **(metadata or {})}
    return _file(*outline(arch, values, optional=(*OPTIONAL.get(arch, ()), *optional), tied=tied), seed, dtype)


def _file(values: Mapping[str, Any], specs: list[Spec], seed: int, dtype: Dtype) -> bytes:
    tensors: dict[str, Weight] = {}
    for spec in specs:
        array = _weight(spec, seed)
        if not is_matrix(spec):
            tensors[spec.name] = array
        elif callable(dtype) and not isinstance(dtype, type):
            tensors[spec.name] = dtype(spec.name, array)
        else:
            tensors[spec.name] = as_type(array, dtype)
    out = io.BytesIO()
    write_gguf(out, values, tensors)
    return out.getvalue()


def as_type(values: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray | tuple[Type, tuple[int, ...], np.ndarray]:
    """f32 values as `write_gguf` takes them: an array of a numpy dtype, or the blocks of a ggml type.

    `dtype` as in `random_model`.  ValueError for an unknown name, or rows that do not hold whole blocks.
    """
    if isinstance(dtype, str):
        kind = Type.__members__.get(dtype.upper())
        if kind is None:
            raise ValueError(f"unknown type {dtype!r}; known: {', '.join(str(member) for member in Type)}")
    elif isinstance(dtype, Type):
        kind = dtype
    else:
        return values.astype(dtype)
    if kind == Type.F32:
        return values
    if kind == Type.F16:
        return values.astype(np.float16)
    ne = values.shape[::-1]
    if kind == Type.BF16:
        return kind, ne, quants.f32_to_bf16(values).view(np.uint8)
    return kind, ne, quants.quantize(values, kind)


def outline(arch: str, metadata: Mapping[str, Any], *, optional: Sequence[str] = (),
            tied: bool = False) -> tuple[dict[str, Any], list[Spec]]:
    """A model of an architecture without its weights: the metadata of its file, and the list of its tensors.

    The arguments are those of `random_model`, without its defaults for `metadata` and `optional`.
    """
    values: dict[str, Any] = {"general.architecture": arch, "tokenizer.ggml.model": "no_vocab"}
    for key, value in metadata.items():
        values[key if key.startswith(("general.", "tokenizer.", arch + ".")) else f"{arch}.{key}"] = value
    values = {key: value for key, value in values.items() if value is not None}
    specs = architectures.ARCHITECTURES[arch].weights(_hparams(arch, values, optional))
    return values, [spec for spec in specs if spec.required or spec.name == "output.weight" and not tied
                    or any(part in spec.name for part in optional)]


def is_matrix(spec: Spec) -> bool:
    """Whether published files store the tensor as f16 or in a quantised type; the others are stored as f32."""
    return (len(spec.ne) > 1 and spec.name.endswith(".weight") and "ssm_conv1d" not in spec.name
            and "gate_inp" not in spec.name)


def _hparams(arch: str, values: Mapping[str, Any], parts: Sequence[str]) -> Hparams:
    """The hyperparameters of these metadata values.

    Reading hyperparameters needs a file with tensors, but the list of tensors follows from the hyperparameters.  So
    they are read from a stand-in for a file, which has the names of those tensors whose presence is checked.
    """
    out = io.BytesIO()
    write_gguf(out, values, {})
    names = {"blk.0.attn_qkv.weight": arch in ("phi2", "phi3", "gpt2"),
             "rope_factors_long.weight": any("rope_factors".startswith(part) for part in parts)}
    with open_gguf(out.getvalue()) as file:
        present = dict.fromkeys((name for name, there in names.items() if there), None)
        # Stand-ins for tensors, because `hparams` refuses a file with more layers than tensors.
        present.update((f"{i}", None) for i in range(256))
        stand_in: Any = SimpleNamespace(name="random model", metadata=dict(file.metadata), tensors=present)
        return architectures.ARCHITECTURES[arch].hparams(stand_in)


def _weight(spec: Spec, seed: int) -> np.ndarray:
    """The values of one tensor, which depend on its name, its shape and the seed."""
    random = np.random.default_rng((seed, zlib.crc32(spec.name.encode())))
    values = random.standard_normal(spec.ne[::-1], np.float32)
    name = spec.name
    if name.startswith("rope_"):
        return (1 + np.abs(values) * (4 if "long" in name else 1)).astype(np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(values)
    if name.endswith("norm.weight") or name.endswith("ssm_d"):
        return 1 + np.float32(0.1) * values
    if name.startswith(("token_embd", "position_embd")) or name.endswith("sinks.weight"):
        return values
    if len(spec.ne) == 1 or name.endswith(".bias"):
        return np.float32(0.3) * values
    return values / np.float32(math.sqrt(spec.ne[0]))
