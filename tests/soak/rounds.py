"""Seeded rounds: how often an attack is repeated, and how to repeat one round alone.

GGML_SCHED_SOAK=50 makes every attack 50 times as long; GGML_SCHED_SEED=123 makes it one round, of that seed.  A round
that fails says its seed; one that does not end is ended.
"""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

import pytest

PATIENCE = 60
"""Seconds after which a round hangs."""


class Hangs(BaseException):
    """Raised into a round that does not end; no handler of ours catches it."""


@contextmanager
def patience():
    """Raise Hangs in the main thread when the block takes too long."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number, frame):
        raise Hangs(f"nothing for {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rounds(few: int, many: int):
    """Run a test with `few` rounds, and as a soak with `many`."""
    return pytest.mark.parametrize("rounds", [few, pytest.param(many, marks=pytest.mark.soak)])


def attack(round: Callable[[random.Random], str | None], rounds: int, **more_than: int) -> None:
    """Call round(rng) with seeds 0, 1, ...; each outcome named in `more_than` must come that often and more."""
    only = os.environ.get("GGML_SCHED_SEED")
    seeds = [int(only)] if only else range(rounds * int(os.environ.get("GGML_SCHED_SOAK", "1")))
    outcomes: Counter = Counter()
    for seed in seeds:
        try:
            with patience():
                outcomes[round(random.Random(seed))] += 1
        except BaseException as error:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
            error.add_note(f"Again, alone: GGML_SCHED_SEED={seed} python -m pytest -m 'soak or not soak' '{test}'")
            raise
    print(outcomes)
    assert only or all(outcomes[name] > least for name, least in more_than.items()), outcomes
