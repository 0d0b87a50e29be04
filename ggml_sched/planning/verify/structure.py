"""Checks of splits, backends and steps, and that every tensor which a compute accesses has an address."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ggml_sched.planning.program import Copy, CopyExperts, Fetch, FetchExperts, Load, Location, Run, Step
from ggml_sched.planning.verify.facts import Facts, acts
from ggml_sched.planning.verify.problem import Problem

__all__ = ["check_structure"]


def check_structure(facts: Facts) -> list[Problem]:
    """The problems of indices; if there are none, of splits, groups and addresses; if there are none, of steps.

    Each check uses indices and addresses that the one before has found to be right.
    """
    found = _check_indices(facts)
    if found:
        return found
    found = [*_check_splits(facts), *_check_nodes(facts), *_check_groups(facts), *_check_places(facts)]
    return found or [*_check_steps(facts)]


def _check_indices(facts: Facts) -> list[Problem]:
    """Check that every index is in its range, so that the other checks can use it."""
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
        arena_of, chunk, shares = facts.arena_of[i], facts.chunk[i], facts.shares[i]
        expect(-1 <= arena_of < n_backends, f"{facts.label(i)} lies on backend {arena_of} of {n_backends}")
        expect(arena_of < 0 or (arena_of, chunk) in facts.arena_sizes,
               f"{facts.label(i)} lies in chunk {chunk} of {facts.backend(arena_of)}, which has no such")
        expect(-1 <= shares < total, f"{facts.label(i)} shares the memory of id {shares} of {total}")
    for i in range(n):
        src, reads = facts.src[i], facts.reads[i]
        expect(len(src) == len(reads) and all((s < 0) == (p < 0) for s, p in zip(src, reads, strict=True))
               and max(reads, default=-1) < total, f"{facts.label(i)} reads ids {reads} in place of {src}")
    for group in facts.groups:
        expect(all(0 <= k < len(facts.nodes) for k in group), f"nodes {group} of {len(facts.nodes)} are a group")
    for k, step in enumerate(facts.program.steps):
        if not _fits(facts, k, step):
            expect(False, f"step {k} of {len(facts.program)} points at nothing: {step}")
    return found


def _fits(facts: Facts, k: int, step: Step) -> bool:
    """Whether all indices of step k are in their ranges."""
    n, n_nodes, n_steps = facts.n_tensors, len(facts.nodes), len(facts.program)
    if not 0 <= step.backend < len(facts.backends):
        return False
    if not all(0 <= wait.step < n_steps and wait.back >= (wait.step >= k) for wait in step.waits):
        return False
    if not all(locations and all(0 <= at.id < len(facts.name) for at in locations) for locations in _slots_of(step)):
        return False
    if not isinstance(step, Run):
        named = (step.tensor, *((step.ids,) if isinstance(step, CopyExperts | FetchExperts) else ()),
                 *(step.weights if isinstance(step, FetchExperts) else ()))
        return all(0 <= i < n for i in named)
    return 0 <= step.first <= step.last < n_nodes and all(
        step.first <= read.position <= step.last and 0 <= read.slot < len(facts.src[facts.nodes[read.position]])
        for read in step.reads)


def _slots_of(step: Step) -> list[tuple[Location, ...]]:
    """For each copy or leaf whose location a step names, the location of each of its slots."""
    if isinstance(step, Run):
        return [read.locations for read in step.reads] + ([step.into] if step.into else [])
    return [step.locations]


def _check_splits(facts: Facts) -> list[Problem]:
    """Check that the splits cover the nodes in the order of `sequence`, and make copies for their own backend only,
    except fetches, which may be for the backend of a later split."""
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
            if facts.copies[c][1] != split.backend and not facts.is_fetched(facts.n_tensors + c):
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
    """Check that each node is on the backend of its split, which supports it, and reads copies of the right layout."""
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


def _check_groups(facts: Facts) -> Iterator[Problem]:
    """Check that one run computes all members of a fusion group, and that only inner members are declared unwritten."""
    taken: set[int] = set()
    for group in facts.groups:
        what = f"the group of nodes {list(group)}"
        if len(group) < 2 or any(a >= b for a, b in pairwise(group)):
            yield Problem("bad-group", f"{what} is not of several, ascending")
            continue
        for i in (facts.nodes[k] for k in group):
            if not facts.computes(i):
                yield Problem("bad-group", f"{what}: {facts.label(i)} computes nothing")
            if i in taken:
                yield Problem("bad-group", f"{what}: {facts.label(i)} is in another, too")
            taken.add(i)
        if not any(isinstance(step, Run) and step.first <= group[0] and group[-1] <= step.last
                   for step in facts.program.steps):
            yield Problem("bad-group", f"{what} is no part of one run")
    inside = {facts.nodes[k] for group in facts.groups for k in group[:-1]}
    for i in sorted(facts.inner - inside):
        yield Problem("bad-group", f"{facts.label(i)} is no inner member of a group, and declared unwritten")


def _check_steps(facts: Facts) -> Iterator[Problem]:
    """Check that the program belongs to this plan: every node runs once, with the plan's backends and addresses."""
    ran: list[int] = []
    for k, step in enumerate(facts.program.steps):
        for location in (location for locations in _slots_of(step) for location in locations):
            i = location.id
            if location[1:] != (facts.arena_of[i], facts.chunk[i], facts.offset[i]):
                what = f"step {k} takes {facts.label(i)} to be at {location}"
                yield Problem("bad-step", f"{what}, it is at {facts.where(i)}")
        if isinstance(step, Run):
            nodes = [i for i in facts.nodes[step.first : step.last + 1] if facts.computes(i)]
            ran += nodes
            yield from _check_run(facts, k, step, nodes)
        elif isinstance(step, Fetch):
            if step.backend not in facts.stores & (facts.resident[step.tensor] or set()):
                yield Problem("bad-step", f"step {k} fetches {facts.label(step.tensor)} in the queue of "
                                          f"{facts.backend(step.backend)}, which is not its store")
        elif isinstance(step, FetchExperts):
            if {facts.banks.get(i) for i in step.weights} != {facts.banks.get(step.tensor)} or (
                    facts.banks.get(step.tensor, (-1,))[0] != step.backend):
                yield Problem("bad-step", f"step {k} fetches experts of {facts.label(step.tensor)} in the queue of "
                                          f"{facts.backend(step.backend)}, which is not the store of their bank")
        elif isinstance(step, (Load, Copy)) and step.backend not in _ends(facts, step):
            yield Problem("bad-step", f"step {k} fills {facts.label(step.locations[0].id)} from the queue of "
                                      f"{facts.backend(step.backend)}, where neither end of it is")
    if ran != [i for i in facts.nodes if facts.computes(i)]:
        yield Problem("not-run", f"the program runs {len(ran)} nodes, and not each of the graph's once, in order")


def _check_run(facts: Facts, k: int, step: Run, nodes: list[int]) -> Iterator[Problem]:
    """Check that step k computes its nodes on the plan's backend, from and into the memory that the plan gives."""
    for i in nodes:
        what = f"step {k} on {facts.backend(step.backend)} runs {facts.label(i)}"
        if facts.assigned[i] != step.backend:
            yield Problem("bad-step", f"{what}, which the plan puts on {facts.backend(facts.assigned[i])}")
        read, copy = facts.read_by(step, i, 0), facts.write_backs.get(i)
        if read != facts.reads[i]:
            yield Problem("bad-step", f"{what} on ids {read}, the plan on {facts.reads[i]}")
        if facts.into(step, i, 0) != (i if copy is None else facts.n_tensors + copy):
            yield Problem("bad-step", f"{what} into other memory than the plan")


def _ends(facts: Facts, step: Load | Copy) -> set[int]:
    """The backends in whose queue a load or copy may be: that of the destination and, for a copy, those that hold the
    source, or can read it if it is a resident."""
    ends = {facts.arena_of[step.locations[0].id]}
    if isinstance(step, Copy):
        ends |= facts.resident[step.tensor] or {facts.arena_of[facts.memory(step.tensor)]}
    return ends


def _check_places(facts: Facts) -> Iterator[Problem]:
    """Check that residents stay in place, views lie in their roots, and every accessed tensor has an address."""
    for i in range(facts.n_tensors):
        readers = facts.resident[i]
        if readers is None:
            continue
        if facts.arena_of[i] >= 0 or facts.offset[i] >= 0:
            yield Problem("resident-moved", f"{facts.label(i)} has memory, and is put at {facts.where(i)}")
        elif facts.view_of[i] < 0 and facts.assigned[i] not in readers:
            yield Problem("resident-moved", f"{facts.label(i)} is declared to be on "
                                            f"{facts.backend(facts.assigned[i])}, which cannot read it")
    touched = set()
    for act in acts(facts):
        touched.add(act.id)
        step = facts.program.steps[act.step]
        if isinstance(step, Run):
            touched.update(p for p in facts.reads[act.id] if p >= 0)
            touched.update(facts.deps.get(act.id, ()))
        elif not isinstance(step, Load):
            touched.add(step.tensor)
            if isinstance(step, FetchExperts):
                touched.update(location.id for location in step.locations)
    for i in sorted(touched):
        root = facts.memory(i)
        if facts.is_resident(i):
            continue
        start = facts.offset[root] + facts.view_offs[i]
        if min(facts.arena_of[i], facts.offset[i], facts.arena_of[root], facts.offset[root]) < 0:
            yield Problem("unplaced", f"{facts.label(i)} has no address")
        elif root != i and facts.address(i) != (facts.address(root)[0], start):
            yield Problem("view-misplaced", f"{facts.label(i)} begins at {facts.offset[i]}; its place in "
                                            f"{facts.label(root)} at {facts.where(root)} is {start}")
        elif i >= facts.n_tensors and facts.arena_of[i] != facts.copies[i - facts.n_tensors][1]:
            yield Problem("wrong-backend", f"{facts.label(i)} lies at {facts.where(i)}")
