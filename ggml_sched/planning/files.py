"""Text files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["write_text"]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8; an existing file is replaced atomically."""
    path = os.fspath(path)
    unfinished = f"{path}.unfinished"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
