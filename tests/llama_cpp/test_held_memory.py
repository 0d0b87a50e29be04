"""memory() reports the current bytes of llama.cpp's compute buffers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from processes import run_python

MODEL = Path(__file__).resolve().parents[1] / "data" / "models" / "tiny-llama-q4_0.gguf"
SCRIPT = """
import sys
import ggml_sched.llama_cpp as hooked
hooked.install(level=sys.argv[1])
from llama_cpp import Llama
assert hooked.memory() == {}
def opened():
    return Llama(sys.argv[2], n_ctx=256, n_batch=64, verbose=False)
first = opened()
held = hooked.memory()
assert len(held) == 1 and sum(held.values()) == sum(hooked.plans()[0].buffer_sizes) > 0, held
second = opened()
twice = hooked.memory()
assert twice == {name: 2 * nbytes for name, nbytes in held.items()}, (held, twice)
first.close()
assert hooked.memory() == held
second.close()
assert hooked.memory() == {}
"""


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_memory_is_the_sum_of_the_buffers_of_open_contexts(level):
    run_python("-c", SCRIPT, level, str(MODEL))
