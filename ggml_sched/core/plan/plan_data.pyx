# cython: language_level=3
"""Plans for Python: as PlanData, as plain values, and bound to the tensors of a graph.

PlanData owns a gs_plan (include/ggml_sched/plan.h).  It refers to tensors by id, not to a Graph object, so that equal
graphs share it.  Immutable once made.

Includes, before the code below:

    reasons    The names of the reasons why a tensor is on its backend.
    needed_of  Which results of a range of nodes are read elsewhere, for Python.
    bind       Binding: giving the tensors of a graph the addresses of a plan.
    refusal    The text of the error for a node that no backend supports.
"""

import itertools

from ggml_sched.errors import GraphError, HazardError, OutOfMemory, PlacementError, UnsupportedOp, no_host_memory

cimport cython
from cpython.list cimport PyList_GET_ITEM
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport *
from ggml_sched.core.alloc.gallocr cimport plan_owner
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport BufferBase, ContextState, Lease, Tensor, describe, label
from ggml_sched.core.graph.types cimport TYPE_NAMES, ints_tuple
from ggml_sched.core.pack.api cimport method_name
from ggml_sched.core.plan.make cimport (
    gs_failure, gs_plan_free, gs_plan_make, gs_plan_replay, plan_mark_exclusive, plan_needed,
)
from ggml_sched.core.plan.plan_values cimport plan_take_values, values_of_plan
from ggml_sched.core.plan.request cimport Request, names_of

include "reasons.pxi"
include "needed_of.pxi"
include "bind.pxi"
include "refusal.pxi"

cdef tuple pairs_tuple(const int32_t *a, const int32_t *b, int32_t n):
    cdef list found = []
    cdef int32_t i
    for i in range(n):
        found.append((a[i], b[i]))
    return tuple(found)


cdef class PlanData:
    """The decisions of one planning run.  `ggml_sched.planning.plan.Plan` joins it with a graph.

    Ids below `n_tensors` are the graph's tensors, then come the copies, then the further copy slots of copies that have
    several.  Offsets are bytes from the start of the backend's buffer.
    """

    def __dealloc__(self):
        gs_plan_free(&self.c)

    def __reduce__(self):
        cdef int32_t i, n_nodes = 0
        for i in range(self.c.n_splits):
            n_nodes = max(n_nodes, self.c.split_stop[i])
        return plan_from_values, (plan_values(self), n_nodes)

    @property
    def n_tensors(self):
        return self.c.n_tensors

    @property
    def n_splits(self):
        return self.c.n_splits

    @property
    def n_copies(self):
        """The number of copies."""
        return self.c.n_copies

    @property
    def splits(self):
        """Tuples (backend, start, stop, inputs): nodes start .. stop - 1, and the indices of the copies made before."""
        cdef gs_plan *p = &self.c
        cdef list found = []
        cdef int32_t i, first = 0
        for i in range(p.n_splits):
            inputs = ints_tuple(p.inputs + first, p.split_inputs[i] - first)
            first = p.split_inputs[i]
            found.append((p.split_backend[i], p.split_start[i], p.split_stop[i], inputs))
        return tuple(found)

    @property
    def copies(self):
        """For each copy, a tuple (the id of the graph tensor whose layout the copy has, its backend)."""
        return pairs_tuple(self.c.copy_like, self.c.copy_backend, self.c.n_copies)

    @property
    def kept(self):
        """For each copy: whether it is made once, and kept while its source stays unchanged."""
        return tuple(map(bool, ints_tuple(self.c.copy_kept, self.c.n_copies)))

    @property
    def slot_copies(self):
        """For each further copy slot (the ids after the copies): the index of its copy."""
        return ints_tuple(self.c.slot_copy, self.c.n_slots)

    def copy_of(self, int32_t i):
        """The index of the copy to which id i belongs, as its first or a further copy slot; i is not a graph tensor."""
        self.check(i)
        i -= self.c.n_tensors
        return i if i < self.c.n_copies else self.c.slot_copy[i - self.c.n_copies]

    @property
    def write_backs(self):
        """Pairs (tensor id of a node that writes through a copy, index of that copy)."""
        return pairs_tuple(self.c.back_node, self.c.back_copy, self.c.n_write_backs)

    @property
    def sequence(self):
        """Ids in execution order, copies (n_tensors + c) before the nodes of their split."""
        return ints_tuple(self.c.seq, self.c.n_seq)

    @property
    def groups(self):
        """The fusion groups: tuples of positions in the graph's nodes; each is computed at its last position."""
        cdef gs_plan *p = &self.c
        cdef list found = []
        cdef int32_t i
        for i in range(p.n_groups):
            found.append(ints_tuple(p.group_member + p.group_begin[i], p.group_begin[i + 1] - p.group_begin[i]))
        return tuple(found)

    # -- arenas -----------------------------------------------------------------

    @property
    def chunk_sizes(self):
        """For each backend, in order, the bytes of each of its buffers."""
        cdef gs_plan *p = &self.c
        cdef list found = []
        cdef int32_t i
        if self._chunk_sizes is None:
            for i in range(p.n_backends):
                found.append(ints_tuple(p.chunk_nbytes + p.arena[i].first_chunk, p.arena[i].n_chunks))
            self._chunk_sizes = tuple(found)
        return self._chunk_sizes

    @property
    def buffer_sizes(self):
        """For each backend, in order, the bytes of all its buffers."""
        cdef list found = []
        cdef int32_t i
        for i in range(self.c.n_backends):
            found.append(self.c.arena[i].nbytes)
        return tuple(found)

    @property
    def live_bytes(self):
        """For each backend, in order, the most bytes alive at one position."""
        cdef list found = []
        cdef int32_t i
        for i in range(self.c.n_backends):
            found.append(self.c.arena[i].live_bytes)
        return tuple(found)

    @property
    def methods(self):
        """For each backend, how its offsets were chosen."""
        cdef list found = []
        cdef int32_t i
        for i in range(self.c.n_backends):
            found.append(_arena_method(self.c.arena[i].method))
        return tuple(found)

    def arrays(self):
        """{name: contents} of the arrays of gs_plan (include/ggml_sched/plan.h) that a program is made from.

        int32: `arena_of`, `birth`, `src`, `seq`, `assign`; int64: `offset`, with the chunks of an arena
        gs_arena_result.stride bytes apart; bytes: `state`.
        """
        cdef gs_plan *p = &self.c
        cdef Py_ssize_t n = p.n
        self.find_exclusive()
        return {
            "arena_of": (<char *>p.arena_of)[:4 * n], "birth": (<char *>p.birth)[:4 * n],
            "src": (<char *>p.src)[:4 * p.src_begin[n]], "seq": (<char *>p.seq)[:4 * p.n_seq],
            "offset": (<char *>p.offset)[:8 * n], "state": (<char *>p.state)[:n],
            "assign": (<char *>p.assign)[:4 * p.n_tensors],
        }

    # -- ids ---------------------------------------------------------------------

    def backend_index(self, int32_t i):
        """Index of the backend that computes or holds id i, -1 if it is unused."""
        self.check(i)
        return self.c.arena_of[i] if i >= self.c.n_tensors else self.c.assign[i]

    def memory_index(self, int32_t i):
        """Index of the backend whose arena holds id i, -1 for memory outside the plan."""
        self.check(i)
        return self.c.arena_of[i]

    def offset(self, int32_t i):
        """Bytes from the start of the backend's buffer (of chunk `chunk(i)`), -1 for memory outside the plan."""
        self.check(i)
        if self.c.offset[i] < 0 or not self.c.arena[self.c.arena_of[i]].stride:
            return self.c.offset[i]
        return self.c.offset[i] % self.c.arena[self.c.arena_of[i]].stride

    def chunk(self, int32_t i):
        """Which of the backend's buffers holds id i: 0 unless a maximum buffer size divides the arena into several."""
        self.check(i)
        if self.c.offset[i] < 0 or not self.c.arena[self.c.arena_of[i]].stride:
            return 0
        return self.c.offset[i] // self.c.arena[self.c.arena_of[i]].stride

    def live_at_peak(self, int32_t backend):
        """Ids that own memory of a backend at the position where most bytes are alive, largest first."""
        cdef gs_plan *f = &self.c
        cdef list owners = [], alive = []
        cdef int32_t i
        changes = [0] * (f.n_seq + 2)
        for i in range(f.n):
            if f.arena_of[i] == backend and f.birth[i] >= 0:
                owners.append(i)
        for i in owners:
            changes[f.birth[i]] += f.size[i]
            changes[f.death[i] + 1] -= f.size[i]
        totals = list(itertools.accumulate(changes))
        peak = max(range(len(totals)), key=totals.__getitem__)
        for i in owners:
            if f.birth[i] <= peak <= f.death[i]:
                alive.append(i)
        return sorted(alive, key=lambda i: (-f.size[i], i))

    def size(self, int32_t i):
        """Bytes of id i's own memory, rounded up to the alignment; 0 for views and in-place reuse."""
        self.check(i)
        return 0 if self.c.root[i] >= 0 else self.c.size[i]

    def trimmed(self, int32_t i):
        """(position at which the tail of i's memory is freed, bytes that stay allocated); None if no tail is freed."""
        self.check(i)
        if self.c.birth[i] < 0 or self.c.rest[i] == self.c.size[i]:
            return None
        return self.c.trimmed[i], self.c.rest[i]

    def root(self, int32_t i):
        """The id whose memory i shares, as a view or in place; -1 for memory of its own."""
        self.check(i)
        return self.c.root[i]

    def is_inplace(self, int32_t i):
        """Whether node i reuses the memory of its root in place."""
        self.check(i)
        return bool(self.c.state[i] & GS_STATE_INPLACE)

    def is_late(self, int32_t i):
        """Whether the memory of leaf i held another tensor before, so that i is loaded at its birth."""
        self.check(i)
        return bool(self.c.state[i] & GS_STATE_LATE)

    def is_exclusive(self, int32_t i):
        """Whether no other tensor ever uses the memory of leaf or copy i, so that its data survives computes."""
        self.check(i)
        self.find_exclusive()
        return bool(self.c.state[i] & GS_STATE_EXCLUSIVE)

    def is_overwritten(self, int32_t i):
        """Whether another tensor's data is in the memory of node or leaf i at the end of a compute."""
        cdef gs_plan *f = &self.c
        cdef int32_t k, r, owner, at = -1
        self.check(i)
        if f.offset[i] < 0:
            return False
        owner = plan_owner(f, i)
        if f.op[i] == GS_OP_NONE:
            # A leaf has no position in the sequence: use its birth.
            at = f.birth[owner]
        for k in range(f.n_seq):
            if f.seq[k] == i:
                at = k
            elif at >= 0 and f.state[f.seq[k]] & GS_STATE_INPLACE and plan_owner(f, f.seq[k]) == owner:
                return True
        # Compare with r: i itself, or its root if i is a view.  Other bytes of the owner's memory may be overwritten.
        r = i if f.root[i] < 0 or f.state[i] & GS_STATE_INPLACE else f.root[i]
        for k in range(f.n):
            if (k != owner and f.arena_of[k] == f.arena_of[r] and f.birth[k] > at
                    and f.offset[k] < f.offset[r] + f.size[r] and f.offset[r] < f.offset[k] + f.size[k]):
                return True
        return False

    def is_inner(self, int32_t i):
        """Whether node i is an inner member of a fusion group, so that its result is never written."""
        self.check(i)
        return bool(self.c.state[i] & GS_STATE_INNER)

    def lifetime(self, int32_t i):
        """(birth, death): the positions in `sequence` between which i's memory is allocated; None if it never is."""
        self.check(i)
        i = plan_owner(&self.c, i)
        if self.c.birth[i] < 0:
            return None
        return self.c.birth[i], self.c.death[i]

    def sources(self, int32_t i):
        """The ids that i reads: a copy in place of each source that is read through a copy."""
        self.check(i)
        return ints_tuple(self.c.src + self.c.src_begin[i], self.c.src_begin[i + 1] - self.c.src_begin[i])

    def reason(self, int32_t i, str assigned_by=None):
        """The reason for the backend of graph tensor i, as text; `assigned_by`: what assigned backends, if not the
        caller."""
        self.check(i)
        if assigned_by is not None and i < self.c.n_tensors and self.c.reason[i] in _ASSIGNED:
            return f"{assigned_by} assigned it{_ASSIGNED[self.c.reason[i]]}"
        return _REASONS[self.c.reason[i]] if i < self.c.n_tensors else "a copy"

    def rule(self, int32_t i):
        """The name of the reason for the backend of graph tensor i: "user", "weight", ..."""
        self.check(i)
        return _REASON_NAMES[self.c.reason[i]] if i < self.c.n_tensors else "copy"

    cdef void find_exclusive(self) noexcept:
        """Set GS_STATE_EXCLUSIVE and GS_STATE_WRITTEN on first use: planning itself does not need them."""
        if not self.has_exclusive:
            plan_mark_exclusive(&self.c)
            self.has_exclusive = True

    cdef int check(self, int32_t i) except -1:
        if not 0 <= i < self.c.n:
            raise IndexError(f"id {i} of {self.c.n}")
        return 0


cdef str _arena_method(int32_t method):
    if method == GS_METHOD_REPLAYED:
        return "replayed"
    return "best fit" if method == GS_METHOD_BEST_FIT else method_name(method - GS_METHOD_PACKED)


def plan_values(PlanData data not None):
    """The plan as {name: an integer, a list of integers, or a list of lists}, as `plan_from_values` reads it."""
    data.find_exclusive()
    return values_of_plan(&data.c)


def plan_from_values(values, Py_ssize_t n_nodes):
    """The plan that `plan_values` described, for a graph of n_nodes nodes; GraphError for values that are no plan."""
    cdef PlanData data = PlanData.__new__(PlanData)
    plan_take_values(&data.c, values, n_nodes)
    return data


def make_plan(Request request not None, policy not None):
    """Run the passes of a policy; raises UnsupportedOp, PlacementError, OutOfMemory, GraphError naming the tensor."""
    cdef PlanData p = PlanData.__new__(PlanData)
    cdef gs_failure failed
    cdef int status
    request.query_support()
    request.groups(policy)
    request.set_policy(policy)
    with nogil:
        status = gs_plan_make(&request.c, &p.c, &failed)
    if status != GS_OK:
        raise_planning_error(status, request, &failed)
    return p


def replay_plan(Request request not None, PlanData reserved not None, policy not None):
    """A plan with the decisions of a reserved plan, for a graph of the same wiring; None if they do not fit it.

    The caller has checked that wiring (`Graph.wiring`), residency and assignments (`Request.key`), and fusion groups
    (`Request.groups`) are those of the reserved graph.
    """
    cdef PlanData p = PlanData.__new__(PlanData)
    cdef bint serves
    cdef gs_failure failed
    cdef int status
    if request.c.g.n_tensors != reserved.c.n_tensors:
        return None
    request.query_support()
    request.set_policy(policy)
    with nogil:
        status = gs_plan_replay(&request.c, &reserved.c, &p.c, &serves, &failed)
    if status != GS_OK:
        raise_planning_error(status, request, &failed)
    return p if serves else None


cdef int raise_planning_error(int status, Request request, const gs_failure *failed) except -1:
    cdef tuple backends = request.devices.backends
    cdef Tensor t
    if status == GS_NO_HOST_MEMORY or failed.tensor < 0:
        raise no_host_memory(f"planning {request.c.g.n_tensors} tensors")
    t = request.graph.tensors[failed.tensor]
    if status == GS_UNSUPPORTED_OP:
        raise UnsupportedOp(unsupported(t, backends))
    if status == GS_BAD_PLACEMENT:
        raise PlacementError(f"{describe(t)} has memory on backend {t.backend.name!r}, which does not support it")
    if failed.backend >= 0:
        b = backends[failed.backend]
        raise OutOfMemory(f"{describe(t)}: {failed.nbytes} bytes exceed the maximum buffer size {b.max_buffer_size} of "
                          f"backend {b.name!r}", b.name, failed.nbytes, b.max_buffer_size)
    raise OutOfMemory(f"{describe(t)}: sizes leave the 64-bit range", None, t.layout.nbytes, None)
