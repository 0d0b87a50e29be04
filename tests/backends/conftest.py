"""Ops run with the compiled kernels, and with those in NumPy that they are compared with."""

from __future__ import annotations

import op_results
import pytest

from ggml_sched.backends.cpu import _kernels

ISAS = ("portable", "avx2", "avx512")


@pytest.fixture(params=["compiled", "numpy"])
def kernels(request, monkeypatch) -> str:
    """Whose kernels `op_results.compute` runs."""
    monkeypatch.setattr(op_results, "KERNELS", request.param)
    return request.param


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch) -> str:
    """Plans made in the test use these instructions, each set that this machine has."""
    monkeypatch.delenv("GGML_SCHED_ISA", raising=False)
    if ISAS.index(request.param) > ISAS.index(_kernels.isa()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv("GGML_SCHED_ISA", request.param)
    assert _kernels.isa() == request.param
    return request.param
