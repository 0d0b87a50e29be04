"""Compiles a plan to its program: which steps there are, on which backend, in which order, and their waits.

`make_program` depends on its arguments alone.  It decides when each leaf is loaded, in the queue of which backend each
copy is made, which copies and which experts are fetched by a store, which loaded or copied data is kept for the next
compute, of which weights only the used experts are copied, which copies are written back, and which inputs the caller
must have set.  waits.py finds the waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ggml_sched._core import PlanData
from ggml_sched._graph import BackendBase, Graph, Tensor, op_numbers
from ggml_sched.errors import PlacementError
from ggml_sched.planning.flat import FlatBackend, FlatGraph, FlatTensor
from ggml_sched.planning.program import (
    Copy,
    CopyExperts,
    Fetch,
    FetchExperts,
    Load,
    Location,
    Program,
    Read,
    Run,
    Step,
    WriteBack,
    bank_of,
)
from ggml_sched.planning.waits import Access, order
from ggml_sched.threads.cached import cached_property

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints: TypeAlias = npt.NDArray[np.integer[Any]]

__all__ = ["Bytes", "arrays_of", "make_program", "program_of", "runs_of"]

ROLE_WRITES = 2
STATE_LATE, STATE_EXCLUSIVE = 4, 16
"""Bits of a tensor's `role` (GS_ROLE_WRITES) and `state` (GS_STATE_LATE, GS_STATE_EXCLUSIVE).

WRITES: the node writes to another tensor's memory; LATE: the leaf is loaded when its lifetime begins, because other
tensors use its memory before; EXCLUSIVE: no other tensor uses the tensor's memory, and no node writes to it.
"""
BLIND_SLOTS = {op_numbers()["CPY"]: 1, op_numbers()["SET_ROWS"]: 2}
"""{op that is given its destination as a source, and does not read it: the slot of that source}."""
_TYPES = {"view_offs": np.int64, "nbytes": np.int64, "offset": np.int64, "slot": np.uint8, "op": np.uint8,
          "role": np.uint8, "flags": np.uint8, "state": np.uint8}
"""{array of a graph or a plan: the type of its elements}; arrays that are not listed have int32."""
MIXTURE_OP = op_numbers()["MUL_MAT_ID"]
PARTIAL_OPS = (op_numbers()["SET_ROWS"],)
"""Ops that write only a part of their result; which part is known only when they run."""


def make_program(graph: Graph | FlatGraph, data: PlanData, backends: Sequence[BackendBase | FlatBackend]) -> Program:
    """The program of a plan, for Python and for the C API.

    Of the backends it uses only `concurrent_copies` and `is_store`, and which of them owns the memory of residents.
    """
    return _Maker(graph, data, backends).program()


def program_of(graph: Graph, data: PlanData, backends: Sequence[BackendBase]) -> Program:
    """The program of a plan, made on the first call and kept in the PlanData."""
    if data._program is None:
        data._program = make_program(graph, data, backends)
    return data._program


class _Maker:
    """Makes the program of one plan, from the arrays of the graph and the plan, which are indexed by id or by position.

    `work` has the ids of the nodes that compute, `memory` for each id its root (the id itself, if it is no view).
    """

    def __init__(self, graph: Graph | FlatGraph, data: PlanData,
                 backends: Sequence[BackendBase | FlatBackend]) -> None:
        g, p = arrays_of(graph), arrays_of(data)
        self.graph, self.data, self.backends = graph, data, backends
        self.n, self.n_copies = data.n_tensors, data.n_copies
        self.src_begin, self.src = g["src_begin"], g["src"]
        self.memory, self.position = g["memory"], g["position"]
        self.node, self.work = g["node"], g["work"]
        self.view_offs, self.nbytes = g["view_offs"], g["nbytes"]
        self.slot, self.op = g["slot"], g["op"]
        self.arena_of, self.birth, self.offset = p["arena_of"], p["birth"], p["offset"]
        self.planned = p["src"][: len(self.src)]
        self.assign, self.state = p["assign"], p["state"]
        role = g["role"]
        self.writers = self.work[(role[self.work] & ROLE_WRITES) != 0]
        """Ids of nodes that write to the memory of another tensor, through a view."""
        self.written = set(self.memory[self.writers].tolist())
        self.copies, self.kept = data.copies, data.kept
        self.backs = dict(data.write_backs)
        self.locations = self._locations()
        self.concurrent = [bool(getattr(b, "concurrent_copies", False)) for b in backends]
        self.stores = {k for k, b in enumerate(backends) if getattr(b, "is_store", False)}
        self.fetched = {c: owner for c, (like, _) in enumerate(self.copies if self.stores else ())
                        if not self._is_placed(like) and (owner := self._owner(int(self.memory[like]))) in self.stores}
        """{index of a copy of a store's weight: index of the store among the backends}."""
        self.banks = self._banks()
        """{id of a weight whose experts are in slots: its bank}."""
        # One element for each source of each node that computes: `entry` is its index in `src`, `reader` the node's id,
        # `reads` the id that is read: the source, or the copy that replaces it.
        begin, end = self.src_begin[self.work], self.src_begin[self.work + 1]
        self.entry = _ranges(begin, end)
        self.reader = np.repeat(self.work, end - begin)
        self.reads = self.planned[self.entry]

    def program(self) -> Program:
        steps = list(self._steps())
        copy_slots = max(map(len, self.locations), default=1)
        if len({step.backend for step in steps}) > 1:
            optional = [step.if_changed for step in steps]
            queues = [step.backend for step in steps]
            waits = order(queues, optional, self._accesses(steps))
            steps = [step._replace(waits=found) if found else step for step, found in zip(steps, waits, strict=True)]
        return Program(tuple(steps), tuple(self._inputs(steps)), copy_slots)

    # -- locations ------------------------------------------------------------------

    def _locations(self) -> list[tuple[Location, ...]]:
        """For each copy the location of each of its slots."""
        found = [[self._location(self.n + c)] for c in range(self.n_copies)]
        for k, c in enumerate(self.data.slot_copies):
            found[c].append(self._location(self.n + self.n_copies + k))
        return [tuple(locations) for locations in found]

    def _location(self, i: int) -> Location:
        return Location(i, int(self.arena_of[i]), self.data.chunk(i), self.data.offset(i))

    def _banks(self) -> dict[int, Any]:
        residents = np.unique(self.memory[self.offset[self.memory] < 0]).tolist()
        banks = [(i, bank_of(getattr(self.graph.tensors[i], "buffer", None))) for i in residents]
        found = {i: bank for i, bank in banks if bank is not None}
        for i, bank in found.items():
            if not any(b is bank.store for b in self.backends):
                raise PlacementError(f"{self._name(i)} is a weight whose experts are in slots of backend "
                                     f"{bank.store.name!r}, which is none of the scheduler's")
        return found

    def _name(self, i: int) -> str:
        """The name of a tensor in messages."""
        return repr(getattr(self.graph.tensors[i], "name", f"tensor {i}"))

    def _is_exclusive(self, i: int) -> bool:
        return bool(self.state[i] & STATE_EXCLUSIVE)

    def _is_placed(self, i: int) -> bool:
        """Whether the memory of graph tensor i is in an arena of the plan; that of a resident is not."""
        return bool(self.offset[self.memory[i]] >= 0)

    def _is_leaf(self, i: int) -> bool:
        """Whether graph tensor i is a leaf, or a view of one."""
        return bool(self.op[self.memory[i]] == 0)

    # -- steps ---------------------------------------------------------------------

    def _steps(self) -> Iterator[Step]:
        late, early = self._leafs()
        fetches = self._expert_fetches() if self.banks else {}
        yield from early
        # Copies that have several slots, of leafs that no node writes to, are made first.  They wait for no step of
        # this compute: when it begins, the slot that it uses is free, and the leaf has its data.
        splits = self.data.splits
        ahead = [c for c in dict.fromkeys(c for split in splits for c in split[3])
                 if len(self.locations[c]) > 1 and self._is_unwritten(self.copies[c][0])]
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
            here: dict[int, list[Load | FetchExperts]] = {
                start + at - now: [*loads] for at, loads in late.items() if now <= at < now + stop - start}
            for at, step in fetches.items():
                if start <= at < stop:
                    here.setdefault(at, []).append(step)
            yield from self._split(backend, start, stop, here)
            now += stop - start

    def _leafs(self) -> tuple[dict[int, list[Load]], list[Load]]:
        """The loads of leafs: ({position in the plan's sequence: the late loads before it}, the loads at the start).

        A late load is made where the lifetime of its leaf begins, because other tensors use the leaf's memory before.
        """
        late: dict[int, list[Load]] = {}
        early: list[Load] = []
        touched = set(self.memory[self.reads[self.reads < self.n]].tolist()) | self.written
        id_of: Callable[[Any], int] = self.graph.id_of
        touched.update(int(self.memory[id_of(t)]) for kept in self.graph.deps.values() for t in kept)
        ids = np.array(sorted(touched), np.int64)
        for i in ids[(self.op[ids] == 0) & (self.offset[self.memory[ids]] >= 0)].tolist():
            step = Load(int(self.arena_of[i]), i, 0, int(self.nbytes[i]), (self._location(i),), self._is_exclusive(i))
            if self.state[i] & STATE_LATE:
                late.setdefault(int(self.birth[i]), []).append(step)
            else:
                early.append(step)
        return late, early

    def _split(self, backend: int, start: int, stop: int,
               loads: dict[int, list[Load | FetchExperts]]) -> Iterator[Step]:
        """The steps that run the nodes start .. stop - 1: one, or several with late loads, fetches of experts and
        write-backs between them.

        `loads` maps the position of a node to the late loads and fetches that must be made before it runs.
        """
        backs = {int(self.position[i]): i for i in self.backs if start <= self.position[i] < stop}
        first = start
        for at in sorted(loads.keys() | backs.keys()):
            if at in loads:
                yield from self._run(backend, first, at - 1)
                yield from loads[at]
                first = at
            if at in backs:
                node = backs[at]
                locations = self.locations[self.backs[node]]
                yield from self._run(backend, first, at, locations)
                yield WriteBack(backend, node, locations)
                first = at + 1
        yield from self._run(backend, first, stop - 1)

    def _run(self, backend: int, first: int, last: int, into: tuple[Location, ...] = ()) -> Iterator[Run]:
        """The step that runs the nodes first .. last; none if all of them are views."""
        low, high = np.searchsorted(self.position[self.work], (first, last + 1))
        if low < high:
            yield Run(backend, first, last, self._reads_of(first, last), into)

    def _reads_of(self, first: int, last: int) -> tuple[Read, ...]:
        """For the nodes first .. last the sources that they read from copies."""
        at = self._read_positions
        low, high = np.searchsorted(at, (first, last + 1))
        return tuple(Read(int(at[k]), int(self.slot[e]), self.locations[self.planned[e] - self.n])
                     for k, e in zip(range(low, high), self._read_entries[low:high].tolist(), strict=True))

    @cached_property
    def _read_entries(self) -> Ints:
        """Indices in `src` of the sources that are replaced by copies, in the order of the nodes that read them."""
        return self.entry[self.planned[self.entry] >= self.n]

    @cached_property
    def _read_positions(self) -> Ints:
        """The position of the reading node, for each of `_read_entries`; ascending."""
        return self.position[self.reader[self.planned[self.entry] >= self.n]]

    # -- copies --------------------------------------------------------------------

    def _is_unwritten(self, i: int) -> bool:
        """Whether tensor i is (a view of) a leaf that no node writes to: its data is known when a compute begins."""
        return self._is_leaf(i) and int(self.memory[i]) not in self.written

    def _comes_from_caller(self, i: int) -> bool:
        """Whether the data of tensor i is on the host, as the caller has set it."""
        return self._is_unwritten(i) and self._is_placed(i)

    def _bring(self, c: int, start: int, stop: int) -> Step:
        """The step that makes copy c, before the split of the nodes start .. stop - 1.

        What the caller set is loaded from the host, a store's weight is fetched by the store.  Other data is copied
        from the backend that owns it.  That is done in the owner's queue if the destination takes data while it
        computes, and the copy has several slots or the owner is a store; else in the destination's queue.
        """
        i, backend = self.copies[c]
        locations, root = self.locations[c], int(self.memory[i])
        if root in self.banks:
            raise PlacementError(f"{self._name(root)} is a weight whose experts are in slots: nodes on "
                                 "other backends than that of the slots cannot read it")
        if c in self.fetched:
            return Fetch(self.fetched[c], i, int(self.view_offs[i]), int(self.nbytes[i]), locations)
        if_changed = self._is_leaf(i) and (bool(self.kept[c]) or all(self._is_exclusive(at.id) for at in locations))
        if self._comes_from_caller(i):
            return Load(backend, root, int(self.view_offs[i]), int(self.nbytes[i]), locations, if_changed)
        if not if_changed and not self._is_placed(i):
            ids = self._experts_ids(i, start, stop)
            if ids is not None:
                return CopyExperts(backend, i, ids, locations)
        owner = self._owner(root)
        pushes = (len(locations) > 1 or owner in self.stores) and self.concurrent[backend] and owner >= 0
        return Copy(owner if pushes else backend, i, locations, if_changed)

    def _owner(self, root: int) -> int:
        """The index of the backend that owns the memory of a root; -1 for a resident of a backend outside the plan."""
        if self._is_placed(root):
            return int(self.arena_of[root])
        backend = self.graph.tensors[root].backend
        return next((k for k, b in enumerate(self.backends) if b is backend), -1)

    def _expert_fetches(self) -> dict[int, FetchExperts]:
        """{position of a node: the fetch of experts that must be made before it}.

        There is one before the first MUL_MAT_ID that reads a bank, and one before each later MUL_MAT_ID if the one
        before that reads another bank, or chooses by other numbers.
        """
        found: dict[int, FetchExperts] = {}
        groups = [(min(group), max(group)) for group in self.data.groups]
        last = None
        begin = self.src_begin
        for i in self.work[np.argsort(self.position[self.work], kind="stable")].tolist():
            entries = range(int(begin[i]), int(begin[i + 1]))
            of = {int(self.slot[e]): e for e in entries}
            read = [slot for slot, e in of.items() if int(self.memory[self.src[e]]) in self.banks]
            if not read:
                continue
            weight = int(self.src[of[0]]) if 0 in of else -1
            if self.op[i] != MIXTURE_OP or read != [0] or weight not in self.banks:
                raise PlacementError(f"{self._name(i)} reads a weight whose experts are in slots: only "
                                     "a MUL_MAT_ID of the whole weight can")
            bank, ids, now = self.banks[weight], int(self.planned[of[2]]), int(self.position[i])
            if last == (bank, ids):
                continue
            last = bank, ids
            # The fetch does not cut a fusion group: it comes before the first member.
            now = min([low for low, high in groups if low < now <= high], default=now)
            if self.position[self.memory[int(self.src[of[2]])]] >= now:
                raise PlacementError(f"the numbers that choose experts of {self._name(weight)} are "
                                     "computed as one with nodes that read these")
            if now in found:
                raise PlacementError(f"experts of {self._name(weight)} are computed as one with those of other numbers "
                                     "or another layer")
            found[now] = self._expert_fetch(bank, weight, int(self.src[of[2]]), ids)
        return found

    def _expert_fetch(self, bank: Any, weight: int, ids: int, planned: int) -> FetchExperts:
        weights = tuple(i for i, other in self.banks.items() if other is bank)
        tensors = self.graph.tensors
        store = next(k for k, b in enumerate(self.backends) if b is bank.store)
        n = min(tensors[weight].ne[2], int(self.nbytes[ids]) // 4)
        locations = (self._location(ids),) if planned < self.n else self.locations[planned - self.n]
        return FetchExperts(store, weights[0], weights, ids, locations, n * sum(tensors[i].nb[2] for i in weights))

    def _experts_ids(self, weight: int, start: int, stop: int) -> int | None:
        """The id of the tensor with the numbers of the used experts of `weight`; None if all experts must be copied.

        Only the used experts are copied if one MUL_MAT_ID is the only reader of `weight`, no node writes through a view
        to `weight` or to the numbers, and the numbers are known when the copy is made, which is before the split of the
        nodes start .. stop - 1.
        """
        ids = self._mixtures.get(weight)
        if ids is None or not self.written.isdisjoint((int(self.memory[ids]), int(self.memory[weight]))):
            return None
        return None if start <= self.position[self.memory[ids]] < stop else ids

    @cached_property
    def _mixtures(self) -> dict[int, int]:
        """{weight of several experts whose only reader is one MUL_MAT_ID: the id of that node's expert numbers}."""
        graph = self.graph
        mixtures = self.work[self.op[self.work] == MIXTURE_OP].tolist()
        if not mixtures:
            return {}
        sources = {i: dict(zip(self.slot[self.src_begin[i] : self.src_begin[i + 1]].tolist(),
                               self.src[self.src_begin[i] : self.src_begin[i + 1]].tolist(), strict=True))
                   for i in mixtures}
        found = {src[0]: src[2] for src in sources.values() if experts_lie_apart(graph.tensors[src[0]])}
        read = Counter(self.src[self.entry].tolist())
        return {weight: ids for weight, ids in found.items() if read[weight] == 1}

    # -- inputs ------------------------------------------------------------------------

    def _inputs(self, steps: Sequence[Step]) -> list[int]:
        """Leafs that the caller must have set: some of their bytes are read before a node has written them.

        Of a leaf that nodes write to, bytes that no node writes count as read: after a compute they are still what the
        caller has set.
        """
        loaded = sorted({step.tensor for step in steps if isinstance(step, Load)})
        read = set(self.memory[self.src[self.entry]].tolist()) if loaded else ()
        return [i for i in loaded if (self._needs_data(i) if i in self.written else i in read)]

    def _needs_data(self, leaf: int) -> bool:
        """Whether the caller must have set `leaf`, which nodes write to.

        It must if a node reads bytes that no node before it has written, or if some bytes are never written.
        """
        known = Bytes()
        reads: dict[int, list[int]] = {i: [] for i in self.work[self.memory[self.work] == leaf].tolist()}
        seen = (self.memory[self.src[self.entry]] == leaf) & ~self._is_blind
        for i, s in zip(self.reader[seen].tolist(), self.src[self.entry[seen]].tolist(), strict=True):
            reads.setdefault(i, []).append(s)
        for i in sorted(reads, key=self.position.__getitem__):
            for s in reads[i]:
                if not known.cover(int(self.view_offs[s]), int(self.view_offs[s] + self.nbytes[s])):
                    return True
            if self.memory[i] == leaf and self.op[i] not in PARTIAL_OPS:
                starts, size = runs_of(self.graph.tensors[i])
                known.add(starts + int(self.view_offs[i]), size)
        return not known.cover(0, int(self.nbytes[leaf]))

    @cached_property
    def _is_blind(self) -> npt.NDArray[np.bool_]:
        """For each of `entry`, whether it is a source that the node writes to and does not read (`BLIND_SLOTS`)."""
        slots = np.full(int(self.op.max(initial=0)) + 1, -1)
        for op, slot in BLIND_SLOTS.items():
            if op < len(slots):
                slots[op] = slot
        blind: npt.NDArray[np.bool_] = self.slot[self.entry] == slots[self.op[self.reader]]
        return blind

    # -- memory that steps access --------------------------------------------------------------

    def _accesses(self, steps: Sequence[Step]) -> Access:
        """All reads and writes of bytes by the steps, from which waits.py finds the conflicts."""
        n_backends, n = len(self.backends), self.n
        n_keys = n_backends + n + self.n_copies
        step_at = np.full(len(self.node), -1)
        for k, step in enumerate(steps):
            if isinstance(step, Run):
                step_at[step.first : step.last + 1] = k
        run_of = step_at[self.position[self.work]]
        n_sources = self.src_begin[self.work + 1] - self.src_begin[self.work]
        results = self.work.copy()
        for i, c in self.backs.items():
            results[self.work == i] = n + c
        # Each list has an array for what nodes read, one for their results, and one for what other steps access.
        accessed: list[Ints] = [self.reads, results]
        steps_of: list[Ints] = [np.repeat(run_of, n_sources), run_of]
        written: list[npt.NDArray[np.bool_]] = [np.zeros(len(self.reads), bool), np.ones(len(results), bool)]
        more = [*self._accesses_of_copies(steps), *self._accesses_of_keepers(step_at)]
        if more:
            extra = np.array(more, np.int64)
            accessed.append(extra[:, 0])
            steps_of.append(extra[:, 1])
            written.append(extra[:, 2] != 0)
        key, start, size = self._memory_of(np.concatenate(accessed))
        owner = np.concatenate([np.arange(n_backends), self.assign, self.arena_of[n : n + self.n_copies]])
        period = np.ones(n_keys, np.int64)
        for c, locations in enumerate(self.locations):
            period[n_backends + n + c] = len(locations)
        return Access(np.concatenate(steps_of), key, start, start + size, np.concatenate(written), owner, period,
                      [b for b, concurrent in enumerate(self.concurrent) if not concurrent])

    def _accesses_of_copies(self, steps: Sequence[Step]) -> Iterator[tuple[int, int, int]]:
        """(id, step, 1 if the step writes the id, else 0) for each access by a step that is no Run."""
        for k, step in enumerate(steps):
            if isinstance(step, Run):
                continue
            written = step.locations[0].id
            if isinstance(step, FetchExperts):
                yield written, k, 0
                for weight, bank in self.banks.items():
                    if self.backends[step.backend] is bank.store:
                        yield weight, k, 1
                continue
            if isinstance(step, WriteBack):
                yield written, k, 0
                yield step.tensor, k, 1
                continue
            yield written, k, 1
            if not isinstance(step, Load):
                yield step.tensor, k, 0
            if isinstance(step, CopyExperts) and not self._comes_from_caller(step.ids):
                yield step.ids, k, 0

    def _accesses_of_keepers(self, step_at: Ints) -> Iterator[tuple[int, int, int]]:
        """(id, step, 0) for each alloc dependency: its memory must stay until the node is done, so the step that runs
        the node counts as a reader."""
        ids: Callable[[Any], int] = self.graph.id_of
        for node, kept in self.graph.deps.items():
            for t in kept:
                yield ids(t), int(step_at[self.position[ids(node)]]), 0

    def _memory_of(self, ids: Ints) -> tuple[Ints, Ints, Ints]:
        """(number of the memory, first byte in it, size in bytes) of each of `ids`.

        Numbers: b for the arena of backend b; n_backends + id for a resident root, and for all slots together of a copy
        with several slots.  Each compute uses another of these slots, which `Access.period` accounts for.
        """
        n, n_backends = self.n, len(self.backends)
        is_copy = ids >= n
        copy = np.where(is_copy, ids - n, 0)        # the first slot's id stands for all slots of a copy
        tensor = np.where(is_copy, np.array([like for like, _ in self.copies] or [0])[copy], ids)
        in_ring = is_copy & np.array([len(locations) > 1 for locations in self.locations] or [False])[copy]
        root = np.where(is_copy, ids, self.memory[tensor])
        inside = np.where(is_copy, 0, self.view_offs[tensor])
        placed = self.offset[root] >= 0
        key = np.where(in_ring, n_backends + n + copy, np.where(placed, self.arena_of[root], n_backends + root))
        start = np.where(in_ring, 0, np.where(placed, self.offset[root] + inside, inside))
        size = self.nbytes[tensor]
        if self.fetched:
            # A fetch may write all of the copy's memory: the weight's place in it is known only when the plan is bound.
            whole = np.full(self.n_copies, -1)
            whole[list(self.fetched)] = [self.data.size(n + c) for c in self.fetched]
            size = np.where(is_copy & (whole[copy] >= 0), whole[copy], size)
        return key, start, size


def arrays_of(held: Graph | FlatGraph | PlanData) -> dict[str, Ints]:
    """{name: contents} of the arrays of a graph or a plan."""
    return {name: np.frombuffer(data, _TYPES.get(name, np.int32)) for name, data in held.arrays().items()}


def _ranges(begin: Ints, end: Ints) -> Ints:
    """begin[0] .. end[0] - 1, begin[1] .. end[1] - 1, ... as one array."""
    counts = end - begin
    starts = np.cumsum(counts) - counts
    found: Ints = np.arange(counts.sum()) - np.repeat(starts - begin, counts)
    return found


# -- bytes of tensors --------------------------------------------------------------------------------

MAX_RUNS = 1 << 16
"""The most contiguous ranges of bytes that `runs_of` returns, a bound of its time and memory."""


class Bytes:
    """A set of byte offsets, as sorted disjoint ranges [start, stop)."""

    def __init__(self) -> None:
        self._start, self._stop = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, starts: Ints, size: int) -> None:
        """Add `size` bytes from each of `starts` on."""
        start = np.concatenate([self._start, starts])
        stop = np.concatenate([self._stop, starts + size])
        if not len(start):
            return
        by_start = np.argsort(start, kind="stable")
        start, stop = start[by_start], np.maximum.accumulate(stop[by_start])
        opens = np.r_[True, start[1:] > stop[:-1]]
        self._start, self._stop = start[opens], stop[np.r_[np.flatnonzero(opens)[1:] - 1, len(start) - 1]]

    def cover(self, start: int, stop: int) -> bool:
        """Whether all of start .. stop - 1 are in the set."""
        k = int(np.searchsorted(self._start, start, "right")) - 1
        return start >= stop or k >= 0 and stop <= int(self._stop[k])


def experts_lie_apart(weight: Tensor | FlatTensor) -> bool:
    """Whether the experts of a weight [k, m, n_expert] occupy disjoint ranges of bytes."""
    rows = weight.ne[0] // weight.type.block_size * weight.nb[0]
    return weight.ne[3] == 1 and weight.nb[2] >= (weight.ne[1] - 1) * weight.nb[1] + rows


def runs_of(t: Tensor | FlatTensor) -> tuple[Ints, int]:
    """The bytes that the elements of a tensor take: the first byte of each contiguous range, and the bytes of a range.

    For a tensor of more than MAX_RUNS ranges it returns none, as if the tensor's node wrote nothing.
    """
    size, extents = t.type.type_size, [t.ne[0] // t.type.block_size, *t.ne[1:]]
    starts = np.zeros(1, np.int64)
    for n, stride in zip(extents, t.nb, strict=True):
        if stride == size and len(starts) == 1:
            size *= n
        elif n != 1:
            if len(starts) * n > MAX_RUNS:
                return np.empty(0, np.int64), 0
            starts = (starts[:, None] + np.arange(n) * stride).ravel()
    return starts, size
