"""Tables in Markdown, and the row of the summary that each section of the report adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Line(NamedTuple):
    """A line of the summary: what was measured, what the project aims at, and what came out."""

    what: str
    target: str
    median: str
    worst: str


def markdown(head: Iterable[str], rows: Iterable[Iterable]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)
