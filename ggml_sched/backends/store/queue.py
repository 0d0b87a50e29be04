"""The queue of a store: tasks that threads begin in order, one at a time, and events between them.

A task begins when everything before it has ended, and ends before the next one begins.  The exceptions are parts of
reads (`put_reads`): they run at the same time as each other and as later parts, as many as there are threads, so that a
disk has its next read before it has done the last one.  An event passes when all that was queued before has ended.

After a task has raised, the tasks after it are skipped until `synchronize` has returned its exception.  Events pass
nevertheless: work that waits for them goes on with wrong data, and its results are discarded when the exception is
raised.  The threads start with the first task, and end with `close`, or when the queue is freed; after a fork the child
starts its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ggml_sched.errors import BackendError
from ggml_sched.threads.locks import ForkLock, Latch
from ggml_sched.threads.workers import Crew

__all__ = ["Mark", "StoreQueue"]

Task = Callable[[], object]


class Mark:
    """A point in a queue: `latch` is open once all that was queued before has ended."""

    __slots__ = ("latch", "pid", "reads")

    def __init__(self) -> None:
        self.latch: Latch = Latch()
        self.pid: int = os.getpid()
        self.reads: set[object] = set()
        """The reads that began before the threads came to this point, and have not ended yet."""


class _Reads:
    """The parts of reads that run now, and the marks that wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._marks: list[Mark] = []
        self._since = 0.0
        self.seconds: float = 0.0
        """The seconds so far in which at least one read ran."""

    def begin(self) -> object:
        """Note that a read begins; returns what `end` takes."""
        read = object()
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running.add(read)
        return read

    def end(self, read: object) -> None:
        with self._lock:
            self._running.remove(read)
            if not self._running:
                self.seconds += time.perf_counter() - self._since
            for mark in self._marks:
                mark.reads.discard(read)
            passed = [mark for mark in self._marks if not mark.reads]
            if passed:
                self._marks = [mark for mark in self._marks if mark.reads]
        for mark in passed:
            mark.latch.open()

    def reach(self, mark: Mark) -> None:
        """Open a mark once the reads that run now have ended."""
        with self._lock:
            if self._running:
                mark.reads.update(self._running)
                self._marks.append(mark)
                return
        mark.latch.open()

    def wait(self) -> None:
        """Wait until the reads that run now have ended."""
        mark = Mark()
        self.reach(mark)
        mark.latch.wait()


class StoreQueue:
    """The queue of a store of this name, with `n_threads` threads.

    `stalled`: seconds for which threads have waited for points of the queue so far.
    """

    def __init__(self, name: str, n_threads: int = 1) -> None:
        self.name = name
        self.n_threads = n_threads
        self.stalled: float = 0.0
        self.is_closing: bool = False
        self._crew: Crew | None = None
        self._crew_lock = ForkLock()            # two threads may both queue the first task
        self._reads = _Reads()
        self._seconds_before = 0.0
        self._error: BaseException | None = None
        self._taking = ForkLock()
        """Held where an exception is taken and noted."""

    def put(self, task: Task) -> None:
        """Queue a task; BackendError once the queue is closed, and if the host starts no thread."""
        self._threads().put(partial(self._execute, task))

    def put_wait(self, wait: Task) -> None:
        """Queue a wait for something outside the queue, during which the reads queued before go on; raises as `put`."""
        self._threads().put(partial(self._try, wait))

    def put_reads(self, parts: Sequence[Task]) -> None:
        """Queue the parts of a read, each of which may run at the same time as any other; raises as `put`."""
        crew = self._threads()
        for part in parts:
            crew.put(partial(self._begin, part))

    def mark(self) -> Mark:
        """A mark whose latch opens when all tasks that were queued so far have ended."""
        mark, crew = Mark(), self._crew
        if crew is None or not crew.is_here:
            mark.latch.open()                   # no task was queued in this process, or the threads have ended
            return mark
        crew.put(partial(self._reads.reach, mark))
        if self.is_closing:                     # another thread closes the queue: its threads may have ended already
            crew.close()
            mark.latch.open()
        return mark

    def wait(self, mark: Mark) -> None:
        """Wait until the queue has come to a mark; BackendError for a mark of this process's parent."""
        if not mark.latch.is_open:
            if mark.pid != os.getpid():
                raise BackendError(f"backend {self.name!r}: the process forked while it read weights")
            began = time.perf_counter()
            try:
                mark.latch.wait()
            finally:
                self.stalled += time.perf_counter() - began

    def synchronize(self, note: Callable[[BaseException], None] | None = None) -> BaseException | None:
        """Wait until every task was executed or skipped; returns the exception of a task, once.

        `note` is called with it before any other call returns, so that what the other call has queued is not taken for
        done when it was skipped.
        """
        self.mark().latch.wait()
        with self._taking:
            error, self._error = self._error, None
            if error is not None and note is not None:
                note(error)
        return error

    @property
    def seconds(self) -> float:
        """The seconds for which the queue has read: time in which several parts were read at once counts once."""
        return self._seconds_before + self._reads.seconds

    def close(self) -> None:
        """Skip what is queued, wait for the tasks that run, and end the threads; idempotent.

        The next `synchronize` returns a BackendError, if anything was skipped.
        """
        self.is_closing = True
        crew = self._crew
        if crew is not None:
            crew.close()
            self._crew = None                   # only now, because before it marks must wait for the threads

    def _threads(self) -> Crew:
        if self.is_closing:
            raise BackendError(f"backend {self.name!r} is closed")
        with self._crew_lock:
            crew = self._crew
            if crew is None or not crew.is_here:
                self._seconds_before, self._reads = self.seconds, _Reads()
                self._error = None
                crew = self._crew = Crew([f"ggml-sched {self.name}"] * self.n_threads, in_turns=True)
        if not crew.threads:
            self._crew = None
            raise BackendError(f"backend {self.name!r}: the host gives no thread to read on")
        return crew

    def _begin(self, part: Task) -> Task:
        """On a thread, in its turn: note that a part of a read begins; returns the function that reads it."""
        return partial(self._read, part, self._reads.begin())

    def _read(self, part: Task, read: object) -> None:
        try:
            self._try(part)
        finally:
            self._reads.end(read)

    def _execute(self, task: Task) -> None:
        """On a thread, in its turn: execute a task after all reads before it."""
        self._reads.wait()
        self._try(task)

    def _try(self, task: Task) -> None:
        if self._error is None:
            try:
                if self.is_closing:
                    raise BackendError(f"backend {self.name!r} was closed before it had read what was queued")
                task()
            except BaseException as error:
                self._error = self._error or error
