# cython: language_level=3
"""Locks that an exception of a signal handler cannot leave locked, and one that is free in the child after a fork.

`__enter__` and `__exit__` are compiled, because a model takes several locks for each token, and with cold caches one
`__enter__` in Python costs more than all decisions of the scheduler.  Invariant: an exception that a signal handler
raises, such as KeyboardInterrupt, comes before the lock is taken, inside the `with` block, or after it is released.

The interpreter runs signal handlers where a Python function begins and after each call.  With compiled methods neither
is between taking the lock and the block, nor between the block and the release.
"""

from cpython.exc cimport PyErr_CheckSignals
from posix.unistd cimport getpid


cdef class OneAtATime:
    """`OneAtATime(busy, ended)`: a lock that raises instead of waiting.

    Entering it while it is locked, from another thread or a callback, raises `busy()`; entering it once it is `closed`
    raises `ended()`.
    """

    def __init__(self, busy not None, ended not None):
        self.busy, self.ended = busy, ended

    def __enter__(self):
        # No other thread runs this meanwhile: the interpreter's lock (GIL) is held.
        if self.locked:
            raise self.busy()
        if self.closed:
            raise self.ended()
        self.locked = True

    def __exit__(self, kind, error, trace):
        self.locked = False


cdef class ForkLock:
    """A lock for which threads wait, and which is free in a child process after a fork.

    An ordinary lock that another thread held during the fork would stay locked in the child for ever.
    """

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
            # The thread that may hold the lock is not in this child process: use a new lock.  The old one is not freed,
            # because a lock must not be freed while it is held.
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
        # `locked` is False in a child process that was forked inside this block and has made a new lock meanwhile.
        if self.locked:
            self.locked = False
            PyThread_release_lock(self.lock)
