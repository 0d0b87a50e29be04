"""Reads kernel sources and inserts their includes, so that compiler and cache receive one text for each kernel file.

Only quoted includes are inserted, each once, relative to the file that names it; `#line` lets errors name the original
file and line.
Imports nothing of the package: tools/check_cuda.py reads kernels where the package is not built.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["KERNELS", "kernel_source"]

KERNELS = Path(__file__).parent / "kernels"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.M)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once.*$", re.M)


def kernel_source(name: str, folder: Path = KERNELS) -> str:
    """The text of <folder>/<name>.cu; OSError when it or what it includes cannot be read."""
    return _expanded((Path(folder) / f"{name}.cu").resolve(), set())


def _expanded(path: Path, seen: set[Path]) -> str:
    seen.add(path)
    text = _ONCE.sub("", path.read_text(encoding="utf-8"))
    parts, end = [f'#line 1 "{path.name}"\n'], 0
    for found in _INCLUDE.finditer(text):
        parts.append(text[end:found.start()])
        other = (path.parent / found[1]).resolve()
        if other not in seen:
            parts.append(_expanded(other, seen))
        line = text.count("\n", 0, found.end()) + 2         # that of the line after the include
        parts.append(f'\n#line {line} "{path.name}"')
        end = found.end()
    parts.append(text[end:])
    return "".join(parts) + "\n"
