"""Queued computes: steps are issued to their backends' queues, in order, each after what it waits for.

Where all backends are asynchronous, the caller's thread issues them and returns.  Otherwise each backend has a thread
that issues its steps, first in, first out: a step of one backend may run while another still works on the compute
before.  A program says what each step waits for (ordering.py); a step waits only for steps queued before it, so
that nothing can wait in a circle.

After a failure, the compute that failed and everything queued behind it is skipped, until `take_error`.  Threads
start on first use and end with `close`, or with the last reference; after a fork the child starts its own.  ggml's
counterpart: streams and events of its scheduler.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from ggml_sched.backend import Backend, Event
from ggml_sched.errors import BackendError
from ggml_sched.planning.waits import Wait
from ggml_sched.threads.workers import Crew

__all__ = ["MAX_IN_FLIGHT", "Action", "Alive", "Issued", "Pipeline", "Task"]

Alive = list[object]
"""What must stay alive until the backends have done what was queued."""
Action = Callable[[Sequence[Event], Alive], Event | None]
"""Waits for the events, and does it.  An event that it returns stands for its end; None: the queue's order does."""

MAX_IN_FLIGHT = 64
"""Computes that may be queued at once; the next one waits."""


class Task(NamedTuple):
    """A step of a compute."""

    backend: Backend
    action: Action | None
    """None: nothing is due."""
    waits: tuple[Wait, ...]
    awaited: bool
    """Whether others wait for it."""


class _Ticket:
    """What others wait for.  `issued`: the step was issued, failed or was skipped (None: in order, on one thread);
    `event`: its end."""

    __slots__ = ("event", "issued")

    def __init__(self, is_threaded: bool) -> None:
        self.issued = threading.Event() if is_threaded else None
        self.event: Event | None = None


class Issued:
    """One compute: a ticket for each step that is awaited, and what must stay alive until its backends are done.

    A step that was left out has the ticket of the one before it in its queue.
    """

    __slots__ = ("ends", "alive", "number", "tickets")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.tickets: dict[int, _Ticket] = {}
        self.alive: Alive = []
        self.ends: list[_Ticket] = []
        """Of the last step of each queue, where somebody may wait for the whole compute."""

    def issue(self, task: Task, ticket: _Ticket | None, waits: Sequence[_Ticket]) -> None:
        """Let the backend do a step, after others."""
        end = task.action([other.event for other in waits if other.event is not None], self.alive)
        if ticket is not None:
            if end is None:
                end = task.backend.event_new()
                task.backend.event_record(end)
            ticket.event = end

    def wait(self) -> None:
        """Until the backends are done with it."""
        for ticket in self.ends:
            if ticket.issued is not None:
                ticket.issued.wait()
            if ticket.event is not None:
                ticket.event.backend.event_synchronize(ticket.event)
        self.alive.clear()


class _State:
    """What the threads share with the pipeline, and nothing that keeps the pipeline alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pending = 0
        """Queues, of each compute, that threads have still to work on."""
        self.error: BaseException | None = None
        self.failed: float = inf
        """The first compute that failed: what was queued before it goes on, it and the others are skipped."""

    def fail(self, error: BaseException, compute: float = inf) -> None:
        with self.changed:
            if self.error is None or compute < self.failed:
                self.error, self.failed = error, compute

    def wait(self) -> None:
        """Until everything was issued or skipped."""
        with self.changed:
            self.changed.wait_for(lambda: self.pending == 0)

    def count(self, n: int) -> None:
        with self.changed:
            self.pending += n
            if self.pending == 0:
                self.changed.notify_all()


def _perform(state: _State, compute: Issued, task: Task, ticket: _Ticket | None, waits: Sequence[_Ticket],
             is_last: bool) -> None:
    """On a backend's thread; `is_last` of the compute's steps in this queue."""
    try:
        for other in waits:
            other.issued.wait()
        if compute.number < state.failed:
            compute.issue(task, ticket, waits)
    except BaseException as error:
        state.fail(error, compute.number)
    finally:
        if ticket is not None:
            ticket.issued.set()
        if is_last:
            state.count(-1)


class Pipeline:
    """The queues of one scheduler's backends."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self._is_threaded = not all(backend.asynchronous for backend in self.backends)
        self._limit = MAX_IN_FLIGHT
        self._seen = self._failures()
        self._n_lost = self._n_lost_then = 0
        self._why = ""
        self._start_anew()

    def _start_anew(self) -> None:
        self._state = _State()
        self.drain_weakly = partial(_drain_weakly, weakref.ref(self), self._state)
        """`drain`, for tensors to hold: the threads end although it is there."""
        self._crews: dict[Backend, Crew] = {}
        self._last: dict[Backend, _Ticket] = {}
        self._history: deque[Issued] = deque(maxlen=self._limit)
        """Computes that steps still to come may wait for, the latest last."""
        self._in_flight: deque[Issued] = deque()
        self._count = 0
        self._is_left = False
        """Whether something was queued past `submit`."""
        self._kept: list[object] = []
        """What must stay alive until that is done."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue one compute: a task for each step of its program.

        The program is that of the computes queued before, since the last `drain`.  Raises BackendError, with nothing
        queued, when the host gives no thread.
        """
        self._after_fork()
        if self._is_left:
            self.drain()
        due = [k for k, task in enumerate(tasks) if task.action is not None]
        for k in due if self._is_threaded else ():
            self._crew(tasks[k].backend)
        while len(self._in_flight) >= self._limit:
            self._in_flight.popleft().wait()
        self._count += 1
        compute = Issued(self._count)
        last = {tasks[k].backend: k for k in due}
        for k, task in enumerate(tasks):
            if task.action is not None and (task.awaited or last[task.backend] == k):
                compute.tickets[k] = self._last[task.backend] = _Ticket(self._is_threaded)
            elif task.awaited and task.backend in self._last:
                compute.tickets[k] = self._last[task.backend]
        compute.ends = [compute.tickets[k] for k in last.values()]
        self._history.append(compute)
        self._in_flight.append(compute)
        if self._is_threaded:
            self._state.count(len(last))
        for k in due:
            task = tasks[k]
            ticket, waits = compute.tickets.get(k), self._tickets(task.waits)
            if self._is_threaded:
                is_last = last[task.backend] == k
                self._crews[task.backend].put(partial(_perform, self._state, compute, task, ticket, waits, is_last))
            elif compute.number < self._state.failed:
                try:
                    compute.issue(task, ticket, waits)
                except BaseException as error:
                    self._state.fail(error, compute.number)
                    if not isinstance(error, Exception):
                        raise

    @property
    def is_in_order(self) -> bool:
        """Whether all that is queued was left in the one queue that there is: what comes now comes after it."""
        return self._is_left and len(self.backends) == 1 and not self._in_flight and self._state.error is None

    def leave(self, alive: object) -> None:
        """A compute was queued on the caller's thread, and nobody has waited for it yet; `alive` is kept until then."""
        self._is_left = True
        if not all(backend.takes_at_once for backend in self.backends):
            self._kept.append(alive)
            if len(self._kept) > self._limit:
                self.drain()

    def _tickets(self, waits: Sequence[Wait]) -> list[_Ticket]:
        """Of the steps that are waited for."""
        computes = self._history
        found = [computes[-1 - w.back].tickets.get(w.step) for w in waits if w.back < len(computes)]
        return [ticket for ticket in found if ticket is not None]

    def drain(self) -> None:
        """Wait until everything queued is done or skipped.  Errors stay for `take_error`."""
        if not self._in_flight and not self._history and not self._is_left:
            return          # nothing queued
        self._after_fork()
        state = self._state
        if any(threading.current_thread() in crew.threads for crew in self._crews.values()):
            return          # a backend that looks at its own tensors while it computes
        state.wait()
        for backend in self.backends:
            try:
                backend.synchronize()
            except Exception as error:
                state.fail(error)
                self._lose(str(error))
        self._n_lost_then = self.losses()
        self._last.clear()
        self._history.clear()
        self._in_flight.clear()
        self._is_left = False
        self._kept.clear()

    def losses(self) -> int:
        """How often something queued on the backends was lost by now, whoever was told."""
        failures = self._failures()
        if failures != self._seen:
            self._why = next(backend.failed[1] for backend, now, then in
                            zip(self.backends, failures, self._seen, strict=True) if now != then)
            self._seen = failures
            self._n_lost += 1
        return self._n_lost

    @property
    def losses_of_queued(self) -> int:
        """The same, but for what happened after everything that was queued here had ended."""
        return self.losses() if self._is_left or self._in_flight else self._n_lost_then

    @property
    def why(self) -> str:
        """What the last loss was about."""
        error = self._state.error
        return self._why if error is None else str(error)

    def _failures(self) -> tuple[int, ...]:
        return tuple([backend.failed[0] for backend in self.backends])

    def _lose(self, why: str) -> None:
        """A backend has raised, whether it counts that or not."""
        self.losses()
        self._n_lost += 1
        self._why = why

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, and no error is there to be taken."""
        return not self._in_flight and not self._history and not self._is_left and self._state.error is None

    @property
    def failed(self) -> bool:
        return self._state.error is not None

    def take_error(self) -> BaseException | None:
        """The first error since the last call; only after `drain`."""
        with self._state.changed:
            error, self._state.error, self._state.failed = self._state.error, None, inf
        return error

    def close(self) -> None:
        """Finish what is queued and end the threads; the next `submit` starts new ones."""
        self.drain()
        for crew in self._crews.values():
            crew.close()
        self._start_anew()

    def _crew(self, backend: Backend) -> Crew:
        crew = self._crews.get(backend)
        if crew is None:
            crew = Crew([f"ggml-sched {backend.name}"])
            if not crew.threads:
                raise BackendError(f"backend {backend.name!r}: the host gives no thread")
            self._crews[backend] = crew
        return crew

    def _after_fork(self) -> None:
        """In a child process, the parent's threads do not exist, and what was queued is lost."""
        if all(crew.is_here for crew in self._crews.values()):
            return
        lost = len(self._in_flight) if self._state.pending else 0
        for crew in self._crews.values():
            crew.close()
        self._start_anew()
        if lost:
            self._state.error = BackendError(f"the process forked while {lost} computes were queued")


def _drain_weakly(pipeline: weakref.ref[Pipeline], state: _State) -> None:
    held = pipeline()
    if held is not None:
        held.drain()
    else:
        state.wait()
