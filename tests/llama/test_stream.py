"""Text piece by piece: never a part of a character, the same text in the end, nothing of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import SAMPLES

from ggml_sched.llama import StopStrings, Tokenizer


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_what_decode_gives(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=20))
    for options in ({}, {"continuing": True}, {"skip_special": False}):
        stream = tokenizer.stream(**options)
        joined = "".join([stream.feed(token) for token in ids]) + stream.flush()
        assert joined == tokenizer.decode(ids, **options)
        raw = b"".join(tokenizer.token_bytes(token, options.get("skip_special", True)) for token in ids)
        whole = raw.decode("utf-8", "replace")
        assert joined in (whole, whole.removeprefix(" ")) or not options.get("skip_special", True)


def test_a_character_of_several_tokens_comes_when_it_is_complete(tokenizer):
    ids = tokenizer.encode("x\U0001f999y", add_special=False)
    stream = tokenizer.stream()
    got = [stream.feed(token) for token in ids]
    assert "".join(got) == "x\U0001f999y"
    assert "" in got and "\U0001f999" in got
    assert not any("\ufffd" in piece for piece in got)


def test_bytes_that_cannot_become_a_character_are_replaced_as_soon_as_that_is_certain():
    tokenizer = Tokenizer.from_metadata(SAMPLES["spm"])
    first, second, letter = (tokenizer.token_id(text) for text in ("<0xF0>", "<0x9F>", "<0x41>"))
    stream = tokenizer.stream()
    assert stream.feed(first) == ""
    assert stream.feed(second) == ""
    assert stream.feed(letter) == "\ufffdA"
    assert stream.feed(first) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_the_space_before_a_text_goes_even_when_special_tokens_come_first():
    tokenizer = Tokenizer.from_metadata(SAMPLES["spm"])
    ids = [tokenizer.bos_id, *tokenizer.encode("a b", add_special=False)]
    stream = tokenizer.stream()
    assert "".join(stream.feed(token) for token in ids) == "a b"
    assert tokenizer.decode(ids, skip_special=False) == "<s>a b"
    assert stream.flush() == ""
    assert "".join(stream.feed(token) for token in ids) == "a b"  # a new text after flush


def test_a_wrong_id_leaves_the_stream_as_it_was(tokenizer):
    stream = tokenizer.stream()
    ids = tokenizer.encode("\U0001f999", add_special=False)
    before = stream.feed(*ids[:-1])
    with pytest.raises(ValueError):
        stream.feed(ids[-1], tokenizer.n_vocab)
    assert before + stream.feed(ids[-1]) == "\U0001f999"


# -- stop strings ----------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> str:
    """What is left of a text that comes letter by letter."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab\n", max_size=30), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
       data=st.data())
def test_the_text_before_the_first_stop_string_comes_however_it_is_cut(text, stops, data):
    watch, got, at = StopStrings(stops), "", 0
    while at < len(text):
        n = data.draw(st.integers(1, 5))
        got += watch.feed(text[at : at + n])
        assert cut(text, stops).startswith(got)
        at += n
    got += watch.flush()
    assert got == cut(text, stops)
    assert (watch.matched is None) == (got == text and not any(stop in text for stop in stops))


def test_only_what_may_begin_a_stop_string_is_held_back():
    watch = StopStrings(["\n\nUser:", "END"])
    assert watch.feed("Hello\n") == "Hello"
    assert watch.feed("x") == "\nx"
    assert watch.feed(" E") == " "
    assert watch.feed("NT") == "ENT"
    assert watch.feed(" \n\nUser: more") == " "
    assert watch.matched == "\n\nUser:"
    assert watch.feed("anything") == watch.flush() == ""


def test_one_stop_string_may_be_given_as_a_string():
    watch = StopStrings("ab")
    assert watch.feed("xab") == "x" and watch.matched == "ab"


def test_wrong_stop_strings():
    with pytest.raises(TypeError, match="a stop string is a str"):
        StopStrings([3])
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings(["a", ""])
