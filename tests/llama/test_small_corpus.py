"""The small model's training text: the library's sources, equal from run to run, some of them held out."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "small_corpus.py"
if not TOOL.exists():
    pytest.skip("needs the source tree", allow_module_level=True)


@pytest.fixture(scope="module")
def corpus():
    pytest.importorskip("tokenizers")
    spec = importlib.util.spec_from_file_location("small_corpus", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def split(corpus):
    return corpus.sources()


def test_the_split_is_by_file_and_the_same_every_time(corpus, split):
    learned, held_out = ([name for name, _ in files] for files in split)
    assert not set(learned) & set(held_out)
    assert 0 < len(held_out) < len(learned) / 5
    assert corpus.sources() == split


def test_it_is_the_library_without_its_tests_and_tables(split):
    names = {name for files in split for name, _ in files}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages", "encodings"} & set(name.split("/"))]


def test_documents_lie_between_ends_and_come_back(corpus, split):
    files = split[1][:3]
    tokenizer = corpus.train_tokenizer((text for _, text in files), 400)
    ids = corpus.encode(tokenizer, files)
    assert tokenizer.get_vocab_size() == 400 and tokenizer.token_to_id(corpus.END) == 0
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False).split(corpus.END) == [
        "", *(text for _, text in files), ""]
