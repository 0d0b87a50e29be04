"""Text of a model: streamed in whole characters, ended at stop conditions, independent of earlier calls."""

import numpy as np
import pytest
from interrupting import interrupted
from small_llama import SHAPES, SMALL, TOKENS, contents, written

import ggml_sched as gs
from ggml_sched.llama import (
    ContextFull,
    Generation,
    ModelClosed,
    Sampler,
    SamplingError,
    Sequence,
    SequenceError,
    TokenizerError,
    greedy,
    load,
    random_llama,
    small_model,
)
from ggml_sched.llama.generation import Stats
from ggml_sched.llama.synthetic import random_model

PROMPT = "    def __init__(self, name, value):"


def with_end(n: int) -> tuple[bytes, list[int]]:
    """A model whose end token is what it generates after n others, and those."""
    with load(SMALL, n_ctx=64) as model:
        ids = list(model.generate(TOKENS, 16))
    end = next(i for i in range(n, 16) if ids[i] not in ids[:i])
    return random_llama(1, **SHAPES, extra={"tokenizer.ggml.eos_token_id": ids[end]}), ids[:end]


# -- vocabularies --------------------------------------------------------------------------


def test_a_vocabulary_of_fewer_tokens_than_logits_is_refused_before_a_text_begins():
    pytest.importorskip("tokenizers")
    metadata, tensors = contents(small_model().read_bytes())
    short = {f"tokenizer.ggml.{key}": metadata[f"tokenizer.ggml.{key}"][:1748] for key in ("tokens", "token_type")}
    with load(written({**metadata, **short, "tokenizer.ggml.merges": ["a b"]}, tensors), n_ctx=64) as model:
        with pytest.raises(TokenizerError, match="1748 tokens, the model 2048 logits"):
            model.generate("def f(")
        assert len(list(model.generate([1, 2], 4, ignore_eos=True))) == 4


# -- ids -----------------------------------------------------------------------------------


def test_reading_a_generation_of_ids_gives_its_ids():
    with load(SMALL, n_ctx=64) as model:
        ids = list(model.generate(TOKENS, 8, ignore_eos=True))
        model.reset()
        got = model.generate(TOKENS, 8, ignore_eos=True, echo=True)
        assert got.read() == ids == got.tokens and got.finish_reason == "length"


def test_ids_come_as_they_are_asked_for():
    with load(SMALL, n_ctx=64) as model:
        got = model.generate(TOKENS, 8)
        assert isinstance(got, Generation) and iter(got) is got and model.n_past == 0
        assert got.stats == Stats(len(TOKENS), 0, 0.0, 0, 0.0) and repr(got) == "<Generation of 0 tokens: going on>"
        first = next(got)
        assert model.n_past == len(TOKENS) and got.tokens == [first] and got.finish_reason is None
        rest = list(got)
        assert got.tokens == [first, *rest] and len(got.tokens) == 8
        assert got.finish_reason == "length" and list(got) == [] and repr(got) == "<Generation of 8 tokens: length>"
        assert model.n_past == len(TOKENS) + 7      # the last one is not part of the sequence yet
        assert got.stats.n_prompt == len(TOKENS) and got.stats.n_evaluated == 7
        assert got.stats.seconds > 0 and got.stats.prompt_seconds > 0
        model.reset()
        assert list(model.generate(TOKENS, 8, echo=True)) == TOKENS + got.tokens
        assert list(model.generate([1], 0)) == []
        assert list(model.generate([1], 2, lambda logits: 0)) == [0, 0]


def test_generation_ends_with_the_context():
    with load(SMALL, n_ctx=20) as model:
        for n in (100, None):
            got = model.generate(TOKENS, n)
            ids = list(got)
            # The last token needs no room.
            assert len(ids) == 20 - len(TOKENS) + 1 and got.finish_reason == "length" and model.n_past == 20
            model.reset()
        with pytest.raises(ContextFull):
            next(model.generate([1] * 21))
        assert model.n_past == 0


@pytest.mark.parametrize("shift", [False, True])
def test_generation_ends_with_the_positions_that_a_model_has_learned(shift):
    with load(random_model("gpt2", 1, metadata={"context_length": 16}), n_ctx=64, n_seq=2) as model:
        model.sequence(1).eval([1, 2])
        got = model.generate(TOKENS, 100, shift=shift, ignore_eos=True)
        assert len(got.read()) == 16 - len(TOKENS) + 1
        assert got.finish_reason == "length" and model.n_past == 16 and model.n_free > 0


@pytest.mark.parametrize(("data", "n_keep", "n"), [
    (SMALL, 18, 30), (SMALL, 19, 9), (SMALL, 20, 9), (SMALL, 90, 9), (random_model("gpt2", 1), 0, 9),
    (random_model("mamba", 1), 0, 9)])
def test_a_shift_that_would_make_no_room_ends_the_text(data, n_keep, n):
    """All is kept, or all but one token, or the model cannot shift."""
    with load(data, n_ctx=20) as model:
        got = model.generate(TOKENS, 30, shift=True, n_keep=n_keep)
        assert len(list(got)) == n and got.finish_reason == "length" and model.n_past == 20


def test_generation_ends_before_an_end_token():
    data, expected = with_end(3)
    with load(data, n_ctx=64) as model:
        got = model.generate(TOKENS, 16)
        assert list(got) == expected and got.finish_reason == "eos"
        assert model.n_past == len(TOKENS) + len(expected)
        model.reset()
        got = model.generate(TOKENS, 16, ignore_eos=True)
        assert len(list(got)) == 16 and got.finish_reason == "length"


def test_what_was_generated_stays_when_something_fails(monkeypatch):
    with load(SMALL, n_ctx=64) as model:
        expected = list(model.generate(TOKENS, 6))
        model.reset()
        got = model.generate(TOKENS, 6)
        ids = [next(got), next(got)]
        compute = model.scheduler.compute

        def failing(graph, wait=True):
            raise KeyboardInterrupt

        monkeypatch.setattr(model.scheduler, "compute", failing)
        with pytest.raises(KeyboardInterrupt):
            next(got)
        assert got.tokens == ids and model.n_past == len(TOKENS) + 1
        monkeypatch.setattr(model.scheduler, "compute", compute)
        assert ids + list(got) == expected


def test_an_interrupted_generation_goes_on_with_the_same_ids():
    with gs.CpuBackend(1) as backend, load(SMALL, [backend], n_ctx=64) as model:
        expected = list(model.generate(TOKENS, 5))
        at = 1
        while True:
            model.reset()
            got = model.generate(TOKENS, 5)
            next(got)
            if (where := interrupted(lambda: next(got), at)) is None:  # noqa: B023
                break
            list(got)
            assert got.tokens == expected, where
            at += 3
        assert at > 300


def test_a_complete_evaluation_whose_return_is_interrupted_is_not_repeated(monkeypatch):
    """Of the prompt, or of a token."""
    def interrupted_eval(sequence, *args, **options):
        evaluate(sequence, *args, **options)
        raise KeyboardInterrupt

    evaluate = Sequence.eval
    with load(SMALL, n_ctx=64) as model:
        expected = list(model.generate(TOKENS, 5))
        for n in (0, 2):
            model.reset()
            got = model.generate(TOKENS, 5)
            for _ in range(n):
                next(got)
            with monkeypatch.context() as patch:
                patch.setattr(Sequence, "eval", interrupted_eval)
                with pytest.raises(KeyboardInterrupt):
                    next(got)
            list(got)
            assert got.tokens == expected and model.sequence(0).tokens == TOKENS + expected[:-1]


def test_a_change_after_a_failed_evaluation_is_noticed(monkeypatch):
    def failing(*args, **options):
        raise KeyboardInterrupt

    with load(SMALL, n_ctx=64) as model:
        for n in (0, 2):
            model.reset()
            got = model.generate(TOKENS, 5)
            for _ in range(n):
                next(got)
            with monkeypatch.context() as patch:
                patch.setattr(model.scheduler, "compute", failing)
                with pytest.raises(KeyboardInterrupt):
                    next(got)
            model.eval([5, 6, 7])
            with pytest.raises(SequenceError, match="sequence 0 has changed since this generation's last token"):
                next(got)


def test_a_sampler_that_fails_does_not_evaluate_twice():
    with load(SMALL, n_ctx=64) as model:
        expected = list(model.generate(TOKENS, 6))
        answers = [ZeroDivisionError, 64, -1, None, "3", 2.0]

        def sampler(logits):
            if not answers:
                return greedy(logits)
            answer = answers.pop()
            if answer is ZeroDivisionError:
                raise ZeroDivisionError
            return answer

        model.reset()
        got = model.generate(TOKENS, 6, sampler)
        for _ in range(5):
            with pytest.raises(SamplingError, match="is no token id from 0 to 63"):
                next(got)
        with pytest.raises(ZeroDivisionError):
            next(got)
        assert model.n_past == len(TOKENS) and got.tokens == []
        assert list(got) == expected


def test_penalties_look_at_the_prompt_unless_the_sampler_was_made_before():
    with load(SMALL, n_ctx=64) as model:
        prompt, penalty = list(range(40)), {"temperature": 0, "presence_penalty": 1e6}
        ids = list(model.generate(prompt, 10, **penalty))
        assert len(set(ids)) == 10 and not set(ids) & set(prompt)
        model.reset()
        ids = list(model.generate(prompt, 10, Sampler(**penalty)))
        assert len(set(ids)) == 10 and set(ids) & set(prompt)


def test_several_generations_take_turns():
    with load(SMALL, n_ctx=128, n_seq=3) as model:
        alone = []
        for i in range(3):
            alone.append(list(model.generate(TOKENS[i:], 9)))
            model.reset()
        turns = [model.sequence(i).generate(TOKENS[i:], 9) for i in range(3)]
        assert [list(ids) for ids in zip(*zip(*turns, strict=True), strict=True)] == alone


def test_wrong_arguments_are_known_before_anything_runs():
    with load(SMALL, n_ctx=16) as model, load(SMALL, n_ctx=16) as other:
        for options, kind, match in (
                ({"n": -1}, ValueError, "n is -1"), ({"n": 1.5}, TypeError, "n is an int"),
                ({"n": "3"}, TypeError, "n is an int"), ({"sampler": 3}, TypeError, "a sampler is a function"),
                ({"n_keep": -1}, ValueError, "n_keep"), ({"n_keep": None}, TypeError, "n_keep"),
                ({"stop": ""}, ValueError, "empty stop"), ({"stop": [b"x"]}, TypeError, "stop string is a str"),
                ({"stop": ["a", 3]}, TypeError, "stop string is a str"), ({"stop": 3}, TypeError, "stop strings are"),
                ({"temperature": -1}, ValueError, "temperature"), ({"top_k": -1}, ValueError, "top_k"),
                ({"heat": 3}, TypeError, "no argument 'heat': it has .*min_p.* top_k"),
                ({"sampler": greedy, "seed": 3}, TypeError, "either a sampler, .*: seed"),
                ({"sequence": 1}, ValueError, "sequence 1"),
                ({"sequence": "0"}, TypeError, "number of a sequence"),
                ({"sequence": other.sequence(0)}, ValueError, "another model")):
            with pytest.raises(kind, match=match):
                model.generate([1], **options)
        for prompt, wrong in ((bytearray(b"text"), TypeError), ([[1], [2, 3]], TypeError), (b"text", TypeError),
                              (None, TypeError), ([64], ValueError), (3, TypeError),
                              ([0.5], TypeError), (["a"], TypeError)):
            with pytest.raises(wrong):
                model.generate(prompt, 3)
        for prompt in (3, None):
            with pytest.raises(TypeError, match=f"a sequence of ints, not {type(prompt).__name__}$"):
                model.generate(prompt, 3)
        assert model.n_past == 0


def test_a_model_without_a_vocabulary_says_so():
    with load(SMALL, n_ctx=16) as model:
        for call in (lambda: model.generate("text"), lambda: model.tokenizer, lambda: model.embed("text"),
                     lambda: model.generate([1], 3, stop="x")):
            with pytest.raises(gs.Error, match="tokenizer"):
                call()


# -- text ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    pytest.importorskip("tokenizers")
    with load(small_model(), [gs.CpuBackend()], n_ctx=256, n_seq=2) as model:
        yield model


@pytest.fixture
def model(small):
    yield small
    small.reset()


def test_text_streams_what_its_tokens_say(model):
    got = model.generate(PROMPT, 40)
    pieces = list(got)
    assert len(pieces) > 10 and all(isinstance(piece, str) and piece for piece in pieces)
    assert "".join(pieces) == got.text == model.tokenizer.decode(got.tokens, continuing=True)
    assert len(got.tokens) == 40 and got.finish_reason == "length"
    assert "self" in got.text
    model.reset()
    assert model.generate(PROMPT, 40, echo=True).read() == got.text
    model.reset()
    assert next(model.generate(PROMPT, 3, echo=True)) == PROMPT
    model.reset()
    assert list(model.generate(model.tokenizer.encode(PROMPT), 40)) == got.tokens


def test_a_second_text_continues_the_first(model):
    whole = model.generate(PROMPT + "\n        self.name", 12).read()
    model.reset()
    model.eval(model.tokenizer.encode(PROMPT))
    assert model.generate("\n        self.name", 12).read() == whole


def test_text_ends_before_a_stop_string(model):
    whole = model.generate(PROMPT, 40).read()
    words = ["\n", whole[10:14], whole[5:30], whole[-3:], "never said", whole[-3:] + " and no more"]
    for stop in (*words, words, [words[4], words[2]]):
        model.reset()
        got = model.generate(PROMPT, 40, stop=stop)
        text = "".join(got)
        wanted = [whole.find(word) for word in ([stop] if isinstance(stop, str) else stop)]
        ends = [at + len(word) for at, word in zip(wanted, [stop] if isinstance(stop, str) else stop, strict=True)
                if at >= 0]
        if not ends:
            assert text == whole and got.finish_reason == "length"
            continue
        assert got.finish_reason == "stop" and whole.startswith(text) and text == got.text
        assert not any(word in text for word in ([stop] if isinstance(stop, str) else stop))
        assert min(ends) > len(text)
    model.reset()
    ids = list(model.generate(model.tokenizer.encode(PROMPT), 40, stop=words[1]))
    assert words[1] not in model.tokenizer.decode(ids) and len(ids) < 40


def test_characters_are_never_split(model):
    """A sampler that writes bytes of characters of two, three and four bytes, and some that are none."""
    tokenizer = model.tokenizer
    byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_vocab) if len(tokenizer.token_bytes(i)) == 1}
    said = "aß你🙂".encode() + b"\xff" + "é".encode()[:1] + b"x" + "你".encode()[:2]
    ids = [byte[said[i : i + 1]] for i in range(len(said))]
    left = iter(ids)
    got = model.generate("x", len(ids), lambda logits: next(left), ignore_eos=True)
    pieces = list(got)
    assert pieces == ["a", "ß", "你", "🙂", "\ufffd", "\ufffdx", "\ufffd"]
    assert got.text == said.decode("utf-8", "replace")
    model.reset()
    left = iter([byte[b"x"], byte[b"\xc3"]])        # the end of the text makes the stop string complete
    got = model.generate("x", 2, lambda logits: next(left), ignore_eos=True, stop="\ufffd")
    assert got.read() == "x" and got.finish_reason == "stop"


def test_seeds_choose(model):
    def draw(**options):
        model.reset()
        return model.generate(PROMPT, 20, **options).read()

    assert draw(temperature=1.0, seed=1) == draw(temperature=1.0, seed=1) != draw(temperature=1.0, seed=2)
    assert draw() == draw(temperature=0) == draw(sampler=greedy) != draw(seed=1)
    assert draw(sampler=Sampler(temperature=1.0, seed=1)) == draw(temperature=1.0, seed=1)


def test_embeddings_of_like_texts_are_alike(model):
    a, b, c = (model.embed(text, normalize=True) for text in ("import os, sys", "import os, re", "x = x * 3 + 1"))
    assert a.shape == (model.hparams.n_embd,) and a @ b > a @ c
    assert np.array_equal(model.embed("import os"), model.embed(model.tokenizer.encode("import os")))


def test_special_tokens_in_a_prompt_are_text_unless_asked_for(model):
    end = next(iter(model.tokenizer.eos_ids))
    name = model.tokenizer.token_text(end)
    for parse in (False, True):
        next(model.generate(name, 1, parse_special=parse))
        assert (end in model.sequence(0).tokens) is parse
        model.reset()


# -- conversations ---------------------------------------------------------------------------------


def test_a_conversation_evaluates_what_is_new(model):
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "import"}]
    first = model.chat(messages, 12)
    reply = first.read()
    assert first.stats.n_cached == 0 and reply
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "return"}]
    second = model.chat(messages, 12)
    second.read()
    assert second.stats.n_cached >= first.stats.n_prompt
    with load(small_model(), [gs.CpuBackend()], n_ctx=256) as fresh:
        again = fresh.chat(messages, 12)
        again.read()
        assert again.stats.n_cached == 0 and again.tokens == second.tokens
    # Another conversation forgets what differs; the same one again evaluates its last token.
    other = model.chat([{"role": "user", "content": "class"}], 4)
    other.read()
    assert 0 < other.stats.n_cached < other.stats.n_prompt
    again = model.chat([{"role": "user", "content": "class"}], 4)
    again.read()
    assert again.stats.n_cached == again.stats.n_prompt - 1 and again.tokens == other.tokens
    # In a sequence of its own.
    beside = model.sequence(1).chat(messages, 12)
    beside.read()
    assert beside.tokens == second.tokens and beside.stats.n_cached == 0


def test_control_tokens_in_messages_are_text_without_parse_special(model):
    pytest.importorskip("jinja2")
    name = model.tokenizer.token_text(next(iter(model.tokenizer.eos_ids)))
    n_ends = []
    for content, parse in ((name, True), (name, False), ("class", True)):
        next(model.chat([{"role": "user", "content": content}], 1, parse_special=parse), None)
        n_ends.append(sum(token in model.tokenizer.eos_ids for token in model.sequence(0).tokens))
    assert n_ends[0] == n_ends[1] + 1 and n_ends[1] == n_ends[2]


def test_a_conversation_that_does_not_fit_changes_nothing(model):
    pytest.importorskip("jinja2")
    model.chat([{"role": "user", "content": "import"}], 4).read()
    before = model.sequence(0).tokens
    with pytest.raises(ContextFull):
        model.chat([{"role": "user", "content": "import os " * 300}], 4).read()
    assert model.sequence(0).tokens == before
    for wrong in (None, "text", [{"role": "user"}], [3], [{"role": 1, "content": "a"}]):
        with pytest.raises((TypeError, gs.Error)):
            model.chat(wrong)


def test_a_closed_model_generates_nothing():
    pytest.importorskip("tokenizers")
    model = load(small_model(), n_ctx=32)
    got = model.generate(PROMPT, 4)
    next(got)
    model.close()
    with pytest.raises(ModelClosed):
        next(got)
    assert got.tokens and got.text


CHANGES = {
    "eval": lambda model: model.eval([1]),
    "eval of several": lambda model: model.eval([1, 2]),
    "a batch": lambda model: model.eval_batch([(0, [1])]),
    "another generation": lambda model: next(model.generate([1], 3)),
    "truncate": lambda model: model.truncate(1),
    "reset": lambda model: model.reset(),
    "shift": lambda model: model.shift(1, 1),
    "a copy": lambda model: model.sequence(1).copy_to(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_sequence_that_changes_under_a_generation_is_an_error(change):
    with load(SMALL, n_ctx=32, n_seq=2) as model:
        generation = model.generate(TOKENS, 9)
        next(generation)
        before = len(generation.tokens)
        change(model)
        with pytest.raises(SequenceError, match="sequence 0 has changed since this generation's last token"):
            next(generation)
        assert len(generation.tokens) == before
        model.reset()
        assert list(model.generate(TOKENS, 3))


def test_a_restored_sequence_is_a_change(tmp_path):
    with load(SMALL, n_ctx=32) as model:
        model.eval(TOKENS)
        model.save(tmp_path / "state")
        generation = model.generate([1], 9)
        next(generation)
        model.restore(tmp_path / "state")
        with pytest.raises(SequenceError, match="has changed"):
            next(generation)


def test_a_prompt_is_encoded_for_the_sequence_as_it_is():
    """A generation that begins after another one has changed the sequence would continue that one's text."""
    with load(SMALL, n_ctx=32) as model:
        first, second = model.generate(TOKENS, 2), model.generate(TOKENS, 2)
        next(first)
        with pytest.raises(SequenceError, match="has changed"):
            next(second)


def test_generations_of_several_sequences_go_on_side_by_side():
    with load(SMALL, n_ctx=64, n_seq=2) as model:
        expected = list(model.generate(TOKENS, 5))
        model.reset()
        pair = [model.generate(TOKENS, 5, sequence=i) for i in range(2)]
        assert [list(tokens) for tokens in zip(*zip(*pair, strict=True), strict=True)] == [expected, expected]


def test_a_closed_generation_ends():
    with load(SMALL, n_ctx=32) as model:
        with model.generate(TOKENS, 9, echo=True) as generation:
            next(generation)
        assert list(generation) == [] and generation.finish_reason == "closed"
        whole = model.sequence(0).model.generate([1], 1)
        whole.read()
        whole.close()
        assert whole.finish_reason == "length"


def test_text_is_no_list_of_ids():
    with load(SMALL, n_ctx=32) as model, pytest.raises(TypeError, match="tokenizer.encode.*generate takes text"):
        model.eval("hello")


def test_a_token_that_was_evaluated_after_a_failed_one_is_a_change(monkeypatch):
    """It has the place of the one that failed, so that the sequence is as long as after a complete evaluation."""
    with gs.CpuBackend(1) as backend, load(SMALL, [backend], n_ctx=64) as model:
        generation = model.generate([1, 2, 3], 10)
        first = [next(generation), next(generation)]
        with monkeypatch.context() as patched:
            patched.setattr(backend, "graph_plan_compute", lambda plan: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(generation)
        other = next(token for token in range(50, 60) if token not in first)
        model.eval([other])
        before = model.sequence(0).tokens
        with pytest.raises(SequenceError, match="has changed"):
            next(generation)
        assert model.sequence(0).tokens == before and before[-1] == other
