"""Tensors as arrays: over their memory without a copy (the buffer protocol, `__array__`, DLPack), and for notebooks.

Views are read-only: `Tensor.set` writes, so that copies on other backends do not become stale.  A tensor is viewed
where it lies if its address is permanent (a weight, a KV cache) and its buffer is host memory; the array keeps the
memory alive, even when the buffer is closed.  Later computes use the memory of leased tensors again, so their data is
copied, or refused where no copy is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ggml_sched._graph import BufferBase, Tensor, Type, no_address, wait_for_queued
from ggml_sched.errors import BackendError, Error, HazardError, PlacementError
from ggml_sched.graph import _dlpack as dlpack
from ggml_sched.graph import hostdata
from ggml_sched.graph.hostdata import shape_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["as_array", "as_buffer", "as_capsule", "as_html", "dtype_of", "shape_of"]

SHOWN = 1 << 20
"""The most elements that `as_html` reads: all of them are copied to show a few."""


def as_buffer(tensor: Tensor) -> np.ndarray:
    """A read-only array over a tensor's memory, for the buffer protocol; see `Tensor`.

    Raises BufferError for bf16 and quantised types, for which the buffer protocol has no format, and what `_view`
    raises.
    """
    _check_format(tensor, BufferError)
    return _view(tensor)


def as_array(tensor: Tensor, dtype: npt.DTypeLike | None, copy: bool | None) -> np.ndarray:
    """`Tensor.__array__`: `copy` is True, False (never) or None (if necessary), as in NumPy.

    With False: ValueError for bf16 and quantised types, which only a copy can convert to float32, and what `_view`
    raises.
    """
    if copy is False:
        _check_format(tensor, ValueError)
        array = _view(tensor)
    elif copy or not _is_viewed(tensor) or not _has_format(tensor):
        array = hostdata.read(tensor)
    else:
        array = _view(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


def as_capsule(tensor: Tensor, stream: object, max_version: tuple[int, int] | None, device: tuple[int, int] | None,
               copy: bool | None) -> Any:
    """`Tensor.__dlpack__`: arguments as the protocol means them; bf16 stays bf16, quantised types become float32.

    Raises BufferError for a stream, for a device other than the CPU, and for quantised types with `copy=False`; also
    what `_view` and `Tensor.numpy` raise.
    """
    if stream is not None or device not in (None, dlpack.HOST):
        raise BufferError(f"{tensor!r}: DLPack gives its data in host memory, without a stream; asked for device "
                          f"{device}, stream {stream}")
    versioned = max_version is not None and max_version[0] >= 1
    is_bf16 = tensor.type == Type.BF16
    if copy is False:
        if not is_bf16:
            _check_format(tensor, BufferError)
        array = _view(tensor)
    elif not copy and versioned and _is_viewed(tensor) and (is_bf16 or _has_format(tensor)):
        array = _view(tensor)
    else:
        array = hostdata.read(tensor, raw_bf16=True)
    kind = "bf" if is_bf16 else array.dtype.kind
    return dlpack.export(array, array.shape, array.strides, kind, array.itemsize * 8, versioned)


def dtype_of(tensor: Tensor) -> np.dtype[Any]:
    """`Tensor.dtype`."""
    return hostdata.DTYPES[tensor.type] if _has_format(tensor) else hostdata.DTYPES[Type.F32]


def as_html(tensor: Tensor) -> str:
    """`Tensor._repr_html_`: the tensor's repr, and its data or why it has none."""
    from html import escape

    try:
        data = (str(hostdata.read(tensor)) if tensor.n_elements <= SHOWN
                else f"{tensor.n_elements} elements: numpy() reads them")
    except Error as error:
        data = str(error)
    return f"<pre>{escape(repr(tensor))}\n{escape(data)}</pre>"


def _has_format(tensor: Tensor) -> bool:
    """Whether NumPy has a dtype for the elements."""
    return not tensor.type.is_quantized and tensor.type != Type.BF16


def _check_format(tensor: Tensor, error: type[Exception]) -> None:
    if not _has_format(tensor):
        raise error(f"{tensor!r}: NumPy has no {tensor.type} elements; numpy() gives a copy as float32")


def _is_viewed(tensor: Tensor) -> bool:
    """Whether arrays may be views of the tensor: its address is permanent, and its memory the host's."""
    buffer = tensor.buffer
    return buffer is not None and tensor.is_resident and _host_memory(buffer) is not None


def _host_memory(buffer: BufferBase) -> np.ndarray | None:
    """The bytes of a buffer, or None if the CPU does not read them."""
    memory = getattr(buffer, "memory", None)
    return memory if buffer.backend.is_host and isinstance(memory, np.ndarray) else None


def _view(tensor: Tensor) -> np.ndarray:
    """A read-only array over the tensor's memory, extents reversed and leading ones dropped; waits for queued computes.

    Raises PlacementError without an address, HazardError for memory that later computes use again, BackendError for
    memory that the CPU does not read.
    """
    buffer, offset = tensor.buffer, tensor.offset      # read once, because another thread may close the buffer
    if buffer is None or offset is None:
        raise PlacementError(no_address(tensor))
    if not tensor.is_resident:
        raise HazardError(f"{tensor!r}: later computes use its memory again, so a view of it would change; numpy() "
                          "gives a copy")
    memory = _host_memory(buffer)
    if memory is None:
        raise BackendError(f"{tensor!r}: backend {buffer.backend.name!r} has no memory that the CPU reads; numpy() "
                           "gives a copy")
    wait_for_queued(tensor)
    # Of an array over writable memory a caller could set `flags.writeable` to True again.
    read_only = np.frombuffer(memory.data.toreadonly(), np.uint8)
    whole = hostdata.array_over(tensor, read_only, offset)
    array: np.ndarray = whole[(0,) * (4 - len(hostdata.shape_of(tensor)))]
    return array
