"""A driver's work on its workers: gathers commands, sends them in envelopes, and waits for the results.

The commands for one worker are a segment; where a command needs a block that another worker reads in between, a further
segment begins.  The segments that are pending when a compute is queued or the host waits are one envelope, which
travels from worker to worker.  Each worker executes its commands in the order in which they were issued, and data of
another worker comes in the envelope, so nothing else has to order commands.

On a transport that may lose messages, a message without an answer is sent again, and a worker that has executed it
sends its answer again.  Of each worker only the first such message is sent again: later ones, if they are not lost,
wait for it at the worker.  The session waits longer before it sends again if answers take long, because repeats make a
slow link slower; two answers to one message show that it was sent again too early.  A worker that has died or does not
answer within the deadline is lost: all queued work fails with BackendLost, and the others go on.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggml_sched.errors import BackendError, BackendLost
from ggml_sched.planning.envelopes import PIECE, Visits
from ggml_sched.remote.envelope import FREES, Command, Envelope, Segment, error_of
from ggml_sched.remote.messages import MessageError
from ggml_sched.remote.transport import RELAY_BYTES, Transport, checked_deadline

__all__ = ["COMPUTED", "NOTHING", "Doing", "Out", "Session", "Take"]

PACE = 1e6
"""Bytes a second that a link is assumed to carry before it was measured."""
MEASURED = 1 << 20
"""The answer to a message of so many bytes or more says how fast a link is."""
FORGETS = 0.75
"""The factor by which the remembered time between answers shrinks with each answer."""
COMPUTED = "computed"
MAX_EARLY = 64
MAX_ASIDE = 64
"""The most questions that wait for an envelope to their worker; the oldest is then forgotten, and asked when its answer
is needed."""
POLL = 0.25
"""Seconds after which a session looks for dead workers while it waits."""
ASKS_AT = 0.75
"""The part of the deadline after which the session asks the workers how many segments they have executed."""
ENDS_WITHIN = 10.0
"""Seconds that a worker has to free what a session holds; less if the deadline is less."""
IN_FLIGHT = 1 << 26
"""While more bytes than this have no answer yet, sending waits."""
MAX_OPEN = 1 << 8
"""While more envelopes than this have no answer yet, sending waits: a worker can hold them all until their turn."""


Doing = tuple[str, str]
"""What a worker does, for errors: a verb and its object, such as ("computed", names of nodes), ("was sent", a tensor's
name)."""
NOTHING: Doing = ("", "")
Take = Callable[[Any], None]
"""What a session calls with the answer to a question, once it has come."""


def _first_and_last(done: Sequence[Doing]) -> Doing:
    """What the commands of a segment do, for errors: what they compute, or, if they compute nothing, what else they do;
    of several names the first and the last."""
    chosen = [doing for doing in done if doing[0] == COMPUTED] or [doing for doing in done if any(doing)]
    if not chosen:
        return NOTHING
    return chosen[0][0], " .. ".join(dict.fromkeys((chosen[0][1], chosen[-1][1])))


@dataclass(slots=True)
class Out:
    """The place for bytes that a worker reads; `done`: they have arrived."""

    view: memoryview
    done: bool = False


@dataclass(slots=True)
class _Sent:
    """An envelope that was sent at a time `at`."""

    message: bytes
    segments: list[tuple[str, int, Doing]]
    """For each segment its worker, its number there, and what it does, for errors."""
    outs: dict[int, Out]
    takes: dict[str, Take]
    at: float
    n_bytes: int
    """Bytes of the message, and bytes that workers read for the driver or for each other."""
    is_repeated: bool = False
    answer: Envelope | None = None
    is_call: bool = False
    frees: list[tuple[str, Command]] = field(default_factory=list)
    """(worker, command) of each command that frees something, and must be executed even if the envelope is given up."""

    @property
    def route(self) -> list[str]:
        """The workers that the envelope visits, in order."""
        return [worker for worker, _, _ in self.segments]


@dataclass(slots=True)
class _Pending:
    """Commands that were not sent yet."""

    segments: list[tuple[str, list[Command], list[Doing]]] = field(default_factory=list)
    blocks: dict[int, bytes | bytearray | memoryview] = field(default_factory=dict)
    outs: dict[int, Out] = field(default_factory=dict)
    takes: dict[str, Take] = field(default_factory=dict)
    """{key of a question: what is called with its answer}; not called if the envelope has an error or no answer."""
    n_bytes: int = 0
    splits: set[tuple[str, int]] = field(default_factory=set)
    visits: Visits = field(default_factory=Visits)
    """Decides which segment gets a command, and the order of the segments."""


class Session:
    """One driver's use of the workers of a transport.

    `deadline`: seconds without any answer after which a worker is lost.  `messages` and `bytes_sent` count what the
    driver sends.  Thread-safe.
    """

    def __init__(self, transport: Transport, deadline: float = 60.0) -> None:
        self.transport = transport
        self.deadline = checked_deadline(deadline)
        self.name: str = uuid.uuid4().hex
        self.lost: dict[str, BackendLost] = {}
        self.epoch: int = 0
        self.messages: int = 0
        self.bytes_sent: int = 0
        self.closed: bool = False
        self.links: dict[tuple[str, str], tuple[float, float]] = {}
        """{(from, to): (bytes a second, seconds a copy)} of the links that were measured, by names of backends, and
        "driver" for this process."""
        self.names: dict[tuple[str, str], str] = {}
        """{(worker, name of its backend): name of the first RemoteBackend of it}, for errors."""
        self.sharers: Counter[str] = Counter()
        """{machine: the number of its backends without a bound of their own, which share its memory}."""
        self._pid = os.getpid()
        self.lock: threading.RLock = threading.RLock()
        self._numbers = dict.fromkeys(transport.workers, 0)
        self._count = 0
        """Envelopes sent so far; the next one has this number."""
        self._key = 0
        self._pending = _Pending()
        self._sent: dict[int, _Sent] = {}
        self._in_flight = 0
        self._error: Exception | None = None
        self._heard = self._repeated = transport.now()
        """The times at which an answer came last, and at which messages were sent again last."""
        self._first_patience = min(POLL if transport.patience is None else transport.patience, deadline / 8)
        self._took = 0.0
        """The longest of the last times between answers, in seconds; shrinks with each answer (FORGETS)."""
        self._pace = PACE
        """Bytes a second that links carry, by the last answer to a large message (MEASURED)."""
        self._early: dict[int, tuple[float, int]] = {}
        """{number of an envelope that was sent twice and answered once: (seconds until the answer, bytes)}.  If a
        second answer comes, the first one was to the first message, so that its seconds are right."""
        self._n_repeats = 0
        """How often messages were sent again since the last answer."""
        self._losses = transport.losses
        self._in_doubt = 0
        """The envelopes with numbers below this may be lost, by an interrupt or the transport, and are sent again."""
        self._status: dict[str, int] | None = None
        """{worker: the number of segments that it has executed}: the answers to a question that is sent shortly before
        the deadline.  None: it was not sent since the last answer to an envelope."""
        self.released: deque[tuple[str, Command]] = deque()
        """(worker, command) of each command that finalizers issue, to free something.  Finalizers may run at any
        instruction of the thread that holds the lock, so they only append here."""
        self._aside: list[tuple[str, Command, str, Take]] = []
        """(worker, command, key, what takes the answer) of each question that waits for an envelope to its worker."""
        self._open: set[str] = set()
        """While the session is closed: the workers that have not confirmed that they freed what it held."""
        self._noted: list[Callable[[Exception], None]] = []

    def add(self, worker: str) -> None:
        """Use another worker, which the transport has started."""
        with self.lock:
            self._numbers[worker] = 0

    def dismiss(self, worker: str) -> None:
        """Give up a worker that was added, and that nothing was queued for but calls whose callers have given up."""
        with self.lock:
            for number in [number for number, sent in self._sent.items() if sent.is_call and sent.route == [worker]]:
                self._in_flight -= self._sent.pop(number).n_bytes
            if worker not in self.lost:
                self._lose(worker, "was dismissed")

    @property
    def is_here(self) -> bool:
        """Whether this process made the session, and not the parent before a fork."""
        return self._pid == os.getpid()

    # -- queueing --------------------------------------------------------------------------------------

    def on_failure(self, note: Callable[[Exception], None]) -> None:
        """Call `note` with the error of queued work before it is raised."""
        self._noted.append(note)

    def new_key(self) -> int:
        """A number that no other block, buffer or split of this session has."""
        with self.lock:
            self._key += 1
            return self._key

    def put(self, worker: str, command: Command, block: tuple[int, bytes] | None = None,
            out: tuple[int, Out] | None = None, doing: Doing = NOTHING, gives: int | None = None,
            needs: int | None = None) -> None:
        """Queue a command.  `block`: bytes that it names by their number; `out`: where bytes that it reads are put;
        `doing`: what it does, for errors; `gives`, `needs`: the number of a block that the command reads for another
        worker, or gets from another.  Raises BackendLost for a lost worker."""
        self._check_process(worker)
        with self.lock:
            self._check(worker)
            pending = self._pending
            if command[0] == "run":
                if (worker, command[1]) in pending.splits:
                    # A split that is pending already belongs to an earlier compute, which ends here: a pipeline issues
                    # computes without waiting between them, and its workers begin with one while the next is queued.
                    self.flush()
                    pending = self._pending
                pending.splits.add((worker, command[1]))
            # An interrupt may come after each line: the bytes that a command needs come before it.
            if block is not None:
                pending.blocks[block[0]] = block[1]
                pending.n_bytes += len(block[1])
            done = self._add(worker, command, gives, needs)
            if doing is not NOTHING:
                done.append(doing)
            if out is not None:
                pending.outs[out[0]] = out[1]
            if command[0] == "read":
                pending.n_bytes += command[3]
            if pending.n_bytes >= PIECE and gives is None:      # else the command that needs the block is queued next
                self.flush()

    def _add(self, worker: str, command: Command, gives: int | None = None, needs: int | None = None) -> list[Doing]:
        """Add a command to the pending ones; returns what the commands of its segment do."""
        pending = self._pending
        at, moved = pending.visits.place(worker, gives, needs)
        while len(pending.segments) <= at:
            k = len(pending.segments)
            pending.segments.append((pending.visits.workers[k], [], []))
        if moved >= 0:
            pending.segments[at] = pending.segments[moved]
            pending.segments[moved] = worker, [], []
        _, commands, done = pending.segments[at]
        commands.append(command)
        return done

    def put_aside(self, worker: str, command: Command, key: str, take: Take) -> None:
        """Queue a question with the next envelope that visits the worker, so that it costs no message; `take` gets the
        answer, which has the name `key`."""
        self._check_process(worker)
        with self.lock:
            self._check(worker)
            mine = [question for question in self._aside if question[0] == worker]
            if len(mine) >= MAX_ASIDE:
                self._aside.remove(mine[0])
            self._aside.append((worker, command, key, take))

    def _take_aside(self) -> None:
        """Add the questions that were put aside to the pending envelope, each to the last visit of its worker."""
        last = {worker: commands for worker, commands, _ in self._pending.segments if commands}
        for question in [question for question in self._aside if question[0] in last]:
            worker, command, key, take = question
            self._aside.remove(question)
            last[worker].append(command)
            self._pending.takes[key] = take

    def _take_released(self) -> None:
        """Queue the commands in `released`."""
        while self.released:
            worker, command = self.released[0]
            if worker not in self.lost and not self.closed:
                self._add(worker, command)      # `put` may send, which queues the released commands first
            self.released.popleft()

    def flush(self) -> None:
        """Send the pending commands."""
        with self.lock:
            self._take_released()
            self._take_aside()
            if any(commands for _, commands, _ in self._pending.segments):
                self._send("run", self._pending)
                while self._in_flight > IN_FLIGHT or len(self._sent) > MAX_OPEN:
                    self._pump()
            else:
                self._pending = _Pending()

    def call(self, worker: str, *commands: Command, doing: Doing = NOTHING) -> dict[str, Any]:
        """Execute commands after all that is queued, wait, and return the answers.  Raises their error.  `doing`: what
        they do, for errors."""
        self._check_process(worker)
        with self.lock:
            self._check(worker)
            self.flush()
            number = self._send("call", _Pending([(worker, [*commands], [doing])]))
            sent = self._sent[number]
            self._await(number)
            answer = sent.answer
            if answer is None:
                raise self._taken() or self._lost_error(worker)
            if answer.error is not None:
                raise error_of(answer.error, self.names)
            return answer.answers

    def _send(self, kind: str, pending: _Pending) -> int:
        segments, said, numbers = [], [], dict(self._numbers)
        acked: dict[str, int] = {}
        for worker, commands, done in pending.segments:
            if not commands:
                continue        # its commands were moved to a later segment
            n = numbers[worker]
            numbers[worker] += 1
            # All segments of this envelope for one worker have the same `acked`: none of them is answered yet.
            segments.append(Segment(worker, n, commands, acked.setdefault(worker, self._acked(worker, n))))
            said.append((worker, n, _first_and_last(done)))
        number = self._count
        message = Envelope(kind, self.name, number, self.epoch, segments, pending.blocks).packed()
        frees = [(worker, command) for worker, commands, _ in pending.segments for command in commands
                 if command[0] in FREES]
        n_bytes = len(message) + sum(command[3] for segment in segments for command in segment.commands
                                     if command[0] == "read")
        now = self.transport.now()
        rest = _Pending() if pending is self._pending else self._pending
        # Up to here an exception leaves the session unchanged: a number that was counted must be sent, because the
        # session waits for its answer.
        if not self._sent:
            self._heard, self._status = now, None
        sent = self._sent[number] = _Sent(message, said, pending.outs, pending.takes, now, n_bytes,
                                          is_call=kind == "call", frees=frees)
        try:
            self._numbers, self._count, self._pending = numbers, number + 1, rest
            self._in_flight += n_bytes
            self._post(sent.route[0], message, sent.route if n_bytes <= RELAY_BYTES else ())
        except BaseException:
            self._in_doubt = number + 1
            raise
        return number

    def _acked(self, worker: str, number: int) -> int:
        """The highest number below which every segment of a worker is answered or given up; `number` if all are."""
        return min((n for sent in self._sent.values() for name, n, _ in sent.segments if name == worker),
                   default=number)

    def _post(self, worker: str, message: bytes, route: Sequence[str] = ()) -> None:
        self.messages += 1
        self.bytes_sent += len(message)
        self.transport.post(worker, message, route)

    def _check_process(self, worker: str) -> None:
        """BackendError in a child of a fork.  Called before the lock is taken, which a thread of the parent may have
        held."""
        if not self.is_here:
            raise BackendError(f"worker {worker!r} is connected to the parent of this process")

    def _check(self, worker: str) -> None:
        if self.closed:
            raise BackendError(f"the session on worker {worker!r} is closed")
        if worker in self.lost:
            if isinstance(self._error, BackendLost) and self._error.worker == worker:
                self._taken()       # the error is raised here, so the next wait must not raise it again
            raise self._lost_error(worker)

    def _lost_error(self, worker: str) -> BackendLost:
        """A new exception for a lost worker.  Each caller gets a new one, because callers add notes, and an exception
        that was raised keeps the frames of its traceback alive."""
        lost = self.lost[worker]
        return BackendLost(str(lost), lost.worker, lost.computing)

    # -- waiting ---------------------------------------------------------------------------------------

    def position(self) -> int:
        """The number of envelopes after which everything that was queued so far is done."""
        with self.lock:
            return self._count + bool(self._pending.segments)

    def wait(self, position: int | None = None) -> None:
        """Wait until all of the first `position` envelopes are answered (None: all).  Errors are kept for
        `take_error`.  Does nothing in a child of a fork, whose parent has the session."""
        if not self.is_here:
            return
        with self.lock:
            if position is None or position > self._count or self.released:
                self.flush()
                position = self._count if position is None else min(position, self._count)
            for number in [n for n in self._sent if n < position]:
                self._await(number)

    def take_error(self) -> Exception | None:
        """The first error of queued work since the last call, or None.  Workers skip what was queued before this call
        and after the error; they execute what is queued after the call."""
        with self.lock:
            return self._taken()

    def _taken(self) -> Exception | None:
        error, self._error = self._error, None
        if error is not None:
            self.epoch += 1
            for note in self._noted:
                note(error)
        return error

    def _await(self, number: int) -> None:
        while number in self._sent:
            self._pump()

    def _pump(self) -> None:
        """Handle one message; if none comes in time, send messages again or give up workers, as deadlines require."""
        try:
            self._step()
        except BaseException:
            self._in_doubt = self._count
            raise

    def _step(self) -> None:
        transport, losses = self.transport, self.transport.losses
        if losses != self._losses:
            self._in_doubt, self._losses = self._count, losses
        if self._in_doubt:
            self._repeat(sent for number, sent in self._sent.items() if number < self._in_doubt)
            self._in_doubt = 0
        now = transport.now()
        oldest = min((sent.at for sent in self._sent.values()), default=now)
        silent_since = max(oldest, self._heard)
        ends, asks = silent_since + self.deadline, silent_since + self.deadline * ASKS_AT
        heads = self._heads() if transport.patience is not None else []
        due = max(silent_since, self._repeated) + self._patience() if heads else now + POLL
        message = transport.receive(max(0.0, min(due, ends, ends if self._status is not None else asks) - now))
        if message is not None:
            self._take(message)
            return
        if self.lose_dead() or not self._sent:
            return
        now = transport.now()
        if now >= ends:
            self._lose(self._silent(), f"has not answered within {self.deadline:g} s")
            return
        if now >= asks and self._status is None or now >= due and heads and self._status is not None:
            self._status = self._status or {}
            for worker in self._live():
                self._post(worker, self._control("status", worker))
        if now >= due and heads:
            self._n_repeats += 1
            self._repeat(heads)

    def _heads(self) -> list[_Sent]:
        """For each worker that is the first on the route of an envelope: the first such envelope without an answer."""
        first: dict[str, _Sent] = {}
        for number in sorted(self._sent):
            first.setdefault(self._sent[number].route[0], self._sent[number])
        return [*first.values()]

    def _patience(self) -> float:
        """Seconds without an answer after which messages are sent again, with the time that the bytes on the way
        take."""
        base = max(self._first_patience, 2 * self._took) + self._in_flight / self._pace
        least = min(2 * self._took, self.deadline / 2)
        return max(least, min(base * 2.0 ** min(self._n_repeats, 16), self.deadline / 8))

    def _repeat(self, envelopes: Iterable[_Sent]) -> None:
        self._repeated = self.transport.now()
        for sent in [*envelopes]:
            sent.is_repeated = True
            self._post(sent.route[0], sent.message)

    def _take(self, message: bytes | bytearray) -> None:
        try:
            answer = Envelope.read(message)
        except MessageError as error:
            self._error = self._error or error
            return
        if answer.session != self.name:
            if not answer.session and answer.error is not None:
                self._error = self._error or error_of(answer.error, self.names)
            return
        if answer.kind == "close":
            self._open.difference_update(answer.answers)
        elif answer.kind == "status":
            if self._status is not None:
                self._status |= {name: n for name, n in answer.answers.items() if isinstance(n, int)}
        elif answer.number in self._early:
            self._learn(*self._early.pop(answer.number))
        elif answer.number in self._sent:
            sent = self._sent[answer.number]
            self._note_time(answer.number, sent)
            self._put_out(sent, answer)
            del self._sent[answer.number]       # last: after an interrupt before it the message is sent again
            self._in_flight -= sent.n_bytes

    def _note_time(self, number: int, sent: _Sent) -> None:
        """Update the times between answers, and the bytes a second, by the answer that has just come."""
        now = self.transport.now()
        seen = now - max(sent.at, self._heard), sent.n_bytes
        if not sent.is_repeated:
            self._learn(*seen)
        else:
            self._early[number] = seen
            while len(self._early) > MAX_EARLY:
                del self._early[min(self._early)]
        self._heard, self._status, self._n_repeats = now, None, 0

    def _learn(self, took: float, n_bytes: int) -> None:
        self._took = max(took, self._took * FORGETS)
        if n_bytes >= MEASURED and took > 0:
            self._pace = n_bytes / took

    def _put_out(self, sent: _Sent, answer: Envelope) -> None:
        """Write the bytes of an answer to the `Out` of each command that reads, and give answers to those that take
        them, or keep its error for `take_error`."""
        sent.answer = answer
        if answer.error is not None:
            if not sent.is_call:
                self._error = self._error or error_of(answer.error, self.names)
            return
        for key, out in sent.outs.items():
            block = answer.blocks.get(key)
            if block is not None and len(block) == len(out.view):
                out.view[:], out.done = block, True
            else:
                self._error = self._error or MessageError(f"an answer without {len(out.view)} bytes that were read")
        for question, take in sent.takes.items():
            if question in answer.answers:
                take(answer.answers[question])

    # -- losing a worker -------------------------------------------------------------------------------

    def _live(self) -> list[str]:
        return [worker for worker in self._numbers if worker not in self.lost]

    def _silent(self) -> str:
        """The worker at which the oldest envelope waits: the first on its route that has not reported its segment as
        executed."""
        sent = self._sent[min(self._sent)]
        known = self._status or {}
        return next((worker for worker, n, _ in sent.segments if known.get(worker, 0) <= n), sent.route[0])

    def lose_dead(self) -> bool:
        """Give up the workers of which the transport knows that they have died; returns whether there were any."""
        dead = {worker: why for worker, why in self.transport.lost().items()
                if worker not in self.lost and worker in self._numbers}
        for worker, why in dead.items():
            self._lose(worker, f"has died: {why}")
        return bool(dead)

    def _lose(self, worker: str, why: str) -> None:
        """Give up a worker.  If queued work has a segment for it, all queued work fails, because the rest may depend on
        that segment.  The next segment of each other worker then says (`acked`) that those before it are given up, and
        frees what they were to free."""
        parts = [doing for number in sorted(self._sent) for name, _, doing in self._sent[number].segments
                 if name == worker]
        verb, what = next(filter(any, parts), NOTHING)
        self.lost[worker] = BackendLost(f"worker {worker!r} {why}" + (f" while it {verb} {what}" if what else ""),
                                        worker, what)
        self.transport.abandon(worker)
        self._aside = [question for question in self._aside if question[0] != worker]
        mine = [commands for name, commands, _ in self._pending.segments if name == worker]
        if not parts and all(command[0] in FREES for commands in mine for command in commands):
            for commands in mine:
                commands.clear()        # what the worker held is gone, so nothing is left to free
            return
        self._error = self._error or self._lost_error(worker)
        frees = [free for sent in self._sent.values() for free in sent.frees]
        frees += [(name, command) for name, commands, _ in self._pending.segments for command in commands
                  if command[0] in FREES]
        self._give_up()
        for name, command in frees:
            if name not in self.lost:
                self.put(name, command)
        self._heard, self._status = self.transport.now(), None

    def _give_up(self) -> None:
        """Forget all commands that were sent and not answered, or not sent yet."""
        self._sent.clear()
        self._in_flight = 0
        self._pending = _Pending()

    def _control(self, kind: str, worker: str) -> bytes:
        return Envelope(kind, self.name, 0, self.epoch, [Segment(worker, 0, [])]).packed()

    def close(self) -> None:
        """Free what the session holds on the workers; idempotent.  Queued work is waited for; a worker that does not
        confirm the end in time is lost."""
        if not self.is_here:
            return
        with self.lock:
            if self.closed:
                return
            try:
                self.wait()
            finally:
                self.closed = True
                self._give_up()
                self._open = {*self._live()}
                for worker in self._open:
                    self._post(worker, self._control("close", worker))
            self._await_ends()

    def _await_ends(self) -> None:
        now = self.transport.now
        end = now() + min(self.deadline, ENDS_WITHIN)
        while self._open and (left := end - now()) > 0:
            message = self.transport.receive(min(left, self._first_patience))
            if message is not None:
                self._take(message)
                continue
            self.lose_dead()
            self._open.difference_update(self.lost)
            for worker in self._open if self.transport.patience is not None else ():
                self._post(worker, self._control("close", worker))
        for worker in self._open:
            self._lose(worker, "has not confirmed the end of its session")
