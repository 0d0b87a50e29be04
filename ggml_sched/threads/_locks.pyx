# cython: language_level=3
"""Two locks that an exception of a signal handler cannot leave locked, of which `ForkLock` is also free in a child
process after a fork; and a latch, for which threads wait.

`__enter__` and `__exit__` are compiled, because a model takes several locks for each token, and with cold caches one
`__enter__` in Python costs more than all decisions of the scheduler.  Invariant: an exception that a signal handler
raises, such as KeyboardInterrupt, comes before the lock is taken, inside the `with` block, or after it is released.

The interpreter runs signal handlers where a Python function begins and after each call.  Because these methods are
compiled, none runs between the block and the release, nor, before CPython 3.14, between taking the lock and the block;
locks.py is for 3.14.  `take(holder)` does what `__enter__` does and notes the holder; `drop(holder)` releases the lock
if this holder has it, and does nothing otherwise.
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
        self.take(None)

    cpdef take(self, holder):
        # The interpreter's lock (GIL) is held throughout, so no other thread runs this meanwhile.
        if self.locked:
            raise self.busy()
        if self.closed:
            raise self.ended()
        self.locked, self.holder = True, holder

    def drop(self, holder):
        if self.holder is holder:
            self.__exit__(None, None, None)

    def __exit__(self, kind, error, trace):
        self.locked, self.holder = False, None


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
        self.take(None)

    cpdef take(self, holder):
        cdef PyThread_type_lock fresh
        cdef PyLockStatus got
        if self.pid != getpid():
            # The thread that may hold the lock is not in this child process: use a new lock.  The old one is not freed,
            # because a lock must not be freed while it is held.
            fresh = PyThread_allocate_lock()
            if fresh == NULL:
                raise MemoryError("no host memory for a lock")
            self.lock, self.pid, self.locked, self.holder = fresh, getpid(), False, None
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            while True:
                with nogil:
                    got = PyThread_acquire_lock_timed(self.lock, -1, 1)
                if got == PY_LOCK_ACQUIRED:
                    break
                PyErr_CheckSignals()
        try:
            PyErr_CheckSignals()        # run the handler of a signal that came while this thread waited
        except BaseException:
            PyThread_release_lock(self.lock)
            raise
        self.locked, self.holder = True, holder

    def drop(self, holder):
        if self.holder is holder:
            self.__exit__(None, None, None)

    def __exit__(self, kind, error, trace):
        # `locked` is False in a child process that was forked inside this block and has made a new lock meanwhile.
        if self.locked:
            self.locked, self.holder = False, None
            PyThread_release_lock(self.lock)


cdef class Latch:
    """Threads wait for a latch until another thread opens it; it then stays open.

    It is used instead of threading.Event, whose lock an interrupt of `wait` or `set` can leave locked.
    """

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no host memory for a lock")
        PyThread_acquire_lock(self.lock, NOWAIT_LOCK)

    def __dealloc__(self):
        if self.lock != NULL:
            if not self.is_open:
                PyThread_release_lock(self.lock)
            PyThread_free_lock(self.lock)

    def open(self):
        """Let all waiting threads continue; idempotent."""
        if not self.is_open:
            self.is_open = True
            PyThread_release_lock(self.lock)

    def wait(self):
        """Wait until the latch is open; a signal handler that raises ends the waiting."""
        cdef PyLockStatus got
        while not self.is_open:
            with nogil:
                got = PyThread_acquire_lock_timed(self.lock, -1, 1)
                if got == PY_LOCK_ACQUIRED:
                    PyThread_release_lock(self.lock)    # for the next waiting thread
            if got != PY_LOCK_ACQUIRED:
                PyErr_CheckSignals()
