"""Runs llama-style models from GGUF files: `load(path)`, `model.eval(tokens)`.

    gguf, gguf_write    the file format
    hparams, weights    what a file holds, checked and placed
    arch/, builder      graphs: a module for each architecture, and the blocks they are made of
    kvcache, model      the state of a sequence, and evaluating it
    text/               tokenizers, streams of text, chat templates
    sampling            choosing the next token
    synthetic           small random models
"""

from __future__ import annotations

from ggml_sched.llama.errors import (
    ChatTemplateError,
    ContextFull,
    ModelBusy,
    ModelClosed,
    SamplingError,
    TokenizerError,
)
from ggml_sched.llama.gguf import GGUFFile, open_gguf
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.model import Model, load
from ggml_sched.llama.sampling import Sampler, greedy
from ggml_sched.llama.synthetic import random_llama
from ggml_sched.llama.text.chat import ChatTemplate
from ggml_sched.llama.text.stream import StopStrings, Stream
from ggml_sched.llama.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "ContextFull",
    "GGUFFile",
    "Model",
    "ModelBusy",
    "ModelClosed",
    "Sampler",
    "SamplingError",
    "StopStrings",
    "Stream",
    "Tokenizer",
    "TokenizerError",
    "greedy",
    "load",
    "open_gguf",
    "random_llama",
    "write_gguf",
]
