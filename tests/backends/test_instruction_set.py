"""Which instruction set's kernels run: the best one that processor and system have, unless the environment caps it."""

import ctypes
import platform
from pathlib import Path

import pytest
from instruction_sets import ISAS

from ggml_sched.backends.cpu import _kernels

CPUINFO = Path("/proc/cpuinfo")
AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}


@pytest.fixture
def best(monkeypatch) -> str:
    """The best instruction set, by what Linux says of the processor: of x86 the flags whose registers it saves, too."""
    if platform.machine() not in ("x86_64", "aarch64") or not CPUINFO.exists():
        pytest.skip("the flags of an x86-64 or aarch64 processor are read from Linux")
    monkeypatch.delenv("GGML_SCHED_ISA", raising=False)
    if platform.machine() == "aarch64":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return "dotprod" if getauxval(AT_HWCAP) & HWCAP_ASIMDDP else "neon"
    flags = set(next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")).split())
    return "avx512" if flags >= AVX512 else "avx2" if flags >= AVX2 else "portable"


def test_the_best_of_processor_and_system_is_chosen(best):
    assert _kernels.isa() == best


@pytest.mark.parametrize("cap", ISAS)
def test_the_environment_caps_the_choice(best, cap, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_ISA", cap)
    assert _kernels.isa() == min(cap, best, key=ISAS.index)


@pytest.mark.parametrize("cap", ["sse9", "avx2" if "neon" in ISAS else "neon"])
def test_an_unknown_cap_is_none(best, cap, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_ISA", cap)
    assert _kernels.isa() == best
