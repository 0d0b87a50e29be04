"""Reads kernel sources and inserts their includes, so that compiler and cache receive one text for each kernel file.

Only quoted includes are inserted, each once, relative to the file that names it; `#line` lets errors name the original
file and line.  Where a file's kernels come from a list, `#define LIST(X) X(name, ...) X(name, ...)`, all entries but
one can be left out: the kernels of one entry compile in a fraction of the time.
Imports nothing of the package: tools/check_cuda.py reads kernels where the package is not built.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["KERNELS", "entries", "entry_of", "kernel_source"]

KERNELS = Path(__file__).parent / "kernels"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.M)
_LIST = re.compile(r"^#define \w+\(X\)(?:(?:\s|\\\n)*X\(\w+,[^()]*\))+", re.M)
_ENTRY = re.compile(r"X\((\w+),[^()]*\)")
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once.*$", re.M)


def kernel_source(name: str, folder: Path = KERNELS, entry: str | None = None, overlap: bool = False) -> str:
    """The text of <folder>/<name>.cu with its includes; OSError if a file cannot be read.

    `entry`: the only entry of lists of kernels that is kept; "": none is kept; None: all are.  `overlap`: for launches
    that may overlap (common.cuh).
    """
    text = "#define OVERLAP\n" * overlap + _expanded((Path(folder) / f"{name}.cu").resolve(), set())
    if entry is None:
        return text
    return _LIST.sub(lambda found: _ENTRY.sub(lambda one: one[0] if one[1] == entry else "", found[0]), text)


def entries(text: str) -> frozenset[str]:
    """The entries of all lists of kernels of a source."""
    return frozenset(one for found in _LIST.findall(text) for one in _ENTRY.findall(found))


def entry_of(names: frozenset[str], kernel: str) -> str:
    """The entry of a list from which a kernel comes: the longest that its name contains; "" for kernels of no list."""
    return max((one for one in names if f"_{one}_" in f"_{kernel}_"), key=len, default="")


def _expanded(path: Path, seen: set[Path]) -> str:
    seen.add(path)
    text = _ONCE.sub("", path.read_text(encoding="utf-8"))
    parts, end = [f'#line 1 "{path.name}"\n'], 0
    for found in _INCLUDE.finditer(text):
        parts.append(text[end:found.start()])
        other = (path.parent / found[1]).resolve()
        if other not in seen:
            parts.append(_expanded(other, seen))
        line = text.count("\n", 0, found.end()) + 2         # the number of the line after the include
        parts.append(f'\n#line {line} "{path.name}"')
        end = found.end()
    parts.append(text[end:])
    return "".join(parts) + "\n"
