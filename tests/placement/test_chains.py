"""Chains made of others: phases say which stages stand between two that hold caches on a device, and chains of what is
entered have only paths with caches on all required devices."""

from dataclasses import replace
from itertools import product

import numpy as np
from random_chains import least, near_budget, random_chain

from ggml_sched.placement.chain import Chain
from ggml_sched.placement.chains import entered, phased

RNG = np.random.default_rng(11)


def cheapest(chain):
    """The least seconds of all paths, without budgets."""
    value = chain.start
    for number in chain.classes:
        value = (value[:, None] + chain.cost[number].min(0)).min(0)
    return value.min()


def test_phases_forbid_what_is_too_large_between_two_stages_with_caches_and_nothing_else():
    compared = 0
    for _ in range(60):
        chain = random_chain(RNG, 2, n_stages=4, n_patterns=3)
        held = [RNG.random(len(cost)) < 0.4 for cost in chain.cost]
        small = [RNG.random(len(cost)) < 0.5 for cost in chain.cost]
        inner = replace(chain, cost=tuple(cost[rows] for cost, rows in zip(chain.cost, small, strict=True)),
                        memory=tuple(rows[kept] for rows, kept in zip(chain.memory, small, strict=True)))
        found = cheapest(phased(chain, inner, held))
        best = np.inf
        for patterns in product(*(range(len(chain.cost[c])) for c in chain.classes)):
            at = [k for k, (c, p) in enumerate(zip(chain.classes, patterns, strict=True)) if held[c][p]]
            if not at or all(small[chain.classes[k]][patterns[k]] for k in range(at[0] + 1, at[-1])):
                value = chain.start
                for c, p in zip(chain.classes, patterns, strict=True):
                    value = (value[:, None] + chain.cost[c][p]).min(0)
                best = min(best, value.min())
        assert found == best
        compared += best < np.inf and best > cheapest(chain)
    assert compared > 5


def test_a_chain_of_what_is_entered_has_the_paths_with_caches_on_every_required_device_and_no_others():
    rng, compared, dearer = np.random.default_rng(12), 0, 0
    for _ in range(120):
        n = int(rng.integers(2, 4))
        chain = random_chain(rng, n, n_stages=int(rng.integers(2, 5)), n_patterns=3)
        budget = near_budget(rng, chain)
        held = [rng.random((len(cost), n)) < 0.4 for cost in chain.cost]
        required = sorted(rng.choice(n, int(rng.integers(1, n + 1)), replace=False).tolist())
        best = np.inf
        for patterns in product(*(range(len(chain.cost[c])) for c in chain.classes)):
            pairs = list(zip(chain.classes, patterns, strict=True))
            if all(any(held[c][p, d] for c, p in pairs) for d in required):
                alone = Chain(tuple(range(len(pairs))), tuple(chain.cost[c][[p]] for c, p in pairs),
                              tuple(chain.memory[c][[p]] for c, p in pairs), chain.start)
                best = min(best, least(alone, budget))
        assert least(entered(chain, held, required), budget) == best
        compared += best < np.inf
        dearer += least(chain, budget) < best < np.inf
    assert compared > 20 and dearer > 2
