"""Recordings of which experts each layer used for which tokens, in the order of evaluations; read and written as text.

The first line of a file describes the banks, each further line is a visit of one bank: its number, and for each token
the experts that it used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ggml_sched._files import write_text
from ggml_sched.errors import FileFormatError

__all__ = ["Bank", "Routing", "Visit"]

FORMAT = "ggml-sched experts"
VERSION = 1
MAX_EXPERTS = 1 << 16


@dataclass(frozen=True)
class Bank:
    """A bank, which is the weights of one layer that are read by expert: `n_experts` experts of `nbytes` bytes each."""

    name: str
    n_experts: int
    nbytes: int


class Visit(NamedTuple):
    """One use of a bank: `experts` has for each token of a batch the numbers of the experts that the token uses."""

    bank: int
    experts: tuple[tuple[int, ...], ...]

    @property
    def used(self) -> list[int]:
        """The numbers of the experts that are used, each once, ascending."""
        return sorted({expert for token in self.experts for expert in token})


@dataclass
class Routing:
    """A recording of which experts tokens used: the banks of a model, and their visits in order."""

    banks: list[Bank]
    visits: list[Visit] = field(default_factory=list)

    @property
    def n_experts(self) -> int:
        """The most experts that a bank has."""
        return max((bank.n_experts for bank in self.banks), default=0)

    @property
    def profile(self) -> np.ndarray:
        """i64 [banks, experts]: how many tokens used each expert."""
        found = np.zeros((len(self.banks), self.n_experts), np.int64)
        for visit in self.visits:
            for token in visit.experts:
                found[visit.bank, list(token)] += 1
        return found

    def check(self) -> None:
        """ValueError for a visit of a bank, or a use of an expert, that there is not."""
        for k, visit in enumerate(self.visits):
            if not 0 <= visit.bank < len(self.banks):
                raise ValueError(f"visit {k} is of bank {visit.bank}, and there are {len(self.banks)} banks")
            used, n = visit.used, self.banks[visit.bank].n_experts
            if used and not 0 <= used[0] <= used[-1] < n:
                wrong = used[0] if used[0] < 0 else used[-1]
                raise ValueError(f"visit {k} uses expert {wrong} of bank {visit.bank}, which has {n} experts")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a file, which is replaced if it exists.  Raises OSError."""
        header = {"format": FORMAT, "version": VERSION, "banks": [asdict(bank) for bank in self.banks]}
        lines = [json.dumps(header), *(json.dumps([visit.bank, visit.experts]) for visit in self.visits)]
        write_text(path, "\n".join(lines) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Routing:
        """Read a file that `save` has written.  Raises OSError, or FileFormatError for another file."""
        with open(path, encoding="utf-8", errors="replace") as file:
            try:
                made = _with_banks(json.loads(file.readline()))
                for line in file:
                    made.visits.append(_visit(json.loads(line), made.banks))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise FileFormatError(f"{os.fspath(path)}: not a recording of experts: {error}") from error
        return made


def _with_banks(header: Any) -> Routing:
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError("the first line describes no banks")
    banks = [Bank(str(bank["name"]), _number(bank["n_experts"], 1, MAX_EXPERTS), _number(bank["nbytes"], 0, 1 << 62))
             for bank in header["banks"]]
    return Routing(banks)


def _visit(line: Any, banks: Sequence[Bank]) -> Visit:
    number, experts = line
    bank = banks[_number(number, 0, len(banks) - 1)]
    return Visit(number, tuple(tuple(_number(expert, 0, bank.n_experts - 1) for expert in token) for token in experts))


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is no number from {low} to {high}")
    return value
