"""The values that the solver reads and returns: a chain of stages, each of a class; stages of a class share a table.

A state is the device that holds the activation which passes from one stage to the next; with several graphs in the
goal, one device for each graph.  A table has the seconds and bytes of every pattern.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chain", "Choice", "Solution"]


class Choice(NamedTuple):
    """What a solution chose for one stage: a row of its class's table, and the states before and after the stage."""

    pattern: int
    state_in: int
    state_out: int


@dataclass(frozen=True, eq=False)
class Chain:
    """Stages in a row, with the price and the bytes of every pattern."""

    classes: tuple[int, ...]
    """The class of each stage, in order."""
    cost: tuple[NDArray[np.float64], ...]
    """For each class the seconds [patterns, states in, states out]; infinite where a pattern cannot join two states."""
    memory: tuple[NDArray[np.int64], ...]
    """For each class the bytes [patterns, devices]."""
    start: NDArray[np.float64]
    """Seconds to begin in each state [states]; infinite where the first stage cannot begin."""
    devices: tuple[tuple[int, ...], ...] = ()
    """For each state its devices; an empty tuple if they are not known: bounds are lower then."""
    known: dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.int64], Any]] = field(default_factory=dict)
    """A cache of what solvers made of the tables: {(id of a class's array of seconds, id of its array of bytes): (both
    arrays, what was made of them)}.  Chains with the same tables share this dictionary."""


@dataclass(frozen=True, eq=False)
class Solution:
    """The best choices found for a chain under budgets, and what is proven about all others."""

    cost: float
    """Seconds of `path`; infinite without one."""
    bound: float
    """No choices within the budgets cost less, in seconds; infinite if it is proven that none fit."""
    path: tuple[Choice, ...] | None
    """A choice for each stage; None if none was found."""
    memory: tuple[int, ...] | None
    """Bytes of `path` on each device."""
    multipliers: tuple[float, ...]
    """For each device the seconds that one more byte of its budget is worth at the bound."""
