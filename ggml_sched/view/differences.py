"""The differences between two plans, such as of one graph by two policies, in two placements, or before and after a
change.

Tensors of both plans correspond by name, op and how many tensors of this name and op came before, so the two graphs may
be different objects; backends by name and how many backends of this name came before.  Owns the list and its words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import distinct, table

__all__ = ["Difference", "Differences", "differences"]

_NAMED = 3
"""The most names of tensors in one line of the list."""
_CALLER, _UNUSED = "the caller", "unused"
"""What has the inputs, and where a tensor is that no backend has."""


class Difference(NamedTuple):
    """One line of the list."""

    kind: str
    """"arena", "splits", "copies", "backend", "rule", "shared memory" or "graph"."""
    what: str
    """The backend, or the tensors, that differ."""
    one: str
    """The value in the first plan."""
    other: str
    """The value in the second plan."""
    tensors: tuple[tuple[int, int], ...] = ()
    """(id in the first plan, id in the second plan) of each tensor that differs; -1 for a plan without the tensor."""


@dataclass(frozen=True)
class Differences:
    """The differences of two plans, in the order of their kinds; equal plans have none."""

    names: tuple[str, str]
    """The names of the two plans."""
    entries: tuple[Difference, ...]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.entries)

    def __str__(self) -> str:
        """The list as a table."""
        if not self.entries:
            return f"{self.names[0]} and {self.names[1]} are equal"
        rows = [("kind", "what", *self.names), *(entry[:4] for entry in self.entries)]
        return table(rows, "<<<", underlined=True)


def differences(plan: Plan, other: Plan, names: Sequence[str] = ()) -> Differences:
    """The result of `Plan.differences`."""
    if not isinstance(other, Plan):
        raise TypeError(f"not a Plan: {other!r}")
    pairs, alone = _pairs(plan, other)
    found = [*_arenas(plan, other), *_counts(plan, other), *_graph(plan, other, alone), *_placed(plan, other, pairs),
             *_shared(plan, other, pairs)]
    return Differences(plan_names(plan, other, names), tuple(found))


def plan_names(plan: Plan, other: Plan, names: Sequence[str]) -> tuple[str, str]:
    """The names of two plans: those given, else their policies if these differ, else "first" and "second"."""
    if names:
        if len(names) != 2:
            raise ValueError(f"names of two plans, not {len(names)}: {tuple(names)}")
        return names[0], names[1]
    return (plan.policy, other.policy) if plan.policy != other.policy else ("first", "second")


# -- which tensors correspond ----------------------------------------------------------------------------


def _pairs(plan: Plan, other: Plan) -> tuple[list[tuple[int, int]], tuple[list[int], list[int]]]:
    """Pairs of ids of corresponding tensors, in the first plan's order; and, for each plan, the ids of tensors that it
    alone has."""
    one, two = _keyed(plan), _keyed(other)
    pairs = [(i, two[key]) for key, i in one.items() if key in two]
    return pairs, ([i for key, i in one.items() if key not in two], [i for key, i in two.items() if key not in one])


def _keyed(plan: Plan) -> dict[tuple[str, str, int], int]:
    """{(name, op, how many tensors of this name and op came before): id}, in the caller's order of execution."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for t in (*plan.given_graph.leafs, *plan.given_graph.nodes):
        found[t.name, t.op, seen[t.name, t.op]] = plan.graph.id_of(t)
        seen[t.name, t.op] += 1
    return found


# -- the entries ----------------------------------------------------------------------------------------


def _arenas(plan: Plan, other: Plan) -> Iterator[Difference]:
    """Bytes of arenas, and the most bytes alive at once, backend by backend."""
    sizes = [{name: (size, live)
              for name, size, live in zip(_backend_names(p), p.buffer_sizes, p.live_bytes, strict=True)}
             for p in (plan, other)]
    for name in dict.fromkeys([*sizes[0], *sizes[1]]):
        there = [of.get(name) for of in sizes]
        if there[0] != there[1]:
            one, two = ("no such backend" if of is None else _bytes(*of) for of in there)
            yield Difference("arena", name, one, two)
    total = [sum(p.buffer_sizes) for p in (plan, other)]
    if total[0] != total[1] and len(sizes[0] | sizes[1]) > 1:
        yield Difference("arena", "all together", f"{total[0]:,} bytes", f"{total[1]:,} bytes")


def _bytes(size: int, live: int) -> str:
    return f"{size:,} bytes" if size == live else f"{size:,} bytes, {live:,} alive at once"


def _counts(plan: Plan, other: Plan) -> Iterator[Difference]:
    """How many splits, and the copies of one compute from each backend to each other."""
    counts = [len(p.splits) for p in (plan, other)]
    if counts[0] != counts[1]:
        yield Difference("splits", "all", str(counts[0]), str(counts[1]))
    copied = [_copied(p) for p in (plan, other)]
    for key in dict.fromkeys([*copied[0], *copied[1]]):
        there = [of.get(key, (0, 0)) for of in copied]
        if there[0] != there[1]:
            one, two = (f"{n} of {nbytes:,} bytes" if n else "none" for n, nbytes in there)
            yield Difference("copies", f"{key[0]} to {key[1]}", one, two)


def _copied(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """{(name of the backend that a copy is from, of the one it is for): (number of copies, their bytes)}."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    names = dict(zip(plan.backends, _backend_names(plan), strict=True))
    for copy in plan.copies:
        source = plan.backend_of(copy.tensor.root)
        key = _CALLER if source is None else names[source], names[copy.backend]
        n, nbytes = found.get(key, (0, 0))
        found[key] = n + 1, nbytes + copy.nbytes
    return found


def _graph(plan: Plan, other: Plan, alone: tuple[list[int], list[int]]) -> Iterator[Difference]:
    """Tensors that one graph alone has."""
    for p, ids in ((plan, alone[0]), (other, alone[1])):
        if ids and p is plan:
            yield Difference("graph", _listed(p, ids), "there", "none", tuple((i, -1) for i in ids))
        elif ids:
            yield Difference("graph", _listed(p, ids), "none", "there", tuple((-1, i) for i in ids))


def _placed(plan: Plan, other: Plan, pairs: Sequence[tuple[int, int]]) -> Iterator[Difference]:
    """Tensors that are on different backends in the two plans, one entry for each pair of backends; and nodes that are
    on the same backend by different rules, one entry for each pair of rules."""
    moved: dict[tuple[str, str], list[tuple[int, int]]] = {}
    ruled: dict[tuple[str, str], list[tuple[int, int]]] = {}
    # Index -1, of a tensor that no backend has, is the last name.
    names = [[*_backend_names(p), _UNUSED] for p in (plan, other)]
    for i, k in pairs:
        t = plan.graph.tensors[i]
        if t.op != "NONE" and not t.computes:
            continue        # a view is where its root is
        where = names[0][plan.data.backend_index(i)], names[1][other.data.backend_index(k)]
        rules = plan.data.rule(i), other.data.rule(k)
        if where[0] != where[1]:
            moved.setdefault(where, []).append((i, k))
        elif rules[0] != rules[1] and t.computes:
            ruled.setdefault(rules, []).append((i, k))
    for (one, two), those in sorted(moved.items(), key=lambda item: -len(item[1])):
        yield Difference("backend", _listed(plan, [i for i, _ in those]), one, two, tuple(those))
    for those in sorted(ruled.values(), key=lambda those: -len(those)):
        i, k = those[0]
        yield Difference("rule", _listed(plan, [i for i, _ in those]), plan.data.reason(i, plan.assigned_by),
                         other.data.reason(k, other.assigned_by),
                         tuple(those))


def _backend_names(plan: Plan) -> list[str]:
    return distinct((backend.name for backend in plan.backends), (_CALLER, _UNUSED))


def _shared(plan: Plan, other: Plan, pairs: Sequence[tuple[int, int]]) -> Iterator[Difference]:
    """Nodes that only one of the plans writes in place over a source."""
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for i, k in pairs:
        there = plan.data.is_inplace(i), other.data.is_inplace(k)
        if there[0] != there[1]:
            found[there[0]].append((i, k))
    for first, those in found.items():
        if those:
            words = "in place of a source", "in memory of their own"
            one, two = words if first else reversed(words)
            yield Difference("shared memory", _listed(plan, [i for i, _ in those]), one, two, tuple(those))


def _listed(plan: Plan, ids: Sequence[int]) -> str:
    """The name of a single tensor; for several, how many they are, and their names with # in place of numbers."""
    if len(ids) == 1:
        return plan.name_of(ids[0]) or f"{plan.graph.tensors[ids[0]].op} (tensor {ids[0]})"
    masked = [*dict.fromkeys(re.sub(r"\d+", "#", plan.name_of(i)) or plan.graph.tensors[i].op for i in ids)]
    more = ", ..." if len(masked) > _NAMED else ""
    return f"{len(ids)} tensors: {', '.join(masked[:_NAMED])}{more}"
