"""Equal devices: pairs that may be exchanged in the whole problem, so that a search needs only one of mirrored paths.

Two devices are equal if their budgets are, and if exchanging them maps the columns of every class onto themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.solve.problem import Problem

__all__ = ["Twins", "find_twins"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Twins:
    """Pairs of equal scarce devices: each device of a set of equal devices with the next one of the set."""

    swaps: NDArray[np.int32]
    """[pairs, 2]: the two devices, as indices in `Problem.scarce`."""
    state_swaps: NDArray[np.int32]
    """[pairs, states]: the state that takes each state's place if the two devices are exchanged."""
    columns: tuple[Ints, ...]
    """For each pair: for each column the one that takes its place if the two devices are exchanged."""


def find_twins(problem: Problem) -> Twins:
    """All pairs of neighbours in sets of equal devices."""
    swaps, states, columns = [], [], []
    for two in range(len(problem.scarce)):
        for one in range(two - 1, -1, -1):
            found = exchange(problem, one, two)
            if found is not None:
                swaps.append((one, two))
                states.append(found[0])
                columns.append(found[1])
                break
    return Twins(np.array(swaps, np.int32).reshape(-1, 2),
                 np.array(states, np.int32).reshape(-1, problem.n_states), tuple(columns))


def exchange(problem: Problem, one: int, two: int) -> tuple[Ints, Ints] | None:
    """(for each state, for each column: the one that takes its place) in an exchange of two scarce devices, given as
    indices in `Problem.scarce`; None if the devices are not equal."""
    if problem.budget[one] != problem.budget[two]:
        return None
    states = swapped_states(problem, problem.scarce[one], problem.scarce[two])
    if states is None or not np.array_equal(problem.start[states], problem.start):
        return None
    rows = list(range(len(problem.scarce)))
    rows[one], rows[two] = two, one
    numbers = problem.group // problem.n_states ** 2
    group = (numbers * problem.n_states + states[problem.before]) * problem.n_states + states[problem.after]
    here = np.lexsort((*problem.memory.T, problem.cost, problem.group))
    there = np.lexsort((*problem.memory[:, rows].T, problem.cost, group))
    pairs = ((problem.group[here], group[there]), (problem.cost[here], problem.cost[there]),
             (problem.memory[here], problem.memory[there][:, rows]))
    if not all(np.array_equal(real, mirrored) for real, mirrored in pairs):
        return None
    columns = np.empty(len(here), np.int64)
    columns[there] = here
    return states, columns


def swapped_states(problem: Problem, one: int, two: int) -> Ints | None:
    """For each state the state with two devices exchanged; None if there is no such state for some, or if the chain
    does not say the devices of states."""
    number = {devices: state for state, devices in enumerate(problem.states)}
    device = list(range(len(problem.all_budgets)))
    device[one], device[two] = two, one
    swapped = [number.get(tuple(device[d] for d in devices), -1) for devices in problem.states]
    return np.array(swapped, np.int64) if swapped and min(swapped) >= 0 else None
