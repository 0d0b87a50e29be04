"""Vocabularies that are missing, wrong or not supported: TokenizerError that names the field, in under a second."""

import io
import pickle
import time

import numpy as np
import pytest
from vocabularies import SAMPLES

import ggml_sched as gs
from ggml_sched.llama import Tokenizer, TokenizerError, write_gguf
from ggml_sched.llama.gguf import Kind

pytest.importorskip("tokenizers")

SMALL = {
    "spm": {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1]},
    "bpe": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["a", "b", "ab", "<|endoftext|>"], "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": [1, 1, 1, 3]},
}
SECONDS = 1.0


def refused(metadata: dict, field: str, match: str) -> None:
    start = time.process_time()
    with pytest.raises(TokenizerError, match=match) as error:
        Tokenizer.from_metadata(metadata, "model.gguf")
    assert time.process_time() - start < SECONDS
    assert error.value.field == field
    assert str(error.value).startswith(f"model.gguf: {field}: ")


def test_the_small_ones_are_right():
    for metadata in SMALL.values():
        tokenizer = Tokenizer.from_metadata(metadata)
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize(("base", "field"), [(base, field) for base, own in (("spm", "scores"), ("bpe", "merges"))
                                             for field in ("model", "tokens", own)])
def test_missing_fields(base, field):
    key = f"tokenizer.ggml.{field}"
    refused({name: value for name, value in SMALL[base].items() if name != key}, key, "is missing")


def test_a_file_without_a_tokenizer_says_so():
    refused({}, "tokenizer.ggml.model", "is missing: the file holds no tokenizer")
    for name in ("no_vocab", "none"):
        refused({"tokenizer.ggml.model": name}, "tokenizer.ggml.model", "holds no tokenizer")


def test_a_pre_tokenizer_that_is_not_given_is_the_default_one():
    metadata = {key: value for key, value in SMALL["bpe"].items() if key != "tokenizer.ggml.pre"}
    assert Tokenizer.from_metadata(metadata).pre == "default"


WRONG = [
    *(("bpe", "model", model, "model", "is not supported") for model in (
        "bert", "t5", "rwkv", "plamo2", "", "llama\0", "x" * 10000)),
    ("bpe", "pre", "llama-99", "pre", "'llama-99', an unknown pre-tokenizer; known are default, .*llama-bpe.*qwen2"),
    ("bpe", "model", 3, "model", "is 3, not a string"),
    ("bpe", "pre", 3, "pre", "is 3, not a string"),
    ("bpe", "tokens", 3, "tokens", "is 3, not an array of strings"),
    ("bpe", "tokens", "abc", "tokens", "is 'abc', not an array of strings"),
    ("bpe", "tokens", [], "tokens", "is empty"),
    ("bpe", "tokens", ["a", 3], "tokens[1]", "is 3, not a string"),
    ("bpe", "tokens", ["a", "\udcff"], "tokens[1]", "is not UTF-8"),
    ("bpe", "tokens", ["a", "b" * 513], "tokens[1]", "has 513 characters, the limit is 512"),
    ("bpe", "tokens", ["b" * 500] * 9000, "tokens", "4500000 characters together"),
    ("bpe", "merges", 3, "merges", "is 3, not an array of strings"),
    ("bpe", "merges", ["ab"], "merges[0]", "is 'ab', not two tokens"),
    ("bpe", "merges", ["a b", "a "], "merges[1]", "not two tokens"),
    ("bpe", "merges", [" a"], "merges[0]", "not two tokens"),
    ("bpe", "merges", ["a b", "b a"], "merges[1]", "'ba' is no token"),
    ("bpe", "merges", ["a c"], "merges[0]", "'c' is no token"),
    ("bpe", "merges", [""], "merges[0]", "not two tokens"),
    ("bpe", "token_type", [1, 1, 1], "token_type", "has 3 elements, the vocabulary has 4 tokens"),
    ("bpe", "token_type", [1, 1, 1, 9], "token_type[3]", "is 9, not a token type"),
    ("bpe", "token_type", [1, -1, 1, 1], "token_type[1]", "is -1, not a token type"),
    ("bpe", "token_type", [1.0] * 4, "token_type", "not an array of integers"),
    ("bpe", "token_type", ["x"] * 4, "token_type", "not an array of integers"),
    ("bpe", "token_type", 3, "token_type", "is 3, not an array of integers"),
    ("spm", "scores", [0.0] * 7, "scores", "has 7 elements, the vocabulary has 6 tokens"),
    ("spm", "scores", [0.0, 0.0, 0.0, 1.0, float("nan"), 0.0], "scores[4]", "is nan, not a finite number"),
    ("spm", "scores", [0.0, 0.0, 0.0, float("-inf"), 0.0, 0.0], "scores[3]", "is -inf, not a finite number"),
    ("spm", "scores", ["x"] * 6, "scores", "not an array of floats"),
    ("spm", "bos_token_id", 6, "bos_token_id", "is 6, the vocabulary has 6 tokens"),
    ("spm", "eos_token_id", -1, "eos_token_id", "is -1, the vocabulary has 6 tokens"),
    ("spm", "eot_token_id", 1 << 40, "eot_token_id", "the vocabulary has 6 tokens"),
    ("spm", "padding_token_id", True, "padding_token_id", "is True, not a token id"),
    ("spm", "unknown_token_id", "1", "unknown_token_id", "is '1', not a token id"),
    ("spm", "fim_sep_token_id", 1.0, "fim_sep_token_id", "is 1.0, not a token id"),
    ("spm", "add_bos_token", 1, "add_bos_token", "is 1, not a bool"),
    ("spm", "add_eos_token", "yes", "add_eos_token", "is 'yes', not a bool"),
    ("spm", "add_space_prefix", 1.0, "add_space_prefix", "is 1.0, not a bool"),
]


@pytest.mark.parametrize(("base", "key", "value", "field", "match"), WRONG,
                         ids=[f"{row[0]}-{row[3]}-{str(row[2])[:20]}" for row in WRONG])
def test_wrong_fields_are_named(base, key, value, field, match):
    refused(SMALL[base] | {f"tokenizer.ggml.{key}": value}, f"tokenizer.ggml.{field}", match)


def test_arrays_of_a_file_are_checked_as_lists_are():
    for key, value, match in (
            ("tokens", (Kind.ARRAY, [[1], [2]]), "is an array of ARRAY, not of strings"),
            ("tokens", np.arange(4, dtype=np.int32), "is an array of I32, not of strings"),
            ("token_type", ["1"] * 4, "is an array of STRING, not of numbers")):
        out = io.BytesIO()
        try:
            write_gguf(out, SMALL["bpe"] | {f"tokenizer.ggml.{key}": value}, {})
        except (TypeError, ValueError):
            continue  # what the writer does not write, the test above has as a list
        with pytest.raises(TokenizerError, match=match):
            Tokenizer.from_gguf(out.getvalue())


def test_minus_one_in_an_unsigned_field_is_no_token():
    tokenizer = Tokenizer.from_metadata(SMALL["spm"] | {"tokenizer.ggml.padding_token_id": 0xFFFFFFFF})
    assert tokenizer.pad_id is None


def test_tokens_without_text_and_tokens_twice_are_taken():
    tokenizer = Tokenizer.from_metadata(SMALL["spm"] | {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "", "a"]})
    assert tokenizer.encode("a", add_special=False)[-1] == 5  # the last of equal ones, as in llama.cpp
    assert tokenizer.token_text(4) == "[EMPTY_4]"


def test_the_first_of_equal_merges_counts():
    tokens = ["a", "b", "c", "ab", "bc", "<|endoftext|>"]
    tokenizer = Tokenizer.from_metadata({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "b c", "a b"]})
    assert [tokens[i] for i in tokenizer.encode("abc")] == ["ab", "c"]


def test_a_file_that_is_no_gguf_is_a_file_format_error():
    with pytest.raises(gs.FileFormatError):
        Tokenizer.from_gguf(b"nothing of the kind")


def test_errors_are_pickled_with_their_field():
    error = TokenizerError("wrong", "tokenizer.ggml.tokens")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field) == ("wrong", "tokenizer.ggml.tokens")


def test_long_tokens_that_merge_in_many_ways_load_quickly():
    tokens = ["<unk>", "<s>", "</s>", *("a" * n for n in range(1, 513))]
    start = time.process_time()
    tokenizer = Tokenizer.from_metadata({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.scores": [0.0] * len(tokens)})
    assert time.process_time() - start < SECONDS
    ids = tokenizer.encode("a" * 1000, add_special=False)
    assert [tokens[i] for i in ids[-2:]] == ["a" * 512, "a" * 488]


def test_long_texts_are_no_square():
    tokenizer = Tokenizer.from_metadata(SAMPLES["spm"])
    tied = Tokenizer.from_metadata(SAMPLES["spm"] | {
        "tokenizer.ggml.scores": [0.0] * len(SAMPLES["spm"]["tokenizer.ggml.tokens"])})
    for text in ("a" * 50_000, "the end of " * 5_000, " " * 50_000):
        for each in (tokenizer, tied):
            assert each.decode(each.encode(text)) == text
