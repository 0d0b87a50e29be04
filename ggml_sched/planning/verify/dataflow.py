"""Symbolic execution of several computes, in which each byte of memory is represented by the tensor that wrote it.

Every step is executed on two memories: a real one, with the plan's addresses, and an ideal one, in which every tensor
has memory of its own and nodes run in the graph's order.  Every read must find the same in both.  Steps are executed in
the program's order.  A separate check ensures that every other order which the waits allow has the same results: when a
step accesses bytes, all earlier steps whose accesses conflict with this one must be known to be done, by the order of
their queues and by waits (the vector clocks of _Order).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Set
from math import inf
from typing import NamedTuple, TypeAlias

from ggml_sched.planning.program import Copy, CopyExperts, Fetch, FetchExperts, Load, Run, Step, WriteBack
from ggml_sched.planning.verify.facts import Area, Facts, location_id, readable
from ggml_sched.planning.verify.problem import Problem
from ggml_sched.threads.cached import cached_property

__all__ = ["Memory", "check_dataflow"]

Piece: TypeAlias = tuple[int, int, int, int]
"""(start, stop, writer, first): the bytes [start, stop) hold the bytes of tensor `writer`, from its byte `first` on.

A tensor's values differ in each compute: `writer` is an id plus the number of the compute times the number of ids.
"""


def check_dataflow(facts: Facts) -> list[Problem]:
    """Execute the program symbolically, for at least one compute more than copies have slots and waits go back.

    Nodes write new values in each compute, and inputs change in some computes, so that reads of old data are found.
    Fusion groups are executed in each way that a backend may choose: node by node at their own positions, node by node
    where the last member stands, and as one kernel.
    """
    for mode in (ONE_BY_ONE, AT_LAST_MEMBER, ONE_KERNEL) if facts.groups else (ONE_BY_ONE,):
        found = _Execution(facts, mode).run()
        if found:
            return found
    return []


ONE_BY_ONE, AT_LAST_MEMBER, ONE_KERNEL = range(3)
"""The three ways to execute a fusion group; see `check_dataflow`."""


class Memory:
    """The content of one memory, an arena's buffer or a resident: sorted, disjoint pieces (see `Piece`).

    The pieces that `read` returns and `write` takes have start and stop relative to the range that is read or written.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def read(self, start: int, stop: int) -> list[Piece]:
        """The pieces of [start, stop), joined where they are contiguous; bytes never written are left out."""
        found: list[Piece] = []
        at = max(bisect_right(self.pieces, (start, inf)) - 1, 0)
        if at < len(self.pieces):
            begin, end, writer, first = self.pieces[at]
            if begin <= start < stop <= end:        # in most cases one piece covers the whole range
                return [(0, stop - start, writer, first + start - begin)]
        for k in range(at, len(self.pieces)):
            begin, end, writer, first = self.pieces[k]
            if begin >= stop:
                break
            low, high = max(begin, start), min(end, stop)
            if low >= high:
                continue
            piece = (low - start, high - start, writer, first + low - begin)
            if found and found[-1][1] == piece[0] and found[-1][2] == writer and (
                    found[-1][3] + found[-1][1] - found[-1][0] == piece[3]):
                piece = (found[-1][0], piece[1], writer, found.pop()[3])
            found.append(piece)
        return found

    def write(self, start: int, stop: int, pieces: list[Piece]) -> None:
        """Replace what the bytes [start, stop) hold by `pieces`."""
        if start >= stop:
            return
        low = max(bisect_right(self.pieces, (start, inf)) - 1, 0)
        high, rest = low, []
        while high < len(self.pieces) and self.pieces[high][0] < stop:
            begin, end, writer, first = self.pieces[high]
            if begin < start:
                rest.append((begin, min(end, start), writer, first))
            if end > stop:
                rest.append((max(begin, stop), end, writer, first + max(begin, stop) - begin))
            high += 1
        rest += [(start + a, start + b, writer, first) for a, b, writer, first in pieces]
        self.pieces[low:high] = sorted(rest)


class _Range(NamedTuple):
    """The last accesses to the bytes [start, stop): the last write (None: none), and since then the last read of each
    queue.  Both are instances of steps (see `_Order`)."""

    start: int
    stop: int
    writer: int | None
    readers: dict[int, int]
    """{queue: the instance of a step that was its last to read the bytes}."""


class _Touched:
    """The last accesses to the bytes of one memory, with which the next access may conflict: sorted, disjoint
    ranges."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []

    def cut(self, start: int, stop: int) -> list[_Range]:
        """The ranges of [start, stop), after splitting those that cross its ends and adding empty ones for gaps."""
        low = max(bisect_right(self.ranges, start, key=_start) - 1, 0)
        if self.ranges and (self.ranges[low].start, self.ranges[low].stop) == (start, stop):
            return [self.ranges[low]]
        found: list[_Range] = []
        put: list[_Range] = []
        high = low
        while high < len(self.ranges) and self.ranges[high].start < stop:
            old = self.ranges[high]
            begin, end = old.start, old.stop
            high += 1
            if end <= start:
                put.append(old)
                continue
            for a, b, inside in ((begin, min(end, start), False), (max(begin, start), min(end, stop), True),
                                 (max(begin, stop), end, False)):
                if a < b:
                    piece = _Range(a, b, old.writer, dict(old.readers))
                    put.append(piece)
                    if inside:
                        found.append(piece)
        at = start
        for piece in list(found):
            if at < piece.start:
                found.append(_Range(at, piece.start, None, {}))
                put.append(found[-1])
            at = piece.stop
        if at < stop:
            found.append(_Range(at, stop, None, {}))
            put.append(found[-1])
        self.ranges[low:high] = sorted(put, key=_start)
        return found


def _start(piece: _Range) -> int:
    return piece.start


class _Order:
    """Which steps are known to be done when a step begins, as vector clocks: {queue: the latest step known to be done}.

    In clocks a step stands for its run in one compute, its instance: c * (number of steps) + k for step k in compute c.
    """

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.ends: dict[int, dict[int, int]] = {}
        """{instance that ran: the clock at its end}."""
        self.ran: dict[int, list[int]] = {}
        """{queue: the instances that ran, ascending}."""
        self.now: dict[int, int] = {}

    def begin(self, compute: int, k: int) -> int:
        """Begin step k of a compute: sets `now` to the clock at its begin, notes that it ran, returns its instance."""
        clock: dict[int, int] = {}
        step = self.steps[k]
        me = compute * len(self.steps) + k
        before = [self.latest(step.backend, me)]
        for wait in step.waits:
            # A wait for a step that was left out is a wait for the step before it in its queue.
            instance = (compute - wait.back) * len(self.steps) + wait.step
            before.append(self.latest(self.steps[wait.step].backend, instance + 1))
        for other in before:
            for queue, instance in self.ends.get(other, {}).items():
                clock[queue] = max(clock.get(queue, -1), instance)
        self.now = dict(clock)
        clock[step.backend] = me
        self.ends[me] = clock
        self.ran.setdefault(step.backend, []).append(me)
        return me

    def latest(self, queue: int, before: int) -> int:
        """The last instance of a queue that ran, with a number below `before`; -1 for none."""
        instances = self.ran.get(queue, [])
        at = bisect_left(instances, before)
        return instances[at - 1] if at else -1

    def knows(self, instance: int) -> bool:
        """Whether an instance is known to be done when the present step, the last that `begin` began, begins."""
        queue = self.steps[instance % len(self.steps)].backend
        return instance <= self.now.get(queue, -1)


class _Execution:
    """The state of the symbolic execution of several computes: both memories, what was set and computed, and problems.

    `real` is {memory: content} with the plan's addresses; `ideal` is {root: content}: each root has memory of its own.
    """

    def __init__(self, facts: Facts, mode: int = ONE_BY_ONE) -> None:
        self.facts = facts
        self.mode = mode
        self.found: list[Problem] = []
        self.ideal: defaultdict[int, Memory] = defaultdict(Memory)
        self.real: defaultdict[Area, Memory] = defaultdict(Memory)
        self.done: set[int] = set()
        """Graph tensors that have been set or computed, and copies that have been made."""
        self.bad: set[int] = set()
        """Copies with a problem that was reported: reads of them are not reported again."""
        self.experts: dict[int, list[Piece]] = {}
        """{copy or weight of which only chosen experts are in memory: the content of the tensor whose numbers chose
        them}."""
        self.size = len(facts.name)
        self.round = 0
        """The number of the present compute, from 0.  The writer in a `Piece` is round * size + id."""
        self.cur_copy = 0
        """Which slot of each copy this compute uses: `cur_copy` modulo the number of the copy's slots."""
        self.needed: set[int] = set()
        """Leafs of which some bytes are still as the caller set them when a node reads them, or when the first compute
        ends."""
        self.versions: dict[int, int] = {}
        """{leaf or resident: how often its data has changed}: the caller set it, or nodes wrote to a resident."""
        self.set_in: dict[int, int] = {}
        """{leaf or resident: the round in which it was set last}."""
        self.seen: dict[int, int] = {}
        """{leaf or copy slot whose data is kept between computes: which of the `versions` of its source it holds}."""
        steps = facts.program.steps
        self.order = _Order(steps) if len({step.backend for step in steps}) > 1 else None
        self.touched: defaultdict[Area, _Touched] = defaultdict(_Touched)
        self.me = 0
        self.unordered: set[tuple[int, int]] = set()

    def run(self) -> list[Problem]:
        facts = self.facts
        computed = set(facts.nodes)
        leafs = [i for i in range(facts.n_tensors) if facts.view_of[i] < 0 and i not in computed]
        self.written = {facts.memory(i) for i in facts.nodes if facts.computes(i)}
        self.leafs = {i for i in leafs if not facts.is_resident(i)}
        program = facts.program
        rounds = 1 + max(program.copy_slots, program.reach, 4 * program.copy_slots * bool(facts.kept))
        while self.round < rounds and not self.found:
            self.set_data(self.set_before(leafs))
            for k, step in enumerate(program.steps):
                if not self.is_kept(step):
                    if self.order is not None:
                        self.me = self.order.begin(self.round, k)
                    self.execute(step)
            self.end()
            for i in self.written:
                if facts.is_resident(i):
                    self.versions[i] = self.versions.get(i, 0) + 1
            self.round += 1
            self.cur_copy = self.round % program.copy_slots
            self.done = {i for i in leafs if facts.is_resident(i)} | self.seen.keys()
        return self.found

    def set_before(self, leafs: list[int]) -> list[int]:
        """The leafs that the caller sets before this compute; they vary, so that each step that is `if_changed` is left
        out of some computes and runs in others.

        Before the first compute the caller sets all.  Then, each time for as many computes as a copy has slots: none,
        every second leaf, the other leafs, all.
        """
        match (self.round + self.facts.program.copy_slots - 1) // self.facts.program.copy_slots:
            case 1:
                return []
            case 2 | 3 as half:
                return [i for k, i in enumerate(leafs) if k % 2 == half % 2]
            case _:
                return leafs

    def set_data(self, leafs: list[int]) -> None:
        """Give these leafs new data, as the caller would; leafs that are residents get it at once, others by loads."""
        for i in leafs:
            self.set_in[i] = self.round
            self.versions[i] = self.versions.get(i, 0) + 1
            if self.facts.is_resident(i):
                if i not in self.facts.banks:       # the data of a bank's weights is in the store
                    self.write_real(i, self.all_of(i), False)
                self.done.add(i)
        for i in self.set_in:
            if i in leafs or not self.facts.is_resident(i):
                self.write_ideal(i)

    def is_kept(self, step: Step) -> bool:
        """Whether a step is left out of this compute, because its destination holds the present version of its source;
        if not, notes in `seen` that it will."""
        if isinstance(step, Run) or not step.if_changed:
            return False
        location, version = location_id(step, self.cur_copy), self.versions.get(self.facts.memory(step.tensor), 0)
        if self.seen.get(location) == version:
            return True
        self.seen[location] = version
        return False

    # -- steps --

    def execute(self, step: Step) -> None:
        match step:
            case Load():
                self.load(step)
            case Copy() | CopyExperts():
                self.copy(step)
            case Fetch():
                self.fetch(step)
            case FetchExperts():
                self.fetch_experts(step)
            case Run():
                for unit in self.facts.units(step, self.mode != ONE_BY_ONE):
                    if self.mode == ONE_KERNEL and len(unit) > 1:
                        self.compute_as_one(step, unit)
                        continue
                    for i in unit:
                        self.compute(step, i)
            case WriteBack():
                location = location_id(step, self.cur_copy)
                if step.tensor in self.done:
                    self.write_real(step.tensor, self.read_real(location))

    def load(self, step: Load) -> None:
        """Write the data that the caller set, which is on the host, to the destination of a load."""
        location = location_id(step, self.cur_copy)
        ((_, _, writer, _),) = self.all_of(step.tensor) or [(0, 0, 0, 0)]
        self.write_real(location, [(0, step.nbytes, writer, step.start)] if step.nbytes else [])
        self.experts.pop(location, None)
        self.done.add(location)

    def fetch(self, step: Fetch) -> None:
        """Write the fetched range of a weight to its copy.  The rest of the copy's memory loses its content, because a
        fetch may write there, too."""
        facts, location = self.facts, location_id(step, self.cur_copy)
        self.touch(step.tensor, False)
        pieces = self.real["resident", facts.memory(step.tensor)].read(step.start, step.start + step.nbytes)
        key, at = facts.address(location)
        self.real[key].write(at, at + max(facts.extent(location), step.nbytes), pieces)
        self.touch(location, True)
        self.experts.pop(location, None)
        self.done.add(location)

    def fetch_experts(self, step: FetchExperts) -> None:
        """Write the experts that `step.ids` names to the memory of their bank.  All other banks of the store lose their
        content: their experts may have lost their slots."""
        facts, location = self.facts, location_id(step, self.cur_copy)
        numbers = self.read_real(location)
        self.compare(step.ids, location, f"the store {facts.backend(step.backend)} reads")
        for i, (store, _) in facts.banks.items():
            if store != step.backend:
                continue
            chosen = i in step.weights
            self.write_real(i, self.read_ideal(i) if chosen else [])
            self.experts.pop(i, None)
            if chosen:
                if not self.experts_lie_apart(i):
                    self.report("partial-read", f"experts of {facts.label(i)} are fetched, which share bytes")
                self.experts[i] = numbers

    def copy(self, step: Copy | CopyExperts) -> None:
        """Make a copy in the real memory; check that what is copied has been computed."""
        facts, location = self.facts, location_id(step, self.cur_copy)
        missing = [s for s in self.producers(step.tensor) if s not in self.done]
        if missing:
            self.report("copy-before-write", f"{facts.label(location)} is made before {facts.label(missing[0])}")
            self.bad.add(location)
        self.experts.pop(location, None)
        if isinstance(step, CopyExperts):
            if not self.experts_lie_apart(step.tensor):
                weight = facts.label(step.tensor)
                self.report("partial-read", f"{facts.label(location)} gets some experts of {weight}, which share bytes")
            staged = facts.memory(step.ids) in self.leafs
            self.experts[location] = self.read_ideal(step.ids) if staged else self.read_real(step.ids)
        self.write_real(location, self.read_real(step.tensor))
        self.done.add(location)

    def compute(self, step: Run, i: int) -> None:
        self.read(step, i)
        self.write(step, i)
        self.done.add(i)

    def compute_as_one(self, step: Run, members: list[int]) -> None:
        """Compute a fusion group as one kernel, which does not write inner results.

        The kernel may read at any time while it writes: the sources from outside the group must be right both before
        and after its writes.
        """
        facts = self.facts
        inside, own = {facts.memory(i) for i in members}, {i for i in members if facts.view_of[i] < 0}
        for i in members:
            self.read(step, i, inside)
        for i in members:
            self.write(step, i, own, i not in facts.inner)
        for i in members:
            self.read(step, i, inside)
        self.done.update(members)

    def read(self, step: Run, i: int, inside: Set[int] = frozenset()) -> None:
        """Check the reads and alloc dependencies of node i.

        `inside`: roots whose memory the node's own fusion group writes; reads of them are not checked.
        """
        facts = self.facts
        here = facts.assigned[i]
        node = f"{facts.label(i)} on {facts.backend(here)}"
        reads = facts.read_by(step, i, self.cur_copy)
        for slot, (s, p) in enumerate(zip(facts.src[i], reads, strict=True)):
            if s < 0 or facts.memory(s) in inside:
                continue
            if here not in facts.readers(p):
                self.report("missing-copy", f"{node} reads {facts.label(p)}, whose memory it cannot read")
            elif p >= facts.n_tensors and p not in self.done:
                self.report("missing-copy", f"{node} reads {facts.label(p)}, which was not made")
            else:
                if slot != facts.blind_slot(i):
                    self.need(s)
                self.compare(s, p, f"{node} reads")
                if p in self.experts and not self.names_experts(i, slot, reads):
                    what = f"{node} reads {facts.label(p)}, which has the experts that other ids name"
                    self.report("partial-read", what)
        for s in facts.deps.get(i, ()):
            if facts.memory(s) not in inside:
                self.compare(s, s, f"{node} keeps")

    def write(self, step: Run, i: int, own: Set[int] = frozenset(), really: bool = True) -> None:
        """Write the result of node i to the ideal memory, and with `really` to the real one.

        `own`: the nodes of its fusion group.  If node i is a view of one of them, the content before the write is not
        checked.
        """
        facts = self.facts
        here, into = facts.assigned[i], facts.into(step, i, self.cur_copy)
        node = f"{facts.label(i)} on {facts.backend(here)}"
        if here not in facts.readers(into):
            root = facts.label(facts.memory(into))
            self.report("lost-write", f"{node} writes to the memory of {root}, which it cannot reach")
        elif facts.view_of[i] >= 0 and facts.view_of[i] not in own:
            # The op may write only some bytes of its result (SET_ROWS, gaps between strides): before the write all must
            # be right.
            self.compare(i, into, f"{node} writes into")
        self.write_ideal(i)
        if really:
            self.write_real(into, self.all_of(i))

    def experts_lie_apart(self, i: int) -> bool:
        """Whether the bytes of a weight's experts are disjoint ranges."""
        kind, ne, nb = self.facts.layout[i]
        return ne[3] == 1 and nb[2] >= nb[1] * (ne[1] - 1) + nb[0] * (ne[0] // kind.block_size)

    def need(self, i: int) -> None:
        """In the first compute: note in `needed` the leafs of which tensor i has bytes as the caller set them."""
        if not self.round:
            self.needed.update(w for _, _, w, _ in self.read_ideal(i) if w in self.leafs)

    def names_experts(self, i: int, slot: int, reads: tuple[int, ...]) -> bool:
        """Whether node i is a MUL_MAT_ID, source number `slot` is its weight, and the experts of that weight which are
        in memory are those that the node's own ids choose."""
        return (self.facts.op[i] == "MUL_MAT_ID" and slot == 0
                and self.read_real(reads[2]) == self.experts[reads[0]])

    def end(self) -> None:
        """After a compute, check the results, the residents, and that the program names all inputs."""
        facts = self.facts
        if not self.round:
            for i in self.leafs & self.written:
                self.need(i)
            for i in sorted(self.needed - set(facts.program.inputs)):
                self.report("missing-input", f"{facts.label(i)} is read, and is no input of the program")
        for i in readable(facts):
            if facts.memory(i) in self.leafs - self.written:
                continue        # reading such a leaf returns the data on the host
            if facts.is_resident(i) or facts.offset[i] >= 0:
                self.compare(i, i, "after the compute, the caller reads", "output-overwritten", False)
        for i in range(facts.n_tensors):
            if facts.is_resident(i) and facts.view_of[i] < 0 and i not in facts.banks:
                self.compare(i, i, "after the compute, the next one reads", "lost-write", False)
        if not self.round and not self.found:
            self.check_overwritten()

    def check_overwritten(self) -> None:
        """Check `Facts.overwritten`: the memory of a tensor in it was used again, any other tensor has its value."""
        facts = self.facts
        for i in sorted({i for i in facts.nodes if facts.computes(i)} | (self.leafs & self.written)):
            if facts.is_resident(i) or facts.offset[i] < 0 or i in facts.inner or not facts.nbytes[i]:
                continue
            if i not in facts.overwritten:
                self.compare(i, i, "after the compute, the caller may read", "wrong-overwritten", False)
            elif self.read_ideal(i) == self.read_real(i, False) and not self.is_reused(i):
                self.report("wrong-overwritten",
                            f"{facts.label(i)} is declared overwritten, and no step has written over it")

    def is_reused(self, i: int) -> bool:
        """Whether the memory of i, padding included, overlaps that of a tensor whose first use comes after that of
        i."""
        facts, root, first = self.facts, self.facts.memory(i), self.first_use
        start, stop = facts.offset[root], facts.offset[root] + facts.padded(root)
        return any(first[k] > first[i] and facts.offset[k] >= 0 and facts.view_of[k] < 0
                   and facts.address(k)[0] == facts.address(root)[0]
                   and start < facts.offset[k] + facts.padded(k) and facts.offset[k] < stop
                   for k in first)

    @cached_property
    def first_use(self) -> dict[int, int]:
        """{id: the first position in the sequence that computes it, makes it, or reads it or a view of it}."""
        facts, n = self.facts, self.facts.n_tensors
        found: dict[int, int] = {}
        for k, i in enumerate(facts.sequence):
            used = (*facts.reads[i], *facts.deps.get(i, ())) if i < n else (facts.copies[i - n][0],)
            for p in (*used, i):
                if p >= 0:
                    found.setdefault(p, k)
                    found.setdefault(facts.memory(p), k)
        return found

    # -- bytes --

    def all_of(self, i: int) -> list[Piece]:
        """The right content of tensor i: of a node, what this compute writes; of a leaf, what the caller set last."""
        writer = i + self.set_in.get(i, self.round) * self.size
        return [(0, self.facts.nbytes[i], writer, 0)] if self.facts.nbytes[i] else []

    def write_ideal(self, i: int) -> None:
        at = self.facts.view_offs[i]
        memory = self.ideal[self.facts.memory(i)]
        memory.write(at, at + self.facts.nbytes[i], self.all_of(i))

    def read_ideal(self, i: int) -> list[Piece]:
        at = self.facts.view_offs[i]
        return self.ideal[self.facts.memory(i)].read(at, at + self.facts.nbytes[i])

    def write_real(self, i: int, pieces: list[Piece], by_step: bool = True) -> None:
        key, at = self.facts.address(i)
        self.real[key].write(at, at + self.facts.nbytes[i], pieces)
        if by_step:
            self.touch(i, True)

    def read_real(self, i: int, by_step: bool = True) -> list[Piece]:
        key, at = self.facts.address(i)
        if by_step:
            self.touch(i, False)
        return self.real[key].read(at, at + self.facts.nbytes[i])

    def touch(self, i: int, writes: bool) -> None:
        """Note an access of the current step to the bytes of i; report conflicting steps that may not be done yet.

        What the step writes becomes one range, however many ranges it was before.
        """
        if self.order is None:
            return
        key, at = self.facts.address(i)
        queue = self.order.steps[self.me % len(self.order.steps)].backend
        touched, stop = self.touched[key], at + self.facts.extent(i)
        pieces = touched.cut(at, stop)
        for piece in pieces:
            others = [] if piece.writer is None else [piece.writer]
            if writes:
                others += piece.readers.values()
            for other in others:
                if other != self.me and not self.order.knows(other):
                    self.report_unordered(i, other, len(self.order.steps))
            piece.readers[queue] = self.me
        if writes and pieces:
            low = bisect_left(touched.ranges, at, key=_start)
            touched.ranges[low : low + len(pieces)] = [_Range(at, stop, self.me, {})]

    def report_unordered(self, i: int, other: int, n: int) -> None:
        """Report that the current step conflicts, at the bytes of i, with instance `other` of a step, and that no wait
        orders them; n is the number of steps of the program."""
        pair = (other % n, self.me % n)
        if pair not in self.unordered:
            self.unordered.add(pair)
            back = self.me // n - other // n
            of = "" if not back else f" of {back} computes before"
            what = f"step {pair[1]} touches the bytes of {self.facts.label(i)}"
            self.report("unordered", f"{what}, and step {pair[0]}{of} may not be done with them")

    def producers(self, i: int) -> set[int]:
        """The ids that must be set or computed before tensor i is copied: its root, and the node that i is or views.

        A node that writes to its root's memory is not among them: it may compute into the copy, which is made first.
        """
        facts = self.facts
        found = {facts.memory(i)}
        while not facts.computes(i) and facts.view_of[i] >= 0 and facts.src[i]:
            i = facts.src[i][0]
        return found if facts.view_of[i] >= 0 else found | {i}

    def compare(self, s: int, p: int, who: str, worst: str | None = None, by_step: bool = True) -> None:
        """Report a problem if a read of graph tensor s, at the address of id p, differs from the ideal memory.

        `worst`: the reason code, in place of the one that is found here; `by_step`: a step reads, not the caller.
        """
        facts = self.facts
        expected, actual = self.read_ideal(s), self.read_real(p, by_step)
        if expected == actual or p in self.bad:
            return
        root = facts.memory(s)
        others = [w % self.size for _, _, w, _ in actual if facts.memory(w % self.size) != root]
        if sum(b - a for a, b, _, _ in actual) < sum(b - a for a, b, _, _ in expected):
            reason, what = "read-before-write", "which is not written yet"
        elif others:
            reason, what = "clobbered-read", f"but finds {facts.label(others[0])} there"
        elif facts.is_fetched(p) and {w for _, _, w, _ in expected} == {w for _, _, w, _ in actual}:
            reason, what = "wrong-range", f"and finds other bytes of {facts.label(s)}"
        else:
            writers = {w for _, _, w, _ in expected} - {w for _, _, w, _ in actual}
            since = ", ".join(facts.label(w % self.size) for w in sorted(writers)) or "another part of it"
            since += f" in compute {self.round}" if self.round else ""
            reason, what = "stale-read", f"and misses what {since} has written"
        self.report(worst or reason, f"{who} {facts.label(p)}, {what}")

    def report(self, reason: str, message: str) -> None:
        self.found.append(Problem(reason, message))
