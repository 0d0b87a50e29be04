"""The architectures: for each a module with `hparams(file)`, `weights(hparams)` and `build(builder)`.

`hparams` reads a file's metadata; `weights` lists the tensors (`Spec`) that a model has; `build` adds the nodes of one
batch to a `Builder` and returns the hidden state of the output tokens after the last layer.  A new architecture needs a
module here and a line in ARCHITECTURES.
"""

from __future__ import annotations

from types import ModuleType

from ggml_sched.errors import FileFormatError
from ggml_sched.llama.arch import (
    deepseek2,
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    llama,
    mamba,
    phi2,
    phi3,
    qwen2,
    qwen3,
    qwen3moe,
)
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams

__all__ = ["ARCHITECTURES", "find", "read_hparams"]

ARCHITECTURES: dict[str, ModuleType] = {
    "deepseek2": deepseek2, "gemma2": gemma2, "gemma3": gemma3, "gpt-oss": gpt_oss, "gpt2": gpt2, "llama": llama,
    "mamba": mamba, "phi2": phi2, "phi3": phi3, "qwen2": qwen2, "qwen3": qwen3, "qwen3moe": qwen3moe}


def find(file: GGUFFile) -> tuple[str, ModuleType]:
    """The name of a file's architecture and its module; FileFormatError for an unknown one."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FileFormatError(f"{file.name}: no metadata 'general.architecture'")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise FileFormatError(f"{file.name}: unknown architecture {name!r}; known: {known}")
    return name, ARCHITECTURES[name]


def read_hparams(file: GGUFFile, name: str) -> Hparams:
    """The hyperparameters of a file of architecture `name`; FileFormatError for a missing or invalid one."""
    return ARCHITECTURES[name].hparams(file)
