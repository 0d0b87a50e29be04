# The C view of _locks.

cdef extern from "pythread.h" nogil:
    ctypedef void *PyThread_type_lock
    ctypedef enum PyLockStatus:
        PY_LOCK_FAILURE
        PY_LOCK_ACQUIRED
        PY_LOCK_INTR
    int NOWAIT_LOCK
    PyThread_type_lock PyThread_allocate_lock()
    void PyThread_free_lock(PyThread_type_lock lock)
    int PyThread_acquire_lock(PyThread_type_lock lock, int wait)
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int interruptible)
    void PyThread_release_lock(PyThread_type_lock lock)


cdef class OneAtATime:
    cdef object busy, ended             # functions that make the exceptions for a locked and for a closed lock
    cdef object holder                  # the argument of `take` while locked
    cdef readonly bint locked
    cdef public bint closed
    cpdef take(self, holder)


cdef class ForkLock:
    cdef PyThread_type_lock lock        # freed by __dealloc__
    cdef object holder                  # the argument of `take` while locked
    cdef int pid                        # id of the process that made `lock`; differs from getpid() after a fork
    cdef readonly bint locked
    cpdef take(self, holder)


cdef class Latch:
    cdef PyThread_type_lock lock        # locked until `open`; freed by __dealloc__
    cdef readonly bint is_open
