"""Tables of strings and merging: a dict and the `tokenizers` library agree, and nothing outside the bytes is read."""

import itertools
import pickle
import random
import time
from array import array

import numpy as np
import pytest

from ggml_sched.llama._strings import RankMerger, ScoreMerger, StringTable, find_strings
from ggml_sched.llama.gguf import Array

SECONDS = 1.0


def table(texts: list[str]) -> StringTable:
    return StringTable(*Array.of_strings(texts).strings)


def test_a_table_finds_the_last_of_equal_strings_and_no_others():
    rng = random.Random(1)
    texts = ["".join(rng.choices("ab\u00e9\u4e2d\U0001f600", k=rng.randrange(1, 20))) for _ in range(5000)]
    texts += rng.sample(texts, 500)
    expected = {text: i for i, text in enumerate(texts)}
    found = table(texts)
    assert len(found) == len(texts)
    assert all(found[text] == i for text, i in expected.items())
    assert [found.text(i) for i in range(len(texts))] == texts
    for text in ("", "never", "a" * 100, "\ud800", "ab\x00"):
        assert text not in found and found.get(text) is None
    with pytest.raises(KeyError):
        found["never"]
    for i in (-1, len(texts)):
        with pytest.raises(IndexError):
            found.text(i)


@pytest.mark.parametrize("kept", [bytes, memoryview])
def test_a_pickled_table_has_its_strings(kept):
    memory, starts = Array.of_strings(["ab", "", "\u4e2d"]).strings
    again = pickle.loads(pickle.dumps(StringTable(kept(memory), starts)))
    assert [again.text(i) for i in range(3)] == ["ab", "[EMPTY_1]", "\u4e2d"] and again["\u4e2d"] == 2
    assert len(pickle.loads(pickle.dumps(table([])))) == 0


def test_an_empty_string_is_no_text_and_has_a_name():
    found = table(["a", "", "b"])
    assert found.text(1) == "[EMPTY_1]" and "" not in found and "[EMPTY_1]" not in found and found["b"] == 2


def test_strings_are_measured_in_characters():
    assert table(["ab", "\u4e2d\U0001f600\u00e9", ""]).measure() == (5, 3, 1, -1)
    assert table([]).measure() == (0, 0, 0, -1)


@pytest.mark.parametrize("raw", [b"\x80", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xed\xa0\x80",
                                 b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xe4\xb8", b"\xc3", b"a\xff", b"\xc3a",
                                 b"\xf0\x9f\x98", b"\xe4\xb8\x41"])
def test_bytes_that_are_no_utf_8_are_noticed_as_python_does(raw):
    with pytest.raises(UnicodeDecodeError):
        raw.decode()
    memory = (1).to_bytes(8, "little") + b"x" + len(raw).to_bytes(8, "little") + raw
    assert StringTable(memory, array("Q", [0, 9])).measure()[3] == 1


def test_every_character_is_utf_8():
    texts = [chr(c) for c in (*range(0, 0xD800, 7), *range(0xE000, 0x110000, 97), 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF,
                              0xE000, 0xFFFF, 0x10000, 0x10FFFF)]
    assert table(texts).measure() == (len(texts), 1, 0, -1)


def test_strings_outside_the_bytes_are_refused():
    memory = (3).to_bytes(8, "little") + b"abc"
    for starts in ([1], [4], [11], [1 << 63], [(1 << 64) - 4]):
        with pytest.raises(ValueError, match="does not lie inside 11 bytes"):
            StringTable(memory, array("Q", starts))
        with pytest.raises(ValueError, match="does not lie inside 11 bytes"):
            RankMerger(table(["a"]), memory, array("Q", starts), False)
    huge = (1 << 64) - 1
    starts = array("Q", [0, 0])
    assert find_strings(memory, 0, starts) == (1, 11) and starts[0] == 0
    assert find_strings(huge.to_bytes(8, "little"), 0, starts) == (0, 0)
    assert find_strings(b"", 0, starts) == (0, 0)
    empty = memory[:11] + bytes(8)      # a string of no bytes, which ends where the memory ends
    assert find_strings(empty, 0, starts) == (2, 19) and list(starts[:2]) == [0, 11]
    assert find_strings(memory, 0, array("Q")) == (0, 0)


def test_scores_and_bytes_are_for_all_tokens():
    with pytest.raises(ValueError, match="2 scores"):
        ScoreMerger(table(["a"]), np.zeros(2, np.float32), np.zeros(256, np.int32), -1)


@pytest.mark.parametrize("whole_words", [False, True])
def test_merges_by_rank_are_those_of_the_library(whole_words):
    library = pytest.importorskip("tokenizers")
    rng = random.Random(2)
    letters = list("abc\u0120\u00e9")
    tokens, merges = list(letters), []
    while len(tokens) < 150:
        left, right = rng.choices(tokens, k=2)
        if left + right not in tokens and len(left + right) < 9:
            tokens.append(left + right)
            merges.append((left, right))
    # Other ways to the same tokens, with later ranks.
    merges += {(t[:i], t[i:]): None for t in tokens for i in range(1, len(t))
               if t[:i] in tokens and t[i:] in tokens and (t[:i], t[i:]) not in merges}
    model = library.Tokenizer(library.models.BPE({t: i for i, t in enumerate(tokens)}, merges,
                                                 ignore_merges=whole_words))
    lines = Array.of_strings([" ".join(pair) for pair in merges])
    merger = RankMerger(table(tokens), *lines.strings, whole_words)
    assert merger.wrong == -1
    for _ in range(2000):
        word = "".join(rng.choices(letters, k=rng.randrange(0, 40)))
        assert merger.encode([(word, (0, 0))]) == model.encode(word).ids, word


def test_a_wrong_merge_is_named_and_merges_nothing():
    tokens = table(["a", "b", "ab"])
    for lines, wrong in ((["a b"], -1), (["a b", "b a"], 1), (["a c"], 0), (["ab"], 0), (["a "], 0), ([""], 0),
                         (["a b", "a" * 5000 + " b"], 1), ([], -1)):
        merger = RankMerger(tokens, *Array.of_strings(lines).strings, False)
        assert merger.wrong == wrong
        assert merger.encode([("ab", (0, 0))]) == ([2] if lines == ["a b"] else [0, 1])


def test_a_long_text_merges_in_any_order():
    """A heap of pairs grows and shrinks over 20,000 letters; scores have the last word."""
    texts = ["a", "b", "ab", "abab", "abababab", "ba"]
    ids = table(texts)
    merger = ScoreMerger(ids, np.array([0, 0, -1, -2, -3, -4], np.float32), np.full(256, -1, np.int32), -1)
    assert merger.encode("ab" * 10_000) == [4] * 2500
    assert merger.encode("") == [] and merger.encode("x") == []


def test_strings_that_were_chosen_to_collide_are_spread_over_the_table():
    """The top bit of a word passes a multiplication unchanged, so that the next word could cancel it for any seed."""
    blocks = [b"B" * 8 + b"C" * 8, b"B" * 7 + b"\xc2" + b"CCC\xc3CCC\xc3"]
    length = (14 * 16).to_bytes(8, "little")
    memory = b"".join(length + b"".join(choice) for choice in itertools.product(blocks, repeat=14))
    starts = array("Q", range(0, len(memory), 8 + 14 * 16))
    start = time.process_time()
    StringTable(memory, starts)
    assert time.process_time() - start < SECONDS


def test_a_length_that_changes_in_the_file_ends_with_the_file():
    """A model's file is mapped: another process may write to it."""
    memory = bytearray(Array.of_strings(["ab", "cd"]).strings[0])
    found = StringTable(memory, array("Q", [0, 10]))
    assert (found.get("cd"), found.text(1)) == (1, "cd")
    memory[10:18] = (1 << 40).to_bytes(8, "little")
    assert (found.get("cd"), found.text(1), found.measure()) == (1, "cd", (4, 2, 0, -1))
    memory[0:8] = b"\xff" * 8
    assert found.get("ab") is None and len(found.text(0)) == 12


def test_a_vocabulary_of_one_token():
    tokens = table(["a"])
    merger = ScoreMerger(tokens, np.zeros(1, np.float32), np.full(256, -1, np.int32), 0)
    assert merger.encode("aba") == [0, 0, 0] and merger.encode("") == []
    assert RankMerger(tokens, *Array.of_strings([]).strings, True).encode([("a", (0, 1)), ("b", (1, 2))]) == [0]


@pytest.mark.parametrize("make", [lambda: find_strings(None, 0, array("Q")), lambda: StringTable(None, array("Q")),
                                  lambda: StringTable(b"", None),
                                  lambda: ScoreMerger(table(["a"]), None, np.zeros(256, np.int32), 0),
                                  lambda: ScoreMerger.__new__(ScoreMerger),
                                  lambda: RankMerger(table(["a"]), None, None, False)])
def test_none_is_no_memory(make):
    with pytest.raises(TypeError):
        make()


ROW = np.zeros(4, np.uint64)


@pytest.mark.parametrize("make", [
    lambda: StringTable(b"", np.zeros(2, np.int64)), lambda: StringTable(b"", np.zeros(2, np.float64)),
    lambda: StringTable(np.zeros(2, np.uint16), ROW), lambda: StringTable(b"", ROW.reshape(2, 2)),
    lambda: StringTable(b"", ROW[::2]), lambda: StringTable(b"", ROW.astype(">u8")),
    lambda: find_strings(b"", 0, bytes(8)), lambda: find_strings(b"", 0, memoryview(ROW).toreadonly()),
    lambda: ScoreMerger(table(["a"]), np.zeros(1), np.zeros(256, np.int32), 0),
    lambda: ScoreMerger(table(["a"]), np.zeros(1, np.float32), np.zeros(256, np.uint32), 0)])
def test_arrays_of_other_types_and_shapes_are_refused(make):
    with pytest.raises((ValueError, BufferError)):
        make()


def test_an_array_is_held_while_a_table_reads_it():
    memory, starts = bytearray(b"\1" + bytes(7) + b"a"), array("Q", [0])
    held = StringTable(memory, starts)
    for change in (lambda: starts.append(1), memory.clear):
        with pytest.raises(BufferError):
            change()
    assert held.get("a") == 0
    del held
    starts.append(1)
    memory.clear()
