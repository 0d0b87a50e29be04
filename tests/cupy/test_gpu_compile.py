"""bench/gpu_compile.py: which programs a model's first token needs, compiled once, and read from the folder then."""

import threading
import time

import gpu_compile
import pytest

from ggml_sched.backends.cupy.real import Program

WORK = 0.02
"""CPU seconds that a program takes to compile here."""


class Nvrtc:
    """NVRTC as CuPy binds it; machine code is the source's first bytes."""

    class NVRTCError(Exception):
        pass

    def __init__(self) -> None:
        self.names: list[str] = []
        self.options: set[tuple[str, ...]] = set()
        self.threads: set[int] = set()

    def getVersion(self) -> tuple[int, int]:
        return 13, 2

    def createProgram(self, text: str, name: str, headers: tuple, includes: tuple) -> str:
        self.names.append(name)
        return text

    def compileProgram(self, program: str, options: tuple[str, ...]) -> None:
        self.options.add(options)
        self.threads.add(threading.get_ident())
        end = time.thread_time() + WORK
        while time.thread_time() < end:
            pass

    def getCUBIN(self, program: str) -> bytes:
        return program[:1000].encode()

    def destroyProgram(self, program: str) -> None:
        pass


@pytest.fixture
def nvrtc(monkeypatch) -> Nvrtc:
    made = Nvrtc()
    monkeypatch.setattr(gpu_compile, "bindings", lambda: made)
    monkeypatch.setattr(gpu_compile.os, "cpu_count", lambda: 2)
    return made


def test_kernels_are_those_of_a_token_a_prompt_and_the_weights():
    found = gpu_compile.kernels_of("llama-2-7b", 64)
    assert {"repack.pack", "matvec_plain.packed_q4_0_1", "mma_plain.q4_0_64", "attention_mma.tiles_128_64",
            "rope.turn_heads"} <= {*found}
    assert len(found) == len({*found})


def test_programs_are_compiled_once_in_threads_and_read_then(nvrtc, tmp_path):
    kernels = ["matvec_plain.packed_q4_0_1", "matvec_plain.packed_q4_0_8", "matvec_plain.q8_0_1", "rope.rope"]
    given = nvrtc, kernels, "sm_90", False, str(tmp_path)
    cold, wall = gpu_compile.compile_all(*given)
    assert [one.program for one in cold] == [Program("matvec_plain", "q4_0", False),
                                             Program("matvec_plain", "q8_0", False), Program("rope", "", False)]
    assert [one.program.name for one in cold] == ["matvec_plain-q4_0", "matvec_plain-q8_0", "rope"]
    assert all(one.seconds >= WORK and one.size == 1000 for one in cold) and wall >= WORK
    assert len(nvrtc.names) == 3 and len(nvrtc.threads) == 2 and len(list(tmp_path.iterdir())) == 3
    assert nvrtc.options == {("--gpu-architecture=sm_90", "--std=c++17")}
    warm, _ = gpu_compile.compile_all(*given)
    assert len(nvrtc.names) == 3 and [one.size for one in warm] == [1000] * 3
    gpu_compile.compile_all(nvrtc, kernels, "sm_90", True, str(tmp_path))
    assert len(nvrtc.names) == 6                # launches that overlap have programs of their own


def test_the_page_says_what_is_compiled(nvrtc, capsys):
    assert gpu_compile.main(["llama-2-7b", "--arch", "sm_80", "--tokens", "16"]) == 0
    page = capsys.readouterr().out
    n = len(nvrtc.names)
    assert page.startswith(f"llama-2-7b for sm_80, a token and a prompt of 16, by NVRTC 13.2: {n} programs, ")
    assert page.count("\n| ") == n + 1 and "| matvec_plain-q4_0 | " in page and "the target is 5 s" in page


def test_without_nvrtc_it_says_what_to_install(monkeypatch, capsys):
    def none():
        raise ImportError("No module named 'cupy_backends'")

    monkeypatch.setattr(gpu_compile, "bindings", none)
    assert gpu_compile.main([]) == 1
    assert "pip install cupy-cuda13x nvidia-cuda-nvrtc" in capsys.readouterr().err
