"""The architectures: for each a module with `weights(hparams)` and `build(builder)`.

`weights` lists the tensors (`Spec`) that a model of it has; `build` adds the nodes of one batch to
a `Builder` and returns the logits.  To add one: a module here, and a line in ARCHITECTURES.
"""

from __future__ import annotations

from types import ModuleType

from ggml_sched.errors import FileFormatError
from ggml_sched.llama.arch import llama, qwen3
from ggml_sched.llama.gguf import GGUFFile

__all__ = ["ARCHITECTURES", "find"]

ARCHITECTURES: dict[str, ModuleType] = {"llama": llama, "qwen3": qwen3}


def find(file: GGUFFile) -> tuple[str, ModuleType]:
    """The name of a file's architecture and its module; FileFormatError for an unknown one."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FileFormatError(f"{file.name}: no metadata 'general.architecture'")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise FileFormatError(f"{file.name}: unknown architecture {name!r}; known: {known}")
    return name, ARCHITECTURES[name]
