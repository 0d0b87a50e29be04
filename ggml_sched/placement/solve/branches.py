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
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve.bound import Bound, Relaxation, bound_from
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.search import improve

__all__ = ["Branches"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Marks = NDArray[np.int8]

STEP = 0.006
"""Numbers of bytes that differ by at most this part of a budget have one set."""
BY_BYTES, BY_ENTRIES, BY_GROUPS, BY_COLUMNS = 4, 2, 3, 3
"""How many sets of each kind are tried for one part; those of groups and columns only if there are no others."""
WHOLE, NEARLY_WHOLE = 0.01, 1e-5
"""A number of columns that differs from a whole one by at most `WHOLE` is taken for whole, unless all numbers are: then
one that differs by at most `NEARLY_WHOLE`."""
LATEST = 30
"""So many paths of earlier bounds, the latest, begin the bound of a part."""
CLOSE = 1e-5
"""The bound of a part is the best to this part of it, nearly."""
PER_PATH, PER_BOUND = 4000, 16000
"""One path, and one bound, take as long as so many more columns would."""
MAX_ROWS = 24
"""A part is divided no more after so many divisions: with many rows, multipliers take long."""


class _Row(NamedTuple):
    """A path has at most `most` of the columns of a set."""

    marked: Marks
    """1 for a column of the set, 0 for others."""
    most: int


class _Part(NamedTuple):
    """Paths that keep some rows."""

    value: float
    """Seconds that no such path within the budgets undercuts."""
    number: int
    rows: tuple[_Row, ...]
    bound: Bound


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
        self._effort = 0
        self._heap: list[_Part] = [_Part(bound.value, 0, (), bound)]
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
            children = self._children(part, stop)
            if children is None and part.value < self._done:
                self._done, self._last = part.value, part.bound.mixture
            for value, rows, bound in children or ():
                if value < stop:
                    heappush(heap, _Part(value, self._count, rows, bound))
                    self._count += 1
        return min(stop, self.value)

    def _children(self, part: _Part, stop: float) -> list[tuple[float, tuple[_Row, ...], Bound]] | None:
        """The two parts of a part, (bound in seconds, rows, bound) for each; None if it is divided no more."""
        best, chosen = (-math.inf, -math.inf), None
        for marked, mean in self._sets(part) if len(part.rows) < MAX_ROWS else ():
            below = math.floor(mean)
            children = []
            for row in (_Row(marked, below), _Row(1 - marked, len(self.problem.classes) - below - 1)):
                rows = (*part.rows, row)
                bound = self._bounded(rows, part.bound.mixture, stop)
                children.append((max(part.value, bound.value), rows, bound))
            values = [min(stop, value) for value, _, _ in children]
            if (min(values), sum(values)) > best:
                best, chosen = (min(values), sum(values)), children
            if min(values) >= stop or self._effort <= 0:
                break
        return chosen

    def _bounded(self, rows: Sequence[_Row], mixture: Sequence[Relaxation], stop: float) -> Bound:
        """The bound by multipliers of the paths that keep `rows`."""
        problem, marked = copy.copy(self.problem), np.stack([row.marked for row in rows], 1).astype(np.int64)
        problem.memory = np.concatenate([self.problem.memory, marked], 1)
        problem.budget = np.concatenate([self.problem.budget, [row.most for row in rows]])
        problem.total = np.concatenate([self.problem.total, np.full(len(rows), float(len(problem.classes)))])
        rows_of = len(self.problem.budget)
        known = [*self._met[-LATEST:], *mixture]
        memory = np.concatenate([np.stack([one.memory[:rows_of] for one in known]),
                                 marked[np.stack([one.path for one in known])].sum(1)], 1)
        found = bound_from(problem, Bound(-np.inf, np.zeros(len(problem.budget))), known, memory, stop, CLOSE)
        self._effort -= len(found.relaxations) * (len(problem.cost) + PER_PATH) + PER_BOUND
        for one in found.relaxations:
            one = replace(one, memory=one.memory[:rows_of])
            self._met.append(one)
            if (one.memory <= self.problem.budget).all():
                self._keep(one)
        return found

    def _keep(self, one: Relaxation) -> None:
        """Keep a path that fits, if it is the cheapest."""
        if self.path is None or one.cost < self.problem.cost_of(self.path):
            path = improve(self.problem, one.path, self.bound.multipliers)
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
