"""Labels: paths that grow stage by stage; one is dropped if another beats it, or bounds by multipliers rule it out.

A constrained shortest path by label setting (Desrochers and Soumis 1988), with bounds by several multipliers, the
fewest bytes that later stages take, and without columns whose reduced seconds rule them out.  Equal devices are kept in
the order of their bytes, so that only one of several mirrored paths is followed.  At most `width` labels are kept after
a stage: the least bound of the labels that were dropped says what is proven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._chain import exchanges, labels, prefixes, suffixes
from ggml_sched.placement.solve.bound import Bound, cheapest, constant
from ggml_sched.placement.solve.problem import LARGEST, Problem
from ggml_sched.placement.solve.twins import Twins, find_twins

__all__ = ["Labels"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SCALES = (0.8, 1.25)
"""The best multipliers times each of these give bounds, too: better ones for labels of more or of fewer bytes."""
NEAREST = 3
"""The multipliers of so many relaxations, those with the best bounds, are used beside the best multipliers."""
MOST_KEPT = 1 << 23
"""The most labels that are kept of all stages together."""


@dataclass
class Labels:
    """Searches of one problem by labels, and the arrays that all of them use."""

    problem: Problem
    bound: Bound

    def __post_init__(self) -> None:
        problem, best = self.problem, self.bound.multipliers
        near = sorted(self.bound.relaxations, key=lambda one: -one.value)[:NEAREST]
        others = np.unique([*(best * scale for scale in SCALES), *(one.multipliers for one in near)], axis=0)
        self.multipliers: Floats = np.concatenate([best[None], others[(others != best).any(1)]])
        tables = [cheapest(problem, problem.cost + problem.bytes @ row)[0] for row in self.multipliers]
        self.table: Floats = tables[0]
        self.suffix: Floats = np.stack([suffixes(problem.classes, table) for table in tables])
        values = [float((problem.start + suffix[0]).min()) for suffix in self.suffix]
        self.constants: Floats = np.array([constant(problem, row, value)
                                           for row, value in zip(self.multipliers, values, strict=True)])
        least = [suffixes(problem.classes, cheapest(problem, problem.bytes[:, row])[0])
                 for row in range(len(problem.scarce))]
        shape = (len(problem.classes) + 1, problem.n_states, len(least))
        self.least: Ints = np.zeros(shape, np.int64)
        for row, bytes_ in enumerate(least):
            self.least[:, :, row] = np.minimum(bytes_, float(LARGEST)).astype(np.int64)
        self.twins: Twins = find_twins(problem)

    def kept(self, stop: float) -> Ints:
        """The columns that a path of less than `stop` seconds can have."""
        problem = self.problem
        reduced = problem.cost + problem.bytes @ self.multipliers[0]
        return np.flatnonzero(reduced + self.least_around()[problem.group] + self.constants[0] < stop)

    def search(self, stop: float, width: int, effort: int, among: Ints | None = None) -> tuple[Ints | None, float]:
        """(path or None, bound): no path that fits costs less than the bound.  `stop`: only paths below these seconds
        are sought; `width`: the most labels after a stage; `effort`: about how many columns are tried.  With `among`
        only paths of these columns are sought, and the bound holds for such paths alone."""
        problem = self.problem
        width = max(1, min(width, MOST_KEPT // len(problem.classes)))
        reduced = problem.cost + problem.bytes @ self.multipliers[0]
        kept = self.kept(stop)
        if among is not None:
            kept = np.intersect1d(kept, among)
        pairs = problem.group[kept] // problem.n_states
        kept = kept[np.lexsort((reduced[kept], pairs))]
        counts = np.bincount(pairs, minlength=problem.n_classes * problem.n_states)
        found, dropped, _ = labels(
            problem.classes, problem.start, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            problem.cost[kept], reduced[kept], problem.memory[kept], problem.after[kept].astype(np.int32),
            problem.budget, self.multipliers, self.constants, self.suffix, self.least, self.twins.swaps,
            self.twins.state_swaps, stop, width, effort)
        proven = min(stop, dropped)
        if found is None:
            return None, proven
        path = self.unfolded(kept[found])
        return path, min(proven, problem.cost_of(path))

    def least_around(self) -> Floats:
        """For each group the least reduced seconds of all other stages of a path that has a column of the group."""
        problem = self.problem
        before = prefixes(problem.classes, self.table, problem.start)
        least = np.full((problem.n_classes, problem.n_states, problem.n_states), np.inf)
        for stage, number in enumerate(problem.classes):
            np.minimum(least[number], before[stage][:, None] + self.suffix[0, stage + 1], out=least[number])
        return least.reshape(-1)

    def unfolded(self, path: Ints) -> Ints:
        """The real path for a path of labels, in which equal devices were exchanged after stages to keep them in order:
        takes these exchanges back."""
        problem, twins = self.problem, self.twins
        if not len(twins.swaps):
            return path
        real, bytes_ = np.arange(len(problem.cost)), np.zeros(len(problem.scarce), np.int64)
        out = np.empty_like(path)
        for stage, column in enumerate(path.tolist()):
            out[stage] = real[column]
            bytes_ += problem.memory[column]
            _, done = exchanges(bytes_, int(problem.after[column]), twins.swaps, twins.state_swaps)
            for swap in done:
                real = real[twins.columns[swap]]
        return out
