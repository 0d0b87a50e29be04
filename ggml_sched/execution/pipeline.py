"""Queued computes: steps are issued to their backends' queues, in order, each after what it waits for.

One loop (`Pipeline.submit`) issues every program: `compute` drains after it, `compute_async` does not.  Where all
backends are asynchronous, and for `compute`, the caller's thread issues the steps.  Otherwise each backend has a thread
that issues its steps, first in, first out: a step of one backend may run while another still works on the compute
before.  A program says what each step waits for (planning/waits.py); a step waits only for steps queued before it, so
that waits have no cycle.

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

__all__ = ["MAX_IN_FLIGHT", "Action", "KeepAlive", "Pipeline", "Task"]

KeepAlive = list[object]
"""Objects that backends use until queued work is done."""
Action = Callable[[Sequence[Event], KeepAlive], Event | None]
"""Does a step after the events.  It may return an event that it recorded at its end; None: the pipeline records one
where other steps wait."""

MAX_IN_FLIGHT = 64
"""Computes that may be queued at once; the next one waits."""


class Task(NamedTuple):
    """A step of a compute."""

    backend: Backend
    action: Action | None
    """None: nothing is due."""
    waits: tuple[Wait, ...]
    awaited: bool
    """Whether other steps wait for this one."""


class _Completion:
    """The end of a step.

    `issued`: the step was issued, failed or was skipped (None: steps are issued on one thread, in order); `event`:
    recorded after the step in its backend's queue.
    """

    __slots__ = ("event", "issued")

    def __init__(self, is_threaded: bool) -> None:
        self.issued = threading.Event() if is_threaded else None
        self.event: Event | None = None


class _QueuedCompute:
    """One compute: a completion for each step that other steps wait for, and what its backends still use.

    A step that was left out has the completion of the step before it in its queue.
    """

    __slots__ = ("completions", "ends", "keep_alive", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.completions: dict[int, _Completion] = {}
        self.keep_alive: KeepAlive = []
        self.ends: list[_Completion] = []
        """Of the last step of each queue."""

    def issue(self, task: Task, completion: _Completion | None, waits: Sequence[_Completion]) -> None:
        """Hand one step to its backend, after the steps that it waits for."""
        end = task.action([other.event for other in waits if other.event is not None] if waits else (), self.keep_alive)
        if completion is not None:
            if end is None:
                end = task.backend.event_new()
                task.backend.event_record(end)
            completion.event = end

    def wait(self) -> None:
        """Until the backends are done with it."""
        for completion in self.ends:
            if completion.issued is not None:
                completion.issued.wait()
            if completion.event is not None:
                completion.event.backend.event_synchronize(completion.event)
        self.keep_alive.clear()


class _State:
    """What the threads share with the pipeline, which they must not keep alive: this does not refer to it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pending = 0
        """How many queues, summed over computes, have steps that no thread has issued yet."""
        self.error: BaseException | None = None
        self.failed: float = inf
        """The number of the first compute that failed: computes before it go on, it and those after it are skipped."""

    def fail(self, error: BaseException, compute: float = inf) -> None:
        with self.changed:
            if self.error is None or compute < self.failed:
                self.error, self.failed = error, compute

    def wait(self) -> None:
        """Until everything was issued or skipped."""
        if self.pending:
            with self.changed:
                self.changed.wait_for(lambda: self.pending == 0)

    def count(self, n: int) -> None:
        with self.changed:
            self.pending += n
            if self.pending == 0:
                self.changed.notify_all()


def _issue_on_thread(state: _State, compute: _QueuedCompute, task: Task, completion: _Completion | None,
                     waits: Sequence[_Completion], is_last: bool) -> None:
    """Issue one step on its backend's thread; `is_last` of the compute's steps in this queue."""
    try:
        for other in waits:
            other.issued.wait()
        if compute.number < state.failed:
            compute.issue(task, completion, waits)
    except BaseException as error:
        state.fail(error, compute.number)
    finally:
        if completion is not None:
            completion.issued.set()
        if is_last:
            state.count(-1)


class Pipeline:
    """The queues of one scheduler's backends."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self._is_threaded = not all(backend.asynchronous for backend in self.backends)
        self._limit = MAX_IN_FLIGHT
        self._failures_seen = self._failures()
        self._failure_epoch = self._epoch_of_drained = 0
        self._last_failure = ""
        self._reset()

    def _reset(self) -> None:
        self._state = _State()
        self.drain_weakly = partial(_drain_weakly, weakref.ref(self), self._state)
        """`drain` as a function that tensors may hold: it does not keep the pipeline and its threads alive."""
        self._crews: dict[Backend, Crew] = {}
        self._last: dict[Backend, _Completion] = {}
        self._history: deque[_QueuedCompute] = deque(maxlen=self._limit)
        """Computes that later steps may wait for, the latest last."""
        self._in_flight: deque[_QueuedCompute] = deque()
        self._count = 0
        self._has_deferred = False
        """Whether computes were issued that wait for `drain` (see `defer`)."""
        self._kept: list[object] = []
        """What backends use until deferred computes are done."""

    def submit(self, tasks: Sequence[Task], inline: bool = False) -> None:
        """Queue one compute: a task for each step of its program.

        The program is that of the computes queued before, since the last `drain`.  Raises BackendError, with nothing
        queued, when the host gives no thread.  `inline`: every step is issued on the caller's thread, and its exception
        is raised; `drain` must come before the next `submit`.
        """
        self._after_fork()
        if self._has_deferred:
            self.drain()
        is_threaded = self._is_threaded and not inline
        due = [k for k, task in enumerate(tasks) if task.action is not None]
        for k in due if is_threaded else ():
            self._crew(tasks[k].backend)
        while len(self._in_flight) >= self._limit:
            self._in_flight.popleft().wait()
        last = {tasks[k].backend: k for k in due}
        compute = self._new_compute(tasks, {} if inline else last, is_threaded)
        if is_threaded:
            self._state.count(len(last))
        for k in due:
            task = tasks[k]
            completion, waits = compute.completions.get(k), self._completions(task.waits) if task.waits else ()
            if is_threaded:
                is_last = last[task.backend] == k
                self._crews[task.backend].put(
                    partial(_issue_on_thread, self._state, compute, task, completion, waits, is_last))
            elif compute.number < self._state.failed:
                try:
                    compute.issue(task, completion, waits)
                except BaseException as error:
                    self._state.fail(error, compute.number)
                    if inline or not isinstance(error, Exception):
                        raise

    def _new_compute(self, tasks: Sequence[Task], last: dict[Backend, int], is_threaded: bool) -> _QueuedCompute:
        """A compute with completions for steps that others wait for, and for the last step of each queue."""
        self._count += 1
        compute = _QueuedCompute(self._count)
        for k, task in enumerate(tasks):
            if task.action is not None and (task.awaited or last.get(task.backend) == k):
                compute.completions[k] = self._last[task.backend] = _Completion(is_threaded)
            elif task.awaited and task.backend in self._last:
                compute.completions[k] = self._last[task.backend]
        compute.ends = [compute.completions[k] for k in last.values()]
        self._history.append(compute)
        self._in_flight.append(compute)
        return compute

    @property
    def is_in_order(self) -> bool:
        """Whether what is queued now comes after all that was queued before: only deferred computes, in one queue."""
        return self._has_deferred and len(self.backends) == 1 and not self._in_flight and self._state.error is None

    def defer(self, keep_alive: object) -> None:
        """A compute was issued on the caller's thread and waits for `drain`; `keep_alive` is held until then."""
        self._has_deferred = True
        if not all(backend.takes_at_once for backend in self.backends):
            self._kept.append(keep_alive)
            if len(self._kept) > self._limit:
                self.drain()

    def _completions(self, waits: Sequence[Wait]) -> list[_Completion]:
        """Of the steps that are waited for."""
        computes, found = self._history, []
        for step, back in waits:
            completion = computes[-1 - back].completions.get(step) if back < len(computes) else None
            if completion is not None:
                found.append(completion)
        return found

    def drain(self) -> None:
        """Wait until everything queued is done or skipped.  Errors stay for `take_error`."""
        if not self._in_flight and not self._history and not self._has_deferred:
            return          # nothing queued
        self._after_fork()
        state = self._state
        if self._crews and any(threading.current_thread() in crew.threads for crew in self._crews.values()):
            return          # a backend reads its own tensors while it computes: waiting for itself would not end
        state.wait()
        for backend in self.backends:
            try:
                backend.synchronize()
            except Exception as error:
                state.fail(error)
                self._note_failure(str(error))
        self._epoch_of_drained = self.failure_epoch()
        self._last.clear()
        self._history.clear()
        self._in_flight.clear()
        self._has_deferred = False
        self._kept.clear()

    def failure_epoch(self) -> int:
        """How often queued work has failed on one of the backends, whether the exception was raised here or not."""
        failures = self._failures()
        if failures != self._failures_seen:
            self._last_failure = next(backend.failed[1] for backend, now, then in
                            zip(self.backends, failures, self._failures_seen, strict=True) if now != then)
            self._failures_seen = failures
            self._failure_epoch += 1
        return self._failure_epoch

    @property
    def failure_epoch_of_queued(self) -> int:
        """The failure epoch when the last compute queued here had ended; the present one while it has not."""
        return self.failure_epoch() if self._has_deferred or self._in_flight else self._epoch_of_drained

    @property
    def last_failure(self) -> str:
        """The message of the last failure."""
        error = self._state.error
        return self._last_failure if error is None else str(error)

    def _failures(self) -> tuple[int, ...]:
        return tuple([backend.failed[0] for backend in self.backends])

    def _note_failure(self, why: str) -> None:
        """A backend has raised; not every backend counts its failures itself."""
        self.failure_epoch()
        self._failure_epoch += 1
        self._last_failure = why

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, and no error waits for `take_error`."""
        return not self._in_flight and not self._history and not self._has_deferred and self._state.error is None

    @property
    def failed(self) -> bool:
        return self._state.error is not None

    def take_error(self) -> BaseException | None:
        """The first error since the last call; only after `drain`."""
        state = self._state
        if state.error is None:
            return None
        with state.changed:
            error, state.error, state.failed = state.error, None, inf
        return error

    def close(self) -> None:
        """Finish what is queued and end the threads; the next `submit` starts new ones."""
        self.drain()
        for crew in self._crews.values():
            crew.close()
        self._reset()

    def _crew(self, backend: Backend) -> Crew:
        crew = self._crews.get(backend)
        if crew is None:
            crew = Crew([f"ggml-sched {backend.name}"])
            if not crew.threads:
                raise BackendError(f"backend {backend.name!r}: the host gives no thread")
            self._crews[backend] = crew
        return crew

    def _after_fork(self) -> None:
        """In a child process the parent's threads do not exist, and its queued computes are lost."""
        if all(crew.is_here for crew in self._crews.values()):
            return
        lost = len(self._in_flight) if self._state.pending else 0
        for crew in self._crews.values():
            crew.close()
        self._reset()
        if lost:
            self._state.error = BackendError(f"the process forked while {lost} computes were queued")


def _drain_weakly(pipeline: weakref.ref[Pipeline], state: _State) -> None:
    held = pipeline()
    if held is not None:
        held.drain()
    else:
        state.wait()
