"""CUDA backends without a GPU, for tests: over fake devices, which need a C++ compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy.fake import FakeDevice, FakeWorld

HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[0]) is not None


def device(seed: int = 0, **options) -> FakeDevice:
    """A device whose work runs late, in an order that the seed picks; skips the test where nothing compiles it."""
    if not HAS_COMPILER:
        pytest.skip("needs a C++ compiler (g++) for the kernels of the fake CUDA device")
    return FakeDevice(seed, **options)


STAGING = 1 << 16
"""So little that tests come around the ring."""


def new(on: FakeDevice | None = None, name: str = "CUDA0", kind=gs.CupyBackend, **options) -> gs.CupyBackend:
    return kind(on or device(), name=name, **{"staging": STAGING, **options})


@contextmanager
def backend(on: FakeDevice | None = None, *, seed: int = 0, **options) -> Iterator[gs.CupyBackend]:
    with new(on or device(seed), **options) as made:
        yield made


def devices(n: int, seed: int = 0, peers: bool = True, **options) -> list[FakeDevice]:
    """Devices of one world."""
    world, made = FakeWorld(seed), []
    for _ in range(n):
        made.append(device(world=world, peers=made if peers else (), **options))
    return made


@contextmanager
def pair(seed: int = 0, peers: bool = True, **options) -> Iterator[tuple[gs.CupyBackend, gs.CupyBackend]]:
    """Backends on two devices of one world."""
    first, second = devices(2, seed, peers)
    with new(first, "CUDA0", **options) as a, new(second, "CUDA1", **options) as b:
        yield a, b


def waits(*backends: gs.CupyBackend) -> int:
    """How often the host has waited for these."""
    return sum(backend.device.counts.waits for backend in backends)
