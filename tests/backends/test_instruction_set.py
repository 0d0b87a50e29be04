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
AVXVNNI = AVX2 | {"avx_vnni"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}


@pytest.fixture
def sets(monkeypatch) -> list[str]:
    """The processor's instruction sets, the slowest first, by what Linux says of registers that it saves, too."""
    if platform.machine() not in ("x86_64", "aarch64") or not CPUINFO.exists():
        pytest.skip("the flags of an x86-64 or aarch64 processor are read from Linux")
    monkeypatch.delenv("GGML_SCHED_ISA", raising=False)
    if platform.machine() == "aarch64":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return [*ISAS[:2], *["dotprod"] * bool(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)]
    flags = set(next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")).split())
    needed = {"portable": set(), "avx2": AVX2, "avxvnni": AVXVNNI, "avx512": AVX512}
    return [name for name in ISAS if flags >= needed[name]]


def test_the_best_of_processor_and_system_is_chosen(sets):
    assert _kernels.isa() == sets[-1]


@pytest.mark.parametrize("cap", ISAS)
def test_the_environment_caps_the_choice(sets, cap, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_ISA", cap)
    assert _kernels.isa() == [name for name in sets if ISAS.index(name) <= ISAS.index(cap)][-1]


@pytest.mark.parametrize("cap", ["sse9", "avx2" if "neon" in ISAS else "neon"])
def test_an_unknown_cap_is_none(sets, cap, monkeypatch):
    monkeypatch.setenv("GGML_SCHED_ISA", cap)
    assert _kernels.isa() == sets[-1]
