"""Qwen2 and Qwen2.5: as llama, with biases of query, key and value, and rope that pairs elements of two halves.

Corresponds to llama.cpp's llm_build_qwen2.
"""

from __future__ import annotations

from ggml_sched.llama.arch.llama import build, weights
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, base_hparams

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    return base_hparams(file, "qwen2", mode="neox")
