"""The small model that comes with the package: its path, and a sample prompt.

Invariant: the file is a Llama model with its tokenizer, 2 MB at most, trained by `tools/train_small_model.py` on the
source code of Python's standard library.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SMALL_PROMPT", "small_model"]

SMALL_PROMPT = "    def __init__(self, name, value):"
"""A line of Python that ends where a token ends.  The model repeats the names of this line in the text that it
generates."""


def small_model() -> Path:
    """The path of the model's GGUF file, which is part of the installed package and must not be changed."""
    from pathlib import Path  # here: importing the package then takes less time

    # A package with compiled modules cannot be imported from an archive, so this is a real path.
    return Path(os.path.dirname(__file__), "data", "small.gguf")
