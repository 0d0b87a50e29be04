"""Runs op tests with the oracle in NumPy, and with the compiled kernels of each instruction set of this machine."""

import op_results
import pytest
from instruction_sets import ISAS

from ggml_sched.backends.cpu import _kernels


def use_isa(name: str, monkeypatch) -> str:
    """Cap the instruction set of plans that are made in the test."""
    monkeypatch.delenv("GGML_SCHED_ISA", raising=False)
    if ISAS.index(name) > ISAS.index(_kernels.isa()):
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv("GGML_SCHED_ISA", name)
    if name == "avxvnni" and _kernels.isa() == "avx2":
        pytest.skip("this processor has AVX-512 without AVX-VNNI")
    assert _kernels.isa() == name
    return name


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch) -> str:
    """Each instruction set of this machine, in turn."""
    return use_isa(request.param, monkeypatch)


@pytest.fixture(params=["numpy", *ISAS])
def kernels(request, monkeypatch) -> str:
    """The kernels that `op_results.compute` runs: the oracle, or those of an instruction set."""
    if request.param != "numpy":
        use_isa(request.param, monkeypatch)
    monkeypatch.setattr(op_results, "KERNELS", "numpy" if request.param == "numpy" else "compiled")
    return request.param
