"""llama.cpp, given what `Fit.llama_cpp` returns, has every weight and cache where it says, and keeps the budgets."""

import importlib.util
import os
from pathlib import Path

import pytest
from processes import run_python

import ggml_sched as gs
from ggml_sched.llama.synthetic import random_model

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/data/models/tiny-llama-q4_0.gguf"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
HOST = gs.Device("CPU", 1 << 34, 5e10, 1e12, host=True)
SMALL = {"n_ctx": 256, "n_batch": 64, "use_extra_bufts": False, "use_mmap": False}
"""In mapped files llama.cpp leaves the space between the weights that it uses."""


@pytest.fixture(autouse=True)
def _not_hooked(monkeypatch):
    monkeypatch.setenv("GGML_SCHED", "off")


def gpu(name: str, nbytes: int, bandwidth: float) -> gs.Device:
    return gs.Device(name, nbytes, bandwidth, 4e13, alignment=128)


@pytest.mark.parametrize(("arch", "sizes"), [
    ("", [1_000_000]), ("", [900_000, 1_100_000]), ("", [8 << 20, 8 << 20]), ("mamba", [400_000]),
    ("gemma3", [900_000]), ("qwen3moe", [700_000, 900_000])])
def test_llama_cpp_places_what_the_description_says(arch, sizes, tmp_path):
    from ggml_sched.llama_cpp import compute_of, dry_run

    path = TINY
    if arch:
        path = tmp_path / "model.gguf"
        path.write_bytes(random_model(arch, 7, tied=arch == "gemma3"))
    devices = [gpu(f"GPU{i}", nbytes, 1e12 / (i + 1)) for i, nbytes in enumerate(sizes)]
    run = dry_run(path, **SMALL)
    fit = gs.fit(run.graphs, [*devices, HOST])
    same = {"use_extra_bufts": False, "use_mmap": False}
    found = fit.llama_cpp(compute=compute_of(path, **same))
    real = dry_run(path, devices=found.order, **same, **found.settings)
    assert {one.name: one.device for one in real.residents} == found.residents
    memory = real.memory()
    for use in found.memory:
        held = memory[use.device.name]
        assert held.compute == use.arena
        assert 0 <= use.weights - held.weights <= 128 and 0 <= use.cache - held.caches <= 128, "aligned alike"
        assert not found.fits or held.weights + held.caches + held.compute <= use.device.budget
    assert found.fits == all(use.left >= 0 for use in found.memory)
    assert real.settings["n_ctx"] == 256 and real.settings["n_ubatch"] == 64


def test_a_model_opens_with_overrides_and_without_them_afterwards():
    code = f"""
import itertools
import ggml_sched.llama_cpp as hooked
import llama_cpp.llama_cpp as api
from llama_cpp import Llama
log = []
callback = api.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
before = api.llama_model_default_params
def tokens():
    model = Llama({str(TINY)!r}, n_ctx=64, n_batch=32, n_threads=1, verbose=False)
    api.llama_log_set(callback, None)
    found = list(itertools.islice(model.generate([1, 2, 3], top_k=1, temp=0.0), 8))
    model.close()
    return found
plain = tokens()
with hooked.overriding({{"ffn_.*": "CPU"}}, ["CPU"]):
    assert api.llama_model_default_params().tensor_buft_overrides and api.llama_model_default_params().devices
    assert tokens() == plain
assert api.llama_model_default_params is before and not before().tensor_buft_overrides
try:
    with hooked.overriding({{"ffn_.*": "CUDA7"}}):
        raise SystemExit("not reached")
except ValueError as error:
    assert "no device 'CUDA7'" in str(error)
assert api.llama_model_default_params is before
print("done")
"""
    assert run_python("-c", code, GGML_SCHED="off", PATH=os.environ["PATH"]).stdout == "done\n"


def test_one_text_is_no_sequence_of_devices():
    from ggml_sched.llama_cpp import overriding

    with pytest.raises(TypeError, match="devices='CPU' is one text"), overriding({}, "CPU"):
        pass
