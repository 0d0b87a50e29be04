"""Of placements that take nearly as long the one with the fewest splits, which costs no more than it spares."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from placed_models import CPU, GPU

import ggml_sched as gs
from ggml_sched.placement import fit
from ggml_sched.placement.candidates import Candidates
from ggml_sched.placement.plainer import PLAIN, plainer, plainest


@dataclass(frozen=True)
class Candidate:
    seconds: float
    splits: int


@pytest.mark.parametrize(("others", "chosen"), [
    ([], 0),
    ([Candidate(1.0 + 0.4 * PLAIN * 0.01, 50)], 1),         # half of the splits may cost half
    ([Candidate(1.0 + 0.6 * PLAIN * 0.01, 50)], 0),
    ([Candidate(1.0 + 0.4 * PLAIN * 0.01, 50), Candidate(1.0 + 0.8 * PLAIN * 0.01, 10)], 2),
    ([Candidate(0.9, 120)], 1),                             # found on the way, and cheaper than all
    ([Candidate(0.9, 120), Candidate(0.9 * (1 + 0.1 * PLAIN * 0.01), 90)], 2),
    ([Candidate(1.0, 100)], 0),
])
def test_the_splits_that_are_spared_pay_for_the_time(others, chosen):
    all_ = [Candidate(1.0, 100), *others]
    assert plainest(all_, 0.01) is all_[chosen]


def test_solutions_that_were_found_with_fines_have_the_price_and_the_worth_of_bytes_without(monkeypatch):
    folder = Path(__file__).parents[1] / "data" / "graphs"
    graphs = [gs.load_graph(folder / f"llama-2-7b-{run}.json.gz") for run in ("decode", "prefill512")]
    seen, worths = [], []
    plan = Candidates.plan

    def watched(self, tables, chains, solution, *given):
        seen.append((solution, plan(self, tables, chains, solution, *given)))
        return seen[-1][1]

    def watching(candidates, tables):
        worths.append(candidates.worth)
        with monkeypatch.context() as patch:
            patch.setattr(Candidates, "plan", watched)
            plainer(candidates, tables)

    monkeypatch.setattr(fit, "plainer", watching)
    gs.fit(graphs, [GPU.replace(memory=4 << 30, reserve=300 << 20), CPU], gs.Link(25e9, 8e-6))
    assert seen
    for solution, found in seen:
        assert solution.cost == pytest.approx(found.seconds, rel=1e-3)
        assert solution.multipliers == worths[0]
