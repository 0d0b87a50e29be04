"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from threading import get_ident

__all__ = ["replace_file", "write_text"]


def replace_file(path: str | os.PathLike[str], parts: Iterable[bytes]) -> None:
    """Write a file; an existing one is replaced atomically, when all parts are written.  Several writers of one path do
    not disturb each other: the file of the writer that ends last stays."""
    path = os.fspath(path)
    unfinished = f"{path}.{os.getpid()}-{get_ident()}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            file.writelines(parts)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `replace_file` does."""
    replace_file(path, [text.encode()])
