"""A bar that shows the progress of loading, at a terminal, when loading takes a while.

Owns the bar.  Invariant: nothing is written unless standard error is a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 0.5
"""Seconds before the bar appears."""


class Progress:
    """A context manager whose `listener` a load calls.  The bar is `tqdm`'s; without it, there is none."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._start = time.monotonic()
        self._bar: Any = None

    @property
    def listener(self) -> Callable[[int, int], None] | None:
        """What to call with bytes done and in all; None where the output is no terminal: nothing is imported then."""
        return self._show if sys.stderr.isatty() else None

    def _show(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() - self._start < PATIENCE:
                return
            self._bar = _new_bar(self.what, total)
            if self._bar is None:
                self._start = float("inf")      # there is none to come
                return
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _new_bar(what: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=f"loading {what}", unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr,
                leave=False, dynamic_ncols=True)
