"""llama.cpp itself on our scheduler: the logits of models, bit by bit those of llama.cpp as it is."""

import importlib.util
from pathlib import Path

import hooking
import numpy as np
import pytest
from hooked import build

from ggml_sched.llama.synthetic import random_model

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
    pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler"),
]


@pytest.mark.parametrize(("devices", "pipeline"), [(0, False), (1, False), (2, True), (3, False)])
@pytest.mark.parametrize("model", ["tiny-llama-q4_0", "tiny-qwen3-f32", "random gpt-oss"])
def test_logits_are_those_of_llama_cpp_as_it_is(model, devices, pipeline, tmp_path):
    path = MODELS / f"{model}.gguf"
    if model.startswith("random"):
        path = tmp_path / "model.gguf"
        path.write_bytes(random_model(model.split()[1]))
    engines, found = hooking.Worker(tmp_path), {}
    for mode in ("stock", "sched"):
        ways = [{"n_ctx": 128, "n_batch": 24, "flash": flash, "n_seq": n_seq, "embeddings": False, "outputs": 0,
                 "layers": layers, "file": str(tmp_path / f"{mode}-{flash}-{n_seq}-{layers}.npy")}
                for flash in (0, 1) for n_seq in (1, 3) for layers in ((0,) if devices == 0 else (999, 2))]
        rows = engines.run(mode, path, "tokens", ways, devices, pipeline)
        assert all("rows" in row for row in rows), rows
        found[mode] = [np.load(way["file"]).view(np.uint32) for way in ways]
    for want, got in zip(found["stock"], found["sched"], strict=True):
        assert np.array_equal(want, got) and want.any()
