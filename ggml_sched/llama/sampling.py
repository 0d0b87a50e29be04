"""Choosing the next token from a row of logits.

A sampler is any callable from logits [n_vocab] to a token id.  A `Sampler` owns its random generator and the last
tokens: equal seeds and equal histories give equal tokens.  Invariant: a chosen token has a finite logit.  The stages
and their order are those of llama.cpp's default chain: bias, penalties, top_k, top_p, min_p, temperature, draw.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from ggml_sched.errors import shown
from ggml_sched.llama.arguments import count
from ggml_sched.llama.errors import SamplingError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Sampler", "greedy"]

FIRST_GUESS = 256
"""How many of the likeliest tokens are sorted first for top_p without top_k; more are sorted until they have enough
probability."""
ROWS = 64
"""`top` takes the maximum of every ROWS logits.  The maxima give a bound that few logits exceed, and `top` sorts only
those few."""
MAX_HISTORY = 1 << 24
MAX_TOKEN = (1 << 31) - 1
"""The largest token id of any vocabulary."""


def greedy(logits: np.ndarray) -> int:
    """The likeliest token, the first on a tie.  SamplingError for NaN, and where no logit is finite."""
    logits = _row(logits)
    token = int(logits.argmax())
    _check_largest(logits[token])
    return token


class SamplerOptions(TypedDict, total=False):
    """The arguments of a `Sampler`, for functions that make one."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float] | None


class Sampler:
    """Draws tokens at random, after stages that change or remove them, in the order of llama.cpp's default chain:

    1. `logit_bias`: {token id: what is added to its logit}; -inf bans a token.
    2. penalties for the tokens among the last `penalty_last_n` (0: none, -1: all): positive logits are divided by
       `repeat_penalty`, negative ones multiplied; `frequency_penalty` is subtracted for each occurrence,
       `presence_penalty` once.
    3. `top_k` likeliest tokens (0: all).
    4. the fewest likeliest that together have `top_p` of the probability (1: all).
    5. tokens at least `min_p` times as likely as the likeliest (0: all).
    6. logits divided by `temperature`, and one token drawn (0: the likeliest token, without stages 3 to 5).

    Stages 4 and 5 use probabilities without the temperature.  A call adds the chosen token to the history; `accept`
    adds other tokens, for example those of a prompt.  Equal seeds give equal tokens; without a seed they differ each
    time. Not to be shared between threads, nor, with penalties, between sequences.
    """

    def __init__(self, temperature: float = 0.8, top_k: int = 40, top_p: float = 0.95, seed: int | None = None, *,
                 min_p: float = 0.05, repeat_penalty: float = 1.0, presence_penalty: float = 0.0,
                 frequency_penalty: float = 0.0, penalty_last_n: int = 64,
                 logit_bias: Mapping[int, float] | None = None) -> None:
        self.temperature: float = _number("temperature", temperature, 0.0)
        self.top_k: int = count("top_k", top_k, 0)
        self.top_p: float = _number("top_p", top_p, 0.0, 1.0, above=True)
        self.min_p: float = _number("min_p", min_p, 0.0, 1.0)
        self.repeat_penalty: float = _number("repeat_penalty", repeat_penalty, 0.0, above=True)
        self.presence_penalty: float = _number("presence_penalty", presence_penalty)
        self.frequency_penalty: float = _number("frequency_penalty", frequency_penalty)
        self.penalty_last_n: int = count("penalty_last_n", penalty_last_n, -1, MAX_HISTORY)
        self.logit_bias: dict[int, float] = _bias(logit_bias)
        self.seed: int | None = None if seed is None else count("seed", seed, 0)
        self._bias_ids = np.fromiter(self.logit_bias.keys(), np.int64, len(self.logit_bias))
        self._bias_values = np.fromiter(self.logit_bias.values(), np.float64, len(self.logit_bias))
        self._penalises = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        self.reset()

    def reset(self) -> None:
        """Clear the history and restart the random numbers."""
        self._random = np.random.default_rng(self.seed)
        self._history: deque[int] = deque(maxlen=None if self.penalty_last_n < 0 else self.penalty_last_n)

    @property
    def history(self) -> list[int]:
        """The last tokens, oldest first: those that penalties apply to."""
        return list(self._history)

    def accept(self, *tokens: int) -> None:
        """Add tokens that this sampler did not choose to the history; all are checked before any is added."""
        self._history.extend([count("a token id", token, 0, MAX_TOKEN) for token in tokens])

    def __call__(self, logits: np.ndarray) -> int:
        """Choose a token, and add it to the history.  SamplingError for NaN, and where no token is left to choose."""
        if self.temperature == 0:
            token = greedy(self.adjusted(logits))
        else:
            ids, p = self._drawn_from(logits)
            ends = np.cumsum(p)
            # random() < 1, so the product is less than the last sum: a token of probability above 0 is found.
            token = int(ids[np.searchsorted(ends, self._random.random() * ends[-1], side="right")])
        self._history.append(token)
        return token

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        """Logits after bias and penalties, stages 1 and 2; the argument itself where there are none.  SamplingError
        where these make a logit infinite."""
        logits = _row(logits)
        if not len(self._bias_ids) and not (self._penalises and self._history):
            return logits
        logits = logits.copy()
        if len(self._bias_ids):
            self._check_ids(self._bias_ids, len(logits), "logit_bias")
            before = logits[self._bias_ids]
            with np.errstate(over="ignore", under="ignore"):
                logits[self._bias_ids] += self._bias_values
            _check_change(self._bias_ids, before, logits, "logit_bias makes")
        if self._penalises and self._history:
            counts = Counter(self._history)
            ids = np.fromiter(counts.keys(), np.int64, len(counts))
            times = np.fromiter(counts.values(), np.float64, len(counts))
            self._check_ids(ids, len(logits), "the history")
            before = logits[ids]
            chosen = before.astype(np.float64)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                chosen = np.where(chosen <= 0, chosen * self.repeat_penalty, chosen / self.repeat_penalty)
                logits[ids] = chosen - times * self.frequency_penalty - self.presence_penalty
            _check_change(ids, before, logits, f"repeat_penalty {self.repeat_penalty}, frequency_penalty "
                          f"{self.frequency_penalty} and presence_penalty {self.presence_penalty} make")
        return logits

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be drawn, ids int64 [n], and their probabilities, float64 [n], likeliest first."""
        if self.temperature == 0:
            return np.array([greedy(self.adjusted(logits))]), np.ones(1)
        ids, p = self._drawn_from(logits)
        order = np.argsort(-p, kind="stable")
        return ids[order], p[order]

    def _drawn_from(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids that stages 1 to 5 (see the class) leave, and their probabilities with the temperature."""
        logits = self.adjusted(logits)
        largest = float(logits.max())
        _check_largest(largest)
        ids = self._kept(logits, largest)
        kept = logits[ids].astype(np.float64) - largest
        with np.errstate(over="ignore", under="ignore"):
            p = np.exp(kept / self.temperature)
        return ids, p / p.sum()

    def _kept(self, logits: np.ndarray, largest: float) -> np.ndarray:
        """Ids that top_k, top_p and min_p keep, without banned ones (-inf); likeliest first with top_k or top_p."""
        least = largest + math.log(self.min_p) if self.min_p > 0 else -math.inf
        if self.top_k:
            ids = top(logits, self.top_k)
            if self.top_p < 1:
                ids = ids[: self._n_top_p(logits[ids], largest)]
        elif self.top_p < 1:
            with np.errstate(under="ignore"):
                total = float(np.exp(logits.astype(np.float64) - largest).sum())
            n, found = FIRST_GUESS, 0
            while True:
                ids = top(logits, n)
                found = self._n_top_p(logits[ids], largest, total)
                if found < len(ids) or n >= len(logits):
                    break
                n *= 8
            ids = ids[:found]
        else:
            return np.flatnonzero((logits.astype(np.float64) >= least) & (logits > -math.inf))
        kept: np.ndarray = ids[(logits[ids].astype(np.float64) >= least) & (logits[ids] > -math.inf)]
        return kept

    def _n_top_p(self, logits: np.ndarray, largest: float, total: float | None = None) -> int:
        """How many tokens from the first on have top_p of the probability together; `logits`: likeliest token first.

        `total` is the sum of exp(logit - largest) over all tokens; None: over `logits`.
        """
        with np.errstate(under="ignore"):
            gathered = np.cumsum(np.exp(logits.astype(np.float64) - largest))
        return int(np.searchsorted(gathered, self.top_p * (gathered[-1] if total is None else total))) + 1

    @staticmethod
    def _check_ids(ids: np.ndarray, n_vocab: int, where: str) -> None:
        if ids.max() >= n_vocab:
            raise SamplingError(f"token id {int(ids.max())} of {where} is not one of 0 to {n_vocab - 1}")

    def __repr__(self) -> str:
        return (f"Sampler(temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, seed={self.seed}, "
                f"min_p={self.min_p})")


def top(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest logits, largest first, the lower id first on a tie."""
    n = len(logits)
    if k >= n:
        return np.argsort(-logits, kind="stable")
    columns = n // ROWS
    if columns >= 2 * k:
        # In a matrix of ROWS rows, the k-th largest of the columns' maxima is at most the k-th largest logit, and is
        # found sooner.
        maxima = logits[: columns * ROWS].reshape(ROWS, columns).max(axis=0)
        least = np.partition(maxima, columns - k)[columns - k]
    else:
        least = np.partition(logits, n - k)[n - k]
    ids = np.flatnonzero(logits >= least)
    found: np.ndarray = ids[np.argsort(-logits[ids], kind="stable")[:k]]
    return found


def _row(given: npt.ArrayLike) -> np.ndarray:
    logits = np.asarray(given)
    if logits.ndim != 1 or not len(logits):
        raise ValueError(f"logits are one row [n_vocab], not of shape {list(logits.shape)}")
    if logits.dtype.kind != "f":
        logits = logits.astype(np.float64)
    return logits


def _check_largest(largest: float) -> None:
    # NumPy's maximum of values with a NaN is NaN, so this finds a NaN anywhere among them.
    if math.isfinite(largest):
        return
    if largest == -math.inf:
        raise SamplingError("no token is left to choose: every logit is -inf")
    raise SamplingError(f"the logits have {'NaN' if math.isnan(largest) else 'infinity'}: the model computed nonsense")


def _check_change(ids: np.ndarray, before: np.ndarray, logits: np.ndarray, cause: str) -> None:
    """SamplingError where a change of the logits of `ids` from `before` has made one NaN or larger than all numbers."""
    wrong = ~(logits[ids] < math.inf) & (before < math.inf)
    if wrong.any():
        i = int(wrong.argmax())
        now = logits[ids[i]]
        raise SamplingError(f"{cause} the logit {before[i]:g} of token {ids[i]} {'NaN' if now != now else 'infinite'}")


def _number(name: str, value: float, low: float = -math.inf, high: float = math.inf, above: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a number, not {type(value).__name__}") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or above and number == low:
        bounds = [f"{'above' if above else 'at least'} {low:g}"] if math.isfinite(low) else []
        bounds += [f"at most {high:g}"] if math.isfinite(high) else []
        raise ValueError(f"{name} is {shown(value)}, not a finite number {' and '.join(bounds)}".rstrip())
    return number


def _bias(bias: Mapping[int, float] | None) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias is a dict of token ids and numbers, not {type(bias).__name__}")
    checked = {}
    for token, value in bias.items():
        token = count("a token id of logit_bias", token, 0, MAX_TOKEN)
        checked[token] = -math.inf if value == -math.inf else _number(f"logit_bias[{token}]", value)
    return checked
