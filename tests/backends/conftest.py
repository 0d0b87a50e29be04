"""Runs op tests with the compiled kernels and with the oracle in NumPy."""

from __future__ import annotations

import op_results
import pytest

from ggml_sched.backends.cpu import _kernels

ISAS = ("portable", "avx2", "avx512")


@pytest.fixture(params=["compiled", "numpy"])
def kernels(request, monkeypatch) -> str:
    """The kernels that `op_results.compute` runs."""
    monkeypatch.setattr(op_results, "KERNELS", request.param)
    return request.param


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch) -> str:
    """Each instruction set of this machine, in turn: plans made in the test use it."""
    monkeypatch.delenv("GGML_SCHED_ISA", raising=False)
    if ISAS.index(request.param) > ISAS.index(_kernels.isa()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv("GGML_SCHED_ISA", request.param)
    assert _kernels.isa() == request.param
    return request.param
