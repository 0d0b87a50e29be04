"""A worker: real backends whose memory and kernels a driver uses by messages.

`Worker.handle` takes a message and returns those that it causes; it opens no connection, and starts no thread.  Each
driver has a session with buffers and splits of its own, which no other session can name.  Whatever a message asks for
is checked here: numbers of buffers, offsets, layouts, sources of ops, and whether the backend supports each node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ggml_sched._graph import Context, Graph, Tensor, new_buffer, op_names
from ggml_sched._host import host_memory
from ggml_sched.backend import Backend, Buffer, GraphView, new_graph_plan, note_nodes, overrides, tensor_copy
from ggml_sched.errors import OutOfMemory, UnsupportedOp, each
from ggml_sched.remote.envelope import DRIVER, FREES, Envelope, Segment, error_values
from ggml_sched.remote.files import Files
from ggml_sched.remote.messages import MAX_BLOCK_BYTES, MessageError, fields_of, natural, text
from ggml_sched.remote.tensors import tensors_of
from ggml_sched.remote.transport import machine

__all__ = ["Worker"]

MAX_SESSIONS = 64
MAX_CLOSED = 1 << 10
"""The most closed sessions that are remembered, so that late messages of them are refused."""
MAX_HELD = 1 << 10
"""The most envelopes of a session that wait for an earlier one; the driver has fewer under way."""
MAX_MESSAGES = 1 << 29
"""The most bytes of messages that a worker holds for all sessions: envelopes that wait for an earlier one, and answers
until they are acknowledged."""
MAX_CACHED = 4096
"""The most tensors of a session that are kept for the next command that names them."""
MAX_KEY = 1 << 12
"""A tensor is kept only if its values, as text, have at most this many characters."""
MAX_BUFFERS = 1 << 16
"""The most buffers of all sessions together."""
MAX_REGISTERED = 1 << 20
"""The most tensors in the splits of all sessions together, which take some GB."""
Sent = list[tuple[str, bytes]]
"""Messages to send: (name of a worker or DRIVER, bytes)."""


@dataclass(slots=True)
class _Split:
    """Nodes of one device, prepared to be computed.  `ctx` keeps the tensors alive."""

    backend: Backend
    view: GraphView
    plan: Any
    buffers: frozenset[int]
    ctx: Context
    n_tensors: int


@dataclass(slots=True)
class _Session:
    """The state of one driver's session on this worker.  `expected` is the number of the next segment."""

    buffers: dict[int, Buffer] = field(default_factory=dict)
    splits: dict[int, _Split] = field(default_factory=dict)
    tensors: dict[str, tuple[int, Tensor, Context]] = field(default_factory=dict)
    expected: int = 0
    held: dict[int, tuple[Envelope, int]] = field(default_factory=dict)
    """{number of a segment that came early: (its envelope, bytes of the message)}."""
    sent: dict[int, Sent] = field(default_factory=dict)
    failed: int = -1
    """The epoch of the last failure: queued work of this epoch or an earlier one is not executed."""


class Worker:
    """Backends under a name.  `memory`: the most bytes that all sessions may hold on each backend, with the work memory
    of its kernels, None for no bound of its own; messages take MAX_MESSAGES bytes of the host besides.  The worker
    closes its backends."""

    def __init__(self, name: str, backends: Sequence[Backend], memory: int | None = None) -> None:
        self.name = name
        self.backends: tuple[Backend, ...] = tuple(backends)
        self.memory = memory
        self.files: Files = Files()
        self.used: list[int] = [0] * len(self.backends)
        self.held_bytes: int = 0
        """Bytes of the messages that are held; see MAX_MESSAGES."""
        self.n_buffers: int = 0
        self.n_registered: int = 0
        """Tensors of the splits of all sessions."""
        self.sessions: dict[str, _Session] = {}
        self._closed: deque[str] = deque(maxlen=MAX_CLOSED)

    def handle(self, message: bytes | bytearray | memoryview) -> Sent:
        """Execute what a message asks for; returns the messages to send.  Raises MessageError, with nothing changed,
        for a message that is not understood."""
        envelope = Envelope.read(message)
        if not envelope.segments or envelope.segments[0].worker != self.name:
            raise MessageError(f"an envelope that is not for worker {self.name!r}")
        if envelope.kind == "close":
            self.close_session(envelope.session)
            self._closed.append(envelope.session)
            envelope.answers[self.name] = None
            return self._passed_on(envelope)
        if envelope.session in self._closed:
            return []           # the segment was executed already: the message came late, or twice
        if envelope.kind == "status":
            known = self.sessions.get(envelope.session)
            envelope.answers[self.name] = 0 if known is None else known.expected
            return self._passed_on(envelope)
        session = self._session(envelope.session)
        number, acked = envelope.segments[0].number, envelope.segments[0].acked
        if number < session.expected:
            return session.sent.get(number, [])
        if session.expected < acked <= number:
            # The driver has given up the segments in between, which were to come by way of a worker that is lost.
            session.expected = acked
            for n in [n for n in session.held if n < acked]:
                self.held_bytes -= session.held.pop(n)[1]
        is_full = len(session.held) >= MAX_HELD or self.held_bytes + len(message) > MAX_MESSAGES
        if number > session.expected and is_full:
            return []
        if number not in session.held:
            session.held[number] = envelope, len(message)
            self.held_bytes += len(message)
        return self._serve_held(session)

    def answer(self, message: bytes | bytearray | memoryview) -> Sent:
        """As `handle`, but for a message that is not understood it returns a message with the error to the driver."""
        try:
            return self.handle(message)
        except MessageError as error:
            return [(DRIVER, Envelope("status", "", 0, 0, [], error=error_values(error, self.name)).packed())]

    def close_session(self, name: str) -> None:
        """Free all that a session holds."""
        session = self.sessions.pop(name, None)
        if session is not None:
            splits, buffers = [*session.splits], [*session.buffers]
            self.held_bytes -= sum(size for _, size in session.held.values())
            self._forget(session, session.expected)
            each([*(lambda k=k: self._drop(session, k) for k in splits),
                  *(lambda k=k: self._free(session, k) for k in buffers)])

    def close(self) -> None:
        """Free all sessions and the backends; idempotent."""
        each([*(lambda name=name: self.close_session(name) for name in [*self.sessions]),
              *(backend.close for backend in self.backends)])

    # -- order ----------------------------------------------------------------------------------------

    def _session(self, name: str) -> _Session:
        if name not in self.sessions:
            if len(self.sessions) >= MAX_SESSIONS:
                raise MessageError(f"worker {self.name!r} has {MAX_SESSIONS} sessions, and takes no other")
            self.sessions[name] = _Session()
        return self.sessions[name]

    def _serve_held(self, session: _Session) -> Sent:
        sent: Sent = []
        while session.expected in session.held:
            number = session.expected
            envelope, size = session.held.pop(number)
            self.held_bytes -= size
            segment = envelope.segments[0]
            session.expected += 1
            self._forget(session, segment.acked)
            if self.held_bytes > MAX_MESSAGES and envelope.error is None:
                envelope.error = error_values(OutOfMemory(
                    f"worker {self.name!r} holds {self.held_bytes} bytes of messages, more than {MAX_MESSAGES}",
                    None, self.held_bytes, MAX_MESSAGES), self.name)
            self._execute(session, envelope, segment)
            out = session.sent[number] = self._passed_on(envelope)
            self.held_bytes += sum(len(message) for _, message in out)
            sent += out
        return sent

    def _forget(self, session: _Session, acked: int) -> None:
        """Drop the answers to segments with numbers below `acked`."""
        for n in [n for n in session.sent if n < acked]:
            self.held_bytes -= sum(len(message) for _, message in session.sent.pop(n))

    def _passed_on(self, envelope: Envelope) -> Sent:
        """The message that sends the rest of an envelope on: to the worker of the next segment, or to the driver."""
        del envelope.segments[0]
        try:
            message = envelope.packed()
        except Exception as error:      # answers of a backend that are no values, or no memory for the blocks
            envelope.answers, envelope.blocks = {}, {}
            envelope.error = envelope.error or error_values(error, self.name)
            message = envelope.packed()
        return [(envelope.segments[0].worker if envelope.segments else DRIVER, message)]

    def _execute(self, session: _Session, envelope: Envelope, segment: Segment) -> None:
        """Execute the commands of a segment.  The envelope carries the first error on to the driver; after it only the
        commands of ALWAYS are executed."""
        is_call = envelope.kind == "call"
        for command in segment.commands:
            try:
                name = text(fields_of(command, "a command")[0] if command else None, "the name of a command")
                skips = envelope.error is not None or not is_call and envelope.epoch <= session.failed
                if skips and name not in ALWAYS:
                    continue
                _called(COMMANDS, "command", name, command[1:], self, session, envelope)
            except Exception as error:
                envelope.error = envelope.error or error_values(error, self.name)
        for backend in self.backends:       # after an error, too: else a later message would raise that of this work
            try:
                if backend.asynchronous:
                    backend.synchronize()
            except Exception as error:
                envelope.error = envelope.error or error_values(error, self.name)
        if envelope.error is not None and not is_call:
            session.failed = max(session.failed, envelope.epoch)

    # -- commands -------------------------------------------------------------------------------------

    def _backend(self, device: Any) -> tuple[int, Backend]:
        k = natural(device, "a device", len(self.backends))
        return k, self.backends[k]

    def available(self, device: int) -> int | None:
        """Bytes that sessions may still allocate on a backend, None where neither it nor the worker knows."""
        backend = self.backends[device]
        of_worker = None if self.memory is None else max(self.memory - self.used[device] - backend.work_held, 0)
        known = [n for n in (of_worker, backend.memory_available()) if n is not None]
        return min(known, default=None)

    def _alloc(self, session: _Session, envelope: Envelope, number: Any, device: Any, size: Any, usage: Any) -> None:
        number, size = natural(number, "the number of a buffer"), natural(size, "the size of a buffer")
        usage = text(usage, "the usage of a buffer")
        k, backend = self._backend(device)
        if number in session.buffers:
            raise MessageError(f"buffer {number} exists")
        if self.n_buffers >= MAX_BUFFERS:
            raise MessageError(f"worker {self.name!r} has {MAX_BUFFERS} buffers, and allocates no other")
        self._check_room(k, size, "")
        buffer = new_buffer(backend, size)
        buffer.usage = usage
        session.buffers[number] = buffer
        self.n_buffers += 1
        self.used[k] += size

    def _check_room(self, device: int, size: int, what: str) -> None:
        left, backend = self.available(device), self.backends[device]
        if left is not None and size > left:
            raise OutOfMemory(f"backend {backend.name!r} of worker {self.name!r}: {size} bytes{what} needed, {left} "
                              "left", backend.name, size, left)

    def _free(self, session: _Session, number: Any) -> None:
        buffer = session.buffers.pop(natural(number, "the number of a buffer"), None)
        if buffer is None:
            raise MessageError(f"there is no buffer {number}")
        for k in [k for k, split in session.splits.items() if number in split.buffers]:
            self._drop(session, k)
        session.tensors = {key: found for key, found in session.tensors.items() if found[0] != number}
        self.used[self.backends.index(buffer.backend)] -= buffer.size
        self.n_buffers -= 1
        buffer.close()

    def _free_command(self, session: _Session, envelope: Envelope, number: Any) -> None:
        if natural(number, "the number of a buffer") in session.buffers:
            self._free(session, number)

    def _usage(self, session: _Session, envelope: Envelope, number: Any, usage: Any) -> None:
        self._buffer(session, number).usage = text(usage, "the usage of a buffer")

    def _buffer(self, session: _Session, number: Any) -> Buffer:
        if natural(number, "the number of a buffer") not in session.buffers:
            raise MessageError(f"there is no buffer {number}")
        return session.buffers[number]

    def _tensor(self, session: _Session, values: Any) -> Tensor:
        """The tensor that `values` describe.  Equal values mostly give the same object, because backends keep by tensor
        what they have prepared."""
        key = repr(values)
        found = session.tensors.get(key)
        if found is None:
            ctx = Context("remote")
            t, = tensors_of([values], session.buffers, ctx)
            if t.buffer is None or t.src:
                raise MessageError("a tensor without a place")
            found = values["at"][0], t, ctx
            if len(key) <= MAX_KEY:
                if len(session.tensors) >= MAX_CACHED:
                    session.tensors.clear()
                session.tensors[key] = found
        return found[1]

    def _init(self, session: _Session, envelope: Envelope, values: Any) -> None:
        t = self._tensor(session, values)
        t.buffer.init_tensor(t)

    def _write(self, session: _Session, envelope: Envelope, values: Any, offset: Any, key: Any) -> None:
        t = self._tensor(session, values)
        block = envelope.blocks.pop(natural(key, "the number of a block"), None)
        if block is None:
            raise MessageError(f"there is no block {key}")
        self._set(t, block, natural(offset, "an offset"))

    @staticmethod
    def _set(t: Tensor, block: Any, offset: int) -> None:
        try:
            t.backend.set_tensor(t, block, offset)
        except ValueError as error:
            raise MessageError(str(error)) from error

    def _read(self, session: _Session, envelope: Envelope, values: Any, offset: Any, size: Any, key: Any) -> None:
        t = self._tensor(session, values)
        key, size = natural(key, "the number of a block"), natural(size, "a size", t.nbytes + 1)
        if key in envelope.blocks:
            raise MessageError(f"block {key} exists")
        if sum(map(len, envelope.blocks.values())) + size > MAX_BLOCK_BYTES:
            raise MessageError(f"more than {MAX_BLOCK_BYTES} bytes are read in one envelope")
        out = bytearray(size)
        try:
            t.backend.get_tensor(t, out, natural(offset, "an offset"))
        except ValueError as error:
            raise MessageError(str(error)) from error
        envelope.blocks[key] = out

    def _clear(self, session: _Session, envelope: Envelope, number: Any, value: Any) -> None:
        self._buffer(session, number).clear(natural(value, "a byte", 256))

    def _copy(self, session: _Session, envelope: Envelope, source: Any, target: Any) -> None:
        try:
            tensor_copy(self._tensor(session, source), self._tensor(session, target))
        except ValueError as error:
            raise MessageError(str(error)) from error

    def _split(self, session: _Session, envelope: Envelope, number: Any, device: Any, values: Any, nodes: Any,
               groups: Any, needed: Any) -> None:
        number = natural(number, "the number of a split")
        k, backend = self._backend(device)
        self._drop(session, number)     # after a failure the driver registers a split again under the same number
        ctx = Context("split")
        _, chosen = self._nodes(session, values, nodes, ctx)
        for node in chosen:
            for t in (node, *node.src):
                if t is not None and t.backend is not backend:
                    raise MessageError(f"{t!r} has no place on backend {backend.name!r}")
            if not node.computes or not backend.supports_op(node):
                raise UnsupportedOp(f"backend {backend.name!r} of worker {self.name!r} does not compute {node!r}")
        if self.n_registered + len(values) > MAX_REGISTERED:
            raise MessageError(f"worker {self.name!r} has splits of {self.n_registered} tensors, and takes "
                               f"{MAX_REGISTERED}")
        work = backend.work_size(chosen) - backend.work_held
        if work > 0:
            self._check_room(k, work, " of work memory")
        view = GraphView(chosen, *_groups(groups, needed, len(chosen)))
        try:
            plan = new_graph_plan(backend, view)
        except Exception as error:
            note_nodes(error, backend, chosen)
            raise
        session.splits[number] = _Split(backend, view, plan, frozenset(v["at"][0] for v in values if "at" in v), ctx,
                                         len(values))
        self.n_registered += len(values)

    def _drop(self, session: _Session, number: int) -> None:
        split = session.splits.pop(number, None)
        if split is not None:
            self.n_registered -= split.n_tensors
            if split.plan is not None:
                split.backend.graph_plan_free(split.plan)

    def _drop_command(self, session: _Session, envelope: Envelope, number: Any) -> None:
        self._drop(session, natural(number, "the number of a split"))

    def _run(self, session: _Session, envelope: Envelope, number: Any) -> None:
        split = session.splits.get(natural(number, "the number of a split"))
        if split is None:
            raise MessageError(f"there is no split {number}")
        if split.plan is None:
            split.backend.graph_compute(split.view)
        else:
            split.backend.graph_plan_compute(split.plan)

    def _ask(self, session: _Session, envelope: Envelope, key: Any, question: Any, arguments: Any) -> None:
        envelope.answers[text(key, "the key of an answer")] = _called(
            QUESTIONS, "question", text(question, "a question"), fields_of(arguments, "arguments"), self, session)

    def _ask_ahead(self, session: _Session, envelope: Envelope, key: Any, question: Any, arguments: Any) -> None:
        """Answer a question that the driver can ask again: an error leaves the answer out, and the compute goes on."""
        with suppress(Exception):
            self._ask(session, envelope, key, question, arguments)

    # -- questions ------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """The properties of each backend that a RemoteBackend needs."""
        return [{"name": b.name, "alignment": b.alignment, "max_buffer_size": b.max_buffer_size,
                 "kv_padding": b.kv_padding, "has_memory": b.has_memory, "bounded": self.available(k) is not None,
                 "host": bool(b.is_host), "machine": machine(),
                 "sizes": overrides(b, "alloc_size"), "work": overrides(b, "work_size"),
                 "fuses": overrides(b, "fusion_groups"), "offloads": overrides(b, "offload_op"),
                 "inplace": {op: sources for op in op_names() if (sources := b.inplace_sources(op))}}
                for k, b in enumerate(self.backends)]

    def _hello(self, session: _Session) -> list[dict[str, Any]]:
        return self.describe()

    def _file(self, session: _Session, values: Any, path: Any, start: Any, digest: Any) -> bool:
        """Fill a tensor from a GGUF file of this machine; False if the file has no tensor of that size and with this
        digest at byte `start`."""
        t = self._tensor(session, values)
        path, start = text(path, "a path", 1 << 12), natural(start, "an offset")
        data = self.files.read(path, start, t.nbytes, text(digest, "a digest"))
        if data is not None:
            self._set(t, data, 0)
        return data is not None

    def _memory(self, session: _Session, device: Any) -> int | None:
        return self.available(self._backend(device)[0])

    def _system_memory(self, session: _Session, device: Any) -> int | None:
        return host_memory() if self._backend(device)[1].is_host else None

    def _work_held(self, session: _Session, device: Any) -> int:
        return self._backend(device)[1].work_held

    @staticmethod
    def _nodes(session: _Session, values: Any, nodes: Any, ctx: Context) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of `values`, and those of them at the positions `nodes`."""
        made = tensors_of(values, session.buffers, ctx)
        return made, [made[natural(k, "a node", len(made))] for k in fields_of(nodes, "nodes")]

    def _node(self, session: _Session, values: Any, ctx: Context) -> Tensor:
        made = tensors_of(values, session.buffers, ctx)
        if not made:
            raise MessageError("no tensor")
        return made[-1]

    def _kinds(self, session: _Session, device: Any, nodes: Any) -> list[list[Any]]:
        """For each node: [whether the backend supports it, whether it offers to compute it with weights of the host,
        its size]; the first two are False for a leaf."""
        _, backend = self._backend(device)
        found = []
        for values in fields_of(nodes, "nodes"):
            ctx = Context("question")
            node = self._node(session, values, ctx)
            found.append([node.computes and bool(backend.supports_op(node)),
                          node.computes and bool(backend.offload_op(node)), int(backend.alloc_size(node))])
        return found

    def _work(self, session: _Session, device: Any, values: Any, nodes: Any) -> int:
        ctx = Context("question")
        return int(self._backend(device)[1].work_size(self._nodes(session, values, nodes, ctx)[1]))

    def _fusions(self, session: _Session, device: Any, values: Any, nodes: Any) -> list[list[int]]:
        ctx = Context("question")
        made, chosen = self._nodes(session, values, nodes, ctx)
        inside = set(chosen)
        graph = Graph.from_order(made, chosen, [t for t in made if t not in inside and not t.src], {})
        return [[int(k) for k in group] for group in self._backend(device)[1].fusion_groups(graph)]


def _called(functions: dict[str, Callable[..., Any]], what: str, name: str, arguments: list[Any], *first: Any) -> Any:
    """Call the function that `functions` has under a name; MessageError if it has none, or one that takes another
    number of arguments."""
    function = functions.get(name)
    if function is None:
        raise MessageError(f"{name!r} is no {what}")
    if function.__code__.co_argcount != len(first) + len(arguments):
        raise MessageError(f"{what} {name!r} with {len(arguments)} arguments")
    return function(*first, *arguments)


def _groups(groups: Any, needed: Any, n: int) -> tuple[list[tuple[int, ...]], frozenset[int] | None]:
    found = []
    for group in fields_of(groups, "groups"):
        members = tuple(natural(k, "a member of a group", n) for k in fields_of(group, "a group"))
        if len(members) < 2 or any(a >= b for a, b in zip(members, members[1:], strict=False)):
            raise MessageError(f"a fusion group {group!r} is not ascending")
        found.append(members)
    if needed is None:
        return found, None
    return found, frozenset(natural(k, "a needed node", n) for k in fields_of(needed, "needed nodes"))


COMMANDS: dict[str, Callable[..., None]] = {
    "alloc": Worker._alloc, "free": Worker._free_command, "usage": Worker._usage, "init": Worker._init,
    "write": Worker._write, "read": Worker._read, "clear": Worker._clear, "copy": Worker._copy,
    "split": Worker._split, "drop": Worker._drop_command, "run": Worker._run, "ask": Worker._ask,
    "ask ahead": Worker._ask_ahead,
}
ALWAYS = (*FREES, "usage")
"""Commands that are executed after a failure, too."""
QUESTIONS: dict[str, Callable[..., Any]] = {
    "hello": Worker._hello, "memory": Worker._memory, "system memory": Worker._system_memory,
    "work held": Worker._work_held, "kinds": Worker._kinds, "work": Worker._work, "fusions": Worker._fusions,
    "file": Worker._file,
}
