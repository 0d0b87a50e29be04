"""Mutants drawn by a seed: tests notice nearly all of them, and what is equivalent or missed is printed.

By hand: `python tools/mutate.py --seed 7 --sample 200`; GGML_SCHED_SEED and GGML_SCHED_SOAK are those of other soaks.
"""

import os
import random

import mutate
import pytest
from mutation_operators import mutants_of

SAMPLE = 20
NOTICED = 0.8
"""The required share of noticed mutants.  Some mutants are equivalent: a size that is rounded up, a search cut off one
step later."""


@pytest.mark.soak
def test_tests_notice_most_mutants():
    if not mutate.is_built():
        pytest.skip("needs an in-place build")
    seed = int(os.environ.get("GGML_SCHED_SEED") or random.SystemRandom().randrange(1 << 32))
    sample = SAMPLE * int(os.environ.get("GGML_SCHED_SOAK") or 1)
    mutants = mutate.candidates(list(mutate.SOURCES), None)
    random.Random(seed).shuffle(mutants)
    found = mutate.run(mutants, sample, jobs=1, timeout=900, near=False)
    noticed = len(found.get("noticed", []))
    assert noticed >= NOTICED * sample, (f"seed {seed}: {noticed} of {sample}", found)


@pytest.mark.soak
def test_a_mutant_that_must_be_noticed_is_noticed_and_taken_back(tmp_path):
    """The tool edits, builds and restores: otherwise every mutant above would survive or fail for another reason."""
    if not mutate.is_built():
        pytest.skip("needs an in-place build")
    copy = mutate.Copy(tmp_path, timeout=900, near=True)
    library = next(copy.home.glob("ggml_sched/_graph*.so"))
    built = library.stat().st_mtime_ns
    for path in ("ggml_sched/planning/waits.py", "ggml_sched/core/graph/order.pxi"):
        source = (copy.home / path).read_bytes()
        mutant = next(m for m in mutants_of(copy.home, path) if m.operator == "condition")
        assert copy.outcome(mutant) == "noticed", mutant
        assert (copy.home / path).read_bytes() == source and library.stat().st_mtime_ns == built
