"""The master problem of cutting planes: the multipliers at which the planes found so far promise most.

Maximise t over t and l where t <= cost_i + l . excess_i for every plane i and 0 <= l_d <= limit.  Its dual has a row
for each multiplier and one more, so a revised simplex with a small dense basis solves it; a basis stays feasible when a
plane is added, and each solution starts at the last one and at its inverse.  Method: Dantzig's simplex, with Bland's
rule against cycles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve._chain import simplex

__all__ = ["Master"]

Floats = NDArray[np.float64]

TOLERANCE = 1e-11


class Master:
    """Planes over `n` multipliers that are at most `limit`."""

    def __init__(self, n: int, limit: float) -> None:
        self.n: int = n
        self.limit: float = limit
        # The columns of the dual program: slacks of the budgets, bytes above budgets at the price `limit`, the planes.
        self._count: int = 2 * n
        self._columns: Floats = np.zeros((2 * n + 32, n + 1))
        self._columns[:n, 1:], self._columns[n:2 * n, 1:] = np.eye(n), -np.eye(n)
        self._prices: Floats = np.repeat([0.0, limit, 0.0], [n, n, 32])
        self._basis: NDArray[np.int64] = np.zeros(0, np.int64)
        self._parts: Floats = np.zeros(0)
        self._work: Floats = np.empty((n + 1, 2 * n + 2))       # the inverse of the basis
        self._updated = np.full(1, -1)                          # pivots since it was made; -1: there is none

    def add(self, cost: float, excess: Floats) -> None:
        """Add the plane t <= cost + l . excess."""
        at = self._count
        if at == len(self._prices):
            self._grow()
        self._columns[at, 0], self._columns[at, 1:], self._prices[at] = 1.0, excess, cost
        self._count += 1
        if not len(self._basis):
            self._basis = np.array([at, *(self.n * int(over > 0) + row for row, over in enumerate(excess))], np.int64)

    def _grow(self) -> None:
        self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
        self._prices = np.concatenate([self._prices, np.zeros_like(self._prices)])

    def solve(self) -> tuple[float, Floats]:
        """(t, multipliers [n]): what the planes promise at most, and where."""
        dual, self._parts = simplex(self._columns[:self._count], self._prices[:self._count], self._basis, TOLERANCE,
                                    50 * (self.n + 2), self._work, self._updated)
        return float(dual[0]), np.clip(-dual[1:], 0.0, self.limit)

    def shares(self) -> list[tuple[int, float]]:
        """(number of the plane, its part) for each plane of which the last solution is a mixture; parts sum to 1."""
        return [(k - 2 * self.n, float(part)) for k, part in zip(self._basis.tolist(), self._parts, strict=True)
                if k >= 2 * self.n and part > 1e-6]
