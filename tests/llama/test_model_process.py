"""Models among threads and processes: equal bits, and a fork goes on."""

import os
from pathlib import Path

import numpy as np
import pytest
from processes import run_python

import ggml_sched as gs
from ggml_sched.llama import load, random_llama

ROOT = Path(__file__).resolve().parents[2]
DATA = random_llama(1, n_vocab=640, n_embd=128, n_layer=2, n_head=4, n_head_kv=2, n_ff=384)
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32] * 4


@pytest.mark.parametrize("flash", [False, True])
def test_any_number_of_threads_gives_the_same_bits(flash):
    seen = set()
    for n in (1, 2, 4):
        with gs.CpuBackend(n) as backend, load(DATA, [backend], n_ctx=64, flash=flash) as model:
            seen.add((model.eval(TOKENS).tobytes(), model.eval([7], last_only=True).tobytes()))
    assert len(seen) == 1


FORK = """
import os, sys
import ggml_sched as gs
from ggml_sched.llama import load, random_llama
data = random_llama(1, n_vocab=640, n_embd=128, n_layer=2, n_head=4, n_head_kv=2, n_ff=384)
with gs.CpuBackend(2) as backend, load(data, [backend], n_ctx=64) as model:
    model.eval(list(range(20)))
    child = os.fork()
    logits = model.eval([7, 8]).tobytes()
    with open(f"{sys.argv[1]}/{'parent' if child else 'child'}", "wb") as out:
        out.write(logits)
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_after_use_goes_on(tmp_path):
    done = run_python("-W", "ignore", "-c", FORK, str(tmp_path), cwd=ROOT, timeout=60)
    assert done.stdout + done.stderr == ""
    assert sorted(os.listdir(tmp_path)) == ["child", "parent"]
    child, parent = ((tmp_path / name).read_bytes() for name in ("child", "parent"))
    assert child == parent and np.isfinite(np.frombuffer(child, np.float32)).all()
