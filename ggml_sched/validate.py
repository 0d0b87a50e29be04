"""An independent check of a plan: slow, obvious, and knowing nothing of how the plan was made.

Owns no state.  The checks are functions of `Facts` (validate_facts.py), what a plan claims as plain lists:

    check_structure   splits cover the nodes in order, on backends that support them; residents stay
    check_memory      ranges lie inside their arenas, and nothing live overlaps
    check_flow        executed symbolically, twice, every read finds the bytes that the graph's order gives

Liveness is computed here from the graph and the steps of the plan, not from the planner's
lifetimes; taking over memory in place is checked as an overlap with a good excuse.  A check runs
only when those before it found nothing: reads mean nothing where splits have gaps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ggml_sched.errors import HazardError
from ggml_sched.validate_facts import Facts, kept, steps

if TYPE_CHECKING:
    from ggml_sched.plan import Plan

__all__ = ["Facts", "Problem", "check_flow", "check_memory", "check_structure", "problems", "validate"]

REASONS = {
    "bad-index": "a number of the plan points at nothing",
    "split-gap": "the splits do not cover the nodes in order",
    "wrong-order": "the sequence that lifetimes count in is not what the splits execute",
    "wrong-backend": "a node or copy is in a split of another backend",
    "unsupported-op": "a node is on a backend that cannot run it",
    "resident-moved": "a tensor with memory of its own is placed by the plan",
    "unplaced": "a tensor that the compute touches has no address",
    "view-misplaced": "a view is not at its root's address plus its offset",
    "bad-copy": "a node reads a copy of another layout",
    "misaligned": "an offset is not a multiple of the backend's alignment",
    "too-small": "a tensor was given fewer bytes than the backend asks for",
    "out-of-bounds": "a tensor does not lie inside its arena",
    "live-bytes": "more bytes are live than the arena has, which no packing can do",
    "overlap": "two tensors are live in the same bytes",
    "inplace-live": "a node writes over a source that is read later",
    "inplace-layout": "a node writes over a source of another layout or address",
    "inplace-not-tolerated": "a node writes over a source that its backend's kernel wants to itself",
    "output-overwritten": "a result does not survive until the end",
    "missing-copy": "a node reads memory that its backend cannot, or a copy that was never made",
    "copy-before-write": "a copy is made before its source is computed",
    "read-before-write": "a node reads bytes that nothing has written",
    "clobbered-read": "a node reads bytes that something else has written over",
    "stale-read": "a node reads a value that has been written to since",
    "lost-write": "a node writes through a view to memory that its backend cannot reach",
}
"""Every reason code that a Problem may have."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a plan: a code of `REASONS`, and a sentence with names and numbers."""

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def validate(plan: Plan) -> None:
    """Raise HazardError for the first problem of a plan, with its reason code as `.reason`."""
    found = problems(plan)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise HazardError(f"{found[0]}{more}", found[0].reason)


def problems(plan: Plan) -> list[Problem]:
    """Everything that is wrong with a plan; an empty list for a sound one."""
    return check(Facts.of(plan))


def check(facts: Facts) -> list[Problem]:
    """The problems of the first check that finds any."""
    return check_structure(facts) or check_memory(facts) or check_flow(facts)


# -- structure ------------------------------------------------------------------------------------


def check_structure(facts: Facts) -> list[Problem]:
    """Splits, backends, and that everything that is touched has a place."""
    found = _check_indices(facts)
    if found:
        return found
    return [*_check_splits(facts), *_check_nodes(facts), *_check_places(facts)]


def _check_indices(facts: Facts) -> list[Problem]:
    """That no number points at nothing, so that the other checks may follow them all."""
    found = []
    n, total = facts.n_tensors, len(facts.name)
    n_backends, n_copies = len(facts.backends), len(facts.copies)

    def expect(fits: bool, what: str) -> None:
        if not fits:
            found.append(Problem("bad-index", what))

    for k, split in enumerate(facts.splits):
        expect(0 <= split.backend < n_backends, f"split {k} is on backend {split.backend} of {n_backends}")
        for c in split.inputs:
            expect(0 <= c < n_copies, f"split {k} makes copy {c} of {n_copies}")
    for c, (like, b) in enumerate(facts.copies):
        expect(0 <= like < n, f"copy {c} copies tensor {like} of {n}")
        expect(0 <= b < n_backends, f"copy {c} goes to backend {b} of {n_backends}")
    for i, c in facts.write_backs.items():
        expect(0 <= i < n and 0 <= c < n_copies, f"node {i} of {n} computes into copy {c} of {n_copies}")
    for i in range(total):
        home, chunk, shares = facts.home[i], facts.chunk[i], facts.shares[i]
        expect(-1 <= home < n_backends, f"{facts.label(i)} lies on backend {home} of {n_backends}")
        expect(home < 0 or (home, chunk) in facts.arena_sizes,
               f"{facts.label(i)} lies in chunk {chunk} of {facts.backend(home)}, which has no such")
        expect(-1 <= shares < total, f"{facts.label(i)} shares the memory of id {shares} of {total}")
    for i in range(n):
        src, reads = facts.src[i], facts.reads[i]
        expect(len(src) == len(reads) and all((s < 0) == (p < 0) for s, p in zip(src, reads, strict=True))
               and max(reads, default=-1) < total, f"{facts.label(i)} reads ids {reads} in place of {src}")
    return found


def _check_splits(facts: Facts) -> list[Problem]:
    found = []
    expected, at = [], 0
    for k, split in enumerate(facts.splits):
        if split.start != at or split.stop <= split.start:
            what = f"split {k} has nodes [{split.start}, {split.stop}); those before it end at {at}"
            found.append(Problem("split-gap", what))
        at = split.stop
        expected += [facts.n_tensors + c for c in split.inputs]
        expected += facts.nodes[split.start:split.stop]
        for c in split.inputs:
            if facts.copies[c][1] != split.backend:
                what = f"split {k} on {facts.backend(split.backend)} makes {facts.label(facts.n_tensors + c)}"
                found.append(Problem("wrong-backend", what))
    if at != len(facts.nodes) and (facts.splits or any(facts.computes(i) for i in facts.nodes)):
        found.append(Problem("split-gap", f"the splits end at node {at} of {len(facts.nodes)}"))
    if not found and expected != facts.sequence:
        pairs = zip(expected, facts.sequence, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(facts.sequence)))
        found.append(Problem("wrong-order", f"the splits execute {len(expected)} ids, the sequence has "
                                            f"{len(facts.sequence)}; they differ from position {at}"))
    return found


def _check_nodes(facts: Facts) -> Iterator[Problem]:
    for k, split in enumerate(facts.splits):
        for i in facts.nodes[split.start:split.stop]:
            if not facts.computes(i):
                continue
            here = f"{facts.label(i)} runs on {facts.backend(facts.assigned[i])}"
            if facts.assigned[i] != split.backend:
                yield Problem("wrong-backend", f"{here}, its split {k} on {facts.backend(split.backend)}")
            elif not facts.supported[i]:
                yield Problem("unsupported-op", f"{here}, which does not support it")
            for s, p in zip(facts.src[i], facts.reads[i], strict=True):
                if p != s and (p < facts.n_tensors or facts.layout[p] != facts.layout[s]):
                    yield Problem("bad-copy", f"{facts.label(i)} reads {facts.label(p)} for {facts.label(s)}")


def _check_places(facts: Facts) -> Iterator[Problem]:
    """Residents stay, views lie in their roots, and whatever a compute touches lies somewhere."""
    for i in range(facts.n_tensors):
        if not facts.is_resident(i):
            continue
        if facts.home[i] >= 0 or facts.offset[i] >= 0:
            yield Problem("resident-moved", f"{facts.label(i)} has memory, and is put at {facts.where(i)}")
        elif facts.view_of[i] < 0 and facts.assigned[i] not in facts.resident[i]:
            yield Problem("resident-moved", f"{facts.label(i)} is said to be on "
                                            f"{facts.backend(facts.assigned[i])}, which cannot read it")
    touched = set()
    for step in steps(facts):
        touched.add(step.id)
        if step.kind == "run":
            touched.update(p for p in facts.reads[step.id] if p >= 0)
            touched.update(facts.deps.get(step.id, ()))
        elif step.kind == "copy":
            touched.add(facts.copies[step.id - facts.n_tensors][0])
    for i in sorted(touched):
        root = facts.memory(i)
        if facts.is_resident(i):
            continue
        start = facts.offset[root] + facts.view_offs[i]
        if min(facts.home[i], facts.offset[i], facts.home[root], facts.offset[root]) < 0:
            yield Problem("unplaced", f"{facts.label(i)} has no address")
        elif root != i and facts.address(i) != (facts.address(root)[0], start):
            yield Problem("view-misplaced", f"{facts.label(i)} begins at {facts.offset[i]}; its place in "
                                            f"{facts.label(root)} at {facts.where(root)} is {start}")
        elif i >= facts.n_tensors and facts.home[i] != facts.copies[i - facts.n_tensors][1]:
            yield Problem("wrong-backend", f"{facts.label(i)} lies at {facts.where(i)}")


# -- memory ---------------------------------------------------------------------------------------


class Life(NamedTuple):
    """A period in which an id's bytes matter; both ends belong to it."""

    birth: int
    death: int
    id: int


def check_memory(facts: Facts) -> list[Problem]:
    """Ranges inside arenas, and no two lives in the same bytes."""
    found = [*_check_ranges(facts)]
    if found:
        return found
    by_arena: dict[tuple, list[Life]] = {}
    for life in lives(facts):
        by_arena.setdefault((facts.home[life.id], facts.chunk[life.id]), []).append(life)
    for group in by_arena.values():
        found += _check_overlaps(facts, group)
    return found


def _check_ranges(facts: Facts) -> Iterator[Problem]:
    for i in range(len(facts.name)):
        if facts.home[i] < 0 or facts.offset[i] < 0 or facts.view_of[i] >= 0:
            continue
        alignment = facts.alignment[facts.home[i]]
        arena = facts.arena_sizes[facts.home[i], facts.chunk[i]]
        if facts.offset[i] % alignment:
            yield Problem("misaligned", f"{facts.label(i)} is at {facts.where(i)}, alignment {alignment}")
        if facts.shares[i] < 0 and facts.size[i] < facts.need[i]:
            yield Problem("too-small", f"{facts.label(i)} was given {facts.size[i]} bytes on "
                                       f"{facts.backend(facts.home[i])}, which asks for {facts.need[i]}")
        if facts.offset[i] + max(facts.need[i], facts.nbytes[i]) > arena:
            yield Problem("out-of-bounds", f"{facts.label(i)} is at {facts.where(i)}, {arena} bytes")
    for b, live in enumerate(facts.live_bytes):
        room = sum(size for (owner, _), size in facts.arena_sizes.items() if owner == b)
        if not 0 <= live <= room:
            yield Problem("live-bytes", f"{live} bytes are live on {facts.backend(b)}, which has {room}")


def lives(facts: Facts) -> list[Life]:
    """When the bytes of each placed id matter, from the graph and the steps alone.

    A leaf lives from its load, a node from its computation, a copy from being made, until the last step that
    touches it or a view of it.  A copy that is made again lives once for each making.  What is kept for the
    next compute lives always.
    """
    n, end = facts.n_tensors, len(facts.sequence)
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    found = []

    def touch(i: int, time: int) -> None:
        i = facts.memory(i)
        if not facts.is_resident(i):
            birth.setdefault(i, time)
            last[i] = time

    always = facts.keeps | facts.ring
    for i in always:
        touch(i, -1)
    for time, kind, i in steps(facts):
        if kind == "copy":
            touch(facts.copies[i - n][0], time)
            if i in birth and i not in always:
                found.append(Life(birth.pop(i), last[i], i))
        elif kind == "run":
            for p in facts.reads[i]:
                if p >= 0:
                    touch(p, time)
            for s in facts.deps.get(i, ()):
                touch(s, time)
            if i in facts.write_backs:
                touch(n + facts.write_backs[i], time)
        touch(i, time)
    for i in kept(facts):
        if facts.memory(i) in birth:
            touch(i, end)
    for i in always:
        touch(i, end)
    found += [Life(birth[i], last[i], i) for i in birth]
    return sorted(found, key=lambda life: life.birth)


def _check_overlaps(facts: Facts, group: list[Life]) -> Iterator[Problem]:
    """Sweep over the lives of one arena, by birth.  `taken` holds disjoint ranges (start, stop, id)."""
    taken: list[tuple[int, int, int]] = []
    death: dict[int, int] = {}
    ends: list[tuple[int, int]] = []

    def give(i: int) -> None:
        del death[i]
        key = (facts.offset[i], facts.offset[i] + facts.need[i], i)
        del taken[bisect_left(taken, key)]

    for life in group:
        i = life.id
        start, stop = facts.offset[i], facts.offset[i] + facts.need[i]
        if start == stop:
            continue
        while ends and ends[0][0] < life.birth:
            _, old = heappop(ends)
            if old in death and death[old] < life.birth:
                give(old)
        at = max(bisect_left(taken, (start,)) - 1, 0)
        clashes = []
        while at < len(taken) and taken[at][0] < stop:
            if taken[at][1] > start:
                clashes.append(taken[at][2])
            at += 1
        wrong = [_excuse(facts, life, Life(0, death[old], old)) for old in clashes]
        if any(wrong):
            yield from filter(None, wrong)
            continue
        for old in clashes:
            give(old)
        insort(taken, (start, stop, i))
        death[i] = life.death
        heappush(ends, (life.death, i))


def _excuse(facts: Facts, new: Life, old: Life) -> Problem | None:
    """Why `new` may be born in bytes where `old` still is: None if it takes it over in place and may."""
    x, y = new.id, old.id
    both = f"{facts.label(x)} at {facts.where(x)}, computed at step {new.birth}"
    theirs = f"{facts.label(y)} at {facts.where(y)}, needed until step {old.death}"
    if not (facts.took_over[x] and _holder(facts, x) == _holder(facts, y)):
        return Problem("overlap", f"{both}, overlaps {theirs}")
    if old.death > new.birth:
        lost = any(facts.memory(i) == y for i in kept(facts))
        return Problem("output-overwritten" if lost else "inplace-live", f"{both}, takes over {theirs}")
    slots = [k for k, p in enumerate(facts.reads[x]) if p >= 0 and facts.memory(p) == y]
    same = [k for k in slots if facts.layout[facts.reads[x][k]] == facts.layout[x]
            and facts.address(facts.reads[x][k]) == facts.address(x)]
    if not same:
        return Problem("inplace-layout", f"{both}, takes over {theirs}, which is no source of its layout")
    if len(slots) > 1 or not facts.tolerates[x] >> same[0] & 1:
        what = f"its sources {slots}; the kernel allows for one of mask {facts.tolerates[x]:#x}"
        return Problem("inplace-not-tolerated", f"{both}, takes over {theirs}, {what}")
    return None


def _holder(facts: Facts, i: int) -> int:
    """The id under whose name the plan took the bytes of i."""
    seen = set()
    while facts.shares[i] >= 0 and i not in seen:
        seen.add(i)
        i = facts.shares[i]
    return i


# -- data flow ------------------------------------------------------------------------------------


class Memory:
    """Bytes as who wrote them: sorted disjoint pieces (start, stop, writer, first).

    Byte `start` is byte `first` of what `writer` wrote.  Pieces that go in and out count from the start of
    the range that is written or read.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int, int]] = []

    def read(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """What stands in [start, stop), joined where it is contiguous; bytes never written are left out."""
        found: list[tuple[int, int, int, int]] = []
        for k in range(max(bisect_right(self.pieces, (start, inf)) - 1, 0), len(self.pieces)):
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

    def write(self, start: int, stop: int, pieces: list[tuple[int, int, int, int]]) -> None:
        """Replace what stands in [start, stop)."""
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


def check_flow(facts: Facts) -> list[Problem]:
    """Execute the plan on bytes that remember their writer.

    Beside it runs an ideal memory, in which every tensor has its own place and nodes run in the graph's
    order; every read must find the same in both.  When something is kept from one compute to the next, the
    plan runs twice: nodes then write new values, and what is kept must still be right.
    """
    return _Flow(facts).run()


class _Flow:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.found: list[Problem] = []
        self.ideal: dict[int, Memory] = {}
        self.real: dict[tuple, Memory] = {}
        self.done: set[int] = set()
        """Graph tensors that have their value, and copies that were made."""
        self.bad: set[int] = set()
        """Copies that were reported already."""
        self.round = 0
        """How many computes have gone before.  Writers are round * size + id: values of rounds differ."""
        self.size = len(facts.name)

    def run(self) -> list[Problem]:
        facts = self.facts
        computed = set(facts.nodes)
        leafs = [i for i in range(facts.n_tensors) if facts.view_of[i] < 0 and i not in computed]
        written = {facts.memory(i) for i in facts.nodes if facts.computes(i)}
        for i in leafs:
            if facts.is_resident(i):
                self.write_ideal(i)
                self.load(i)
        act = {"load": self.load, "copy": self.copy, "run": self.compute, "back": self.back}
        settled = set()
        while True:
            for i in leafs:
                if not facts.is_resident(i):
                    self.write_ideal(i)
            for step in steps(facts):
                if step.kind not in ("load", "copy") or step.id not in settled:
                    act[step.kind](step.id)
            self.end()
            if self.found or self.round or not facts.keeps:
                return self.found
            # The next compute, with the same inputs.  Residents that nodes wrote to count as set anew.
            self.round += 1
            for i in facts.keeps:
                root = i if i < facts.n_tensors else facts.memory(facts.copies[i - facts.n_tensors][0])
                if not (facts.is_resident(root) and root in written):
                    settled.add(i)
            self.done = {i for i in leafs if facts.is_resident(i)} | settled

    # -- steps --

    def load(self, i: int) -> None:
        self.write_real(i, self.all_of(i))
        self.done.add(i)

    def copy(self, i: int) -> None:
        facts = self.facts
        source = facts.copies[i - facts.n_tensors][0]
        missing = [s for s in self.producers(source) if s not in self.done]
        if missing:
            self.report("copy-before-write", f"{facts.label(i)} is made before {facts.label(missing[0])}")
            self.bad.add(i)
        self.write_real(i, self.read_real(source))
        self.done.add(i)

    def compute(self, i: int) -> None:
        facts = self.facts
        here = facts.assigned[i]
        node = f"{facts.label(i)} on {facts.backend(here)}"
        for s, p in zip(facts.src[i], facts.reads[i], strict=True):
            if s < 0:
                continue
            if here not in facts.readers(p):
                self.report("missing-copy", f"{node} reads {facts.label(p)}, whose memory it cannot read")
            elif p >= facts.n_tensors and p not in self.done:
                self.report("missing-copy", f"{node} reads {facts.label(p)}, which was not made")
            else:
                self.compare(s, p, f"{node} reads")
        for s in facts.deps.get(i, ()):
            self.compare(s, s, f"{node} keeps")
        into = facts.n_tensors + facts.write_backs[i] if i in facts.write_backs else i
        if here not in facts.readers(into):
            root = facts.label(facts.memory(into))
            self.report("lost-write", f"{node} writes to the memory of {root}, which it cannot reach")
        elif facts.view_of[i] >= 0:
            # It may write only some of its bytes (SET_ROWS, gaps between strides): the others must be right.
            self.compare(i, into, f"{node} writes into")
        self.write_ideal(i)
        self.write_real(into, self.all_of(i))
        self.done.add(i)

    def back(self, i: int) -> None:
        for node, c in self.facts.write_backs.items():
            if self.facts.n_tensors + c == i and node in self.done:
                self.write_real(node, self.read_real(i))

    def end(self) -> None:
        """Results, and residents that were written to, hold what they must."""
        facts = self.facts
        for i in kept(facts):
            if facts.is_resident(i) or facts.offset[i] >= 0:
                self.compare(i, i, "after the compute, the caller reads", "output-overwritten")
        for i in range(facts.n_tensors):
            if facts.is_resident(i) and facts.view_of[i] < 0:
                self.compare(i, i, "after the compute, the next one reads", "lost-write")

    # -- bytes --

    def all_of(self, i: int) -> list[tuple[int, int, int, int]]:
        """The bytes that tensor i writes: a leaf always the same."""
        writer = i + self.round * self.size if self.facts.computes(i) else i
        return [(0, self.facts.nbytes[i], writer, 0)] if self.facts.nbytes[i] else []

    def write_ideal(self, i: int) -> None:
        at = self.facts.view_offs[i]
        memory = self.ideal.setdefault(self.facts.memory(i), Memory())
        memory.write(at, at + self.facts.nbytes[i], self.all_of(i))

    def read_ideal(self, i: int) -> list[tuple[int, int, int, int]]:
        at = self.facts.view_offs[i]
        return self.ideal.setdefault(self.facts.memory(i), Memory()).read(at, at + self.facts.nbytes[i])

    def write_real(self, i: int, pieces: list[tuple[int, int, int, int]]) -> None:
        key, at = self.facts.address(i)
        self.real.setdefault(key, Memory()).write(at, at + self.facts.nbytes[i], pieces)

    def read_real(self, i: int) -> list[tuple[int, int, int, int]]:
        key, at = self.facts.address(i)
        return self.real.setdefault(key, Memory()).read(at, at + self.facts.nbytes[i])

    def producers(self, i: int) -> set[int]:
        """What must have run before i is copied: itself, or what it views.

        Of a node that writes into its root's memory, the root is copied before, for the node to compute into.
        """
        facts = self.facts
        found = {facts.memory(i)}
        while not facts.computes(i) and facts.view_of[i] >= 0 and facts.src[i]:
            i = facts.src[i][0]
        return found if facts.view_of[i] >= 0 else found | {i}

    def compare(self, s: int, p: int, who: str, worst: str | None = None) -> None:
        """Report a read of graph tensor s, at the place of p, that finds not what the graph's order gives."""
        facts = self.facts
        expected, actual = self.read_ideal(s), self.read_real(p)
        if expected == actual or p in self.bad:
            return
        root = facts.memory(s)
        others = [w % self.size for _, _, w, _ in actual if facts.memory(w % self.size) != root]
        if sum(b - a for a, b, _, _ in actual) < sum(b - a for a, b, _, _ in expected):
            reason, why = "read-before-write", "which is not written yet"
        elif others:
            reason, why = "clobbered-read", f"but finds {facts.label(others[0])} there"
        else:
            writers = {w for _, _, w, _ in expected} - {w for _, _, w, _ in actual}
            since = ", ".join(facts.label(w % self.size) for w in sorted(writers)) or "another part of it"
            since += " in this second compute" if self.round else ""
            reason, why = "stale-read", f"and misses what {since} has written"
        self.report(worst or reason, f"{who} {facts.label(p)}, {why}")

    def report(self, reason: str, message: str) -> None:
        self.found.append(Problem(reason, message))
