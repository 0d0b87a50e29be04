"""Seeded rounds: how often an attack is repeated, and how to repeat one round alone.

GGML_SCHED_SOAK=50 makes every attack 50 times as long; GGML_SCHED_SEED=123 makes it one round, of that seed.  A round
that fails says its seed; one that does not end is ended.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

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


def attack(round: Callable[[random.Random], str | None], rounds: int) -> Counter:
    """Call round(rng) with seeds 0, 1, ...; counts what it returns."""
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
    return outcomes


def is_replay() -> bool:
    """Whether a single seed is replayed: then checks of frequencies do not apply."""
    return "GGML_SCHED_SEED" in os.environ
