"""Runs llama-style models from GGUF files: `load(path)`, `model.eval(tokens)`.

    gguf, gguf_write    the file format
    hparams, weights    hyperparameters and weights of a file, checked; weights placed on backends
    arch/, builder      graphs: a module for each architecture, and the blocks that build them
    kvcache, _cells     keys and values of tokens, and which row of the cache holds which token
    load, runner        loading a file onto backends; running batches
    unloaded            the graphs of a file that is not loaded
    model, sequences    evaluating tokens and text; state: sequences as files
    generation          ids and text, one token after another, as they are generated
    memory              the bytes that a model holds on each backend
    limits, limited     limits of memory; loading under one
    residency           which weights stay in memory, and which are fetched in each evaluation
    defaults            default and named backends, default placement
    text/               tokenizers, streams of text, chat templates
    sampling            choosing the next token
    synthetic           small random models
    small, data/        a small trained model
    installed           trained models in other packages, by short names
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ggml_sched._late import homes_of as _homes_of
from ggml_sched._late import late as _late
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.errors import (
    ChatTemplateError,
    ContextFull,
    ModelBusy,
    ModelClosed,
    ModelNotInstalled,
    SamplingError,
    SequenceError,
    StateFormatError,
    TokenizerError,
)
from ggml_sched.llama.generation import Generation
from ggml_sched.llama.gguf import GGUFFile, open_gguf
from ggml_sched.llama.limits import process_budget
from ggml_sched.llama.load import load
from ggml_sched.llama.memory import Memory
from ggml_sched.llama.model import Model
from ggml_sched.llama.sampling import Sampler, greedy
from ggml_sched.llama.sequences import Sequence
from ggml_sched.llama.text.chat import ChatTemplate
from ggml_sched.llama.text.stream import StopStrings, Stream
from ggml_sched.llama.text.tokenizer import Tokenizer

__all__ = [
    "SMALL_PROMPT",
    "Batch",
    "ChatTemplate",
    "ChatTemplateError",
    "ContextFull",
    "GGUFFile",
    "Generation",
    "Memory",
    "Model",
    "ModelBusy",
    "ModelClosed",
    "ModelNotInstalled",
    "Residency",
    "Sampler",
    "SamplingError",
    "Sequence",
    "SequenceError",
    "StateFormatError",
    "StopStrings",
    "Stream",
    "Tokenizer",
    "TokenizerError",
    "greedy",
    "installed_model",
    "load",
    "model_graphs",
    "open_gguf",
    "process_budget",
    "random_llama",
    "small_model",
    "write_gguf",
]

# The modules of these names are imported when a name is first used: most programs that run a model need none of them.
_HOMES = _homes_of({
    "ggml_sched.llama.gguf_write": ("write_gguf",),
    "ggml_sched.llama.installed": ("installed_model",),
    "ggml_sched.llama.residency": ("Residency",),
    "ggml_sched.llama.small": ("SMALL_PROMPT", "small_model"),
    "ggml_sched.llama.synthetic": ("random_llama",),
    "ggml_sched.llama.unloaded": ("model_graphs",),
})

if _TYPE_CHECKING:
    from ggml_sched.llama.gguf_write import write_gguf
    from ggml_sched.llama.installed import installed_model
    from ggml_sched.llama.residency import Residency
    from ggml_sched.llama.small import SMALL_PROMPT, small_model
    from ggml_sched.llama.synthetic import random_llama
    from ggml_sched.llama.unloaded import model_graphs


def __getattr__(name: str) -> object:
    return _late(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__.copy()
