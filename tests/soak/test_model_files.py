"""Mutated GGUF models: each is refused with a gs.Error, or it runs; nothing else may happen."""

from __future__ import annotations

import random

import pytest
from model_attack import MODELS, attempt, mutated_model, mutated_parts
from rounds import attack, is_replay


def mutated(rng: random.Random) -> str:
    return attempt(mutated_model(rng), rng)


def test_models_as_they_are_run():
    for data in MODELS:
        assert attempt(data, random.Random(0)) == "runs"


def test_mutated_models_are_refused_or_run():
    outcomes = attack(mutated, 100)
    assert is_replay() or min(outcomes["refused"], outcomes["runs"]) > 5, outcomes


def test_mutated_parts_of_models_are_refused_or_run(tmp_path):
    outcomes = attack(lambda rng: attempt(mutated_parts(rng, tmp_path), rng), 40)
    assert is_replay() or min(outcomes["refused"], outcomes["runs"]) > 2, outcomes


@pytest.mark.soak
def test_many_mutated_parts_of_models_are_refused_or_run(tmp_path):
    print(attack(lambda rng: attempt(mutated_parts(rng, tmp_path), rng), 5_000))


@pytest.mark.soak
def test_many_mutated_models_are_refused_or_run():
    print(attack(mutated, 20_000))
