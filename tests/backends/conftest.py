"""Ops run with the compiled kernels, and with those in NumPy that they are compared with."""

from __future__ import annotations

import pytest
import support


@pytest.fixture(params=["compiled", "numpy"])
def kernels(request, monkeypatch) -> str:
    """Whose kernels `support.compute` runs."""
    monkeypatch.setattr(support, "KERNELS", request.param)
    return request.param
