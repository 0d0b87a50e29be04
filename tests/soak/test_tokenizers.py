"""Mutated vocabularies and chat templates: each is refused with a gs.Error, or it works; nothing else may happen."""

from __future__ import annotations

import pytest
from rounds import attack, is_replay

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tokenizer_attack import attempt_template, attempt_vocabulary  # noqa: E402 - after the libraries


def test_mutated_vocabularies_are_refused_or_work():
    outcomes = attack(attempt_vocabulary, 100)
    assert is_replay() or min(outcomes["refused"], outcomes["works"]) > 5, outcomes


def test_mutated_templates_are_refused_or_work():
    outcomes = attack(attempt_template, 200)
    assert is_replay() or min(outcomes["refused"], outcomes["works"]) > 5, outcomes


@pytest.mark.soak
def test_many_mutated_vocabularies_are_refused_or_work():
    print(attack(attempt_vocabulary, 20_000))


@pytest.mark.soak
def test_many_mutated_templates_are_refused_or_work():
    print(attack(attempt_template, 50_000))
