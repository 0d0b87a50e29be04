"""A bound by merged labels: labels that grow stage by stage, where those of nearly the same bytes become one.

A label is a path up to some stage, as in labels.py.  Labels of one state whose bytes are in the same cell are merged
into one with the least seconds, reduced seconds and bytes of all, so that all paths are followed by few labels, and the
least bound of the labels after a stage holds for all paths that fit.  Sweeps go forwards and backwards by turns, each
with more and smaller cells.  A sweep drops the labels that the sweep before it rules out: that one says, for each state
between two stages and the room that a label leaves in the budgets, how many seconds the other part of a path takes at
least (bounds from the other direction: Righini and Salani 2006; cells: state-space relaxation, Christofides, Mingozzi
and Toth 1981).  A sweep has few labels where the bound to prove, its target, is near the bound by multipliers, so that
lower targets are tried first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._chain import merged_labels, prefixes, suffixes
from ggml_sched.placement.solve.bound import Bound, cheapest, constant
from ggml_sched.placement.solve.problem import LARGEST, Problem

__all__ = ["MergedBound"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Singles = NDArray[np.float32]

FINEST = 16
"""A cell is at least a part 1 / 2^FINEST of a budget, or nearly."""
FEWEST, WIDER, SWEEPS = 1 << 11, 4, 4
"""The most labels after a stage in the first sweep for a target, how many times more in each next sweep, and the most
sweeps for one target."""
SETTLED = 2
"""There is a fourth sweep only if the cells of the third were divided at least so many times more than in the first."""
ENTRIES, MOST_PARTS = 1 << 20, 1 << 12
"""About how many entries a table of a sweep has, and into how many parts it divides a budget at most."""
TARGETS, CLOSE = 6, 5e-4
"""The most targets of one bound; and the part of the highest target by which two targets differ at least."""


@dataclass
class _Direction:
    """The arrays of one direction of sweeps, for the columns `kept`."""

    classes: NDArray[np.int32]
    start: Floats
    ends: Floats
    before: Ints
    after: Ints
    suffix: Floats
    least: Ints


@dataclass
class _Ahead:
    """The tables of a sweep, in the order of stages of a sweep in the other direction."""

    is_back: bool
    """Whether that sweep went backwards."""
    cost: Singles
    reduced: Singles


class MergedBound:
    """Bounds of one problem by merged labels, at the multipliers of `bound`."""

    def __init__(self, problem: Problem, bound: Bound) -> None:
        self.problem: Problem = problem
        self._reduced: Floats = problem.cost + problem.bytes @ bound.multipliers
        table, _ = cheapest(problem, self._reduced)
        after, before = suffixes(problem.classes, table), prefixes(problem.classes, table, problem.start)
        value = float((problem.start + after[0]).min())
        self._constant: float = constant(problem, bound.multipliers, value)
        self._value: float = value + self._constant
        around = np.full((problem.n_classes, problem.n_states, problem.n_states), np.inf)
        for stage, number in enumerate(problem.classes):
            np.minimum(around[number], before[stage][:, None] + after[stage + 1], out=around[number])
        self._through: Floats = self._reduced + around.reshape(-1)[problem.group] + self._constant
        zeros = np.zeros(problem.n_states)
        least, taken = self._least_bytes()
        self._ways: tuple[_Direction, _Direction] = (
            _Direction(problem.classes, problem.start, zeros, problem.before, problem.after, after, least),
            _Direction(np.ascontiguousarray(problem.classes[::-1]), zeros, problem.start, problem.after,
                       problem.before, np.ascontiguousarray(before[::-1]), np.ascontiguousarray(taken[::-1])))
        rows = len(problem.scarce)
        parts = int((ENTRIES / ((len(problem.classes) + 1) * problem.n_states)) ** (1 / max(rows, 1)))
        self._parts: int = max(1, min(parts, MOST_PARTS))
        self._shift: NDArray[np.int32] = np.array([max(0, int(most).bit_length() - FINEST) for most in problem.budget],
                                                  np.int32)

    def _least_bytes(self) -> tuple[Ints, Ints]:
        """The fewest bytes on each scarce device of the later, and of the earlier stages [stages + 1, states, scarce].
        """
        problem = self.problem
        shape = (len(problem.classes) + 1, problem.n_states, len(problem.scarce))
        later, earlier = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        start = np.where(np.isfinite(problem.start), 0.0, np.inf)
        for row in range(shape[2]):
            table, _ = cheapest(problem, problem.bytes[:, row])
            later[:, :, row] = np.minimum(suffixes(problem.classes, table), float(LARGEST))
            earlier[:, :, row] = np.minimum(prefixes(problem.classes, table, start), float(LARGEST))
        return later, earlier

    def best(self, proven: float, stop: float, effort: int) -> float:
        """A bound in seconds, from `proven`, which holds already, to `stop`; sweeps try about `effort` columns."""
        value, failed = max(proven, self._value), math.inf
        if not value < stop < math.inf:
            return min(value, stop)
        target = (value + stop) / 2
        ahead: _Ahead | None = None
        for _ in range(TARGETS):
            found, effort, ahead = self._proven(target, effort, ahead)
            value = max(value, found)
            if value < target:
                failed = target
            else:
                ahead = None        # it rules out what is below this target alone
            if value >= stop or effort <= 0 or failed - value < CLOSE * stop:
                break
            target = stop if failed == math.inf else (value + failed) / 2
        return min(value, stop)

    def _proven(self, target: float, effort: int, ahead: _Ahead | None) -> tuple[float, int, _Ahead | None]:
        """(Bound, at most `target`; effort left; the last sweep that is complete), by sweeps with more and more labels.
        `ahead`: a sweep for a higher target; None: none."""
        best, most, first = -math.inf, max(FEWEST, 4 * self.problem.n_states), 0
        for sweep in range(SWEEPS):
            is_back = ahead is None or not ahead.is_back
            value, left, widest, *tables = self._sweep(is_back, target, most, ahead, effort)
            best, tried, effort = max(best, value), effort - left, left
            first = first or widest
            if effort >= 0:
                ahead = _Ahead(is_back, *(np.ascontiguousarray(table[::-1]) for table in tables))
            if best >= target or effort < 2 * tried or (sweep == 2 and widest > first - SETTLED):
                break
            most *= WIDER
        return best, effort, ahead

    def _sweep(self, is_back: bool, target: float, most: int, ahead: _Ahead | None,
               effort: int) -> tuple[float, int, int, Singles, Singles]:
        """One sweep; see `merged_labels`."""
        problem, way = self.problem, self._ways[is_back]
        kept = np.flatnonzero(self._through < target)
        pairs = problem.group[kept] // problem.n_states ** 2 * problem.n_states + way.before[kept]
        order = np.lexsort((self._reduced[kept], pairs))
        counts = np.bincount(pairs, minlength=problem.n_classes * problem.n_states)
        kept = kept[order]
        ahead_cost, ahead_reduced = (None, None) if ahead is None else (ahead.cost, ahead.reduced)
        return merged_labels(
            way.classes, way.start, way.ends, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            problem.cost[kept], self._reduced[kept], problem.memory[kept], way.after[kept].astype(np.int32),
            problem.budget, self._constant, way.suffix, way.least, target, self._shift, most, self._parts,
            ahead_cost, ahead_reduced, effort)
