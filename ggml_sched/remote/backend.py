"""RemoteBackend: a backend of a worker, which may be in another process or on another machine.

Calls only queue commands (session.py).  They are sent when the host waits for a result, or when they fill a message.  A
split is registered once; a compute sends its inputs and gets its outputs.  Copies between remote backends of one
session do not pass through the driver.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from statistics import median
from typing import Any, NamedTuple, cast

from ggml_sched._graph import Graph, Tensor, label
from ggml_sched.backend import Backend, Buffer, Event, GraphView, dense_bytes, note_nodes, wait_since
from ggml_sched.errors import BackendLost, OutOfMemory, PlacementError
from ggml_sched.planning.envelopes import FETCHED, PIECE
from ggml_sched.remote.answers import ask_ahead, asked
from ggml_sched.remote.files import SMALLEST, digest_of
from ggml_sched.remote.session import COMPUTED, NOTHING, Doing, Out, Session, Take
from ggml_sched.remote.tensors import bytes_at, described, values_of

__all__ = ["RemoteBackend", "RemoteBuffer", "RemoteEvent", "RemoteWorker"]


class RemoteWorker(NamedTuple):
    """A worker that a session uses, by the name that the transport has for it; `facts` are what it says of each of its
    backends (`Worker.describe`)."""

    session: Session
    name: str
    facts: Sequence[dict[str, Any]]


class RemoteBuffer(Buffer):
    """Memory of a worker; `number` names it there."""

    number: int = -1
    _usage_there = "any"
    _garbage: weakref.finalize[Any, Any] | None = None

    def write(self, offset: int, data: memoryview) -> None:
        backend = cast("RemoteBackend", self.backend)
        failures = backend.failed[0]
        backend.put_bytes(self._bytes(), offset, data)
        wait_since(backend, failures)

    def read(self, offset: int, out: memoryview) -> None:
        backend = cast("RemoteBackend", self.backend)
        failures = backend.failed[0]
        backend.take_bytes(self._bytes(), offset, out)
        wait_since(backend, failures)

    def clear(self, value: int = 0) -> None:
        backend = cast("RemoteBackend", self.backend)
        failures = backend.failed[0]
        backend.put("clear", self.number, self.checked_byte(value))
        wait_since(backend, failures)

    def init_tensor(self, tensor: Tensor) -> None:
        backend = cast("RemoteBackend", self.backend)
        if self.usage != self._usage_there:
            backend.put("usage", self.number, self.usage)
            self._usage_there = self.usage
        backend.put("init", values_of(tensor, self.number))

    def free(self) -> None:
        cast("RemoteBackend", self.backend).freed("free", self.number)
        if self._garbage is not None:
            self._garbage.detach()

    def _bytes(self) -> dict[str, Any]:
        """The whole buffer as a tensor of bytes."""
        return bytes_at(self.number, 0, self.size)


def _number(tensor: Tensor) -> int:
    """The number of a tensor's buffer on its worker."""
    return cast("RemoteBuffer", tensor.buffer).number


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """The bytes [start, end) of each message that carries a part of `size` bytes."""
    return ((start, min(start + PIECE, size)) for start in range(0, max(size, 1), PIECE))


ROUND_TRIPS = 7
"""How many questions are timed; the median is the time of a round trip."""


class RemoteEvent(Event):
    """An event that passes when the first `position` envelopes of the session are answered."""

    position: int = 0


@dataclass(slots=True, weakref_slot=True, eq=False)
class RemoteSplit:
    """A split of a worker, under a number.

    `values`: its nodes and fusion groups, which the worker gets once, before it first computes the split; `registered`:
    the epoch of the session in which they were sent, None if they were not.  After a failure, which begins an epoch,
    they are sent again.  `outputs`: (buffer, offset, size, values) of results that the caller will read.
    """

    number: int
    label: str
    values: tuple[Any, ...]
    outputs: tuple[tuple[int, int, int, dict[str, Any]], ...]
    registered: int | None = None
    garbage: weakref.finalize[Any, Any] | None = None


class _Fetched(NamedTuple):
    """An output that comes back with its compute: bytes [offset, offset + size) of a buffer."""

    buffer: int
    offset: int
    size: int
    out: Out
    position: int


class RemoteBackend(Backend):
    """Backend number `device` of a worker of a cluster: `RemoteBackend(cluster.workers[0])`.

    `cluster.backends` has one of each.  `name` defaults to the worker's name and the backend's.  Several RemoteBackends
    of one device share its memory and its bound.  Methods raise BackendLost once the worker is lost, and errors of the
    worker's backend as they are, with a note that names the worker.
    """

    asynchronous = True
    concurrent_copies = True
    takes_at_once = True

    def __init__(self, worker: RemoteWorker, device: int = 0, name: str | None = None) -> None:
        if not 0 <= index(device) < len(worker.facts):
            raise ValueError(f"worker {worker.name!r} has {len(worker.facts)} backends, and none with number {device}")
        facts = worker.facts[device]
        super().__init__(f"{worker.name}:{facts['name']}" if name is None else name, facts["alignment"])
        self.session: Session = worker.session
        self.worker: str = worker.name
        self.device = device
        self.facts: dict[str, Any] = facts
        self.max_buffer_size: int | None = facts["max_buffer_size"]
        self.kv_padding: int = facts["kv_padding"]
        self.has_memory: bool = facts["has_memory"]
        self._answered: weakref.WeakKeyDictionary[Tensor, list[Any]] = weakref.WeakKeyDictionary()
        """Answers of the worker's backend about the nodes that `expect_queries` and `expect_graph` announced."""
        self._groups: weakref.WeakKeyDictionary[Graph, list[tuple[int, ...]]] = weakref.WeakKeyDictionary()
        """Fusion groups of the graphs that `expect_graph` announced."""
        self._known_values: weakref.WeakKeyDictionary[Tensor, dict[str, Any]] = weakref.WeakKeyDictionary()
        """{tensor that was read or written: its form in messages}."""
        self._fetched: list[_Fetched] = []
        """Outputs of the splits that were computed last; empty once anything else is queued on this backend."""
        if [there["name"] for there in worker.facts].count(facts["name"]) == 1:
            self.session.names.setdefault((self.worker, facts["name"]), self.name)
        self.session.on_failure(self.note_failure)

    # -- commands --------------------------------------------------------------------------------------

    def put(self, *command: Any, doing: Doing = NOTHING) -> None:
        """Queue a command for the worker."""
        self._fetched = []
        self.session.put(self.worker, [*command], doing=doing)

    def put_bytes(self, values: dict[str, Any], offset: int, data: Any, doing: Doing = NOTHING) -> None:
        self._fetched = []
        offset = index(offset)
        for start, end in _pieces(len(data)):
            key = self.session.new_key()
            self.session.put(self.worker, ["write", values, offset + start, key], block=(key, bytes(data[start:end])),
                             doing=doing)

    def take_bytes(self, values: dict[str, Any], offset: int, out: memoryview) -> None:
        offset = index(offset)
        for start, end in _pieces(len(out)):
            key = self.session.new_key()
            self.session.put(self.worker, ["read", values, offset + start, end - start, key],
                             out=(key, Out(out[start:end])))
            if len(out) > PIECE:
                self.session.flush()    # an answer for each piece

    def ask(self, question: str, *arguments: Any, doing: Doing = NOTHING) -> Any:
        """The worker's answer to a question; waits for it.  MessageError for an answer of a wrong shape."""
        return asked(self.session, self.worker, question, arguments, doing)

    def freed(self, command: str, number: int) -> None:
        """Queue the command by which the worker frees a closed buffer ("free"), or a split that is not needed any more
        ("drop")."""
        if self._is_connected:
            self.put(command, number)

    def _when_garbage(self, thing: object, command: str, number: int) -> weakref.finalize[Any, Any]:
        """Once `thing` is garbage, let the next message free what the worker holds for it: the command, with this
        number."""
        found = weakref.finalize(thing, self.session.released.append, (self.worker, [command, number]))
        found.atexit = False
        return found

    @property
    def _is_connected(self) -> bool:
        """Whether the worker still takes commands."""
        return not self.session.closed and self.worker not in self.session.lost and self.session.is_here

    def _place(self, buffer: Buffer) -> int | None:
        if isinstance(buffer, RemoteBuffer) and buffer.backend is self and not buffer.closed:
            return buffer.number
        return None

    def _values(self, tensor: Tensor) -> dict[str, Any]:
        """A tensor as values of a message.  A tensor whose elements overlap has no form in messages, so its bytes are
        given as a tensor."""
        number, offset = _number(tensor), tensor.offset
        known = self._known_values.get(tensor)
        if known is not None and known["at"] == [number, offset]:
            return known
        try:
            values = values_of(tensor, number)
        except PlacementError:
            values = bytes_at(number, offset, tensor.nbytes)
        self._known_values[tensor] = values
        return values

    # -- memory ----------------------------------------------------------------------------------------

    def alloc_buffer(self, size: int) -> RemoteBuffer:
        number, size = self.session.new_key(), index(size)
        try:
            self.session.call(self.worker, ["alloc", number, self.device, size, "any"])
            buffer = RemoteBuffer(self, size)
            buffer.number = number
            buffer._garbage = self._when_garbage(buffer, "free", number)
        except BaseException as error:
            self._give_up("free", number)
            if isinstance(error, OutOfMemory):
                error.backend = self.name       # the worker has another name for it
            raise
        return buffer

    def _give_up(self, command: str, number: int) -> None:
        """Free what the worker may have made for a call that did not return, because another worker was lost or by an
        interrupt."""
        self.session.released.append((self.worker, [command, number]))

    def memory_available(self) -> int | None:
        return cast("int | None", self.ask("memory", self.device)) if self.facts["bounded"] else None

    def system_memory(self) -> int | None:
        """The free memory of the worker's machine in bytes, divided equally among the machine's backends that have no
        bound of their own; None for a backend that is not in the machine's own memory."""
        left = self.ask("system memory", self.device) if self.facts["host"] else None
        return None if left is None else int(left) // max(self.session.sharers[self.facts["machine"]], 1)

    def link_to(self, name: str) -> tuple[float, float] | None:
        return self.session.links.get((self.name, name))

    def link_from(self, name: str) -> tuple[float, float] | None:
        return self.session.links.get((name, self.name))

    def alloc_size(self, tensor: Tensor) -> int:
        found = self._answers(tensor) if self.facts["sizes"] else None
        return super().alloc_size(tensor) if found is None else int(found[2])

    @property
    def work_held(self) -> int:     # type: ignore[override]  # only the worker changes it
        return int(self.ask("work held", self.device)) if self.facts["work"] and self._is_connected else 0

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        if not self.facts["work"]:
            return 0
        return int(self.ask("work", self.device, *self._described(nodes)))

    def round_trip(self) -> float:
        now = self.session.transport.now
        taken = []
        for _ in range(ROUND_TRIPS):
            start = now()
            self.ask("memory", self.device)
            taken.append(now() - start)
        return median(taken)

    # -- support ---------------------------------------------------------------------------------------

    def _described(self, nodes: Iterable[Tensor]) -> tuple[list[dict[str, Any]], list[int]]:
        return described(nodes, self._place)

    def expect_queries(self, nodes: Sequence[Tensor]) -> None:
        queried = self._unanswered(nodes)
        if queried:
            self._answered.update(zip(queried, self.ask("kinds", self.device, [*queried.values()]), strict=True))

    def expect_graph(self, graph: Graph, nodes: Sequence[Tensor]) -> None:
        queried = self._unanswered(nodes)
        if queried:
            self._ask_ahead("kinds", [[*queried.values()]],
                            lambda answers: self._answered.update(zip(queried, answers, strict=True)))
        if self.facts["fuses"] and graph not in self._groups:
            with suppress(PlacementError):
                self._ask_ahead("fusions", self._described(graph.nodes), partial(self._keep_groups, weakref.ref(graph)))

    def _ask_ahead(self, question: str, arguments: Sequence[Any], take: Take) -> None:
        """Send a question about the device with the next commands, and call `take` with the answer."""
        ask_ahead(self.session, self.worker, question, [self.device, *arguments], take)

    def _keep_groups(self, graph: weakref.ref[Graph], groups: Sequence[Sequence[int]]) -> None:
        known = graph()
        if known is not None:
            self._groups[known] = [tuple(group) for group in groups]

    def _unanswered(self, nodes: Iterable[Tensor]) -> dict[Tensor, list[dict[str, Any]]]:
        """The nodes that need an answer of the worker and have none, with their forms in messages.  Nodes that have no
        such form are left out (see layout_values)."""
        queried = {}
        for node in nodes:
            if node not in self._answered and (node.computes or self.facts["sizes"]):
                with suppress(PlacementError):
                    queried[node] = described((node,), lambda buffer: None)[0]
        return queried

    def _answers(self, node: Tensor) -> list[Any] | None:
        """[whether the worker's backend supports a node, whether it offers to compute it with weights of the host, the
        node's size]; None for a node whose layout has no form in messages (see layout_values)."""
        found = self._answered.get(node)
        if found is None:
            self.expect_queries((node,))
            found = self._answered.get(node)
        return found

    def supports_op(self, node: Tensor) -> bool:
        found = self._answers(node)
        return found is not None and bool(found[0])

    def offload_op(self, node: Tensor) -> bool:
        if not self.facts["offloads"]:
            return super().offload_op(node)
        found = self._answers(node)
        return found is not None and bool(found[1])

    def inplace_sources(self, op: str) -> int:
        return int(self.facts["inplace"].get(op, 0))

    def fusion_groups(self, graph: Graph) -> list[tuple[int, ...]]:
        if not self.facts["fuses"]:
            return []
        if graph in self._groups:
            return self._groups[graph]
        try:
            values, nodes = self._described(graph.nodes)
        except PlacementError:
            return []
        return [tuple(group) for group in self.ask("fusions", self.device, values, nodes)]

    # -- data ------------------------------------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self.put_bytes(self._values(tensor), offset, data, ("was sent", label(tensor)))

    def load_from_file(self, tensor: Tensor, path: str, start: int, data: Any) -> bool:
        """Let the worker fill a tensor from its own copy of a GGUF file, in which the tensor begins at byte `start`.

        False if the worker has no file at `path` with the bytes `data` there, and for `data` smaller than SMALLEST,
        which no worker looks for.
        """
        self._fetched = []
        return len(data) >= SMALLEST and bool(
            self.ask("file", self._values(tensor), os.path.abspath(path), start, digest_of(data),
                     doing=("read", label(tensor))))

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        start = tensor.offset + offset
        for found in self._fetched:
            if found.buffer == _number(tensor) and found.offset <= start and \
                    start + len(out) <= found.offset + found.size:
                self.session.wait(found.position)
                if found.out.done:
                    out[:] = found.out.view[start - found.offset :][: len(out)]
                    return
        self.take_bytes(self._values(tensor), offset, out)

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        return self._copied(src, dst)

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        return self._copied(src, dst)

    def _copied(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy between two remote backends of one session, or to memory of this process; False for other
        backends, and for a tensor with gaps between its elements on another worker."""
        there, here = src.backend, dst.backend
        if there is self and not isinstance(here, RemoteBackend):
            return self._copied_here(src, dst)
        if not (isinstance(there, RemoteBackend) and isinstance(here, RemoteBackend)):
            return False
        if there.session is not here.session:
            return False
        if there.worker == here.worker:
            here.put("copy", there._values(src), here._values(dst), doing=(COMPUTED, f"a copy of {label(src)}"))
            return True
        if src.nbytes != dense_bytes(src):
            return False
        here._fetched = []
        for start, end in _pieces(src.nbytes):
            key = self.session.new_key()
            with self.session.lock:     # both commands are in one envelope
                self.session.put(there.worker, ["read", there._values(src), start, end - start, key], gives=key)
                self.session.put(here.worker, ["write", here._values(dst), start, key], needs=key)
                if src.nbytes > PIECE:
                    self.session.flush()
        return True

    def _copied_here(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy to memory of this process: the bytes come in the answer to the envelope that has the command.
        False if `dst` is not in the host's memory, or `src` has gaps between its elements."""
        memory = getattr(dst.buffer, "memory", None) if dst.backend.is_host else None
        if memory is None or src.nbytes != dense_bytes(src):
            return False
        self.take_bytes(self._values(src), 0, memoryview(memory)[dst.offset : dst.offset + dst.nbytes])
        return True

    def flush(self) -> None:
        self.session.flush()

    def synchronize(self) -> None:
        if self.session.closed or not self.session.is_here:
            return
        self.session.wait()
        error = self.session.take_error()
        if error is not None:
            raise error

    # -- events ----------------------------------------------------------------------------------------

    def event_new(self) -> RemoteEvent:
        return RemoteEvent(self)

    def event_record(self, event: Event) -> None:
        cast("RemoteEvent", event).position = self.session.position()

    def event_wait(self, event: Event) -> None:
        # On the worker of this backend commands are executed in the order in which they are queued; data of another
        # worker comes in the envelope that the other worker has sent on.
        if not (isinstance(event, RemoteEvent) and cast("RemoteBackend", event.backend).session is self.session):
            super().event_wait(event)

    def event_synchronize(self, event: Event) -> None:
        self.session.wait(cast("RemoteEvent", event).position)

    # -- computing -------------------------------------------------------------------------------------

    def graph_plan_create(self, graph: Graph | GraphView) -> RemoteSplit:
        nodes = [node for node in graph.nodes if node.computes]
        groups, needed = getattr(graph, "groups", ()), None
        if groups:
            positions = {k: n for n, k in enumerate(k for k, node in enumerate(graph.nodes) if node.computes)}
            groups = [[positions[k] for k in group] for group in groups]
            needed = sorted(positions[k] for k in cast("GraphView", graph).needed if k in positions)
        said = " .. ".join(dict.fromkeys(label(node) for node in (*nodes[:1], *nodes[-1:])))
        try:
            values, chosen = self._described(nodes)
        except PlacementError as error:
            note_nodes(error, self, nodes)
            raise
        outputs = tuple((_number(node), node.offset, node.nbytes, self._values(node)) for node in nodes
                        if "output" in node.flags and node.nbytes <= FETCHED)
        return RemoteSplit(self.session.new_key(), said, (self.device, values, chosen, groups, needed), outputs)

    def graph_plan_free(self, plan: Any) -> None:
        if plan.garbage is not None:
            self.freed("drop", plan.number)
            plan.garbage.detach()

    def graph_plan_compute(self, plan: Any) -> None:
        epoch = self.session.epoch
        if plan.registered != epoch:
            if plan.garbage is None:
                plan.garbage = self._when_garbage(plan, "drop", plan.number)
            self.put("split", plan.number, *plan.values, doing=(COMPUTED, plan.label))
            plan.registered = epoch
        self.put("run", plan.number, doing=(COMPUTED, plan.label))
        for buffer, offset, size, values in plan.outputs:
            out, key = Out(memoryview(bytearray(size))), self.session.new_key()
            self.session.put(self.worker, ["read", values, 0, size, key], out=(key, out))
            self._fetched.append(_Fetched(buffer, offset, size, out, self.session.position()))

    def graph_compute(self, graph: Graph | GraphView) -> None:
        if any(node.computes for node in graph.nodes):
            split = self.graph_plan_create(graph)
            self.graph_plan_compute(split)
            self.graph_plan_free(split)

    @property
    def lost(self) -> BackendLost | None:       # type: ignore[override]  # the session knows
        """Why the worker is lost; None while it is not."""
        return self.session.lost.get(self.worker)
