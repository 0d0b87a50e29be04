"""The steps of a compute: load an input, copy a tensor, run nodes.

A step says on which backend's thread it runs (`backend`) and whose memory it touches (`places`).
`due()` decides on the caller's thread what there is to do and returns it as a call, which may be made later:
by then the caller may have set other inputs.  Steps that move data know the version of what they moved last,
so that data which nobody has changed, in memory which nobody else uses, is not moved again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import numpy as np

from ggml_sched import hostdata
from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, GraphView, tensor_copy
from ggml_sched.errors import PlacementError

__all__ = ["CopyStep", "ExpertsStep", "LoadStep", "RunStep", "Step", "says_no"]


def says_no(answer: object) -> bool:
    """Whether a callback's answer is False, NumPy's included; None, 0 and the like are no such answer."""
    return answer is False or isinstance(answer, np.bool_) and not answer


def home_of(tensor: Tensor) -> Backend:
    """The backend that holds a tensor; PlacementError when its buffer was closed while a compute was queued."""
    backend = tensor.backend
    if backend is None:
        raise PlacementError(f"{tensor!r} lost its memory before it was used: its buffer was closed")
    return backend


class Step:
    """One thing that a compute does."""

    __slots__ = ("backend", "places")

    def __init__(self, backend: Backend, places: Collection[Hashable]) -> None:
        self.backend = backend
        """On whose thread it runs."""
        self.places = tuple(dict.fromkeys(places))
        """Backends whose memory it touches, and stand-ins that are slots of a ring."""

    def due(self) -> Callable[[], object] | None:
        """What there is to do now, complete as far as the backend's queue goes; None if nothing."""
        raise NotImplementedError

    def run(self) -> None:
        """Do it."""
        job = self.due()
        if job is not None:
            job()

    def forget(self) -> None:
        """A compute failed: what was due may not have been done."""

    def free(self) -> None:
        """Release what the step holds."""


class LoadStep(Step):
    """Copy what the caller set into an input's place in the arena.

    `keeps`: nothing else uses that place, so it is loaded again only after a new `set`.
    """

    __slots__ = ("keeps", "seen", "tensor")

    def __init__(self, tensor: Tensor, keeps: bool = False) -> None:
        super().__init__(tensor.backend, (tensor.backend,))
        self.tensor, self.keeps, self.seen = tensor, keeps, None

    def due(self) -> Callable[[], object] | None:
        tensor, data = self.tensor, self.tensor.stash
        if not data or (self.keeps and self.seen == tensor.data_version):
            return None
        self.seen = tensor.data_version
        return lambda: self._load(data)

    def _load(self, data: bytes) -> None:
        backend = home_of(self.tensor)
        backend.set_tensor_async(self.tensor, memoryview(data))
        # The caller may set other data, and these bytes may go.
        backend.synchronize()

    def forget(self) -> None:
        self.seen = None


class CopyStep(Step):
    """Copy a tensor to its stand-in on another backend.

    `keeps`: the stand-in's memory is its own, so an unchanged source is not copied again.  `pushes`: the
    stand-in is a slot of a ring, which the source's thread fills while the destination may be computing.
    """

    __slots__ = ("dst", "keeps", "pushes", "seen", "src")

    def __init__(self, src: Tensor, dst: Tensor, keeps: bool = False, pushes: bool = False) -> None:
        there, here = src.backend, dst.backend
        super().__init__(there if pushes else here, (there, dst) if pushes else (there, here))
        self.src, self.dst, self.keeps, self.pushes, self.seen = src, dst, keeps, pushes, None

    def due(self) -> Callable[[], object] | None:
        version = self.src.data_version
        if self.keeps and self.seen == version:
            return None
        self.seen = version
        return self._copy

    def run(self) -> None:
        super().run()
        if self.pushes:
            self.src.backend.synchronize()      # there are no events without queued computes

    def _copy(self) -> None:
        there = home_of(self.src)
        if self.pushes and self.src.nbytes and there.cpy_tensor_async(self.src, self.dst):
            self.dst.touch()
            return
        there.synchronize()
        tensor_copy(self.src, self.dst)

    def forget(self) -> None:
        self.seen = None


class ExpertsStep(Step):
    """Copy only those experts of a mixture that `ids` names.

    `src` and `dst` are expert weights [k, m, n_expert]; ids out of range are left to the kernel to refuse.
    """

    __slots__ = ("dst", "ids", "src", "used")

    def __init__(self, src: Tensor, dst: Tensor, ids: Tensor) -> None:
        super().__init__(dst.backend, (dst.backend, src.backend, ids.backend))
        self.src, self.dst, self.ids, self.used = src, dst, ids, ()

    def due(self) -> Callable[[], object]:
        return self._copy

    def _copy(self) -> None:
        # Not ids.numpy(), which would give what the caller has set by now.
        given = bytearray(self.ids.nbytes)
        home_of(self.ids).get_tensor(self.ids, given)
        n_expert = self.src.ne[2]
        ids = np.unique(hostdata.array_over(self.ids, given)) if self.ids.nbytes else ()
        self.used = tuple(int(i) for i in ids if 0 <= i < n_expert)
        there, here = home_of(self.src), home_of(self.dst)
        there.synchronize()
        size = self.src.nb[2]
        staging = bytearray(size)
        for i in self.used:
            there.get_tensor(self.src, staging, i * size)
            here.set_tensor(self.dst, staging, i * size)


class RunStep(Step):
    """Compute nodes on one backend; prepared by the backend on first use.

    `nodes` are the graph's, `twins` what the backend computes in their place.  `back`: the last of them
    computed into this copy of memory that lives elsewhere, which then goes back.  `slots` are stand-ins in a ring.
    `deps` are tensors that these nodes keep: those of other backends are there when they begin, and until they end.
    """

    __slots__ = ("back", "nodes", "others", "prepared", "twins")

    def __init__(self, backend: Backend, nodes: tuple[Tensor, ...], twins: tuple[Tensor, ...],
                 back: Tensor | None = None, slots: Collection[Tensor] = (), deps: Collection[Tensor] = ()) -> None:
        self.nodes, self.twins, self.back = nodes, twins, back
        self.others = tuple(dict.fromkeys(t.backend for t in deps if t.backend is not backend))
        self.prepared: tuple | None = None
        touched = [t for twin in twins for t in (twin, *twin.src) if t is not None]
        if back is not None:
            touched.append(nodes[-1])
        super().__init__(backend, [backend, *(t if t in slots else t.backend for t in touched), *self.others])

    def due(self) -> Callable[[], object]:
        return self._compute

    def _compute(self) -> None:
        if self.prepared is None:
            self.prepared = (self.backend.graph_plan_create(GraphView(self.twins)),)
        for other in self.others:
            other.synchronize()
        self.backend.graph_plan_compute(self.prepared[0])
        if self.others:
            # Nothing else tells the others when they may go on.
            self.backend.synchronize()
        if self.back is not None:
            self._bring_back()

    def _bring_back(self) -> None:
        self.backend.synchronize()
        tensor_copy(self.back, self.nodes[-1])

    def observe(self, callback: Callable[[Tensor], object], ask: Callable[[Tensor], object] | None = None) -> bool:
        """Run up to each node that `ask` wants (by default every one); the callback sees it when its data is there.

        What is not wanted runs together with the next that is, or with the end of the step.  False when the
        callback said stop.
        """
        for other in self.others:
            other.synchronize()
        start, last = 0, len(self.nodes) - 1
        for k, node in enumerate(self.nodes):
            wanted = ask is None or not says_no(ask(node))
            if not wanted and k < last:
                continue
            self.backend.graph_compute(GraphView(self.twins[start : k + 1]))
            start = k + 1
            if wanted or self.others:
                self.backend.synchronize()
            if self.back is not None and k == last:
                self._bring_back()
            if wanted and says_no(callback(node)):
                return False
        return True

    def free(self) -> None:
        if self.prepared is not None:
            prepared, self.prepared = self.prepared[0], None
            self.backend.graph_plan_free(prepared)
