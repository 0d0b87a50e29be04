"""The architectures: for each `hparams(file)`, `weights(hparams)` and `build(builder)`.

`hparams` reads a file's metadata; `weights` lists the tensors (`Spec`) that a model has; `build` adds the nodes of one
batch to a `Builder` and returns the hidden state [n_embd, n_outputs] of the output tokens after the last layer.  A new
architecture is a row of the table in decoder.py, or a module here and a line in ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ggml_sched._graph import Tensor
from ggml_sched.errors import FileFormatError
from ggml_sched.llama.arch import deepseek2, mamba
from ggml_sched.llama.arch.decoder import DECODERS
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.weights import Spec

__all__ = ["ARCHITECTURES", "Architecture", "find"]


class Architecture(Protocol):
    def hparams(self, file: GGUFFile) -> Hparams: ...
    def weights(self, h: Hparams) -> Iterator[Spec]: ...
    def build(self, b: Builder) -> Tensor: ...


ARCHITECTURES: dict[str, Architecture] = {"deepseek2": deepseek2, **DECODERS, "mamba": mamba}


def find(file: GGUFFile) -> tuple[str, Architecture]:
    """The name of a file's architecture, and the architecture; FileFormatError for an unknown one."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FileFormatError(f"{file.name}: no metadata 'general.architecture'")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise FileFormatError(f"{file.name}: unknown architecture {name!r}; known: {known}")
    return name, ARCHITECTURES[name]
