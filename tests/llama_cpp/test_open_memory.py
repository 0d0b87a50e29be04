"""memory() has every buffer that is open, by device and by what it is for, and agrees with a dry run to the byte."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from allocations import PACKAGES
from hooked import build
from processes import preloading, run_python

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/data/models/tiny-llama-q4_0.gguf"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
FIELDS = ("weights", "caches", "compute", "work", "mapped")


def run(code: str, *arguments: str, **environment: str) -> str:
    return run_python("-c", code, *arguments, timeout=120, **environment).stdout


@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_open_models_hold_what_dry_runs_predict(level):
    run(f"""
import json, os, pickle
import ggml_sched.llama_cpp as hooked
from llama_cpp import Llama
fields, path = {FIELDS!r}, {str(TINY)!r}
bytes_of = lambda held: [getattr(held, field) for field in fields]
assert hooked.memory() == {{}} and len(hooked.memory()) == 0
first = Llama(path, n_ctx=256, n_batch=64, verbose=False)
one = hooked.memory()
want = hooked.dry_run(path, n_ctx=256, n_batch=64).memory({level!r})
assert list(one) == ["CPU"] and bytes_of(one["CPU"]) == bytes_of(want["CPU"]), (one, want)
assert one["CPU"].compute == sum(hooked.compute_buffers().values()) and one["CPU"].total == want["CPU"].total
second = Llama(path, n_ctx=512, n_batch=64, use_mmap=False, verbose=False)
both = hooked.memory()["CPU"]
want = hooked.dry_run(path, n_ctx=512, n_batch=64, use_mmap=False).memory({level!r})["CPU"]
assert bytes_of(both) == [a + b for a, b in zip(bytes_of(one["CPU"]), bytes_of(want))]
copied = pickle.loads(pickle.dumps(one))
assert copied == one and hash(copied) == hash(one) and copied != hooked.memory()
assert json.loads(one.to_json())["CPU"] == {{**vars(one["CPU"]), "total": one["CPU"].total}}
assert f"{{one['CPU'].weights:,}}" in str(one) and str(one).startswith("device")
assert 0 < one["CPU"].free <= one["CPU"].capacity and one["CPU"].unaccounted > 1 << 20
first.close()
assert bytes_of(hooked.memory()["CPU"]) == bytes_of(want)
second.close()
assert hooked.memory() == {{}}
""", GGML_SCHED=level)


@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
def test_devices_are_listed_apart_with_what_they_can_still_give(tmp_path):
    """On two imitated devices, beside a hooked llama.cpp."""
    libraries = build.build(tmp_path)
    code = f"""
import ctypes, json, os, sys
import ggml_sched.llama_cpp as hooked
sys.path.insert(0, {str(ROOT / "bench/hooked")!r})
from allocated import devices
from ggml_sched.llama_cpp.parameters import Parameters, check_settings
import llama_cpp as api
job = {{"devices": [("HOST0", 10**9), ("HOST1", 3 * 10**9)], "libraries": {libraries!r}, "pipeline": False}}
handles, names = devices(job)
way = {{"n_ctx": 256, "n_batch": 64, "n_gpu_layers": -1}}
log = api.llama_log_callback(lambda level, text, data: None)
api.llama_log_set(log, None)
parameters = Parameters(api, check_settings(way), {{}}, list(handles)[:-1])
model = api.llama_model_load_from_file({os.fsencode(TINY)!r}, parameters.model)
ctx = api.llama_init_from_model(model, parameters.context(256))
held = hooked.memory()
want = hooked.dry_run({str(TINY)!r}, devices=job["devices"], **way).memory("alloc")
assert list(held) == ["CPU", "HOST0", "HOST1"]
for name in held:
    assert [getattr(held[name], f) for f in {FIELDS!r}] == [getattr(want[name], f) for f in {FIELDS!r}], name
assert (held["HOST1"].free, held["HOST1"].capacity, held["HOST1"].unaccounted) == (3 * 10**9, 3 * 10**9, 0)
assert held["HOST1"].caches == held["HOST0"].caches > 0
api.llama_free(ctx)
assert hooked.memory()["HOST0"].compute == hooked.memory()["HOST0"].caches == 0 < hooked.memory()["HOST0"].weights
api.llama_model_free(model)
assert hooked.memory() == {{}}
print("done")
"""
    path = os.pathsep.join(filter(None, [PACKAGES, *sys.path]))
    assert run(code, LD_PRELOAD=preloading(libraries["holes"]), PYTHONPATH=path).endswith("done\n")


def test_what_a_buffer_is_for_is_found_by_usage_and_name():
    code = ("from ggml_sched.llama_cpp.open_memory import kind_of; import json; found = ((1, ''), (2, ''), (0, ''), "
            "(0, 'cache_k_l0'), (0, 'cache_r_l3'), (0, 'blk.0.attn_q.weight.lora_a'))\n"
            "print(json.dumps([kind_of(*one) for one in found]))")
    assert json.loads(run(code, GGML_SCHED="off")) == ["weights", "compute", "work", "caches", "caches", "weights"]


def test_unaccounted_bytes_of_a_device_are_what_neither_is_free_nor_ours():
    run("""
from ggml_sched.llama_cpp.open_memory import _of_device
held = _of_device("GPU", {"weights": 100, "compute": 20}, {"GPU": (300, 1000)})
assert (held.total, held.free, held.capacity, held.unaccounted) == (120, 300, 1000, 580)
assert _of_device("GPU", {"weights": 100}, {"GPU": (950, 1000)}).unaccounted == 0
held = _of_device("OTHER", {"weights": 100}, {})
assert (held.free, held.capacity, held.unaccounted) == (None, None, None)
""", GGML_SCHED="off")


def test_nothing_installed_is_an_error():
    code = "import ggml_sched.llama_cpp as h\ntry:\n    h.memory()\nexcept h.HookError as e:\n    print(e)"
    assert "install(level=" in run(code, GGML_SCHED="off")
