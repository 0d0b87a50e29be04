"""A bound by branch and bound over numbers of columns.

The bound by multipliers is a mean of paths (`Bound.mixture`), in which the number of stages with their bytes on a
device, or of entries into a device, need not be whole.  Such a number is that of the columns in a set; a path has a
whole number of them.  So the paths are divided in two: those with at most the whole number below the mean, and those
with at least the one above it.  Each part is bounded by multipliers again, where the limit of the number is one more
budget, and the part with the least bound is divided next (branch and bound: Land and Doig 1960; on rows of a master
problem: Barnhart et al. 1998).  Several sets are tried, and the one whose parts have the highest bounds is used (strong
branching: Applegate et al. 1995).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._chain import prefixes, suffixes
from ggml_sched.placement.solve.bound import Bound, Relaxation, bound_from, cheapest, constant, relax
from ggml_sched.placement.solve.counts import Counts
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.search import improve, repair

__all__ = ["Branches"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Marks = NDArray[np.int8]

STEP = 0.006
"""Numbers of bytes that differ by at most this part of a budget have one set."""
BY_BYTES, BY_ENTRIES, BY_GROUPS, BY_COLUMNS, BY_STATES = 4, 2, 3, 3, 2
"""How many ways of each kind are tried to divide one part; those by groups, columns and states only if there are no
others."""
WHOLE, NEARLY_WHOLE = 0.01, 1e-5
"""A number of columns that differs from a whole one by at most `WHOLE` is taken for whole, unless all numbers are: then
one that differs by at most `NEARLY_WHOLE`."""
LATEST = 30
"""So many paths of earlier bounds, the latest, begin the bound of a part."""
CLOSE = 1e-5
"""The bound of a part is the best to this part of it, nearly."""
PER_PATH, PER_BOUND = 4000, 16000
"""One path, and one bound, take as long as so many more columns would."""
SLACK = 1e-9
"""The part by which two sums of the same reduced seconds, in different order, may differ, and more."""
MAX_ROWS = 24
"""A part is divided no more after so many divisions: with many rows, multipliers take long."""


class _Row(NamedTuple):
    """A path has at most `most` of the columns of a set."""

    marked: Marks
    """1 for a column of the set, 0 for others."""
    most: int


class _Cut(NamedTuple):
    """What the paths of one part of a part keep: one more row, or more closed states."""

    row: _Row | None
    closed: NDArray[np.uint8] | None


class _Part(NamedTuple):
    """Paths that keep some rows."""

    value: float
    """Seconds that no such path within the budgets undercuts."""
    number: int
    rows: tuple[_Row, ...]
    closed: NDArray[np.uint8] | None
    """1 for a state in which no such path is, before a stage or after the last one [stages + 1, states]; None: none."""
    bound: Bound
    kept: Ints | None
    """Columns: a path that keeps the rows, fits, and costs less than `stop` has no others.  None: all columns."""


class Branches:
    """Parts of the paths of one problem, and their bounds; `bound`: that of all paths.  A call of `best` goes on where
    the last one ended."""

    def __init__(self, problem: Problem, bound: Bound) -> None:
        self.problem: Problem = problem
        self.bound: Bound = bound
        self.path: Ints | None = None
        """The cheapest path met that fits."""
        self._met: list[Relaxation] = list(bound.relaxations)
        self._of_bytes: list[tuple[int, int, Marks]] = [
            (row, step, marked) for row in range(len(problem.scarce)) for step, marked in self._by_bytes(row)]
        entries = [((problem.after == state) & (problem.before != state)).astype(np.int8)
                   for state in range(problem.n_states)]
        self._of_entries: list[Marks] = [marked for marked in entries if marked.any()]
        self._at: Ints = np.arange(len(problem.classes) + 1)
        self._effort = 0
        self._heap: list[_Part] = [_Part(bound.value, 0, (), None, bound, None)]
        self._count = 1
        self._last: list[Relaxation] = []
        self._done = math.inf       # the least bound of the parts that are divided no more

    def _by_bytes(self, row: int) -> Iterator[tuple[int, Marks]]:
        """(Bytes more than the set before, the set of columns with at least so many bytes on a scarce device)."""
        bytes_, step, last = self.problem.memory[:, row], STEP * float(self.problem.budget[row]), 0
        for value in np.unique(bytes_).tolist():
            if value - last > step:
                yield value - last, (bytes_ >= value).astype(np.int8)
                last = value

    @property
    def value(self) -> float:
        """The least bound of the parts that are left; infinite where no path costs less than `stop` of some call."""
        return min([self._done, *(part.value for part in self._heap[:1])])

    @property
    def is_stuck(self) -> bool:
        """Whether the part with the least bound is divided no more."""
        return self._done <= self.value < math.inf

    @property
    def mixture(self) -> list[Relaxation]:
        """The paths of which the least bound of a part is a mean; empty where no part is left."""
        if self.is_stuck:
            return self._last
        return self._heap[0].bound.mixture if self._heap else []

    def best(self, stop: float, effort: int) -> float:
        """A bound in seconds, at most `stop`, which is at most that of the call before; paths are sought over about
        `effort` columns.  `path` may cost less than `stop`."""
        self._effort = effort
        heap = self._heap
        while heap and heap[0].value < min(stop, self._done) and self._effort > 0:
            part = heappop(heap)
            children = self._children(part, stop) if part.bound.mixture else []
            if not children and part.value < self._done:
                self._done, self._last = part.value, part.bound.mixture
            for child in children:
                if child.value < stop:
                    heappush(heap, child)
        for one in self.mixture:
            path = repair(self.problem, one.path, self.bound.multipliers)
            if path is not None:
                self._keep(path)
        return min(stop, self.value)

    def _children(self, part: _Part, stop: float) -> list[_Part]:
        """The two parts of a part; none if it is divided no more."""
        best, chosen = (-math.inf, -math.inf), list[_Part]()
        columns = _Columns(self.problem, part, stop)
        planes = part.bound.mixture + [of for _, of in part.bound.basis if isinstance(of, Relaxation)]
        known = _Known([one for one in {id(one): one for one in (*self._met[-LATEST:], *planes)}.values()
                        if columns.has(one.path)], columns)
        for cuts in self._cuts(part):
            children = list[_Part]()
            for cut in cuts:
                bound = self._bounded(columns, cut, known, stop, best[0])
                rows = part.rows if cut.row is None else (*part.rows, cut.row)
                children.append(_Part(max(part.value, bound.value), self._count, rows, cut.closed, bound, columns.kept))
                self._count += 1
                if children[-1].value < min(stop, best[0]):
                    break       # the least bound of these parts is not the highest
            values = [min(stop, child.value) for child in children]
            if len(values) == 2 and (min(values), sum(values)) > best:
                best, chosen = (min(values), sum(values)), children
            if best[0] >= stop or self._effort <= 0:
                break
        return chosen

    def _bounded(self, columns: _Columns, cut: _Cut, known: _Known, stop: float, wanted: float) -> Bound:
        """The bound by multipliers of the paths of a part that keep one more row, or are in no more closed states; a
        lower one if it is below `wanted`."""
        problem, rows = columns.problem_with(cut.row), len(self.problem.budget)
        nothing = Bound(-np.inf, np.zeros(len(problem.budget)))
        paths, memory, basis = known.paths, known.bytes_with(cut.row), known.basis
        if cut.closed is not None:
            near = [i for i, one in enumerate(paths) if not cut.closed[self._at, self._states(one.path)].any()]
            basis, paths, memory = [], [paths[i] for i in near], memory[near]
        if not paths:
            first = relax(problem, np.append(columns.multipliers, [0.0] * (cut.row is not None)), cut.closed)
            if first is None:
                return Bound(np.inf, np.zeros(len(problem.budget)))
            basis, memory = [], first.memory[None]
            paths = [first._replace(path=columns.kept[first.path], memory=first.memory[:rows])]
        if cut.row is not None and basis:
            basis = [*basis, ("over", len(problem.budget) - 1)]     # the part's mixture exceeds the new row
        found = bound_from(problem, nothing, paths, memory, stop, CLOSE, wanted, cut.closed, basis, columns.kept, rows)
        self._effort -= len(found.relaxations) * (len(problem.cost) + PER_PATH) + PER_BOUND
        self._met += found.relaxations
        if found.relaxations:
            fit = (np.array([one.memory for one in found.relaxations]) <= self.problem.budget).all(1)
            for i in np.flatnonzero(fit).tolist():
                if self.path is None or found.relaxations[i].cost < self.problem.cost_of(self.path):
                    self._keep(found.relaxations[i].path)
        return found

    def _states(self, path: Ints) -> Ints:
        """The states of a path before its first stage and after each stage."""
        return np.append(self.problem.before[path[0]], self.problem.after[path])

    def _cuts(self, part: _Part) -> Iterator[tuple[_Cut, _Cut]]:
        """The ways to divide a part that are tried, as what the paths of its two parts keep."""
        stages = len(self.problem.classes)
        sets = self._sets(part) if len(part.rows) < MAX_ROWS else []
        for marked, mean in sets:
            below = math.floor(mean)
            yield _Cut(_Row(marked, below), part.closed), _Cut(_Row(1 - marked, stages - below - 1), part.closed)
        if sets or self._has_trail(part):
            return
        states = np.stack([self._states(one.path) for one in part.bound.mixture])
        there = np.zeros((stages + 1, self.problem.n_states))
        for row, share in zip(states, part.bound.shares, strict=True):
            there[self._at, row] += share
        half = np.minimum(there, 1 - there)
        for number in np.argsort(-half, axis=None, kind="stable")[:BY_STATES].tolist():
            stage, state = divmod(number, self.problem.n_states)
            if half[stage, state] > NEARLY_WHOLE:
                never, always = (np.zeros(there.shape, np.uint8) if part.closed is None else part.closed.copy()
                                 for _ in range(2))
                never[stage, state] = 1
                always[stage, np.arange(self.problem.n_states) != state] = 1
                yield _Cut(None, never), _Cut(None, always)

    def _has_trail(self, part: _Part) -> bool:
        """Whether a part whose paths have whole numbers of each column, in the mean, has a path with these columns: the
        cheapest one, which costs as much as the bound.  Then that is the part's mixture."""
        problem, mixture = self.problem, part.bound.mixture
        paths = np.stack([one.path for one in mixture])
        used, where = np.unique(paths, return_inverse=True)
        times = np.bincount(where.reshape(-1), np.repeat(part.bound.shares, paths.shape[1]))
        if np.abs(times - np.rint(times)).max() > NEARLY_WHOLE:
            return False
        path = self._ordered(used, np.rint(times).astype(np.int64), paths)
        if path is None or not problem.fits(path):
            return False
        cost = problem.cost_of(path)
        if cost > part.value * (1 + 2 * CLOSE):
            return False
        one = Relaxation(part.bound.multipliers, part.value, path, cost, problem.memory_of(path))
        part.bound.mixture[:], part.bound.shares[:] = [one], [1.0]
        self._keep(path)
        return True

    def _ordered(self, used: Ints, times: Ints, paths: Ints) -> Ints | None:
        """A path with each of the columns `used` so many times: one with the states of one of `paths`, or in the order
        of an Euler trail; None if these are no such paths."""
        group, columns = self.problem.group, np.repeat(used, times)
        columns = columns[np.argsort(group[columns], kind="stable")]
        for like in group[paths]:
            order = np.argsort(like, kind="stable")
            if len(columns) == len(like) and (like[order] == group[columns]).all():
                path = np.empty_like(columns)
                path[order] = columns
                return path
        counts = Counts(self.problem, used)
        begin = counts.begins == counts.first + self.problem.before[paths[0, 0]]
        return counts.path(np.concatenate([times, begin.astype(np.int64)]))

    def _keep(self, path: Ints) -> None:
        """Keep a path that fits, after exchanges, if it is the cheapest."""
        path = improve(self.problem, path, self.bound.multipliers)
        if self.path is None or self.problem.cost_of(path) < self.problem.cost_of(self.path):
            self.path = path

    def _sets(self, part: _Part) -> list[tuple[Marks, float]]:
        """(A set of columns, the mean number of its columns, which is not whole) for each set to try."""
        problem, worth = self.problem, part.bound.multipliers
        paths = np.stack([one.path for one in part.bound.mixture])
        used, where = np.unique(paths, return_inverse=True)
        # How often each used column is in the mean of the paths.
        times = np.bincount(where.reshape(-1), np.repeat(part.bound.shares, paths.shape[1]))
        by_bytes = [(float(marked[used] @ times), step * float(worth[row]), marked)
                    for row, step, marked in self._of_bytes]
        by_entries = [(float(marked[used] @ times), 1.0, marked) for marked in self._of_entries]
        for whole in (WHOLE, NEARLY_WHOLE):
            sets = [*largest(by_bytes, BY_BYTES, whole), *largest(by_entries, BY_ENTRIES, whole)]
            for numbers, most in ((problem.group, BY_GROUPS), (np.arange(len(problem.cost)), BY_COLUMNS)):
                if not sets:
                    own, where = np.unique(numbers[used], return_inverse=True)
                    sets = [((numbers == own[int(i)]).astype(np.int8), mean) for i, mean in largest([
                        (float(mean), 1.0, np.array(i)) for i, mean in enumerate(np.bincount(where, times))], most,
                        whole)]
            if sets:
                break
        return sets


class _Columns:
    """The columns of a part, without those that no path of less than `stop` seconds has: the least reduced seconds of
    the paths with such a column, at the multipliers of the part's bound, are not below `stop`."""

    def __init__(self, problem: Problem, part: _Part, stop: float) -> None:
        self.multipliers: Floats = part.bound.multipliers
        """The multipliers of the part's bound, of bytes and rows."""
        self.whole: Problem = problem
        self.rows: tuple[_Row, ...] = part.rows
        self.basis = part.bound.basis
        own = problem if part.kept is None else limited(problem, part.kept)
        own = with_rows(own, [(row.marked if part.kept is None else row.marked[part.kept], row.most)
                              for row in part.rows])
        left = np.flatnonzero(least_through(own, self.multipliers) < stop * (1 + SLACK))
        self.kept: Ints = left if part.kept is None else part.kept[left]
        """The columns, as indices of the columns of the whole problem."""
        self.problem: Problem = limited(own, left)
        """The problem of these columns alone, with the rows as budgets."""
        self._wider: Problem | None = None
        self._is_kept = np.zeros(len(problem.cost), bool)
        self._is_kept[self.kept] = True

    def has(self, path: Ints) -> bool:
        """Whether a path has kept columns alone."""
        return bool(self._is_kept[path].all())

    def problem_with(self, row: _Row | None) -> Problem:
        """The problem with one more row, or without one; the next call changes it."""
        if row is None:
            return self.problem
        if self._wider is None:
            self._wider = with_rows(self.problem, [(row.marked[self.kept], row.most)])
        self._wider.memory[:, -1] = row.marked[self.kept]
        self._wider.budget[-1] = row.most
        return self._wider


class _Known:
    """Paths of the columns of a part, whose planes begin the bounds of its parts; the arrays that all of these use."""

    def __init__(self, paths: list[Relaxation], columns: _Columns) -> None:
        self.paths: list[Relaxation] = paths
        rows, stages = columns.rows, len(columns.whole.classes)
        self._columns: Ints = np.array([one.path for one in paths], np.int64).reshape(len(paths), stages)
        held = np.array([one.memory for one in paths], np.int64).reshape(len(paths), len(columns.whole.budget))
        counted = [row.marked[self._columns].sum(1, dtype=np.int64) for row in rows]
        self._bytes: Ints = np.column_stack([held, *counted, np.zeros(len(paths), np.int64)])
        self.basis: list[tuple[str, int]] = begun(columns.basis, paths)
        """The basis of the part's bound."""

    def bytes_with(self, row: _Row | None) -> Ints:
        """Bytes of the paths, and the numbers of their columns in the sets of all rows [paths, budgets]; with those of
        one more row, the next call changes them."""
        if row is None:
            return np.ascontiguousarray(self._bytes[:, :-1])
        self._bytes[:, -1] = row.marked[self._columns].sum(1, dtype=np.int64)
        return self._bytes


def begun(basis: Sequence[tuple[str, int | Relaxation]], known: Sequence[Relaxation]) -> list[tuple[str, int]]:
    """A basis with the numbers of its paths among the `known` ones; empty if one of them is not known."""
    number = {id(one): i for i, one in enumerate(known)}
    found = [(kind, of if isinstance(of, int) else number.get(id(of), -1)) for kind, of in basis]
    return found if all(of >= 0 for _, of in found) else []


def limited(problem: Problem, kept: Ints) -> Problem:
    """A problem of some columns of another, in the same order.  `pattern`, `before`, `after` and `bytes` stay those of
    the other."""
    made = copy.copy(problem)
    made.cost, made.memory, made.group = problem.cost[kept], problem.memory[kept], problem.group[kept]
    made.first = np.searchsorted(kept, problem.first)
    return made


def with_rows(problem: Problem, rows: Sequence[tuple[Marks, int]]) -> Problem:
    """A problem with (marks of its columns, most marks of a path) as further budgets."""
    made = copy.copy(problem)
    made.memory = np.column_stack([problem.memory, *(marked for marked, _ in rows)])
    made.budget = np.append(problem.budget, np.array([most for _, most in rows], np.int64))
    made.total = np.append(problem.total, np.full(len(rows), float(len(problem.classes))))
    return made


def least_through(problem: Problem, multipliers: Floats) -> Floats:
    """For each column a bound of the paths with this column, in seconds."""
    reduced = problem.cost + problem.memory @ multipliers
    table, _ = cheapest(problem, reduced)
    before, after = prefixes(problem.classes, table, problem.start), suffixes(problem.classes, table)
    around = np.full(table.shape, np.inf)
    np.minimum.at(around, problem.classes, before[:-1, :, None] + after[1:, None, :])
    value = float((problem.start + after[0]).min())
    found: Floats = reduced + around.reshape(-1)[problem.group] + constant(problem, multipliers, value)
    return found


def largest(of: Sequence[tuple[float, float, Marks]], most: int, whole: float) -> list[tuple[Marks, float]]:
    """(Set, mean) for the `most` of these (mean, weight, set) whose means are farthest from whole numbers, times their
    weights; those with means that differ by at most `whole` from a whole number are left out."""
    far = [(broken(mean, whole) * weight, i) for i, (mean, weight, _) in enumerate(of)]
    order = sorted((each for each in far if each[0] > 0), key=lambda each: (-each[0], each[1]))
    return [(of[i][2], of[i][0]) for _, i in order[:most]]


def broken(number: float, whole: float) -> float:
    """How far a number is from the nearest whole one; 0 if it is at most `whole`."""
    far = abs(number - round(number))
    return far if far > whole else 0.0
