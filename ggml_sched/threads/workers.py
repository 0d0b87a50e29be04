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
from functools import partial
from queue import SimpleQueue

__all__ = ["Crew", "thread_count"]

Call = Callable[[], object]
"""Given to `put`, it reports by itself what goes wrong: it must not raise."""


def _serve(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        call = None     # nothing is kept alive while waiting


def _send_stops(calls: SimpleQueue[Call | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        calls.put(None)
    threads.clear()


def _take_one(todo: list[Call], begun: list[None], ended: list[BaseException | None], done: SimpleQueue[None]) -> None:
    """On a thread of a crew: make one of the calls, if one is left."""
    begun.append(None)
    call: Call | None = None
    error: BaseException | None = None
    try:
        with contextlib.suppress(IndexError):
            call = todo.pop()
        if call is not None:
            call()
    except BaseException as raised:
        error = raised
    ended.append(error)
    done.put(None)


class Crew:
    """A thread for each name; fewer, or none, where the host gives no more."""

    def __init__(self, names: Sequence[str]) -> None:
        self.threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._stop = weakref.finalize(self, _send_stops, self._calls, self.threads)
        self._stop.atexit = False
        try:
            for name in names:
                thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
                self.threads.append(thread)     # before it starts: an interrupt comes in between
                thread.start()
        except RuntimeError as error:
            if error.__context__ is not None:
                raise                           # an interrupt broke into threading's own waiting
            self.threads.pop()

    @property
    def is_here(self) -> bool:
        """Whether the threads are of this process, and not of the one that forked it."""
        return self._pid == os.getpid()

    def put(self, call: Call) -> None:
        """Let one of the threads make a call, after those that were put before."""
        self._calls.put(call)

    def share(self, calls: Sequence[Call], own: Call) -> None:
        """Make calls that may raise, and `own` on the caller's thread; raises the first error.

        Returns when none is at work any more: even an interrupt waits for that.  It may come between any two lines
        here, so a thread itself records that it has begun and that it has ended; one that finds no call does nothing.
        """
        todo = list(calls)
        begun: list[None] = []
        ended: list[BaseException | None] = []
        errors: list[BaseException] = []
        done: SimpleQueue[None] = SimpleQueue()
        take = partial(_take_one, todo, begun, ended, done)
        try:
            for _ in calls:
                self._calls.put(take)
            own()
        except BaseException as error:
            errors.append(error)
            for _ in calls:
                self._calls.put(take)
        while todo or len(ended) < len(begun):
            try:
                while todo or len(ended) < len(begun):
                    done.get()
            except BaseException as error:
                errors.append(error)
        errors += [error for error in ended if error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Make the calls that were put, then end the threads; idempotent."""
        threads = tuple(self.threads)
        if not self.is_here:
            self._stop.detach()
            return
        self._stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def thread_count(n: int | None, most: int) -> int:
    """A number of threads that a caller gave, at most `most`; None: the processors that this process may use."""
    if n is None:
        return min(most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"a number of threads is an int, not {n!r}")
    if not 1 <= n <= most:
        raise ValueError(f"{n} threads are not in 1 .. {most}")
    return n
