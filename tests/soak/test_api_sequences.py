"""Random calls over backends that raise and give invalid answers: typed errors, and afterwards everything works."""

from api_attack import attempt
from rounds import attack, rounds


@rounds(40, 4_000)
def test_sequences_of_calls_over_flaky_backends(rounds):
    attack(attempt, rounds, raised=10)
