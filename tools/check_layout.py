"""Refuse text that does not follow .editorconfig: tabs, trailing spaces, CRLF, no newline at the end.

    python tools/check_layout.py FILE...

Lines of C have at most 120 columns; ruff checks those of Python.
"""

from __future__ import annotations

import sys
from pathlib import Path

COLUMNS = 120
BOUNDED = {".c", ".h", ".cpp", ".cu", ".cuh"}


def faults(text: str, bounded: bool) -> list[str]:
    """Each fault, with its line number."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if "\t" in line:
            found.append(f"{number}: a tab")
        if line != line.rstrip():
            found.append(f"{number}: space at the end of the line")
        if bounded and len(line) > COLUMNS:
            found.append(f"{number}: {len(line)} columns, {COLUMNS} are the limit")
    if text and not text.endswith("\n"):
        found.append(f"{text.count(chr(10)) + 1}: no newline at the end of the file")
    if text.endswith("\n\n"):
        found.append(f"{text.count(chr(10))}: an empty line at the end of the file")
    return found


def main(names: list[str]) -> int:
    bad = 0
    for name in names:
        path = Path(name)
        for fault in faults(path.read_bytes().decode("utf-8"), path.suffix in BOUNDED):
            print(f"{name}:{fault}", file=sys.stderr)
            bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
