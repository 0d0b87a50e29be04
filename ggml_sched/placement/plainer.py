"""Prefers fewer splits: of the placements with nearly the least seconds, one with the fewest splits becomes the best.

Such placements are found by solving chains in which a stage costs more for each further device (`chains.fined`), with
larger and larger fines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_sched.placement.candidates import Candidates, Found, chains_of, grown
from ggml_sched.placement.chain import Chain, Choice, Solution
from ggml_sched.placement.chains import fined, joined
from ggml_sched.placement.tables import Tables

__all__ = ["plainer", "plainest"]

FINES = (2.0, 8.0, 30.0)
"""Seconds added to a stage's cost for each further device in it, as multiples of the seconds of the dearest split."""
PLAIN = 0.2
"""A placement without splits may take longer than the cheapest by this part of `within`; one with half as many splits
as the cheapest, by half of that."""
FEW_SPLITS = 3
"""A placement with at most this many splits for each device is not replaced."""
ROUNDS = 4
"""How often one fine is solved and planned with, at most; each round assumes larger arenas."""


def plainer(candidates: Candidates, tables: Sequence[Tables]) -> None:
    """Make the placement with the fewest splits the best, of those that take nearly as long as the cheapest."""
    first = candidates.best
    devices = tables[0].devices
    assert first is not None
    if candidates.fine or not first.cases or first.splits <= FEW_SPLITS * len(devices):
        return
    most = first.seconds * (1 + PLAIN * candidates.within)
    chains = chains_of(tables, first.cases, first.shared)
    weight = sum(sum(table.weights) for table in tables) * max(device.split for device in devices)
    tried: set[tuple[Choice, ...]] = set()
    plain, worth = joined(chains), candidates.worth
    fitting = [first]
    for factor in FINES:
        chain = joined([fined(chain, table.states, factor * weight)
                        for chain, table in zip(chains, tables, strict=True)])
        assumed: Sequence[int] = first.arenas
        for _ in range(ROUNDS):
            solution = candidates.solve(chain, assumed, effort="some")
            if solution is None or solution.path is None or solution.path in tried:
                break
            tried.add(solution.path)
            found = candidates.plan(tables, chains, priced(solution, plain, worth), first.cases, first.shared)
            if found.seconds > most:
                break
            if not any(found.missing):
                fitting.append(found)
                break
            assumed = grown(assumed, found)
    candidates.best = plainest([*fitting, candidates.best or first], candidates.within)


def priced(solution: Solution, chain: Chain, worth: tuple[float, ...]) -> Solution:
    """A solution of a chain with fines as one of `chain`, which has none; `worth`: the multipliers there."""
    assert solution.path is not None
    cost = float(chain.start[solution.path[0].state_in]) + sum(
        float(chain.cost[number][choice.pattern, choice.state_in, choice.state_out])
        for number, choice in zip(chain.classes, solution.path, strict=True))
    return replace(solution, cost=cost, bound=0.0, multipliers=worth)


def plainest(fitting: Sequence[Found], within: float) -> Found:
    """The placement with the fewest splits, of the cheapest one and of those that exceed its seconds by no more than
    `PLAIN` allows for the splits that they save."""
    cheapest = min(fitting, key=lambda found: (found.seconds, found.splits))

    def is_near(found: Found) -> bool:
        spared = 1 - found.splits / max(1, cheapest.splits)
        return found.seconds <= cheapest.seconds * (1 + PLAIN * within * spared)

    return min((found for found in fitting if found is cheapest or is_near(found)),
               key=lambda found: (found.splits, found.seconds))
