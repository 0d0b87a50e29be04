# Crowd: how many threads to compute with while others keep CPUs busy.
#
# ggml's threads meet at a barrier behind every node.  Where one of them shares its CPU with a busy process, all wait
# for it: two threads on two CPUs beside one such process fall to a quarter of their rate, one alone keeps two thirds.
# A computing process whose threads have had less CPU time than time has passed, for each of them, has such neighbours.

cdef double LOST = 0.3          # CPUs that may be missing, for interrupts and the like
cdef double SHORTEST = 2e-4     # seconds of computes that say anything
cdef enum:
    PATIENCE = 8                # computes with fewer threads before all of them are tried again
    MOST_PATIENCE = 64


cdef class Crowd:
    """Tells the number of threads for each compute, and learns from how long it took.

    It takes as many threads as there were CPUs for, if that was not slower, and now and then all of them to see whether
    there is room again.
    """

    cdef int fewer              # threads, 0: all
    cdef int left               # computes before all are tried again
    cdef int patience           # how many that will be
    cdef uintptr_t tried        # what was computed with all threads when fewer were decided on, 0: nothing to compare
    cdef double full            # seconds that took
    cdef bint suspected         # the compute before had too few CPUs, too: one alone may have waited for a file

    def __cinit__(self):
        self.patience = PATIENCE

    cpdef int threads(self, int n):
        """For the next compute, n at most."""
        if self.left > 0:
            self.left -= 1
            return min(self.fewer, n) if self.fewer > 0 else n
        return n

    cpdef void note(self, uintptr_t what, int n, int used, double wall, double cpu) noexcept:
        """A compute of `what` with `used` of n threads took `wall` seconds; the process had `cpu` seconds of CPU time."""
        cdef double had = cpu / wall if wall > 0 else n
        if wall < SHORTEST or n == 1:
            return
        if used < n:
            if had <= used - LOST and used > 1:
                self.fewer = used - 1           # still too many
                return
            if self.tried == what and wall > self.full:
                # Slower with fewer threads: all of them, for a while without asking.
                self.fewer, self.left = 0, self.patience
                self.patience = min(2 * self.patience, MOST_PATIENCE)
            self.tried = 0
        elif had > used - LOST:
            self.fewer, self.left, self.patience, self.tried, self.suspected = 0, 0, PATIENCE, 0, False
        elif not self.suspected:
            self.suspected = True
        elif self.left <= 0:
            if self.fewer > 0:
                self.patience = min(2 * self.patience, MOST_PATIENCE)
            self.fewer = max(<int>(had + 0.5), 1)
            if self.fewer >= n:
                self.fewer = n - 1
            self.left, self.tried, self.full = self.patience, what, wall
