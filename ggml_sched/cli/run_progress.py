"""A progress bar for loading a model, shown at a terminal if loading takes longer than `PATIENCE`.

Invariant: nothing is written unless standard error is a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 0.5
"""Seconds before the bar appears."""


class Progress:
    """A context manager; `listener` is the callback for loading.  Without the package `tqdm` no bar is shown."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._start = time.monotonic()
        self._bar: Any = None

    @property
    def listener(self) -> Callable[[int, int], None] | None:
        """A callback with (bytes loaded, bytes in all); None if standard error is no terminal, so that tqdm is not
        imported."""
        return self._show if sys.stderr.isatty() else None

    def _show(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() - self._start < PATIENCE:
                return
            self._bar = _new_bar(self.what, total)
            if self._bar is None:
                self._start = float("inf")      # tqdm is not installed: do not try again
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
