"""A few threads that run fixed shares of one node's work side by side.

Who runs a share never changes its result: the shares are cut when a node is
resolved.  Threads start on first use and stop with `close`, or with the last reference.
After a fork the child starts its own: the parent's do not exist there.  A host that
gives no more threads gets the same results from fewer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

__all__ = ["ForkLock", "Lanes", "Step", "run_steps"]

Step = Callable[[], object]


def run_steps(steps: Sequence[Step]) -> None:
    """Call each step, with IEEE results and no warnings (a pool thread has its own error state)."""
    with np.errstate(all="ignore"):
        for step in steps:
            step()


def _work(tasks: SimpleQueue) -> None:
    """A pool thread: (steps, where to report) until None comes."""
    while (task := tasks.get()) is not None:
        _perform(*task)
        task = None


def _perform(steps: Sequence[Step], done: SimpleQueue) -> None:
    try:
        run_steps(steps)
    except BaseException as error:
        done.put(error)
    else:
        done.put(None)


class _Pool:
    """Threads around one queue; they hold the queue only, so that the pool can be collected."""

    def __init__(self, n_threads: int) -> None:
        self.pid = os.getpid()
        self.tasks: SimpleQueue = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self._stop = weakref.finalize(self, _send_stops, self.tasks, self.threads)
        self._stop.atexit = False
        with contextlib.suppress(RuntimeError):      # no more threads from the host
            for i in range(n_threads):
                name = f"ggml-sched-cpu-{i}"
                thread = threading.Thread(target=_work, args=(self.tasks,), name=name, daemon=True)
                thread.start()
                self.threads.append(thread)

    def close(self) -> None:
        threads = tuple(self.threads)
        self._stop()
        for thread in threads:
            thread.join()


def _send_stops(tasks: SimpleQueue, threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)
    threads.clear()


class ForkLock:
    """A lock that a fork cannot leave locked in the child."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
        self._lock.acquire()

    def __exit__(self, *exc) -> None:
        self._lock.release()


class Lanes:
    """The threads of one backend; `n_threads` counts the caller, too."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._pool: _Pool | None = None
        self._lock = ForkLock()

    def run(self, lanes: Sequence[Sequence[Step]]) -> None:
        """Run every lane; returns, or raises the first error, once all of them have ended."""
        with self._lock:
            pool = self._started() if self.n_threads > 1 and len(lanes) > 1 else None
            if pool is None or not pool.threads:
                for steps in lanes:
                    run_steps(steps)
                return
            done: SimpleQueue = SimpleQueue()
            errors: list[BaseException] = []
            running = 0
            try:
                for steps in lanes[1:]:
                    pool.tasks.put((steps, done))
                    running += 1
                run_steps(lanes[0])
            except BaseException as error:
                errors.append(error)
            while running:
                # The lanes share scratch memory with whatever runs next: even an interrupt waits for them.
                try:
                    outcome = done.get()
                except BaseException as error:
                    errors.append(error)
                else:
                    running -= 1
                    if outcome is not None:
                        errors.append(outcome)
            if errors:
                raise errors[0]

    def set_n_threads(self, n_threads: int) -> None:
        if n_threads != self.n_threads:
            self.close()
            self.n_threads = n_threads

    def close(self) -> None:
        """Stop the threads; the next `run` starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None and pool.pid == os.getpid():
                pool.close()

    def _started(self) -> _Pool:
        pool = self._pool
        if pool is None or pool.pid != os.getpid():
            pool = self._pool = _Pool(self.n_threads - 1)
        return pool
