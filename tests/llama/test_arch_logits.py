"""Architectures: logits and embeddings are llama.cpp's, however attention is computed and whatever the cache holds."""

from pathlib import Path

import arch_cases as cases
import numpy as np
import pytest
from arch_runner import Runner

import ggml_sched as gs

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "arch_logits.npz")
GELU = ("gemma", "phi2", "gpt2")
"""Architectures with a gelu: its argument and value are rounded to f16, and may fall to either of two neighbours."""
N_PROMPT, TOKENS = cases.N_PROMPT, cases.tokens()


def bound(name: str) -> float:
    # 46 layers, half of which look back a few tokens only, make much of a difference in the fourth digit.
    return 1e-2 if name == "gemma2-46" else 3e-4 if name.startswith(GELU) else 1e-4


def generated(runner: Runner, n_prompt: int = N_PROMPT) -> np.ndarray:
    """As make_logits.py: the prompt at once, of which the last row, then one token after another."""
    prompt = runner.run(TOKENS[:n_prompt], outputs=[n_prompt - 1])
    return np.concatenate([prompt, *(runner.run([t]) for t in TOKENS[n_prompt:])])


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


FIRST = {name for k, name in enumerate(cases.CASES) if not any(
    cases.CASES[other]["arch"] == cases.CASES[name]["arch"] for other in list(cases.CASES)[:k])}
"""One case of each architecture: attention is computed in both ways; in the others in one, more in a soak."""


@pytest.mark.parametrize(("name", "flash"), [
    pytest.param(name, flash, id=f"{name}-{'flash' if flash else 'softmax'}",
                 marks=() if name in FIRST or flash == bool(k % 2) else pytest.mark.soak)
    for k, name in enumerate(cases.CASES) for flash in (False, True)])
def test_logits_and_embeddings_are_those_of_llama_cpp(name, flash):
    with Runner(cases.model(name), cases.N_CTX, flash=flash) as runner:
        assert error(generated(runner), REFERENCE[name]) <= bound(name)
    with Runner(cases.model(name), cases.N_CTX, flash=flash) as runner:
        # Here the prompt comes in two parts, the second longer than any window.
        runner.run(TOKENS[:5], outputs=[])
        got = runner.run(TOKENS[5:], outputs=[len(TOKENS) - 6], embeddings=True)
        assert error(got[0], REFERENCE[name + ".embedding"]) <= bound(name)


@pytest.mark.spread("name", "kernels")
@pytest.mark.parametrize("name", [name for name in cases.CASES if name.startswith(GELU) and name != "gemma2-46"])
@pytest.mark.parametrize("kernels", ["numpy", "compiled"])
def test_where_no_half_falls_to_the_other_side_logits_with_a_gelu_agree_to_the_last_digits(name, kernels):
    with Runner(cases.model(name), cases.N_CTX, backends=[gs.CpuBackend(2, kernels=kernels)]) as runner:
        difference = np.abs(generated(runner) - REFERENCE[name]).max(1) / np.abs(REFERENCE[name]).max()
    assert np.median(difference) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek2-absorbed", "phi3-long", "mamba"])
@pytest.mark.parametrize("n_prompt", [1, 2, 27])
def test_prompts_of_any_length_give_the_same_logits(name, n_prompt):
    with Runner(cases.model(name)) as runner:
        got = generated(runner, n_prompt)
    rows = min(len(got), len(REFERENCE[name]))
    assert error(got[-rows:], REFERENCE[name][-rows:]) <= bound(name)


ATTENTION = [name for name in cases.CASES if not name.startswith("mamba")]


@pytest.mark.spread("name kind", "name flash", "kind flash")
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi2", "gpt2", "gpt-oss", "deepseek2",
                                  "deepseek2-absorbed"])
@pytest.mark.parametrize(("kind", "flash"), [("f16", False), ("f16", True), ("bf16", False), ("bf16", True)])
def test_half_precision_caches_change_little(name, kind, flash):
    with Runner(cases.model(name), flash=flash, kv_type=kind) as runner:
        assert error(generated(runner), REFERENCE[name]) <= {"f16": 1e-2, "bf16": 6e-2}[kind]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantised_caches_need_flash_attention_and_change_little(kind):
    from ggml_sched.llama.synthetic import random_model

    data = random_model("llama", 3, metadata={"embedding_length": 128})
    with Runner(data, flash=True) as runner:
        expected = generated(runner)
    with Runner(data, flash=True, kv_type=kind) as runner:
        assert 0 < error(generated(runner), expected) <= {"q8_0": 3e-2, "q4_0": 0.4}[kind]
    with pytest.raises(ValueError, match="flash"):
        Runner(data, kv_type=kind)
    with pytest.raises(ValueError, match="blocks"):
        Runner(random_model("llama", 3, metadata={"attention.head_count_kv": 1}), flash=True, kv_type=kind)


@pytest.mark.spread("name", "flash")
@pytest.mark.parametrize("name", [
    "llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi2", "phi3-long", "gpt2", "gpt-oss",
    "deepseek2", "deepseek2-absorbed", "mamba"])
@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
def test_layers_on_two_backends_give_the_same_bits(name, flash):
    """By layers, and each tensor anywhere."""
    data = cases.model(name)
    with Runner(data, flash=flash) as runner:
        expected = generated(runner).tobytes()
    for seed, scattered in ((1, False), (2, True)):
        two = [gs.CpuBackend(name="A"), gs.CpuBackend(name="B")]
        random, where = np.random.default_rng(seed), {}

        def place(tensor, layer, two=two, random=random, where=where, scattered=scattered):
            key = tensor if scattered else layer
            if key not in where:
                where[key] = two[random.integers(2)]
            return where[key]

        with Runner(data, flash=flash, backends=two, place=place) as runner:
            assert generated(runner).tobytes() == expected
        assert set(where.values()) == set(two)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi2", "gpt2", "gpt-oss", "deepseek2", "mamba"])
def test_only_wanted_rows_are_computed(name):
    with Runner(cases.model(name)) as runner:
        everything = runner.run(TOKENS[:N_PROMPT])
        after = runner.run([1])
    for outputs in ([], [3], [0, 4, N_PROMPT - 1]):
        with Runner(cases.model(name)) as runner:
            got = runner.run(TOKENS[:N_PROMPT], outputs=outputs)
            graph = next(iter(runner.graphs.values()))
            if outputs:
                assert error(got, everything[outputs]) <= 1e-5
                assert graph.output.ne[1] == len(outputs)
            else:
                # Nothing but the caches, and nothing of the last layer that they do not need.
                assert graph.output is None
                names = {t.name for t in graph.graph.tensors}
                last = runner.hparams.n_layer - 1
                assert not names & {"output_norm.weight", "result_output", f"blk.{last}.ffn_down.weight",
                                    f"blk.{last}.attn_output.weight"}
            assert error(runner.run([1]), after) <= 1e-5


def test_layers_may_have_heads_and_widths_of_their_own():
    from ggml_sched.llama.synthetic import random_model

    data = random_model("llama", 3, metadata={"attention.head_count_kv": [2, 1, 4], "feed_forward_length": [48, 32, 64],
                                              "attention.head_count": [4, 2, 4]})
    with Runner(data) as runner:
        assert [k.ne[0] for k in runner.cache.k] == [16, 8, 32]
        expected = generated(runner)
    with Runner(data, flash=True) as runner:
        assert error(generated(runner), expected) <= 1e-5
