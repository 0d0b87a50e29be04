"""The real CuPy runs the backend over a stub of CUDA: the contract of backends, every op, type and architecture,
several devices, errors planted in each call, and processes that begin and end."""

import gc
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import cuda_stub
import gpu_right
import numpy as np
import pytest
import real_cupy
from processes import cases_of, run_case, run_program

import ggml_sched as gs
from ggml_sched.llama import Model, load, random_llama
from ggml_sched.testing.contract import CASES, BackendContract

if real_cupy.MISSING is not None:
    pytest.skip(real_cupy.MISSING, allow_module_level=True)

IN_PROCESSES = Path(__file__).with_name("real_cupy_cases.py")
PLANTED = Path(__file__).with_name("real_cupy_planted.py")
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8]
LLAMA = random_llama(1, n_vocab=64, n_embd=32, n_layer=2, n_head=4, n_head_kv=2, n_ff=48)
CHECKS = {check.name: check for check in gpu_right.checks(lambda **options: real_cupy.backend(**options))}


@pytest.fixture
def world(request) -> Iterator[cuda_stub.World]:
    """The stub, whose work runs late where the parameter says so; a test leaves no complaint and no object behind."""
    made = real_cupy.world(request.param)
    yield made
    gc.collect()
    assert made.complaints == []
    assert made.left() == {}
    made.late = False


at_once_and_late = pytest.mark.parametrize("world", [False, True], ids=["at once", "late"], indirect=True)


# -- results ------------------------------------------------------------------------------------------------------


class Contract(BackendContract):
    cases = [case for k, case in enumerate(CASES) if k % 4 == 0]
    late = False

    @pytest.fixture(autouse=True)
    def _world(self) -> Iterator[None]:
        made = real_cupy.world(self.late)
        yield
        assert made.complaints == []
        made.late = False

    def new_backend(self):
        return real_cupy.backend()

    def second_backend(self):
        return real_cupy.backend(1)

    def limited_backend(self, memory):
        return real_cupy.backend(memory=memory)


class TestContract(Contract):
    pass


class TestContractLate(Contract):
    late = True


@pytest.mark.parametrize(("name", "world"), [(name, i % 2 == 1) for i, name in enumerate(CHECKS)], indirect=["world"])
def test_results(world, name):
    """Every other check runs late."""
    check = CHECKS[name]
    assert check.run() <= check.allowed
    assert world.launched


@at_once_and_late
def test_launches_that_overlap_have_the_attribute_and_give_the_same_bits(world):
    """Launched one by one, and captured; all but the first launch of a plan."""
    expected = logits([real_cupy.backend()])
    assert not world.early
    world.launched.clear()
    found = logits([real_cupy.backend(overlap=True)])
    assert (found == expected).all()
    n_plans = world.launched["q4_0"] + world.launched["get_rows"]       # each begins with the rows of the embeddings
    assert 0 < world.launched.total() - world.early.total() <= n_plans
    assert world.counts["cuLaunchKernelEx"] == world.early.total()


@pytest.mark.parametrize(("arch", "driver"), [(89, 13000), (90, 12020)])
def test_devices_and_drivers_that_cannot_overlap_do_not(arch, driver, monkeypatch):
    made = real_cupy.world()
    monkeypatch.setattr(made, "arch", arch)
    monkeypatch.setattr(made, "driver_version", driver)
    with real_cupy.backend(overlap=True) as backend:
        assert not backend.overlap and backend.device.arch == f"sm_{arch}"


def logits(backends: list[gs.Backend]) -> np.ndarray:
    with load(LLAMA, backends, n_ctx=32) as model:
        return np.concatenate([model.eval(TOKENS), *(model.eval([t]) for t in TOKENS[:4])])


@at_once_and_late
@pytest.mark.parametrize("names", ["0 1", "1 0 CPU", "CPU 1"])
def test_devices_together_give_the_logits_of_the_cpu(world, names):
    expected = logits([gs.CpuBackend(1, kernels="numpy")])
    found = logits([gs.CpuBackend(1) if name == "CPU" else real_cupy.backend(int(name), exact=True)
                    for name in names.split()])
    assert ((found - expected) ** 2).sum() / (expected**2).sum() < 1e-6


@at_once_and_late
def test_devices_reach_each_other(world):
    with real_cupy.backend(0) as first, real_cupy.backend(1) as second:
        with first.alloc_buffer(4096) as here, second.alloc_buffer(4096) as there:
            data = np.arange(4096, dtype=np.uint8)
            first.upload(here.base, data)
            second.event_wait(first.event_here())
            second.stream.copy(there.base, here.base, 4096)
            found = np.zeros(4096, np.uint8)
            second.download(found, there.base)
            second.synchronize()
        assert (found == data).all()


# -- errors -------------------------------------------------------------------------------------------------------

CALLS = ["cudaMalloc", "cudaHostAlloc", "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags",
         "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventQuery", "cuModuleUnload",
         "cudaStreamSynchronize", "cudaEventRecord", "cudaStreamBeginCapture",
         "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch", "cuLaunchKernel", "cuLaunchKernelEx",
         "cuModuleLoadData", "cuModuleGetFunction", "cuCtxGetCurrent", "cudaSetDevice", "cudaGetDeviceProperties",
         "cublasCreate_v2",
         "cudaFree", "cudaStreamDestroy", "cudaEventDestroy", "cudaGraphDestroy", "cudaGraphExecDestroy",
         "cudaFreeHost", "cublasDestroy_v2", "cudaDeviceSynchronize"]
"""Every function that a model on one device calls and that can fail."""


def test_the_list_of_calls_is_complete():
    world = real_cupy.world()
    logits([real_cupy.backend(overlap=True)])
    gc.collect()
    others = {"cudaGetDeviceCount", "cudaDeviceGetAttribute", "cudaDriverGetVersion", "cudaGetLastError",
              "cudaMemGetInfo",
              "cudaGetDevice", "cudaGetDeviceProperties_v2", "cudaStreamIsCapturing", "cuCtxSetCurrent",
              "cuFuncGetAttribute", "cuGetErrorName", "cuGetErrorString"}
    assert world.counts.keys() - others <= set(CALLS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")       # by finalisers of CuPy's streams
@pytest.mark.parametrize("status", [2, 700])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_a_call_is_typed_and_everything_works_afterwards(call, status):
    """A call that fails may leave objects behind only where CUDA refuses to free them."""
    world = real_cupy.world()
    expected = logits([gs.CpuBackend(1, kernels="numpy")])
    world.failing[call] = {2: 3, 700: 13}[status] if call.startswith("cublas") else status      # cuBLAS' own numbers
    try:
        found = logits([real_cupy.backend(exact=True, overlap="Ex" in call)])
    except (gs.BackendError, gs.OutOfMemory) as error:
        assert str(error)
        if status == 2 and call == "cudaMalloc":
            assert isinstance(error, gs.OutOfMemory)
        del error
    else:
        assert ((found - expected) ** 2).sum() / (expected**2).sum() < 1e-6
    world.failing.clear()
    gc.collect()
    if not any(part in call for part in ("Free", "Destroy", "Synchronize")):
        assert world.left() == {}
    found = logits([real_cupy.backend(exact=True)])
    assert ((found - expected) ** 2).sum() / (expected**2).sum() < 1e-6


STEPS = [TOKENS, *([t] for t in TOKENS[:4])]
"""Tokens of computes: a prompt's, then single ones, whose plan is launched, captured, and replayed twice."""
REPLAYED = 3
"""The first step that replays graphs."""
CAPTURED = ("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphDestroy")
LATER = [(1, call) for call in ("cuCtxGetCurrent", "cudaMemcpyAsync", "cudaStreamSynchronize", "cuLaunchKernel",
                                "cudaGraphLaunch", *CAPTURED)]
LATER += [(2, call) for call in ("cuCtxGetCurrent", "cuCtxSetCurrent", "cudaMemcpyAsync", "cudaStreamSynchronize",
                                 "cudaGraphLaunch", "cudaEventCreateWithFlags", "cudaEventRecord",
                                 "cudaStreamWaitEvent", "cudaEventDestroy", *CAPTURED)]
"""The number of devices, and each function that computes of a model call again and again, or to capture graphs."""


@cache
def steps(n_devices: int) -> tuple[list[np.ndarray], list[Counter[str]]]:
    """Without errors: the logits of each step, and how often it calls each function."""
    world, results, calls = real_cupy.world(), [], []
    with model_on(n_devices) as model:
        for tokens in STEPS:
            before = world.counts.copy()
            results.append(model.eval(tokens))
            calls.append(world.counts - before)
    return results, calls


def model_on(n_devices: int) -> Model:
    return load(LLAMA, [real_cupy.backend(i, exact=True) for i in range(n_devices)], n_ctx=32)


@pytest.mark.parametrize("n_devices", [1, 2])
def test_the_list_of_later_calls_is_complete(n_devices):
    _, calls = steps(n_devices)
    listed = {call for n, call in LATER if n == n_devices}
    replays = set.intersection(*map(set, calls[REPLAYED:]))
    captures = {call for call in calls[REPLAYED - 1] if call in CAPTURED}
    assert replays | captures | ({"cuLaunchKernel"} if n_devices == 1 else set()) == listed
    assert captures == {*CAPTURED} and not any(call in step for step in calls[REPLAYED:] for call in CAPTURED)
    assert [bool(step["cudaGraphLaunch"]) for step in calls] == [False, False, True, True, True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")       # by finalisers of CuPy's events
@pytest.mark.parametrize("status", [2, 700])
@pytest.mark.parametrize(("n_devices", "call"), LATER)
def test_an_error_of_one_later_call_is_typed_and_the_same_model_goes_on(n_devices, call, status):
    """The first, and the last, of a step's calls of a function fails once; the step is repeated, with the same bits."""
    expected, calls = steps(n_devices)
    world, n_planted = real_cupy.world(), 0
    with model_on(n_devices) as model:
        for tokens, logits, counts in zip(STEPS, expected, calls, strict=True):
            n_past = model.n_past
            for before in {0, counts[call] - 1} if counts[call] else ():
                world.failing_once[call] = before, status
                try:
                    found = model.eval(tokens)
                except (gs.BackendError, gs.OutOfMemory) as error:
                    assert str(error) and model.n_past == n_past
                else:                       # such as of a graph that is refused: its kernels are launched
                    assert (found == logits).all()
                    model.truncate(n_past)
                n_planted += call not in world.failing_once
                world.failing_once.clear()
            assert (model.eval(tokens) == logits).all()
    assert n_planted >= 1
    del model
    gc.collect()
    if "Destroy" not in call:
        assert world.left() == {}


# -- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases_of(IN_PROCESSES))
def test_process(case, tmp_path):
    kernels = tmp_path / "kernels" if "folder" in case else Path.home() / ".cupy" / "kernel_cache"
    run_case(IN_PROCESSES, case, CUPY_CACHE_DIR=str(kernels))


@pytest.mark.parametrize("name", re.findall(r"^@finds\(.*\)\ndef (\w+)\(\)", PLANTED.read_text(), re.MULTILINE))
def test_a_planted_defect_is_found(name):
    assert run_program(PLANTED, name) == "found\n"
