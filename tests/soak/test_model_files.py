"""Mutated GGUF models: each is refused with a gs.Error, or it runs; nothing else may happen."""

import random

from model_attack import MODELS, attempt, mutated_model, mutated_parts
from rounds import attack, rounds


def mutated(rng: random.Random) -> str:
    return attempt(mutated_model(rng), rng)


def test_models_as_they_are_run():
    for data in MODELS:
        assert attempt(data, random.Random(0)) == "runs"


@rounds(100, 20_000)
def test_mutated_models_are_refused_or_run(rounds):
    attack(mutated, rounds, refused=5, runs=5)


@rounds(40, 5_000)
def test_mutated_parts_of_models_are_refused_or_run(rounds, tmp_path):
    attack(lambda rng: attempt(mutated_parts(rng, tmp_path), rng), rounds, refused=2, runs=2)
