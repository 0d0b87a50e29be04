"""Random calls over backends that raise, answer rubbish and lie: typed errors, and afterwards everything works."""

from __future__ import annotations

import pytest
from api_attack import attempt
from rounds import attack, is_replay


def test_sequences_of_calls_over_moody_backends():
    outcomes = attack(attempt, 40)
    assert is_replay() or outcomes["raised"] > 10, outcomes


@pytest.mark.soak
def test_many_sequences_of_calls_over_moody_backends():
    print(attack(attempt, 4_000))
