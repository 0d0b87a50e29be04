"""Queued computes: steps are issued to their backends' queues in order, each after the steps that it waits for.

`Pipeline.submit` issues the steps of a compute: `Scheduler.compute` calls `drain` after it, `compute_async` does not.
Where all backends are asynchronous, and for `compute`, the caller's thread issues the steps.  Otherwise each backend
has a thread that issues its steps, first in, first out, so that one backend can run a step of a compute while another
still runs the compute before.  A step waits only for steps that were queued before it (planning/waits.py finds them),
so that waits form no cycle.

After a failure, the compute that failed and all computes queued after it are skipped, until `take_error`.  Threads
start on first use and end with `close`, or when the pipeline is freed; after a fork the child starts its own.  ggml's
scheduler has streams and events for this.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from operator import methodcaller
from typing import NamedTuple

from ggml_sched.backend import Backend, Event, wait_for
from ggml_sched.errors import BackendError
from ggml_sched.planning.waits import Wait
from ggml_sched.threads.locks import ForkLock, Latch
from ggml_sched.threads.workers import Crew

__all__ = ["MAX_IN_FLIGHT", "Action", "KeepAlive", "Pipeline", "Task"]

KeepAlive = list[object]
"""A list of objects that must stay alive until queued work is done."""
Action = Callable[[Sequence[Event], KeepAlive], Event | None]
"""Issues a step after the events.  It returns an event that it recorded at the end of the step, or None: then the
pipeline records an event if other steps wait for this one."""

MAX_IN_FLIGHT = 64
"""The most computes that may be queued at once; `submit` of one more waits for the oldest."""


_CALL = methodcaller("__call__")


class Task(NamedTuple):
    """A step of a compute."""

    backend: Backend
    action: Action | None
    """None: the step is left out of this compute."""
    waits: tuple[Wait, ...]
    awaited: bool
    """Whether other steps wait for this one."""


class _Completion:
    """What other steps, and the host, wait for at the end of a step.

    `issued` is open once the step was issued, failed or was skipped; it is None where one thread issues all steps, in
    order.  `event` is recorded after the step in its backend's queue; None until then.
    """

    __slots__ = ("event", "issued")

    def __init__(self, is_threaded: bool) -> None:
        self.issued = Latch() if is_threaded else None
        self.event: Event | None = None


class _QueuedCompute:
    """One compute: a completion for each step that other steps wait for, and the objects that its backends still use.

    A step that was left out shares the completion of the step before it in its queue.
    """

    __slots__ = ("completions", "ends", "keep_alive", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.completions: dict[int, _Completion] = {}
        self.keep_alive: KeepAlive = []
        self.ends: list[_Completion] = []
        """The completion of the last step of each queue."""

    def issue(self, backend: Backend, action: Action, completion: _Completion | None,
              waits: Sequence[_Completion]) -> None:
        """Call the action of one step, which makes its backend wait for the events of `waits` first.

        `completion` receives an event at the end of the step; None if nothing waits for it.
        """
        end = action([other.event for other in waits if other.event is not None] if waits else (), self.keep_alive)
        if completion is not None:
            if end is None:
                end = backend.event_new()
                backend.event_record(end)
            completion.event = end

    def wait(self) -> None:
        """Wait until the backends have done every step of the compute."""
        for completion in self.ends:
            if completion.issued is not None:
                completion.issued.wait()
            if completion.event is not None:
                completion.event.backend.event_synchronize(completion.event)
        self.keep_alive.clear()


_Step = tuple[Backend, Action, _Completion | None, Sequence[_Completion]]
"""The arguments of `_QueuedCompute.issue` for one step."""


class _State:
    """State shared by the pipeline and its threads.

    It has no reference to the pipeline, because the threads must not keep the pipeline alive.
    """

    def __init__(self) -> None:
        self.lock = ForkLock()
        self.last: dict[Backend, _Completion] = {}
        """{backend: the last completion in its queue since the last `drain`}; with threads, that of the last step."""
        self.error: BaseException | None = None
        self.failed: float = inf
        """The number of the first compute that failed: its remaining steps and later computes are skipped, earlier ones
        run."""

    def fail(self, error: BaseException, compute: float = inf) -> None:
        """Keep the error of compute number `compute` (inf: not known), unless one of an earlier compute is kept
        already."""
        with self.lock:
            if self.error is None or compute < self.failed:
                self.error, self.failed = error, compute

    @property
    def is_issued(self) -> bool:
        """Whether every queued step was issued or skipped."""
        return all(end.issued is None or end.issued.is_open for end in tuple(self.last.values()))

    def wait(self) -> None:
        """Wait until every queued step was issued or skipped."""
        for end in tuple(self.last.values()):
            if end.issued is not None:
                end.issued.wait()


def _issue_on_thread(state: _State, compute: _QueuedCompute, backend: Backend, action: Action,
                     completion: _Completion | None, waits: Sequence[_Completion]) -> None:
    """Issue one step on its backend's thread, once the steps of `waits` are issued; skipped after a failure."""
    try:
        for other in waits:
            if other.issued is not None:
                other.issued.wait()
        if compute.number < state.failed:
            compute.issue(backend, action, completion, waits)
    except BaseException as error:
        state.fail(error, compute.number)
    finally:
        if completion is not None and completion.issued is not None:
            completion.issued.open()


class Pipeline:
    """The queues of one scheduler's backends."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends: tuple[Backend, ...] = tuple(backends)
        self._is_threaded = not all(backend.asynchronous for backend in self.backends)
        self._gathering = [backend for backend in self.backends if type(backend).flush is not Backend.flush]
        self._limit = MAX_IN_FLIGHT
        self._failures_seen = self._failures()
        self._failure_epoch = self._epoch_of_drained = 0
        self._last_failure = ""
        self._reset()

    def _reset(self) -> None:
        """Begin without queued computes, threads and errors."""
        self._state = _State()
        self.drain_weakly: Callable[[], None] = partial(_drain_weakly, weakref.ref(self), self._state)
        """`drain`, for leases, which call it before their tensors are read; they must not keep the pipeline alive."""
        self._crews: dict[Backend, Crew] = {}
        self._history: deque[_QueuedCompute] = deque(maxlen=self._limit)
        """Computes since the last `drain`, the latest last: the waits of later computes name their steps."""
        self._in_flight: deque[_QueuedCompute] = deque()
        """Computes for which nothing has waited yet, the oldest first: at most `_limit`."""
        self._count = 0
        """How many computes were added to these: a compute that `submit` adds has this number."""
        self._has_deferred = False
        """Whether `defer` has noted a compute, which was issued without `submit`, and no call has waited for it yet."""
        self._kept: list[object] = []
        """Objects that backends still use, for deferred computes: held until `drain`."""
        self._changing = ForkLock()
        """Held where a compute is added to these, and where `drain` empties them: a reader on another thread drains."""
        self._is_issuing = False
        """Whether `submit` adds a compute, or issues its steps, at present."""

    def submit(self, tasks: Sequence[Task], inline: bool = False) -> None:
        """Queue one compute: a task for each step of its program.

        Between two calls of `drain` all computes must have the same program.  Raises BackendError, with nothing queued,
        when no thread can be started.  `inline`: every step is issued on the caller's thread, which receives its
        exception; `drain` must be called before the next `submit`.
        """
        self._after_fork()
        if self._has_deferred:
            self.drain()
        is_threaded = self._is_threaded and not inline
        due = {k: task.action for k, task in enumerate(tasks) if task.action is not None}
        for k in due if is_threaded else ():
            self._crew(tasks[k].backend)
        # `drain`, on another thread, replaces the queue and leaves what it held, so the oldest compute is there.
        while len(in_flight := self._in_flight) >= self._limit:
            in_flight.popleft().wait()
        try:
            self._is_issuing = True
            compute, steps = self._add(tasks, due, inline, is_threaded)
            if not is_threaded:
                self._issue(compute, steps, inline)
        finally:
            self._is_issuing = False

    def _add(self, tasks: Sequence[Task], due: Mapping[int, Action], inline: bool,
             is_threaded: bool) -> tuple[_QueuedCompute, list[_Step]]:
        """Queue a compute: (it, its steps).  With `is_threaded` the threads of the backends issue the steps."""
        ends = {} if inline else {tasks[k].backend: k for k in due}
        with self._changing:
            compute, last = self._new_compute(tasks, ends, is_threaded)
            steps: list[_Step] = [(tasks[k].backend, action, compute.completions.get(k),
                                   self._completions(compute, tasks[k].waits) if tasks[k].waits else ())
                                  for k, action in due.items()]
            commits: list[Callable[[], None]] = [
                partial(self._history.append, compute), partial(self._in_flight.append, compute),
                partial(self._state.last.update, last)]
            for step in steps if is_threaded else ():
                commits.append(self._crews[step[0]].putting(partial(_issue_on_thread, self._state, compute, *step)))
            any(map(_CALL, commits))    # runs in C alone, so that no signal handler can run when only some are done
        return compute, steps

    def _issue(self, compute: _QueuedCompute, steps: Sequence[_Step], inline: bool) -> None:
        """Issue the steps of a compute on the caller's thread; exceptions are kept, and raised with `inline`."""
        for step in steps:
            if compute.number < self._state.failed:
                try:
                    compute.issue(*step)
                except BaseException as error:
                    self._state.fail(error, compute.number)
                    if inline or not isinstance(error, Exception):
                        raise
        if not inline:
            self._flush()

    def _flush(self) -> None:
        """Call `flush` of the backends that gather commands, after all steps of a compute were issued; its exceptions
        are kept like those of queued work."""
        for backend in self._gathering:
            try:
                backend.flush()
            except Exception as error:
                self._state.fail(error)

    def _new_compute(self, tasks: Sequence[Task], ends: dict[Backend, int],
                     is_threaded: bool) -> tuple[_QueuedCompute, dict[Backend, _Completion]]:
        """(a compute, {backend: the last completion in its queue}).

        The compute has completions for the steps that others wait for, and for the last step of each queue.  `ends` is
        {backend: index of its last task}; empty if `drain` waits for the backends themselves.
        """
        self._count += 1
        compute, last = _QueuedCompute(self._count), self._state.last.copy()
        for k, task in enumerate(tasks):
            if task.action is not None and (task.awaited or ends.get(task.backend) == k):
                compute.completions[k] = last[task.backend] = _Completion(is_threaded)
            elif task.awaited and task.backend in last:
                compute.completions[k] = last[task.backend]
        compute.ends = [compute.completions[k] for k in ends.values()]
        return compute, last

    @property
    def is_in_order(self) -> bool:
        """Whether a new compute need not wait for earlier ones: all are deferred, in the queue of the only backend."""
        return self._has_deferred and len(self.backends) == 1 and not self._in_flight and self._state.error is None

    def defer(self, keep_alive: object) -> None:
        """Note that a compute was issued on the caller's thread, for which `drain` must wait; hold `keep_alive` until
        then."""
        keeps = not all(backend.takes_at_once for backend in self.backends)
        with self._changing:
            self._count += 1
            self._has_deferred = True
            if keeps:
                self._kept.append(keep_alive)
        self._flush()
        if len(self._kept) > self._limit:
            self.drain()

    def _completions(self, compute: _QueuedCompute, waits: Sequence[Wait]) -> list[_Completion]:
        """The completions of the steps that `waits` names, in this compute or earlier ones; those of computes before
        the last `drain` have ended, and are left out."""
        earlier, found = self._history, []
        for step, back in waits:
            if back <= len(earlier):
                completion = (earlier[-back] if back else compute).completions.get(step)
                if completion is not None:
                    found.append(completion)
        return found

    def drain(self) -> None:
        """Wait until every step that was queued before the call is done or skipped.  Errors are kept for `take_error`.

        A callback may call it in the middle of a compute, and another thread, which reads a tensor, at any time: then
        computes that are being issued, or were added since the call, stay queued.
        """
        if not self._in_flight and not self._history and not self._has_deferred:
            return          # nothing queued
        self._after_fork()
        state, count = self._state, self._count
        if self._crews and any(threading.current_thread() in crew.threads for crew in self._crews.values()):
            return          # a backend reads a tensor while it computes: its thread would wait for itself
        state.wait()
        for backend in self.backends:
            try:
                wait_for(backend)
            except Exception as error:
                state.fail(error)
                self._note_failure(str(error))
        epoch = self.failure_epoch()
        with self._changing:
            if self._count != count or self._is_issuing:
                return
            # What these hold is freed outside of the lock, because what it calls may drain, too.
            held = state.last, self._history, self._in_flight, self._kept  # noqa: F841
            self._epoch_of_drained, self._has_deferred = epoch, False
            state.last, self._kept = {}, []
            self._history, self._in_flight = deque(maxlen=self._limit), deque()

    def failure_epoch(self) -> int:
        """A number that grows with each failure of queued work on one of the backends.

        The exception may have been raised elsewhere, such as by a read of another scheduler's tensor; the results of
        this scheduler's queued computes are invalid all the same.
        """
        failures = self._failures()
        if failures != self._failures_seen:
            self._last_failure = next(backend.failed[1] for backend, now, then in
                            zip(self.backends, failures, self._failures_seen, strict=True) if now != then)
            self._failure_epoch += 1        # before the failures count as seen: another thread may call this, too
            self._failures_seen = failures
        return self._failure_epoch

    @property
    def failure_epoch_of_queued(self) -> int:
        """The present failure epoch while computes are queued, else that of the last `drain`: later failures do not
        concern the computes that were queued last."""
        return self.failure_epoch() if self._has_deferred or self._in_flight else self._epoch_of_drained

    @property
    def last_failure(self) -> str:
        """The message of the last failure."""
        error = self._state.error
        return self._last_failure if error is None else str(error)

    def _failures(self) -> tuple[int, ...]:
        return tuple([backend.failed[0] for backend in self.backends])

    def _note_failure(self, why: str) -> None:
        """Let the failure epoch grow for an exception of `synchronize`: not every backend counts failures itself."""
        self.failure_epoch()
        self._failure_epoch += 1
        self._last_failure = why

    @property
    def is_idle(self) -> bool:
        """Whether no compute is queued or deferred, and no error is kept for `take_error`."""
        return not self._in_flight and not self._history and not self._has_deferred and self._state.error is None

    @property
    def failed(self) -> bool:
        return self._state.error is not None

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call, or None; must be called after `drain`."""
        state = self._state
        error, state.error, state.failed = state.error, None, inf
        return error

    def close(self) -> None:
        """Finish what is queued and end the threads; the next `submit` starts new ones."""
        self.drain()
        for crew in self._crews.values():
            crew.close()
        self._reset()

    def _crew(self, backend: Backend) -> Crew:
        """The thread of a backend, started on first use; BackendError if the host gives none."""
        crew = self._crews.get(backend)
        if crew is None:
            crew = Crew([f"ggml-sched {backend.name}"])
            if not crew.threads:
                raise BackendError(f"backend {backend.name!r}: the host gives no thread")
            self._crews[backend] = crew
        return crew

    def _after_fork(self) -> None:
        """In a child after a fork: begin anew, because the threads exist in the parent alone.  If queued computes are
        lost by that, an error is kept for `take_error`."""
        if all(crew.is_here for crew in self._crews.values()):
            return
        lost = 0 if self._state.is_issued else len(self._in_flight)
        for crew in self._crews.values():
            crew.close()
        self._reset()
        if lost:
            self._state.error = BackendError(f"the process forked while {lost} computes were queued")


def _drain_weakly(pipeline: weakref.ref[Pipeline], state: _State) -> None:
    """Drain a pipeline; if it was freed, wait until every step that it queued was issued or skipped."""
    held = pipeline()
    if held is not None:
        held.drain()
    else:
        state.wait()
