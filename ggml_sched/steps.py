"""Steps with addresses: what the executor does for each step of a program.

A bound step belongs to one backend, in whose queue it stands.  `due()` decides on the caller's thread what there is
to do and returns it as an `Action`, which may be made later, and on another thread: by then the caller may have set
other inputs.  An action first lets its backend (or, where the host itself must read, the host) wait for the events
that it is given, and never waits for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ggml_sched import hostdata
from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Event, GraphView, staged
from ggml_sched.errors import PlacementError

__all__ = ["Action", "Alive", "BoundCopy", "BoundExperts", "BoundLoad", "BoundRun", "BoundStep", "BoundWriteBack",
           "Seen", "says_no"]

Alive = list[object]
"""What must stay alive until the backends have done what was queued."""
Action = Callable[[Sequence[Event], Alive], Event | None]
"""Waits for the events, and does it.  An event that it returns stands for its end; None: the queue's order does."""


class Seen:
    """Which version of its source each kept place holds; forgotten at once when the memory has served others."""

    __slots__ = ("_versions",)

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def is_new(self, place: int, version: int) -> bool:
        """Whether the place holds another version; from now on, this one."""
        if self._versions.get(place) == version:
            return False
        self._versions[place] = version
        return True

    def forget(self) -> None:
        self._versions.clear()


def says_no(answer: object) -> bool:
    """Whether a callback's answer is False, NumPy's included; None, 0 and the like are no such answer."""
    return answer is False or isinstance(answer, np.bool_) and not answer


def home_of(tensor: Tensor) -> Backend:
    """The backend that holds a tensor; PlacementError when its buffer was closed while a compute was queued."""
    backend = tensor.backend
    if backend is None:
        raise PlacementError(f"{tensor!r} lost its memory before it was used: its buffer was closed")
    return backend


class BoundStep:
    """One step, with the tensors that it is about."""

    __slots__ = ("backend",)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def due(self) -> Action | None:
        """What there is to do now; None for a step that is left out, as only one with `seen` may be."""
        raise NotImplementedError

    def free(self) -> None:
        """Release what the step holds."""


class BoundLoad(BoundStep):
    """Bring what the caller has set for `leaf`, from byte `start` on, to the place of `tensor`.

    `seen`, of a place that nothing else uses: it is brought again only after a new `set`.
    """

    __slots__ = ("leaf", "place", "seen", "start", "tensor")

    def __init__(self, backend: Backend, leaf: Tensor, tensor: Tensor, start: int, place: int,
                 seen: Seen | None) -> None:
        super().__init__(backend)
        self.leaf, self.tensor, self.start, self.place, self.seen = leaf, tensor, start, place, seen

    def due(self) -> Action | None:
        data = self.leaf.stash
        if self.seen is not None and (not data or not self.seen.is_new(self.place, self.leaf.data_version)):
            return None
        if not data:
            return _nothing
        part = memoryview(data)[self.start : self.start + self.tensor.nbytes]

        def load(events: Sequence[Event], alive: Alive) -> None:
            backend = home_of(self.tensor)
            for event in events:
                backend.event_wait(event)
            alive.append(data)
            backend.set_tensor_async(self.tensor, part)

        return load


def _nothing(events: Sequence[Event], alive: Alive) -> None:
    """A leaf without bytes, or one that a node writes to before anything reads it, and that nobody has set."""


class BoundCopy(BoundStep):
    """Copy `src` to `dst`, a place on another backend; `seen` as in BoundLoad.

    `backend` is the source's (the copy is pushed) or the destination's.
    """

    __slots__ = ("dst", "place", "seen", "src")

    def __init__(self, backend: Backend, src: Tensor, dst: Tensor, place: int, seen: Seen | None) -> None:
        super().__init__(backend)
        self.src, self.dst, self.place, self.seen = src, dst, place, seen

    def due(self) -> Action | None:
        if self.seen is not None and not self.seen.is_new(self.place, self.src.data_version):
            return None
        return self._copy

    def _copy(self, events: Sequence[Event], alive: Alive) -> Event | None:
        return transfer(self.src, self.dst, self.backend, events, alive)


class BoundExperts(BoundStep):
    """Copy only those experts of a mixture that `ids` names.

    `src` and `dst` are expert weights [k, m, n_expert], one expert's bytes after the other's; ids out of range are left
    to the kernel to refuse.
    `staged`: the ids are what the caller has set; else they are read where a node computed them.
    """

    __slots__ = ("dst", "ids", "src", "staged", "used")

    def __init__(self, backend: Backend, src: Tensor, dst: Tensor, ids: Tensor, staged: bool) -> None:
        super().__init__(backend)
        self.src, self.dst, self.ids, self.staged, self.used = src, dst, ids, staged, ()

    def due(self) -> Action | None:
        # Not ids.numpy(), which would give what the caller has set by then.
        given = None
        if self.staged:
            given = (self.ids.root.stash or b"")[self.ids.view_offs : self.ids.view_offs + self.ids.nbytes]
        return lambda events, alive: self._copy(given, events, alive)

    def _copy(self, given: bytes | None, events: Sequence[Event], alive: Alive) -> None:
        there, here = home_of(self.src), home_of(self.dst)
        for event in events:
            here.event_wait(event)
            if given is None:
                event.backend.event_synchronize(event)
        if given is None:
            given = bytearray(self.ids.nbytes)
            home_of(self.ids).get_tensor(self.ids, given)
        ids = np.unique(hostdata.array_over(self.ids, given)) if self.ids.nbytes else ()
        self.used = tuple(int(i) for i in ids if 0 <= i < self.src.ne[2])
        src = self.src
        size = (src.ne[1] - 1) * src.nb[1] + src.ne[0] // src.type.block_size * src.nb[0]
        self.dst.touch()
        for i in self.used:
            staging = bytearray(size)
            there.get_tensor(src, staging, i * src.nb[2])
            alive.append(staging)
            here.set_tensor_async(self.dst, memoryview(staging), i * src.nb[2])


class BoundRun(BoundStep):
    """Compute nodes on one backend; prepared by the backend on first use.

    `nodes` are the graph's, `twins` what the backend computes in their place.
    """

    __slots__ = ("_handle", "_is_prepared", "nodes", "twins")

    def __init__(self, backend: Backend, nodes: tuple[Tensor, ...], twins: tuple[Tensor, ...]) -> None:
        super().__init__(backend)
        self.nodes, self.twins = nodes, twins
        self._is_prepared = False
        self._handle: object = None

    def due(self) -> Action:
        return self._run

    def _run(self, events: Sequence[Event], alive: Alive) -> None:
        if not self._is_prepared:
            self._handle = self.backend.graph_plan_create(GraphView(self.twins))
            self._is_prepared = True
        for event in events:
            self.backend.event_wait(event)
        if self._handle is None:
            self.backend.graph_compute(GraphView(self.twins))
        else:
            self.backend.graph_plan_compute(self._handle)

    def parts(self, ask: Callable[[Tensor], object] | None) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
        """The nodes up to each one that `ask` wants (by default every one), and that node; in the end None, if the last
        is not wanted.  Asked one after the other, as they come."""
        start, last = 0, len(self.nodes) - 1
        for k, node in enumerate(self.nodes):
            wanted = ask is None or not says_no(ask(node))
            if wanted or k == last:
                yield self.twins[start : k + 1], node if wanted else None
                start = k + 1

    def free(self) -> None:
        handle, self._handle, was_prepared = self._handle, None, self._is_prepared
        self._is_prepared = False
        if was_prepared and handle is not None:
            self.backend.graph_plan_free(handle)


class BoundWriteBack(BoundStep):
    """Copy what a node computed into a copy to the node's own memory, on another backend."""

    __slots__ = ("copy", "node")

    def __init__(self, backend: Backend, copy: Tensor, node: Tensor) -> None:
        super().__init__(backend)
        self.copy, self.node = copy, node

    def due(self) -> Action:
        return lambda events, alive: transfer(self.copy, self.node, self.backend, events, alive)


def transfer(src: Tensor, dst: Tensor, queue: Backend, events: Sequence[Event], alive: Alive) -> Event | None:
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
    alive.append(staging)
    here.set_tensor_async(dst, memoryview(staging))
    return _let_follow(queue, here)


def _let_follow(later: Backend, earlier: Backend) -> Event | None:
    """Let what is queued on one backend from now on come after what is queued on another so far: the event between."""
    if later is earlier:
        return None
    event = earlier.event_new()
    earlier.event_record(event)
    later.event_wait(event)
    return event
