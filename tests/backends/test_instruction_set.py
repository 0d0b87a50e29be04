"""Which instruction set's kernels run: the best one that processor and system have, unless the environment caps it."""

import platform
from pathlib import Path

import pytest

from ggml_sched.backends.cpu import _kernels

FLAGS = Path("/proc/cpuinfo")
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}


@pytest.fixture
def best(monkeypatch) -> str:
    """The best instruction set, by the flags that Linux lists: those whose registers it saves, too."""
    if platform.machine() != "x86_64" or not FLAGS.exists():
        pytest.skip("the flags of an x86-64 processor are read from Linux")
    monkeypatch.delenv("GGML_SCHED_ISA", raising=False)
    flags = set(next(line for line in FLAGS.read_text().splitlines() if line.startswith("flags")).split())
    return "avx512" if flags >= AVX512 else "avx2" if flags >= AVX2 else "portable"


def test_the_best_of_processor_and_system_is_chosen(best):
    assert _kernels.isa() == best


@pytest.mark.parametrize("cap", ["portable", "avx2", "avx512"])
def test_the_environment_caps_the_choice(best, cap, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_ISA", cap)
    ranks = ["portable", "avx2", "avx512"]
    assert _kernels.isa() == min(cap, best, key=ranks.index)


def test_an_unknown_cap_is_none(best, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_ISA", "sse9")
    assert _kernels.isa() == best
