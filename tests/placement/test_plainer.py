"""Of placements that take nearly as long the one with the fewest splits, which costs no more than it spares."""

from dataclasses import dataclass

import pytest

from ggml_sched.placement.plainer import PLAIN, plainest


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
