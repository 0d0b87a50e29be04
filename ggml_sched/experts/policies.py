"""Policies: which expert gives up its slot when another needs one.

A policy is a value; `begin` makes its `Order`, which counts uses and has a cost for each expert: the one with the
highest cost gives up its slot first.  The layers of a model are visited in turn, so that how soon an expert can be
needed again is known in part: an expert of the next layer sooner than one of the layer before.  So costs are times, in
rounds through all banks, until an expert is expected to be used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np

from ggml_sched.errors import shown

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]

__all__ = ["LeastFrequentlyUsed", "LeastRecentlyUsed", "Mixture", "Order", "Policy", "Static", "checked_policy",
           "policy_named"]

NEVER = 1e12
"""The least cost of an expert that was never used: more than that of any other."""


class Order(Protocol):
    """The state of a policy for one model: counts uses of experts, and says which expert gives up its slot next."""

    def use(self, bank: int, experts: npt.NDArray[np.intp]) -> None:
        """Note that these experts of a bank, each once, are used now."""

    def costs(self, bank: int) -> Floats:
        """f64 [banks, experts]: the costs while `bank` is visited; the highest cost gives up its slot first."""


class Policy(Protocol):
    """The interface of expert policies, such as `LeastRecentlyUsed`, `LeastFrequentlyUsed` and `Mixture`."""

    def begin(self, n_banks: int, n_experts: int, n_slots: int) -> Order:
        """The order of a model with `n_banks` banks of at most `n_experts` experts each, and `n_slots` slots."""


class _Visits:
    """What all orders count: how often each bank was visited, and at which of its visits an expert was used last."""

    def __init__(self, n_banks: int, n_experts: int) -> None:
        self.count: npt.NDArray[np.int64] = np.zeros(n_banks, np.int64)
        self.last: npt.NDArray[np.int64] = np.full((n_banks, n_experts), -1, np.int64)

    def use(self, bank: int, experts: npt.NDArray[np.intp]) -> None:
        self.last[bank, experts] = self.count[bank]
        self.count[bank] += 1

    def ahead(self, bank: int) -> Floats:
        """f64 [banks, 1]: the part of a round until each bank is visited next; 1 for the one that is visited now."""
        n = len(self.count)
        return ((np.arange(n) - bank - 1) % n + 1)[:, None] / n

    def ages(self, bank: int) -> Floats:
        """f64 [banks, experts]: how often the bank was visited since its expert was used last (NEVER if it never was),
        plus `ahead`."""
        ages = np.where(self.last < 0, NEVER, (self.count[:, None] - self.last - 1).astype(np.float64))
        aged: Floats = ages + self.ahead(bank)
        return aged


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """The expert that its layer has not used for the largest number of visits gives up its slot; of several such
    experts the one whose layer is visited again last."""

    def begin(self, n_banks: int, n_experts: int, n_slots: int) -> Order:
        return _Recent(n_banks, n_experts)


class _Recent(_Visits):
    def costs(self, bank: int) -> Floats:
        return self.ages(bank)


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """The expert that is used in the smallest part of the visits gives up its slot.

    With each later visit of the layer a use counts `decay` times as much (0 < decay < 1).  The part is the mean over
    `decays`: a small one follows what a text is about, a large one knows which experts are used most on the whole.
    """

    decays: tuple[float, ...] = (0.8, 0.98)

    def __post_init__(self) -> None:
        if not self.decays or not all(0 < decay < 1 for decay in self.decays):
            raise ValueError(f"decays are between 0 and 1, not {self.decays}")

    def begin(self, n_banks: int, n_experts: int, n_slots: int) -> Order:
        return _Frequent(n_banks, n_experts, self.decays)


class _Frequent(_Visits):
    def __init__(self, n_banks: int, n_experts: int, decays: tuple[float, ...]) -> None:
        super().__init__(n_banks, n_experts)
        self._decays: Floats = np.array(decays)[:, None]
        self._sums: Floats = np.zeros((len(decays), n_banks, n_experts))
        """f64 [decays, banks, experts]: the sum over an expert's uses of decay ** (later visits of its bank)."""

    def use(self, bank: int, experts: npt.NDArray[np.intp]) -> None:
        super().use(bank, experts)
        self._sums[:, bank] *= self._decays
        self._sums[:, bank, experts] += 1

    def costs(self, bank: int) -> Floats:
        # [decays, banks]: the sum that an expert would have if every visit so far had used it.
        most = (1 - self._decays ** self.count) / (1 - self._decays)
        parts = (self._sums / np.maximum(most, 1)[:, :, None]).mean(axis=0)
        # An expert that is used in the part p of the visits is used once in 1 / p visits.
        costs: Floats = 1 / np.maximum(parts, 1 / NEVER) + self.ahead(bank)
        return costs


@dataclass(frozen=True)
class Mixture:
    """A part `fixed` of the slots is for the experts that are used most; `LeastRecentlyUsed` governs the other slots.

    `profile`, i64 [banks, experts], such as `Routing.profile`: how often each expert is used, which decides which are
    used most; None: the uses counted so far decide.
    """

    fixed: float = 0.5
    profile: npt.ArrayLike | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.fixed <= 1:
            raise ValueError(f"the fixed part of the slots is between 0 and 1, not {self.fixed}")

    def begin(self, n_banks: int, n_experts: int, n_slots: int) -> Order:
        profile = None if self.profile is None else np.asarray(self.profile, np.int64)
        if profile is not None and profile.shape != (n_banks, n_experts):
            raise ValueError(f"a profile of {list(profile.shape)} banks and experts for a model of "
                             f"{[n_banks, n_experts]}")
        return _Mixed(n_banks, n_experts, int(self.fixed * n_slots), profile)


def Static(profile: npt.ArrayLike) -> Mixture:
    """The policy that keeps the experts with the most uses in a profile, i64 [banks, experts].

    Any other expert has a slot only while its layer needs it.
    """
    return Mixture(1.0, profile)


class _Mixed(_Visits):
    def __init__(self, n_banks: int, n_experts: int, n_fixed: int, profile: npt.NDArray[np.int64] | None) -> None:
        super().__init__(n_banks, n_experts)
        self._n_fixed = min(n_fixed, n_banks * n_experts)
        self._counts: npt.NDArray[np.int64] = np.zeros((n_banks, n_experts), np.int64)
        self._profile = profile

    def _fixed(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [banks, experts]: which experts have fixed slots: those with the most uses, if they have any."""
        fixed = np.zeros(counts.size, bool)
        if self._n_fixed:
            fixed[np.argpartition(-counts.ravel(), self._n_fixed - 1)[: self._n_fixed]] = True
        return fixed.reshape(counts.shape) & (counts > 0)

    def use(self, bank: int, experts: npt.NDArray[np.intp]) -> None:
        super().use(bank, experts)
        self._counts[bank, experts] += 1

    def costs(self, bank: int) -> Floats:
        counts = self._counts if self._profile is None else self._profile
        return np.where(self._fixed(counts), -counts, self.ages(bank))


NAMED: dict[str, Policy] = {"lfu": LeastFrequentlyUsed(), "lru": LeastRecentlyUsed(), "mixture": Mixture()}


def policy_named(name: str, *others: str) -> Policy:
    """The policy with this name: "lru", "lfu" or "mixture"; ValueError for another.  `others`: names that the caller
    takes besides."""
    if name not in NAMED:
        raise ValueError(f"{shown(name)} is no policy for experts: {', '.join((*NAMED, *others))}")
    return NAMED[name]


def checked_policy(policy: object, *others: str) -> Policy:
    """The policy itself, or the one that a str names; TypeError for what is neither, ValueError for an unknown name.
    `others`: names that the caller takes besides."""
    if isinstance(policy, str):
        return policy_named(policy, *others)
    if not callable(getattr(policy, "begin", None)):
        raise TypeError(f"a policy for experts has a method begin, or is one of {', '.join((*NAMED, *others))}, "
                        f"not {shown(policy)}")
    return cast("Policy", policy)
