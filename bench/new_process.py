"""The environment of new processes whose start, imports or first token are timed: they read bytecode.

Packages that pip installed have bytecode.  With PYTHONDONTWRITEBYTECODE a tree that is used in place has none, and each
process would compile those sources again: 100 ms for a model's, that no user waits for.
"""

from __future__ import annotations

import functools
import os
import tempfile

__all__ = ["environment"]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bytecode-")


def environment(**more: str) -> dict[str, str]:
    """This process's variables and `more`; where it may not write bytecode beside the sources, a folder for it that the
    first process fills, and that lasts as long as this one."""
    found = {**os.environ, **more}
    if found.pop("PYTHONDONTWRITEBYTECODE", ""):
        found.setdefault("PYTHONPYCACHEPREFIX", _folder().name)
    return found
