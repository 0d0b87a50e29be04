"""Model files without weights: metadata and tensor shapes are real, data are holes of a sparse file. llama.cpp opens
them, reserves and plans as for the real models; all weights read as zeros.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.synthetic import is_matrix, outline

__all__ = ["GRAPHS", "OTHERS", "VOCABULARIES", "write"]

RMS, NORM = {"attention.layer_norm_rms_epsilon": 1e-5}, {"attention.layer_norm_epsilon": 1e-5}
BIASES = ("qkv.bias", "attn_output.bias", "up.bias", "down.bias")


def _sizes(vocab: int, ctx: int, width: int, layers: int, hidden: int, heads: int, kv: int | None = None,
           head: int | None = None) -> dict:
    sizes = {"vocab_size": vocab, "context_length": ctx, "embedding_length": width, "block_count": layers,
             "feed_forward_length": hidden, "attention.head_count": heads, "attention.head_count_kv": kv or heads}
    if head:
        sizes |= {"attention.key_length": head, "attention.value_length": head}
    return sizes


GRAPHS = {
    "gpt2-124m": ("gpt2", {**_sizes(50257, 1024, 768, 12, 3072, 12), **NORM}, BIASES, True),
    "llama-160m": ("llama", {**_sizes(32000, 2048, 768, 12, 3072, 12), **RMS}, (), False),
    "tinyllama-1.1b": ("llama", {**_sizes(32000, 2048, 2048, 22, 5632, 32, 4), **RMS}, (), False),
    "mamba-1.4b": ("mamba", {**_sizes(50280, 2048, 2048, 48, 0, 1), **RMS, "attention.head_count": 0,
                             "attention.head_count_kv": None, "ssm.conv_kernel": 4, "ssm.inner_size": 4096,
                             "ssm.state_size": 16, "ssm.time_step_rank": 128}, (), True),
    "phi2-2.7b": ("phi2", {**_sizes(51200, 2048, 2560, 32, 10240, 32), **NORM, "rope.dimension_count": 32},
                  (".bias",), False),
    "llama-2-7b": ("llama", {**_sizes(32000, 4096, 4096, 32, 11008, 32), **RMS}, (), False),
    "mixtral-8x7b": ("llama", {**_sizes(32000, 32768, 4096, 32, 14336, 32, 8), **RMS, "expert_count": 8,
                               "expert_used_count": 2, "rope.freq_base": 1e6}, (), False),
}
"""Models of the recorded graphs: architecture, metadata, parts of the names of optional tensors, whether without an
output."""

VOCABULARIES = {
    "smollm2-135m": ("llama", {**_sizes(49152, 8192, 576, 30, 1536, 9, 3), **RMS, "rope.freq_base": 1e5}, (), True),
    "gemma3-270m": ("gemma3", {**_sizes(262144, 32768, 640, 18, 2048, 4, 1, 256), **RMS,
                               "attention.sliding_window": 512, "rope.freq_base": 1e6}, (), True),
}
"""Models of a large vocabulary and few, narrow layers, likewise: rows of logits are nearly all that is reserved."""

OTHERS = {
    "qwen3-8b": ("qwen3", {**_sizes(151936, 40960, 4096, 36, 12288, 32, 8, 128), **RMS}, (), False),
    "gemma2-9b": ("gemma2", {**_sizes(256000, 8192, 3584, 42, 14336, 16, 8, 256), **RMS,
                             "attention.sliding_window": 4096, "attn_logit_softcapping": 50.0,
                             "final_logit_softcapping": 30.0}, (), True),
    "gemma3-4b": ("gemma3", {**_sizes(262144, 131072, 2560, 34, 10240, 8, 4, 256), **RMS,
                             "attention.sliding_window": 1024, "rope.freq_base": 1e6}, (), True),
    "phi3-mini": ("phi3", {**_sizes(32064, 4096, 3072, 32, 8192, 32), **RMS, "attention.sliding_window": 2047}, (),
                  False),
    "qwen3moe-30b": ("qwen3moe", {**_sizes(151936, 40960, 2048, 48, 6144, 32, 4, 128), **RMS, "expert_count": 128,
                                  "expert_used_count": 8, "expert_feed_forward_length": 768}, (), False),
    "gpt-oss-20b": ("gpt-oss", {**_sizes(201088, 131072, 2880, 24, 2880, 64, 8, 64), **RMS, "expert_count": 32,
                                "expert_used_count": 4, "expert_feed_forward_length": 2880,
                                "attention.sliding_window": 128, "rope.scaling.type": "yarn",
                                "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
                    ("attn", "ffn"), False),
    "deepseek2-lite": ("deepseek2", {**_sizes(102400, 163840, 2048, 27, 10944, 16), **RMS,
                                     "attention.kv_lora_rank": 512, "attention.key_length": 192,
                                     "attention.value_length": 128, "rope.dimension_count": 64,
                                     "leading_dense_block_count": 1, "expert_count": 64, "expert_used_count": 6,
                                     "expert_feed_forward_length": 1408, "expert_shared_count": 2,
                                     "expert_weights_scale": 1.0}, (), False),
}
"""Models of other architectures, likewise."""


class _Holes:
    """A file in which all bytes written after the head become a hole."""

    def __init__(self, file) -> None:
        self.file, self.size = file, 0

    def write(self, data) -> None:
        if self.size == 0:
            self.file.write(data)
        self.size += len(data)


def write(name: str, folder: Path, dtype: str = "q4_0", model: tuple | None = None) -> Path:
    """The path of a model's file, written unless it exists; matrices have type `dtype` where the row length permits.
    `model`: the entry of a table like those here, for a name that none of them has."""
    path = folder / f"{name}.gguf"
    if path.exists():
        return path
    arch, metadata, optional, tied = model or (GRAPHS | VOCABULARIES | OTHERS)[name]
    values, specs = outline(arch, metadata, optional=optional, tied=tied)
    kinds = [Type[dtype.upper()] if is_matrix(spec) and spec.ne[0] % Type[dtype.upper()].block_size == 0 else Type.F32
             for spec in specs]
    sizes = [kind.type_size * int(np.prod(spec.ne, dtype=object)) // kind.block_size
             for kind, spec in zip(kinds, specs, strict=True)]
    nothing = memoryview(np.zeros(max(sizes), np.uint8))        # untouched pages
    tensors = {spec.name: (kind, spec.ne, nothing[:size])
               for spec, kind, size in zip(specs, kinds, sizes, strict=True)}
    fresh = path.with_suffix(".new")
    with open(fresh, "wb") as file:
        holes = _Holes(file)
        write_gguf(holes, values, tensors)
        file.truncate(holes.size)
    fresh.replace(path)
    return path
