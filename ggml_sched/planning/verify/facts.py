"""Facts: the content of a plan as plain values, and the sequence of actions of its program.

`Facts` is gathered once from a graph, plan data and backends.  The checks are functions of it, so that a test can
change one value and expect one reason code.  No code here depends on how the plan was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ggml_sched._core import PlanData
from ggml_sched._graph import BackendBase, BufferBase, Graph, Tensor, Type, measure_buffer
from ggml_sched.planning.program import Program, Read, Run, Transfer, bank_of
from ggml_sched.threads.cached import cached_property

__all__ = ["Act", "Facts", "PlainSplit", "acts", "holder", "location_id", "readable"]

VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Ops that compute nothing.  Listed here again, so that the checks do not depend on the planner's tables of ops."""


Layout: TypeAlias = tuple[Type, tuple[int, ...], tuple[int, ...]]
"""(type, ne, nb) of a tensor."""
Area: TypeAlias = tuple[int, int] | tuple[str, int]
"""A memory: (backend, chunk) for a buffer of that backend's arena, or ("resident", id) for the memory of a resident."""


# -- the content of a plan ---------------------------------------------------------------------------


class PlainSplit(NamedTuple):
    """One split of a plan."""

    backend: int
    start: int
    """Position in `Facts.nodes`, like `stop`."""
    stop: int
    inputs: tuple[int, ...]
    """Indices of the copies that are made before the nodes run, in order; one that is listed twice is made once."""


@dataclass(frozen=True)
class Facts:
    """A graph, its backends and a plan as plain values.

    Lists are indexed by id: 0 .. n_tensors-1 are `graph.tensors`, n_tensors + c is copy c.  Sizes, offsets: bytes.
    """

    # The backends.
    backends: tuple[str, ...]
    alignment: tuple[int, ...]
    arena_readers: tuple[frozenset[int], ...]
    """For each backend the backends that access its arena without a copy, itself included."""

    # The graph.
    n_tensors: int
    name: list[str]
    op: list[str]
    layout: list[Layout]
    """A copy has the layout of its source."""
    nbytes: list[int]
    is_output: list[bool]
    view_of: list[int]
    """The root of a view in the graph; -1 for other tensors."""
    view_offs: list[int]
    src: list[tuple[int, ...]]
    """The ids of a node's sources, by slot; -1 where a slot is empty."""
    nodes: list[int]
    resident: list[frozenset[int] | None]
    """The backends that can read a resident; None for a tensor that is no resident."""

    # The answers of the backends about the plan's choices.
    supported: list[bool]
    tolerates: list[int]
    """Bit k is set if the kernel of this node may write its result over the source in slot k."""
    need: list[int]
    """The bytes that an id needs in its arena: what the backend allocates for it, plus, for a fetched copy, the margin
    of its store; 0 for views and for ids in no arena."""

    # The plan.
    splits: list[PlainSplit]
    copies: list[tuple[int, int]]
    """(graph tensor that is copied, backend that it is copied to)."""
    write_backs: dict[int, int]
    """{node that computes into a copy: index of that copy}; it is then written back to the node's own memory."""
    sequence: list[int]
    """Ids of copies and nodes, in the order in which a compute makes the copies and computes the nodes."""
    assigned: list[int]
    """The backend that computes a node, or holds a leaf or a copy; -1 for a tensor that is not used."""
    arena_of: list[int]
    """The backend in whose arena an id is; -1 for an id that is in no arena."""
    chunk: list[int]
    """The index of the buffer, in the arena of backend `arena_of`, that holds an id."""
    offset: list[int]
    size: list[int]
    shares: list[int]
    """The id whose memory an id shares, as a view or by in-place reuse; -1 for an id that shares no other's."""
    is_inplace: list[bool]
    reads: list[tuple[int, ...]]
    """As `src`, with the id of the copy in place of each source that was copied."""
    arena_sizes: dict[tuple[int, int], int]
    """{(backend, chunk): bytes}."""
    live_bytes: tuple[int, ...]
    program: Program
    """The steps of a compute.  Their ids index the lists above: graph tensors, copies, further slots of copies."""
    deps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """{node: its alloc dependencies}."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Fusion groups, each as the positions of its members in `nodes`.  A backend computes all members at the position
    of the last, or each at its own, such as for an observer."""
    inner: frozenset[int] = frozenset()
    """Ids of members of fusion groups; the plan declares that their results are not written to memory."""
    overwritten: frozenset[int] = frozenset()
    """Tensors that the plan declares overwritten at the end of a compute; reading them is refused."""
    stores: frozenset[int] = frozenset()
    """The backends that are stores: they fetch their weights into copies."""
    banks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """{weight whose experts are in slots: (its store, the number of its bank)}."""

    @staticmethod
    def of(graph: Graph, data: PlanData, backends: tuple[BackendBase, ...], program: Program) -> Facts:
        """Gather the facts of a plan."""
        tensors, n = graph.tensors, data.n_tensors
        ids = {t: i for i, t in enumerate(tensors)}
        copies = [*data.copies, *(data.copies[c] for c in data.slot_copies)]
        like = [*tensors, *(tensors[i] for i, _ in copies)]
        every = range(len(like))
        src = [tuple(-1 if s is None else ids[s] for s in t.src) for t in tensors] + [()] * len(copies)
        nodes = [ids[t] for t in graph.nodes]
        assigned = [data.backend_index(i) for i in every]
        arena_of = [data.memory_index(i) for i in every]
        residents = _residents(tensors, backends)
        stores = frozenset(k for k, b in enumerate(backends) if getattr(b, "is_store", False))
        margins = {n + c: getattr(backends[k], "margin", 0) for c, (i, _) in enumerate(copies)
                   for k in stores & (residents[i] or frozenset())}
        supported, tolerates = [True] * n, [0] * n
        computed = [i for i in nodes if 0 <= assigned[i] < len(backends) and tensors[i].op not in VIEW_OPS]
        for b, backend in enumerate(backends):
            backend.expect_queries([tensors[i] for i in computed if assigned[i] == b])
        for i in computed:
            supported[i] = bool(backends[assigned[i]].supports_op(tensors[i]))
            tolerates[i] = backends[assigned[i]].inplace_sources(tensors[i].op)
        return Facts(
            backends=tuple(b.name for b in backends),
            alignment=tuple(b.alignment for b in backends),
            arena_readers=tuple(_readers(backends, b, measure_buffer(b)) for b in backends),
            n_tensors=n,
            name=[t.name for t in tensors] + [f"{backends[b].name}#{tensors[i].name}" for i, b in copies],
            op=[t.op for t in tensors] + ["copy"] * len(copies),
            layout=[(t.type, t.ne, t.nb) for t in like],
            nbytes=[t.nbytes for t in like],
            is_output=["output" in graph.flags_of(t) for t in tensors] + [False] * len(copies),
            view_of=[-1 if t.view_src is None else ids[t.view_src] for t in tensors] + [-1] * len(copies),
            view_offs=[t.view_offs for t in tensors] + [0] * len(copies),
            src=src,
            nodes=nodes,
            resident=residents + [None] * len(copies),
            supported=supported,
            tolerates=tolerates,
            need=[backends[arena_of[i]].alloc_size(t) + margins.get(i, 0)
                  if arena_of[i] >= 0 and (i >= n or t.view_src is None) else 0 for i, t in enumerate(like)],
            splits=[PlainSplit(*split) for split in data.splits],
            copies=copies,
            write_backs=dict(data.write_backs),
            sequence=list(data.sequence),
            assigned=assigned,
            arena_of=arena_of,
            chunk=[data.chunk(i) for i in every],
            offset=[data.offset(i) for i in every],
            size=[data.size(i) for i in every],
            shares=[data.root(i) for i in every],
            is_inplace=[data.is_inplace(i) for i in every],
            reads=[_by_slot(src[i], data.sources(i)) for i in range(n)],
            arena_sizes={(b, chunk): size for b, sizes in enumerate(data.chunk_sizes)
                         for chunk, size in enumerate(sizes)},
            live_bytes=tuple(data.live_bytes),
            program=program,
            deps={ids[t]: tuple(ids[s] for s in kept) for t, kept in graph.deps.items()},
            groups=data.groups,
            inner=frozenset(i for i in range(n) if data.is_inner(i)),
            overwritten=frozenset(i for i in range(n) if data.is_overwritten(i)),
            stores=stores,
            banks={i: (backends.index(bank.store), bank.number) for i, t in enumerate(tensors)
                   if t.view_src is None and (bank := bank_of(t.buffer)) is not None},
        )

    def label(self, i: int) -> str:
        """The name of an id in messages."""
        return f"{self.name[i]!r} ({self.op[i]})" if self.name[i] else f"tensor {i} ({self.op[i]})"

    def computes(self, i: int) -> bool:
        """Whether a graph tensor is neither a leaf nor a view."""
        return self.op[i] not in VIEW_OPS

    def blind_slot(self, i: int) -> int:
        """The slot of the source that a node writes to and does not read; -1 for a node without such a source."""
        return {"CPY": 1, "SET_ROWS": 2}.get(self.op[i], -1)

    def memory(self, i: int) -> int:
        """The id whose memory graph tensor i has: a view's root, or i itself."""
        return i if self.view_of[i] < 0 else self.view_of[i]

    def is_resident(self, i: int) -> bool:
        return self.resident[i] is not None

    def is_fetched(self, i: int) -> bool:
        """Whether id i is a copy of a weight of a store."""
        return i >= self.n_tensors and bool(self.stores & (self.resident[self.copies[i - self.n_tensors][0]] or set()))

    def extent(self, i: int) -> int:
        """How many bytes an access to id i may touch, from its address on: of a fetched copy all of its memory, because
        a fetch also writes bytes beside the weight, whose place in that memory is known only when the plan is bound."""
        return max(self.need[i], self.nbytes[i]) if self.is_fetched(i) else self.nbytes[i]

    def padded(self, i: int) -> int:
        """The bytes of memory that id i takes in its arena: those that it needs, rounded up to the alignment."""
        alignment = self.alignment[self.arena_of[i]]
        return -(-self.need[i] // alignment) * alignment

    def address(self, i: int) -> tuple[Area, int]:
        """(memory, first byte in it): an arena, or the memory of a resident tensor."""
        if self.is_resident(i):
            return ("resident", self.memory(i)), self.view_offs[i]
        return (self.arena_of[i], self.chunk[i]), self.offset[i]

    @cached_property
    def position(self) -> dict[int, int]:
        """{node: its position in the graph's order}."""
        return {i: k for k, i in enumerate(self.nodes)}

    @cached_property
    def group_of(self) -> dict[int, int]:
        """{node: the number of its fusion group}."""
        return {self.nodes[k]: number for number, group in enumerate(self.groups) for k in group}

    def units(self, step: Run, late: bool) -> list[list[int]]:
        """The nodes that a Run computes, in order, each as a list of one node.

        `late`: the members of a fusion group are one list, at the position of the last, as if one kernel ran them.
        """
        found: list[list[int]] = []
        waiting: dict[int, list[int]] = {}
        for k in range(step.first, step.last + 1):
            i = self.nodes[k]
            if not self.computes(i):
                continue
            group = self.group_of.get(i) if late else None
            if group is None:
                found.append([i])
                continue
            members = waiting.setdefault(group, [])
            members.append(i)
            if k == self.groups[group][-1]:
                found.append(members)
        return found

    @property
    def kept(self) -> frozenset[int]:
        """Ids of leafs and copy slots whose data stays for later computes: while its source is unchanged, these neither
        load nor copy it again."""
        return frozenset(location.id for step in self.program.steps
                         if not isinstance(step, Run) and step.if_changed for location in step.locations)

    @property
    def slots(self) -> frozenset[int]:
        """Ids of the slots of copies with several slots, which a queued compute may fill while another runs."""
        return frozenset(location.id for step in self.program.steps
                         if not isinstance(step, Run) and len(step.locations) > 1 for location in step.locations)

    def read_by(self, step: Run, node: int, cur_copy: int) -> tuple[int, ...]:
        """The ids that `node` reads when `step` runs it, in the order of its sources; -1 where it has no source.

        `cur_copy`, which grows by 1 with each compute, selects the slot of each copy.
        """
        found = list(self.src[node])
        for read in self._reads.get((id(step), self.position[node]), ()):
            found[read.slot] = read.locations[cur_copy % len(read.locations)].id
        return tuple(found)

    @cached_property
    def _reads(self) -> dict[tuple[int, int], list[Read]]:
        """{(`id` of a Run object, position of a node): the reads of copies by that node}."""
        found: dict[tuple[int, int], list[Read]] = {}
        for step in self.program.steps:
            if isinstance(step, Run):
                for read in step.reads:
                    found.setdefault((id(step), read.position), []).append(read)
        return found

    def into(self, step: Run, node: int, cur_copy: int) -> int:
        """The id into whose memory `step` computes `node`: the node itself, or a copy that is written back."""
        if step.into and self.position[node] == step.last:
            return step.into[cur_copy % len(step.into)].id
        return node

    def readers(self, i: int) -> frozenset[int]:
        """The backends that access the memory of i without a copy."""
        readers = self.resident[i]
        return self.arena_readers[self.arena_of[i]] if readers is None else readers

    def backend(self, i: int) -> str:
        return self.backends[i] if 0 <= i < len(self.backends) else f"backend {i}"

    def where(self, i: int) -> str:
        """The range of bytes of an id and its backend, for messages."""
        return f"[{self.offset[i]}, {self.offset[i] + self.need[i]}) of {self.backend(self.arena_of[i])}"


def _readers(backends: tuple[BackendBase, ...], owner: BackendBase, buffer: BufferBase) -> frozenset[int]:
    return frozenset(k for k, b in enumerate(backends) if b is owner or b.supports_buffer(buffer))


def _residents(tensors: tuple[Tensor, ...], backends: tuple[BackendBase, ...]) -> list[frozenset[int] | None]:
    """For each tensor the backends that can read it, if it is a resident; else None."""
    known: dict[int, frozenset[int]] = {}
    found: list[frozenset[int] | None] = []
    for t in tensors:
        buffer, lease = t.buffer, t.lease
        if buffer is None or (lease is not None and lease.transient):
            found.append(None)
            continue
        if id(buffer) not in known:
            known[id(buffer)] = _readers(backends, buffer.backend, buffer)
        found.append(known[id(buffer)])
    return found


def _by_slot(src: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """`given`, the ids that a node reads by the plan, put in the order of `src`; -1 where `src` has -1 for no source,
    which `given` leaves out."""
    rest = iter(given)
    return tuple(-1 if s < 0 else next(rest, -1) for s in src)

# -- the actions of a compute --------------------------------------------------------------------------


class Act(NamedTuple):
    """One action of a compute; `time` is its number, from 0."""

    time: int
    step: int
    """The number of its step in the program."""
    kind: str
    """"load", "copy", "copy experts", "fetch", "fetch experts", "run" (one node), "write back"."""
    id: int
    """The id of what is written: a leaf, a copy, a further slot of a copy (with an id after those of all copies), a
    node, or the first weight of a bank of experts."""


def acts(facts: Facts, cur_copy: int = 0, late: bool = False) -> Iterator[Act]:
    """The actions of a compute in the order of the program: one for each node that a Run computes, and one for each
    other step.  `late`: the members of a fusion group follow each other, at the position of the last."""
    time = 0
    for k, step in enumerate(facts.program.steps):
        if isinstance(step, Run):
            for unit in facts.units(step, late):
                for i in unit:
                    yield Act(time, k, "run", i)
                    time += 1
            continue
        yield Act(time, k, step.kind, step.tensor if step.kind in ("write back", "fetch experts")
                  else location_id(step, cur_copy))
        time += 1


def location_id(step: Transfer, cur_copy: int) -> int:
    """The id of the copy slot (or leaf) that a step writes; of a write-back or a fetch of experts, of the one that it
    reads.  `cur_copy` selects the slot."""
    return step.locations[cur_copy % len(step.locations)].id


def readable(facts: Facts) -> list[int]:
    """Tensors that a caller may read after the compute: outputs, and nodes that no other node uses."""
    used = {s for i in facts.nodes for s in facts.src[i]}
    used.update(facts.view_of[i] for i in facts.nodes)
    used.update(s for deps in facts.deps.values() for s in deps)
    nodes = set(facts.nodes)
    return [i for i in range(facts.n_tensors) if facts.is_output[i] or (i in nodes and i not in used)]


def holder(facts: Facts, i: int) -> int:
    """The owner of the memory of id i: i itself, or the id at the end of the chain of `shares`."""
    seen = set()
    while facts.shares[i] >= 0 and i not in seen:
        seen.add(i)
        i = facts.shares[i]
    return i
