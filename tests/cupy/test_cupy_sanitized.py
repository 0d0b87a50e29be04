"""A whole model under AddressSanitizer and UndefinedBehaviorSanitizer: a soak.

test_cuda_sanitized.py has each kernel by itself; here they are launched, captured and replayed by plans.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from cupy_sources import needs_compiler, run_sanitized

import ggml_sched as gs
from ggml_sched.llama import load, random_llama

pytestmark = [needs_compiler, pytest.mark.soak]

SHAPE = {"n_vocab": 40, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_head_kv": 1, "n_ff": 96}
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 32]

MODULES = ["matvec_plain", "matmul_plain", "matmul_float", "matvec_float", "rows", "copies", "norm", "rope",
           "elementwise", "soft_max", "activations"]
"""Most of what the model needs; others are compiled at their first use."""

CODE = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
import ggml_sched as gs
from cuda_emulator import EmulatedDevice
from cuda_emulator.compile import library
from ggml_sched.backends.cupy.source import KERNELS, kernel_source
from ggml_sched.llama import load, random_llama

shape, prompt, flash, modules = map(json.loads, sys.argv[1:5])
kinds = EmulatedDevice().sanitize
assert kinds == ("address", "undefined")
with ThreadPoolExecutor(os.cpu_count()) as pool:        # where it has not been done: by all cores
    list(pool.map(lambda name: library(name, kernel_source(name, KERNELS), kinds), modules))
data, found = random_llama(5, **shape, dtype="q4_0"), []
for order in (0, 3):
    with EmulatedDevice(order=order) as device, gs.CupyBackend(device, staging=1 << 16) as cuda:
        with load(data, [cuda], n_ctx=64, flash=flash) as model:
            found += [model.eval(prompt)[-1].tolist(), *(model.eval([t])[-1].tolist() for t in prompt[:3])]
print(json.dumps(found))
"""


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
def test_a_model_touches_no_byte_that_is_not_its_own(flash):
    """A prompt, and tokens that are launched, captured and replayed; threads run forward and shuffled."""
    done = run_sanitized("address,undefined", CODE, json.dumps(SHAPE), json.dumps(PROMPT), json.dumps(flash),
                         json.dumps(MODULES))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == ""
    first, other = np.split(np.array(json.loads(done.stdout)), 2)
    assert np.array_equal(first, other)
    with gs.CpuBackend(1) as cpu, load(random_llama(5, **SHAPE, dtype="q4_0"), [cpu], n_ctx=64) as model:
        want = np.stack([model.eval(PROMPT)[-1], *(model.eval([t])[-1] for t in PROMPT[:3])])
    assert ((first - want) ** 2).sum() <= 5e-3 * (want**2).sum()
