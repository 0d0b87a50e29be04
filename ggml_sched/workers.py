"""Threads that make the calls they are given: the one worker loop of this package.

A crew is a few threads around one queue.  Threads are daemons and hold the queue only, so that a crew ends with
`close` or with the last reference to it.  After a fork the child has none of them: look at `is_here`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

__all__ = ["Crew"]

Call = Callable[[], None]
"""Reports by itself what goes wrong: it must not raise."""


def _serve(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        call = None     # nothing is kept alive while waiting


def _send_stops(calls: SimpleQueue[Call | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        calls.put(None)
    threads.clear()


class Crew:
    """A thread for each name; fewer, or none, where the host gives no more."""

    def __init__(self, names: Sequence[str]) -> None:
        self.threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._stop = weakref.finalize(self, _send_stops, self._calls, self.threads)
        self._stop.atexit = False
        with contextlib.suppress(RuntimeError):
            for name in names:
                thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
                thread.start()
                self.threads.append(thread)

    @property
    def is_here(self) -> bool:
        """Whether the threads are of this process, and not of the one that forked it."""
        return self._pid == os.getpid()

    def put(self, call: Call) -> None:
        """Let one of the threads make a call, after those that were put before."""
        self._calls.put(call)

    def close(self) -> None:
        """Make the calls that were put, then end the threads; idempotent."""
        threads = tuple(self.threads)
        if not self.is_here:
            self._stop.detach()
            return
        self._stop()
        for thread in threads:
            thread.join()
