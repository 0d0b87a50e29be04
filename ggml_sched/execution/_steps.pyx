# cython: language_level=3
"""Steps with addresses: what the executor does for each step of a program.

A bound step belongs to one backend, in whose queue it stands.  `due()` decides on the caller's thread what there is
to do and returns it as an action, which may be made later, and on another thread: by then the caller may have set
other inputs.  An action first lets its backend (or, where the host itself must read, the host) wait for the events
that it is given, and never waits for anything else; it returns an event that stands for its end, or None: the queue's
order does.  What it appends to `keep_alive` must stay alive until the backends have done what was queued.

Where no step waits for another, or every backend is done when a call returns, `run_in_order` takes the steps as they
come, without an action for each: a model's token is a few small loads and one run.  Loads go straight to memory that is
plain bytes.
"""

from cpython.method cimport PyMethod_Check, PyMethod_GET_FUNCTION
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from ggml_sched._c cimport gs_range_fits
from ggml_sched._graph cimport Tensor

import numpy as np

from ggml_sched.graph import hostdata
from ggml_sched.backend import Backend, GraphView, staged
from ggml_sched.errors import HazardError, PlacementError, each


cdef class PlaceVersions:
    """Which version of its source each kept place holds; forgotten at once when the memory has served others."""

    def __cinit__(self):
        self.versions = {}

    cpdef bint is_new(self, int64_t place, int64_t version) except -1:
        """Whether the place holds another version; from now on, this one."""
        if self.versions.get(place) == version:
            return False
        self.versions[place] = version
        return True

    def forget(self):
        self.versions.clear()


def is_false(answer):
    """Whether a callback's answer is False, NumPy's included; None, 0 and the like are no such answer."""
    return answer is False or isinstance(answer, np.bool_) and not answer


def home_of(Tensor tensor not None):
    """The backend that holds a tensor; PlacementError when its buffer was closed while a compute was queued."""
    backend = tensor.backend
    if backend is None:
        raise PlacementError(f"{tensor!r} lost its memory before it was used: its buffer was closed")
    return backend


cdef inline bint is_method(found, function):
    """Whether what was found on an object is this function of its class, and not put in its place since."""
    return PyMethod_Check(found) and <object>PyMethod_GET_FUNCTION(found) is function


cdef class BoundStep:
    """One step, with the tensors that it is about."""

    def __init__(self, backend):
        self.backend = backend

    def due(self):
        """What there is to do now; None for a step that is left out, as only one with `versions` may be."""
        raise NotImplementedError       # each kind of step says

    cdef int take(self, list keep_alive) except -1:
        """Do what is due, at once; there is nothing to wait for."""
        action = self.due()
        if action is not None:
            action((), keep_alive)
        return 0

    def free(self):
        """Release what the step holds."""


cdef class BoundLoad(BoundStep):
    """Bring what the caller has set for `leaf`, from byte `start` on, to the place of `tensor`.

    `versions`, of a place that nothing else uses: it is brought again only after a new `set`.
    """

    def __init__(self, backend, Tensor leaf not None, Tensor tensor not None, int64_t start, int64_t place,
                 PlaceVersions versions):
        BoundStep.__init__(self, backend)
        self.leaf, self.tensor, self.start, self.place, self.versions = leaf, tensor, start, place, versions

    cdef bint is_due(self) except -1:
        """Whether there are bytes that must be brought."""
        if self.versions is None:
            return bool(self.leaf.stash)
        return bool(self.leaf.stash) and self.versions.is_new(self.place, self.leaf.version)

    def due(self):
        if not self.is_due():
            return None if self.versions is not None else _nothing
        data = self.leaf.stash
        part = memoryview(data)[self.start : self.start + self.tensor.layout.nbytes]

        def load(events, keep_alive):
            backend = home_of(self.tensor)
            for event in events:
                backend.event_wait(event)
            keep_alive.append(data)
            backend.set_tensor_async(self.tensor, part)

        return load

    cdef int take(self, list keep_alive) except -1:
        cdef char *at = self.tensor.plain()
        cdef int64_t n = self.tensor.layout.nbytes
        cdef bytes data = self.leaf.stash
        if (data is None or at == NULL or not gs_range_fits(self.start, n, len(data))
                or not is_method(self.tensor.c_buffer().backend.set_tensor_async, Backend.set_tensor_async)):
            return BoundStep.take(self, keep_alive)
        if self.is_due():
            memcpy(at, <const char *>data + self.start, <size_t>n)
        return 0


def _nothing(events, keep_alive):
    """A leaf without bytes, or one that a node writes to before anything reads it, and that nobody has set."""


cdef class BoundCopy(BoundStep):
    """Copy `src` to `dst`, a place on another backend; `versions` as in BoundLoad.

    `backend` is the source's (the copy is pushed) or the destination's.
    """

    def __init__(self, backend, Tensor src not None, Tensor dst not None, int64_t place, PlaceVersions versions):
        BoundStep.__init__(self, backend)
        self.src, self.dst, self.place, self.versions = src, dst, place, versions

    def due(self):
        if self.versions is not None and not self.versions.is_new(self.place, self.src.data_version):
            return None
        return self.copy

    def copy(self, events, keep_alive):
        return transfer(self.src, self.dst, self.backend, events, keep_alive)


cdef class BoundExperts(BoundStep):
    """Copy only those experts of a mixture that `ids` names.

    `src` and `dst` are expert weights [k, m, n_expert], one expert's bytes after the other's; ids out of range are left
    to the kernel to refuse.
    `on_host`: the ids are what the caller has set; else they are read where a node computed them.
    """

    def __init__(self, backend, Tensor src not None, Tensor dst not None, Tensor ids not None, bint on_host):
        BoundStep.__init__(self, backend)
        self.src, self.dst, self.ids, self.on_host, self.used = src, dst, ids, on_host, ()

    def due(self):
        # Not ids.numpy(), which would give what the caller has set by then.
        given = None
        if self.on_host:
            given = (self.ids.root.stash or b"")[self.ids.view_offs : self.ids.view_offs + self.ids.nbytes]
        return lambda events, keep_alive: self.copy(given, events, keep_alive)

    def copy(self, given, events, keep_alive):
        there, here = home_of(self.src), home_of(self.dst)
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


def note_nodes(error, backend, tuple nodes not None):
    """Add to an exception of a backend which backend it is, and which nodes it was computing."""
    if nodes:
        names = [f"{node.name or 'unnamed'!r} ({node.op})" for node in (nodes[0], nodes[-1])]
        which = names[0] if len(nodes) == 1 else f"the {len(nodes)} nodes {names[0]} .. {names[1]}"
        error.add_note(f"backend {backend.name!r} was computing {which}")


cdef class BoundRun(BoundStep):
    """Compute nodes on one backend; prepared by the backend on first use.

    `nodes` are the graph's, `twins` what the backend computes in their place; `groups` and `needed` as in GraphView.
    """

    def __init__(self, backend, tuple nodes not None, tuple twins not None, tuple groups not None=(), needed=None):
        BoundStep.__init__(self, backend)
        self.nodes, self.twins, self.groups, self.needed = nodes, twins, groups, needed

    def view(self):
        """What the backend is given."""
        return GraphView(self.twins, self.groups, self.needed)

    def due(self):
        return self.run

    def run(self, events, keep_alive):
        try:
            if not self.is_prepared:
                self.handle = self.backend.graph_plan_create(self.view())
                self.is_prepared = True
            for event in events:
                self.backend.event_wait(event)
            handle = self.handle
            if handle is None:
                self.backend.graph_compute(self.view())
            else:
                self.backend.graph_plan_compute(handle)
        except BaseException as error:
            note_nodes(error, self.backend, self.nodes)
            raise

    cdef int take(self, list keep_alive) except -1:
        handle = self.handle        # kept while it is computed, even if another thread frees it
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
        """The nodes up to each one that `ask` wants (None: every one), and that node; in the end None, if the last is
        not wanted.  Asked one after the other, as they come; no groups."""
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


cdef class BoundWriteBack(BoundStep):
    """Copy what a node computed into a copy to the node's own memory, on another backend."""

    def __init__(self, backend, Tensor copy not None, Tensor node not None):
        BoundStep.__init__(self, backend)
        self.copy, self.node = copy, node

    def due(self):
        return lambda events, keep_alive: transfer(self.copy, self.node, self.backend, events, keep_alive)


def transfer(Tensor src not None, Tensor dst not None, queue, events, keep_alive):
    """Copy `src` to `dst`, after the events, as a step of `queue`: the source's backend or the destination's.

    The two backends do it where they can; otherwise the host reads, which waits for the source, and queues the rest.
    """
    there, here = home_of(src), home_of(dst)
    for event in events:
        queue.event_wait(event)
    if src.nbytes == 0:
        return None
    dst.touch()
    if queue is there and here.concurrent_copies and there.cpy_tensor_async(src, dst):
        return None
    for backend, copy in ((here, here.cpy_tensor_from), (there, there.cpy_tensor_to)):
        _let_follow(backend, queue)
        if copy(src, dst):
            return _let_follow(queue, backend)
    # The host reads: both backends follow the queue by now, and with it all that it waits for.
    staging = staged(src, dst)
    keep_alive.append(staging)
    here.set_tensor_async(dst, memoryview(staging))
    return _let_follow(queue, here)


def _let_follow(later, earlier):
    """Let what is queued on one backend from now on come after what is queued on another so far: the event between."""
    if later is earlier:
        return None
    event = earlier.event_new()
    earlier.event_record(event)
    later.event_wait(event)
    return event


# -- what every compute does ------------------------------------------------------------------------


def run_in_order(list steps not None, list keep_alive not None):
    """Do bound steps one after the other, without events; `keep_alive` as for an action."""
    cdef BoundStep step
    for step in steps:
        step.take(keep_alive)


def complete_at_once(tuple backends not None):
    """Whether every backend is done when a call returns: none of them overrides `synchronize`."""
    for backend in backends:
        if not is_method(backend.synchronize, Backend.synchronize):
            return False
    return True


def synchronize(tuple backends not None):
    """Wait for every backend, whatever raises, and raise the first error; those that are always done are not called."""
    waits = []
    for backend in backends:
        wait = backend.synchronize
        if not is_method(wait, Backend.synchronize):
            waits.append(wait)
    if waits:
        each(waits)


def check_inputs(list leafs not None, bint zero):
    """HazardError for an input that was never set; with `zero`, such inputs are zeros from now on."""
    cdef Tensor leaf
    for leaf in leafs:
        if leaf.stash is None:
            if not zero:
                raise HazardError(
                    f"input {leaf.name or 'unnamed'!r} ({leaf.type} {list(leaf.ne)}) was never set: t.set(array) "
                    "gives it data, zero=True computes with zeros")
            leaf.stash = bytes(leaf.nbytes)
            leaf.version += 1


def note_written(list leafs not None, int64_t n_done):
    """The first `n_done` nodes have been computed, or will be: `leafs` are pairs of one that nodes write to and the
    position of the first that does."""
    cdef Tensor root
    cdef int64_t first
    for root, first in leafs:
        if root.is_resident:
            root.version += 1
        else:
            root.overwritten = first < n_done
