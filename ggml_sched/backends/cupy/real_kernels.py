"""Kernels and matrix products of a GPU through CuPy 14: NVRTC, cuLaunchKernel, cuBLAS.  Not seen on a GPU yet.

Includes are inserted into a source before it is compiled: CuPy's cache on disk goes by the text alone, and must notice
a changed include.  Launches call the driver itself, because CuPy's own would pack every argument again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggml_sched.backends.cupy.device import (
    Blas,
    DeviceError,
    DeviceOutOfMemory,
    Function,
    KernelArguments,
    Stream,
    block_of,
)
from ggml_sched.backends.cupy.source import kernel_source

__all__ = ["CupyBlas", "CupyFunction", "compiled"]

OPTIONS = ("--std=c++17",)
PLAIN_SHARED = 48 << 10
"""The most bytes of dynamic shared memory for which no attribute of the kernel has to be set."""


def compiled(device, name: str):
    """CuPy's module of kernels/<name>.cu, which NVRTC compiles for the device when a kernel is looked up."""
    try:
        text = kernel_source(name)
    except OSError as error:
        raise DeviceError(f"no kernels {name}: {error}") from None
    return device.cupy.RawModule(code=text, options=OPTIONS)


class CupyFunction(Function):
    def __init__(self, device, name: str, kernel) -> None:
        self.name = name
        self._device = device
        self._kernel = kernel
        self._ptr = kernel.ptr
        self._launch = device.driver.launchKernel
        self._shared = PLAIN_SHARED

    def launch(
        self, grid: Sequence[int], block: Sequence[int], packed: KernelArguments, shared: int, stream: Stream
    ) -> None:
        try:
            with self._device.entered:
                if shared > self._shared:
                    self._device.driver.funcSetAttribute(
                        self._ptr, self._device.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                    self._shared = shared
                self._launch(self._ptr, *block_of(grid, self.name), *block_of(block, self.name), shared, stream.ptr,
                             packed.address, 0)
        except DeviceOutOfMemory:
            raise
        except DeviceError as error:
            raise DeviceError(f"{self.name}, grid {tuple(grid)}, block {tuple(block)}, {shared} bytes of shared "
                              f"memory: {error}") from error


class CupyBlas(Blas):
    """cuBLAS, by a handle of its own.

    CuPy's bindings set the stream of a handle to the thread's current stream in every call.  So the stream that a
    product belongs to is made the current one for the call.
    """

    def __init__(self, device, cublas) -> None:
        self._device = device
        self._cublas = cublas
        self._factors = np.array([1, 0], np.float32)        # alpha and beta, on the host
        device.errors = (*device.errors, cublas.CUBLASError)
        self._handle = cublas.create()

    def gemm(
        self, stream: Stream, m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int,
        batch: int = 1, stride_a: int = 0, stride_b: int = 0, stride_c: int = 0,
    ) -> None:
        if stream.is_capturing:
            raise DeviceError("cuBLAS while the stream is captured")
        lib, runtime, alpha = self._cublas, self._device.runtime, self._factors.ctypes.data
        half, single, beta = runtime.CUDA_R_16F, runtime.CUDA_R_32F, alpha + 4
        with self._device.entered, stream.made:
            # cuBLAS stores matrices column by column: our rows are its columns, hence the transposed first operand.
            if batch == 1:
                lib.gemmEx(self._handle, lib.CUBLAS_OP_T, lib.CUBLAS_OP_N, m, n, k, alpha, a, half, lda, b, half, ldb,
                           beta, c, single, ldc, lib.CUBLAS_COMPUTE_32F, lib.CUBLAS_GEMM_DEFAULT)
            else:
                lib.gemmStridedBatchedEx(
                    self._handle, lib.CUBLAS_OP_T, lib.CUBLAS_OP_N, m, n, k, alpha, a, half, lda, stride_a, b, half,
                    ldb, stride_b, beta, c, single, ldc, stride_c, batch, lib.CUBLAS_COMPUTE_32F,
                    lib.CUBLAS_GEMM_DEFAULT)

    def close(self) -> None:
        with self._device.entered:
            self._cublas.destroy(self._handle)
