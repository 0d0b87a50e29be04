"""Tokenizers: llama.cpp's ids for every pre-tokenizer, special tokens, bytes; text comes back, whole or in pieces."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python
from small_llama import written
from vocabularies import SAMPLES

import ggml_sched as gs
from ggml_sched.llama import StopStrings, Tokenizer, TokenizerError, open_gguf
from ggml_sched.llama.text.bpe import byte_letters
from ggml_sched.llama.text.pretokenizers import PRETOKENIZERS
from ggml_sched.llama.text.spm import Spm
from ggml_sched.llama.text.vocabulary import Vocabulary

pytest.importorskip("tokenizers")

BPE, SPM, TEXTS = SAMPLES["bpe"], SAMPLES["spm"], SAMPLES["texts"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_metadata(BPE | {"tokenizer.ggml.pre": "qwen2"})


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer.from_metadata(SPM)


def case_name(case: dict) -> str:
    return case["vocabulary"] + "".join(
        f" {key.rpartition('.')[2]}={value}" for key, value in case["changed"].items() if not isinstance(value, list))


# -- ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SAMPLES["cases"], ids=case_name)
def test_ids_are_those_of_llama_cpp(case):
    tokenizer = Tokenizer.from_metadata(SAMPLES[case["vocabulary"]] | case["changed"])
    for text, ids in zip(TEXTS, case["ids"], strict=True):
        assert tokenizer.encode(text, case["add_special"], case["parse_special"]) == ids, text


def test_pre_tokenizers_of_equal_patterns_are_sampled_once_and_all_of_them_load():
    sampled = {PRETOKENIZERS[case["changed"]["tokenizer.ggml.pre"]] for case in SAMPLES["cases"]
               if "tokenizer.ggml.pre" in case["changed"]}
    assert sampled == set(PRETOKENIZERS.values())
    for name in PRETOKENIZERS:
        tokenizer = Tokenizer.from_metadata(BPE | {"tokenizer.ggml.pre": name})
        assert tokenizer.decode(tokenizer.encode("Hello, world 42")) == "Hello, world 42"


def test_a_tokenizer_comes_from_a_path_from_bytes_from_a_file_object_and_from_an_open_file(tmp_path, spm):
    data = written({"general.architecture": "llama", **SPM})
    path = tmp_path / "vocab.gguf"
    path.write_bytes(data)
    with open_gguf(data) as file, open(path, "rb") as stream:
        for source in (path, str(path), data, stream, file):
            assert Tokenizer.from_gguf(source).encode("Hello world") == spm.encode("Hello world")
        assert not file.closed


def test_bos_and_eos_are_added_where_the_file_says_so(spm):
    words = spm.encode("Hello", add_special=False)
    assert spm.encode("Hello") == [spm.bos_id, *words] == [1, *words]
    both = Tokenizer.from_metadata(SPM | {"tokenizer.ggml.add_eos_token": True})
    assert both.encode("Hello") == [1, *words, 2]
    assert both.encode("Hello", add_special=False) == words
    none = Tokenizer.from_metadata(SPM | {"tokenizer.ggml.add_bos_token": False})
    assert none.encode("Hello") == words
    assert none.encode("") == []


def test_control_tokens_in_a_text_are_text_unless_asked_for_and_user_defined_tokens_always_count(bpe):
    text = "<|im_start|>ab c<|im_end|>"
    special = [bpe.token_id(name) for name in ("<|im_start|>", "ab c", "<|im_end|>")]
    assert bpe.encode(text, parse_special=True) == special
    plain = bpe.encode(text)
    assert special[1] in plain and special[0] not in plain and special[2] not in plain
    assert bpe.decode(plain) == text
    assert bpe.decode(special) == "ab c"
    assert bpe.decode(special, skip_special=False) == text


def test_longer_special_tokens_are_found_first():
    tokens = [*BPE["tokenizer.ggml.tokens"], "<a>", "<a><b>", "<b>"]
    types = [*BPE["tokenizer.ggml.token_type"], 3, 3, 3]
    tokenizer = Tokenizer.from_metadata(
        BPE | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    n = len(tokens)
    assert tokenizer.encode("<a><b><a><b", parse_special=True)[:2] == [n - 2, n - 3]


def test_of_special_tokens_of_equal_length_the_lowest_id_is_found_first():
    """Whatever the hash seed of the process, which orders sets of letters."""
    tokens = ["<unk>", "<s>", "</s>", *"xyz", "xyz", "yzx", "zxy"]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": [0.0] * len(tokens), "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 4, 4, 4],
                "tokenizer.ggml.add_space_prefix": False}
    code = (f"from ggml_sched.llama import Tokenizer; t = Tokenizer.from_metadata({metadata!r})\n"
            "print(*map(t.token_text, t.encode('xyzxy', add_special=False)))")
    for seed in "01234567":
        assert run_python("-c", code, PYTHONHASHSEED=seed).stdout.split() == ["xyz", "x", "y"]


def test_end_of_generation_tokens_are_known_by_their_text_and_shown_as_control_tokens():
    types = [1] * len(BPE["tokenizer.ggml.tokens"])  # a file that marks all as normal
    tokenizer = Tokenizer.from_metadata(BPE | {"tokenizer.ggml.token_type": types})
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.eos_ids == {end, tokenizer.token_id("<|endoftext|>")}
    assert tokenizer.is_special(end) and tokenizer.token_bytes(end, skip_special=True) == b""
    named = Tokenizer.from_metadata(BPE | {"tokenizer.ggml.eot_token_id": 7})
    assert 7 in named.eos_ids and named.eot_id == 7


def with_tokens(texts: list[str], kind: int, **named: str) -> Tokenizer:
    """A BPE vocabulary with some more tokens of one type; `named`: the texts of those that metadata names by id."""
    tokens = [*BPE["tokenizer.ggml.tokens"], *texts]
    return Tokenizer.from_metadata(BPE | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*BPE["tokenizer.ggml.token_type"], *[kind] * len(texts)],
        **{f"tokenizer.ggml.{key}_token_id": tokens.index(text) for key, text in named.items()}})


def ends_and_marks(tokenizer: Tokenizer, texts: list[str]) -> tuple[set[str], set[str]]:
    """Which of the tokens end a generation, and which are control tokens."""
    ids = {text: tokenizer.token_id(text) for text in texts}
    marks = {text for text, i in ids.items() if tokenizer.is_special(i)}
    assert marks == {text for text, i in ids.items() if tokenizer.decode([i]) == ""}
    return {text for text, i in ids.items() if i in tokenizer.eos_ids}, marks


ENDS = ["</s>", "<turn|>", "<|tool_response>", "[e~[", "<|eot_id|>", "<|end|>", "<|calls|>", "<end_of_turn>",
        "<|end_of_text|>", "<|eom_id|>", "_<EOT>", "[EOS]", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|fim_pad|>", "<reponame>", "<|file_sep|>"]
MARKS = ["<|prefix|>", "<fim-suffix>", "<\uff5cfim\u2581end\uff5c>", "\u2581<PRE>", "<|code_middle|>"]


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user_defined"])
def test_texts_that_llama_cpp_knows_are_control_tokens_whatever_a_file_says(kind):
    for text in ENDS + MARKS:
        tokenizer = with_tokens([text, "<x>"], kind)
        ends, marks = ends_and_marks(tokenizer, [text, "<x>"])
        assert (ends, marks - {"<x>"}) == ({text} & {*ENDS}, {text}), text
        i = tokenizer.token_id(text)
        assert tokenizer.encode(text, parse_special=True) == [i]
        assert i not in tokenizer.encode(text)


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user_defined"])
@pytest.mark.parametrize("pair", [("<|return|>", "<|call|>"), ("<|return|>", "<|calls|>"), ("<|call|>", "<|flush|>"),
                                  ("<|calls|>", "<|flush|>")])
def test_a_message_of_gpt_oss_or_solar_is_no_end(pair, kind):
    ends, marks = ends_and_marks(with_tokens([*pair, "<|end|>"], kind), [*pair, "<|end|>"])
    assert ends == marks == {*pair}


def test_the_frame_of_gpt_oss_is_shown():
    names = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"]
    assert ends_and_marks(with_tokens(names, 3), names) == (set(), set())


def test_the_closing_tag_of_gemma_4_is_text():
    names = ["<|tool_response>", "</s>"]
    for kind in (1, 3, 4):
        tokenizer = with_tokens(names, kind, eos="</s>")
        assert ends_and_marks(tokenizer, names) == ({"<|tool_response>"},) * 2
        assert tokenizer.token_id("</s>") not in tokenizer.encode("</s>", parse_special=True)


@pytest.mark.parametrize(("key", "text"), [
    ("fim_pre", "<PRE>"), ("prefix", "<PRE>"), ("suffix", "<SUF>"), ("middle", "<MID>"), ("fim_suf", "<SUF>"),
    ("fim_mid", "<MID>"), ("fim_pad", "[PAD]"), ("fim_rep", "<REPO>"), ("fim_sep", "<|file_sep|>")])
def test_where_a_file_names_a_token_for_filling_in_texts_mean_nothing(key, text):
    tokenizer = with_tokens([text, "<x>"], 4, **{key: "<x>"})
    ends, marks = ends_and_marks(tokenizer, [text, "<x>"])
    assert (ends, marks) == ({"<x>"} if key in ("fim_pad", "fim_rep", "fim_sep") else set(), set())


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "deepseek-v3", "gpt-4o"])
def test_a_letter_of_unicode_16_has_no_category(pre):
    """llama.cpp knows Unicode 15.1: the letter U+105C0 and the digit U+116D0 are neither."""
    first = "\U000105c0".encode()[0]       # also of U+116D0
    letter = next(c for c, byte in byte_letters().items() if byte == first)
    words = ["a" + letter, "1" + letter, "." + letter]
    tokenizer = Tokenizer.from_metadata({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": [*byte_letters(), *words],
        "tokenizer.ggml.merges": [f"{word[0]} {word[1]}" for word in words], "tokenizer.ggml.add_bos_token": False})

    def first_token(text: str) -> str:
        return tokenizer.token_text(tokenizer.encode(text)[0])

    for char in "\U000105c0", "\U000116d0":
        assert [first_token(c + char) for c in "a1"] == ["a", "1"]
        if pre != "deepseek-v3":        # whose punctuation has a category, too
            assert first_token("." + char) == words[2]
    assert first_token("a\U00010400") == words[0]      # a letter of Unicode 3.1


# -- merging by score ------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(ANY_TEXT, st.text("ab e\u2581=-\u00e9\u4e2d", max_size=60)))
@pytest.mark.parametrize("tied", [False, True], ids=["distinct scores", "tied scores"])
def test_merges_are_those_of_a_search_for_the_best_pair(text, tied):
    changed = {"tokenizer.ggml.scores": [0.0] * len(SPM["tokenizer.ggml.tokens"])} if tied else {}
    vocabulary = Vocabulary.from_metadata(SPM | {"tokenizer.ggml.add_space_prefix": False} | changed)
    parts = list(text.replace(" ", "\u2581"))
    while pairs := [(-vocabulary.scores[vocabulary.ids[pair]], i) for i in range(len(parts) - 1)
                    if (pair := parts[i] + parts[i + 1]) in vocabulary.ids]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    model, expected = Spm(vocabulary), []
    for part in parts:
        known = vocabulary.ids.get(part)
        expected += [vocabulary.ids[f"<0x{byte:02X}>"] for byte in part.encode()] if known is None else [known]
    assert model.encode(text, True) == expected


def toy(tokens: list[str], scores: list[float], types=None, **changed) -> Tokenizer:
    return Tokenizer.from_metadata({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *tokens],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *scores],
        "tokenizer.ggml.token_type": [2, 3, 3, *(types or [1] * len(tokens))],
        "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False} | changed)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


def test_the_highest_score_merges_first_and_the_leftmost_of_equal_ones():
    assert pieces(toy(["a", "b", "c", "ab", "bc"], [0, 0, 0, -1, -2]), "abc") == ["ab", "c"]
    assert pieces(toy(["a", "b", "c", "ab", "bc"], [0, 0, 0, -2, -1]), "abc") == ["a", "bc"]
    assert pieces(toy(["a", "b", "c", "ab", "bc"], [0, 0, 0, -1, -1]), "abc") == ["ab", "c"]
    assert pieces(toy(["a", "b", "c", "bc", "ab"], [0, 0, 0, -1, -1]), "abc") == ["ab", "c"]


def test_equal_scores_merge_from_the_left():
    assert pieces(toy(["a", "b", "aa", "aaa", "aaaa"], [0, 0, -9, -9, -9]), "aaaaaaa") == ["aaaa", "aaa"]
    assert pieces(toy(["a", "b", "aa", "aaa", "aaaa"], [0, 0, -9, -9, -9]), "aaaaaabaa") == ["aaaa", "aa", "b", "aa"]
    assert pieces(toy(["a", "aa", "aaaa"], [0, -9, -9]), "aaaaa") == ["aaaa", "a"]
    tokens, scores = ["<", ">", "s>", "/", "s", "</", "<s>", "</s>"], [0, 0, -4, 0, 0, -5, 9, 9]
    assert pieces(toy(tokens, scores), "<s></s></s<s>") == ["<s>", "</s>", "</", "s", "<s>"]
    assert pieces(toy([*tokens, "<s>>"], [*scores, 10]), "<s>>") == ["<s>>"]


def test_letters_that_are_no_tokens_still_merge_into_one():
    tokenizer = toy(["xy", "<0x78>", "z"], [-1, 0, 0], [1, 6, 1])
    assert pieces(tokenizer, "xyzx") == ["xy", "z", "<0x78>"]
    assert pieces(tokenizer, "y") == ["<unk>"]  # no token for its byte


def test_characters_outside_the_vocabulary_are_their_bytes(spm):
    assert [spm.token_text(i) for i in spm.encode("\U0001f999", add_special=False)] == [
        "\u2581", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]


def test_phi_3_swallows_the_spaces_after_its_special_tokens():
    tokenizer = Tokenizer.from_metadata(SPM | {"general.name": "Phi-3 mini"})
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|> \n\tHi", False, True) == [end, *tokenizer.encode("Hi", False)]
    assert tokenizer.encode("<|im_end|> \n\t", False, True) == [end]


# -- text comes back -------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_what_is_encoded_is_decoded(text, bpe, spm):
    assert bpe.decode(bpe.encode(text)) == text
    # U+2581 is how a vocabulary of this kind spells a space.
    assert spm.decode(spm.encode(text)) == text.replace("\u2581", " ")


def test_every_byte_has_a_token_and_comes_back(bpe, spm):
    for tokenizer in (bpe, spm):
        seen = {tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)}
        assert {bytes([byte]) for byte in range(256)} <= seen


def test_bytes_that_are_no_text_become_replacement_characters(spm):
    lone = spm.token_id("<0xF0>")
    assert spm.decode([lone]) == "\ufffd"
    assert spm.decode([lone, spm.token_id("<0x41>")]) == "\ufffdA"


def test_the_space_before_a_text_is_taken_away_once_and_kept_when_continuing(spm):
    ids = spm.encode("Hello world")
    assert spm.decode(ids) == "Hello world"
    assert spm.decode(ids, continuing=True) == " Hello world"
    assert spm.decode(spm.encode("  two")) == "  two"
    assert Tokenizer.from_metadata(SPM | {"tokenizer.ggml.add_space_prefix": False}).decode(ids) == " Hello world"


# -- text piece by piece -----------------------------------------------------------------


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


# -- wrong texts and ids ---------------------------------------------------------------


def test_only_str_is_text(bpe):
    for wrong in (b"Hello", None, 3, ["Hello"]):
        with pytest.raises(TypeError, match="a text is a str"):
            bpe.encode(wrong)


def test_a_lone_surrogate_is_named_in_a_prompt_with_marks(bpe):
    with pytest.raises(TokenizerError, match=r"character 2 of the text is the lone surrogate U\+D800"):
        bpe.encode_marked("a\ufdd0b\ud800", "\ufdd0")


def test_a_lone_surrogate_is_named(bpe):
    with pytest.raises(TokenizerError, match=r"character 2 of the text is the lone surrogate U\+D800") as error:
        bpe.encode("ab\ud800")
    assert isinstance(error.value, gs.Error) and isinstance(error.value, ValueError)
    assert bpe.encode("ab")


def test_ids_outside_the_vocabulary_are_named(bpe):
    for wrong in (-1, bpe.n_vocab, 1 << 70):
        with pytest.raises(ValueError, match=f"token id {wrong} is not one of 0 to {bpe.n_vocab - 1}"):
            bpe.decode([wrong])
        with pytest.raises(ValueError, match="is not one of"):
            bpe.token_bytes(wrong)
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError, match="a token id is an int"):
            bpe.decode([wrong])
    with pytest.raises(TokenizerError, match="token id an int of 16610 bits is not one"):
        bpe.decode([10**5000])
    for wrong in (5, None, "abc", b"abc", bytearray(b"abc"), np.array(5), object()):
        with pytest.raises(TypeError, match="token ids are a sequence of ints, not "):
            bpe.decode(wrong)
    with pytest.raises(TypeError, match="'text' has incorrect type"):
        bpe.token_id(None)
    for kind in (np.int32, np.int64, np.uint16, object):
        assert bpe.decode(np.array(bpe.encode("Hello"), kind)) == "Hello"


def test_a_tokenizer_can_be_pickled_and_copied(bpe, spm):
    for tokenizer in (bpe, spm):
        text = "Hello <|im_end|> \u00e9\u4e2d"
        for again in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
            assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)
            assert repr(again) == repr(tokenizer)


# -- the library -----------------------------------------------------------------------


def test_without_the_library_the_error_says_what_to_install():
    code = ("import sys; sys.modules['tokenizers'] = sys.modules['jinja2'] = None\n"
            "import ggml_sched.llama as llama\n"
            "for make in (lambda: llama.Tokenizer.from_metadata({'tokenizer.ggml.model': 'gpt2',"
            "'tokenizer.ggml.tokens': ['a'], 'tokenizer.ggml.merges': []}), llama.ChatTemplate):\n"
            "    try: make()\n"
            "    except (llama.TokenizerError, llama.ChatTemplateError) as error:"
            "print(type(error).__name__, 'ggml-sched[llama]' in str(error))\n")
    assert run_python("-c", code).stdout.split() == ["TokenizerError", "True", "ChatTemplateError", "True"]


def test_importing_the_package_loads_neither_library():
    code = "import sys, ggml_sched.llama; print([name for name in ('tokenizers', 'jinja2') if name in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"
