"""A few threads that run fixed parts of one node's work in parallel.

The result of a part does not depend on the thread that runs it: parts are cut when a node is
resolved.  Threads start on first use and stop with `close`, or with the last reference.
After a fork the child starts its own: the parent's do not exist there.  Where the host refuses
to start threads, fewer compute the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ggml_sched.threads._locks import ForkLock
from ggml_sched.threads.workers import Crew

__all__ = ["Call", "Lanes", "run_calls"]

Call = Callable[[], object]


def run_calls(calls: Sequence[Call]) -> None:
    """Make each call, with IEEE results and no warnings (a pool thread has its own error state)."""
    with np.errstate(all="ignore"):
        for call in calls:
            call()


class Lanes:
    """The threads of one backend; `n_threads` counts the caller, too."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._crew: Crew | None = None
        self._lock = ForkLock()

    def run(self, lanes: Sequence[Sequence[Call]]) -> None:
        """Run every lane; returns, or raises the first error, once all of them have ended."""
        with self._lock:
            crew = self._started() if self.n_threads > 1 and len(lanes) > 1 else None
            if crew is None or not crew.threads:
                for calls in lanes:
                    run_calls(calls)
                return
            # The lanes' scratch memory is reused by the next node: even an interrupt waits for all lanes.
            crew.share([partial(run_calls, calls) for calls in lanes[1:]], partial(run_calls, lanes[0]))

    def set_n_threads(self, n_threads: int) -> None:
        if n_threads != self.n_threads:
            self.close()
            self.n_threads = n_threads

    def close(self) -> None:
        """Stop the threads; the next `run` starts new ones."""
        with self._lock:
            crew, self._crew = self._crew, None
            if crew is not None:
                crew.close()

    def _started(self) -> Crew:
        crew = self._crew
        if crew is None or not crew.is_here:
            crew = self._crew = Crew([f"ggml-sched-cpu-{i}" for i in range(self.n_threads - 1)])
        return crew
