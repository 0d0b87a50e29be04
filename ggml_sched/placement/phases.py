"""Chains of the placements whose copies of inputs leave much of an arena free, for as long as the copies stay.

Copies of the inputs that caches read stay on a device from the first stage that reads them there to the last.  A phase
says that no stage between these two needs as much of the device's arena as a number of bytes, with the copies beside
it.  The chain of a case with phases has three times as many states for each phase (`chains.phased`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.arenas import Case
from ggml_sched.placement.chain import Chain, Choice
from ggml_sched.placement.chains import phased
from ggml_sched.placement.tables import TableChain, Tables

__all__ = ["MOST_PHASES", "Phase", "PhasedCase"]

MOST_PHASES = 2
"""The most phases of a case: each triples the states, and about triples the columns."""


class Phase(NamedTuple):
    """A limit for the arena of one device while copies of some inputs are there."""

    number: int
    """The inputs: an index of `Tables.lasting`."""
    device: int
    need: int
    """Every stage between the first and the last that read the inputs on the device needs fewer bytes."""


class PhasedCase:
    """The placements of a case that keep some phases."""

    def __init__(self, table: Tables, case: Case, shared: Mapping[str, int], phases: tuple[Phase, ...]) -> None:
        self.phases: tuple[Phase, ...] = phases
        self._table, self._case, self._shared = table, case, shared
        self._limits = list(case.limits)
        for phase in phases:
            self._limits[phase.device] = min(self._limits[phase.device], phase.need - 1)
        whole = table.chain(case.caches, shared, self._limits)
        self._whole = whole
        self.every: TableChain = replace(whole, rows=tuple(np.arange(len(of)) for of in table.holds_caches))
        """The chain of the case, where the rows of a table are all patterns; it is no chain for solvers."""
        self.chain: Chain
        """The chain of the placements that keep the phases."""
        self.rows: tuple[NDArray[np.intp], ...]
        self.chain, self.rows = self._made(phases, ())

    def _made(self, phases: Sequence[Phase],
              within: tuple[tuple[int, int], ...]) -> tuple[Chain, tuple[NDArray[np.intp], ...]]:
        """(The chain with some of the phases, in stages between which copies `within` stay; for each class the pattern
        of each row)."""
        if not phases:
            chain = self._whole
            if within:
                chain = self._table.chain(self._case.caches, self._shared, self._limits, within)
            return chain, chain.rows
        phase, *others = phases
        outer, outer_rows = self._made(others, within)
        inner, inner_rows = self._made(others, (*within, (phase.number, phase.device)))
        held = [of[rows] for of, rows in zip(self._table.reads(phase.number, phase.device), outer_rows, strict=True)]
        rows = tuple(np.concatenate([out[~there], out[there], inside])
                     for out, there, inside in zip(outer_rows, held, inner_rows, strict=True))
        return phased(outer, inner, held), rows

    def translated(self, path: Sequence[Choice]) -> tuple[Choice, ...]:
        """A path of `chain` as a path of `every`."""
        n = len(self._whole.start)
        return tuple(Choice(int(self.rows[c][choice.pattern]), choice.state_in % n, choice.state_out % n)
                     for choice, c in zip(path, self._whole.classes, strict=True))
