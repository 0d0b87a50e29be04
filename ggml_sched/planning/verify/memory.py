"""Checks that ranges lie inside their arenas, and that no two tensors are live in the same bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from ggml_sched.planning.program import FetchExperts, Load, Run, WriteBack
from ggml_sched.planning.verify.facts import Facts, acts, holder, readable
from ggml_sched.planning.verify.problem import Problem

__all__ = ["Life", "check_memory", "lives"]


class Life(NamedTuple):
    """The lifetime of an id, from action `birth` to action `death`, both included; actions are numbered by `acts`."""

    birth: int
    death: int
    id: int


def check_memory(facts: Facts) -> list[Problem]:
    """The problems of single tensors: alignment, size, bounds of the arena.

    If there are none, the pairs of tensors that are live at the same time in the same bytes.
    """
    found = [*_check_ranges(facts)]
    if found:
        return found
    # A backend may compute the members of a fusion group one by one, or all where the last member stands (`late`).
    for late in (False, True) if facts.groups else (False,):
        by_arena: dict[tuple[int, int], list[Life]] = {}
        for life in lives(facts, late):
            by_arena.setdefault((facts.arena_of[life.id], facts.chunk[life.id]), []).append(life)
        for lifetimes in by_arena.values():
            found += _check_overlaps(facts, lifetimes)
        if found:
            break
    return found


def _check_ranges(facts: Facts) -> Iterator[Problem]:
    """The problems of single ids in arenas, and of the live bytes of each backend."""
    for i in range(len(facts.name)):
        if facts.arena_of[i] < 0 or facts.offset[i] < 0 or facts.view_of[i] >= 0:
            continue
        alignment = facts.alignment[facts.arena_of[i]]
        arena = facts.arena_sizes[facts.arena_of[i], facts.chunk[i]]
        if facts.offset[i] % alignment:
            yield Problem("misaligned", f"{facts.label(i)} is at {facts.where(i)}, alignment {alignment}")
        if facts.shares[i] < 0 and facts.size[i] < facts.need[i]:
            yield Problem("too-small", f"{facts.label(i)} was given {facts.size[i]} bytes on "
                                       f"{facts.backend(facts.arena_of[i])}, which asks for {facts.need[i]}")
        if facts.offset[i] + max(facts.need[i], facts.nbytes[i]) > arena:
            yield Problem("out-of-bounds", f"{facts.label(i)} is at {facts.where(i)}, {arena} bytes")
    for b, live in enumerate(facts.live_bytes):
        room = sum(size for (owner, _), size in facts.arena_sizes.items() if owner == b)
        if not 0 <= live <= room:
            yield Problem("live-bytes", f"{live} bytes are live on {facts.backend(b)}, which has {room}")


def lives(facts: Facts, late: bool = False) -> list[Life]:
    """The lifetimes of all ids in arenas, from the graph and the program alone.

    The lifetime of a leaf begins with its load, that of a node with its computation, that of a copy when it is made; it
    ends with the last action that accesses the id or a view of it.  A copy that is made several times has several
    lifetimes.  Data kept for the next compute, and copy slots that queued computes fill at any time, are always live.
    `late`: fusion groups are computed where their last member stands.
    """
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    found = []

    def touch(i: int, time: int) -> None:
        i = facts.memory(i)
        if not facts.is_resident(i):
            birth.setdefault(i, time)
            last[i] = time

    always = facts.kept | facts.slots
    for i in always:
        touch(i, -1)
    end = 0
    for time, k, _, i in acts(facts, late=late):
        end, step = time + 1, facts.program.steps[k]
        if isinstance(step, Run):
            for p in facts.read_by(step, i, 0):
                if p >= 0:
                    touch(p, time)
            for s in facts.deps.get(i, ()):
                touch(s, time)
            touch(facts.into(step, i, 0), time)
        elif isinstance(step, WriteBack | FetchExperts):
            touch(step.locations[0].id, time)
        else:
            if not isinstance(step, Load):
                touch(step.tensor, time)
            if i >= facts.n_tensors and i in birth and i not in always:
                found.append(Life(birth.pop(i), last[i], i))
        touch(i, time)
    for i in readable(facts):
        if facts.memory(i) in birth:
            touch(i, end)
    for i in always:
        touch(i, end)
    found += [Life(birth[i], last[i], i) for i in birth]
    return sorted(found, key=lambda life: life.birth)


def _check_overlaps(facts: Facts, lifetimes: list[Life]) -> Iterator[Problem]:
    """The problems of lifetimes that overlap in the bytes of one buffer of an arena; `lifetimes` is sorted by birth.

    A sweep: `taken` has the ranges (start, stop, id) that are live at the present birth, sorted and disjoint; `death`
    is {id: end of its lifetime} of these.  A node that may reuse a range in place takes its entry over.
    """
    taken: list[tuple[int, int, int]] = []
    death: dict[int, int] = {}
    ends: list[tuple[int, int]] = []

    def give(i: int) -> None:
        del death[i]
        key = (facts.offset[i], facts.offset[i] + facts.need[i], i)
        del taken[bisect_left(taken, key)]

    for life in lifetimes:
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
    """The problem of lifetime `new`, which begins in bytes where `old` is live; None if `new` reuses them in place, as
    is allowed."""
    x, y = new.id, old.id
    both = f"{facts.label(x)} at {facts.where(x)}, written at event {new.birth}"
    theirs = f"{facts.label(y)} at {facts.where(y)}, needed until event {old.death}"
    if not (facts.is_inplace[x] and holder(facts, x) == holder(facts, y)):
        return Problem("overlap", f"{both}, overlaps {theirs}")
    if old.death > new.birth:
        lost = any(facts.memory(i) == y for i in readable(facts))
        return Problem("output-overwritten" if lost else "inplace-live", f"{both}, reuses {theirs}")
    group = facts.group_of.get(x)
    if group is not None and facts.group_of.get(y) != group:
        return Problem("inplace-live", f"{both}, reuses {theirs}, which the others of its group may read by then")
    slots = [k for k, p in enumerate(facts.reads[x]) if p >= 0 and facts.memory(p) == y]
    same = [k for k in slots if facts.layout[facts.reads[x][k]] == facts.layout[x]
            and facts.address(facts.reads[x][k]) == facts.address(x)]
    if not same:
        return Problem("inplace-layout", f"{both}, reuses {theirs}, which is no source of its layout")
    if len(slots) > 1 or not facts.tolerates[x] >> same[0] & 1:
        what = f"its sources {slots}; the kernel allows for one of mask {facts.tolerates[x]:#x}"
        return Problem("inplace-not-tolerated", f"{both}, reuses {theirs}, {what}")
    return None
