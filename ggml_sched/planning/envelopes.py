"""Predicts the messages of a compute whose backends are in other processes.

An *envelope* visits the workers that have a part in some work one after the other, and ends at the driver, which has
sent it; see docs/remote.md.  `Visits` decides in which order.  It is used by the sessions of the room `remote`, which
fill envelopes, and by `messages`, which predicts them for a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ggml_sched.planning.program import Load, Run

if TYPE_CHECKING:
    from ggml_sched.planning.plan import Plan

__all__ = ["DRIVER", "FETCHED", "PIECE", "Messages", "Visits", "messages"]

DRIVER = "driver"
"""The name of this process beside those of workers."""
PIECE = 1 << 22
"""The most bytes that one message carries; larger data travel in pieces, so that answers arrive in between."""
FETCHED = 1 << 22
"""Bytes of the largest output that comes back with its compute, before the caller reads it."""


class Visits:
    """The order in which an envelope visits workers: `place` finds the visit in which a command is executed."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        """The name of the worker of each visit."""
        self._last: dict[str, int] = {}
        self._read_in: dict[int, int] = {}
        """{number of a block of bytes that one worker reads for another: the visit in which it is read}."""

    def place(self, worker: str, gives: int | None = None, needs: int | None = None) -> tuple[int, int]:
        """The visit for a command of `worker`, and the visit whose commands move there, -1 for none.

        `gives`, `needs`: numbers of the block of bytes that the command reads for another worker, and of the one that
        it gets from another.  A command is executed in the last visit of its worker, or in a new visit if its block
        `needs` is read after that.  If the commands of the worker's last visit read no block for another worker, they
        move to the new visit: so inputs that the host writes for the last worker, before it computes on the first one,
        cost no message of their own.
        """
        at, moved = self._last.get(worker, -1), -1
        if at < 0 or needs is not None and self._read_in.get(needs, -1) > at:
            if at >= 0 and at not in self._read_in.values():
                moved = at
            at = self._last[worker] = len(self.workers)
            self.workers.append(worker)
        if gives is not None:
            self._read_in[gives] = at
        return at, moved


class Messages(NamedTuple):
    """The messages that one compute sends from one process to another."""

    messages: int
    nbytes: int
    """Bytes of data; the header of a message, with a few hundred bytes for each tensor, is not counted."""


@dataclass(eq=False)
class _Block:
    """Bytes that an envelope carries from visit `start` (-1: from the driver) to visit `end` (None: back to the
    driver)."""

    nbytes: int
    start: int
    end: int | None


@dataclass(eq=False)
class _Envelope:
    visits: Visits = field(default_factory=Visits)
    used: list[int] = field(default_factory=list)
    """The number of commands of each visit."""
    blocks: list[_Block] = field(default_factory=list)
    n_bytes: int = 0

    def put(self, worker: str, gives: int | None = None, needs: int | None = None) -> int:
        at, moved = self.visits.place(worker, gives, needs)
        while len(self.used) < len(self.visits.workers):
            self.used.append(0)
        if moved >= 0:
            self.used[at], self.used[moved] = self.used[at] + self.used[moved], 0
            for block in self.blocks:
                block.start = at if block.start == moved else block.start
                block.end = at if block.end == moved else block.end
        self.used[at] += 1
        return at

    def sent(self) -> Iterator[tuple[str, str, int]]:
        """(sender, receiver, bytes) for each message: the envelope goes from worker to worker, then to the driver."""
        route = [k for k, n in enumerate(self.used) if n]
        sender, before = DRIVER, -1
        for k in (*route, None):
            receiver = DRIVER if k is None else self.visits.workers[k]
            yield sender, receiver, sum(b.nbytes for b in self.blocks if b.start <= before
                                        and (b.end is None or k is not None and b.end >= k))
            if k is not None:
                sender, before = receiver, k


class _Predicted:
    """Collects the messages of a compute, as a session sends them."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Messages] = {}
        self._pending = _Envelope()
        self._n_keys = 0

    def flush(self) -> None:
        pending, self._pending = self._pending, _Envelope()
        if pending.used:
            for sender, receiver, nbytes in pending.sent():
                messages, before = self.found.get((sender, receiver), (0, 0))
                self.found[sender, receiver] = Messages(messages + 1, before + nbytes)

    def run(self, worker: str) -> None:
        self._pending.put(worker)

    def write(self, worker: str, size: int) -> None:
        """Add the messages of a write of `size` bytes by the host to a worker."""
        for nbytes in _pieces(size):
            at = self._pending.put(worker)
            self._pending.blocks.append(_Block(nbytes, -1, at))
            self._count(nbytes)

    def read(self, worker: str, size: int) -> None:
        """Add the messages of a read of `size` bytes by the host from a worker."""
        for nbytes in _pieces(size):
            at = self._pending.put(worker)
            self._pending.blocks.append(_Block(nbytes, at, None))
            self._count(nbytes, size > PIECE)

    def copy(self, one: str, other: str, size: int) -> None:
        """Add the messages of a copy of `size` bytes from worker `one` to worker `other`."""
        for nbytes in _pieces(size):
            self._n_keys += 1
            block = _Block(nbytes, self._pending.put(one, gives=self._n_keys), None)
            self._pending.n_bytes += nbytes
            block.end = self._pending.put(other, needs=self._n_keys)
            self._pending.blocks.append(block)
            self._count(0, size > PIECE)

    def _count(self, nbytes: int, at_once: bool = False) -> None:
        self._pending.n_bytes += nbytes
        if at_once or self._pending.n_bytes >= PIECE:
            self.flush()


def _pieces(size: int) -> Iterator[int]:
    return (min(PIECE, size - start) for start in range(0, max(size, 1), PIECE))


def messages(plan: Plan) -> dict[tuple[str, str], Messages]:
    """{(from, to): messages and bytes of one compute}; see `Plan.messages`."""
    workers = [backend.worker for backend in plan.backends]
    if not any(workers):
        return {}
    predicted, nodes, later = _Predicted(), plan.graph.nodes, []
    for step in plan.program.steps:
        here = workers[step.backend]
        if isinstance(step, Load):
            worker = workers[step.locations[0].backend]
            if worker is not None:
                predicted.write(worker, step.nbytes)
        elif isinstance(step, Run):
            if here is not None:
                predicted.run(here)
                for node in nodes[step.first : step.last + 1]:
                    if node.computes and "output" in node.flags:
                        if node.nbytes > FETCHED:
                            later.append((here, node.nbytes))
                        else:
                            predicted.read(here, node.nbytes)
        elif not step.if_changed:
            one, other = (workers[b] for b in plan.ends(step))
            size = plan.graph.tensors[step.tensor].nbytes
            if one is not None and other is not None and one != other:
                predicted.copy(one, other, size)
            elif one is not None and one == other:
                predicted.run(one)
            elif one is not None:
                if here is None:
                    predicted.flush()    # the host waits until the worker has computed the tensor, then reads it
                predicted.read(one, size)
                predicted.flush()
            elif other is not None:
                predicted.write(other, size)
                if here is None:
                    predicted.flush()    # the step is in a queue of this process, which waits until the write is done
    predicted.flush()
    for worker, size in later:
        predicted.read(worker, size)
    predicted.flush()
    return predicted.found
