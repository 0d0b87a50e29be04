"""The queue of a store: tasks that one thread executes in order, and events between them.

After a task has raised, the tasks after it are skipped until `synchronize` has returned its exception.  Events pass
all the same: what waits for them goes on with wrong data, and its results are lost when the exception is raised.  The
thread starts with the first task, and ends with `close`, or when the queue is freed; after a fork the child starts its
own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from ggml_sched.errors import BackendError
from ggml_sched.threads.locks import Latch
from ggml_sched.threads.workers import Crew

__all__ = ["Mark", "StoreQueue"]


class Mark:
    """A point in a queue: `latch` is open once the thread has come to it."""

    __slots__ = ("latch", "pid")

    def __init__(self) -> None:
        self.latch: Latch = Latch()
        self.pid: int = os.getpid()


class StoreQueue:
    """The queue of a store of this name.  `stalled`: seconds that threads have waited for it so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stalled: float = 0.0
        self.is_closing: bool = False
        self._crew: Crew | None = None
        self._error: BaseException | None = None

    def put(self, task: Callable[[], object]) -> None:
        """Queue a task; BackendError once the queue is closed, and if the host starts no thread."""
        if self.is_closing:
            raise BackendError(f"backend {self.name!r} is closed")
        self._threads().put(partial(self._execute, task))

    def mark(self) -> Mark:
        """A point after all tasks that were queued so far."""
        mark = Mark()
        if self._crew is None or not self._crew.is_here:
            mark.latch.open()                   # no task was queued in this process
        else:
            self._crew.put(mark.latch.open)
        return mark

    def wait(self, mark: Mark) -> None:
        """Wait until the thread has come to a point; BackendError for one of the parent of this process."""
        if not mark.latch.is_open:
            if mark.pid != os.getpid():
                raise BackendError(f"backend {self.name!r}: the process forked while it read weights")
            began = time.perf_counter()
            try:
                mark.latch.wait()
            finally:
                self.stalled += time.perf_counter() - began

    def synchronize(self) -> BaseException | None:
        """Wait until every task was executed or skipped; returns the exception of a task, once."""
        self.mark().latch.wait()
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Skip what is queued, wait for the task that runs, and end the thread; idempotent.

        The next `synchronize` returns a BackendError, if anything was skipped.
        """
        self.is_closing = True
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def _threads(self) -> Crew:
        crew = self._crew
        if crew is None or not crew.is_here:
            crew = self._crew = Crew([f"ggml-sched {self.name}"])
            self._error = None
        if not crew.threads:
            self._crew = None
            raise BackendError(f"backend {self.name!r}: the host gives no thread to read on")
        return crew

    def _execute(self, task: Callable[[], object]) -> None:
        if self._error is None:
            try:
                if self.is_closing:
                    raise BackendError(f"backend {self.name!r} was closed before it had read what was queued")
                task()
            except BaseException as error:
                self._error = error
