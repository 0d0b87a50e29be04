"""Arenas that several schedulers share: `Arenas` is the value that they are given, `Leased` the view of one of them.

Schedulers whose computes never overlap lease the same buffers, which are as large as the largest scheduler needs.  A
scheduler takes buffers for the time of a call, or of a `with scheduler.lease()`; while another thread has them, the
scheduler waits, or gets other buffers.  The first call that gives tensors addresses makes the scheduler the lessee: the
call waits for the computes of the lessee before, whose tensors lose their addresses.

Invariants: at most one scheduler at a time has a set of buffers (`_Buffers`), and at most one, the lessee, has
addresses in them.  The lessee changes, and buffers are replaced, only by the scheduler that has them, after the
allocations in them were suspended or released.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from ggml_sched.backend import Backend, Buffer, wait_for
from ggml_sched.errors import Error, each
from ggml_sched.execution.arenas import SchedulerArenas, Sizes
from ggml_sched.threads.locks import ForkLock, Latch, OneAtATime

if TYPE_CHECKING:
    from ggml_sched.execution.allocation_cache import Allocations
    from ggml_sched.execution.pipeline import Pipeline

__all__ = ["Arenas", "Leased", "LockAndLease"]


class _OnBackend:
    """The buffers of a set on one backend.  The `Leased` whose allocations are in them keep this alive: where their
    schedulers are freed without `close`, the buffers are freed, too."""

    def __init__(self) -> None:
        self.buffers: tuple[Buffer, ...] = ()


class _Buffers:
    """A set of buffers, some on each backend, which at most one scheduler has at a time."""

    def __init__(self) -> None:
        self.of: weakref.WeakValueDictionary[Backend, _OnBackend] = weakref.WeakValueDictionary()
        self.users: weakref.WeakSet[Leased] = weakref.WeakSet()
        """The `Leased` of each scheduler that has had these buffers; its allocations are in the buffers `Leased.at`."""
        self.lessee: weakref.ref[Leased] | None = None
        """The `Leased` of the scheduler whose tensors have addresses in these buffers."""
        self.drain: Callable[[], None] | None = None
        """Waits for the computes of the lessee, even if it was freed."""
        self.taken: list[object] = []
        """An object (holder) for each call, or `with` block, of the scheduler that has the buffers; empty: none has."""
        self.taker: weakref.ref[Leased] | None = None
        self.thread, self.pid = 0, 0

    def is_taken(self) -> bool:
        if self.taken and self.pid != os.getpid() and self.thread != threading.get_ident():
            self.taken.clear()          # the thread that took them is in the parent process, and not in this fork
        return bool(self.taken)

    def prune(self) -> None:
        """Close the buffers on each backend that is in no scheduler with allocations in these buffers."""
        used = {backend for user in self.users if user.at is self for backend in user.backends}
        gone = [on for backend, on in [*self.of.items()] if backend not in used]
        closing = [buffer for on in gone for buffer in on.buffers]
        for on in gone:
            on.buffers = ()
        each(buffer.close for buffer in closing)


class Arenas:
    """Compute memory that several schedulers share: `gs.Scheduler(backends, arenas=arenas)`, or `llama.load(...,
    arenas=arenas)`.

    Schedulers that have a backend in common lease the same buffers on it, which are as large as the largest scheduler
    needs.  When another scheduler allocates or computes, it waits for the queued computes of the scheduler before, and
    the tensors of that one lose their addresses.  So results are read before that, or inside
    `with scheduler.lease()`.  While another thread uses the buffers, a call waits (`when_busy="wait"`), or its
    scheduler gets other buffers, and keeps them (`"own"`): then there are as many sets of buffers as threads that
    compute at the same time.

    Buffers are closed when the last scheduler that uses them is closed, or by `close`; they are freed if that scheduler
    is dropped without `close`.  A limit or budget of a scheduler counts shared buffers in full, but no work memory that
    a second compute at the same time takes: under limits give "wait".  ValueError for another `when_busy`.
    """

    def __init__(self, when_busy: Literal["own", "wait"] = "own") -> None:
        if when_busy not in ("own", "wait"):
            raise ValueError(f"when_busy is 'own' or 'wait', not {when_busy!r}")
        self.when_busy: Literal["own", "wait"] = when_busy
        self.closed: bool = False
        self._lock = ForkLock()
        self._all: list[_Buffers] = []
        self._waiting: list[Latch] = []

    def nbytes(self, backend: Backend) -> int:
        """Bytes of all buffers on a backend."""
        held = [buffers.of.get(backend) for buffers in tuple(self._all)]
        return sum(buffer.size for on in held if on is not None for buffer in on.buffers if not buffer.closed)

    def close(self) -> None:
        """Close all buffers; idempotent.  Tensors in them lose their addresses, and their schedulers cannot compute any
        more.

        Error while a scheduler is at work.
        """
        with self._lock:
            if any(buffers.is_taken() for buffers in self._all):
                raise Error("these arenas are in use: close them after the schedulers' calls")
            self.closed = True
            found, self._all = self._all, []
        for buffers in found:
            each([partial(user.give_way, buffers, "the arenas that its scheduler shared were closed")
                  for user in buffers.users])
        each(buffer.close for buffers in found for on in buffers.of.values() for buffer in on.buffers)

    def __enter__(self) -> Arenas:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        n = sum(user.at is buffers for buffers in self._all for user in buffers.users)
        return f"<Arenas of {n} schedulers, when busy: {self.when_busy}{', closed' if self.closed else ''}>"

    # -- for Leased ------------------------------------------------------------------

    def take(self, user: Leased, holder: object) -> _Buffers:
        """Take buffers for a scheduler until `give_back(holder)`, and return them: those that it had last, if no other
        scheduler has them.

        Raises Error if waiting would never end.  After `close` it returns a set without buffers, and `Leased._usable`
        raises.
        """
        while True:
            with self._lock:
                found = _Buffers() if self.closed else self._free(user)
                if found is not None:
                    found.taken.append(holder)
                    found.taker, found.thread, found.pid = weakref.ref(user), threading.get_ident(), os.getpid()
                    return found
                latch = Latch()
                self._waiting.append(latch)
            latch.wait()

    def _free(self, user: Leased) -> _Buffers | None:
        """Buffers that `user` may take; None: it has to wait."""
        here = threading.get_ident()
        for buffers in self._all:
            if buffers.is_taken() and buffers.taker is not None and buffers.taker() is user:
                if buffers.thread != here:
                    raise Error("this scheduler is at work: use one scheduler for each thread")
                return buffers
        for buffers in sorted(self._all, key=lambda buffers: buffers is not user.at):
            if not buffers.is_taken():
                return buffers
        if self._all and self.when_busy == "wait":
            if any(buffers.thread == here for buffers in self._all):
                raise Error("another scheduler of these arenas is at work in this thread, so that waiting for it would "
                            "not end: Arenas(when_busy='own') gives both memory of their own")
            return None
        self._all.append(_Buffers())
        return self._all[-1]

    def give_back(self, buffers: _Buffers, holder: object) -> None:
        """Undo `take` with this holder; without effect for another holder."""
        with self._lock:
            with suppress(ValueError):
                buffers.taken.remove(holder)
            waiting, self._waiting = self._waiting, []
        for latch in waiting:
            latch.open()


class Leased(SchedulerArenas):
    """The arenas of one scheduler over shared buffers.  In the block of `with leased:` the scheduler has the buffers.

    `buffers` are those of the last `take`.
    """

    def __init__(self, shared: Arenas, backends: tuple[Backend, ...], budgets: Mapping[int, int]) -> None:
        self.at: _Buffers | None = None
        """The buffers that the scheduler has, or had last: its allocations are in them."""
        self._on: tuple[_OnBackend, ...] = ()
        """Those of `at` on each backend."""
        super().__init__(backends, budgets)
        self.shared = shared
        self._allocations: Callable[[], Allocations | None] = lambda: None
        self._pipeline: Pipeline | None = None
        self._changing = ForkLock()
        """Held while this scheduler's allocations are suspended or released, either because it takes other buffers, or
        by the scheduler that takes these."""
        self._holders: list[tuple[object, _Buffers]] = []
        """(holder, its buffers) for each `take` that was not undone, in order."""

    def serve(self, allocations: Allocations, pipeline: Pipeline) -> None:
        """Remember the scheduler's allocations, which are in these arenas, and the pipeline of their computes."""
        self._allocations, self._pipeline = weakref.ref(allocations), pipeline

    # -- having the buffers -------------------------------------------------------------

    def take(self, holder: object) -> None:
        """Have buffers until `drop(holder)`: those of the last `take`; while another scheduler has these, wait, or take
        others."""
        found = self.shared.take(self, holder)
        self._holders.append((holder, found))
        if found is not self.at:
            with self._changing:
                allocations = self._allocations()
                if allocations is not None:
                    allocations.invalidate()
                found.users.add(self)
                on = tuple([found.of.setdefault(backend, _OnBackend()) for backend in self.backends])
                self.at, self._on = found, on       # in one line: no signal handler runs between the two
        self._show()

    def drop(self, holder: object) -> None:
        """Undo `take(holder)`; without effect if it was not called."""
        for entry in self._holders:
            if entry[0] is holder:
                self._holders.remove(entry)
                self.shared.give_back(entry[1], holder)
                return
        for buffers in tuple(self.shared._all):         # `take` may have been interrupted before it noted the holder
            if any(one is holder for one in buffers.taken):
                self.shared.give_back(buffers, holder)

    def __enter__(self) -> Leased:
        holder = object()
        try:
            self.take(holder)
        except BaseException:
            self.drop(holder)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop(self._holders[-1][0])

    def _show(self) -> None:
        """Set `buffers` to those in `at`, which another scheduler may have replaced since."""
        now = tuple([on.buffers for on in self._on])
        if any(a is not b for mine, theirs in zip(self.buffers, now, strict=True)
               for a, b in zip(mine, theirs, strict=False)) or [*map(len, now)] != [*map(len, self.buffers)]:
            super()._set(now)

    @property
    def may_close(self) -> bool:
        """Whether `close` needs no `take` before it: the scheduler has had no buffers, or this thread has those that it
        had last, for whichever scheduler, so that waiting for them would not end."""
        at = self.at
        return at is None or bool(at.taken) and at.thread == threading.get_ident()

    # -- addresses in them --------------------------------------------------------------------

    def occupy(self) -> None:
        """Become the lessee: wait for the computes of the lessee before, and end the addresses of its tensors."""
        at = self._usable()
        before = None if at.lessee is None else at.lessee()
        if before is self:
            return
        if before is not None:
            before.give_way(at)
        elif at.drain is not None:
            at.drain()
            each([partial(wait_for, backend) for backend in [*at.of]])
        at.lessee, at.drain = weakref.ref(self), None if self._pipeline is None else self._pipeline.drain_weakly

    def _usable(self) -> _Buffers:
        if self.shared.closed or self.at is None:
            raise Error("the arenas that this scheduler shared were closed: make another with arenas of its own")
        return self.at

    def give_way(self, at: _Buffers, ended_by: str | None = None) -> None:
        """Suspend this scheduler's allocations in `at`, or release them, after their queued computes; called by the
        scheduler that has `at`.

        `ended_by`: None to suspend them.  Else they are released, and it is the reason that errors name; "" for no
        reason, because other buffers replace these.
        """
        with self._changing:
            allocations = self._allocations()
            if self.at is not at or allocations is None:
                return
            if ended_by is None:
                allocations.give_way()
            else:
                allocations.invalidate(ended_by or None)

    def grow(self, sizes: Sizes, invalidate: Callable[[], None]) -> None:
        at = self._usable()

        def release_all() -> None:
            invalidate()
            each([partial(user.give_way, at, "") for user in at.users if user is not self])

        super().grow(sizes, release_all)

    def _set(self, buffers: tuple[tuple[Buffer, ...], ...]) -> None:
        super()._set(buffers)
        for on, now in zip(self._on, buffers, strict=False):
            on.buffers = now

    def close(self) -> None:
        """Leave the buffers to the other schedulers; close those that no other one uses."""
        at = self.at
        if at is not None:
            if at.lessee is not None and at.lessee() is self:
                at.lessee = at.drain = None
            self.at = None
            super()._set(((),) * len(self.backends))
            at.prune()
            self._on = ()


class LockAndLease:
    """The lock of a scheduler with shared arenas: one call at a time, which has the buffers until it returns."""

    def __init__(self, lock: OneAtATime, arenas: Leased) -> None:
        self._lock, self._arenas = lock, arenas
        self._holder: object = None

    @property
    def closed(self) -> bool:
        return self._lock.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._lock.closed = closed

    def __enter__(self) -> None:
        holder = object()
        try:
            self._lock.take(holder)
            self._arenas.take(holder)
        except BaseException:
            self._arenas.drop(holder)
            self._lock.drop(holder)
            raise
        self._holder = holder

    def __exit__(self, *exc: object) -> None:
        holder, self._holder = self._holder, None
        self._arenas.drop(holder)
        self._lock.drop(holder)
