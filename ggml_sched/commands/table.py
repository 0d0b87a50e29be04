"""Plain text tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["seconds", "table"]


def table(rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Rows as aligned columns: the first `left` columns to the left, numbers with thousands separators."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    n_columns = max(map(len, texts), default=0)
    widths = [max(len(row[i]) for row in texts if i < len(row)) for i in range(n_columns)]
    lines = []
    for row in texts:
        cells = [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def seconds(value: float) -> str:
    """A time in the unit that reads best."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.2f} {unit}"
    return f"{value * 1e6:.0f} us"
