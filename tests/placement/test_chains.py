"""Chains made of others: phases say which stages stand between two that hold caches on a device."""

from dataclasses import replace
from itertools import product

import numpy as np
from random_chains import random_chain

from ggml_sched.placement.chains import phased

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
