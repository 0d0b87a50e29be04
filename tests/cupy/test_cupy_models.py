"""Models on CUDA backends: the CPU's logits, alone, on two devices and with the CPU; one wait for a token."""

import cupy_devices as devices
import numpy as np
import pytest
from cuda_emulator import EmulatedDevice
from cuda_emulator.kernels import EmulatedFunction

import ggml_sched as gs
from ggml_sched.llama import load, random_llama
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.synthetic import random_model

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]
SHAPES = {"n_vocab": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 48}
LLAMA = random_llama(1, **SHAPES)
TINY = random_llama(3, n_vocab=64, n_embd=32, n_layer=1, n_head=1, n_head_kv=1, n_ff=32)
EXPERTS = random_llama(2, **SHAPES, n_expert=4)


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - b) ** 2).sum() / (a**2).sum())


def logits(data, backends, **options) -> np.ndarray:
    """Of a prompt, of single tokens, and of the tokens in parts."""
    with load(data, backends, n_ctx=64, **options) as model:
        found = [model.eval(TOKENS), *(model.eval([t]) for t in TOKENS[:4])]
        model.reset()
        found += [model.eval(TOKENS[:3]), model.eval(TOKENS[3:])]
        return np.concatenate(found)


def by_the_cpu(data, **options) -> np.ndarray:
    with gs.CpuBackend(1) as cpu:
        return logits(data, [cpu], **options)


# -- results ----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [
    pytest.param(arch, marks=() if arch in ("llama", "gemma3", "gpt-oss", "deepseek2", "mamba") else pytest.mark.soak)
    for arch in ARCHITECTURES])
def test_every_architecture_gives_the_logits_of_the_cpu(arch):
    data = random_model(arch, 1)
    expected = by_the_cpu(data)
    with devices.backend(exact=True) as cuda:
        assert nmse(expected, logits(data, [cuda])) < 1e-6


@pytest.mark.spread("names", "seed flash")
@pytest.mark.parametrize(("seed", "flash"), [(0, False), (3, True), pytest.param(0, True, marks=pytest.mark.soak),
                                             pytest.param(3, False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("names", ["CUDA CPU", "CPU CUDA", "CUDA CUDA", "CUDA CUDA CPU"])
def test_layers_spread_over_devices_and_the_cpu(names, seed, flash):
    expected = by_the_cpu(LLAMA, flash=flash)
    made = devices.devices(2, seed, peers=seed != 0)
    backends = [gs.CpuBackend(1) if name == "CPU" else devices.new(made.pop(), f"CUDA{i}", exact=True)
                for i, name in enumerate(names.split())]
    assert nmse(expected, logits(LLAMA, backends, flash=flash)) < 1e-6
    for backend in backends:
        backend.close()



@pytest.mark.parametrize("which", ["cache_k", "cache_v", "attn_k", "attn_q"])
def test_a_part_of_the_attention_on_the_host_splits_what_would_be_one_launch(which):
    """Queries, keys, values and their writes are one group only where they are in one split."""
    expected = by_the_cpu(LLAMA, flash=True)
    with devices.backend(exact=True) as cuda, gs.CpuBackend(1) as cpu:
        found = logits(LLAMA, [cuda, cpu], flash=True,
                       place=lambda name, layer: cpu if which in name else cuda)
    assert nmse(expected, found) < 1e-6


@pytest.mark.parametrize("flash", [pytest.param(False, marks=pytest.mark.soak), True])
def test_quantised_weights_and_experts(flash):
    """With activations of 8 bits, as the fast kernels take them, and exactly, as the oracle has them."""
    blocks = random_llama(5, n_vocab=64, n_embd=64, n_layer=2, n_head=4, n_head_kv=2, n_ff=64, dtype="q4_0")
    for data in (blocks, EXPERTS):
        with gs.CpuBackend(1, kernels="numpy") as oracle:
            expected = logits(data, [oracle], flash=flash)
        for exact, most in ((True, 1e-6), (False, 2e-3)):
            with devices.backend(exact=exact) as cuda:
                assert nmse(expected, logits(data, [cuda], flash=flash)) < most


def test_captured_plans_give_the_bits_of_launched_ones():
    found = []
    for capture in (True, False):
        with devices.backend(seed=4, capture=capture) as cuda:
            found.append(logits(LLAMA, [cuda]))
    assert np.array_equal(*found)


BLOCKS = random_llama(5, n_vocab=64, n_embd=64, n_layer=2, n_head=4, n_head_kv=2, n_ff=64, dtype="q4_0")
PROMPT = (TOKENS * 4)[:40]


@pytest.mark.spread("first", "seed")
@pytest.mark.parametrize(("first", "captures"), [([PROMPT], 1), ([[7], [7], PROMPT], 2)],
                         ids=["the prompt first", "tokens first"])
@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_go_through_the_library_of_a_device_that_has_one(seed, first, captures, monkeypatch):
    """Their products are never captured; a token's graph is captured once, and once more where the first prompt makes
    arenas grow, so that what had been captured points to memory of before."""
    library = devices.Products()
    monkeypatch.setattr(EmulatedDevice, "blas", lambda self: library)
    monkeypatch.setattr(EmulatedDevice, "has_tensor_cores", False)
    turns = [*first, [7], [7], PROMPT, [7], PROMPT, [7]]

    def run(backend, seen=lambda tokens: None) -> np.ndarray:
        with load(BLOCKS, [backend], n_ctx=256) as model:
            found = []
            for tokens in turns:
                found.append(model.eval(tokens))
                seen(tokens)
            return np.concatenate(found)

    with gs.CpuBackend(1, kernels="numpy") as oracle:
        expected = run(oracle)
    calls = []

    def seen(tokens):
        calls.append((len(tokens), library.n_calls - sum(n for _, n in calls)))

    with devices.backend(seed=seed) as cuda:
        assert nmse(expected, run(cuda, seen)) < 2e-3
        # 7 products of weights in each of two layers, of the last only what the logits need, and none of a token.
        of_prompt = dict(calls)[len(PROMPT)]
        assert of_prompt >= 7 + 3 and calls == [(n, of_prompt if n > 1 else 0) for n in map(len, turns)]
        assert cuda.device.counts.captures == captures
        assert cuda.device.counts.graph_launches == turns.count([7]) - captures


def test_exact_products_go_through_no_library(monkeypatch):
    library = devices.Products()
    monkeypatch.setattr(EmulatedDevice, "blas", lambda self: library)
    monkeypatch.setattr(EmulatedDevice, "has_tensor_cores", False)
    with gs.CpuBackend(1, kernels="numpy") as oracle, load(BLOCKS, [oracle], n_ctx=64) as model:
        expected = model.eval(PROMPT)
    with devices.backend(exact=True) as cuda, load(BLOCKS, [cuda], n_ctx=64) as model:
        assert nmse(expected, model.eval(PROMPT)) < 1e-6
    assert library.n_calls == 0


# -- what a token costs the host ----------------------------------------------------------


def counted(cuda) -> dict[str, int]:
    return dict(vars(cuda.device.counts))


def test_a_token_is_a_few_loads_one_graph_and_one_wait():
    """None is captured, for none but its logits the host waits, and a reset changes neither."""
    n = 100
    with devices.backend() as cuda, load(TINY, [cuda], n_ctx=64) as model:
        for t in TOKENS[:4]:
            model.eval([t])
        before = counted(cuda)
        for i in range(n):
            if model.n_past == 64:
                model.reset()
            model.eval([TOKENS[i % len(TOKENS)]])
        after = counted(cuda)
    spent = {name: after[name] - before[name] for name in after}
    assert spent["captures"] == 0 and spent["launches"] == 0
    assert spent["graph_launches"] == n
    assert spent["waits"] == n
    assert spent["copies_in"] <= 6 * n


def test_a_token_on_two_devices_waits_for_nothing_else():
    first, second = devices.devices(2, 5)
    with devices.new(first, "CUDA0") as a, devices.new(second, "CUDA1") as b, load(LLAMA, [a, b], n_ctx=256) as model:
        for t in TOKENS[:4]:
            model.eval([t])
        waits, captures = devices.waits(a, b), a.device.counts.captures + b.device.counts.captures
        for i in range(50):
            model.eval([TOKENS[i % len(TOKENS)]])
        assert a.device.counts.captures + b.device.counts.captures == captures
        # The logits; and the other device before its queue is used again.
        assert devices.waits(a, b) - waits <= 100


def test_prompts_of_several_lengths_keep_their_plans():
    """Graphs that take turns are captured once each."""
    with devices.backend() as cuda, load(LLAMA, [cuda], n_ctx=256) as model:
        for _ in range(4):
            for n in (1, 3, 5):
                model.eval(TOKENS[:n])
        before = counted(cuda)
        for _ in range(5):
            for n in (1, 3, 5):
                model.eval(TOKENS[:n])
        after = counted(cuda)
    assert after["captures"] == before["captures"] and after["launches"] == before["launches"]


# -- what goes wrong ----------------------------------------------------------------------


def test_a_model_works_after_an_error_of_the_device(monkeypatch):
    expected = by_the_cpu(LLAMA)[: len(TOKENS) + 1]
    with devices.backend(exact=True) as cuda, load(LLAMA, [cuda], n_ctx=64) as model:
        got = [model.eval(TOKENS)]
        with monkeypatch.context() as patched:
            patched.setattr(EmulatedFunction, "_run", devices.illegal_address)
            for _ in range(2):
                with pytest.raises(gs.BackendError, match="an illegal address"):
                    model.eval(TOKENS[:1])
        assert model.n_past == len(TOKENS)
        got.append(model.eval(TOKENS[:1]))
        assert nmse(expected, np.concatenate(got)) < 1e-6


def test_device_memory_that_is_not_there_is_an_error_before_anything_is_kept(cuda):
    with load(TINY, [cuda], n_ctx=64) as model:
        weights, buffers = cuda.used, cuda.device.used
        model.eval(TOKENS)
        needed = cuda.used
    assert cuda.used == cuda.work.size < needed and cuda.device.used < buffers
    for memory in (weights // 3, weights // 2, weights - 300):
        cuda.memory = memory
        with pytest.raises(gs.OutOfMemory, match="CUDA0"):
            load(TINY, [cuda], n_ctx=64)
        assert cuda.used == cuda.work.size
    cuda.memory = needed
    with load(TINY, [cuda], n_ctx=64) as model:
        model.eval(TOKENS)
