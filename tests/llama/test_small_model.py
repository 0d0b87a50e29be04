"""The small model of the package is whole, small, and has learnt Python."""

import ast
import math
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.llama import SMALL_PROMPT, Sampler, Tokenizer, load, open_gguf, random_llama, small_model

HELD_OUT = Path(__file__).parents[1] / "data" / "models" / "held_out.txt"
"""Written for this test: the model has not seen it."""


@pytest.fixture(scope="module")
def metadata():
    with open_gguf(small_model()) as file:
        return {key: list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
                for key, value in file.metadata.items()}


@pytest.fixture(scope="module")
def backend():
    with gs.CpuBackend(1) as backend:
        yield backend


@pytest.fixture
def model(backend):
    with load(small_model(), [backend], n_ctx=512) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    return Tokenizer.from_gguf(small_model())


def bits_a_byte(model, ids, text: str) -> float:
    """What the text costs, its first token left out."""
    logits = model.eval(ids)[:-1].astype(np.float64)
    top = logits.max(axis=-1)
    log_sum = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    nats = (log_sum - logits[np.arange(len(ids) - 1), ids[1:]]).sum()
    return nats / math.log(2) / len(text.encode())


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_it_is_small():
    assert 100_000 < small_model().stat().st_size <= 2_000_000


def test_metadata_is_complete(metadata):
    vocab = metadata["llama.vocab_size"]
    assert metadata["general.architecture"] == "llama"
    assert "Python" in metadata["general.description"] and metadata["general.name"]
    assert metadata["general.license"] == "mit"
    assert metadata["llama.context_length"] == 512
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == len(metadata["tokenizer.ggml.token_type"]) == vocab
    assert metadata["tokenizer.ggml.bos_token_id"] == metadata["tokenizer.ggml.eos_token_id"] < vocab


def test_every_merge_makes_a_token_of_two(metadata):
    """All but the bytes and the token that ends a text come from a merge, in the order of their ids."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    made = [merge.replace(" ", "") for merge in merges]
    assert all(part in set(tokens) for merge in merges for part in merge.split(" "))
    assert made == tokens[-len(merges):] and len(tokens) == len(merges) + 257


def test_every_text_comes_back_from_its_tokens(tokenizer):
    text = HELD_OUT.read_text("utf-8") + "\tnaïve ☃ \U0001f40d\r\n  \0"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_has_learnt_python(model, backend, tokenizer):
    """Text that it never saw costs a third of what it costs a model that knows nothing."""
    text = HELD_OUT.read_text("utf-8")
    ids = tokenizer.encode(text)[:500]
    text = tokenizer.decode(ids)
    assert bits_a_byte(model, ids, text) < 1.5
    n_vocab = tokenizer.n_vocab
    with load(random_llama(0, n_vocab=n_vocab), [backend], n_ctx=512) as knows_nothing:
        assert bits_a_byte(knows_nothing, ids, text) > 3.0


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_it_continues_the_default_prompt_with_python(model, tokenizer, temperature):
    """At least four lines from the prompt on are a piece of a class that Python reads."""
    prompt = tokenizer.encode(SMALL_PROMPT)
    text = SMALL_PROMPT + tokenizer.decode(list(model.generate(prompt, 60, Sampler(temperature, seed=1))))
    lines = textwrap.dedent(text).splitlines()[:-1]
    read = next((n for n in range(len(lines), 0, -1) if parses("\n".join(lines[:n]))), 0)
    assert read >= 4, text
    names = {node.attr for node in ast.walk(ast.parse("\n".join(lines[:read]))) if isinstance(node, ast.Attribute)}
    assert names and lines[1].startswith("    ")
