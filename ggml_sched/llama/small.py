"""The small model that comes with the package: its path, and a prompt that shows what it can.

Owns nothing.  Invariant: the file is a llama with its tokenizer, 2 MB at most, trained by
`tools/train_small_model.py` on Python's standard library.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["SMALL_PROMPT", "small_model"]

SMALL_PROMPT = "    def __init__(self, name, value):"
"""A line of Python: it ends where a token ends, and its names come back in what follows."""


def small_model() -> Path:
    """The GGUF file, for `load` and other readers: it is a file of the installed package, not to be changed."""
    # The package cannot be imported from an archive (its core is compiled), so that this is a real path.
    return Path(str(files("ggml_sched.llama").joinpath("data", "small.gguf")))
