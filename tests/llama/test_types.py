"""Models of every type of weights: each computes what its dequantised twin does."""

import numpy as np
import pytest
from small_llama import written

import ggml_sched as gs
from ggml_sched.graph import quants
from ggml_sched.llama import load, open_gguf, random_llama

SHAPES = {"n_vocab": 64, "n_embd": 256, "n_layer": 2, "n_head": 8, "n_head_kv": 2, "n_ff": 512}
TOKENS = [1, 5, 63, 0, 7]
TYPES = ["f16", "bf16", *(str(kind) for kind in sorted(quants.QUANTIZED))]


def dequantised(data: bytes) -> bytes:
    """The same model with f32 weights."""
    with open_gguf(data) as file:
        tensors = {}
        for name, info in file.tensors.items():
            raw = np.array(file.data(info))
            shape = info.ne[::-1]
            if info.type == gs.Type.F32:
                values = raw.view(np.float32)
            elif info.type == gs.Type.F16:
                values = raw.view(np.float16).astype(np.float32)
            elif info.type == gs.Type.BF16:
                values = quants.bf16_to_f32(raw.view(np.uint16))
            else:
                values = quants.dequantize(raw.reshape(-1, info.type.type_size), info.type)
            tensors[name] = values.reshape(shape)
        return written(file.metadata, tensors)


def logits(data: bytes, **options) -> np.ndarray:
    with load(data, n_ctx=32, **options) as model:
        return np.concatenate([model.eval(TOKENS[:3]), model.eval(TOKENS[3:4]), model.eval(TOKENS[4:])])


@pytest.mark.parametrize("n_expert", [0, 4], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_model_of_each_type_computes_what_its_f32_twin_does(dtype, n_expert):
    data = random_llama(8, **SHAPES, dtype=dtype, n_expert=n_expert)
    with open_gguf(data) as file:
        assert {info.type for info in file.tensors.values()} == {gs.Type.F32, gs.Type[dtype.upper()]}
        assert file.tensors["blk.0.attn_norm.weight"].type == gs.Type.F32
    want = logits(dequantised(data))
    with gs.CpuBackend(kernels="numpy") as backend:
        error = logits(data, backends=[backend]) - want
    assert (error**2).mean() < 1e-3 * (want**2).mean()
    # Compiled kernels multiply with 8-bit activations, which may send a token to another expert where two are as good.
    error = logits(data) - want
    assert (error**2).mean() < (2e-2 if n_expert else 1e-3) * (want**2).mean()


def test_types_mixed_in_one_file():
    """As Q4_K_M and its like mix them."""
    data = random_llama(9, **SHAPES, dtype="q4_K")
    with open_gguf(data) as file, open_gguf(random_llama(9, **SHAPES, dtype="q6_K")) as finer:
        tensors = {}
        for name in file.tensors:
            source = finer if "v.weight" in name or "output" in name else file
            info = source.tensors[name]
            tensors[name] = info.type, info.ne, source.data(info)
        mixed = written(file.metadata, tensors)
    assert len({kind for kind, *_ in tensors.values()}) == 3
    want = logits(dequantised(mixed))
    assert ((logits(mixed) - want) ** 2).mean() < 1e-3 * (want**2).mean()


def test_a_type_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="352.*whole q4_K blocks of 256"):
        random_llama(1, **(SHAPES | {"n_ff": 352}), dtype="q4_K")
    with pytest.raises(ValueError, match="'q9_9'.*q4_K"):
        random_llama(1, **SHAPES, dtype="q9_9")
    with pytest.raises(gs.UnsupportedOp, match="iq2_xxs"):
        random_llama(1, **SHAPES, dtype="iq2_xxs")
