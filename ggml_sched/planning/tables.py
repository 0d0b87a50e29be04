"""Formatting: tables in plain text and Markdown, times and bytes with a suitable unit, names that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import count

__all__ = ["distinct", "markdown", "memory_text", "preformatted", "printable", "seconds", "table"]

_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")


def table(rows: Iterable[Sequence[object]], align: str = "<>", underlined: bool = False) -> str:
    """Rows as aligned columns, integers with thousands separators.

    `align` has < or > for each column; its last character is used for the remaining ones.  `underlined`: the first row
    is a header.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    n_columns = max(map(len, texts), default=0)
    align = align.ljust(n_columns, align[-1])
    widths = [max(len(row[i]) for row in texts if i < len(row)) for i in range(n_columns)]
    lines = ["  ".join(f"{cell:{align[i]}{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in texts]
    if underlined:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table whose first column is aligned to the left, the others to the right."""
    titles = [_text(cell) for cell in head]
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|--:" * (len(titles) - 1) + "|"]
    lines += ["| " + " | ".join(map(_text, row)) + " |" for row in rows]
    return "\n".join(lines)


def _text(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else printable(str(cell))


def printable(text: str) -> str:
    """A text, such as a name, with control characters escaped: a terminal would act on them, a line or table break."""
    return text if text.isprintable() else _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def seconds(value: float) -> str:
    """A time in s, ms or us, the largest unit in which it is at least 1."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.2f} {unit}"
    return f"{value * 1e6:.0f} us"


def preformatted(text: str) -> str:
    """A text as HTML that keeps its columns, for notebooks."""
    import html  # imported here, because that takes 6 ms and few processes show values in a notebook

    return f'<pre style="line-height: 1.2">{html.escape(text)}</pre>'


def memory_text(nbytes: int) -> str:
    """Bytes in GiB, MiB or KiB, the largest unit in which they are at least 1."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Names as they are shown where each must differ from the others and from those of `taken`: the second "CPU" is
    "CPU (2)"."""
    used, found = set(taken), []
    for name in names:
        shown = next(text for k in count(1) if (text := f"{name} ({k})" if k > 1 else name) not in used)
        used.add(shown)
        found.append(shown)
    return found
