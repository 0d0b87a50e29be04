"""The row of the summary that each section of the report adds."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """A line of the summary: measure, target and result."""

    what: str
    target: str
    median: str
    worst: str
