# cython: language_level=3
"""Bound steps: the steps of a program with addresses and backends.

A bound step is issued to the queue of its `backend`.  `due()` runs on the caller's thread and returns an action, a
function that issues the step.  The action may run later and on another thread, when the caller may have set other
inputs already; so `due()` takes the data of inputs, and the action uses the data taken.  An action makes its backend
(or the host, where the host reads the data) wait for the events that are its argument, and for nothing else.  It
returns an event recorded at its end; None means that its backend's queue alone shows the end.  Objects appended to
`keep_alive` must stay alive until the backends have executed what was queued.

Where no step waits for another, or every backend is done when a call returns, `run_in_order` issues the steps one after
the other without making actions, which saves time for small graphs: a model's token is a few small loads and one run.
In `run_in_order` a load into memory that the host can address is a `memcpy`.  Backends that are compiled with Cython
compute and copy without a call of Python (`c_compute`, `c_copy`).
"""

from cpython cimport array
from cpython.method cimport PyMethod_Check, PyMethod_GET_FUNCTION
from cpython.time cimport perf_counter_ns
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from ggml_sched._c cimport GS_NOT_DONE, GS_OK, gs_error, gs_node, gs_range_fits, gs_run_nodes, gs_status_name
from ggml_sched._graph cimport COMPUTES, COPIES, BackendBase, BufferBase, NodeTable, Tensor, label

import array
from functools import partial

import numpy as np

from ggml_sched.graph import hostdata
from ggml_sched.backend import Backend, GraphView, new_graph_plan, note_copy, note_nodes, staged, wait_for
from ggml_sched.errors import BackendError, HazardError, PlacementError, each, no_host_memory


cdef class LocationVersions:
    """For each location that no other tensor uses, the version of the data in it: unchanged data is not moved again.

    A source's version grows whenever its data changes.  `forget` is called when other graphs may have used the memory.
    """

    def __cinit__(self):
        self.versions = {}

    cpdef bint is_new(self, int64_t location, int64_t version) except -1:
        """Whether a location does not hold this version of its source; records that it now does."""
        if self.versions.get(location) == version:
            return False
        self.versions[location] = version
        return True

    def forget(self):
        self.versions.clear()


def is_false(answer):
    """Whether a callback returned False or NumPy's False; None, 0 and other false values do not count."""
    return answer is False or isinstance(answer, np.bool_) and not answer


def home_of(Tensor tensor not None):
    """The backend that holds a tensor; PlacementError if its buffer was closed after the compute was queued."""
    backend = tensor.backend
    if backend is None:
        raise PlacementError(f"{tensor!r} lost its memory before it was used: its buffer was closed")
    return backend


cdef inline bint is_method(found, function):
    """Whether `found`, an attribute of an object, is `function` bound as a method: not overridden, not replaced."""
    return PyMethod_Check(found) and <object>PyMethod_GET_FUNCTION(found) is function


cdef class BoundStep:
    """A step of a program, bound to tensors with addresses."""

    def __init__(self, backend):
        self.backend = backend

    def due(self):
        """The action that issues the step; None if the step is left out, because its data is in place already.  Only a
        step with `versions` is left out."""
        raise NotImplementedError       # each subclass overrides it

    cdef int take(self, list keep_alive) except -1:
        """Issue the step at once, without events to wait for; returns 1 if it is left out, because its data is in
        place, else 0."""
        action = self.due()
        if action is None:
            return 1
        action((), keep_alive)
        return 0

    def free(self):
        """Free what the backend has prepared for the step; it prepares something for a BoundRun only."""


cdef class BoundLoad(BoundStep):
    """Write the data that the caller set for `leaf`, from byte `start` on, to the memory of `tensor`.

    `versions` is not None if no other tensor uses that memory: then the data is written only after a new `set`.
    """

    def __init__(self, backend, Tensor leaf not None, Tensor tensor not None, int64_t start, int64_t location,
                 LocationVersions versions):
        BoundStep.__init__(self, backend)
        self.leaf, self.tensor, self.start, self.location, self.versions = leaf, tensor, start, location, versions

    cdef bint is_due(self) except -1:
        """Whether the step has bytes to write that are not in place; with `versions`, records that they now are."""
        if self.versions is None:
            return bool(self.leaf.stash)
        return bool(self.leaf.stash) and self.versions.is_new(self.location, self.leaf.version)

    def due(self):
        if not self.is_due():
            return None if self.versions is not None else _nothing
        data = self.leaf.stash
        part = memoryview(data)[self.start : self.start + self.tensor.layout.nbytes]

        def load(events, keep_alive):
            backend = home_of(self.tensor)
            try:
                for event in events:
                    backend.event_wait(event)
                keep_alive.append(data)
                backend.set_tensor_async(self.tensor, part)
            except BaseException as error:
                note_copy(error, self.leaf, None, backend)
                raise

        return load

    cdef int take(self, list keep_alive) except -1:
        cdef char *at = self.tensor.plain()
        cdef int64_t n = self.tensor.layout.nbytes
        cdef bytes data = self.leaf.stash
        if (data is None or at == NULL or not gs_range_fits(self.start, n, len(data))
                or not is_method(self.tensor.c_buffer().backend.set_tensor_async, Backend.set_tensor_async)):
            return BoundStep.take(self, keep_alive)
        if not self.is_due():
            return 1
        memcpy(at, <const char *>data + self.start, <size_t>n)
        return 0


def _nothing(events, keep_alive):
    """The action of a load that has nothing to write: its leaf has no bytes, or was never set, because nodes write it
    before any node reads it."""


cdef class BoundTransfer(BoundStep):
    """Copy `src` to `dst`, a tensor on another backend, in the queue of `backend`, which holds one of the two."""

    def __init__(self, backend, Tensor src not None, Tensor dst not None):
        BoundStep.__init__(self, backend)
        self.src, self.dst = src, dst

    def due(self):
        return self.transfer

    cdef int take(self, list keep_alive) except -1:
        self.copy_after((), keep_alive)
        return 0

    def transfer(self, events, list keep_alive):
        """The action of the step: `copy_after`, which only C can call, as a method for Python."""
        return self.copy_after(events, keep_alive)

    cdef object copy_after(self, events, list keep_alive):
        """Copy after the events.

        The backends copy directly where they support it.  Otherwise the host waits for `src`, reads it, and queues a
        write to `dst`.  Returns an event at the end of the copy, or None where the queue alone shows the end.
        """
        cdef Tensor src = self.src, dst = self.dst
        cdef int k
        queue, there, here = self.backend, home_of(src), home_of(dst)
        try:
            for event in events:
                queue.event_wait(event)
            if src.layout.nbytes == 0:
                return None
            dst.touch()
            if queue is there and here.concurrent_copies and (
                    self.copied_in_c(there, here) or there.cpy_tensor_async(src, dst)):
                return None
            for k in range(2):
                one, other = (here, there) if k == 0 else (there, here)
                _let_follow(one, queue)
                if self.copied_in_c(one, other) or (
                        one.cpy_tensor_from(src, dst) if k == 0 else one.cpy_tensor_to(src, dst)):
                    return _let_follow(queue, one)
            # The host reads `src`.  The calls of _let_follow above made both backends wait for `queue`, and so for the
            # events.
            staging = staged(src, dst)
            keep_alive.append(staging)
            here.set_tensor_async(dst, memoryview(staging))
            return _let_follow(queue, here)
        except BaseException as error:
            note_copy(error, src, there, here)
            raise

    cdef bint copied_in_c(self, BackendBase one, BackendBase other) except -1:
        """Copy by `c_copy` of backend `one`; False if `one` does not make this copy.  BackendError if the copy fails.

        `other`: the backend at the other end of the copy.
        """
        cdef gs_error error
        cdef const gs_node *a
        cdef const gs_node *b
        cdef int status
        if not one.answers_in_c() & COPIES:
            return False
        if self.table is None:
            self.table = NodeTable((self.src, self.dst))
        a, b = self.table.node(0), self.table.node(1)
        error.message[0] = 0
        with nogil:
            status = one.c_copy(a, b, other, &error)
        if status != GS_OK and status != GS_NOT_DONE:
            raise failure(one, status, &error, f"copying {label(self.src)}")
        return status == GS_OK


cdef class BoundCopy(BoundTransfer):
    """Copy a tensor to the memory of a copy.

    `versions` is not None if no other tensor uses that memory: then an unchanged source is not copied again.  If
    `backend` holds `src`, and the backend of `dst` takes data while it computes (`concurrent_copies`), a direct copy
    does not wait for what is queued on the backend of `dst`.
    """

    def __init__(self, backend, Tensor src not None, Tensor dst not None, int64_t location, LocationVersions versions):
        BoundTransfer.__init__(self, backend, src, dst)
        self.location, self.versions = location, versions

    cdef bint is_due(self) except -1:
        """Whether the data must be copied, because it is not in place; with `versions`, records that it now is."""
        return self.versions is None or self.versions.is_new(self.location, self.src.data_version)

    def due(self):
        return self.transfer if self.is_due() else None

    cdef int take(self, list keep_alive) except -1:
        if not self.is_due():
            return 1
        self.copy_after((), keep_alive)
        return 0


cdef class BoundFetch(BoundStep):
    """Let the store `backend` read bytes of a weight, from byte `start` of its root, to `dst`, a copy elsewhere.

    The fetch may write all bytes from `room[0]` to before `room[1]` of the buffer of `dst`: no other tensor uses them
    meanwhile.
    """

    def __init__(self, backend, Tensor src not None, Tensor dst not None, int64_t start, int64_t nbytes,
                 tuple room not None):
        BoundStep.__init__(self, backend)
        self.src, self.dst, self.start, self.nbytes, self.room = src, dst, start, nbytes, room

    def due(self):
        return self.fetch

    def fetch(self, events, keep_alive):
        """The action of the step: let the store read the bytes after the events."""
        here = home_of(self.dst)
        try:
            for event in events:
                self.backend.event_wait(event)
            if self.nbytes:
                self.dst.touch()
                self.backend.fetch(self.src, self.start, self.nbytes, self.dst, self.room)
        except BaseException as error:
            note_copy(error, self.src, self.backend, here)
            raise


cdef class BoundExperts(BoundStep):
    """Copy only the experts of a weight whose indices are in `ids`.

    `src` and `dst` are expert weights [k, m, n_expert], in which each expert's bytes follow those of the one before.
    Ids out of range are ignored here, and refused by the kernel.  `on_host`: the ids are an input that the caller set;
    otherwise a node computed them, and they are read from its backend.
    """

    def __init__(self, backend, Tensor src not None, Tensor dst not None, Tensor ids not None, bint on_host):
        BoundStep.__init__(self, backend)
        self.src, self.dst, self.ids, self.on_host, self.used = src, dst, ids, on_host, ()

    def due(self):
        # The ids are taken now, because the action may run after the caller has set those of a later compute.
        given = None
        if self.on_host:
            given = (self.ids.root.stash or b"")[self.ids.view_offs : self.ids.view_offs + self.ids.nbytes]
        return lambda events, keep_alive: self.copy(given, events, keep_alive)

    def copy(self, given, events, keep_alive):
        """The action of the step; `given`: the bytes of the ids, None to read them from the backend that has them."""
        there, here = home_of(self.src), home_of(self.dst)
        try:
            for event in events:
                here.event_wait(event)
                if given is None:
                    event.backend.event_synchronize(event)
            if given is None:
                given = bytearray(self.ids.nbytes)
                home_of(self.ids).get_tensor(self.ids, given)
            ids = np.unique(hostdata.array_over(self.ids, given)) if self.ids.nbytes else ()
            src, used = self.src, []
            for i in ids:
                if 0 <= i < src.ne[2]:
                    used.append(int(i))
            self.used = tuple(used)
            size = (src.ne[1] - 1) * src.nb[1] + src.ne[0] // src.type.block_size * src.nb[0]
            self.dst.touch()
            for i in self.used:
                staging = bytearray(size)
                there.get_tensor(src, staging, i * src.nb[2])
                keep_alive.append(staging)
                here.set_tensor_async(self.dst, memoryview(staging), i * src.nb[2])
        except BaseException as error:
            note_copy(error, self.src, there, here)
            raise


cdef class BoundRun(BoundStep):
    """Compute nodes on one backend, which prepares them on first use (`graph_plan_create`).

    `nodes` are nodes of the graph.  `twins`, of the same number, are the tensors that the backend computes: a node
    itself, or a tensor like it that reads copies or has its result in a copy.  `groups`: the fusion groups, as indices
    into `nodes`; `needed`: indices of the nodes whose results must be in memory, None for all (see GraphView).
    """

    def __init__(self, backend, tuple nodes not None, tuple twins not None, tuple groups not None=(), needed=None):
        BoundStep.__init__(self, backend)
        self.nodes, self.twins, self.groups, self.needed = nodes, twins, groups, needed

    def __dealloc__(self):
        free(self.memory)

    cdef int prepare_c(self) except -1:
        """Make the argument of the backend's `c_compute`: the nodes, at their present addresses, and the groups."""
        cdef int32_t n = <int32_t>len(self.twins), k, n_members = 0, at = 0
        cdef const gs_node **nodes
        cdef int32_t *begin
        cdef int32_t *member
        cdef unsigned char *needed
        cdef Tensor t
        table = NodeTable(self.twins)
        for group in self.groups:
            n_members += <int32_t>len(group)
        memory = malloc(n * sizeof(void *) + (len(self.groups) + 1 + n_members) * sizeof(int32_t) + n + 1)
        if memory == NULL:
            raise no_host_memory(f"a run of {n} nodes")
        free(self.memory)
        self.memory, self.table = memory, table
        nodes = <const gs_node **>memory
        begin = <int32_t *>(nodes + n)
        member = begin + len(self.groups) + 1
        needed = <unsigned char *>(member + n_members)
        for k in range(n):
            nodes[k] = &table.nodes[k]
            needed[k] = self.needed is None or k in self.needed
        begin[0] = 0
        for k, group in enumerate(self.groups):
            for i in group:
                member[at] = i
                at += 1
            begin[k + 1] = at
        memset(&self.c, 0, sizeof(gs_run_nodes))
        self.c.n_nodes, self.c.nodes, self.c.n_groups = n, nodes, <int32_t>len(self.groups)
        if self.c.n_groups:
            self.c.group_begin, self.c.group_member, self.c.needed = begin, member, needed
        self.buffers = tuple({t.c_buffer(): None for t in table.tensors if t.c_buffer() is not None})
        return 0

    cdef bint compute_c(self) except -1:
        """Compute by the backend's `c_compute`; False if it has none, or does not compute these nodes by it."""
        cdef BackendBase backend = <BackendBase?>self.backend
        cdef BufferBase buffer
        cdef gs_error error
        cdef const gs_run_nodes *run = &self.c
        cdef int status
        if not backend.answers_in_c() & COMPUTES:
            return False
        if self.table is None:
            self.prepare_c()
        for buffer in self.buffers:
            if buffer.closed:
                raise PlacementError(f"a run uses a buffer of backend {buffer.backend.name!r} ({buffer.size} bytes) "
                                     "that is closed")
        error.message[0] = 0
        with nogil:
            status = backend.c_compute(run, &error)
        if status != GS_OK and status != GS_NOT_DONE:
            raise failure(backend, status, &error, f"computing {len(self.nodes)} nodes")
        return status == GS_OK

    def view(self):
        """The argument of the backend's `graph_plan_create` and `graph_compute`."""
        return GraphView(self.twins, self.groups, self.needed)

    def due(self):
        return self.run

    def run(self, events, keep_alive):
        """The action of the step: compute the nodes after the events, by `c_compute` if the backend has it."""
        try:
            if not events and self.compute_c():
                return
            if not self.is_prepared:
                self.handle = new_graph_plan(self.backend, self.view())
                self.is_prepared = True
            for event in events:
                self.backend.event_wait(event)
            if events and self.compute_c():
                return
            handle = self.handle
            if handle is None:
                self.backend.graph_compute(self.view())
            else:
                self.backend.graph_plan_compute(handle)
        except BaseException as error:
            note_nodes(error, self.backend, self.nodes)
            raise

    cdef int take(self, list keep_alive) except -1:
        handle = self.handle        # a reference of our own: another thread may call `free` meanwhile
        if not self.is_prepared or handle is None:
            self.run((), keep_alive)
            return 0
        try:
            self.backend.graph_plan_compute(handle)
        except BaseException as error:
            note_nodes(error, self.backend, self.nodes)
            raise
        return 0

    def parts(self, ask):
        """Yield the run in parts that each end with an observed node, as pairs (twins of the part, observed node).

        A node is observed unless `ask(node)` is False; with `ask=None` all are.  The last part has None for the node if
        the last node is not observed.  `ask` is called for the nodes of a part just before the part is yielded.  Fusion
        groups are not kept together, since each node that is observed needs its own result.
        """
        start, last = 0, len(self.nodes) - 1
        for k, node in enumerate(self.nodes):
            wanted = ask is None or not is_false(ask(node))
            if wanted or k == last:
                yield self.twins[start : k + 1], node if wanted else None
                start = k + 1

    def free(self):
        handle, self.handle, was_prepared = self.handle, None, self.is_prepared
        self.is_prepared = False
        if was_prepared and handle is not None:
            self.backend.graph_plan_free(handle)


cdef class BoundWriteBack(BoundTransfer):
    """Copy a node's result, which was computed into a copy (`src`), to the node's own memory (`dst`)."""


cdef object failure(BackendBase backend, int status, gs_error *error, str doing):
    """The exception for a status that a compiled backend returned; `doing` is the message's text for what failed."""
    cdef const char *name = gs_status_name(status)
    cdef bytes said = error.message
    why = said.decode(errors="replace") if said else name.decode() if name != NULL else f"status {status}"
    return BackendError(f"backend {backend.name!r} failed while {doing}: {why}")


def _let_follow(later, earlier):
    """Make all later work of backend `later` wait for the work queued on `earlier` so far.

    Returns the event for which it waits; None if both are one backend, whose queue is in order anyway, or if `earlier`
    has no queue: it is done when a call returns.
    """
    if later is earlier or is_method(earlier.synchronize, Backend.synchronize):
        return None
    event = earlier.event_new()
    earlier.event_record(event)
    later.event_wait(event)
    return event


# -- functions that every compute calls ------------------------------------------------------------------------


def run_in_order(list steps not None, list keep_alive not None):
    """Issue bound steps one after the other, without events; `keep_alive` gets the objects that backends still use."""
    cdef BoundStep step
    for step in steps:
        step.take(keep_alive)


cdef array.array _NO_TIMES = array.array("q")


cdef class Recording:
    """The readings of the clock (`time.perf_counter_ns`) of one compute of a trace; made by `Recorder.begin`."""

    def end(self):
        """Note that the call that issued the compute has ended, without an exception."""
        self.stop, self.has_failed = perf_counter_ns(), False

    def note_start(self, Py_ssize_t step):
        """Note that a step begins now."""
        self.check(step)
        self.times.data.as_longlongs[2 * step] = perf_counter_ns()

    def note_end(self, Py_ssize_t step):
        """Note that a step has ended."""
        self.check(step)
        self.times.data.as_longlongs[2 * step + 1] = perf_counter_ns()

    cdef int check(self, Py_ssize_t step) except -1:
        if not 0 <= step < self.n_steps:
            raise IndexError(f"step {step} of {self.n_steps}")
        return 0


cdef class Recorder:
    """Makes the recordings of a trace: the base of `Trace`, compiled because every traced compute calls it."""

    def __cinit__(self, *args, **kwargs):
        self.recordings = []

    def begin(self, allocation, Py_ssize_t n_steps):
        """A new recording, for a compute of an allocation; the compute begins now."""
        cdef Recording recording = Recording.__new__(Recording)
        data, tensors = allocation.data, allocation.tensors
        if self.data is not data or self.tensors is not tensors:
            self.plan = self.plan_of(allocation)
            self.data, self.tensors = data, tensors
        recording.recorder, recording.plan, recording.n_steps, recording.has_failed = self, self.plan, n_steps, True
        recording.times = array.clone(_NO_TIMES, 2 * n_steps, True)
        self.recordings.append(recording)
        recording.start = perf_counter_ns()
        return recording

    def plan_of(self, allocation):
        """The plan of an allocation: one object for all of its computes."""
        raise NotImplementedError       # Trace overrides it


def run_in_order_recorded(list steps not None, list keep_alive not None, Recording recording not None):
    """`run_in_order`, with readings of the clock before and after each step that is not left out."""
    cdef BoundStep step
    cdef Py_ssize_t k = 0
    cdef long long *times = recording.times.data.as_longlongs
    cdef int64_t start, stop = perf_counter_ns()
    if recording.n_steps != len(steps):
        raise ValueError(f"a recording of {recording.n_steps} steps for {len(steps)}")
    for step in steps:
        start = stop
        if step.take(keep_alive) == 0:
            stop = perf_counter_ns()
            times[k], times[k + 1] = start, stop
        k += 2


def complete_at_once(tuple backends not None):
    """Whether every backend is done when a call returns: none of them overrides `synchronize`."""
    for backend in backends:
        if not is_method(backend.synchronize, Backend.synchronize):
            return False
    return True


def synchronize(tuple backends not None):
    """Wait for every backend, even if one raises, then raise the first error.

    Backends that inherit `synchronize` are done when a call returns, and are not called.
    """
    waits = []
    for backend in backends:
        if not is_method(backend.synchronize, Backend.synchronize):
            waits.append(partial(wait_for, backend))
    if waits:
        each(waits)


def check_inputs(list leafs not None, bint zero):
    """Raise HazardError for an input that was never set; with `zero`, set such inputs to zeros instead."""
    cdef Tensor leaf
    for leaf in leafs:
        if leaf.stash is None:
            if not zero:
                raise HazardError(
                    f"input {label(leaf)} ({leaf.type} {list(leaf.ne)}) was never set: t.set(array) "
                    "gives it data, zero=True computes with zeros")
            leaf.stash = bytes(leaf.nbytes)
            leaf.version += 1


def note_written(list leafs not None, int64_t n_done):
    """Note which leafs have lost the data that the caller set, because one of the first `n_done` nodes wrote to them.

    `leafs` are pairs (leaf that nodes write to, position of the first such node).  A resident among them gets a new
    version instead, so that copies of it are made again.
    """
    cdef Tensor root
    cdef int64_t first
    for root, first in leafs:
        if root.settled() is not None:
            root.version += 1
        else:
            root.overwritten = first < n_done
