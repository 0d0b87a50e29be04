"""Waits: finds the smallest set of waits between the steps of a program that orders every conflict.

Two steps conflict when they access the same bytes and one of them writes; then the step that is earlier in the program,
or belongs to an earlier compute, must be done first.  Steps of one queue are in order without waits, and a wait that
follows from others is not needed: `order` returns the transitive reduction over queues and computes.  A step may be
left out of a compute, because its data is in place already; then it waits for nothing, so no other step relies on its
waits.  A backend without `concurrent_copies` takes no data while it computes: every access to its memory from another
queue conflicts with every step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """After how many computes the same bytes of a memory are used again: for that of a copy its slots, else 1."""
    exclusive: Sequence[int]
    """Backends without `concurrent_copies`: only one queue may access their memory at a time."""


def order(queues: Sequence[int], optional: Sequence[bool], access: Access) -> list[tuple[Wait, ...]]:
    """For each step the waits that it needs.

    `queues[i]` is the queue of step i; `optional[i]`: the step may be left out of a compute.
    """
    wanted: list[dict[int, Wait]] = [{} for _ in queues]
    queue_of = np.asarray(queues)
    _order_conflicts(queues, access, wanted)
    for backend in access.exclusive:
        strangers = access.step[(access.owner[access.memory] == backend) & (queue_of[access.step] != backend)]
        if len(strangers):
            _take_turns(np.union1d(strangers, np.flatnonzero(queue_of == backend)).tolist(), queues, wanted)
    return _reduced(queues, optional, wanted)


def _want(found: dict[int, Wait], queue: int, wait: Wait) -> None:
    """Add a wait for a step of `queue` to `found`, {queue: wait}; of two waits for one queue the wait for the later
    step is kept, because it implies the other."""
    known = found.get(queue)
    if known is None or (wait.back, -wait.step) < (known.back, -known.step):
        found[queue] = wait


def _take_turns(steps: Sequence[int], queues: Sequence[int], wanted: list[dict[int, Wait]]) -> None:
    """Let no two of `steps` (ascending) run at the same time: each waits for the last of them before it in every other
    queue.

    Where a queue has none before it in this compute, that is the queue's last one of the compute before.
    """
    last = {queues[k]: Wait(k, 1) for k in steps}
    for k in steps:
        for queue, wait in last.items():
            if queue != queues[k]:
                _want(wanted[k], queue, wait)
        last[queues[k]] = Wait(k, 0)


def _order_conflicts(queues: Sequence[int], access: Access, wanted: list[dict[int, Wait]]) -> None:
    """Let each step wait, in every other queue, for the last step before it that accesses some of the same bytes, if
    one of the two writes: a step of the same compute, or else of the compute `Access.period` earlier."""
    queue_of, count = np.asarray(queues), len(queues)
    n_queues = int(queue_of.max()) + 1
    by_memory = np.lexsort((access.step, access.memory))
    begin = np.searchsorted(access.memory[by_memory], np.arange(len(access.owner) + 1))
    # Most memories are accessed from one queue only: those are skipped.
    pairs = np.unique(access.memory * n_queues + queue_of[access.step])
    for memory in np.flatnonzero(np.bincount(pairs // n_queues) > 1).tolist():
        here, period = by_memory[begin[memory] : begin[memory + 1]], int(access.period[memory])
        # `edges` cut the memory into ranges.  For each queue and range: the last step that accesses the range, and the
        # last that writes to it.  Step k of the compute that used the memory before has number k - count.
        edges = np.unique(np.concatenate([access.start[here], access.stop[here]]))
        last_access, last_write = np.full((2, n_queues, len(edges)), -count - 1)
        steps = []
        for entries in np.split(here, np.flatnonzero(np.diff(access.step[here])) + 1):
            k = int(access.step[entries[0]])
            touched = _ranges_of(access, entries, edges)
            written = _ranges_of(access, entries[access.writes[entries]], edges)
            last_access[queues[k], touched] = last_write[queues[k], written] = k - count
            steps.append((k, touched, written))
        for k, touched, written in steps:
            found = np.maximum(last_write[:, touched].max(axis=1, initial=-count - 1),
                               last_access[:, written].max(axis=1, initial=-count - 1))
            for queue, last in enumerate(found.tolist()):
                if queue != queues[k] and last >= -count:
                    _want(wanted[k], queue, Wait(last, 0) if last >= 0 else Wait(last + count, period))
            last_access[queues[k], touched] = last_write[queues[k], written] = k


def _ranges_of(access: Access, entries: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The numbers of the ranges between `edges` that these accesses cover together."""
    opened = np.bincount(np.searchsorted(edges, access.start[entries]), minlength=len(edges))
    closed = np.bincount(np.searchsorted(edges, access.stop[entries]), minlength=len(edges))
    return np.flatnonzero(np.cumsum(opened - closed))


def _reduced(queues: Sequence[int], optional: Sequence[bool], wanted: list[dict[int, Wait]]) -> list[tuple[Wait, ...]]:
    """The waits of each step without those that others imply.

    Uses vector clocks: `done[i][q]` is the last step of queue q that is known to be done when step i is done: k for
    step k of the same compute, k - n * len(queues) for step k of the compute n before it.
    """
    count, n_queues = len(queues), max(queues) + 1
    never = -count * (2 + max((w.back for waits in wanted for w in waits.values()), default=0))
    before = _predecessors(queues)
    done = [[never] * n_queues for _ in queues]

    def known(i: int, waits: Iterable[Wait]) -> list[int]:
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
            # A step that may be left out (`optional`) waits for nothing when it is: no step may rely on its waits.
            clock = known(i, () if optional[i] else wanted[i].values())
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
    """For each step: (the step before it in its queue, how many computes earlier that one ran: 0 or 1).

    The step before a queue's first one is the queue's last one, of the compute before.
    """
    last = {q: i for i, q in enumerate(queues)}
    found, seen = [], set()
    for i, q in enumerate(queues):
        found.append((last[q], 0 if q in seen else 1))
        seen.add(q)
        last[q] = i
    return found
