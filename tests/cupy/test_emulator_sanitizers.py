"""AddressSanitizer and UndefinedBehaviorSanitizer see into kernels on the emulated device: planted bugs end a process.

Their kernels are compiled for the sanitizer, in a process that was started for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import EmulatedDevice
from cupy_sources import Bench, needs_compiler, run_sanitized

from ggml_sched.backends.cupy.device import DeviceError

pytestmark = needs_compiler

SOURCE = """
#define KERNEL(name) extern "C" __global__ void name
KERNEL(reads)(const float* x, float* y, int by) { y[threadIdx.x] = x[(int)threadIdx.x + by]; }
KERNEL(writes_static)(float* y, int at) {
    __shared__ float part[48];
    __shared__ float other[48];
    part[at] = 1.0f;
    other[at] = 2.0f;
    __syncthreads();
    y[threadIdx.x] = part[threadIdx.x] + other[threadIdx.x];
}
KERNEL(writes_dynamic)(float* y, int at) {
    DYNAMIC_SHARED(float, part);
    part[at] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = part[0];
}
KERNEL(writes_local)(float* y, int at) {
    float part[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    part[at] = 5.0f;
    __syncwarp();
    y[threadIdx.x] = part[threadIdx.x % 4];
}
KERNEL(loads_wide)(const char* x, float* y, int at) {
    const float4 v = *(const float4*)(x + at);
    y[threadIdx.x] = v.x + v.w;
}
KERNEL(multiplies)(int* y, int n) { y[threadIdx.x] = n * 65536; }
KERNEL(shifts)(int* y, int n) { y[threadIdx.x] = 1 << n; }
"""

CODE = """
import json, os, sys, tempfile
from pathlib import Path
import numpy as np
sys.path[:0] = sys.argv[1:2]
from cupy_sources import Bench
from cuda_emulator import EmulatedDevice

folder = Path(sys.argv[2])
source = (folder / "source.txt").read_text()
Bench(source, folder).module.function("reads")      # compiled here, once

def run(name, number, shared, order):
    bench = Bench(source, folder, EmulatedDevice(order=order))
    x, y = bench.up(np.zeros(32, np.float32)), bench.device.alloc(4 * 32)
    if name == "freed":
        x.free()
        name, number = "reads", 0
        bench.module.function(name)._check_pointers = lambda *_: None       # as on a GPU
    args = [x] if name in ("reads", "loads_wide") else []
    bench.run(name, 2, 32, *args, y, np.int32(number), shared=shared)
    bench.device.close()

for case in json.loads(sys.argv[3]):
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 2)
            run(*case)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([status, said.read().decode(errors="replace")]))
"""

WELL = {
    "address": [("reads", 0, 0), ("writes_static", 47, 0), ("writes_dynamic", 7, 32), ("writes_local", 3, 0)],
    "undefined": [("loads_wide", 16, 0), ("multiplies", 32767, 0), ("shifts", 31, 0)],
}
BADLY = {
    "address": [
        (("reads", 1, 0), "heap-buffer-overflow"), (("reads", -1, 0), "heap-buffer-overflow"),
        (("freed", 0, 0), "heap-use-after-free"), (("writes_static", 48, 0), "global-buffer-overflow"),
        (("writes_dynamic", 8, 32), "heap-buffer-overflow"), (("writes_local", 4, 0), "stack-buffer-overflow")],
    "undefined": [
        (("loads_wide", 4, 0), "misaligned address"), (("multiplies", 32768, 0), "signed integer overflow"),
        (("shifts", 32, 0), "shift exponent 32 is too large")],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{case: (exit status, output)}; one process for each sanitizer, and a child of it for each case."""
    found = {}
    for kind in WELL:
        folder = tmp_path_factory.mktemp(kind)
        (folder / "source.txt").write_text(SOURCE, encoding="utf-8")
        cases = [(*case, order) for case in WELL[kind] for order in (0, 5)]
        cases += [(*case, 0) for case, _ in BADLY[kind]]
        done = run_sanitized(kind, CODE, str(Path(__file__).parents[1] / "support"), str(folder), json.dumps(cases))
        assert done.returncode == 0, done.stderr
        found |= zip(cases, map(json.loads, done.stdout.splitlines()), strict=True)
    return found


@pytest.mark.parametrize("order", [0, 5])
@pytest.mark.parametrize("case", WELL["address"] + WELL["undefined"])
def test_kernels_without_bugs_pass(results, case, order):
    assert results[*case, order] == [0, ""]


@pytest.mark.parametrize(("case", "said"), BADLY["address"] + BADLY["undefined"])
def test_bugs_are_found_where_they_are(results, case, said):
    status, text = results[*case, 0]
    assert status and said in text and "probe.cu:" in text


def test_the_address_sanitizer_must_be_loaded_first(monkeypatch, tmp_path):
    monkeypatch.setenv("GGML_SCHED_EMULATOR_SANITIZE", "address")
    bench = Bench(SOURCE, tmp_path, EmulatedDevice())
    with pytest.raises(DeviceError, match="LD_PRELOAD"):
        bench.run("shifts", 1, 1, bench.device.alloc(4), np.int32(1))
    monkeypatch.setenv("GGML_SCHED_EMULATOR_SANITIZE", "addresses")
    with pytest.raises(DeviceError, match="no sanitizer addresses, only address, undefined"):
        EmulatedDevice()
