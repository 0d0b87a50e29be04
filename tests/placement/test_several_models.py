"""Several models on the same devices: beside every placement of two small ones, with arenas apart and shared."""

from __future__ import annotations

import random
from itertools import product

import pytest
from small_models import devices, layered, sized

import ggml_sched as gs
from ggml_sched.placement.devices import Links
from ggml_sched.placement.trials import Trials

LINK = gs.Link(5e8, 1e-6)


def two_models(seed: int) -> tuple[list[list[gs.Graph]], list[gs.Device]]:
    """A token and a prompt of each of two models, whose arenas are much of the smaller device."""
    groups = []
    for caches in (True, False):
        pair = []
        for tokens in (1, 64):
            rng = random.Random(2 * seed + caches)
            pair.append(layered(rng, 2, tokens, caches=caches))
        groups.append(pair)
    total = sum(sum(sized(group[0]).values()) for group in groups)
    return groups, devices(random.Random(seed), 2, total, tight=0.9)


def cheapest(groups: list[list[gs.Graph]], given: list[gs.Device], turns: bool) -> float:
    """The least seconds of any two placements whose real plans keep the budgets together."""
    ordered = sorted(given, key=lambda device: device.host)
    found = []
    for group in groups:
        trials = Trials(group, ordered, Links(ordered, LINK), (1.0, 0.0), 1.0)
        names = list(trials.sizes)
        found.append([trials.run(dict(zip(names, chosen, strict=True)))
                      for chosen in product(range(len(ordered)), repeat=len(names))])
    best = float("inf")
    for one, two in product(*found):
        arenas = [max(pair) if turns else sum(pair) for pair in zip(one.arenas, two.arenas, strict=True)]
        held = [a + b + arena for a, b, arena in zip(one.residents, two.residents, arenas, strict=True)]
        if all(size <= device.budget for size, device in zip(held, ordered, strict=True)):
            best = min(best, one.seconds + two.seconds)
    return best


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_two_models_are_near_the_best_of_all_placements(seed: int, turns: bool) -> None:
    groups, given = two_models(seed)
    best = cheapest(groups, given, turns)
    fit = gs.fit(groups, given, LINK, turns=turns)
    fit.verify()
    assert fit.seconds <= best * (1 + fit.within)
    assert fit.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("turns", [False, True])
def test_each_of_several_models_has_cases_of_arenas_of_its_own(turns: bool) -> None:
    """Without them no arena counts in the bound, and gaps are 30 to 130 %."""
    gaps = []
    for seed in range(6):
        groups, given = two_models(seed)
        gaps.append(gs.fit(groups, given, LINK, turns=turns).gap)
    assert max(gaps) < 0.2
