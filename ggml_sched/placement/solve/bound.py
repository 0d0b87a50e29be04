"""The bound by multipliers: seconds that no path within the budgets undercuts.

For multipliers l >= 0, seconds a byte, every path that fits costs at least the minimum of cost + l . (bytes - budget)
over all paths, which a dynamic program over stages and states finds.  The reduced seconds of a column are its cost plus
l . bytes.  Cutting planes choose l (Kelley 1960; for constrained paths: Handler and Zang 1980).  Every value is lowered
by the largest error that its sums can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._chain import cutting_planes, least_columns, prefixes, shortest
from ggml_sched.placement.solve.master import TOLERANCE
from ggml_sched.placement.solve.problem import Problem

__all__ = ["Bound", "Relaxation", "best_bound", "bound_from", "cheapest", "constant", "relax"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EPSILON = float(np.finfo(np.float64).eps)
CLOSE = 1e-7
"""Cutting planes end when the bound that they promise is above the present bound by at most this part of it."""
STEEPEST = 1e6
"""The largest multiplier of a device, in units of the seconds of the dearest path over the most bytes that a path takes
there."""
SMALLEST = 1e-6
"""The least part of a path in a mixture."""


class Relaxation(NamedTuple):
    """The cheapest path at some multipliers, and the bound that they give."""

    multipliers: Floats
    value: float
    """The bound that these multipliers give, in seconds."""
    path: Ints
    cost: float
    """Seconds of the path."""
    memory: Ints
    """Bytes of the path on each scarce device."""


@dataclass
class Bound:
    """The best bound found, its multipliers for the scarce devices, and the relaxations that were solved."""

    value: float
    multipliers: Floats
    relaxations: list[Relaxation] = field(default_factory=list)
    mixture: list[Relaxation] = field(default_factory=list)
    """Paths of which a weighted mean keeps the budgets; the bound is nearly the same mean of their seconds."""
    shares: list[float] = field(default_factory=list)
    """The weight of each path of `mixture`; their sum is 1."""
    basis: list[tuple[str, int | Relaxation]] = field(default_factory=list)
    """The basis of the master problem: ("slack", row), ("over", row) or ("plane", path)."""


def relax(problem: Problem, multipliers: Floats, closed: NDArray[np.uint8] | None = None) -> Relaxation | None:
    """The cheapest path at these multipliers, seconds a byte [scarce]; None if there is no path.  `closed` [stages + 1,
    states]: 1 where a path is not in the state before the stage, or after the last one."""
    value, path, cost, memory = shortest(problem.classes, problem.start, problem.first, problem.cost, problem.memory,
                                         multipliers, closed)
    if path is None:
        return None
    if multipliers.any():       # if all are 0, the value is the path's seconds, without an error
        value += constant(problem, multipliers, value)
    return Relaxation(multipliers, value, path, cost, memory)


def constant(problem: Problem, multipliers: Floats, value: float) -> float:
    """The seconds that turn least reduced seconds into a bound, when they are added: minus the budgets times the
    multipliers, minus the largest rounding error.  `value`: about the least reduced seconds."""
    allowed = float(multipliers @ problem.budget)
    error = 2 * (len(problem.classes) + len(multipliers) + 2) * EPSILON * (value + abs(allowed))
    return -allowed - error


def cheapest(problem: Problem, reduced: Floats) -> tuple[Floats, Ints]:
    """For each class and pair of states the least reduced seconds, and the first column that has them."""
    shape = (problem.n_classes, problem.n_states, problem.n_states)
    least, column = least_columns(problem.first, np.ascontiguousarray(reduced))
    return least.reshape(shape), column.reshape(shape)


def best_bound(problem: Problem) -> Bound:
    """Nearly the best bound over all multipliers; infinite if it is proven that no path fits."""
    n = len(problem.budget)
    first = relax(problem, np.zeros(n))
    if first is None or any(least_bytes(problem, row) > problem.budget[row] for row in range(n)):
        return Bound(np.inf, np.zeros(n))
    if (first.memory <= problem.budget).all():
        return Bound(first.value, first.multipliers, [first], [first], [1.0])
    return bound_from(problem, Bound(first.value, first.multipliers, [first]), [first], first.memory[None])


def bound_from(problem: Problem, best: Bound, known: Sequence[Relaxation], memory: Ints, stop: float = np.inf,
               close: float = CLOSE, wanted: float = -np.inf, closed: NDArray[np.uint8] | None = None,
               basis: Sequence[tuple[str, int]] = (), kept: Ints | None = None, rows: int | None = None) -> Bound:
    """Raise `best` nearly to the best bound over all multipliers, with the planes of `known` paths to begin with, and
    return it; a new infinite bound if it is proven that no path fits.  It ends as soon as the bound reaches `stop`, or
    where it can rise by at most the part `close`, or cannot reach `wanted`.  `memory`: the bytes of the known paths
    [paths, budgets]; `closed`: see `relax`; `basis`: where the master problem begins, with numbers of known paths.
    `kept`: for each column its number in the paths of the result; `rows`: the budgets, the first ones, of which these
    paths have the bytes.  Without them those of `problem`."""
    n = len(problem.budget)
    seconds, unit = max(problem.dearest, 1e-300), np.maximum(problem.total, 1.0)
    offset = {"slack": 0, "over": n, "plane": 2 * n}
    values, multipliers, paths, costs, held, ended, parts = cutting_planes(
        problem.classes, problem.start, problem.first, problem.cost, problem.memory, problem.budget, unit, seconds,
        closed, np.array([one.cost for one in known]), memory,
        [offset[kind] + number for kind, number in basis] or None, best.value, stop, problem.dearest * (1 + 1e-9),
        wanted, close, STEEPEST, TOLERANCE, 2 * (len(problem.classes) + n + 2) * EPSILON, 40 + 30 * n)
    paths, held = paths if kept is None else kept[paths], held if rows is None else held[:, :rows]
    made = list(map(Relaxation, multipliers, values.tolist(), paths, costs.tolist(), held))
    best.relaxations += made
    at = int(values.argmax()) if made else -1
    if made and made[at].value > best.value:
        best.value, best.multipliers = made[at].value, made[at].multipliers
    if best.value > problem.dearest * (1 + 1e-9):
        return Bound(np.inf, best.multipliers, best.relaxations)
    met, shares = [*known, *made], parts.tolist()
    chosen = ended.tolist()
    best.mixture = [met[k - 2 * n] for k, part in zip(chosen, shares, strict=True) if k >= 2 * n and part > SMALLEST]
    best.shares = [part for k, part in zip(chosen, shares, strict=True) if k >= 2 * n and part > SMALLEST]
    best.basis = [("slack", k) if k < n else ("over", k - n) if k < 2 * n else ("plane", met[k - 2 * n])
                  for k in chosen]
    return best


def least_bytes(problem: Problem, row: int) -> int:
    """The fewest bytes that a path takes on one scarce device, exactly."""
    table, _ = cheapest(problem, problem.bytes[:, row])
    start = np.where(np.isfinite(problem.start), 0.0, np.inf)
    return int(prefixes(problem.classes, table, start)[-1].min())
