"""The sources and the result of a node as NumPy arrays over the memory of its tensors.

A source that shares memory with the result is copied first, so that every kernel computes as if it had read all
sources before it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ggml_sched._graph import BufferBase, Tensor, Type, label
from ggml_sched.errors import BackendError, PlacementError
from ggml_sched.graph import quants
from ggml_sched.graph.hostdata import array_over, endless

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float32]

__all__ = ["MemoryOf", "Operands", "Resolver", "float_param", "int_param", "load"]

MemoryOf: TypeAlias = Callable[[BufferBase], np.ndarray]
"""A function that returns a uint8 array over all bytes of a buffer."""


def int_param(node: Tensor, i: int) -> int:
    """Parameter i of a node, a 32-bit integer; `op_params` leaves out trailing zeros."""
    return node.op_params[i] if i < len(node.op_params) else 0


def float_param(node: Tensor, i: int) -> np.float32:
    """Parameter i of a node, a float32 stored in the bits of a 32-bit integer."""
    return np.float32(unpack("<f", pack("<i", int_param(node, i)))[0])


def load(raw: np.ndarray, kind: Type) -> Floats:
    """Elements (or blocks) of type `kind` as f32; `raw` itself if they are f32."""
    if kind == Type.BF16:
        return quants.bf16_to_f32(raw)
    return quants.dequantize(raw, kind) if kind.is_quantized else raw.astype(np.float32, copy=False)


def encode(values: np.ndarray, kind: Type) -> np.ndarray:
    """f32 values as elements (or blocks) of type `kind`.  For f16 and integers it returns the values unchanged: the
    assignment to the result casts them."""
    if kind == Type.BF16:
        return quants.f32_to_bf16(values)
    return quants.quantize(values, kind) if kind.is_quantized else values


class Resolver:
    """Finds the memory of tensors, and checks that a node may use it.  `buffers`: {each buffer used so far: its
    memory}."""

    def __init__(self, name: str, memory_of: MemoryOf) -> None:
        self.name = name
        self.memory_of = memory_of
        self.buffers: dict[BufferBase, np.ndarray] = {}

    def describe(self, node: Tensor) -> str:
        return f"backend {self.name!r}: node {label(node)} ({node.op})"

    def array(self, tensor: Tensor, node: Tensor) -> np.ndarray:
        """An array over the memory of a tensor that `node` uses (`hostdata.array_over`); PlacementError,
        BackendError."""
        buffer = tensor.buffer
        if buffer is None:
            raise PlacementError(f"{self.describe(node)}: {label(tensor)} has no address")
        if buffer not in self.buffers:
            try:
                self.buffers[buffer] = self.memory_of(buffer)
            except PlacementError as error:
                raise PlacementError(f"{self.describe(node)}: {label(tensor)}: {error}") from None
        memory, offset = self.buffers[buffer], tensor.offset
        if offset < 0 or offset > memory.nbytes - tensor.nbytes:
            raise PlacementError(f"{self.describe(node)}: {label(tensor)} of {tensor.nbytes} bytes at "
                                 f"{offset} lies outside its buffer of {memory.nbytes}")
        wrong = endless(tensor)
        if wrong is not None:
            raise BackendError(f"{self.describe(node)}: {wrong}")
        if tensor is node and node.nbytes and not memory.flags.writeable:
            raise BackendError(f"{self.describe(node)}: its memory is read-only")
        return array_over(tensor, memory, offset) if tensor.nbytes else array_over(tensor, bytearray(16))


class Operands:
    """The result `dst` and the sources of a node as arrays [ne3, ne2, ne1, ne0], those of quantised types as blocks."""

    def __init__(self, node: Tensor, resolver: Resolver) -> None:
        self.node = node
        self.label: str = resolver.describe(node)
        self.dst: np.ndarray = resolver.array(node, node)
        self._src = {i: resolver.array(tensor, node) for i, tensor in enumerate(node.src) if tensor is not None}

    def has(self, i: int) -> bool:
        return i in self._src

    def type(self, i: int) -> Type:
        return self.node.src[i].type

    def raw(self, i: int) -> np.ndarray:
        """Source i in its own type, not necessarily contiguous."""
        array = self._src[i]
        return array.copy() if np.may_share_memory(array, self.dst) else array

    def f32(self, i: int) -> Floats:
        """Source i as f32, not necessarily contiguous."""
        return load(self.raw(i), self.type(i))

    def dense(self, i: int) -> Floats:
        """Source i as contiguous f32: NumPy computes exp, tanh and sums differently for strided arrays."""
        return np.ascontiguousarray(self.f32(i))

    def store(self, values: np.ndarray) -> None:
        """Convert f32 values to the type of the result and write them to it."""
        np.copyto(self.dst, encode(values, self.node.type), "unsafe")
