"""Ten thousand tokens leak nothing: no memory, no objects, no descriptors, no threads."""

import gc
import os
import threading

import pytest

import ggml_sched as gs
from ggml_sched.llama import load, random_llama

pytestmark = pytest.mark.soak
SHAPES = {"n_vocab": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_head_kv": 2, "n_ff": 48}
N_TOKENS, N_WARM = 10_000, 2_000
GROWTH = 2 << 20
"""Bytes of resident memory that may come and go."""


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(backend: gs.CpuBackend) -> tuple[int, int, int]:
    gc.collect()
    return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("flash", [False, True])
def test_ten_thousand_tokens_leak_nothing(flash):
    """One sequence shifts through a small context; others come, share its rows, embed, and go."""
    with gs.CpuBackend(2) as backend, load(random_llama(1, **SHAPES), [backend], n_ctx=96, n_seq=3,
                                           flash=flash) as model:
        tokens = model.generate([1, 2, 3], None, shift=True, n_keep=2, temperature=1.0, seed=1)
        before = None
        for i, _ in enumerate(tokens):
            if i % 97 < 10 and model.n_free > 20:
                model.sequence(0).copy_to(1)
                model.sequence(2).eval([4, 5])
                model.sequence(2).reset()
                model.sequence(1).reset()
                model.embed([7, 8, 9])
            if i == N_WARM:
                before = held(backend), resident()
            if i == N_WARM + N_TOKENS:
                break
        tokens.tokens.clear()
        (objects, descriptors, threads), memory = held(backend), resident()
        assert descriptors == before[0][1] and threads == before[0][2]
        assert objects <= before[0][0] + 50
        assert memory <= before[1] + GROWTH


def test_models_come_and_go(monkeypatch):
    monkeypatch.undo()          # conftest.py keeps every plan, to verify it once
    data = random_llama(1, **SHAPES)
    with gs.CpuBackend(2) as backend:
        before = None
        for i in range(400):
            with load(data, [backend], n_ctx=64) as model:
                model.eval([1, 2, 3])
                model.eval([4], last_only=True)
            if i == 200:
                before = held(backend), resident()
        (objects, descriptors, threads), memory = held(backend), resident()
        assert (descriptors, threads) == before[0][1:] and objects <= before[0][0] + 50
        assert memory <= before[1] + GROWTH
