# cython: language_level=3
"""Locks that no signal leaves locked: one call at a time, and one that a fork unlocks.

Owns the way in and out, compiled: a token takes several, and with cold caches a way in written in Python costs more
than all that a scheduler decides.  Invariant: an exception that a signal handler raises, KeyboardInterrupt for one,
comes either before a lock is taken, or inside the `with` block, or after it was given back.

The interpreter runs signal handlers where a Python function begins and after each call.  Neither lies between the way
in and the block, nor between the block and the way out.
"""

from cpython.exc cimport PyErr_CheckSignals
from posix.unistd cimport getpid


cdef class OneAtATime:
    """`OneAtATime(busy, ended)`: a second thread, or a callback, gets the error `busy()` instead of corruption;
    every thread gets `ended()` once it is `closed`.
    """

    def __init__(self, busy not None, ended not None):
        self.busy, self.ended = busy, ended

    def __enter__(self):
        # One thread at a time runs this: the interpreter's lock is held.
        if self.locked:
            raise self.busy()
        if self.closed:
            raise self.ended()
        self.locked = True

    def __exit__(self, kind, error, trace):
        self.locked = False


cdef class ForkLock:
    """A lock that others wait for, and that a fork cannot leave locked in the child."""

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no host memory for a lock")
        self.pid = getpid()

    def __dealloc__(self):
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    def __enter__(self):
        cdef PyThread_type_lock fresh
        cdef PyLockStatus got
        if self.pid != getpid():
            # The holder stayed in the parent.  The old lock is not freed: a lock that is held must not be.
            fresh = PyThread_allocate_lock()
            if fresh == NULL:
                raise MemoryError("no host memory for a lock")
            self.lock, self.pid, self.locked = fresh, getpid(), False
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            while True:
                with nogil:
                    got = PyThread_acquire_lock_timed(self.lock, -1, 1)
                if got == PY_LOCK_ACQUIRED:
                    break
                PyErr_CheckSignals()
        self.locked = True

    def __exit__(self, kind, error, trace):
        # In a child that was forked inside the block, no thread holds the new lock.
        if self.locked:
            self.locked = False
            PyThread_release_lock(self.lock)
