"""Launches that begin before those before them have ended: each kernel waits first, in all threads, and the emulated
device shows one that does not what memory was before.  Models give the same bits as without overlaps."""

import re
import subprocess
from contextlib import nullcontext

import cupy_devices as devices
import cupy_kernels
import numpy as np
import pytest
from cuda_emulator import EmulatedDevice
from cuda_emulator.compile import compiler
from cupy_sources import Bench, needs_compiler

import ggml_sched as gs
from ggml_sched.backends.cupy.device import DeviceError
from ggml_sched.backends.cupy.source import KERNELS, kernel_source
from ggml_sched.llama import load
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.synthetic import random_model

pytestmark = needs_compiler

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]
ORDERS = [0, 1, 4711]
COMMON = f'#include "{KERNELS / "common.cuh"}"\n'

# -- the package's kernels ------------------------------------------------------------------------

_KERNEL = re.compile(r'extern\s*"C"\s*here\b[\w\s]*?\b(\w+)\s*\(')
_AHEAD = r"read_rows_ahead\(a, w, second, ids, bytes_of_row<\w+>\(a\)\)|read_cells_ahead\(a, k, v\)"
_FIRST = re.compile(rf"\s*(?:(?:{_AHEAD});\s*)?await_inputs\(\);")


def kernels_without_a_wait(text: str) -> tuple[set[str], set[str]]:
    """(all kernels of a source, those that do not begin with await_inputs() or what they ask for ahead and that)."""
    command = [*compiler(), "-E", "-P", "-x", "c++", "-DHOST_CUDA=1", "-D__global__=here", "-D__launch_bounds__(...)=",
               "-D__device__=", "-D__forceinline__=", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    every, without = set(), set()
    for found in _KERNEL.finditer(done):
        every.add(found[1])
        depth, at = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(done[at], 0)
            at += 1
        body = done[done.index("{", at) + 1:]
        if not _FIRST.match(body):
            without.add(found[1])
    return every, without


@pytest.mark.parametrize("file", sorted(path.stem for path in KERNELS.glob("*.cu")))
def test_every_kernel_waits_first(file):
    every, without = kernels_without_a_wait(kernel_source(file))
    assert every and not without


@pytest.mark.parametrize("body", ["float x = *p; await_inputs(); *p = x;", "if (p) await_inputs();", "*p = 1.0f;"])
def test_a_kernel_that_waits_late_or_not_is_found(body):
    text = f'extern "C" __global__ void __launch_bounds__(32) f(float* p) {{ {body} }}\n'
    assert kernels_without_a_wait(text) == ({"f"}, {"f"})


# -- the emulated device --------------------------------------------------------------------------

PROBE = COMMON + """
extern "C" __global__ void put(int* to, int v) { await_inputs(); to[threadIdx.x] = v; }
extern "C" __global__ void copy(int* to, const int* from) { await_inputs(); to[threadIdx.x] = from[threadIdx.x]; }
extern "C" __global__ void early(int* to, const int* from) {
    const int v = *(const volatile int*)(from + threadIdx.x);
    await_inputs();
    to[threadIdx.x] = v;
}
extern "C" __global__ void never(int* to, const int* from) { to[threadIdx.x] = from[threadIdx.x]; }
extern "C" __global__ void some(int* to, const int* from) {
    if (threadIdx.x != 7) await_inputs();
    to[threadIdx.x] = from[threadIdx.x];
}
extern "C" __global__ void writes(int* to, const int* from) {
    *(volatile int*)(to + threadIdx.x) = 1;
    await_inputs();
    to[threadIdx.x] = from[threadIdx.x];
}
"""


class Chain(Bench):
    """`put` of 5 to `first`, then kernels from `first` on to `second`, all but `put` early."""

    def __init__(self, folder, order=0) -> None:
        super().__init__(PROBE, folder, EmulatedDevice(order=order))
        self.first, self.second = (self.up(np.zeros(32, np.int32)) for _ in range(2))

    def queue(self, name: str, *args: object, early: bool = True) -> None:
        function = self.function(name)
        packed = function.pack([np.uint64(arg.ptr) if hasattr(arg, "ptr") else arg for arg in args])
        function.launch((1,), (32,), packed, 0, self.stream, early)

    def result(self) -> np.ndarray:
        return self.down(self.second, np.zeros(32, np.int32))


@pytest.fixture(params=ORDERS)
def chain(request, tmp_path):
    return Chain(tmp_path, request.param)


def test_a_kernel_that_waits_sees_what_is_before_it(chain):
    chain.queue("put", chain.first, np.int32(5), early=False)
    chain.queue("copy", chain.second, chain.first)
    chain.queue("put", chain.first, np.int32(6))        # after it was read
    assert chain.result().tolist() == [5] * 32
    assert chain.device.counts.early == 2


def test_a_kernel_that_reads_before_it_waits_reads_what_was_there(chain):
    chain.queue("put", chain.first, np.int32(5), early=False)
    chain.queue("early", chain.second, chain.first)
    assert sorted(chain.result().tolist()) == [0] + [5] * 31


def test_it_may_overlap_with_more_than_the_launch_before_it(chain):
    chain.queue("put", chain.second, np.int32(9), early=False)
    chain.queue("put", chain.first, np.int32(5))
    chain.queue("put", chain.second, np.int32(4))
    chain.queue("early", chain.second, chain.first)
    assert 0 in chain.result()


def test_copies_end_what_a_launch_may_overlap_with(chain):
    chain.queue("put", chain.first, np.int32(5), early=False)
    chain.stream.fill(chain.second.ptr, 0, 4)
    chain.queue("early", chain.second, chain.first)
    assert chain.result().tolist() == [5] * 32


@pytest.mark.parametrize(("name", "said"), [("never", "of 32 threads 0 call"), ("some", "of 32 threads 31 call"),
                                            ("writes", "written before await_inputs")])
def test_what_a_kernel_must_not_do_is_an_error(chain, name, said):
    chain.queue("put", chain.first, np.int32(5), early=False)
    chain.queue(name, chain.second, chain.first)
    with pytest.raises(DeviceError, match=said):
        chain.stream.synchronize()
    chain.queue("copy", chain.second, chain.first)      # the device works afterwards
    assert chain.result().tolist() == [5] * 32


def test_launches_of_a_graph_overlap_and_its_first_does_not(chain):
    chain.stream.begin_capture()
    chain.queue("put", chain.first, np.int32(5), early=False)
    chain.queue("early", chain.second, chain.first)
    graph = chain.stream.end_capture()
    for _ in range(2):
        chain.stream.fill(chain.first.ptr, 0, 128)
        graph.launch(chain.stream)
        assert sorted(chain.result().tolist()) == [0] + [5] * 31


# -- plans ----------------------------------------------------------------------------------------


def logits(data: bytes, overlap: bool, seed: int = 0, **options) -> tuple[np.ndarray, int, int]:
    """Of a prompt and of single tokens; and how many launches were made or captured, and how many of them early."""
    on = devices.device(seed, order=seed)
    with devices.backend(on, overlap=overlap) as cuda, load(data, [cuda], n_ctx=64, **options) as model:
        found = [model.eval(TOKENS), *(model.eval([t]) for t in TOKENS[:4])]
        return np.concatenate(found), on.counts.launches, on.counts.early


@pytest.mark.parametrize(("arch", "seed"), [
    ("llama", 0), ("llama", 4711), ("gemma3", 1), ("gpt-oss", 0), ("deepseek2", 4711), ("mamba", 0),
    *(pytest.param(arch, 1, marks=pytest.mark.soak) for arch in ARCHITECTURES)])
def test_models_give_the_same_bits(arch, seed):
    data = random_model(arch, 1)
    expected, n_launches, n_early = logits(data, False)
    assert n_early == 0
    found, n, n_early = logits(data, True, seed)
    assert (found == expected).all()
    assert n == n_launches and 0.6 * n < n_early < n


def test_the_first_launch_of_a_plan_waits_for_all_before_it(ctx):
    x = ctx.tensor("f32", 64, "x")
    graph = gs.Graph(ctx.sqr(ctx.add(ctx.sqr(x), x)))
    with devices.backend(overlap=True) as cuda, cuda.alloc_tensors(ctx):
        x.set(np.ones(64, np.float32))
        cuda.graph_compute(graph)
        cuda.synchronize()
        assert (cuda.device.counts.launches, cuda.device.counts.early) == (3, 2)
        assert graph.nodes[-1].numpy().tolist() == [4.0] * 64


def test_a_device_that_cannot_overlap_does_not(monkeypatch):
    monkeypatch.setattr(EmulatedDevice, "can_overlap", False)
    with devices.backend(overlap=True) as cuda:
        assert not cuda.overlap


PLANTED = {
    "": (),
    "a norm without a wait": (
        "norm.cu", "    await_inputs();\n    __shared__ float part[32];\n    FOR_EACH_ROW(r, rows)",
        "    __shared__ float part[32];\n    FOR_EACH_ROW(r, rows)"),
    "products that wait where they have rows": (
        "matvec.cuh", "await_inputs();", "if (threadIdx.x < 64) await_inputs();"),
    "a rope that reads its position before": (
        "rope.cu", "    await_inputs();\n    __shared__ int found[32];",
        "    const int32_t old = *(const volatile int32_t*)t.positions.p;\n"
        "    const float v0 = *(const volatile float*)q.a.p;\n    await_inputs();\n"
        "    if (blockIdx.y == 0 && threadIdx.x == 0) *(float*)q.a.p = v0 + (float)(old - old);\n"
        "    __shared__ int found[32];"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    """Without one the same kernels pass."""
    data = random_model("llama", 1)
    expected, _, _ = logits(data, False)
    cupy_kernels.edit_sources(monkeypatch, tmp_path, *([PLANTED[bug]] if bug else []))
    with pytest.raises((AssertionError, gs.BackendError)) if bug else nullcontext():
        assert (logits(data, True)[0] == expected).all()
