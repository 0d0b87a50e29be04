"""A progress bar for loading a model, shown at a terminal if loading takes longer than `PATIENCE`; and a line while
kernels for a GPU are compiled.

Invariant: nothing is written unless standard error is a terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Self

PATIENCE = 0.5
"""Seconds of loading after which the bar appears."""


class Progress:
    """A context manager with a progress bar, which `listener`, the callback for `load`, moves.  Without the package
    `tqdm` no bar is shown."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._start = time.monotonic()
        self._bar: Any = None

    @property
    def listener(self) -> Callable[[int, int], None] | None:
        """The function to call with (bytes loaded, bytes in all); None if standard error is no terminal, so that tqdm
        is not imported."""
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


class Compiling(logging.Handler):
    """A context manager that shows, in a line at a terminal, which CUDA kernels are being compiled."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._log = logging.getLogger("ggml_sched.cupy")
        self._level = self._log.level
        self._running: list[str] = []
        self._is_on = False

    def emit(self, record: logging.LogRecord) -> None:
        name = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        if str(record.msg).startswith("compiling"):
            self._running.append(name)
        elif name in self._running:
            self._running.remove(name)
        more = f" and {len(self._running) - 1} more" if len(self._running) > 1 else ""
        text = f"ggml-sched: compiling kernels: {self._running[0]}{more}" if self._running else ""
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._is_on = True
            self._log.addHandler(self)
            self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_on:
            self._is_on = False
            self._log.removeHandler(self)
            self._log.setLevel(self._level)
            if self._running:
                sys.stderr.write("\r\x1b[K")


def _new_bar(what: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=f"loading {what}", unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr,
                leave=False, dynamic_ncols=True)
