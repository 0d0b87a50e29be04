"""Chains of the placements whose copies of inputs leave much of an arena free: each such placement has a path there."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from placed_models import CPU, FAST, GPU, solution_of, windowed

from ggml_sched.placement import class_needs, costs, stage_classes, table_chains
from ggml_sched.placement.arenas import Case
from ggml_sched.placement.chain import Choice
from ggml_sched.placement.devices import Link, Links
from ggml_sched.placement.facts import facts
from ggml_sched.placement.last_bounds import LastBounds
from ggml_sched.placement.open_cases import Open
from ggml_sched.placement.phases import Phase, PhasedCase
from ggml_sched.placement.tables import Tables

LINK = Link(25e9, 8e-6)


def least(phased, table, path):
    """The least seconds of a path of the phased chain that has the patterns and devices of `path`, a path of `every`;
    and that path."""
    chain, n = phased.chain, len(table.states)
    best = {state: (cost, ()) for state, cost in enumerate(chain.start.tolist()) if np.isfinite(cost)}
    for choice, c in zip(path, chain.classes, strict=True):
        rows = np.flatnonzero(phased.rows[c] == choice.pattern).tolist()
        found = {}
        for (state, (cost, before)), row, after in product(best.items(), rows, range(choice.state_out, len(chain.start),
                                                                                   n)):
            total = cost + float(chain.cost[c][row, state, after])
            if np.isfinite(total) and total < found.get(after, (np.inf,))[0]:
                found[after] = total, (*before, Choice(row, state, after))
        best = found
    return min(best.values(), key=lambda one: one[0], default=(np.inf, ()))


@pytest.mark.parametrize("several", [False, True])
def test_each_placement_that_keeps_the_phases_has_a_path_that_costs_no_more(several, monkeypatch):
    # No pattern is left out.
    monkeypatch.setattr(table_chains, "undominated", lambda cost, memory: np.arange(len(cost)))
    devices = (FAST, GPU, CPU)
    table = Tables([facts(windowed(tokens=16))], (1.0,), devices, Links(devices, LINK))
    n, whole, random = len(devices), table.chain(), np.random.default_rng(7)
    case = Case((1 << 50,) * n, (0,) * n, (None,) * n * table.n_sets)
    solutions = []
    for _ in range(150):
        path, state = [], 0
        for c in whole.classes:
            reached = np.argwhere(np.isfinite(whole.cost[c][:, state, :]))
            pattern, after = reached[random.integers(len(reached))].tolist()
            path.append(Choice(pattern, state, after))
            state = after
        solutions.append(solution_of(whole, path))
    at = [(number, d) for number in range(len(table.lasting)) for d in range(n - 1)]
    assert len(at) > 2
    kept = left = 0
    for one in at:
        wanted = [one, at[(at.index(one) + 1) % len(at)]] if several else [one]
        needs = {of: [table.needed(whole, solution.path, of)[of[1]] for solution in solutions] for of in wanted}
        phases = tuple(Phase(*of, int(np.quantile(needs[of], 0.7))) for of in wanted)
        phased = PhasedCase(table, case, {}, phases)
        for i, solution in enumerate(solutions):
            own = tuple(Choice(int(whole.rows[c][choice.pattern]), choice.state_in, choice.state_out)
                        for c, choice in zip(whole.classes, solution.path, strict=True))
            cost, path = least(phased, table, own)
            if all(needs[phase[:2]][i] < phase.need for phase in phases):
                kept += 1
                assert cost == pytest.approx(solution.cost, rel=1e-9)
                assert phased.translated(path) == own
            elif path:
                left += 1       # in other variants it needs less, at the same cost or a higher one
                assert cost >= solution.cost * (1 - 1e-9)
        every = phased.every
        assert [len(rows) for rows in every.rows] == [len(held) for held in table.holds_caches]
    assert kept > 20


def test_a_case_whose_arenas_hold_a_path_while_copies_stay_is_not_divided_by_them():
    devices = (FAST, GPU, CPU)
    table = Tables([facts(windowed(tokens=16))], (1.0,), devices, Links(devices, LINK))
    n, chain, large = len(devices), table.chain(), 1 << 50
    path, state = [], 0
    for c in chain.classes:
        pattern, after = np.argwhere(np.isfinite(chain.cost[c][:, state, :]))[0].tolist()
        path.append(Choice(pattern, state, after))
        state = after
    path = solution_of(chain, path)
    case = Case((large,) * n, (large - 1,) * n, (None,) * n * table.n_sets)
    made = Open((case,), ({},), [chain], chain, case.floors, path, ())
    added = []
    cases = SimpleNamespace(tables=[table], candidates=SimpleNamespace(budgets=(large,) * n),
                            add=lambda *of: added.append(of))
    last = LastBounds(cases, None, None)
    assert table.lasting and not last._lasting_at(made, 0.0, path.path, (large,) * n) and not added
    made.cases = (case._replace(floors=(0,) * n),)
    assert last._lasting_at(made, 0.0, path.path, (large,) * n) and len(added) == 2


def test_needs_are_the_same_where_none_are_kept(monkeypatch):
    """Needs beside copies that last differ from those of the same sites without."""
    devices = (FAST, GPU, CPU)

    def found():
        table = Tables([facts(windowed(tokens=tokens)) for tokens in (1, 16)], (1.0, 1.0), devices,
                       Links(devices, LINK), [False, True])
        within = [table._needs_within(number) for number in range(len(table.lasting))]
        return table.cached, table.needs, within

    (cached, first, within), plain = found(), class_needs.needs
    for module in (class_needs, costs, stage_classes):
        monkeypatch.setattr(module, "needs", lambda *args, known=None, **more: plain(*args, **more))
    other = found()
    assert cached == other[0] and all((one == two).all() for one, two in zip(first, other[1], strict=True))
    assert len(within) > 1 and all((one == two).all() for of, others in zip(within, other[2], strict=True)
                                   for ones, twos in zip(of, others, strict=True)
                                   for one, two in zip(ones, twos, strict=True))
