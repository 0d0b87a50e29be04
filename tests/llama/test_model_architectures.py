"""Every architecture through the model: parts, sequences and states make no difference."""

import io

import numpy as np
import pytest
from small_llama import TOKENS

import ggml_sched as gs
from ggml_sched.llama import load
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.synthetic import random_model


def close(a: np.ndarray, b: np.ndarray) -> bool:
    # Experts whose weights nearly tie, and a gelu in f16, are why this is not tighter.
    return bool(np.abs(a - b).max() <= 2e-3 * np.abs(b).max())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_parts_and_company_make_no_difference(arch):
    data = random_model(arch, 1)
    with load(data, [gs.CpuBackend()], n_ctx=64, n_seq=2) as model:
        whole = model.eval(TOKENS)
        model.reset()
        assert close(np.concatenate([model.eval(TOKENS[:5]), model.eval([TOKENS[5]]), model.eval(TOKENS[6:])]), whole)
        model.reset()
        got = model.eval_batch([(0, TOKENS[:4]), (1, TOKENS), (0, TOKENS[4:9])])
        assert close(got[1], whole[-1]) and close(got[2], whole[8])
        out = io.BytesIO()
        model.sequence(1).save(out)
        expected = model.sequence(1).eval([7], True)
        model.reset()
        model.sequence(0).restore(io.BytesIO(out.getvalue()))
        assert close(model.eval([7], True), expected)
        assert np.isfinite(model.embed(TOKENS)).all() and model.n_past == 13
