"""Models whose weights are fetched, and the memory of the host, of which each has a share: real plans in the budget.

A share holds the weights that stay, slots for experts, caches, and the arena with the window.  It is divided by what a
byte is worth: estimated seconds of all models are compared while bytes go from one model to another.  Of models that
take turns the arenas, with the windows, are one memory, as large as the largest, and so is the work memory of kernels;
what a store needs to read rows is each model's own.  One model has all of the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, permutations, product
from typing import NamedTuple, TypeAlias

from ggml_sched._graph import Tensor
from ggml_sched.placement.devices import Device, LinkLike
from ggml_sched.placement.fetching import Fetches, Planned, Way
from ggml_sched.placement.leastfetches import LeastFetches
from ggml_sched.placement.refusal import Least
from ggml_sched.placement.residency import Choice, choose, least_choice
from ggml_sched.placement.trials import Trial, Trials

__all__ = ["Fetched", "Nodes", "Part", "Placement", "Shares", "exchanged"]

Nodes: TypeAlias = Sequence[Mapping[Tensor, int]] | None
Placement: TypeAlias = tuple[Sequence[Mapping[str, int]], Sequence[Nodes]]
"""For each model the devices of residents, and those of the assigned nodes of each graph."""

GIB = 1 << 30
ROUNDS = 8
"""The most rounds of choosing weights and planning the graphs; a round counts the arenas of the round before."""
MOST_WAYS = 8
"""The most combinations of ways that are planned: of more, the one without slots, and the one with all slots."""
MOST_WINDOWS = 8
"""The most sizes of a window of models in turns that are compared in one round."""
GRAINS = 256
"""The smallest step in which bytes go from one model to another is all of them divided by this."""
PASSES = 4
"""How often all pairs of models are tried with one step, at most."""


@dataclass(frozen=True)
class Part:
    """What one model has of a placement with fetched weights that was planned for real."""

    trial: Trial
    """The arena of the host has the bytes that the store takes, too; residents in the store take none, slots do."""
    residents: Mapping[str, int]
    """{weight or cache: index of its device}; those in the store are on the host."""
    nodes: Nodes
    way: Way
    choice: Choice
    share: int
    """Bytes of the host that the model may take: those that it takes, and an equal part of what all models leave."""

    @property
    def stored(self) -> frozenset[str]:
        """The weights in the store."""
        return frozenset((*self.way.rows, *self.way.slotted, *(use.name for use in self.choice.fetched)))


@dataclass(frozen=True)
class Fetched:
    """A placement of all models with fetched weights."""

    parts: tuple[Part, ...]
    arenas: tuple[int, ...]
    """Bytes of each device's arena, of all models together."""
    host_arenas: HostArenas

    @property
    def seconds(self) -> float:
        return sum(part.trial.seconds for part in self.parts)


class HostArenas(NamedTuple):
    """Bytes of the host's arenas, for each model: without its window, of work memory of kernels, and of its store."""

    arenas: tuple[int, ...]
    works: tuple[int, ...]
    stores: tuple[int, ...]


class Shares:
    """The graphs of some models with some weights of the host in stores; the host is the last device."""

    def __init__(self, models: Sequence[Trials], link: LinkLike, turns: bool) -> None:
        self.parts: tuple[Fetches, ...] = tuple(Fetches(model, link) for model in models)
        self.devices: tuple[Device, ...] = models[0].devices
        self.turns: bool = turns and len(models) > 1
        self._host = len(self.devices) - 1
        self._least = LeastFetches([part.costs for part in self.parts])

    # -- the bound --------------------------------------------------------------------------

    @property
    def most(self) -> int:
        """Bytes of all weights that may be in the stores."""
        return int(self._least.either.most)

    @property
    def needs_alone(self) -> bool:
        """Whether `least` of several devices is larger with `alone`."""
        return self._host > 0 and self._least.knows

    def least(self, nbytes: float, computing: float = 0.0, alone: float | None = None) -> float:
        """The least seconds of the goal where weights of at least so many bytes are in the stores; `computing`: what
        computing, copies and splits take at least; `alone`: what computing takes, of one device the same."""
        return self._least.seconds(nbytes, computing, computing if self._host == 0 else alone)

    def within(self, seconds: float) -> int:
        """The most bytes of weights in the stores that fetches of so many seconds can have."""
        return int(self._least.either.within(seconds))

    def worth(self, found: Fetched) -> float:
        """The seconds that a byte less in the stores is worth in a placement; 0 where nothing waits for fetches."""
        worth = 0.0
        for part, fetches in zip(found.parts, self.parts, strict=True):
            pairs = zip(fetches.model.weights, part.trial.prices, strict=True)
            if any(weight * price.stalled for weight, price in pairs):
                stored = fetches.stored(part.way, part.choice, part.trial.n_slots)
                worth = max(worth, LeastFetches([fetches.costs]).either.slope(stored))
        return worth

    # -- real plans -------------------------------------------------------------------------

    def place(self, placement: Placement) -> Fetched | None:
        """The placement with as few weights of the host in the stores as its budget allows; None where even the fewest
        that stay exceed it, or where another device lacks room."""
        placement = self._all(placement)
        found = [placed for ways in self._ways(placement) if (placed := self._placed(placement, ways)) is not None]
        return min(found, key=lambda placed: placed.seconds, default=None)

    def least_bytes(self, placement: Placement) -> Least | None:
        """The fewest bytes for this placement; None where another device lacks room."""
        placement = self._all(placement)
        needs = []
        for ways in self._ways(placement):
            choices = self._least_choices(ways, None)
            for _ in range(2):      # the arenas of the first plans say what a window of models in turns has anyway
                planned = self._planned(placement, ways, choices)
                if planned is None:
                    break
                host_arenas = self._host_arenas(planned, choices)
                needs.append(Least(-self._left(ways, 0, host_arenas, choices), sum(self._arenas(planned)),
                                   any(way.slots for way in ways), any(choice.window for choice in choices)))
                choices = self._least_choices(ways, host_arenas)
                if not self.turns:
                    break
        return min(needs, default=None)

    def again(self, found: Fetched) -> tuple[Trial, ...]:
        """The plans of a placement, made once more."""
        trials = []
        for part, fetches in zip(found.parts, self.parts, strict=True):
            planned = fetches.planned(part.residents, part.nodes, part.way, part.choice)
            assert planned is not None
            trials.append(fetches.priced(planned, part.way, part.trial.n_slots))
        return tuple(trials)

    def with_more(self, found: Fetched) -> list[tuple[Choice, int]]:
        """For each model what it would fetch with 1 GiB more on the host, and the number of its slots."""
        ways, budget = [part.way for part in found.parts], self.devices[-1].budget + GIB
        choices = self._choices(ways, budget, found.host_arenas, _computing([part.trial for part in found.parts]))
        return [*zip(choices, self._n_slots(ways, self._left(ways, budget, found.host_arenas, choices)), strict=True)]

    def _all(self, placement: Placement) -> Placement:
        residents, nodes = placement
        return [{**part.model.unread, **at} for part, at in zip(self.parts, residents, strict=True)], nodes

    def _ways(self, placement: Placement) -> list[tuple[Way, ...]]:
        """The combinations of ways to have the weights of each model."""
        of = [part.ways(at) for part, at in zip(self.parts, placement[0], strict=True)]
        if math.prod(map(len, of)) <= MOST_WAYS:
            return [*product(*of)]
        return [tuple(ways[0] for ways in of), tuple(ways[-1] for ways in of)]

    def _placed(self, placement: Placement, ways: Sequence[Way]) -> Fetched | None:
        """`place` with these ways."""
        budget, best = self.devices[-1].budget, None
        choices = self._least_choices(ways, None)
        tried: set[tuple[Choice, ...]] = set()
        # Without its window an arena is a little larger or smaller with other weights in the store.
        for _ in range(ROUNDS):
            tried.add(choices)
            planned = self._planned(placement, ways, choices)
            if planned is None:
                return best
            host_arenas = self._host_arenas(planned, choices)
            trials = self._priced(ways, planned, self._n_slots(ways, self._left(ways, budget, host_arenas, choices)))
            found = self._joined(placement, ways, choices, planned, trials)
            if found is not None and best is not None and found.seconds >= best.seconds:
                return best
            best = found or best
            choices = self._choices(ways, budget, host_arenas, _computing(trials))
            if choices in tried:
                return best
        return best

    def _planned(self, placement: Placement, ways: Sequence[Way], choices: Sequence[Choice]) -> list[Planned] | None:
        """The plans of all models; None where a backend does not support a node, or another device lacks room."""
        found = []
        for part, at, nodes, way, choice in zip(self.parts, *placement, ways, choices, strict=True):
            planned = part.planned(at, nodes, way, choice)
            if planned is None:
                return None
            found.append(planned)
        arenas = self._arenas(found)
        held = [sum(of) for of in zip(*(planned.held for planned in found), strict=True)]
        fits = all(held[d] + arenas[d] <= device.budget for d, device in enumerate(self.devices) if d != self._host)
        return found if fits else None

    def _priced(self, ways: Sequence[Way], planned: Sequence[Planned], n_slots: Sequence[int]) -> list[Trial]:
        return [part.priced(of, way, n) for part, of, way, n in zip(self.parts, planned, ways, n_slots, strict=True)]

    def _joined(self, placement: Placement, ways: Sequence[Way], choices: Sequence[Choice],
                planned: Sequence[Planned], trials: Sequence[Trial]) -> Fetched | None:
        """The placement of these trials; None where the host lacks room."""
        arenas = self._arenas(planned)
        left = self.devices[-1].budget - sum(trial.residents[-1] for trial in trials) - arenas[-1]
        if left < 0:
            return None
        parts = []
        for at, nodes, way, choice, trial in zip(*placement, ways, choices, trials, strict=True):
            share = trial.residents[-1] + trial.arenas[-1] + left // len(trials)
            parts.append(Part(trial, at, nodes, way, choice, share))
        return Fetched(tuple(parts), tuple(arenas), self._host_arenas(planned, choices))

    # -- bytes of the host ------------------------------------------------------------------

    def _arenas(self, planned: Sequence[Planned]) -> list[int]:
        """Bytes of each device's arena, of all models together."""
        arenas = [self._join(of) for of in zip(*(of.arenas for of in planned), strict=True)]
        arenas[-1] += self._join([of.work for of in planned]) + sum(of.store for of in planned)
        return arenas

    def _join(self, sizes: Sequence[int]) -> int:
        """Bytes of memory that models in turns share, and others have each its own."""
        return max(sizes) if self.turns else sum(sizes)

    def _host_arenas(self, planned: Sequence[Planned], choices: Sequence[Choice]) -> HostArenas:
        return HostArenas(tuple(of.arenas[-1] - choice.window for of, choice in zip(planned, choices, strict=True)),
                          tuple(of.work for of in planned), tuple(of.store for of in planned))

    def _arena(self, host_arenas: HostArenas, windows: Sequence[int]) -> int:
        """Bytes of the host's arena with windows of these bytes."""
        sizes = [size + window for size, window in zip(host_arenas.arenas, windows, strict=True)]
        return self._join(sizes) + self._join(host_arenas.works) + sum(host_arenas.stores)

    def _left(self, ways: Sequence[Way], budget: int, host_arenas: HostArenas, choices: Sequence[Choice]) -> int:
        """The bytes that are left beside the fewest slots; below 0 where they are exceeded."""
        held = sum(way.fixed + choice.resident for way, choice in zip(ways, choices, strict=True))
        return budget - held - self._arena(host_arenas, [choice.window for choice in choices])

    def _n_slots(self, ways: Sequence[Way], left: int) -> list[int]:
        """The number of slots of each model, where all else leaves so many bytes.  What is expected to be read falls by
        as many seconds with each slot more, so that the model has them of which a byte saves most; of models that save
        as much each has the same part of the slots that it could have."""
        saved = [0.0 if way.slots is None else self.parts[k].reading(way.slots, way.slots.fewest) / max(
            1, way.more_slots) for k, way in enumerate(ways)]
        order = sorted(range(len(ways)), key=lambda k: -saved[k])
        given = [0] * len(ways)
        for _, group in groupby(order, key=saved.__getitem__):
            alike = [*group]
            part = min(1.0, max(0, left) / max(1, sum(ways[k].more_slots for k in alike)))
            for k in alike:
                given[k] = int(part * ways[k].more_slots)
                left -= given[k]
        # Slots are whole: what one leaves may be enough for a slot of another.
        for k in order:
            size = 1 if (slots := ways[k].slots) is None else slots.slot_nbytes
            left += given[k]
            given[k] = min(max(0, left) // size * size, ways[k].more_slots)
            left -= given[k]
        return [way.n_slots(size) for way, size in zip(ways, given, strict=True)]

    # -- which weights stay -----------------------------------------------------------------

    def _frees(self, host_arenas: HostArenas | None) -> list[int]:
        """For each model the bytes of a window that are in the arena of another model anyway."""
        if not self.turns or host_arenas is None:
            return [0] * len(self.parts)
        return [max(host_arenas.arenas) - size for size in host_arenas.arenas]

    def _least_choices(self, ways: Sequence[Way], host_arenas: HostArenas | None) -> tuple[Choice, ...]:
        """The choices that take the fewest bytes; `host_arenas`: None, if they are not known yet."""
        frees = self._frees(host_arenas)
        alone = _least(ways, frees)
        wider = sorted(self._wider(alone, frees).union(self._single(ways, frees)))
        found = [alone, *(_least(ways, [free + more for free in frees]) for more in wider)]
        return min(found, key=partial(self._taken, frees))

    def _choices(self, ways: Sequence[Way], budget: int, host_arenas: HostArenas,
                 computing: Sequence[Sequence[float]]) -> tuple[Choice, ...]:
        """The choices that take about the least time within a budget, or those that take the fewest bytes."""
        frees = self._frees(host_arenas)
        room = budget - sum(way.fixed for way in ways) - self._arena(host_arenas, [0] * len(ways))
        least = self._least_choices(ways, host_arenas)
        found: list[tuple[float, tuple[Choice, ...]]] = []
        tried: set[int] = set()
        left, single = [0], self._single(ways, frees)
        while (left or single) and len(tried) < MOST_WINDOWS:
            # Models can have weights of many sizes: windows of two weights, which most choices need, come first.
            wider = (left or single).pop(0)
            if wider in tried:
                continue
            tried.add(wider)
            one = self._divided(ways, room - wider, [free + wider for free in frees], computing)
            found += [] if one is None else [one]
            left += sorted(self._wider(least if one is None else one[1], frees).difference(tried, left))
        return min(found, key=lambda one: one[0])[1] if found else least

    def _wider(self, choices: Sequence[Choice], frees: Sequence[int]) -> set[int]:
        """By how many bytes more than is free all models in turns may have a window together: as much as one of these
        choices.  What is narrower leaves more for weights that stay, so that each is tried."""
        windows = zip(choices, frees, strict=True) if self.turns else ()
        return {choice.window - free for choice, free in windows if choice.window > free}

    def _single(self, ways: Sequence[Way], frees: Sequence[int]) -> list[int]:
        """By how many bytes more than is free models in turns may have a window together: as much as a weight takes, of
        a model that fetches no other of this size or larger."""
        pairs = zip(ways, frees, strict=True) if self.turns else ()
        return sorted({use.fetched - free for way, free in pairs for use in way.uses if use.fetched > free})

    def _taken(self, frees: Sequence[int], choices: Sequence[Choice]) -> int:
        """Bytes that choices take beside arenas without windows."""
        windows = [max(0, choice.window - free) for choice, free in zip(choices, frees, strict=True)]
        return sum(choice.resident for choice in choices) + (max(windows) if self.turns else sum(windows))

    def _divided(self, ways: Sequence[Way], room: int, frees: Sequence[int],
                 computing: Sequence[Sequence[float]]) -> tuple[float, tuple[Choice, ...]] | None:
        """(The estimated seconds, the choices) where models divide so many bytes; None where these are too few."""
        least = [choice.taken(free) for choice, free in zip(_least(ways, frees), frees, strict=True)]
        if sum(least) > room:
            return None

        @cache
        def chosen(k: int, nbytes: int) -> Choice:
            found = choose(ways[k].uses, least[k] + nbytes, frees[k])
            assert found is not None        # the least choice fits
            return found

        @cache
        def seconds(k: int, nbytes: int) -> float:
            choice = chosen(k, nbytes)
            n_slots = ways[k].n_slots(least[k] + nbytes - choice.taken(frees[k]))
            return self.parts[k].estimate(ways[k], choice, n_slots, computing[k])

        sizes = exchanged([partial(seconds, k) for k in range(len(ways))], room - sum(least))
        # What one model leaves, because weights are whole, may be enough for a weight of another.
        for k in range(len(ways)):
            used = [chosen(i, size).taken(free) - at for i, (size, free, at) in enumerate(
                zip(sizes, frees, least, strict=True))]
            more = room - sum(least) - sum(used) + used[k]
            if ways[k].slots is None and seconds(k, more) < seconds(k, sizes[k]):
                sizes = [*used[:k], more, *used[k + 1 :]]
        return sum(seconds(k, size) for k, size in enumerate(sizes)), tuple(chosen(k, size) for k, size in enumerate(
            sizes))


def _computing(trials: Sequence[Trial]) -> list[list[float]]:
    """For each model the seconds of each graph without fetches."""
    return [[price.seconds - price.stalled for price in trial.prices] for trial in trials]


def _least(ways: Sequence[Way], frees: Sequence[int]) -> tuple[Choice, ...]:
    """For each model alone the choice that takes the fewest bytes."""
    return tuple(least_choice(way.uses, free) for way, free in zip(ways, frees, strict=True))


def exchanged(costs: Sequence[Callable[[int], float]], total: int) -> list[int]:
    """Parts of `total` bytes, one for each function, whose costs have about the least sum.

    From the best of a few divisions on, bytes go from one part to another while the sum falls, in steps that become
    smaller: with convex costs that comes near to the least sum.
    """
    n = len(costs)
    even = [total - (n - 1) * (total // n), *[total // n] * (n - 1)]
    starts = [even, *([total if i == k else 0 for i in range(n)] for k in range(n))]

    def cost(parts: Sequence[int]) -> float:
        return sum(of(nbytes) for of, nbytes in zip(costs, parts, strict=True))

    best = min(starts, key=cost)
    step = total // 2
    while n > 1 and step > total // GRAINS:
        for _ in range(PASSES):
            before = best
            for one, other in permutations(range(n), 2):
                moved = [*best]
                moved[one] -= min(step, best[one])
                moved[other] += min(step, best[one])
                best = min(best, moved, key=cost)       # the first of two that cost the same
            if best == before:
                break
        step //= 2
    return best
