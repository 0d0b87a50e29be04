"""Conversion between NumPy arrays and the bytes of tensors, for `Tensor.set` and `Tensor.numpy`.

The NumPy shape of a tensor is `ne` reversed, without leading ones.  A tensor with gaps is read and written as the whole
range of bytes from its first to its last element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ggml_sched._graph import Tensor, Type, label, no_address, wait_for_queued
from ggml_sched.errors import BackendError, HazardError, OutOfMemory, PlacementError
from ggml_sched.graph import _dlpack as dlpack
from ggml_sched.graph import quants

if TYPE_CHECKING:
    from ggml_sched.backend import Backend

Span: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[np.uint8]]"
"""The bytes of a tensor from its first to its last element, gaps included."""

__all__ = ["array_over", "endless", "read", "write"]

MAX_SHARED = 1 << 36
"""The most elements of a tensor whose elements share bytes (strides of 0): more would take minutes or longer."""

DTYPES: dict[Type, np.dtype[Any]] = {
    Type.F32: np.dtype("<f4"),
    Type.F16: np.dtype("<f2"),
    Type.F64: np.dtype("<f8"),
    Type.I8: np.dtype("i1"),
    Type.I16: np.dtype("<i2"),
    Type.I32: np.dtype("<i4"),
    Type.I64: np.dtype("<i8"),
    Type.BF16: np.dtype("<u2"),
}
"""The NumPy dtype of each type without blocks.  NumPy has no bf16: such elements are uint16 with the same bits."""

INTEGERS = frozenset({Type.I8, Type.I16, Type.I32, Type.I64})


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """`ne` reversed, without leading ones; at least one dimension."""
    ne = list(tensor.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return tuple(reversed(ne))


def endless(tensor: Tensor) -> str | None:
    """The error text for a tensor with more than MAX_SHARED elements that share bytes (strides of 0 allow any number of
    elements in few bytes); None for any other tensor."""
    count, kind = tensor.n_elements, tensor.type
    if count <= MAX_SHARED or count // kind.block_size * kind.type_size <= tensor.nbytes:
        return None
    return (f"{label(tensor)} has {count} elements in {tensor.nbytes} bytes; elements that share bytes are "
            f"worked on up to {MAX_SHARED}")


def array_over(tensor: Tensor, memory: Span, offset: int = 0) -> np.ndarray:
    """The tensor as an array [ne3, ne2, ne1, ne0] over `memory`, in which the tensor starts at byte `offset`.

    Of a quantised type it has uint8 blocks: [ne3, ne2, ne1, ne0 / block_size, type_size].
    """
    kind = tensor.type
    ne, nb = tensor.ne[::-1], tensor.nb[::-1]
    if kind.is_quantized:
        shape = (*ne[:3], ne[3] // kind.block_size, kind.type_size)
        return np.ndarray(shape, np.uint8, memory, offset, (*nb, 1))
    return np.ndarray(ne, DTYPES[kind], memory, offset, nb)


def read(tensor: Tensor, raw_bf16: bool = False) -> np.ndarray:
    """`Tensor.numpy`: the tensor's data as a new array.  With `raw_bf16`, bf16 elements are uint16 with the same
    bits."""
    _require(tensor)
    _check_ends(tensor)
    try:
        span = _span(tensor)
        values = array_over(tensor, span) if tensor.nbytes else array_over(tensor, bytearray(16))
        if tensor.type == Type.BF16 and not raw_bf16:
            values = quants.bf16_to_f32(values)
        elif tensor.type.is_quantized:
            values = quants.dequantize(values, tensor.type)
        return np.array(values, copy=True).reshape(shape_of(tensor))
    except MemoryError as error:
        message = f"{tensor!r}: the host gives no memory for an array of {tensor.n_elements} elements"
        raise OutOfMemory(message) from error


def write(tensor: Tensor, array: Any) -> None:
    """`Tensor.set`: give the tensor the data of an array."""
    backend = _backend(tensor)
    _check_ends(tensor)
    kind = tensor.type
    if type(array) is np.ndarray and array.dtype is DTYPES.get(kind) and _fits(tensor, array):
        given: Any = np.ascontiguousarray(array)    # Any: NumPy declares an array as a buffer only from Python 3.12 on
        _put(tensor, backend, memoryview(given).cast("B"))      # nothing to convert
        return
    values = _as_array(tensor, array)
    raw = kind.is_quantized and values.dtype == np.uint8
    if raw:
        if values.size != tensor.n_elements // kind.block_size * kind.type_size:
            raise ValueError(f"{tensor!r}: {values.size} bytes of blocks for a tensor of {tensor.nbytes}")
    elif _squeezed(values.shape) != _squeezed(shape_of(tensor)) and values.shape != (tensor.n_elements,):
        raise ValueError(f"{tensor!r}: an array of shape {values.shape} for a tensor of shape {shape_of(tensor)}")
    if tensor.n_elements == 0:
        return
    if raw:
        values = values.reshape((*tensor.ne[:0:-1], tensor.ne[0] // kind.block_size, kind.type_size))
    elif kind.is_quantized:
        values = quants.quantize(_numbers(tensor, values, DTYPES[Type.F32]).reshape(tensor.ne[::-1]), kind)
    elif kind == Type.BF16:
        if values.dtype != np.uint16:
            values = quants.f32_to_bf16(_numbers(tensor, values, DTYPES[Type.F32]))
        values = values.reshape(tensor.ne[::-1])
    else:
        values = _numbers(tensor, values, DTYPES[kind]).reshape(tensor.ne[::-1])
    span: Span
    if tensor.is_contiguous:
        span = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    else:
        # The bytes in the gaps between elements belong to other tensors: read them, and write them back unchanged.
        span = _span(tensor, zeros=True)
        array_over(tensor, span)[...] = values
    _put(tensor, backend, span)


def _fits(tensor: Tensor, array: np.ndarray) -> bool:
    """Whether an array has the shape of a contiguous, non-empty tensor, or is flat with its number of elements."""
    n = array.size
    return (0 < n == tensor.n_elements and tensor.is_contiguous
            and (array.ndim == 1 or array.ndim > 1 and _squeezed(array.shape) == _squeezed(shape_of(tensor))))


def _put(tensor: Tensor, backend: Backend, span: Span) -> None:
    """Give a tensor its bytes: those of a staged leaf (`_is_staged`) are kept on the host until a compute loads them,
    those of other tensors are written to their memory."""
    if _is_staged(tensor):
        _stash(tensor, span)
        if tensor.lease is None or not tensor.lease.through:
            return
    wait_for_queued(tensor)
    backend.set_tensor(tensor, span)


def _as_array(tensor: Tensor, given: Any) -> np.ndarray:
    """`given` as an array: see `Tensor.set` for what it may be.  bf16 elements become uint16 with the same bits for a
    tensor of that type, float32 for others.

    For a tensor of integers, Python integers that no integer dtype holds become an array of Python objects, so that
    `_numbers` can report them: NumPy would make rounded floats of them.
    """
    is_bf16 = False
    if hasattr(given, "__cuda_array_interface__"):
        given = _from_cuda(tensor, given)
    elif not isinstance(given, np.ndarray) and _is_host_dlpack(given):
        given = dlpack.take(given)
        is_bf16 = given.kind == "bf"
    values = np.asarray(given)
    if values.dtype.isbuiltin == 2:         # registered by a library, such as ml_dtypes
        is_bf16 = values.dtype.name == "bfloat16"
        if is_bf16:
            values = values.view(np.uint16)
        else:
            values = values.astype(np.int8 if values.dtype.name.startswith(("int", "uint")) else np.float32)
    if is_bf16 and tensor.type != Type.BF16:
        values = quants.bf16_to_f32(values)
    if tensor.type in INTEGERS and values.dtype == np.float64 and not hasattr(given, "dtype"):
        objects = np.asarray(given, object)
        if all(isinstance(value, int) for value in objects.flat):
            return objects
    return values


def _is_host_dlpack(given: Any) -> bool:
    """Whether an object gives its data by DLPack from memory that the CPU reads."""
    return hasattr(given, "__dlpack_device__") and given.__dlpack_device__()[0] in (dlpack.HOST[0], dlpack.PINNED_HOST)


def _from_cuda(tensor: Tensor, given: Any) -> np.ndarray:
    """A copy on the host of an array in CUDA memory."""
    try:
        import cupy
    except ImportError:
        raise TypeError(f"{tensor!r}: a {type(given).__name__} in CUDA memory is copied by CuPy, which is not "
                        "installed: pip install 'ggml-sched[cuda12]', or copy it to the host first") from None
    copied: np.ndarray = cupy.asnumpy(cupy.asarray(given))
    return copied


def _numbers(tensor: Tensor, values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The values as `dtype`: floats rounded, integers exact.

    Raises TypeError for values that are not real numbers (not integers, for an integer dtype), ValueError for integers
    outside the range.
    """
    ints = values.dtype.kind == "O" and all(isinstance(value, int) for value in values.flat)
    if not ints and not np.can_cast(values.dtype, dtype, "same_kind"):
        raise TypeError(f"{tensor!r}: cannot take {values.dtype} values as {tensor.type}")
    if dtype.kind == "i" and values.size and not np.can_cast(values.dtype, dtype):
        limits = np.iinfo(dtype)
        for value in (values.min(), values.max()):
            if not limits.min <= int(value) <= limits.max:
                raise ValueError(f"{tensor!r}: {value} is not in {limits.min} .. {limits.max}")
    try:
        with np.errstate(over="ignore"):        # overflow gives infinity, as in IEEE 754
            exact = values.astype(np.float64) if ints and dtype.kind == "f" else values
            return exact.astype(dtype, copy=False)
    except OverflowError as error:
        raise ValueError(f"{tensor!r}: {max(values.flat, key=abs)} is beyond all floats") from error


def _check_ends(tensor: Tensor) -> None:
    wrong = endless(tensor)
    if wrong is not None:
        raise BackendError(wrong)


def _span(tensor: Tensor, zeros: bool = False) -> bytearray:
    """A copy of the bytes of the tensor, gaps included.  For a leaf that was never set, raises HazardError, or returns
    zeros if `zeros`."""
    backend = _backend(tensor)
    if _waits_on_host(tensor):
        held = tensor.root.stash
        if held is None and tensor.nbytes and not zeros:
            root = tensor.root
            raise HazardError(f"{root!r} was never set: t.set(array) gives it data, a compute with zero=True zeros")
        return bytearray((held or bytes(tensor.root.nbytes))[tensor.view_offs : tensor.view_offs + tensor.nbytes])
    wait_for_queued(tensor)
    span = bytearray(tensor.nbytes)
    backend.get_tensor(tensor, span)
    return span


def _require(tensor: Tensor) -> None:
    """Wait for queued computes of the tensor's graph.  HazardError if the tensor has no valid data afterwards, for
    example because its memory in the arena was used for another tensor."""
    if not _waits_on_host(tensor):
        wait_for_queued(tensor)
    if tensor.lease is not None and tensor.lease.guard is not None:
        tensor.lease.guard(tensor)


def _waits_on_host(tensor: Tensor) -> bool:
    """Whether the latest data of a tensor is on the host: set by the caller, and not overwritten by a node since."""
    return _is_staged(tensor) and not tensor.root.overwritten


def _is_staged(tensor: Tensor) -> bool:
    """Whether data that the caller sets stays on the host until a compute loads it.

    True for leafs that are not resident, and for views of them; False for a node that writes to a leaf's memory.
    """
    lease = tensor.lease
    if lease is None or not lease.stages:
        return False
    while not tensor.computes and tensor.src:
        tensor = tensor.src[0]
    return not tensor.computes and tensor.root.op == "NONE"


def _stash(tensor: Tensor, span: Span) -> None:
    """Keep data for a leaf, or for a view of one, on the host until a compute loads it: until then other tensors may
    use the leaf's memory in the arena."""
    root = tensor.root
    if tensor is root:
        stash = bytes(span)
    else:
        if root.overwritten:
            _require(root)
        held = _span(root, zeros=True)
        held[tensor.view_offs : tensor.view_offs + len(span)] = bytes(span)
        stash = bytes(held)
    root.touch()
    root.overwritten, root.stash = False, stash


def _backend(tensor: Tensor) -> Backend:
    backend = tensor.backend
    if backend is None:
        raise PlacementError(no_address(tensor))
    return backend


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape
