"""A device whose queue runs late: nothing is done before something waits for it, then in an order that a seed picks.

A deterministic simulation for tests, with real results: devices of one `LateWorld` have queues of work, which one
thread runs when the host waits.  Between queues only events order anything, so that the world may let one device run
as far ahead of another as its waits allow: a wait that is missing gives wrong numbers, or is found out.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backend import Event, GraphView
from ggml_sched.backends.cpu import CpuBackend
from ggml_sched.errors import BackendError
from ggml_sched.graph.hostdata import array_over

__all__ = ["LateBackend", "LateEvent", "LateWorld"]

Work = Callable[[], object]


class LateEvent(Event):
    """`passed`: everything queued on its backend before it was recorded is done."""

    def __init__(self, backend: LateBackend) -> None:
        super().__init__(backend)
        self.passed = True


class LateWorld:
    """The queues of some devices, and who runs next: `seed` decides, the same seed always alike.

    With an even seed one device after the other runs as far as it can, in an order that the seed picks; with an odd one
    they take turns at random.  `waits` counts how often the host waited, `works` how many pieces of work were done.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.waits = 0
        self.works = 0
        self._random = random.Random(seed)
        self._devices: list[LateBackend] = []
        self._is_running = False
        self._lock = threading.RLock()

    def join(self, device: LateBackend) -> None:
        self._devices.insert(self._random.randint(0, len(self._devices)), device)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Let devices work until the condition holds; BackendError when nobody can go on."""
        with self._lock:
            if self._is_running:
                return          # a kernel that looks at its own backend
            self.waits += 1
            self._is_running = True
            try:
                while not is_done():
                    self._run_one()
            finally:
                self._is_running = False

    def _run_one(self) -> None:
        ready = [device for device in self._devices if device.is_ready]
        if not ready:
            stuck = ", ".join(device.name for device in self._devices if device.queue)
            raise BackendError(f"late devices wait for each other: {stuck}")
        self.works += 1
        (ready[0] if self.seed % 2 == 0 else self._random.choice(ready)).run_next()


class _Wait:
    """A place in a queue behind which nothing runs before an event has passed."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(self) -> None:
        if not isinstance(self.event, LateEvent):
            self.event.backend.event_synchronize(self.event)


class LateBackend(CpuBackend):
    """A CPU that pretends to be a device of a `LateWorld`; its memory is read by nobody else.

    `copies`: whether it copies to and from other late devices by itself, else the host does.  An error of a piece of
    work is raised by the next `synchronize`; what is queued behind it is dropped.
    """

    concurrent_copies = True
    asynchronous = True

    def __init__(self, name: str, world: LateWorld, copies: bool = True) -> None:
        super().__init__(1, name)
        self.world = world
        self.copies = copies
        self.queue: deque[Work | _Wait] = deque()
        self.error: BaseException | None = None
        world.join(self)

    # -- the queue ---------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the first piece of work may run."""
        if not self.queue:
            return False
        first = self.queue[0]
        return not (isinstance(first, _Wait) and isinstance(first.event, LateEvent)) or first.event.passed

    def run_next(self) -> None:
        work = self.queue.popleft()
        try:
            work()
        except Exception as error:
            self.error = self.error or error
            self._drop()

    def _drop(self) -> None:
        """Forget what is queued; whoever waits for it may go on."""
        for work in self.queue:
            if isinstance(work, _Pass):
                work()
        self.queue.clear()

    def synchronize(self) -> None:
        self.world.run_until(lambda: not self.queue)
        if self.error is not None:
            error, self.error = self.error, None
            self.note_failure(error)
            raise error

    def event_new(self) -> LateEvent:
        return LateEvent(self)

    def event_record(self, event: LateEvent) -> None:
        event.passed = False
        self.queue.append(_Pass(event))

    def event_wait(self, event: Event) -> None:
        self.queue.append(_Wait(event))

    def event_synchronize(self, event: LateEvent) -> None:
        self.world.run_until(lambda: event.passed)

    # -- what is queued ------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        buffer, at = tensor.buffer, tensor.offset + offset
        self.queue.append(lambda: buffer.write(at, data))

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        buffer, at = tensor.buffer, tensor.offset + offset
        self.queue.append(lambda: buffer.read(at, out))

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        return self.copies and isinstance(src.backend, LateBackend) and self._queue_copy(src, dst)

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        return False

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        return self.copies and isinstance(dst.backend, LateBackend) and self._queue_copy(src, dst)

    def _queue_copy(self, src: Tensor, dst: Tensor) -> bool:
        there, start, here, at = src.buffer, src.offset, dst.buffer, dst.offset
        # Elements only: what lies between them may be other tensors'.
        self.queue.append(lambda: np.copyto(array_over(dst, here.memory, at), array_over(src, there.memory, start)))
        return True

    def graph_compute(self, graph) -> None:
        nodes = graph if isinstance(graph, GraphView) else GraphView(graph.nodes)
        self.queue.append(lambda: super(LateBackend, self).graph_compute(nodes))

    def graph_plan_compute(self, plan) -> None:
        self.queue.append(lambda: super(LateBackend, self).graph_plan_compute(plan))

    def close(self) -> None:
        self.synchronize()
        super().close()


class _Pass:
    """The place in a queue that an event stands for."""

    def __init__(self, event: LateEvent) -> None:
        self.event = event

    def __call__(self) -> None:
        self.event.passed = True
