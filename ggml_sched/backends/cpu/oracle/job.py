"""Jobs, by which kernels turn a node into calls: arrays over memory, scratch, and parts of the work.

A kernel receives a Job and adds calls over numpy arrays, which
compute the node each time they run.  Rules that hold for every kernel:

* Results depend on values, shapes and strides only: never on addresses, never on how
  many threads run.  Work is cut into parts of a fixed size; lanes only spread the parts.
* A source that overlaps the destination, in a way that the kernel does not declare to
  tolerate, is copied first, so every node computes as if it read all sources before it wrote.
* Functions that numpy evaluates differently for strided arrays (exp, tanh, sums) run on
  contiguous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from struct import pack, unpack

import numpy as np

from ggml_sched._graph import BufferBase, Tensor, Type
from ggml_sched.backends.cpu.buffer import address_of
from ggml_sched.backends.cpu.oracle.lanes import Call, Lanes
from ggml_sched.backends.cpu.oracle.work import Work
from ggml_sched.errors import BackendError, PlacementError
from ggml_sched.graph import quants
from ggml_sched.graph.hostdata import array_over, endless

__all__ = ["Job", "MemoryOf", "Part", "Resolver", "float_param", "int_param", "load_call", "store_call"]

PART = 1 << 16
"""Elements of one part of an element-wise node.  Fixed, because results may depend on it: see above."""

MemoryOf = Callable[[BufferBase], np.ndarray]
"""From a buffer to a uint8 array over all its bytes."""


def int_param(node: Tensor, i: int) -> int:
    """Word i of op_params, whose trailing zeros are cut."""
    return node.op_params[i] if i < len(node.op_params) else 0


def float_param(node: Tensor, i: int) -> np.float32:
    """Word i of op_params as the float32 it encodes."""
    return np.float32(unpack("<f", pack("<i", int_param(node, i)))[0])


def load_call(raw: np.ndarray, kind: Type, out: np.ndarray) -> Call:
    """The call that converts `raw` elements (or blocks) of type `kind` to f32."""
    if kind == Type.BF16:
        return partial(quants.bf16_to_f32, raw, out)
    if kind.is_quantized:
        return partial(quants.dequantize, raw, kind, out)
    return partial(np.copyto, out, raw, "unsafe")


def store_call(values: np.ndarray, raw: np.ndarray, kind: Type) -> Call:
    """The call that converts f32 `values` to type `kind`."""
    if kind == Type.BF16:
        return lambda: np.copyto(raw, quants.f32_to_bf16(values))
    if kind.is_quantized:
        return lambda: np.copyto(raw, quants.quantize(values, kind))
    return partial(np.copyto, raw, values, "unsafe")


class Resolver:
    """Turns the nodes of one plan into calls; holds the work memory and lanes that they share."""

    def __init__(self, name: str, work: Work, lanes: Lanes, memory_of: MemoryOf) -> None:
        self.name = name
        self.work = work
        self.lanes = lanes
        self.n_lanes = lanes.n_threads
        self.memory_of = memory_of
        self.buffers: dict[BufferBase, tuple[np.ndarray, int]] = {}

    def describe(self, node: Tensor) -> str:
        return f"backend {self.name!r}: node {node.name!r} ({node.op})"

    def memory(self, tensor: Tensor, node: Tensor) -> tuple[np.ndarray, int, int]:
        """(bytes of the buffer, offset, address) of a tensor that `node` uses; PlacementError, BackendError."""
        buffer = tensor.buffer
        if buffer is None:
            raise PlacementError(f"{self.describe(node)}: tensor {tensor.name!r} has no address")
        known = self.buffers.get(buffer)
        if known is None:
            try:
                memory = self.memory_of(buffer)
            except PlacementError as error:
                raise PlacementError(f"{self.describe(node)}: tensor {tensor.name!r}: {error}") from None
            known = self.buffers[buffer] = memory, address_of(memory)
        memory, base = known
        offset = tensor.offset
        if offset < 0 or offset > memory.nbytes - tensor.nbytes:
            raise PlacementError(f"{self.describe(node)}: tensor {tensor.name!r} of {tensor.nbytes} bytes at "
                                 f"{offset} lies outside its buffer of {memory.nbytes}")
        wrong = endless(tensor)
        if wrong is not None:
            raise BackendError(f"{self.describe(node)}: {wrong}")
        return memory, offset, base + offset


class Job:
    """One node being resolved."""

    def __init__(self, node: Tensor, tolerated: int, resolver: Resolver) -> None:
        self.node = node
        self.tolerated = tolerated
        self.resolver = resolver
        self.shared = resolver.work.shared
        self.shared.reset()
        self.before: list[Call] = []
        self.after: list[Call] = []
        self._parts: list[Part] = []
        self._src: dict[int, np.ndarray] = {}
        memory, offset, self._dst_start = resolver.memory(node, node)
        if not memory.flags.writeable and node.nbytes:
            raise BackendError(f"{resolver.describe(node)}: its memory is read-only")
        self.dst = raw_array(node, memory, offset)

    @property
    def label(self) -> str:
        return self.resolver.describe(self.node)

    # -- sources ----------------------------------------------------------------

    def has(self, i: int) -> bool:
        return i < len(self.node.src) and self.node.src[i] is not None

    def type(self, i: int) -> Type:
        return self.node.src[i].type

    def src(self, i: int) -> np.ndarray:
        """Source i in its memory, without conversion: 4-D, extents reversed (5-D uint8 blocks for quantised types)."""
        array = self._src.get(i)
        if array is None:
            tensor = self.node.src[i]
            memory, offset, start = self.resolver.memory(tensor, self.node)
            array = raw_array(tensor, memory, offset)
            if self._clashes(i, tensor, start):
                copy = self.shared.take(array.shape, array.dtype)
                self.before.append(partial(np.copyto, copy, array))
                array = copy
            self._src[i] = array
        return array

    def _clashes(self, i: int, tensor: Tensor, start: int) -> bool:
        """Whether writing the destination may change source i before it was read."""
        node = self.node
        if start >= self._dst_start + node.nbytes or self._dst_start >= start + tensor.nbytes:
            return False
        exact = (start == self._dst_start and tensor.type == node.type and tensor.ne == node.ne
                 and tensor.nb == node.nb)
        return not (exact and self.tolerated >> i & 1)

    def values(self, i: int, dense: bool = False) -> np.ndarray:
        """The whole of source i as f32, made before any part runs; `dense`: contiguous."""
        raw = self.src(i)
        kind = self.type(i)
        if kind == Type.F32 and (raw.flags.c_contiguous or not dense):
            return raw
        out = self.shared.take(self.node.src[i].ne[::-1])
        self.before.append(load_call(raw, kind, out))
        return out

    def flat(self, i: int) -> np.ndarray:
        """Source i, of a plain type, as a contiguous vector."""
        raw = self.src(i)
        if not raw.flags.c_contiguous:
            dense = self.shared.take(raw.shape, raw.dtype)
            self.before.append(partial(np.copyto, dense, raw))
            raw = dense
        return raw.reshape(-1)

    def operand(self, i: int, shape: tuple[int, ...]) -> np.ndarray:
        """Source i ready to broadcast to `shape` by numpy's rules: ggml also repeats 2 rows over 6."""
        raw = self.src(i)
        reps = tuple(1 if have in (1, want) else want // have
                     for have, want in zip(raw.shape, shape, strict=True))
        if max(reps) <= 1:
            return raw
        tiled = self.shared.take(tuple(n * r for n, r in zip(raw.shape, reps, strict=True)), raw.dtype)
        self.before.append(partial(np.copyto, split_axes(tiled, raw.shape), spread_axes(raw)))
        self._src[i] = tiled
        return tiled

    # -- calls ------------------------------------------------------------------

    def do(self, function: Callable, *args, **kwargs) -> None:
        """Add a call that runs before all parts."""
        self.before.append(partial(function, *args, **kwargs))

    def part(self, axis: int = 0, start: int = 0, stop: int | None = None) -> Part:
        """A new independent part of the work: rows start .. stop of `axis` (stop None: to the end)."""
        part = Part(self, len(self._parts), axis, start, stop)
        self._parts.append(part)
        return part

    def parts(self) -> Iterator[Part]:
        """Parts of about PART elements, cut along the longest dimension except the innermost."""
        shape = self.dst.shape[:3]
        size = max([self.node.n_elements, *(s.n_elements for s in self.node.src[:1] if s is not None)])
        if size == 0 or self.node.n_elements == 0:
            return
        axis = max(range(3), key=lambda k: shape[k])
        count = min(shape[axis], -(-size // PART))
        if count <= 1:
            yield self.part()
            return
        rows = -(-shape[axis] // count)
        for start in range(0, shape[axis], rows):
            yield self.part(axis, start, min(start + rows, shape[axis]))

    def calls(self) -> list[Call]:
        """The calls of the whole node."""
        parts = [part.calls + part.tail for part in self._parts]
        n_lanes = min(len(parts), self.resolver.n_lanes)
        if n_lanes <= 1:
            body = [call for part in parts for call in part]
        else:
            lanes = [[call for part in parts[i::n_lanes] for call in part] for i in range(n_lanes)]
            body = [partial(self.resolver.lanes.run, lanes)]
        return self.before + body + self.after


class Part:
    """A part of a node: its slice of every array, and the scratch of its lane."""

    __slots__ = ("axis", "job", "scratch", "start", "calls", "stop", "tail")

    def __init__(self, job: Job, number: int, axis: int, start: int, stop: int | None) -> None:
        self.job = job
        self.axis = axis
        self.start = start
        self.stop = stop
        self.calls: list[Call] = []
        self.tail: list[Call] = []
        # As in Job.calls: part k runs in lane k % n_lanes (a single part in lane 0 either way).
        self.scratch = job.resolver.work.lane(number % job.resolver.n_lanes)
        self.scratch.reset()

    def do(self, function: Callable, *args, **kwargs) -> None:
        self.calls.append(partial(function, *args, **kwargs) if args or kwargs else function)

    def temp(self, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
        return self.scratch.take(shape, dtype)

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The part's slice of an array that has or broadcasts over the destination's outer extents."""
        if self.stop is None or array.shape[self.axis] == 1:
            return array
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def raw(self, i: int) -> np.ndarray:
        return self.cut(self.job.src(i))

    def f32(self, i: int, dense: bool = False) -> np.ndarray:
        """Source i as f32; `dense`: contiguous."""
        return self.load(self.raw(i), self.job.type(i), dense)

    def load(self, raw: np.ndarray, kind: Type, dense: bool = False) -> np.ndarray:
        """Any array of elements or blocks as f32."""
        if kind == Type.F32 and (raw.flags.c_contiguous or not dense):
            return raw
        shape = raw.shape
        if kind.is_quantized:
            shape = (*shape[:-2], shape[-2] * kind.block_size)
        out = self.temp(shape)
        self.calls.append(load_call(raw, kind, out))
        return out

    def out(self, dense: bool = False) -> np.ndarray:
        """Where to put f32 results: the destination itself, or scratch that is stored when the part ends."""
        kind = self.job.node.type
        raw = self.cut(self.job.dst)
        if kind == Type.F32 and (raw.flags.c_contiguous or not dense):
            return raw
        shape = raw.shape if not kind.is_quantized else (*raw.shape[:-2], raw.shape[-2] * kind.block_size)
        out = self.temp(shape)
        self.tail.append(store_call(out, raw, kind))
        return out

    def store(self, values: np.ndarray) -> None:
        """f32 values into the destination, converted."""
        self.calls.append(store_call(values, self.cut(self.job.dst), self.job.node.type))


def raw_array(tensor: Tensor, memory: np.ndarray, offset: int) -> np.ndarray:
    if tensor.nbytes == 0:
        return array_over(tensor, bytearray(16))
    return array_over(tensor, memory, offset)


def split_axes(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """[r0 * n0, r1 * n1, ...] as [r0, n0, r1, n1, ...] for shape (n0, n1, ...); a view."""
    extents: list[int] = []
    strides: list[int] = []
    for have, n, stride in zip(array.shape, shape, array.strides, strict=True):
        extents += [have // n if n else 0, n]
        strides += [n * stride, stride]
    return np.lib.stride_tricks.as_strided(array, extents, strides)


def spread_axes(array: np.ndarray) -> np.ndarray:
    """[n0, n1, ...] as [1, n0, 1, n1, ...]: the other side of `split_axes`."""
    return array[tuple(x for _ in array.shape for x in (None, slice(None)))]
