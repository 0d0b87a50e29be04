"""The program of a plan: every step of a compute, as plain values.

`make_program` is a pure function.  What is loaded and when, which copies are made by whom, what is kept for the next
compute, which experts travel, what goes back, and what each step waits for: all of it is decided here, so that the
executor only binds addresses, and `Plan.verify` executes exactly what a compute does.

Steps stand in the order in which they are issued.  Each has a backend, in whose queue it stands: **the steps of one
queue run one after the other; between queues, only waits order them.**  Ids count as in a plan: graph tensors, copies,
further places of copies.  A copy with several places is a ring: compute number k uses place k % len(places) of it.
ordering.py finds the waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ggml_sched._core import PlanData
from ggml_sched._graph import BackendBase, Graph, op_numbers
from ggml_sched.ordering import Access, Wait, order

__all__ = ["Copy", "CopyExperts", "Load", "Place", "Program", "Read", "Run", "Step", "Wait", "WriteBack", "describe",
           "make_program", "program_values"]

KIND_WRITES = 2
STATE_LATE, STATE_EXCLUSIVE = 4, 16
"""As in graph.h and plan.h."""
BLIND_OPS = [op_numbers()[name] for name in ("CPY", "SET_ROWS")]
"""Ops that name what they write to among their sources, and do not read it."""


class Place(NamedTuple):
    """Where the bytes of an id are: `offset` bytes into buffer `chunk` of a backend's arena."""

    id: int
    backend: int
    chunk: int
    offset: int


class Load(NamedTuple):
    """Bring what the caller has set for a leaf to a place: its own, or that of a copy which other backends read.

    `keeps`: nothing else uses the place, so it is loaded again only after a new `set`.
    """

    backend: int
    tensor: int
    """The leaf."""
    start: int
    """First of its bytes that are brought (a copy may be of a view)."""
    nbytes: int
    places: tuple[Place, ...]
    keeps: bool
    waits: tuple[Wait, ...] = ()

    kind = "load"


class Copy(NamedTuple):
    """Copy a tensor to a place on another backend.

    Made by the queue of `backend`: the source's (pushed, while the destination may be computing) or the
    destination's.  `keeps`: nothing else uses the place, so an unchanged source is not copied again.
    """

    backend: int
    tensor: int
    places: tuple[Place, ...]
    keeps: bool
    waits: tuple[Wait, ...] = ()

    kind = "copy"


class CopyExperts(NamedTuple):
    """Copy only those experts of a weight that `ids` names; only the mixture with these ids reads the place."""

    backend: int
    tensor: int
    ids: int
    places: tuple[Place, ...]
    waits: tuple[Wait, ...] = ()

    kind = "copy experts"
    keeps = False


class Read(NamedTuple):
    """The node at this position reads a copy in this source slot."""

    position: int
    slot: int
    places: tuple[Place, ...]


class Run(NamedTuple):
    """Compute the nodes at positions first .. last of the graph's order (views among them compute nothing)."""

    backend: int
    first: int
    last: int
    reads: tuple[Read, ...]
    into: tuple[Place, ...] = ()
    """The copy that the last node computes into, because its own memory is another backend's."""
    waits: tuple[Wait, ...] = ()

    kind = "run"
    keeps = False


class WriteBack(NamedTuple):
    """Copy what node `tensor` computed into a copy to the node's own memory."""

    backend: int
    tensor: int
    places: tuple[Place, ...]
    waits: tuple[Wait, ...] = ()

    kind = "write back"
    keeps = False


Step = Load | Copy | CopyExperts | Run | WriteBack


class Program:
    """The steps of a compute, immutable; equal by value, picklable."""

    __slots__ = ("__dict__", "inputs", "steps", "turns")

    def __init__(self, steps: Sequence[Step], inputs: Sequence[int], turns: int) -> None:
        set_field = super().__setattr__
        set_field("steps", tuple(steps))
        set_field("inputs", tuple(inputs))
        set_field("turns", turns)

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    """Leafs whose data some step reads before anything has written it: the caller must have set them."""
    turns: int
    """How many computes use different places, one after the other; 1 without rings."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a program is a value: {name!r} cannot be changed")

    @cached_property
    def awaited(self) -> frozenset[int]:
        """Steps that others wait for.

        Who waits for a step that is left out of a compute waits for the one before it in its queue instead.
        """
        found: set[int] = set()
        for k in {wait.step for step in self.steps for wait in step.waits}:
            queue = self.queues[self.steps[k].backend]
            at = queue.index(k)
            for other in (*reversed(queue[: at + 1]), *reversed(queue[at + 1 :])):
                found.add(other)
                if not self.steps[other].keeps:
                    break
        return frozenset(found)

    @cached_property
    def queues(self) -> dict[int, list[int]]:
        """For each backend its steps, in order."""
        found: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            found.setdefault(step.backend, []).append(k)
        return found

    @cached_property
    def reach(self) -> int:
        """How many computes back a wait goes at most."""
        return max((wait.back for step in self.steps for wait in step.waits), default=0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return (self.steps, self.inputs, self.turns) == (other.steps, other.inputs, other.turns)

    def __hash__(self) -> int:
        return hash((self.steps, self.inputs, self.turns))

    def __reduce__(self):
        return Program, (self.steps, self.inputs, self.turns)

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return "\n".join(f"{k:>4}  {describe(step)}" for k, step in enumerate(self.steps))

    def __repr__(self) -> str:
        counts = Counter(step.kind for step in self.steps)
        return f"<Program of {', '.join(f'{n} {kind}' for kind, n in counts.items()) or 'no steps'}>"


def describe(step: Step, name=lambda i: f"id {i}", backend=lambda b: f"backend {b}") -> str:
    """A step in words; `name` and `backend` say what ids and backends are called."""
    here = backend(step.backend)
    match step:
        case Load():
            what = f"load {name(step.tensor)} to {_where(step.places, name, backend)}"
        case Copy():
            what = f"copy {name(step.tensor)} to {_where(step.places, name, backend)}"
        case CopyExperts():
            what = (f"copy the experts of {name(step.tensor)} that {name(step.ids)} names to "
                    f"{_where(step.places, name, backend)}")
        case Run():
            nodes = f"nodes {step.first} .. {step.last}" if step.first < step.last else f"node {step.first}"
            into = f", the last one into {_where(step.into, name, backend)}" if step.into else ""
            what = f"run {nodes}{into}"
        case WriteBack():
            what = f"write {_where(step.places, name, backend)} back to {name(step.tensor)}"
    kept = ", unless unchanged" if step.keeps else ""
    waits = ", ".join(f"{w.step}" if not w.back else f"{w.step} of {w.back} before" for w in step.waits)
    return f"{here}: {what}{kept}{f', after {waits}' if waits else ''}"


def _where(places: tuple[Place, ...], name, backend) -> str:
    first = places[0]
    chunk = f" buffer {first.chunk}" if first.chunk else ""
    offsets = " or ".join(str(place.offset) for place in places)
    return f"{name(first.id)} at {offsets} of {backend(first.backend)}{chunk}"


# -- as plain values --------------------------------------------------------------------------------


def program_values(program: Program) -> dict:
    """A program as lists, numbers and words, as JSON holds them."""
    return {"turns": program.turns, "inputs": list(program.inputs),
            "steps": [{"kind": step.kind, **_values(step._asdict())} for step in program.steps]}


def _values(value):
    if isinstance(value, dict):
        return {key: _values(v) for key, v in value.items()}
    return [_values(v) for v in value] if isinstance(value, tuple) else value


# -- from a plan to its program ---------------------------------------------------------------------


def make_program(graph: Graph, data: PlanData, backends: Sequence[BackendBase]) -> Program:
    """What a compute by this plan does.

    Of the backends only `concurrent_copies` counts, and which of them owns the memory of residents.
    """
    return _Maker(graph, data, backends).program()


class _Maker:
    """What making a program needs to know of a plan, as arrays by id and by position."""

    def __init__(self, graph: Graph, data: PlanData, backends: Sequence[BackendBase]) -> None:
        g, p = graph.arrays(), data.arrays()
        self.graph, self.data, self.backends = graph, data, backends
        self.n, self.n_copies = data.n_tensors, data.n_copies
        self.src_begin, self.src = _ints(g["src_begin"]), _ints(g["src"])
        self.memory, self.position = _ints(g["memory"]), _ints(g["position"])
        self.node, self.work = _ints(g["node"]), _ints(g["work"])
        self.view_offs, self.nbytes = _longs(g["view_offs"]), _longs(g["nbytes"])
        self.slot, self.op = _bytes(g["slot"]), _bytes(g["op"])
        self.home, self.birth, self.offset = _ints(p["home"]), _ints(p["birth"]), _longs(p["offset"])
        self.planned = _ints(p["src"])[: len(self.src)]
        self.assign, self.state = _ints(p["assign"]), _bytes(p["state"])
        kind = _bytes(g["kind"])
        self.writers = self.work[(kind[self.work] & KIND_WRITES) != 0]
        """Nodes that compute into memory which is not their own."""
        self.written = set(self.memory[self.writers].tolist())
        self.copies, self.kept = data.copies, data.kept
        self.backs = dict(data.write_backs)
        self.places = self._places()
        self.concurrent = [bool(getattr(b, "concurrent_copies", False)) for b in backends]
        # Of every node that computes, what it reads: one entry for each source that it has.
        begin, end = self.src_begin[self.work], self.src_begin[self.work + 1]
        self.entry = _ranges(begin, end)
        self.reader = np.repeat(self.work, end - begin)
        self.reads = self._reads()

    def program(self) -> Program:
        steps = list(self._steps())
        turns = max(map(len, self.places), default=1)
        if len({step.backend for step in steps}) > 1:
            keeps = [step.keeps for step in steps]
            queues = [step.backend for step in steps]
            waits = order(queues, keeps, self._accesses(steps))
            steps = [step._replace(waits=found) if found else step for step, found in zip(steps, waits, strict=True)]
        return Program(steps, self._inputs(steps), turns)

    # -- places ------------------------------------------------------------------

    def _places(self) -> list[tuple[Place, ...]]:
        """For each copy its places: one, or those of its ring."""
        found = [[self._place(self.n + c)] for c in range(self.n_copies)]
        for k, c in enumerate(self.data.ring):
            found[c].append(self._place(self.n + self.n_copies + k))
        return [tuple(places) for places in found]

    def _place(self, i: int) -> Place:
        return Place(i, int(self.home[i]), self.data.chunk(i), self.data.offset(i))

    def _is_exclusive(self, i: int) -> bool:
        return bool(self.state[i] & STATE_EXCLUSIVE)

    def _is_placed(self, i: int) -> bool:
        """Whether the plan gives the memory of graph tensor i its place."""
        return bool(self.offset[self.memory[i]] >= 0)

    def _is_leaf(self, i: int) -> bool:
        """Whether the memory of graph tensor i is a leaf's."""
        return bool(self.op[self.memory[i]] == 0)

    # -- steps ---------------------------------------------------------------------

    def _steps(self) -> Iterator[Step]:
        late, early = self._leafs()
        yield from early
        # Places of a ring are free when a compute begins, and what the caller has set is there: nothing to wait for.
        splits = self.data.splits
        ahead = [c for c in dict.fromkeys(c for split in splits for c in split[3])
                 if len(self.places[c]) > 1 and self._is_unwritten(self.copies[c][0])]
        for c in ahead:
            yield self._bring(c, 0, 0)
        now = 0
        for backend, start, stop, inputs in splits:
            made = set(ahead)
            for c in inputs:
                yield from late.get(now, ())
                if c not in made:
                    made.add(c)
                    yield self._bring(c, start, stop)
                now += 1
            yield from self._split(backend, start, stop, {start + at - now: loads for at, loads in late.items()
                                                          if now <= at < now + stop - start})
            now += stop - start

    def _leafs(self) -> tuple[dict[int, list[Load]], list[Load]]:
        """Loads of leafs: those born later, by position in the sequence, and those loaded at the start."""
        late: dict[int, list[Load]] = {}
        early: list[Load] = []
        touched = set(self.memory[self.reads[self.reads < self.n]].tolist()) | self.written
        touched.update(self.memory[like] for like, _ in self.copies if not self._comes_from_caller(like))
        touched.update(int(self.memory[i]) for i in self._kept_ids())
        for i in sorted(touched):
            if self.op[i] or not self._is_placed(i):
                continue
            step = Load(int(self.home[i]), i, 0, int(self.nbytes[i]), (self._place(i),), self._is_exclusive(i))
            if self.state[i] & STATE_LATE:
                late.setdefault(int(self.birth[i]), []).append(step)
            else:
                early.append(step)
        return late, early

    def _split(self, backend: int, start: int, stop: int, loads: dict[int, list[Load]]) -> Iterator[Step]:
        """Run the nodes start .. stop - 1: as one, but for leafs that are born between them and what goes back."""
        backs = {int(self.position[i]): i for i in self.backs if start <= self.position[i] < stop}
        first = start
        for at in sorted(loads.keys() | backs.keys()):
            if at in loads:
                yield from self._run(backend, first, at - 1)
                yield from loads[at]
                first = at
            if at in backs:
                node = backs[at]
                places = self.places[self.backs[node]]
                yield from self._run(backend, first, at, places)
                yield WriteBack(backend, node, places)
                first = at + 1
        yield from self._run(backend, first, stop - 1)

    def _run(self, backend: int, first: int, last: int, into: tuple[Place, ...] = ()) -> Iterator[Run]:
        """Nothing for nodes that compute nothing."""
        low, high = np.searchsorted(self.position[self.work], (first, last + 1))
        if low < high:
            yield Run(backend, first, last, self._reads_of(first, last), into)

    def _reads_of(self, first: int, last: int) -> tuple[Read, ...]:
        """What the nodes first .. last read of copies."""
        at = self._read_positions
        low, high = np.searchsorted(at, (first, last + 1))
        return tuple(Read(int(at[k]), int(self.slot[e]), self.places[self.planned[e] - self.n])
                     for k, e in zip(range(low, high), self._read_entries[low:high].tolist(), strict=True))

    @cached_property
    def _read_entries(self) -> np.ndarray:
        """Sources that are copies, by entry of `src`, in the order of the nodes that read them."""
        return self.entry[self.planned[self.entry] >= self.n]

    @cached_property
    def _read_positions(self) -> np.ndarray:
        return self.position[self.reader[self.planned[self.entry] >= self.n]]

    # -- copies --------------------------------------------------------------------

    def _is_unwritten(self, i: int) -> bool:
        """Whether tensor i is (a view of) a leaf that no node writes to: it is there when a compute begins."""
        return self._is_leaf(i) and int(self.memory[i]) not in self.written

    def _comes_from_caller(self, i: int) -> bool:
        """Whether the data of tensor i is what the caller has set, and waits on the host."""
        return self._is_unwritten(i) and self._is_placed(i)

    def _bring(self, c: int, start: int, stop: int) -> Step:
        """How copy c is made, ahead of the split of nodes start .. stop."""
        i, backend = self.copies[c]
        places, root = self.places[c], int(self.memory[i])
        keeps = self._is_leaf(i) and (bool(self.kept[c]) or all(self._is_exclusive(place.id) for place in places))
        if self._comes_from_caller(i):
            return Load(backend, root, int(self.view_offs[i]), int(self.nbytes[i]), places, keeps)
        if not keeps and not self._is_placed(i):
            ids = self._experts_ids(i, start, stop)
            if ids is not None:
                return CopyExperts(backend, i, ids, places)
        owner = self._owner(root)
        pushes = len(places) > 1 and self.concurrent[backend] and owner >= 0
        return Copy(owner if pushes else backend, i, places, keeps)

    def _owner(self, root: int) -> int:
        """The backend whose memory a root has; -1 for one outside the plan's."""
        if self._is_placed(root):
            return int(self.home[root])
        backend = self.graph.tensors[root].backend
        return next((k for k, b in enumerate(self.backends) if b is backend), -1)

    def _experts_ids(self, weight: int, start: int, stop: int) -> int | None:
        """The ids that name the used experts, if only one mixture reads `weight` and its ids are there by then."""
        ids = self._mixtures.get(weight)
        if ids is None or self.written and int(self.memory[ids]) in self.written:
            return None
        return None if start <= self.position[self.memory[ids]] < stop else ids

    @cached_property
    def _mixtures(self) -> dict[int, int]:
        """{expert weights that one mixture reads, and nothing else: its ids}."""
        graph = self.graph
        mixtures = [i for i in self.work.tolist() if graph.tensors[i].op == "MUL_MAT_ID"]
        if not mixtures:
            return {}
        sources = {i: dict(zip(self.slot[self.src_begin[i] : self.src_begin[i + 1]].tolist(),
                               self.src[self.src_begin[i] : self.src_begin[i + 1]].tolist(), strict=True))
                   for i in mixtures}
        found = {src[0]: src[2] for src in sources.values()}
        read = Counter(self.src[self.entry].tolist())
        return {weight: ids for weight, ids in found.items() if read[weight] == 1}

    # -- what steps touch --------------------------------------------------------------

    def _reads(self) -> np.ndarray:
        """The id that each entry reads, copies put in."""
        return self.planned[self.entry]

    def _kept_ids(self) -> list[int]:
        """Tensors that nodes keep, though they do not read them."""
        ids = self.graph.id_of
        return [ids(t) for kept in self.graph.deps.values() for t in kept]

    def _inputs(self, steps: Sequence[Step]) -> list[int]:
        """Leafs that are read before a node has written to them."""
        loaded = sorted({step.tensor for step in steps if step.kind == "load"})
        if not loaded:
            return []
        never = len(self.position)
        first_read, first_write = np.full(self.n, never), np.full(self.n, never)
        blind = np.isin(self.op[self.reader], BLIND_OPS) & (
            self.memory[self.src[self.entry]] == self.memory[self.reader])
        np.minimum.at(first_read, self.memory[self.src[self.entry]][~blind], self.position[self.reader[~blind]])
        np.minimum.at(first_write, self.memory[self.writers], self.position[self.writers])
        return [i for i in loaded if first_read[i] < never and first_read[i] <= first_write[i]]

    def _accesses(self, steps: Sequence[Step]) -> Access:
        """What the steps read and write, memory by memory."""
        n_backends, n = len(self.backends), self.n
        n_keys = n_backends + n + self.n_copies
        step_at = np.full(len(self.node), -1)
        for k, step in enumerate(steps):
            if step.kind == "run":
                step_at[step.first : step.last + 1] = k
        run_of = step_at[self.position[self.work]]
        ids, at, writes = [self.reads, self.work.copy()], [np.repeat(run_of, self.src_begin[self.work + 1]
                                                          - self.src_begin[self.work]), run_of], []
        for i, c in self.backs.items():
            ids[1][self.work == i] = n + c
        writes = [np.zeros(len(ids[0]), bool), np.ones(len(ids[1]), bool)]
        more = [*self._accesses_of_copies(steps), *self._accesses_of_keepers(step_at)]
        if more:
            extra = np.array(more, np.int64)
            ids.append(extra[:, 0])
            at.append(extra[:, 1])
            writes.append(extra[:, 2] != 0)
        ids, at, writes = np.concatenate(ids), np.concatenate(at), np.concatenate(writes)
        key, start, size = self._memory_of(ids)
        owner = np.concatenate([np.arange(n_backends), self.assign, self.home[n : n + self.n_copies]])
        period = np.ones(n_keys, np.int64)
        for c, places in enumerate(self.places):
            period[n_backends + n + c] = len(places)
        return Access(at, key, start, start + size, writes, owner, period,
                      [b for b, concurrent in enumerate(self.concurrent) if not concurrent])

    def _accesses_of_copies(self, steps: Sequence[Step]) -> Iterator[tuple[int, int, int]]:
        """(id, step, whether it writes) for all but runs."""
        for k, step in enumerate(steps):
            if step.kind == "run":
                continue
            written = step.places[0].id
            if step.kind == "write back":
                yield written, k, 0
                yield step.tensor, k, 1
                continue
            yield written, k, 1
            if step.kind != "load":
                yield step.tensor, k, 0
            if step.kind == "copy experts" and not self._comes_from_caller(step.ids):
                yield step.ids, k, 0

    def _accesses_of_keepers(self, step_at: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """What nodes keep must be there until they are done, as if they read it."""
        ids = self.graph.id_of
        for node, kept in self.graph.deps.items():
            for t in kept:
                yield ids(t), int(step_at[self.position[ids(node)]]), 0

    def _memory_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(memory, first byte in it, bytes) of ids.

        Memories: the arena of each backend, then that of each resident root, then that of each ring.
        """
        n, n_backends = self.n, len(self.backends)
        is_copy = ids >= n
        copy = np.where(is_copy, ids - n, 0)        # the first place stands for its ring
        tensor = np.where(is_copy, np.array([like for like, _ in self.copies] or [0])[copy], ids)
        in_ring = is_copy & np.array([len(places) > 1 for places in self.places] or [False])[copy]
        root = np.where(is_copy, ids, self.memory[tensor])
        inside = np.where(is_copy, 0, self.view_offs[tensor])
        placed = self.offset[root] >= 0
        key = np.where(in_ring, n_backends + n + copy, np.where(placed, self.home[root], n_backends + root))
        start = np.where(in_ring, 0, np.where(placed, self.offset[root] + inside, inside))
        return key, start, self.nbytes[tensor]


def _ints(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32)


def _longs(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int64)


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """begin[0] .. end[0] - 1, begin[1] .. end[1] - 1, ... as one array."""
    counts = end - begin
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(starts - begin, counts)
