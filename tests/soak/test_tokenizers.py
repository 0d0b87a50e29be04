"""Mutated vocabularies and chat templates: each is refused with a gs.Error, or it works; nothing else may happen."""

import pytest
from rounds import attack, rounds

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tokenizer_attack import attempt_template, attempt_vocabulary  # noqa: E402 - after the libraries


@rounds(100, 20_000)
def test_mutated_vocabularies_are_refused_or_work(rounds):
    attack(attempt_vocabulary, rounds, refused=5, works=5)


@rounds(200, 50_000)
def test_mutated_templates_are_refused_or_work(rounds):
    attack(attempt_template, rounds, refused=5, works=5)
