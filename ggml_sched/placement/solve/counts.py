"""Counts: how often each column is used, as an integer program that does not see the order of equal stages.

Stages of a class are interchangeable, so only counts matter.  The rows of the program say: a class has as many columns
as stages; at each place as many columns end in a state as begin in it; bytes are within the budgets.  A place is before
or after the stages of a class; where one class follows another, the place after the one is the place before the other.
If the columns of a solution are connected, they form an Euler trail, which gives the order (Hierholzer 1873).  Rows for
sets of states say that columns from a set may be used only if another column leads into it (for trails: Dantzig,
Fulkerson and Johnson 1954).  If some columns of a solution are not connected to the beginning all the same, one more
row excludes that.  The least cost of counts is a bound of all paths, and so is that of the linear program, which also
shows which columns no cheap path can have.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve.problem import Problem

__all__ = ["Counts", "Program", "has_highs", "highs", "linear"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INFEASIBLE = 2
"""The status that SciPy's `milp` and `linprog` return for a program without a solution."""
MOST_TOGETHER = 4
"""With at most so many states in which no path begins, all sets of them get rows in `Counts.connect`, else each alone.
"""


@dataclass
class Program:
    """Minimise cost . x where low <= rows @ x <= high, 0 <= x <= most, x integer."""

    cost: Floats
    rows: Floats
    low: Floats
    high: Floats
    most: Floats


class Counts:
    """The integer program over the columns `kept` of a problem: a variable for each column, for each state to begin in,
    and for each state to end in."""

    def __init__(self, problem: Problem, kept: Ints) -> None:
        self.problem: Problem = problem
        self.kept: Ints = kept
        self.place: Ints = places(problem)
        states = problem.n_states
        number = problem.group[kept] // (states * states)
        self.tail: Ints = self.place[2 * number] * states + problem.before[kept]
        self.head: Ints = self.place[2 * number + 1] * states + problem.after[kept]
        self.first: int = int(self.place[2 * problem.classes[0]]) * states
        self.last: int = int(self.place[2 * problem.classes[-1] + 1]) * states
        begins = np.flatnonzero(np.isfinite(problem.start))
        self.begins: Ints = begins + self.first
        n, n_begins = len(kept), len(begins)
        stages = np.bincount(problem.classes, minlength=problem.n_classes).astype(float)
        one_of = np.zeros((problem.n_classes + 1, n + n_begins + states))
        one_of[number, np.arange(n)] = 1.0
        one_of[-1, n:n + n_begins] = 1.0
        flow = np.zeros((int(self.place.max() + 1) * states, one_of.shape[1]))
        np.add.at(flow, (self.head, np.arange(n)), 1.0)
        np.add.at(flow, (self.tail, np.arange(n)), -1.0)
        flow[self.begins, np.arange(n, n + n_begins)] += 1.0
        flow[self.last + np.arange(states), np.arange(n + n_begins, one_of.shape[1])] -= 1.0
        flow = flow[np.abs(flow).any(1)]
        nbytes = np.zeros((len(problem.scarce), one_of.shape[1]))
        # Bytes are parts of the budgets, so that integers which are wrong by the solver's tolerance change a row by
        # less than the tolerance of rows.
        unit = np.maximum(problem.budget, 1.0)
        nbytes[:, :n] = problem.bytes[kept].T / unit[:, None]
        equal = np.concatenate([stages, [1.0], np.zeros(len(flow))])
        self.program: Program = Program(
            np.concatenate([problem.cost[kept], problem.start[begins], np.zeros(states)]),
            np.concatenate([one_of, flow, nbytes]),
            np.concatenate([equal, np.full(len(nbytes), -np.inf)]),
            np.concatenate([equal, problem.budget / unit]),
            np.concatenate([stages[number], np.ones(n_begins + states)]))

    def connect(self) -> None:
        """Add rows to the program that many solutions break whose columns are not connected: without a column that
        leads into a set of states none is used that begins there; with one of them, in all at most as many of a class
        as it has stages, and as many bytes as a budget has."""
        problem, kept, program = self.problem, self.kept, self.program
        stages = np.bincount(problem.classes, minlength=problem.n_classes)
        number = problem.group[kept] // problem.n_states ** 2
        unit = np.maximum(problem.budget, 1.0)
        begins = set((self.begins - self.first).tolist())
        others = [state for state in range(problem.n_states) if state not in begins]
        sizes = range(1, len(others) + 1) if len(others) <= MOST_TOGETHER else (1,)
        rows = []
        for states in (of for size in sizes for of in combinations(others, size)):
            out = np.isin(problem.before[kept], states)
            into = np.isin(problem.after[kept], states) & ~out
            if not out.any():
                continue
            uses = [((out & (number == c)).astype(float), float(stages[c])) for c in range(problem.n_classes)]
            uses += [(np.where(out, problem.bytes[kept, row] / unit[row], 0.0), 1.0)
                     for row in {int(problem.row_of[state]) for state in states} - {-1}]
            for use, most in uses:
                if use.any():
                    rows.append(np.concatenate([most * into - use, np.zeros(len(program.cost) - len(kept))]))
        if rows:
            program.rows = np.vstack([program.rows, *rows])
            program.low = np.concatenate([program.low, np.zeros(len(rows))])
            program.high = np.concatenate([program.high, np.full(len(rows), np.inf)])

    def path(self, counts: Ints) -> Ints | None:
        """A path with these counts, a solution of the program, in the order of an Euler trail; None if that order is no
        path of the chain."""
        edges: dict[int, list[int]] = {}
        for variable in np.flatnonzero(counts[:len(self.kept)]).tolist():
            edges.setdefault(int(self.tail[variable]), []).extend([variable] * int(counts[variable]))
        begin = counts[len(self.kept):len(self.kept) + len(self.begins)]
        stack: list[tuple[int, int]] = [(int(self.begins[int(begin.argmax())]), -1)]
        trail = []
        while stack:
            at, edge = stack[-1]
            if edges.get(at):
                taken = edges[at].pop()
                stack.append((int(self.head[taken]), taken))
            else:
                trail.append(edge)
                stack.pop()
        problem = self.problem
        path = self.kept[np.array(trail[-2::-1], np.int64)]
        if len(path) != len(problem.classes) or (problem.before[path[1:]] != problem.after[path[:-1]]).any() or (
                problem.group[path] // problem.n_states ** 2 != problem.classes).any():
            return None
        return path

    def cut(self, counts: Ints) -> bool:
        """Add a row to the program that excludes this solution, if some of its columns are not reached from where the
        chain begins; returns False if all are reached."""
        n = len(self.kept)
        used = np.flatnonzero(counts[:n])
        begin = self.begins[int(counts[n:n + len(self.begins)].argmax())]
        reached = {int(begin)}
        grew = True
        while grew:
            found = {int(self.head[j]) for j in used if int(self.tail[j]) in reached}
            grew = not found <= reached
            reached |= found
        lost = [j for j in used if int(self.tail[j]) not in reached]
        if not lost:
            return False
        part = {int(self.tail[j]) for j in lost} | {int(self.head[j]) for j in lost}
        within = np.isin(self.tail, list(part)) & np.isin(self.head, list(part))
        into = ~np.isin(self.tail, list(part)) & np.isin(self.head, list(part))
        row = np.zeros(len(self.program.cost))
        row[:n][within] = -1.0
        row[:n][into] = float(len(self.problem.classes))
        row[n:n + len(self.begins)][np.isin(self.begins, list(part))] = float(len(self.problem.classes))
        program = self.program
        program.rows = np.vstack([program.rows, row])
        program.low, program.high = np.append(program.low, 0.0), np.append(program.high, np.inf)
        return True


def places(problem: Problem) -> Ints:
    """The numbers of places: entry 2 c is the place before the stages of class c, entry 2 c + 1 the place after them;
    where one class follows another, two entries are equal."""
    above = list(range(2 * problem.n_classes))

    def top(place: int) -> int:
        while above[place] != place:
            place = above[place]
        return place

    for one, two in zip(problem.classes[:-1].tolist(), problem.classes[1:].tolist(), strict=True):
        above[top(2 * one + 1)] = top(2 * two)
    tops = np.array([top(place) for place in range(2 * problem.n_classes)])
    return np.unique(tops, return_inverse=True)[1].astype(np.int64)


def has_highs() -> bool:
    """Whether HiGHS is installed, as a part of SciPy: the extra `fit`."""
    return importlib.util.find_spec("scipy") is not None


def highs(program: Program, gap: float, nodes: int) -> tuple[Ints | None, float]:
    """(counts or None, bound) by HiGHS.  It ends at this relative gap or after `nodes` nodes of its search, not after a
    time, so that its results are repeatable.

    The bound is lowered by the tolerance of the solver's sums; it is infinite if nothing fits.  Presolve is off: with
    it HiGHS prints a line for each solution of the reduced program that does not fit the whole program.
    """
    optimize, sparse = importlib.import_module("scipy.optimize"), importlib.import_module("scipy.sparse")
    n = len(program.cost)
    unit = float(program.cost.max(initial=0.0)) or 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # that the solver ended early: `status` says so, too
        found = optimize.milp(program.cost / unit,
                              constraints=optimize.LinearConstraint(sparse.csr_array(program.rows), program.low,
                                                                    program.high),
                              bounds=optimize.Bounds(0, program.most), integrality=np.ones(n),
                              options={"mip_rel_gap": gap, "node_limit": nodes, "presolve": False})
    if found.status == INFEASIBLE:
        return None, np.inf
    bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) * unit
    bound -= 1e-6 * abs(bound)
    return None if found.x is None else np.rint(found.x).astype(np.int64), bound


def linear(program: Program) -> tuple[float, Floats]:
    """(bound, [variables]: for each variable the least cost of solutions that use it), by the linear program without
    integers, which HiGHS solves; both infinite if nothing fits, minus infinite without a solution.

    The bound is that of the duals that HiGHS returns, whatever its tolerances are (weak duality).
    """
    optimize, sparse = importlib.import_module("scipy.optimize"), importlib.import_module("scipy.sparse")
    unit = float(program.cost.max(initial=0.0)) or 1.0
    equal = program.low == program.high
    above, below = ~equal & np.isfinite(program.high), ~equal & np.isfinite(program.low)
    at_most, most = np.concatenate([program.rows[above], -program.rows[below]]), np.concatenate(
        [program.high[above], -program.low[below]])
    found = optimize.linprog(program.cost / unit, A_ub=sparse.csr_array(at_most), b_ub=most,
                             A_eq=sparse.csr_array(program.rows[equal]), b_eq=program.low[equal],
                             bounds=np.stack([np.zeros(len(program.cost)), program.most], 1), method="highs")
    if found.status == INFEASIBLE:
        return np.inf, np.full(len(program.cost), np.inf)
    if found.x is None:
        return -np.inf, np.full(len(program.cost), -np.inf)
    of_most, of_equal = np.minimum(found.ineqlin.marginals, 0.0), found.eqlin.marginals
    reduced = program.cost / unit - at_most.T @ of_most - program.rows[equal].T @ of_equal
    bound = float(of_most @ most + of_equal @ program.low[equal] + np.minimum(reduced, 0.0) @ program.most)
    bound -= 1e-9 * abs(bound)
    return bound * unit, (bound + np.maximum(reduced, 0.0)) * unit
