"""Runs llama-style models from GGUF files: `load(path)`, `model.eval(tokens)`.

    gguf, gguf_write    the file format
    hparams, weights    what a file holds, checked and placed
    arch/, builder      graphs: a module for each architecture, and the blocks they are made of
    kvcache, model      the state of a sequence, and evaluating it
    sampling            choosing the next token
    synthetic           small random models
    small, data/        a small trained one
"""

from __future__ import annotations

from ggml_sched.llama.errors import ContextFull, ModelBusy, ModelClosed
from ggml_sched.llama.gguf import GGUFFile, open_gguf
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.model import Model, load
from ggml_sched.llama.sampling import Sampler, greedy
from ggml_sched.llama.small import SMALL_PROMPT, small_model
from ggml_sched.llama.synthetic import random_llama

__all__ = [
    "SMALL_PROMPT",
    "ContextFull",
    "GGUFFile",
    "Model",
    "ModelBusy",
    "ModelClosed",
    "Sampler",
    "greedy",
    "load",
    "open_gguf",
    "random_llama",
    "small_model",
    "write_gguf",
]
