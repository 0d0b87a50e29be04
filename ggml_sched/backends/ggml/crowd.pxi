# Crowd: how many threads to compute with while others keep CPUs busy.
#
# ggml's threads meet at a barrier behind every node.  Where one of them shares its CPU with a busy process, all wait
# for it: two threads on two CPUs beside one such process fall to a quarter of their rate, one alone keeps two thirds.
# Threads that have had less CPU time than time has passed, for each of them, have such neighbours.
# (The time of a whole process will not do: of threads that run, the system counts it at its ticks only.)

cdef double LOST = 0.4          # CPUs that may be missing, for interrupts and the like
cdef double WINDOW = 0.05       # seconds of computes that are looked at together
cdef double PATIENCE = 0.25     # seconds with fewer threads before all of them are tried again, at first
cdef double MOST_PATIENCE = 2.0


cdef class Crowd:
    """Tells the number of threads for each compute, and learns from how long it took.

    It takes as many threads as there were CPUs for, if that was not slower, and now and then all of them to see whether
    there is room again.
    """

    cdef int fewer              # threads, 0: all
    cdef double until           # when all are tried again, or, where fewer were slower, fewer
    cdef double patience        # how long that will be
    cdef bint suspected         # CPUs were missing when all were tried last: once may have been a file that was waited for
    # What is looked at together: computes with so many threads, all of the same program or (0) not.
    cdef int used
    cdef int count
    cdef uintptr_t what
    cdef double wall
    cdef double cpu
    # The program that was computed with all threads when fewer were decided on, and its seconds; 0: none to compare.
    cdef uintptr_t tried
    cdef double full

    def __cinit__(self):
        self.patience = PATIENCE

    cpdef int threads(self, int n, double now):
        """For the next compute, n at most."""
        return n if self.fewer == 0 or now >= self.until else min(self.fewer, n)

    cpdef void note(self, uintptr_t what, int n, int used, double wall, double cpu, double now) noexcept:
        """A compute of `what` with `used` of n threads took `wall` seconds; those threads had `cpu` seconds of CPU time."""
        cdef double had, each
        if n == 1:
            return
        if used != self.used:
            self.forget(used, what)
        self.what = what if self.what == what else 0
        self.wall += wall
        self.cpu += cpu
        self.count += 1
        if self.wall < WINDOW:
            return
        had, each = self.cpu / self.wall, self.wall / self.count
        if used < n:
            if had <= used - LOST and used > 1:
                self.fewer = used - 1           # still too many
            elif self.tried and self.tried == self.what and each > self.full:
                self.fewer = 0                  # slower with fewer: all of them, for a while without asking
                self.wait(now)
            self.tried = 0
        elif had > used - LOST:
            self.fewer, self.patience, self.suspected = 0, PATIENCE, False
        elif not self.suspected:
            self.suspected = True
        elif now >= self.until:
            self.tried, self.full = self.what, each
            self.fewer = min(max(<int>(had + 0.5), 1), n - 1)
            self.wait(now)
        self.forget(used, what)

    cdef void wait(self, double now) noexcept:
        self.until = now + self.patience
        self.patience = min(2 * self.patience, MOST_PATIENCE)

    cdef void forget(self, int used, uintptr_t what) noexcept:
        self.used, self.what, self.count, self.wall, self.cpu = used, what, 0, 0, 0
