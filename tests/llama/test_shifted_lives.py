"""Random lives of one sequence of Gemma 2 and 3: evaluated, shifted, truncated, saved and restored.

After a shift logits differ from those of the same tokens evaluated anew, by up to a third of the largest in a small
random model.  Neither windows, nor cached rows, nor rope's two bases are why: what deeper layers cached for a token was
computed with attention to tokens that are forgotten now.  The lives are compared with an implementation whose keys are
never rotated in place (`unrotated_gemma`), with the oracle, and with llama.cpp.
"""

import importlib.util
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from unrotated_gemma import Gemma

import ggml_sched as gs
from ggml_sched.llama import load
from ggml_sched.llama.synthetic import random_model

N_CTX = 64
BOUND = 1e-3
"""Of the largest logit.  A gelu rounds to f16, and some of its values fall to either of two neighbours."""
WIDE = {"attention.sliding_window": N_CTX}
Step = tuple[str, list[int]]


def random_life(seed: int, n: int = 24) -> list[Step]:
    """Steps of a sequence: what to do, and ids or numbers of tokens.  The last one evaluates."""
    rng, length, saved, life = random.Random(seed), 0, 0, []
    while len(life) < n or life[-1][0] != "eval":
        act = rng.choice(["eval"] * 4 + ["shift", "shift", "truncate", "save", "restore"])
        if act == "eval" and length < N_CTX:
            ids = [rng.randrange(64) for _ in range(rng.randint(1, min(12, N_CTX - length)))]
            life.append((act, ids))
            length += len(ids)
        elif act == "shift" and length > 2:
            n_keep = rng.randrange(length - 1)
            n_discard = rng.randint(1, length - n_keep - 1)
            life.append((act, [n_keep, n_discard]))
            length -= n_discard
        elif act == "truncate" and length > 1:
            length = rng.randint(1, length)
            life.append((act, [length]))
        elif act == "save" and length or act == "restore" and saved:
            life.append((act, []))
            saved, length = (length, length) if act == "save" else (saved, saved)
    return life


def lived(model, life: list[Step]) -> list[np.ndarray]:
    """The logits after each evaluation."""
    results, state = [], io.BytesIO()
    for act, numbers in life:
        if act == "eval":
            results.append(model.eval(numbers, last_only=True)[0])
        elif act == "save":
            state = io.BytesIO()
            model.save(state)
        elif act == "restore":
            state.seek(0)
            model.restore(state)
        else:
            getattr(model, act)(*numbers)
    return results


def reference(data: bytes, life: list[Step]) -> list[np.ndarray]:
    model, results, saved = Gemma(data), [], []
    for act, numbers in life:
        if act == "eval":
            results.append(model.eval(numbers))
        elif act == "save":
            saved = list(model.tokens)
        elif act == "restore":
            model.tokens = list(saved)
        else:
            getattr(model, act)(*numbers)
    return results


def error(got: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference, as a part of the largest logit of that evaluation."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.spread("arch flash", "arch kernels")
@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
@pytest.mark.parametrize("kernels", ["compiled", "numpy"])
def test_lives_are_those_of_keys_that_are_never_rotated_in_place(arch, flash, kernels):
    for seed in range(2):
        data, life = random_model(arch, seed, tied=True), random_life(seed)
        with load(data, backends=[gs.CpuBackend(1, kernels=kernels)], n_ctx=N_CTX, flash=flash, kv_type="f32") as model:
            assert error(lived(model, life), reference(data, life)) <= BOUND


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_many_lives_are_those_of_keys_that_are_never_rotated_in_place(arch):
    for seed in range(2, 100):
        data, life = random_model(arch, seed, tied=True), random_life(seed, 40)
        with load(data, n_ctx=N_CTX, flash=bool(seed % 2), kv_type="f32") as model:
            assert error(lived(model, life), reference(data, life)) <= BOUND, seed


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
def test_what_a_shift_changes_is_that_deeper_layers_have_seen_the_forgotten_tokens(arch, flash):
    """One layer is as if evaluated anew, its window included; more differ from that, by as much as they must."""
    (n_keep, n_discard), rng = (3, 12), random.Random(5)
    ids = [rng.randrange(64) for _ in range(30)]
    shifted = [("eval", ids), ("shift", [n_keep, n_discard]), ("eval", [7])]
    anew = [("eval", [*ids[:n_keep], *ids[n_keep + n_discard :], 7])]
    differences = []
    for n_layer in (1, 7):
        data = random_model(arch, 3, tied=True, metadata={"block_count": n_layer})
        results = []
        for life in (shifted, anew):
            with load(data, n_ctx=N_CTX, flash=flash, kv_type="f32") as model:
                results.append(lived(model, life)[-1])
                assert error(results[-1:], reference(data, life)[-1:]) <= BOUND
        differences.append(error(results[:1], results[1:]))
    assert differences[0] <= BOUND and differences[1] >= 10 * BOUND


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_lives_are_llama_cpps_where_it_keeps_every_row(arch, tmp_path):
    """With windows as wide as the context.

    With narrower ones llama.cpp overwrites rows outside the window, and a sequence that is truncated or shifted later
    lacks them: here it does not.
    """
    lives = [random_life(seed) for seed in range(4)]
    data = random_model(arch, 1, tied=True, metadata=WIDE)
    (tmp_path / "model.gguf").write_bytes(data)
    done = subprocess.run([sys.executable, Path(__file__).parents[1] / "support" / "llama_cpp_lives.py",
                           tmp_path / "model.gguf", str(N_CTX)], input=json.dumps(lives), text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for life, expected in zip(lives, json.loads(done.stdout), strict=True):
        with load(data, n_ctx=N_CTX, kv_type="f32") as model:
            assert error(lived(model, life), [np.array(logits) for logits in expected]) <= BOUND
