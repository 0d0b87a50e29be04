"""The locks of _locks, with the `__enter__` that the version of CPython needs.

Invariant: a signal handler that raises leaves no lock taken.  Up to CPython 3.13 no handler runs between a compiled
`__enter__` and the block.  From 3.14 on a handler may run there, because handlers run after calls of compiled
functions, but not after a Python function returns.  So `__enter__` is a Python function there; it releases the lock if
a handler raises in it.
"""

import sys

from ggml_sched.threads import _locks
from ggml_sched.threads._locks import Latch

__all__ = ["ForkLock", "Latch", "OneAtATime"]

if sys.version_info >= (3, 14):

    def _enter(self: _locks.OneAtATime | _locks.ForkLock) -> None:
        holder = object()       # identifies the lock as taken by this call
        try:
            self.take(holder)
        except BaseException:
            self.drop(holder)
            raise

    class OneAtATime(_locks.OneAtATime):
        __slots__ = ()
        __enter__ = _enter

    class ForkLock(_locks.ForkLock):
        __slots__ = ()
        __enter__ = _enter
else:
    from ggml_sched.threads._locks import ForkLock, OneAtATime
