"""Replays of recordings in which experts are also read ahead: what predictions of the next layer's experts would gain.

Execution reads no expert ahead; these replays measure why.  Time is counted in reads of one expert.  While a visit
computes, the store reads the likeliest expert of the next bank that is in no slot, to the slot that the policy gives up
next.  If the next visit does not use that expert, the read is given up after the part (one weight of the expert) that
is being read.  An expert is read ahead only if that is expected to save time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from ggml_sched.experts.table import SlotTable

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggml_sched.experts.policies import Policy
    from ggml_sched.experts.routing import Routing

    Floats: TypeAlias = npt.NDArray[np.float64]

__all__ = ["PREDICTIONS", "Ahead", "Prediction", "replay_ahead"]

PARTS = 3
"""The weights of an expert, which are read one after another."""


class Ahead(NamedTuple):
    """What reading ahead did in a replay; without a prediction `reads` and `used` are 0."""

    reads: int
    """Experts that were read ahead, whether to their end or not."""
    used: int
    """Those of them that the next visit used."""
    nbytes: int
    """Bytes read, ahead or not."""
    wasted: int
    """Bytes read ahead of experts that the next visit did not use."""
    time: float
    """Reads of one expert that could be made in the time in which visits compute and wait."""

    @property
    def precision(self) -> float:
        """The part of the experts read ahead that was used; 0 without any."""
        return self.used / max(self.reads, 1)


class Predictor(Protocol):
    """The state of a prediction: counts visits, and says how likely the next visit uses which expert."""

    def use(self, bank: int, used: Sequence[int]) -> None:
        """Note that a visit of a bank uses these experts."""

    def likely(self, bank: int) -> Floats:
        """f64 [experts]: how likely the next visit, which is of this bank, uses each expert."""


class Prediction(Protocol):
    """Makes the predictor of a recording, such as the values of `PREDICTIONS`."""

    def __call__(self, recording: Routing) -> Predictor: ...


class _Recent:
    """The part of a bank's last visits that have used an expert; a later visit counts more."""

    decay = 0.8

    def __init__(self, recording: Routing) -> None:
        self._parts: Floats = np.zeros((len(recording.banks), recording.n_experts))

    def use(self, bank: int, used: Sequence[int]) -> None:
        self._parts[bank] *= self.decay
        self._parts[bank, used] += 1 - self.decay

    def likely(self, bank: int) -> Floats:
        found: Floats = self._parts[bank]
        return found


class _Frequent:
    """The part of all visits of a bank so far that have used an expert."""

    def __init__(self, recording: Routing) -> None:
        self._uses: Floats = np.zeros((len(recording.banks), recording.n_experts))
        self._visits = np.zeros(len(recording.banks))

    def use(self, bank: int, used: Sequence[int]) -> None:
        self._uses[bank, used] += 1
        self._visits[bank] += 1

    def likely(self, bank: int) -> Floats:
        found: Floats = self._uses[bank] / max(self._visits[bank], 1)
        return found


class _Together:
    """The part of a bank's visits that have used an expert, of those that came after a visit of the bank before that
    used the same expert as the present one; the mean over the experts of the present visit."""

    def __init__(self, recording: Routing) -> None:
        n_banks, n_experts = len(recording.banks), recording.n_experts
        self._pairs: Floats = np.zeros((n_banks, n_experts, n_experts))
        """f64 [banks, experts of the visit before, experts]."""
        self._uses: Floats = np.zeros((n_banks, n_experts))
        self._before: Sequence[int] = ()

    def use(self, bank: int, used: Sequence[int]) -> None:
        for before in self._before:
            self._pairs[bank, before, used] += 1
            self._uses[bank, before] += 1
        self._before = list(used)

    def likely(self, bank: int) -> Floats:
        before = list(self._before)
        if not before:
            return np.zeros(self._uses.shape[1])
        found: Floats = (self._pairs[bank, before] / np.maximum(self._uses[bank, before], 1)[:, None]).mean(axis=0)
        return found


class _Known:
    """The future: no prediction can be better."""

    def __init__(self, recording: Routing) -> None:
        self._recording, self._now = recording, 0

    def use(self, bank: int, used: Sequence[int]) -> None:
        self._now += 1

    def likely(self, bank: int) -> Floats:
        found: Floats = np.zeros(self._recording.n_experts)
        found[self._recording.visits[self._now].used] = 1
        return found


PREDICTIONS: dict[str, Prediction] = {"recent": _Recent, "frequent": _Frequent, "together": _Together, "known": _Known}
"""Predictions by name: from the last visits of the same layer, from all of its visits, from the experts of the layer
before, and the future itself, which bounds the others."""


def replay_ahead(recording: Routing, policy: Policy, n_slots: int, prediction: Prediction | None,
                 computing: float) -> Ahead:
    """Replay with at most one expert read ahead between two visits; raises as `replay`.

    `computing`: how long computing takes from one choice of experts to the next, in reads of one expert; ValueError for
    a negative or infinite number and NaN.  `prediction` None: nothing is read ahead.
    """
    if not 0 <= computing < math.inf:
        raise ValueError(f"computing = {computing:g} is not a number of reads")
    recording.check()
    table = SlotTable(len(recording.banks), recording.n_experts, n_slots, policy)
    predictor = None if prediction is None else prediction(recording)
    reads = hits = nbytes = wasted = 0
    time = 0.0
    # How much of a read is done when the next visit has chosen, and at its end, if it is given up then.
    done = min(computing, 1.0)
    stop = min(math.ceil(done * PARTS - 1e-9) / PARTS, 1.0)
    ahead: tuple[int, int] | None = None
    for k, visit in enumerate(recording.visits):
        used = visit.used
        if ahead is not None:
            bank, expert = ahead
            if expert in used:
                hits += 1
                time += 1 - done
                nbytes += recording.banks[bank].nbytes
                table.put(bank, expert)
            else:
                time += stop - done
                wasted += int(recording.banks[bank].nbytes * stop)
                if stop == 1:
                    table.put(bank, expert)
        for expert, _ in table.visit(visit.bank, used):
            table.put(visit.bank, expert)
            nbytes += recording.banks[visit.bank].nbytes
            time += 1
        time += computing
        ahead = None
        if predictor is None:
            continue
        predictor.use(visit.bank, used)
        if k + 1 < len(recording.visits):
            bank = recording.visits[k + 1].bank
            likely = np.where(table.held[bank], 0, predictor.likely(bank))
            expert = int(np.argmax(likely))
            p = float(likely[expert])
            if p * done > (1 - p) * (stop - done) and table.free(visit.bank, used):
                ahead, reads = (bank, expert), reads + 1
    return Ahead(reads, hits, nbytes + wasted, wasted, time)
