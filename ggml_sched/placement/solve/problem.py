"""A chain and its budgets as the solver's arrays: checked once, flat, without devices whose budgets cannot bind.

Owns `Problem`.  A column is one use of a class's table: a pattern with a state before and a state after the stage.
Columns of one class and one pair of states are a group; they stand together, cheapest first.  A path is an array with a
column for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Choice
from ggml_sched.placement.solve._chain import undominated

__all__ = ["Problem"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LARGEST = 1 << 53
"""Bytes of a path stay below this: float64 holds their sums exactly."""
MOST_KNOWN = 512
"""The most classes that `Chain.known` keeps."""


class _Columns(NamedTuple):
    """The columns of one class; each array has an entry for each column."""

    pattern: Ints
    before: Ints
    after: Ints
    cost: Floats
    memory: Ints        # [columns, scarce]


class _Class:
    """The tables of one class, checked, and its columns for each set of scarce devices."""

    def __init__(self, cost: Floats, memory: Ints) -> None:
        self.cost: Floats = cost
        self.memory: Ints = memory
        finite = np.isfinite(cost)
        self.largest: list[int] = memory[finite.any((1, 2))].max(0, initial=0).tolist()
        self.dearest: float = float(cost[finite].max(initial=0.0))
        self._made: dict[tuple[int, ...], _Columns] = {}

    def columns(self, scarce: tuple[int, ...]) -> _Columns:
        """The columns, which are the finite entries of the table, sorted by state before, state after, seconds.  Left
        out is each column that an earlier one of its group beats: it takes no more bytes on any scarce device."""
        found = self._made.get(scarce)
        if found is None:
            states = self.cost.shape[1]
            entries = np.nonzero(np.isfinite(self.cost))
            scarce_bytes, cost = self.memory[:, list(scarce)], self.cost[entries]
            # Of equal entries the first pattern stays first: the sort is stable.
            order = np.lexsort((scarce_bytes.sum(1)[entries[0]], cost, entries[1] * states + entries[2]))
            before, after = entries[1][order], entries[2][order]
            memory = np.ascontiguousarray(scarce_bytes[entries[0][order]])
            counts = np.bincount(before * states + after, minlength=states ** 2)
            kept = np.flatnonzero(undominated(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), memory))
            pattern, before, after = (of[order[kept]].astype(np.int64) for of in entries)
            found = self._made[scarce] = _Columns(pattern, before, after, cost[order[kept]], memory[kept])
        return found


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
        tables = [class_of(chain, number, self.n_states, len(self.all_budgets)) for number in range(len(chain.cost))]
        self.all_memory: list[Ints] = [table.memory for table in tables]
        self.n_classes: int = len(tables)
        stages_of = np.bincount(self.classes, minlength=self.n_classes)
        most = [sum(int(count) * table.largest[device] for count, table in zip(stages_of, tables, strict=True))
                for device in range(len(self.all_budgets))]
        if max(most, default=0) >= LARGEST:
            raise ValueError(f"a path may take {max(most)} bytes on a device; {LARGEST} are too many for the solver")
        self.scarce: list[int] = [device for device, bytes_ in enumerate(most) if bytes_ > self.all_budgets[device]]
        """The devices whose budgets a path may exceed; the bytes of the others need not be followed."""
        self.budget: Ints = np.array([max(self.all_budgets[device], -1) for device in self.scarce], np.int64)
        self.total: Floats = np.array([most[device] for device in self.scarce], np.float64)
        self.row_of: NDArray[np.int32] = checked_rows(chain, self.scarce, self.n_states)
        """For each state the index in `scarce` of the one device that it has for all graphs; -1 if it has several, or
        one that is not scarce."""
        self.states: tuple[tuple[int, ...], ...] = tuple(tuple(devices) for devices in chain.devices)
        """For each state its devices; an empty tuple if the chain does not say them."""
        self._make_columns(tables)
        self.dearest: float = float(self.start[np.isfinite(self.start)].max(initial=0.0)) + float(
            sum(int(count) * table.dearest for count, table in zip(stages_of, tables, strict=True)))

    def _make_columns(self, tables: list[_Class]) -> None:
        """Set the arrays of the columns of all classes."""
        states, parts = self.n_states, [table.columns(tuple(self.scarce)) for table in tables]
        self.pattern: Ints
        self.before: Ints
        self.after: Ints
        self.pattern, self.before, self.after = (np.concatenate([part[field] for part in parts]) for field in range(3))
        self.cost: Floats = np.concatenate([part.cost for part in parts])
        self.memory: Ints = np.concatenate([part.memory for part in parts])
        numbers = np.repeat(np.arange(len(parts)), [len(part.cost) for part in parts])
        self.group: Ints = (numbers * states + self.before) * states + self.after
        counts = np.bincount(self.group, minlength=self.n_classes * states ** 2)
        self.first: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        """Columns first[g] .. first[g + 1] - 1 are those of group g."""
        self.bytes: Floats = self.memory.astype(np.float64)

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
        total = np.zeros(len(self.all_budgets), np.int64)
        for number, memory in enumerate(self.all_memory):
            total += memory[self.pattern[path[self.classes == number]]].sum(0)
        return tuple(total.tolist())


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


def class_of(chain: Chain, number: int, n_states: int, n_devices: int) -> _Class:
    """A class of a chain: the one that an earlier problem made of the same tables, or a new one of checked tables."""
    cost, memory = chain.cost[number], chain.memory[number]
    kept = chain.known.get((id(cost), id(memory)))
    if kept is None or kept[0] is not cost or kept[1] is not memory:
        if len(chain.known) >= MOST_KNOWN:
            chain.known.clear()
        made = _Class(*checked_class(chain, number, n_states, n_devices))
        kept = chain.known[id(cost), id(memory)] = cost, memory, made
    found: _Class = kept[2]
    return found


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
