"""Recorded backends: the backends of an unpickled plan, and of a plan of llama.cpp's.

The real backends may not exist where a plan is unpickled, and those of llama.cpp are no `Backend`s.  Recorded ones have
no memory, and answer support queries as the real ones did, so that the plan can be read, printed, explained and
verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from ggml_sched._graph import BufferBase, Graph, Tensor, bind_resident
from ggml_sched.backend import Buffer
from ggml_sched.backends.dry import DryBackend

__all__ = ["BackendDescription", "PlanFile", "RecordedBackend", "recorded_backends"]


class BackendDescription(TypedDict):
    """The description of a backend in a plan file."""

    name: str
    alignment: int
    max_buffer_size: int | None
    concurrent_copies: bool
    inplace: dict[str, int]
    """{op: `Backend.inplace_sources(op)`}."""
    reads: list[int]
    """Indices of the backends whose memory this one reads without a copy."""
    margin: NotRequired[int]
    """For a store, the bytes that a fetched copy takes beyond those of its weight; other backends have no such key."""


class PlanFile(TypedDict):
    """The content of a plan file; planfile.py says what a reader checks."""

    format: str
    version: int
    policy: str
    graph: str
    """The fingerprint of the graph, in hexadecimal digits."""
    order: list[int] | None
    """The plan's order of execution, as positions of nodes in the graph; None: the graph's own."""
    backends: list[BackendDescription]
    needs: list[list[int]]
    """For each id: 1 if its backend supports it, else 0; the bytes that the backend allocates for it."""
    residents: dict[str, list[Any]]
    """{id: [usage of its buffer, indices of the backends that can read it]}; of a weight whose experts are in slots
    also [index of the store, number of the bank]."""
    owners: NotRequired[dict[str, int]]
    """{id of a resident: index of the backend that owns its buffer, -1 for one outside the plan}.  Files of earlier
    releases do not have it: the first backend that can read a buffer is taken for its owner."""
    plan: dict[str, Any]
    """`plan_values` of the plan's data."""
    program: dict[str, Any]
    assigned_by: str | None
    refused: NotRequired[list[dict[int, str | None]]]
    """Not in files: for each backend, {id of a node that it does not support: what it refuses in it, None if that is
    not known}.  Without it only the refusals of `needs` are known."""
    work_sizes: NotRequired[list[int]]
    """Not in files, as the next three: `Plan.work_sizes`."""
    host_work_sizes: NotRequired[list[int]]
    workers: NotRequired[list[str | None]]
    """For each backend `Backend.worker`."""
    outside: NotRequired[dict[str, str]]
    """{id of a resident with owner -1: the name of the owner}."""


class _RecordedBuffer(Buffer):
    """A buffer without memory for a resident; `readers` are the indices of the backends that can read it."""

    def __init__(self, backend: DryBackend, size: int, usage: str, readers: tuple[int, ...]) -> None:
        super().__init__(backend, size, usage=usage)
        self.readers = readers


class _RecordedBank(NamedTuple):
    """A bank of experts: its store and its number."""

    store: RecordedBackend
    number: int


class RecordedBackend(DryBackend):
    """Backend number `index` of a plan file, with the answers that the file records.

    The answers hold for the tensors of the file's graph and for copies of them; other tensors are supported.  Work
    memory is that of the file's plan, whatever the nodes.
    `refused`: {node that it does not support: what it refuses in it, None if that is not known}.
    """

    def __init__(self, index: int, description: BackendDescription) -> None:
        super().__init__(description["name"], description["alignment"], description["max_buffer_size"])
        self.index = index
        self.concurrent_copies: bool = description["concurrent_copies"]
        self._inplace, self._reads = description["inplace"], description["reads"]
        self.is_store: bool = "margin" in description
        self.margin: int = description.get("margin", 0)
        self.refused: dict[Tensor, str | None] = {}
        self.sizes: dict[Tensor, int] = {}
        self.groups: list[tuple[int, ...]] = []
        self.fingerprint: int | None = None
        self.recorded_work: int = 0
        self.recorded_host_work: int = 0

    def supports_op(self, node: Tensor) -> bool:
        return node not in self.refused

    def supports_buffer(self, buffer: BufferBase) -> bool:
        if isinstance(buffer, _RecordedBuffer):
            return self.index in buffer.readers
        return getattr(buffer.backend, "index", None) in self._reads

    def inplace_sources(self, op: str) -> int:
        return self._inplace.get(op, 0)

    def alloc_size(self, tensor: Tensor) -> int:
        return self.sizes.get(tensor, tensor.nbytes)

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        return self.recorded_work

    def host_work(self, nodes: Sequence[Tensor]) -> int:
        return self.recorded_host_work

    def fusion_groups(self, graph: Graph) -> list[tuple[int, ...]]:
        return self.groups if graph.fingerprint == self.fingerprint else []


def recorded_backends(described: PlanFile, graph: Graph) -> tuple[RecordedBackend, ...]:
    """Makes the backends of a plan file (planfile.py), and gives the graph's residents addresses on them."""
    backends = tuple(RecordedBackend(k, fields) for k, fields in enumerate(described["backends"]))
    plan = described["plan"]
    copied = [row[0] for row in plan["copies"]]
    like = [*range(plan["n_tensors"]), *copied, *(copied[c] for c in plan["places"])]
    for i, (supported, size) in enumerate(described["needs"]):
        t = graph.tensors[like[i]]
        if not supported:
            backends[plan["assign"][i]].refused[t] = None
        if size:
            backends[plan["home"][i]].sizes[t] = size
    for backend, refused in zip(backends, described.get("refused", ()), strict=False):
        backend.refused.update((graph.tensors[i], why) for i, why in refused.items())
    for backend, worker, work, host_work in zip(backends, described.get("workers", ()), described.get("work_sizes", ()),
                                                described.get("host_work_sizes", ()), strict=False):
        backend.worker, backend.recorded_work, backend.recorded_host_work = worker, work, host_work
    for group in plan.get("groups", ()):
        backend = backends[plan["assign"][graph.id_of(graph.nodes[group[0]])]]
        backend.groups.append(tuple(group))
        backend.fingerprint = graph.fingerprint
    banks: dict[tuple[int, int], _RecordedBank] = {}
    owners, names = described.get("owners", {}), described.get("outside", {})
    outside = {name: DryBackend(name) for name in names.values()}
    for key, (usage, readers, *bank) in described["residents"].items():
        t, owner = graph.tensors[int(key)], owners[key] if key in owners else readers[0]
        home = backends[owner] if owner >= 0 else outside[names[key]]
        buffer = _RecordedBuffer(home, t.nbytes, usage, tuple(readers))
        for store, number in bank:
            buffer.experts = banks.setdefault((store, number), _RecordedBank(backends[store], number))
        bind_resident(t, buffer, 0)
    return backends
