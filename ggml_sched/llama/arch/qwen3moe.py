"""Qwen3 with experts; files have a separate number for the width of an expert.

Corresponds to llama.cpp's llm_build_qwen3moe.
"""

from __future__ import annotations

from dataclasses import replace

from ggml_sched.llama.arch.qwen3 import build, weights
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, Metadata, base_hparams

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    h, meta = base_hparams(file, "qwen3moe", mode="neox"), Metadata(file, "qwen3moe")
    if h.experts is None:
        raise meta.fail("no experts, which architecture 'qwen3moe' needs")
    # Older files lack that number: there the experts of one token together are as wide as feed_forward_length.
    n_ff = meta.integer("expert_feed_forward_length", 0, low=0) or h.n_ff // h.experts.n_used
    return replace(h, experts=replace(h.experts, n_ff=n_ff))
