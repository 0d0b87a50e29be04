"""tools/check_cuda.py: it parses the output of ptxas, and the package's kernels neither spill registers nor use a
stack."""

import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda_emulator.compile import cache_folder

from ggml_sched.backends.cupy import compiled
from ggml_sched.backends.cupy.source import KERNELS

TOOL = Path(__file__).parents[2] / "tools" / "check_cuda.py"

LOG = """ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'good' for 'sm_90'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 5.1 ms
ptxas info    : Compiling entry function 'spills' for 'sm_90'
ptxas info    : Function properties for spills
    40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 40 bytes cumulative stack size
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_cuda", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_ptxas_says_is_read(tool):
    assert tool.usages(LOG) == [tool.Usage("good", 24, 128, 0, 0), tool.Usage("spills", 255, 0, 40, 16)]
    # A function that is not inlined comes after the kernels that call it.
    called = LOG.partition("ptxas info    : Compiling entry function 'spills'")[0] + """\
ptxas info    : Function properties for _Z5innerPKiii
    16 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
"""
    assert tool.usages(called) == [tool.Usage("good", 24, 128, 16, 4)]


@pytest.fixture
def compiler(tool, monkeypatch):
    """NVRTC, whose `compile` a test gives."""
    class Compiler:
        version = "0.0"
        architectures = frozenset({"sm_80", "sm_89", "sm_90"})

        def __init__(self, path):
            assert path == "somewhere"

    monkeypatch.setattr(tool, "find_nvrtc", lambda: "somewhere")
    monkeypatch.setattr(tool, "Nvrtc", Compiler)
    return Compiler


def test_it_compiles_as_the_package_does(tool, compiler, tmp_path, monkeypatch):
    """With what ptxas says beside it: what is found holds for the machine code that runs."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    given = []
    nvrtc = SimpleNamespace(
        getVersion=lambda: (13, 0), createProgram=lambda text, *_: text, getCUBIN=lambda program: b"code",
        compileProgram=lambda program, options: given.append([*options]), destroyProgram=lambda program: None)
    compiled.machine_code(nvrtc, "a", "text", "sm_90")
    compiler.compile = lambda self, name, text, *options: given.append([*options]) or (True, LOG, 10)
    (tmp_path / "a.cu").write_text("")
    tool.main([str(tmp_path / "a.cu"), "--arch", "sm_90"])
    of_package, of_tool = given
    assert of_tool == [*of_package, "--ptxas-options=-v"]


def test_spills_stacks_and_errors_fail(tool, compiler, capsys, tmp_path):
    compiler.compile = lambda self, name, text, arch, *_: (
        text.strip().endswith("// good"), LOG if arch.endswith("sm_80") else LOG.partition("'spills'")[0], 10)
    (tmp_path / "a.cu").write_text("// good\n")
    (tmp_path / "b.cu").write_text("// bad\n")
    assert tool.main([str(tmp_path / "a.cu"), "--arch", "sm_90"]) == 0
    assert "1 kernels of 1 files by NVRTC 0.0: no spills, no stack" in capsys.readouterr().out
    assert tool.main([str(tmp_path / "a.cu")]) == 1
    assert "stack 40, spills 16" in capsys.readouterr().out
    assert tool.main([str(tmp_path / "b.cu")]) == 1
    assert "b.cu for sm_80 does not compile" in capsys.readouterr().out
    compiler.compile = lambda *_: (True, "ptxas says it otherwise", 10)
    assert tool.main([str(tmp_path / "a.cu")]) == 1
    assert "a.cu for sm_80 has no kernel" in capsys.readouterr().out


def test_kernels_of_tensor_cores_are_compiled_for_more_devices(tool, compiler, capsys, tmp_path):
    """Where NVRTC knows them: that of CUDA 12.6 has no sm_120."""
    made = []
    compiler.compile = lambda self, name, text, arch, *_: made.append((name, arch.partition("=")[2])) or (True, LOG, 10)
    for name in ("mma_a.cu", "attention_mma.cu", "attention.cu"):
        (tmp_path / name).write_text("")
    tool.main([str(path) for path in tmp_path.glob("*.cu")])
    assert sorted(made) == [("attention.cu", "sm_80"), ("attention.cu", "sm_90"),
                            *((f"{name}.cu", arch) for name in ("attention_mma", "mma_a")
                              for arch in ("sm_80", "sm_89", "sm_90"))]


def test_equal_sources_are_compiled_once(tool, compiler, tmp_path):
    compilations = []
    compiler.compile = lambda self, name, *what: compilations.append(what) or (True, LOG, 10)
    for text in ("// first\n", "// second\n", "// first\n"):
        (tmp_path / "a.cu").write_text(text)
        assert tool.main([str(tmp_path / "a.cu"), "--cache", str(tmp_path)]) == 1
    assert len(compilations) == 4 == len(list(tmp_path.glob("nvrtc-*.json")))       # two sources for two devices
    compiler.version = "0.1"
    tool.main([str(tmp_path / "a.cu"), "--cache", str(tmp_path)])
    assert len(compilations) == 6


def test_without_nvrtc_it_says_what_to_install(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "find_nvrtc", lambda: None)
    assert tool.main([]) == 2
    assert "pip install nvidia-cuda-nvrtc" in capsys.readouterr().err


PLANTED = """
#define KERNEL(name) extern "C" __global__ void name
KERNEL(__launch_bounds__(1024, 2) spills)(const float* x, float* y, int n) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) y[threadIdx.x + i * n] = v[63 - i] * v[i ^ 21];
}
__device__ __noinline__ int inner(const int* x, int n, int k) {
    int v[16];
    for (int i = 0; i < 16; ++i) v[i] = x[i * n];
    return v[x[k] & 15];
}
KERNEL(calls)(const int* x, int* y, int n) { y[threadIdx.x] = inner(x, n, threadIdx.x) + inner(y, n, threadIdx.x + 1); }
KERNEL(good)(float* y) { y[threadIdx.x] = 1.0f; }
"""


@pytest.fixture
def with_nvrtc(tool):
    if tool.find_nvrtc() is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("under the sanitizers NVRTC does not find the library beside it")
    return tool


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_planted_spill_and_a_planted_stack_are_found(arch, with_nvrtc, tmp_path, capsys):
    (tmp_path / "planted.cu").write_text(PLANTED)
    assert with_nvrtc.main([str(tmp_path / "planted.cu"), "--arch", arch]) == 1
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert sorted(said) == ["calls", "spills"]
    assert "stack 0" not in said["calls"] and "spills 0" in said["calls"]
    assert "stack 0" not in said["spills"] and "spills 0" not in said["spills"]


def test_kernels_compile_for_gpus(with_nvrtc, capsys):
    assert with_nvrtc.main(["--syntax", "--arch", "sm_80"]) == 0, capsys.readouterr().out


def test_what_does_not_compile_is_found_without_machine_code(with_nvrtc, tmp_path, capsys):
    (tmp_path / "wrong.cu").write_text(PLANTED + "__device__ int f() { return undeclared; }")
    assert with_nvrtc.main(["--syntax", str(tmp_path / "wrong.cu")]) == 1
    assert '"undeclared" is undefined' in capsys.readouterr().out


NEWER = ["--arch", "sm_100", "--arch", "sm_120", "--overlap", str(KERNELS / "matvec_k.cu")]
"""The kernels with the fewest registers to spare, on devices whose compiler takes more of them."""


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["--arch", "sm_90", "--overlap"], NEWER],
                         ids=["alone", "that overlap", "on newer devices"])
def test_kernels_spill_no_registers_and_have_no_stack(with_nvrtc, capsys, options):
    assert with_nvrtc.main(["--cache", str(cache_folder()), *options]) == 0, capsys.readouterr().out


def entries_of(ptx: str) -> dict[str, list[str]]:
    """{kernel: its instructions}."""
    found = re.findall(r"^\.visible \.entry (\w+)\(.*?^\{(.*?)^\}", ptx, re.MULTILINE | re.DOTALL)
    return {name: [line.strip() for line in body.splitlines() if line.strip()] for name, body in found}


def breaches(lines: list[str]) -> list[str]:
    """The instructions of a kernel that may begin early which read or write global memory before the wait, or read it
    as if it were constant."""
    waits = [i for i, line in enumerate(lines) if line.startswith("griddepcontrol.wait")]
    if not waits:
        return ["no wait"]
    memory = re.compile(r"(@%?\w+ )?(ld|st|atom|red|ldu|tex|cp)\b(?!\.async\.wait)(?!\.(param|shared|local|const))")
    return [line for i, line in enumerate(lines) if memory.match(line) and (i < waits[0] or ".nc." in line)]


WITHOUT_A_WAIT = """
#define KERNEL(name) extern "C" __global__ void name
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
KERNEL(good)(const float* x, float* y) { WAIT; y[0] = x[threadIdx.x]; }
KERNEL(never)(const float* x, float* y) { y[0] = x[threadIdx.x]; }
KERNEL(late)(const float* x, float* y) { float v = x[threadIdx.x]; WAIT; y[0] = v; }
KERNEL(copies)(const float* x, float* y) {
    __shared__ __align__(16) float to[4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(x));
    asm volatile("cp.async.wait_all;" ::: "memory");
    WAIT;
    y[0] = to[0];
}
KERNEL(constant)(const float* __restrict__ x, float* __restrict__ y) { WAIT; y[0] = x[threadIdx.x]; }
"""


def test_loads_before_a_wait_are_found(with_nvrtc):
    found = entries_of(with_nvrtc.Nvrtc(with_nvrtc.find_nvrtc()).ptx("f.cu", WITHOUT_A_WAIT, "compute_90"))
    assert {name for name, lines in found.items() if breaches(lines)} == {"never", "late", "copies", "constant"}


@pytest.mark.soak
def test_compiled_kernels_wait_before_they_read_or_write(with_nvrtc):
    """What the compiler makes of common.cuh's await_inputs(), of all kernels."""
    nvrtc = with_nvrtc.Nvrtc(with_nvrtc.find_nvrtc())
    for file in sorted(with_nvrtc.KERNELS.glob("*.cu")):
        found = entries_of(nvrtc.ptx(file.name, with_nvrtc.source_of(file, overlap=True), "compute_90"))
        assert found
        for name, lines in found.items():
            assert not breaches(lines), (file.name, name, breaches(lines))
