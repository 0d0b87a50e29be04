"""A chain and its budgets as the solver's arrays: checked once, flat, without devices whose budgets cannot bind.

Owns `Problem`.  A column is one use of a class's table: a pattern with a state before and a state after the stage.
Columns of one class and one pair of states are a group; they stand together, cheapest first.  A path is an array with a
column for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Choice
from ggml_sched.placement.solve._chain import undominated

__all__ = ["Problem"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LARGEST = 1 << 53
"""Bytes of a path stay below this: float64 holds their sums exactly."""


class Problem:
    """The arrays of `chain` under `budget`, bytes for each device.

    ValueError or TypeError, with the class and the numbers, for arrays of wrong shapes or types, NaN, negative seconds
    or bytes, and a chain without stages.
    """

    def __init__(self, chain: Chain, budget: Sequence[int]) -> None:
        self.classes: NDArray[np.int32] = checked_classes(chain)
        self.start: Floats = checked_start(chain)
        self.n_states: int = len(self.start)
        self.all_budgets: list[int] = [index(bytes_) for bytes_ in budget]
        tables = [checked_class(chain, number, self.n_states, len(self.all_budgets))
                  for number in range(len(chain.cost))]
        self.all_memory: list[Ints] = [memory for _, memory in tables]
        self.n_classes: int = len(tables)
        stages_of = np.bincount(self.classes, minlength=self.n_classes)
        usable = [np.isfinite(cost).any((1, 2)) for cost, _ in tables]
        largest = [memory[rows].max(0, initial=0).tolist() for rows, (_, memory) in zip(usable, tables, strict=True)]
        most = [sum(int(count) * sizes[device] for count, sizes in zip(stages_of, largest, strict=True))
                for device in range(len(self.all_budgets))]
        if max(most, default=0) >= LARGEST:
            raise ValueError(f"a path may take {max(most)} bytes on a device; {LARGEST} are too many for the solver")
        self.scarce: list[int] = [device for device, bytes_ in enumerate(most) if bytes_ > self.all_budgets[device]]
        """The devices whose budgets a path may exceed; the bytes of the others need not be followed."""
        self.budget: Ints = np.array([max(self.all_budgets[device], -1) for device in self.scarce], np.int64)
        self.total: Floats = np.array([most[device] for device in self.scarce], np.float64)
        self.row_of: NDArray[np.int32] = checked_rows(chain, self.scarce, self.n_states)
        """For each state the row, in `scarce`, of the one device that it has for all graphs; -1 if it has several, or
        one that is not scarce."""
        self.states: tuple[tuple[int, ...], ...] = tuple(tuple(devices) for devices in chain.devices)
        """For each state its devices; empty where they are not known."""
        self._make_columns(tables)
        self.dearest: float = float(self.start[np.isfinite(self.start)].max(initial=0.0)) + float(
            sum(int(count) * float(cost[np.isfinite(cost)].max(initial=0.0))
                for count, (cost, _) in zip(stages_of, tables, strict=True)))

    def _make_columns(self, tables: list[tuple[Floats, Ints]]) -> None:
        """The finite entries of all tables, sorted by class, state before, state after, seconds, without those that an
        earlier one of the group beats in the bytes of all scarce devices."""
        states, parts = self.n_states, []
        for number, (cost, memory) in enumerate(tables):
            pattern, before, after = np.nonzero(np.isfinite(cost))
            seconds, used = cost[pattern, before, after], memory[:, self.scarce].sum(1)
            order = np.lexsort((pattern, used[pattern], seconds, after, before))
            parts.append((np.full(len(order), number), pattern[order], before[order], after[order], seconds[order]))
        self.pattern: Ints
        self.before: Ints
        self.after: Ints
        numbers, self.pattern, self.before, self.after = (
            np.concatenate([np.asarray(part[field], np.int64) for part in parts]) for field in range(4))
        self.cost: Floats = np.concatenate([part[4] for part in parts])
        self.memory: Ints = np.ascontiguousarray(np.concatenate(
            [memory[part[1]][:, self.scarce] for part, (_, memory) in zip(parts, tables, strict=True)]))
        self.group: Ints = (numbers * states + self.before) * states + self.after
        kept = undominated(self._firsts(), self.memory)
        for field in ("pattern", "before", "after", "cost", "memory", "group"):
            setattr(self, field, np.ascontiguousarray(getattr(self, field)[kept]))
        self.first: Ints = self._firsts()
        """Columns first[g] .. first[g + 1] - 1 are those of group g."""
        self.bytes: Floats = self.memory.astype(np.float64)

    def _firsts(self) -> Ints:
        """For each group the index of its first column, and at the end the number of columns."""
        counts = np.bincount(self.group, minlength=self.n_classes * self.n_states ** 2)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def cost_of(self, path: Ints) -> float:
        """Seconds of a path."""
        total = float(self.start[self.before[path[0]]])
        for seconds in self.cost[path].tolist():
            total += seconds
        return total

    def memory_of(self, path: Ints) -> Ints:
        """Bytes of a path on each scarce device."""
        used: Ints = self.memory[path].sum(0)
        return used

    def fits(self, path: Ints) -> bool:
        return bool((self.memory_of(path) <= self.budget).all())

    def choices(self, path: Ints) -> tuple[Choice, ...]:
        return tuple(Choice(*row) for row in
                     np.stack([self.pattern[path], self.before[path], self.after[path]], 1).tolist())

    def bytes_of(self, path: Ints) -> tuple[int, ...]:
        """Bytes of a path on every device."""
        rows = np.stack([self.all_memory[number][pattern]
                         for number, pattern in zip(self.classes, self.pattern[path], strict=True)])
        return tuple(rows.sum(0).tolist())


def checked_classes(chain: Chain) -> NDArray[np.int32]:
    if not chain.classes:
        raise ValueError("a chain needs a stage")
    if len(chain.cost) != len(chain.memory):
        raise ValueError(f"{len(chain.cost)} tables of seconds, {len(chain.memory)} of bytes: one of each for a class")
    classes = np.array([index(number) for number in chain.classes], np.int64)
    if classes.min() < 0 or classes.max() >= len(chain.cost):
        raise ValueError(f"stages are of the classes {classes.min()} .. {classes.max()}, {len(chain.cost)} have tables")
    return classes.astype(np.int32)


def checked_start(chain: Chain) -> Floats:
    start = np.ascontiguousarray(chain.start, np.float64)
    if start.ndim != 1 or not len(start):
        raise ValueError(f"start has the shape {start.shape}; it must be [states], with one state at least")
    if np.isnan(start).any() or (start < 0).any():
        raise ValueError("start has negative seconds, or NaN")
    return start


def checked_rows(chain: Chain, scarce: Sequence[int], n_states: int) -> NDArray[np.int32]:
    """The values of `Problem.row_of`; `scarce`: the scarce devices."""
    if chain.devices and len(chain.devices) != n_states:
        raise ValueError(f"devices of {len(chain.devices)} states, and {n_states} states")
    rows = {device: row for row, device in enumerate(scarce)}
    found = [rows.get(devices[0], -1) if len(set(devices)) == 1 else -1 for devices in chain.devices]
    return np.array(found or [-1] * n_states, np.int32)


def checked_class(chain: Chain, number: int, n_states: int, n_devices: int) -> tuple[Floats, Ints]:
    """The tables of one class: seconds [patterns, states, states], bytes [patterns, devices]."""
    cost, memory = np.asarray(chain.cost[number]), np.asarray(chain.memory[number])
    if cost.ndim != 3 or cost.shape[1:] != (n_states, n_states):
        raise ValueError(f"class {number}: seconds of shape {cost.shape}; they must be "
                         f"[patterns, {n_states}, {n_states}]")
    if memory.shape != (len(cost), n_devices):
        raise ValueError(f"class {number}: bytes of shape {memory.shape}; they must be [{len(cost)}, {n_devices}]")
    if cost.dtype.kind not in "fiu" or memory.dtype.kind not in "iu":
        raise TypeError(f"class {number}: seconds are {cost.dtype}, bytes {memory.dtype}; they must be floats and "
                        "integers")
    cost = cost.astype(np.float64)
    if np.isnan(cost).any() or (cost < 0).any():
        raise ValueError(f"class {number}: negative seconds, or NaN")
    if memory.size and (int(memory.min()) < 0 or int(memory.max()) >= LARGEST):
        raise ValueError(f"class {number}: patterns of {memory.min()} .. {memory.max()} bytes; they must be "
                         f"0 .. {LARGEST - 1}")
    return cost, memory.astype(np.int64)
