"""CUDA backends without a GPU, for tests: over emulated devices, which need a C++ compiler."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cuda_emulator import EmulatedDevice, Simulator

import ggml_sched as gs
from ggml_sched.backends.cupy.device import Blas, DeviceError

HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[0]) is not None


def device(seed: int = 0, **options) -> EmulatedDevice:
    """A device whose work runs late, in an order that the seed decides; skips the test where there is no C++
    compiler."""
    if not HAS_COMPILER:
        pytest.skip("needs a C++ compiler (g++) for the kernels of the emulated CUDA device")
    return EmulatedDevice(seed, **options)


STAGING = 1 << 16
"""Small, so that tests wrap around the ring."""


def new(on: EmulatedDevice | None = None, name: str = "CUDA0", kind=gs.CupyBackend, **options) -> gs.CupyBackend:
    return kind(on or device(), name=name, **{"staging": STAGING, **options})


@contextmanager
def backend(on: EmulatedDevice | None = None, *, seed: int = 0, **options) -> Iterator[gs.CupyBackend]:
    with new(on or device(seed), **options) as made:
        yield made


def devices(n: int, seed: int = 0, peers: bool = True, **options) -> list[EmulatedDevice]:
    """Devices of one simulator."""
    simulator, made = Simulator(seed), []
    for _ in range(n):
        made.append(device(simulator=simulator, peers=made if peers else (), **options))
    return made


@contextmanager
def pair(seed: int = 0, peers: bool = True, **options) -> Iterator[tuple[gs.CupyBackend, gs.CupyBackend]]:
    """Backends on two devices of one simulator."""
    first, second = devices(2, seed, peers)
    with new(first, "CUDA0", **options) as a, new(second, "CUDA1", **options) as b:
        yield a, b


def illegal_address(*args: object) -> None:
    """A method of the device, in tests, that fails as kernels do which access memory that is not there."""
    raise DeviceError("an illegal address")


def waits(*backends: gs.CupyBackend) -> int:
    """How often the host has waited for these devices, in sum."""
    return sum(backend.device.counts.waits for backend in backends)


# -- the device's matrix library ---------------------------------------------------------------


def array_at(address: int, kind: type, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Elements at an address, strides in elements."""
    size = np.dtype(kind).itemsize
    n = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    flat = np.frombuffer((ctypes.c_uint8 * (n * size)).from_address(address), kind)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(size * stride for stride in strides))


def gemm(m, n, k, a, lda, b, ldb, c, ldc, batch, stride_a, stride_b, stride_c) -> None:
    """Blas.gemm in NumPy, for the arguments that cuBLAS accepts."""
    assert lda >= k and ldb >= k and ldc >= m
    left = array_at(a, np.float16, (batch, m, k), (stride_a, lda, 1)).astype(np.float32)
    right = array_at(b, np.float16, (batch, n, k), (stride_b, ldb, 1)).astype(np.float32)
    array_at(c, np.float32, (batch, n, m), (stride_c, ldc, 1))[...] = right @ left.swapaxes(1, 2)


class Products(Blas):
    """The matrix library of an emulated device, in NumPy: queued like kernels, refused during capture."""

    def __init__(self) -> None:
        self.n_calls = 0

    def gemm(self, stream, m, n, k, a, lda, b, ldb, c, ldc, batch=1, stride_a=0, stride_b=0, stride_c=0) -> None:
        if stream.is_capturing:
            raise DeviceError("a product of the library while the stream is captured")
        self.n_calls += 1
        stream.push(lambda: gemm(m, n, k, a, lda, b, ldb, c, ldc, batch, stride_a, stride_b, stride_c))
