"""A deferred-execution device for tests: work is queued, and runs only when the host waits for it.

The simulation is deterministic and computes real results.  The devices and stores of one `DeferredQueues` put tasks
into queues; when the host waits, its thread runs the tasks in an order chosen by a seed.  Tasks of different queues are
ordered by events alone.  Therefore a program that lacks a wait gives wrong results or an error, for some seeds.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import Event, GraphView, note_nodes
from ggml_sched.backends.cpu import CpuBackend, CpuBuffer
from ggml_sched.errors import BackendError
from ggml_sched.graph.hostdata import array_over
from ggml_sched.threads.locks import ForkLock

__all__ = ["DeferredBackend", "DeferredEvent", "DeferredQueues", "DeferredStore"]

Task = Callable[[], object]


class DeferredEvent(Event):
    """An event of a deferred device.  `passed`: all work that the device had queued when the event was recorded is
    done."""

    def __init__(self, backend: DeferredBackend) -> None:
        super().__init__(backend)
        self.passed = True


class DeferredQueues:
    """The queues of some devices, and the order in which their tasks run: equal seeds give equal orders.

    With an even seed the next task is that of the first device that is ready, in an order of devices chosen by the
    seed; with an odd seed it is that of a random device that is ready.  `waits` counts how often the host waited,
    `tasks_run` how many tasks ran.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.waits: int = 0
        self.tasks_run: int = 0
        self._random = random.Random(seed)
        self._devices: list[DeferredBackend] = []
        self._runner: threading.Thread | None = None
        """The thread that is running a task; None if none is."""
        self._turn = ForkLock()

    def add(self, device: DeferredBackend) -> None:
        """Add a device, at a random position in the order."""
        self._devices.insert(self._random.randint(0, len(self._devices)), device)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run tasks until the condition holds; BackendError when no device can run its next task."""
        me = threading.current_thread()
        if self._runner is me:
            return          # called by a task: its kernel reads a tensor of the backend that runs the task
        self.waits += 1
        while not is_done():
            with self._turn:            # one thread runs tasks at a time
                if is_done():
                    break
                self._runner = me
                try:
                    self._run_one()
                finally:
                    self._runner = None

    def _run_one(self) -> None:
        ready = [device for device in self._devices if device.is_ready]
        if not ready:
            stuck = ", ".join(device.name for device in self._devices if device.queue)
            raise BackendError(f"deferred devices wait for each other: {stuck}")
        self.tasks_run += 1
        (ready[0] if self.seed % 2 == 0 else self._random.choice(ready)).run_next()


class _Wait:
    """A task that makes the tasks after it in its queue wait for an event: it does not run before the event passes.

    For an event of a backend outside these queues, it waits on the host.
    """

    def __init__(self, event: Event, queues: DeferredQueues) -> None:
        self.event = event
        self.is_ours = isinstance(event.backend, DeferredBackend) and event.backend.queues is queues

    @property
    def is_ready(self) -> bool:
        return not self.is_ours or cast("DeferredEvent", self.event).passed

    def __call__(self) -> None:
        if not self.is_ours:
            self.event.backend.event_synchronize(self.event)


class _Pass:
    """The task that marks a recorded event as passed."""

    def __init__(self, event: DeferredEvent) -> None:
        self.event = event

    def __call__(self) -> None:
        self.event.passed = True


class DeferredBackend(CpuBackend):
    """A CPU backend that behaves like a device with a queue; no other backend reads its memory.

    `copies`: it copies to and from other deferred devices in its queue; otherwise copies go through the host.  An
    exception of a task is raised by the next `synchronize`; the tasks queued after it are dropped.
    """

    concurrent_copies = True
    asynchronous = True

    def __init__(self, name: str, queues: DeferredQueues, copies: bool = True) -> None:
        super().__init__(1, name)
        self.queues = queues
        self.copies = copies
        self.queue: deque[Task] = deque()
        self.error: BaseException | None = None
        self.taking: ForkLock = ForkLock()
        queues.add(self)

    # -- the queue ---------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether there is a task that may run: the first, unless it waits for an event that has not passed."""
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, _Wait) or first.is_ready

    def run_next(self) -> None:
        """Run the first task; an exception of the task is kept, and raised by `synchronize`."""
        task = self.queue.popleft()
        try:
            task()
        except Exception as error:
            self.error = self.error or error
            self._drop()

    def _drop(self) -> None:
        """Drop the queued tasks after a failure; recorded events still pass, so that no other device waits for ever."""
        for task in self.queue:
            if isinstance(task, _Pass):
                task()
        self.queue.clear()

    def synchronize(self) -> None:
        self.queues.run_until(lambda: not self.queue)
        with self.taking:       # a wait of another thread that finds the error gone finds it counted
            error, self.error = self.error, None
            if error is not None:
                self.note_failure(error)
                raise error

    def event_new(self) -> DeferredEvent:
        return DeferredEvent(self)

    def event_record(self, event: Event) -> None:
        recorded = cast("DeferredEvent", event)
        recorded.passed = False
        self.queue.append(_Pass(recorded))

    def event_wait(self, event: Event) -> None:
        self.queue.append(_Wait(event, self.queues))

    def event_synchronize(self, event: Event) -> None:
        self.queues.run_until(lambda: cast("DeferredEvent", event).passed)

    # -- operations that are queued ------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        buffer, at = tensor.buffer, tensor.offset + offset
        self.queue.append(lambda: buffer.write(at, data))

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        buffer, at = tensor.buffer, tensor.offset + offset
        self.queue.append(lambda: buffer.read(at, out))

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        return self.copies and isinstance(src.backend, DeferredBackend) and self.queue_copy(src, dst)

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        return False

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        return self.copies and isinstance(dst.backend, DeferredBackend) and self.queue_copy(src, dst)

    def queue_copy(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy of elements, not of the bytes between them, which may belong to other tensors.  Returns True."""
        start, at = src.offset, dst.offset
        there, here = cast("CpuBuffer", src.buffer), cast("CpuBuffer", dst.buffer)
        self.queue.append(lambda: np.copyto(array_over(dst, here.memory, at), array_over(src, there.memory, start)))
        return True

    def graph_compute(self, graph: Graph | GraphView) -> None:
        view = graph if isinstance(graph, GraphView) else GraphView(graph.nodes)

        def task() -> None:
            try:
                super(DeferredBackend, self).graph_compute(view)
            except Exception as error:
                note_nodes(error, self, view.nodes)
                raise

        self.queue.append(task)

    def graph_plan_compute(self, plan: Any) -> None:
        self.queue.append(lambda: super(DeferredBackend, self).graph_plan_compute(plan))

    def close(self) -> None:
        self.synchronize()
        super().close()


class DeferredStore(DeferredBackend):
    """A store with a queue: its weights are in its own memory, and a fetch is a queued copy of them.

    The memory of a fetched copy has `margin` bytes more than the weight, about half of them before the weight's bytes;
    a fetch fills them with `JUNK`.  `rows`: the store computes GET_ROWS of its weights itself.
    """

    is_host = False
    is_store = True
    JUNK = 0xAB

    def __init__(self, name: str, queues: DeferredQueues, margin: int = 0, rows: bool = True) -> None:
        super().__init__(name, queues)
        self.margin = margin
        self.has_rows = rows

    def supports_op(self, node: Tensor) -> bool:
        return not node.computes or self.has_rows and node.op == "GET_ROWS" and super().supports_op(node)

    def shift(self, weight: Tensor, address: int) -> int:
        return self.margin // 2 // 64 * 64

    def fetch(self, weight: Tensor, start: int, nbytes: int, copy: Tensor, room: tuple[int, int]) -> None:
        source, target = cast("CpuBuffer", weight.root.buffer), cast("CpuBuffer", copy.buffer)
        first, at = weight.root.offset + start, copy.offset

        def task() -> None:
            data = source.memory[first : first + nbytes].copy()
            target.memory[room[0] : room[1]] = self.JUNK
            target.memory[at : at + nbytes] = data

        self.queue.append(task)
