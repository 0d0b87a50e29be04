"""Worker threads, which execute functions from a queue.

A crew is a few threads that share one queue.  The threads are daemons and refer only to the queue, so that they end
with `close`, or when the crew is freed.  After a fork they do not exist in the child: see `is_here`.  A crew `in_turns`
executes its calls in order, one at a time; only what a call leaves for later (`Crew`) runs beside other calls.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import cast

__all__ = ["Crew", "thread_count"]

Call = Callable[[], object]
"""A function given to `put` must not raise; it reports errors itself."""


def _serve(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        call = None     # the thread must not keep the function alive while it waits


def _serve_in_turns(calls: SimpleQueue[Call | None], turn: threading.Lock) -> None:
    while True:
        with turn:
            call = calls.get()
            rest = None if call is None else call()
        if call is None:
            return
        if rest is not None:
            cast("Call", rest)()
        call = rest = None


def _send_stops(calls: SimpleQueue[Call | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        calls.put(None)
    threads.clear()


def _take_one(todo: list[Call], begun: list[None], ended: list[BaseException | None], done: SimpleQueue[None]) -> None:
    """On a thread of a crew: execute one call of `todo`, if one is left, and record its begin and its end.

    `ended` gets its error, or None.  `Crew.share` compares the lengths of `begun` and `ended` to know whether a call is
    still running; an entry in `done` wakes it.
    """
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
    """Threads that share one queue of calls: one thread for each name; fewer, or none, if the host starts no more.

    `in_turns`: calls are taken and executed one after another.  A call returns None, or a function: the thread calls
    this function while other threads execute the next calls.
    """

    def __init__(self, names: Sequence[str], in_turns: bool = False) -> None:
        self.threads: list[threading.Thread] = []
        self._ending: tuple[threading.Thread, ...] = ()
        """The threads that `close` waits for, since `_stop` clears `threads`."""
        self._pid = os.getpid()
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._stop = weakref.finalize(self, _send_stops, self._calls, self.threads)
        self._stop.atexit = False
        serve = partial(_serve_in_turns, self._calls, threading.Lock()) if in_turns else partial(_serve, self._calls)
        try:
            for name in names:
                thread = threading.Thread(target=serve, name=name, daemon=True)
                self.threads.append(thread)     # before `start`: an interrupt may come between the two lines
                thread.start()
        except RuntimeError as error:
            if error.__context__ is not None:
                raise                           # caused by an interrupt while `start` waited for the thread
            self.threads.pop()

    @property
    def is_here(self) -> bool:
        """Whether the threads belong to this process, and not to its parent before a fork."""
        return self._pid == os.getpid()

    def put(self, call: Call) -> None:
        """Queue a call for the threads, first in, first out."""
        self._calls.put(call)

    def putting(self, call: Call) -> Callable[[], None]:
        """A function in C that queues `call`, so that signal handlers cannot run between several of them in a row."""
        return partial(self._calls.put, call)

    def share(self, calls: Sequence[Call], own: Call) -> None:
        """Execute calls that may raise on the threads, and `own` on the caller's thread; raises the first error.

        Returns or raises only when no call is running any more, even after an interrupt.  An interrupt may come between
        any two lines, and then this function does not know how many calls it has queued.  Therefore each thread records
        that it has begun and ended a call; after an error all calls are queued again, and a thread that finds none left
        does nothing.
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
        """Wait until the queued calls are executed, and end the threads; idempotent; several threads may call this."""
        if not self.is_here:
            self._stop.detach()
            return
        self._ending = tuple(self.threads) or self._ending
        self._stop()
        for thread in self._ending:
            if thread.ident is not None:
                thread.join()


def thread_count(n: int | None, most: int) -> int:
    """The number of threads `n` that a caller gave, checked to be in 1 .. `most`.

    None: the number of processors that the process may use, at most `most`.
    """
    if n is None:
        return min(most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"a number of threads is an int, not {n!r}")
    if not 1 <= n <= most:
        raise ValueError(f"{n} threads are not in 1 .. {most}")
    return n
