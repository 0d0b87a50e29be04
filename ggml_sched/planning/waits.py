"""Waits: finds the smallest set of waits between the steps of a program that orders every conflict.

Two steps conflict when they access the same bytes and one of them writes; then the step that is earlier in the program,
or belongs to an earlier compute, must be done first.  Steps of one queue are in order without waits, and a wait that
follows from others is not needed: `order` returns the transitive reduction over queues and computes.  A step may be
left out of a compute, because its data is in place already; then it waits for nothing, so no other step relies on its
waits.  A backend without `concurrent_copies` takes no data while it computes: every access to its memory from another
queue conflicts with every step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Access", "Wait", "order"]


class Wait(NamedTuple):
    """Step number `step` of the compute `back` before this one (0: of this one) must be done."""

    step: int
    back: int


class Access(NamedTuple):
    """The accesses of the steps of a program to numbered memories (an arena, a resident, all slots of a copy).

    `step` .. `writes` have an element for each access, `owner` and `period` one for each memory.
    """

    step: np.ndarray
    memory: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    """The access is to the bytes [start, stop) of the memory."""
    writes: np.ndarray
    owner: np.ndarray
    """The backend to which each memory belongs; -1 if it is none of the plan's."""
    period: np.ndarray
    """After how many computes the same bytes of a memory are used again: the number of slots for a copy's, else 1."""
    exclusive: Sequence[int]
    """Backends without `concurrent_copies`: only one queue may access their memory at a time."""


def order(queues: Sequence[int], keeps: Sequence[bool], access: Access) -> list[tuple[Wait, ...]]:
    """For each step the waits that it needs.

    `queues[i]` is the queue of step i; `keeps[i]`: the step may be left out of a compute.
    """
    wanted: list[dict[int, Wait]] = [{} for _ in queues]
    queue_of = np.asarray(queues)
    for i, j, period in _conflicts(queue_of, access):
        first, second = (i, j) if i < j else (j, i)
        _want(wanted[second], queues, Wait(first, 0))
        _want(wanted[first], queues, Wait(second, period))
    return _reduced(queues, keeps, wanted)


def _want(found: dict[int, Wait], queues: Sequence[int], wait: Wait) -> None:
    """Add a wait to `found`, {queue: wait}; of two waits for one queue the later step's is kept, it implies the
    other."""
    known = found.get(queues[wait.step])
    if known is None or (wait.back, -wait.step) < (known.back, -known.step):
        found[queues[wait.step]] = wait


def _conflicts(queue_of: np.ndarray, access: Access):
    """(step, step, period) of each pair of steps on different queues that conflict.

    They conflict in one compute, and again `period` computes later.
    """
    found: dict[tuple[int, int], int] = {}

    def note(i: int, j: int, period: int) -> None:
        pair = (i, j) if i < j else (j, i)
        found[pair] = min(period, found.get(pair, period))

    # Most memories are accessed from one queue only: those are skipped.
    entry_queue = queue_of[access.step]
    lowest = np.full(len(access.owner), len(queue_of) + queue_of.max() + 1)
    highest = np.full(len(access.owner), -1)
    np.minimum.at(lowest, access.memory, entry_queue)
    np.maximum.at(highest, access.memory, entry_queue)
    for memory in np.flatnonzero(lowest < highest).tolist():
        here = np.flatnonzero(access.memory == memory)
        step, start, stop = access.step[here], access.start[here], access.stop[here]
        writes, queue = access.writes[here], entry_queue[here]
        at_home = np.bincount(queue).argmax()   # the queue with most accesses: each of the others is compared with all
        for k in np.flatnonzero(queue != at_home).tolist():
            clash = (start < stop[k]) & (start[k] < stop) & (queue != queue[k]) & (writes | writes[k])
            for other in np.unique(step[clash]).tolist():
                note(int(step[k]), other, int(access.period[memory]))
    for backend in access.exclusive:
        mine = np.flatnonzero(queue_of == backend).tolist()
        strangers = np.unique(access.step[(access.owner[access.memory] == backend) & (entry_queue != backend)]).tolist()
        for k, i in enumerate(strangers):
            for j in (*mine, *(s for s in strangers[k + 1 :] if queue_of[s] != queue_of[i])):
                note(i, j, 1)
    return [(i, j, period) for (i, j), period in found.items()]


def _reduced(queues: Sequence[int], keeps: Sequence[bool], wanted: list[dict[int, Wait]]) -> list[tuple[Wait, ...]]:
    """The waits without those that others imply.

    Uses vector clocks: `done[i][q]` is the last step of queue q that is known to be done when step i is done.  Step k
    of the same compute has number k there, step k of the compute n before it k - n * len(queues).
    """
    count, n_queues = len(queues), max(queues) + 1
    never = -count * (2 + max((w.back for waits in wanted for w in waits.values()), default=0))
    before = _predecessors(queues)
    done = [[never] * n_queues for _ in queues]

    def known(i: int, waits) -> list[int]:
        """The clock when step i begins, after the step before it in its queue and after these waits."""
        j, back = before[i]
        clock = [t - back * count for t in done[j]]
        for wait in waits:
            for q, t in enumerate(done[wait.step]):
                clock[q] = max(clock[q], t - wait.back * count)
        return clock

    changed = True
    while changed:
        changed = False
        for i, q in enumerate(queues):
            # A step that may be left out (`keeps`) waits for nothing when it is: no other step may rely on its waits.
            clock = known(i, () if keeps[i] else wanted[i].values())
            clock = [max(t, never) for t in clock]
            clock[q] = i
            if clock != done[i]:
                done[i] = clock
                changed = True
    found = []
    for i, waits in enumerate(wanted):
        left = []
        for q, wait in waits.items():
            others = known(i, [w for w in waits.values() if w is not wait])
            if others[q] < wait.step - wait.back * count:
                left.append(wait)
        found.append(tuple(sorted(left, key=lambda wait: (wait.back, wait.step))))
    return found


def _predecessors(queues: Sequence[int]) -> list[tuple[int, int]]:
    """For each step (the one before it in its queue, how many computes back that is).

    Before the first step of a queue comes its last one, of the compute before.
    """
    last = {q: i for i, q in enumerate(queues)}
    found, seen = [], set()
    for i, q in enumerate(queues):
        found.append((last[q], 0 if q in seen else 1))
        seen.add(q)
        last[q] = i
    return found
