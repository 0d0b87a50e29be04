"""Functions of cuBLAS: handles, and the two products that the package calls, in NumPy."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_longlong
from ctypes import c_void_p as pointer

import cupy_devices

from cuda_stub import world as codes
from cuda_stub.calls import Calls, store
from cuda_stub.world import CudaError, World

__all__ = ["CUBLAS"]

CUBLAS = Calls()
BAD_VALUE = 7                               # CUBLAS_STATUS_INVALID_VALUE
TRANSPOSED, PLAIN = 1, 0                    # cublasOperation_t
HALF, SINGLE, IN_SINGLE = 2, 0, 68          # CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F


@CUBLAS(pointer)
def cublasCreate_v2(world: World, result: int) -> None:
    world.refuse_in_capture("cublasCreate")
    world.enter()
    handle = world.handle()
    world.blas[handle] = 0
    store(result, handle)


@CUBLAS(pointer)
def cublasDestroy_v2(world: World, handle: int) -> None:
    if world.blas.pop(handle, None) is None:
        raise CudaError(BAD_VALUE, "no handle")


@CUBLAS(pointer, pointer)
def cublasSetStream_v2(world: World, handle: int, stream: int) -> None:
    world.stream(stream)
    world.blas[handle] = stream


def _number(address: int) -> float:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0]


@CUBLAS(pointer, *[c_int] * 5, pointer, pointer, c_int, c_int, c_longlong, pointer, c_int, c_int, c_longlong, pointer,
        pointer, c_int, c_int, c_longlong, c_int, c_int, c_int)
def cublasGemmStridedBatchedEx(
    world: World, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int, lda: int,
    stride_a: int, b: int, type_b: int, ldb: int, stride_b: int, beta: int, c: int, type_c: int, ldc: int,
    stride_c: int, batch: int, compute: int, algorithm: int,
) -> None:
    if (op_a, op_b, type_a, type_b, type_c, compute) != (TRANSPOSED, PLAIN, HALF, HALF, SINGLE, IN_SINGLE):
        raise CudaError(BAD_VALUE, "operations or types that the package does not use")
    if (_number(alpha), _number(beta)) != (1.0, 0.0) or lda < k or ldb < k or ldc < m:
        raise CudaError(BAD_VALUE, "factors, or lengths of rows")
    last = batch - 1
    for start, size in ((a, 2 * (last * stride_a + (m - 1) * lda + k)), (b, 2 * (last * stride_b + (n - 1) * ldb + k)),
                        (c, 4 * (last * stride_c + (n - 1) * ldc + m))):
        if world.kind_of(start, size) != "device":
            raise CudaError(codes.INVALID_VALUE, "a product of host memory")
    if world.stream(world.blas[handle]).device != world.device:
        raise CudaError(codes.BAD_HANDLE, "a stream of another device")
    world.queue(world.blas[handle], "product", lambda: cupy_devices.gemm(
        m, n, k, a, lda, b, ldb, c, ldc, batch, stride_a, stride_b, stride_c))


@CUBLAS(pointer, *[c_int] * 5, pointer, pointer, c_int, c_int, pointer, c_int, c_int, pointer, pointer, c_int, c_int,
        c_int, c_int)
def cublasGemmEx(
    world: World, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int, lda: int,
    b: int, type_b: int, ldb: int, beta: int, c: int, type_c: int, ldc: int, compute: int, algorithm: int,
) -> None:
    cublasGemmStridedBatchedEx(world, handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c,
                               type_c, ldc, 0, 1, compute, algorithm)
