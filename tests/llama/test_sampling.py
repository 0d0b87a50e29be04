"""Sampling: the candidates and frequencies of a naive sampler; equal results for equal seeds; typed errors."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import quick

import ggml_sched as gs
from ggml_sched.llama import Sampler, SamplingError, greedy
from ggml_sched.llama.sampling import top

OPEN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Every token may be drawn, by its own probability."""


def naive(logits: list[float], *, temperature, top_k, top_p, min_p, repeat_penalty=1.0, presence_penalty=0.0,
          frequency_penalty=0.0, history=(), logit_bias=None) -> dict[int, float]:
    """Probabilities by token, one plain step after the other."""
    logits = {i: float(x) for i, x in enumerate(logits)}
    for i, x in (logit_bias or {}).items():
        logits[i] += x
    for i in set(history):
        logits[i] = logits[i] * repeat_penalty if logits[i] <= 0 else logits[i] / repeat_penalty
        logits[i] -= frequency_penalty * list(history).count(i) + presence_penalty
    kept = sorted((i for i in logits if logits[i] > -math.inf), key=lambda i: (-logits[i], i))
    if top_k:
        kept = kept[:top_k]

    def shares(kept, temperature=1.0):
        weights = [math.exp((logits[i] - logits[kept[0]]) / temperature) for i in kept]
        return [weight / sum(weights) for weight in weights]

    if top_p < 1:
        gathered, n = 0.0, 0
        for share in shares(kept):
            gathered, n = gathered + share, n + 1
            if gathered >= top_p:
                break
        kept = kept[:n]
    if min_p > 0:
        p = shares(kept)
        kept = [i for i, share in zip(kept, p, strict=True) if share >= min_p * p[0]]
    return dict(zip(kept, shares(kept, temperature), strict=True))


OPTIONS = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.3, 0.8, 1.0, 3.0]), "top_k": st.sampled_from([0, 1, 2, 7, 40, 10_000]),
    "top_p": st.sampled_from([1e-9, 0.31, 0.87, 0.999, 1.0]), "min_p": st.sampled_from([0.0, 0.013, 0.2, 1.0]),
    "repeat_penalty": st.sampled_from([1.0, 1.3, 0.7]), "presence_penalty": st.sampled_from([0.0, 0.9, -0.4]),
    "frequency_penalty": st.sampled_from([0.0, 0.37])})


@quick(60)
@given(seed=st.integers(0, 1 << 30), n=st.sampled_from([1, 2, 5, 64, 700, 6000]), options=OPTIONS,
       ties=st.booleans(), banned=st.booleans())
def test_candidates_are_those_of_a_naive_sampler(seed, n, options, ties, banned):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=n).astype(np.float32).astype(np.float64) * 3
    if ties:
        logits = np.round(logits)
    history = rng.integers(0, n, 20).tolist()
    bias = {int(i): float(x) for i, x in zip(rng.integers(0, n, 3), rng.normal(size=3), strict=True)}
    if banned and n > 5:
        bias[int(rng.integers(0, n))] = -math.inf
    sampler = Sampler(**options, logit_bias=bias, penalty_last_n=16)
    sampler.accept(*history)
    ids, p = sampler.candidates(logits)
    expected = naive(logits, **options, history=history[-16:], logit_bias=bias)
    if options["temperature"] and set(ids.tolist()) != set(expected):
        # A sum may round to the other side of top_p: one token, and the least likely one.
        assert options["top_p"] < 1 and len(set(ids.tolist()) ^ set(expected)) == 1
    else:
        assert len(ids) == len(expected)
        np.testing.assert_allclose(p, [expected[i] for i in ids.tolist()], rtol=1e-6)
        assert (np.diff(p) <= 0).all()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 30), n=st.integers(1, 3000), k=st.integers(1, 3000), levels=st.sampled_from([2, 50, 0]))
def test_the_largest_are_found_in_order_lower_ids_first(seed, n, k, levels):
    logits = np.random.default_rng(seed).normal(size=n)
    if levels:
        logits = np.round(logits * levels) / levels
    logits[:: max(1, n // 7)] = -math.inf
    assert top(logits, k).tolist() == sorted(range(n), key=lambda i: (-logits[i], i))[:k]


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.15}])
@pytest.mark.parametrize("n", [5_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_tokens_come_in_their_proportions(options, n):
    logits = np.log(np.array([0.02, 0.4, 0.1, 0.25, 0.05, 0.18]))
    options = OPEN | options
    sampler = Sampler(seed=11, **options)
    counts = np.bincount([sampler(logits) for _ in range(n)], minlength=6)
    expected = np.array([naive(logits, **options).get(i, 0.0) for i in range(6)]) * n
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 20.5  # five degrees of freedom: one in a thousand, and the seed is fixed


@pytest.mark.parametrize(("number", "first"), [(0.0, True), (1 - 2**-53, False)])
def test_what_is_drawn_has_a_probability(number, first):
    """Also for the least and the largest number that is drawn, with tokens at both ends that have none."""
    class Fixed:
        @staticmethod
        def random() -> float:
            return number

    rng = np.random.default_rng(0)
    for n in range(1, 200):
        middle = rng.normal(size=n) * 3
        sampler = Sampler(**OPEN)
        sampler._random = Fixed()
        assert sampler(np.array([-2000.0, *middle, -2000.0])) == (1 if first else n)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_k": 9}, {"top_p": 0.999}, {"top_k": 3, "top_p": 0.999}])
def test_banned_tokens_are_no_candidates(options):
    ids, p = Sampler(**OPEN | options).candidates(np.array([1.0, -math.inf, 0.0, -math.inf]))
    assert ids.tolist() == [0, 2] and (p > 0).all()


@pytest.mark.parametrize("n", [200, 256, 257, 3000, 5000])
@pytest.mark.parametrize("top_p", [0.5, 0.99])
def test_as_many_tokens_have_top_p_together_as_it_takes(n, top_p):
    ids, _ = Sampler(**OPEN | {"top_p": top_p}).candidates(np.linspace(0, -1e-3, n))
    expected = naive(list(np.linspace(0, -1e-3, n)), **OPEN | {"top_p": top_p})
    assert ids.tolist() == sorted(expected)


def test_equal_seeds_give_equal_tokens_and_reset_begins_again():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    samplers = [Sampler(temperature=1.5, seed=seed, repeat_penalty=1.1) for seed in (1, 1, 2)]
    drawn = [[sampler(logits) for _ in range(50)] for sampler in samplers]
    assert drawn[0] == drawn[1] != drawn[2]
    samplers[0].reset()
    assert [samplers[0](logits) for _ in range(50)] == drawn[0]
    assert Sampler(seed=None).seed is None


def test_greedy_is_the_first_largest_and_temperature_zero_is_greedy():
    assert greedy(np.array([1.0, 3.0, 3.0])) == 1
    assert Sampler(temperature=0, top_k=1)(np.array([1.0, 3.0, 3.0])) == 1
    assert Sampler(temperature=0, logit_bias={1: -math.inf})(np.array([1.0, 3.0, 2.0])) == 2
    assert Sampler(temperature=1e-310, **{k: v for k, v in OPEN.items() if k != "temperature"})(
        np.array([1.0, 3.0, 2.0])) == 1
    ids, p = Sampler(temperature=0).candidates(np.array([1.0, 3.0]))
    assert (ids.tolist(), p.tolist()) == ([1], [1.0])


def test_penalties_look_at_the_last_tokens():
    logits = np.array([2.0, -2.0, 0.0, 1.0])
    sampler = Sampler(repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, penalty_last_n=4)
    sampler.accept(3, 0, 0, 1, 0)
    assert sampler.history == [0, 0, 1, 0]
    assert sampler.adjusted(logits).tolist() == [2.0 / 2 - 0.75 - 0.5, -4.0 - 0.25 - 0.5, 0.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 0.0, 1.0]  # the model's own row is left as it was
    sampler.accept(2, 2, 2, 2)
    assert sampler.adjusted(logits).tolist() == [2.0, -2.0, -1.5, 1.0]
    none = Sampler(repeat_penalty=2.0, penalty_last_n=0)
    none.accept(0, 1)
    assert none.history == [] and none.adjusted(logits) is logits
    everything = Sampler(repeat_penalty=2.0, penalty_last_n=-1)
    everything.accept(*range(1000))
    assert len(everything.history) == 1000


def test_a_sampler_remembers_what_it_chose():
    sampler = Sampler(temperature=0, repeat_penalty=10.0)
    logits = np.array([1.0, 0.9, 0.8, -5.0])
    assert [sampler(logits) for _ in range(4)] == [0, 1, 2, 0]
    assert sampler.history == [0, 1, 2, 0]


def test_bias_adds_and_bans():
    logits = np.zeros(8, np.float32)
    sampler = Sampler(seed=0, **OPEN, logit_bias=dict.fromkeys(range(6), -math.inf) | {7: 100.0})
    assert {sampler(logits) for _ in range(50)} == {7}
    ids, _ = sampler.candidates(logits)
    assert ids.tolist() == [7, 6]
    with pytest.raises(SamplingError, match="token id 9 of logit_bias is not one of 0 to 7"):
        Sampler(logit_bias={9: 1.0})(logits)
    sampler = Sampler(repeat_penalty=1.1)
    sampler.accept(9)
    with pytest.raises(SamplingError, match="token id 9 of the history"):
        sampler(logits)


@pytest.mark.parametrize("options", [{"logit_bias": {1: 0.5}}, {"repeat_penalty": 2.0}])
def test_logits_may_be_ints(options):
    whole, real = (Sampler(**OPEN, **options) for _ in range(2))
    for sampler in (whole, real):
        sampler.accept(2)
    for got, want in zip(whole.candidates([3, 1, 1]), real.candidates(np.array([3.0, 1.0, 1.0])), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(("options", "says"), [
    ({"repeat_penalty": 1e-300}, "^repeat_penalty 1e-300, .* make the logit 2 of token 1 infinite"),
    ({"presence_penalty": -1e39}, "presence_penalty -1e\\+39 make the logit 2 of token 1 infinite"),
    ({"repeat_penalty": 1e-308, "frequency_penalty": 1e308}, "frequency_penalty 1e\\+308 .* token 1 NaN"),
    ({"logit_bias": {2: 1e39}}, "^logit_bias makes the logit 0 of token 2 infinite"),
    ({"presence_penalty": 1e39, "logit_bias": {0: -1e39, 2: -1e39}}, "every logit is -inf")])
def test_settings_that_make_logits_infinite_are_named_rather_than_the_model(options, says, temperature):
    sampler = Sampler(temperature, seed=1, **options)
    sampler.accept(*[1] * 20)
    with pytest.raises(SamplingError, match=says):
        sampler(np.array([1.0, 2.0, 0.0], np.float32 if "NaN" not in says else np.float64))
    with pytest.raises(SamplingError, match="the model computed nonsense"):
        sampler(np.array([1.0, np.inf, np.inf], np.float32))


def test_a_setting_of_many_digits_is_named():
    for name in ("temperature", "repeat_penalty", "penalty_last_n"):
        with pytest.raises(ValueError, match=f"{name} is an int of 16610 bits, not"):
            Sampler(**{name: 10**5000})


@pytest.mark.parametrize("sampler", [
    greedy, Sampler(temperature=0), Sampler(), Sampler(**OPEN), Sampler(top_k=0), Sampler(top_k=0, top_p=1.0)],
    ids=["greedy", "zero", "default", "open", "top_p", "min_p"])
def test_logits_without_a_choice(sampler):
    for n in (3, 5000):
        row = np.zeros(n, np.float32)
        for value, match in ((np.nan, "NaN"), (np.inf, "infinity")):
            wrong = row.copy()
            wrong[n - 2] = value
            with pytest.raises(SamplingError, match=match) as error:
                sampler(wrong)
            assert isinstance(error.value, gs.Error)
        with pytest.raises(SamplingError, match="every logit is -inf"):
            sampler(np.full(n, -np.inf, np.float32))
        one = np.full(n, -np.inf, np.float32)
        one[1] = -3.0
        assert sampler(one) == 1
    for wrong in (np.zeros((1, 3)), np.zeros(0), 3.0):
        with pytest.raises(ValueError, match="one row"):
            sampler(wrong)
    assert sampler([0, 0, 50]) == 2  # whatever numpy takes


@pytest.mark.parametrize(("option", "value"), [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
    ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("repeat_penalty", 0.0),
    ("repeat_penalty", -1.0), ("repeat_penalty", math.inf), ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf), ("penalty_last_n", -2), ("penalty_last_n", 1 << 40), ("seed", -1),
    pytest.param("temperature", 10**400, id="temperature-huge"), ("logit_bias", {-1: 0.0}),
    ("logit_bias", {1 << 31: 0.0}), ("logit_bias", {1 << 70: 0.0}), ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf})])
def test_wrong_numbers_are_named(option, value):
    with pytest.raises(ValueError, match=option):
        Sampler(**{option: value})


@pytest.mark.parametrize(("option", "value"), [
    ("temperature", "hot"), ("top_k", 1.5), ("top_p", None), ("seed", "x"), ("penalty_last_n", 1.0),
    ("logit_bias", [1]), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: "x"})])
def test_wrong_types_are_named(option, value):
    with pytest.raises(TypeError, match=option):
        Sampler(**{option: value})


def test_wrong_tokens_are_not_remembered():
    sampler = Sampler()
    for wrong, error in ((-1, ValueError), (1 << 31, ValueError), (1 << 70, ValueError),
                         (1.0, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="a token id"):
            sampler.accept(1, wrong)
    assert sampler.history == []
