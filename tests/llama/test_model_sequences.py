"""Several sequences in one model: each gives the results that it gives alone."""

import random

import numpy as np
import pytest
from small_llama import MAMBA, SHAPES, SMALL, TOKENS

from ggml_sched.llama import Batch, ContextFull, SequenceError, random_llama
from ggml_sched.llama.synthetic import random_model

WINDOWED = random_model("gemma2", 1)


@pytest.fixture
def alone(load):
    """`alone(data, ids)`: logits of the last token, in a model of its own."""
    def evaluate(data: bytes, ids: list[int], **options) -> np.ndarray:
        with load(data, n_ctx=64, **options) as model:
            return model.eval(ids, last_only=True)[0]

    return evaluate


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 1e-4 * np.abs(b).max())


@pytest.mark.parametrize("data", [SMALL, WINDOWED, MAMBA], ids=["llama", "windows", "mamba"])
def test_the_last_row_alone_is_the_last_row(load, data):
    with load(data, n_ctx=64, n_batch=5) as model:
        everything = model.eval(TOKENS)
        model.reset()
        last = model.eval(TOKENS, last_only=True)
        assert last.shape == (1, model.n_vocab) and last.dtype == np.float32
        assert close(last[0], everything[-1])
        assert model.eval([], last_only=True).shape == (0, model.n_vocab)
        assert model.n_past == len(TOKENS)


@pytest.mark.parametrize("data", [SMALL, WINDOWED], ids=["llama", "windows"])
def test_sequences_in_one_batch_are_as_if_alone(load, alone, data):
    rng = random.Random(1)
    said = {i: [] for i in range(4)}
    with load(data, n_ctx=128, n_batch=7, n_seq=4) as model:
        for _ in range(6):
            parts = [(i, [rng.randrange(64) for _ in range(rng.randrange(1, 5))]) for i in rng.sample(range(4), 3)]
            parts.append((parts[0][0], [7]))        # a sequence may come twice
            got = model.eval_batch(parts)
            for i, ids in parts:
                said[i] += ids
            ends = {i: row for (i, _), row in zip(parts, got, strict=True)}
            for i, row in ends.items():
                assert close(row, alone(data, said[i]))
        assert {i: model.sequence(i).tokens for i in said} == said
        assert model.n_past == len(said[0]) and model.n_free == 128 - sum(map(len, said.values()))


def test_recurrent_sequences_are_as_if_alone(load, alone):
    said = {i: [] for i in range(3)}
    with load(MAMBA, n_ctx=64, n_batch=4, n_seq=3) as model:
        for parts in ([(0, TOKENS[:5]), (1, [7, 8])], [(1, [9]), (2, TOKENS), (0, [1, 2])], [(2, [5]), (2, [6])]):
            got = model.eval_batch(parts)
            for i, ids in parts:
                said[i] += ids
            ends = {i: row for (i, _), row in zip(parts, got, strict=True)}
            for i, row in ends.items():
                assert close(row, alone(MAMBA, said[i]))


def test_a_batch_says_which_rows_it_wants(load):
    with load(SMALL, n_ctx=32, n_seq=2) as model:
        one = model.sequence(1).eval(TOKENS[:4])
        model.reset()
        batch = Batch(np.array([5, *TOKENS[:4]], np.int32), np.array([0, 0, 1, 2, 3], np.int32),
                      np.array([0, 1, 1, 1, 1], np.int32), np.array([2, 4], np.int32))
        got = model.eval_batch(batch)
        assert got.shape == (2, 64) and close(got[0], one[1]) and close(got[1], one[3])
        assert model.sequence(0).tokens == [5]
        none = Batch(np.array([6], np.int32), np.array([1], np.int32), np.array([0], np.int32), np.array([], np.int32))
        assert model.eval_batch(none).shape == (0, 64) and model.n_past == 2


@pytest.mark.parametrize(("tokens", "at"), [([1, 64], 1), ([1, -1], 1), ([2**31, 1], 0), ([1, 2**63], 1),
                                            ([-1, 2**63], 0), ((1, 2, 10**20), 2)])
def test_an_unknown_token_is_named_however_large(load, tokens, at):
    with load(SMALL, n_ctx=16) as model:
        with pytest.raises(ValueError, match=f"^token {tokens[at]} at {at} is not in 0 .. 63$"):
            model.eval(tokens)
        assert model.eval(TOKENS).shape == (len(TOKENS), 64)


@pytest.mark.parametrize(("change", "kind"), [
    ({"positions": [1, 2]}, SequenceError), ({"positions": [0, 2]}, SequenceError), ({"positions": [0]}, ValueError),
    ({"sequences": [0, 2]}, ValueError), ({"sequences": [-1, 0]}, ValueError), ({"outputs": [2]}, ValueError),
    ({"outputs": [1, 0]}, ValueError), ({"outputs": [0, 0]}, ValueError), ({"outputs": [-1]}, ValueError),
    ({"outputs": [0.5]}, TypeError), ({"positions": None}, TypeError), ({"tokens": [1, 64]}, ValueError),
    ({"sequences": [0, 1]}, SequenceError),
])
def test_wrong_batches_change_nothing(load, change, kind):
    right = {"tokens": [1, 2], "positions": [0, 1], "sequences": [0, 0], "outputs": [1]}
    with load(SMALL, n_ctx=32, n_seq=2) as model:
        with pytest.raises(kind):
            model.eval_batch(Batch(*(np.array(v) for v in (right | change).values())))
        assert (model.n_past, model.sequence(1).n_past, model.n_free) == (0, 0, 32)
        model.eval_batch(Batch(*(np.array(v) for v in right.values())))
        assert model.n_past == 2


def test_wrong_pairs_change_nothing(load):
    with load(SMALL, n_ctx=8, n_seq=2) as model:
        model.eval([1, 2])
        for parts, kind in (([(2, [1])], ValueError), ([(0, [])], ValueError), ([], ValueError),
                            ([(0, [99])], ValueError), ([(0, "a")], TypeError), ([("0", [1])], TypeError),
                            ([(0, [1] * 4), (1, [1] * 3)], ContextFull)):
            with pytest.raises(kind):
                model.eval_batch(parts)
            assert (model.n_past, model.sequence(1).n_past, model.n_free) == (2, 0, 6)
        for parts in (7, [(0,)], [(0, [1], 2)], [0]):
            with pytest.raises(TypeError, match="pairs of a sequence's number and its tokens"):
                model.eval_batch(parts)
        with pytest.raises(ValueError, match="n_seq"):
            model.sequence(2)
        with pytest.raises(ContextFull, match="7 tokens after 0 .* 8, of which 2 rows are in use"):
            model.sequence(1).eval([1] * 7)


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError])
def test_an_error_of_the_caller_s_generator_of_pairs_is_the_caller_s(load, kind):
    def pairs():
        yield 0, [1]
        raise kind("mine")

    with load(SMALL, n_ctx=8) as model:
        with pytest.raises(kind, match="mine"):
            model.eval_batch(pairs())
        assert model.n_past == 0 and model.eval_batch(iter([(0, [1])])).shape == (1, 64)


def test_a_truncated_sequence_goes_on_from_there(load, alone):
    with load(SMALL, n_ctx=40) as model:
        model.eval(TOKENS)
        for n in (9, 9, 4, 0):
            model.truncate(n)
            assert model.n_past == n and model.sequence(0).tokens == TOKENS[:n] and model.n_free == 40 - n
            got = model.eval([33, 34], last_only=True)[0]
            assert close(got, alone(SMALL, [*TOKENS[:n], 33, 34]))
            model.truncate(n)
        model.eval(TOKENS)
        for n, kind in ((13, ValueError), (-1, ValueError), (1.5, TypeError)):
            with pytest.raises(kind):
                model.truncate(n)
        assert model.n_past == 12


def test_copies_share_rows_until_they_part(load, alone):
    with load(SMALL, n_ctx=24, n_seq=3) as model:
        first, second = model.sequence(0), model.sequence(1)
        first.eval(TOKENS)
        second.eval([1, 2, 3])
        first.copy_to(second)
        first.copy_to(2)
        first.copy_to(first)
        assert second.tokens == TOKENS and model.n_free == 12
        assert close(first.eval([40], True)[0], alone(SMALL, [*TOKENS, 40]))
        assert close(second.eval([41, 42], True)[0], alone(SMALL, [*TOKENS, 41, 42]))
        first.reset()
        assert model.n_free == 24 - 12 - 2
        second.truncate(6)
        assert model.n_free == 24 - 12          # the third still holds all of them
        assert close(model.sequence(2).eval([43], True)[0], alone(SMALL, [*TOKENS, 43]))
        assert close(second.eval([44], True)[0], alone(SMALL, [*TOKENS[:6], 44]))
        with load(SMALL, n_ctx=8) as other, pytest.raises(ValueError, match="its model"):
            first.copy_to(other.sequence(0))


def test_a_recurrent_state_has_a_whole_past_or_none(load, alone):
    with load(MAMBA, n_ctx=64, n_seq=2) as model:
        first = model.sequence(0)
        first.eval(TOKENS)
        first.copy_to(1)
        with pytest.raises(SequenceError, match="cut to 5 of 12"):
            first.truncate(5)
        with pytest.raises(SequenceError, match="recurrent"):
            first.shift(2, 4)
        first.truncate(12)
        assert close(first.eval([7], True)[0], alone(MAMBA, [*TOKENS, 7]))
        first.reset()
        assert close(first.eval([7], True)[0], alone(MAMBA, [7]))
        assert close(model.sequence(1).eval([8], True)[0], alone(MAMBA, [*TOKENS, 8]))


def test_nothing_is_computed_of_what_does_not_fit(load, monkeypatch):
    with load(SMALL, n_ctx=16, n_batch=4, n_seq=2) as model:
        model.eval(TOKENS)
        compute, calls = model.scheduler.compute, []
        monkeypatch.setattr(model.scheduler, "compute", lambda graph: (calls.append(graph), compute(graph)))
        for evaluate in (lambda: model.eval([1] * 5), lambda: model.eval_batch([(0, [1]), (1, [2] * 4)]),
                         lambda: model.embed([1] * 5)):
            with pytest.raises(ContextFull):
                evaluate()
        assert not calls and (model.n_past, model.n_free) == (12, 4)


def test_tokens_that_cannot_be_kept_are_not_evaluated(load, alone):
    class Full(list):
        def append(self, token):
            if len(self) == 2:
                raise MemoryError
            super().append(token)

    with load(SMALL, n_ctx=16, n_seq=2) as model:
        model._store.tokens[1] = Full()
        with pytest.raises(MemoryError):
            model.eval_batch([(0, [1, 2]), (1, [3, 4, 5])])
        assert (model.n_past, model.sequence(1).n_past, model.n_free) == (0, 0, 16)
        assert close(model.eval(TOKENS, True)[0], alone(SMALL, TOKENS))


def test_rows_that_others_hold_make_no_room(load):
    with load(SMALL, n_ctx=16, n_seq=2) as model:
        first, other = model.sequence(0), [9] * 10
        first.eval(TOKENS)
        first.copy_to(1)
        with pytest.raises(ContextFull):
            first.keep_common(other)
        assert first.tokens == TOKENS and model.n_free == 4
        model.sequence(1).truncate(5)
        assert first.keep_common(other) == 0 and model.n_free == 11


def test_embeddings_change_no_sequence(load, alone):
    with load(SMALL, n_ctx=32, n_batch=5, n_seq=2) as model:
        model.eval(TOKENS)
        mean, last = model.embed(TOKENS), model.embed(TOKENS, "last")
        assert mean.shape == last.shape == (32,) and mean.dtype == np.float32
        assert (model.n_past, model.n_free) == (12, 20)
        assert close(model.eval([7], True)[0], alone(SMALL, [*TOKENS, 7]))
        each = [model.embed(TOKENS[: n + 1], "last") for n in range(12)]
        assert np.allclose(np.mean(each, axis=0), mean, atol=1e-4)
        assert abs(np.linalg.norm(model.embed(TOKENS, normalize=True)) - 1) < 1e-6
        # What the output matrix makes of the last one are the logits.
        output = model.weights["output.weight"].numpy()
        assert close(output @ last, alone(SMALL, TOKENS))
        for ids, pooling, kind in (([], "mean", ValueError), ([1], "median", ValueError), ([64], "mean", ValueError),
                                   ([1] * 20, "mean", ContextFull), (None, "mean", TypeError)):
            with pytest.raises(kind):
                model.embed(ids, pooling)
        assert (model.n_past, model.n_free) == (13, 19)


def test_a_recurrent_model_embeds_beside_its_sequences(load, alone):
    with load(MAMBA, n_ctx=32) as model:
        model.eval(TOKENS)
        first = model.embed([1, 2, 3])
        assert np.array_equal(first, model.embed([1, 2, 3]))
        assert close(model.eval([7], True)[0], alone(MAMBA, [*TOKENS, 7]))


# -- the context shift ------------------------------------------------------------------------------


@pytest.fixture
def shifted(load):
    """`shifted(data, ids, n_keep, n_discard, then)`: logits of a token after a shift."""
    def evaluate(data: bytes, ids: list[int], n_keep: int, n_discard: int, then: int, **options) -> np.ndarray:
        with load(data, n_ctx=48, **options) as model:
            model.eval(ids)
            model.shift(n_keep, n_discard)
            assert model.sequence(0).tokens == ids[:n_keep] + ids[n_keep + n_discard :]
            assert model.n_free == 48 - len(ids) + n_discard
            return model.eval([then], last_only=True)[0]

    return evaluate


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_one_layer_is_shifted_exactly(alone, shifted, kv_type):
    """Keys and values of a first layer depend on their own token alone: what is left is as if evaluated so."""
    one = random_llama(1, **{**SHAPES, "n_layer": 1})
    for n_keep, n_discard in ((0, 4), (3, 5), (2, 1)):
        got = shifted(one, TOKENS, n_keep, n_discard, 7, kv_type=kv_type)
        expected = alone(one, [*TOKENS[:n_keep], *TOKENS[n_keep + n_discard :], 7], kv_type=kv_type)
        assert np.abs(got - expected).max() <= (1e-4 if kv_type == "f32" else 2e-2) * np.abs(expected).max()
        assert not np.allclose(got, alone(one, [*TOKENS, 7]), rtol=1e-2, atol=1e-2)


def test_a_shift_that_forgets_the_end_cuts_it(alone, shifted):
    got = shifted(SMALL, TOKENS, 5, 7, 7)
    assert close(got, alone(SMALL, [*TOKENS[:5], 7]))


def test_a_shift_changes_no_other_sequence(load, alone):
    with load(SMALL, n_ctx=48, n_seq=3) as model:
        model.eval(TOKENS)
        model.sequence(1).eval(TOKENS[::-1])
        model.shift(1, 6)
        assert close(model.sequence(1).eval([7], True)[0], alone(SMALL, [*TOKENS[::-1], 7]))
        model.sequence(1).copy_to(2)
        with pytest.raises(SequenceError, match="shared"):
            model.sequence(1).shift(2, 3)
        assert model.sequence(1).tokens == [*TOKENS[::-1], 7]
        for n_keep, n_discard in ((-1, 2), (0, -1), (4, 3), (7, 0)):
            with pytest.raises(ValueError):
                model.shift(n_keep, n_discard)
        model.shift(2, 0)
        model.shift(6, 0)
        assert model.n_past == 6


def test_learned_positions_do_not_move(load):
    with load(random_model("gpt2", 1), n_ctx=48) as model:
        model.eval(TOKENS)
        before = model.eval([7])
        model.truncate(12)
        with pytest.raises(SequenceError, match="gpt2"):
            model.shift(1, 4)
        assert model.n_past == 12 and model.eval([7]).tobytes() == before.tobytes()


def test_generation_goes_on_beyond_the_context(load):
    with load(SMALL, n_ctx=24) as model:
        got = model.generate(TOKENS, 60, shift=True, n_keep=4)
        ids = list(got)
        assert len(ids) == 60 and got.finish_reason == "length"
        assert model.sequence(0).tokens[:4] == TOKENS[:4] and model.sequence(0).tokens[-1] == ids[-2]
