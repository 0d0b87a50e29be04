"""Fixtures of the tests of the CUDA backend: backends that a test needs only one of."""

from collections.abc import Iterator

import cupy_devices
import pytest

import ggml_sched as gs


@pytest.fixture
def cuda() -> Iterator[gs.CupyBackend]:
    with cupy_devices.backend() as backend:
        yield backend


@pytest.fixture
def cpu() -> Iterator[gs.CpuBackend]:
    with gs.CpuBackend(1) as backend:
        yield backend


@pytest.fixture
def sched(cuda) -> Iterator[gs.Scheduler]:
    """Of the CUDA backend alone."""
    with gs.Scheduler([cuda]) as scheduler:
        yield scheduler
