"""Small random models, for first runs and tests without a download.

Owns nothing.  Invariant: the bytes depend on the arguments alone.
"""

from __future__ import annotations

import io
import math

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.graph import quants
from ggml_sched.llama.gguf_write import write_gguf

__all__ = ["as_type", "random_llama"]


def random_llama(seed: int = 0, *, n_vocab: int = 320, n_embd: int = 128, n_layer: int = 4, n_head: int = 8,
                 n_head_kv: int = 2, n_ff: int = 352, n_ctx: int = 512, n_expert: int = 0, tied: bool = False,
                 arch: str = "llama", extra: dict | None = None, dtype=np.float32) -> bytes:
    """A GGUF file of random weights, scaled so that values neither grow nor shrink from layer to layer.

    `dtype` is that of the matrices: a type's name ("f16", "q4_K"), a `Type`, or a numpy dtype; vectors and the
    experts' gate are f32.  Raises ValueError where rows do not hold whole blocks of it.
    """
    random = np.random.default_rng(seed)
    head, n_kv = n_embd // n_head, n_embd // n_head * n_head_kv

    def matrix(*shape: int, dtype=dtype):
        return as_type(random.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1])), dtype)

    def norm(width: int) -> np.ndarray:
        return 1 + 0.1 * random.standard_normal(width, np.float32)

    tensors = {"token_embd.weight": as_type(random.standard_normal((n_vocab, n_embd), np.float32), dtype),
               "output_norm.weight": norm(n_embd)}
    if not tied:
        tensors["output.weight"] = matrix(n_vocab, n_embd)
    for layer in range(n_layer):
        blk = f"blk.{layer}."
        tensors[blk + "attn_norm.weight"] = norm(n_embd)
        tensors[blk + "attn_q.weight"] = matrix(n_embd, n_embd)
        tensors[blk + "attn_k.weight"] = matrix(n_kv, n_embd)
        tensors[blk + "attn_v.weight"] = matrix(n_kv, n_embd)
        tensors[blk + "attn_output.weight"] = matrix(n_embd, n_embd)
        if arch == "qwen3":
            tensors[blk + "attn_q_norm.weight"] = norm(head)
            tensors[blk + "attn_k_norm.weight"] = norm(head)
        tensors[blk + "ffn_norm.weight"] = norm(n_embd)
        if n_expert:
            tensors[blk + "ffn_gate_inp.weight"] = matrix(n_expert, n_embd, dtype=np.float32)
        shape, suffix = ((n_expert,), "_exps") if n_expert else ((), "")
        tensors[f"{blk}ffn_gate{suffix}.weight"] = matrix(*shape, n_ff, n_embd)
        tensors[f"{blk}ffn_up{suffix}.weight"] = matrix(*shape, n_ff, n_embd)
        tensors[f"{blk}ffn_down{suffix}.weight"] = matrix(*shape, n_embd, n_ff)
    metadata = {
        "general.architecture": arch,
        f"{arch}.vocab_size": n_vocab,
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": n_head_kv,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": head,
    }
    if n_expert:
        metadata |= {f"{arch}.expert_count": n_expert, f"{arch}.expert_used_count": min(2, n_expert)}
    out = io.BytesIO()
    write_gguf(out, metadata | (extra or {}), tensors)
    return out.getvalue()


def as_type(values: np.ndarray, dtype) -> np.ndarray | tuple[Type, tuple[int, ...], np.ndarray]:
    """f32 values as `write_gguf` takes them: an array of a numpy dtype, or the blocks of a ggml type.

    `dtype` as in `random_llama`.  ValueError for an unknown name, or rows that do not hold whole blocks.
    """
    if isinstance(dtype, str):
        kind = Type.__members__.get(dtype.upper())
        if kind is None:
            raise ValueError(f"unknown type {dtype!r}; known: {', '.join(str(member) for member in Type)}")
        dtype = kind
    if not isinstance(dtype, Type):
        return values.astype(dtype)
    if dtype == Type.F32:
        return values
    if dtype == Type.F16:
        return values.astype(np.float16)
    ne = values.shape[::-1]
    if dtype == Type.BF16:
        return dtype, ne, quants.f32_to_bf16(values).view(np.uint8)
    return dtype, ne, quants.quantize(values, dtype)
