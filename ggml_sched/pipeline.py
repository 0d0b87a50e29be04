"""Queued computes: a thread for each backend runs its steps, first in, first out.

One rule orders everything: **steps that touch the same place run in the order in which they were queued.**
A place is the memory of a backend, or one slot of a ring of copies.  A backend may therefore begin the next
compute while another still works on this one, and no data is overwritten before it was read.

A step waits only for steps queued before it, so nothing can wait in a circle.  After a failure everything
queued is skipped until `take_error`.  Threads start on first use and end with `close`, or with the last
reference; after a fork the child starts its own.  ggml's counterpart: streams and events of its scheduler.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue

from ggml_sched.backend import Backend, Event
from ggml_sched.errors import BackendError

__all__ = ["Job", "Pipeline"]

Job = tuple[Backend, Iterable[Hashable], Callable[[], object]]
"""On which backend's thread, what it touches, and what to call."""

MAX_IN_FLIGHT = 64
"""Computes that may be queued at once; the next one waits."""


class _Ticket:
    """A queued step.  `issued`: it ran, failed or was skipped; `event`: its backend is done with it."""

    __slots__ = ("event", "issued")

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.event: Event | None = None


class _State:
    """What the threads share with the pipeline, and nothing that keeps the pipeline alive."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()
        self.computes = 0
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self.changed:
            if self.error is None:
                self.error = error

    def wait(self) -> None:
        """Until nothing is queued; at once where the threads do not exist any more."""
        if self.pid == os.getpid():
            with self.changed:
                self.changed.wait_for(lambda: self.computes == 0)

    def ended(self) -> None:
        with self.changed:
            self.computes -= 1
            self.changed.notify_all()


class _Compute:
    """How many steps of one compute are still to come."""

    __slots__ = ("lock", "rest", "state")

    def __init__(self, state: _State, n_steps: int) -> None:
        self.state, self.rest, self.lock = state, n_steps, threading.Lock()

    def step_ended(self) -> None:
        with self.lock:
            self.rest -= 1
            last = self.rest == 0
        if last:
            self.state.ended()


def _work(tasks: SimpleQueue) -> None:
    """A backend's thread: tasks until None comes."""
    while (task := tasks.get()) is not None:
        _perform(*task)
        task = None


def _perform(backend: Backend, job: Callable[[], object], waits: Sequence[_Ticket], ticket: _Ticket,
             compute: _Compute) -> None:
    state = compute.state
    try:
        for other in waits:
            other.issued.wait()
        if state.error is None:
            for other in waits:
                if other.event is not None:
                    backend.event_wait(other.event)
            job()
            event = backend.event_new()
            backend.event_record(event)
            ticket.event = event
    except BaseException as error:
        state.fail(error)
    finally:
        ticket.issued.set()
        compute.step_ended()


class Pipeline:
    """The threads of one scheduler's backends."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self._start_anew()

    def _start_anew(self) -> None:
        self._state = _State()
        self.drain_weakly = partial(_drain_weakly, weakref.ref(self), self._state)
        """`drain`, for tensors to hold: the threads end although it is there."""
        self._queues: dict[Backend, SimpleQueue] = {}
        self._threads: list[threading.Thread] = []
        self._last: dict[Hashable, _Ticket] = {}
        self._stop = weakref.finalize(self, _send_stops, self._queues)
        self._stop.atexit = False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue one compute.  Raises BackendError, with nothing queued, when the host gives no thread."""
        self._after_fork()
        if not jobs:
            return
        for backend, _, _ in jobs:
            self._queue(backend)
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.computes < MAX_IN_FLIGHT)
            state.computes += 1
        compute = _Compute(state, len(jobs))
        for backend, places, job in jobs:
            ticket = _Ticket()
            waits = dict.fromkeys(self._last[place] for place in places if place in self._last)
            for place in places:
                self._last[place] = ticket
            self._queues[backend].put((backend, job, tuple(waits), ticket, compute))

    def drain(self) -> None:
        """Wait until everything queued is done or skipped.  Errors stay for `take_error`."""
        if not self._last:
            return          # nothing queued
        self._after_fork()
        state = self._state
        if threading.current_thread() in self._threads:
            return          # a backend that looks at its own tensors while it computes
        state.wait()
        for backend in self.backends:
            try:
                backend.synchronize()
            except Exception as error:
                state.fail(error)
        self._last.clear()

    @property
    def failed(self) -> bool:
        return self._state.error is not None

    def take_error(self) -> BaseException | None:
        """The first error since the last call; only after `drain`."""
        error, self._state.error = self._state.error, None
        return error

    def close(self) -> None:
        """Finish what is queued and end the threads; the next `submit` starts new ones."""
        self.drain()
        threads = self._threads
        if self._state.pid == os.getpid():
            self._stop()
            for thread in threads:
                thread.join()
        self._start_anew()

    def _queue(self, backend: Backend) -> SimpleQueue:
        tasks = self._queues.get(backend)
        if tasks is None:
            tasks = SimpleQueue()
            name = f"ggml-sched {backend.name}"
            thread = threading.Thread(target=_work, args=(tasks,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise BackendError(f"backend {backend.name!r}: the host gives no thread") from error
            self._threads.append(thread)
            self._queues[backend] = tasks
        return tasks

    def _after_fork(self) -> None:
        """In a child process, the parent's threads do not exist, and what was queued is lost."""
        if self._state.pid != os.getpid():
            lost = self._state.computes
            self._stop.detach()
            self._start_anew()
            if lost:
                self._state.error = BackendError(f"the process forked while {lost} computes were queued")


def _drain_weakly(pipeline: weakref.ref[Pipeline], state: _State) -> None:
    held = pipeline()
    if held is not None:
        held.drain()
    else:
        state.wait()


def _send_stops(queues: dict[Backend, SimpleQueue]) -> None:
    for tasks in queues.values():
        tasks.put(None)
    queues.clear()
