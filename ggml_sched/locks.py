"""Locks that no signal leaves locked: one call at a time, and one that a fork unlocks.

Owns the way in and out.  Invariant: an exception that a signal handler raises, KeyboardInterrupt for one, comes either
before a lock is taken, or inside the `with` block, or after it was given back.

The interpreter runs signal handlers where a Python function begins and after each call.  A way out that is a Python
function is one that a signal may end before it has done anything, and so would be a way in after its call of
`acquire`.  Here the way out is C's own, held in a slot, and what takes the lock is no call of the interpreter's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ggml_sched.errors import Error

__all__ = ["ForkLock", "OneAtATime"]


class OneAtATime:
    """A second thread, or a callback, gets the error `busy()` instead of corruption; everybody `ended()` once it is
    `closed`."""

    __slots__ = ("__exit__", "_busy", "_ended", "_lock", "closed")

    def __init__(self, busy: Callable[[], Error], ended: Callable[[], Error]) -> None:
        self._busy, self._ended, self.closed = busy, ended, False
        self._lock = threading.Lock()
        self.__exit__ = self._lock.__exit__

    def __enter__(self) -> None:
        taken, = map(self._lock.acquire, (False,))      # unpacking calls `acquire`; no handler runs behind it
        if not taken:
            raise self._busy()
        if self.closed:
            self._lock.release()
            raise self._ended()


class ForkLock:
    """A lock that a fork cannot leave locked in the child."""

    __slots__ = ("__exit__", "_lock", "_pid")

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self.__exit__ = self._lock.__exit__

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._lock._at_fork_reinit()
            self._pid = os.getpid()
        _, = map(self._lock.acquire, (True,))           # as above
