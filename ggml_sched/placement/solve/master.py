"""The master problem of cutting planes: the multipliers at which the planes found so far promise most.

Maximise t over t and l where t <= cost_i + l . excess_i for every plane i and 0 <= l_d <= limit.  Its dual has a row
for each scarce device and one more, so a revised simplex with a dense basis of at most 18 x 18 solves it; a basis stays
feasible when a plane is added, and each solution starts at the last one.  Method: Dantzig's simplex, with Bland's rule
against cycles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Master"]

Floats = NDArray[np.float64]

TOLERANCE = 1e-11


class Master:
    """Planes over `n` multipliers that are at most `limit`."""

    def __init__(self, n: int, limit: float) -> None:
        self.n: int = n
        self.limit: float = limit
        # The columns of the dual: slacks of the budgets, bytes above them at the price `limit`, then the planes.
        eye = np.vstack([np.zeros(n), np.eye(n)])
        self.columns: list[Floats] = [*eye.T, *(-eye).T]
        self.prices: list[float] = [0.0] * n + [limit] * n
        self.basis: list[int] = []

    def add(self, cost: float, excess: Floats) -> None:
        """A plane: t <= cost + l . excess."""
        self.columns.append(np.concatenate([[1.0], excess]))
        self.prices.append(cost)
        if not self.basis:
            self.basis = [2 * self.n, *(self.n * int(over > 0) + row for row, over in enumerate(excess))]

    def solve(self) -> tuple[float, Floats]:
        """(t, multipliers [n]): what the planes promise at most, and where."""
        columns, prices = np.stack(self.columns, 1), np.array(self.prices)
        right = np.zeros(self.n + 1)
        right[0] = 1.0
        most = 50 * (self.n + 2)
        for pivot in range(2 * most):
            inverse = np.linalg.inv(columns[:, self.basis])
            dual = prices[self.basis] @ inverse
            reduced = prices - dual @ columns
            reduced[self.basis] = 0.0
            enter = int(reduced.argmin()) if pivot < most else int((reduced < -TOLERANCE).argmax())
            if reduced[enter] >= -TOLERANCE:
                break
            change, have = inverse @ columns[:, enter], inverse @ right
            rows = np.flatnonzero(change > 1e-12)
            if not len(rows):
                break
            ratio = np.maximum(have[rows], 0.0) / change[rows]
            tied = rows[ratio <= ratio.min() + 1e-15]
            self.basis[min(tied, key=lambda row: self.basis[row])] = enter
        inverse = np.linalg.inv(columns[:, self.basis])
        dual = prices[self.basis] @ inverse
        return float(dual[0]), np.clip(-dual[1:], 0.0, self.limit)

    def shares(self) -> list[tuple[int, float]]:
        """The planes that the last solution is a mixture of, each with its part of it."""
        columns = np.stack(self.columns, 1)
        right = np.zeros(self.n + 1)
        right[0] = 1.0
        have = np.linalg.inv(columns[:, self.basis]) @ right if self.basis else right[:0]
        return [(k - 2 * self.n, float(part)) for k, part in zip(self.basis, have, strict=True)
                if k >= 2 * self.n and part > 1e-6]
