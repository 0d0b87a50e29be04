"""Paths that fit, from paths that nearly do: repair, and exchanges of the patterns of one and of two stages.

States stay as they are: an exchange replaces a column by another of its group.  Stages with the same column are
interchangeable, so an exchange is tried once for each column in use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve.problem import Problem

__all__ = ["improve", "repair"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_GAIN = 1e-12
"""Part of a path's seconds that an exchange has to win."""
PAIRED = 32
"""So many alternatives of each stage are tried in pairs."""


def alternatives(problem: Problem, column: int) -> slice:
    """The columns of a column's group."""
    group = problem.group[column]
    return slice(int(problem.first[group]), int(problem.first[group + 1]))


def repair(problem: Problem, path: Ints, multipliers: Floats) -> Ints | None:
    """A path that fits: the exchange that frees most bytes for the fewest reduced seconds, again and again; or None."""
    path, used = path.copy(), problem.memory_of(path)
    unit = np.maximum(problem.total, 1.0)
    for _ in range(4 * len(path)):
        over = np.maximum(used - problem.budget, 0)
        if not over.any():
            return path
        best: tuple[float, int, int] | None = None
        for column in np.unique(path).tolist():
            others = alternatives(problem, column)
            bytes_ = problem.memory[others] - problem.memory[column]
            seconds = problem.cost[others] - problem.cost[column] + bytes_ @ multipliers
            freed = ((over - np.maximum(used + bytes_ - problem.budget, 0)) / unit).sum(1)
            price = np.where(freed > 0, np.maximum(seconds, 0.0) / np.maximum(freed, 1e-300), np.inf)
            row = int(price.argmin())
            if price[row] < np.inf and (best is None or price[row] < best[0]):
                best = (float(price[row]), column, others.start + row)
        if best is None:
            return None
        _, old, new = best
        path[int(np.flatnonzero(path == old)[0])] = new
        used = used + problem.memory[new] - problem.memory[old]
    return None


def improve(problem: Problem, path: Ints, multipliers: Floats) -> Ints:
    """A path at which no exchange of one or two stages is cheaper and fits.

    Of a pair of stages only the alternatives of the fewest reduced seconds are tried.
    """
    path = path.copy()
    least = LEAST_GAIN * problem.cost_of(path)
    for _ in range(8 * len(path) + 64):
        room = problem.budget - problem.memory_of(path)
        in_use = np.unique(path).tolist()
        found = best_single(problem, in_use, room, least) or best_pair(problem, path, in_use, room, least, multipliers)
        if found is None:
            break
        for old, new in found:
            path[int(np.flatnonzero(path == old)[0])] = new
    return path


def best_single(problem: Problem, in_use: list[int], room: Ints, least: float) -> list[tuple[int, int]] | None:
    best, found = -least, None
    for column in in_use:
        others = alternatives(problem, column)
        seconds = problem.cost[others] - problem.cost[column]
        fits = (problem.memory[others] - problem.memory[column] <= room).all(1)
        gains = np.where(fits, seconds, np.inf)
        row = int(gains.argmin())
        if gains[row] < best:
            best, found = float(gains[row]), [(column, others.start + row)]
    return found


def best_pair(problem: Problem, path: Ints, in_use: list[int], room: Ints, least: float,
              multipliers: Floats) -> list[tuple[int, int]] | None:
    best, found = -least, None
    options = []
    for column in in_use:
        group = alternatives(problem, column)
        others = np.arange(group.start, group.stop)
        if len(others) > PAIRED:
            reduced = problem.cost[others] + problem.bytes[others] @ multipliers
            others = others[np.sort(np.argsort(reduced, kind="stable")[:PAIRED])]
        options.append((column, others, problem.cost[others] - problem.cost[column],
                        problem.memory[others] - problem.memory[column]))
    for first, (one, one_others, one_seconds, one_bytes) in enumerate(options):
        for two, two_others, two_seconds, two_bytes in options[first:]:
            if one == two and np.count_nonzero(path == one) < 2:
                continue
            rows_1 = np.flatnonzero(one_seconds + two_seconds.min() < best)
            rows_2 = np.flatnonzero(two_seconds + one_seconds.min() < best)
            if not len(rows_1) or not len(rows_2):
                continue
            seconds = one_seconds[rows_1][:, None] + two_seconds[rows_2]
            fits = (one_bytes[rows_1][:, None] + two_bytes[rows_2] <= room).all(2)
            gains = np.where(fits, seconds, np.inf)
            where = int(gains.argmin())
            if gains.flat[where] < best:
                row, col = divmod(where, len(rows_2))
                best = float(gains.flat[where])
                found = [(one, int(one_others[rows_1[row]])), (two, int(two_others[rows_2[col]]))]
    return found
