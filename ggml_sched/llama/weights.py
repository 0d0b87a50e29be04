"""The weights of a model: tensors, and the memory behind them.

Owns one context and one buffer of each backend.  Invariant: every tensor that the architecture
needs is there, of the shape it needs, and has an address; the memory stays until `close()`.

On a backend that takes caller-owned memory (`buffer_from_ptr`) the buffer is the file's mapping
itself, whenever each weight there is aligned to ELEMENT_ALIGNMENT bytes.  That is less than the 64
that backends give to what they allocate: GGUF aligns to 32 unless a file says otherwise, and the
CPU kernels need no more than whole elements.  Otherwise the bytes are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ggml_sched._graph import Context, Tensor, bind_resident
from ggml_sched.backend import Backend
from ggml_sched.errors import FileFormatError
from ggml_sched.llama.gguf import GGUFFile, TensorInfo
from ggml_sched.llama.placement import Place

__all__ = ["Spec", "Weights", "load_weights"]

ELEMENT_ALIGNMENT = 8
"""The largest element of any type, in bytes: what a mapped weight is aligned to at least."""
BASE_ALIGNMENT = 64
CHUNK = 1 << 24
"""Bytes copied at a time to a backend that cannot read the mapping."""
IGNORED_SUFFIXES = (".attn_rot_embd", ".attention.rotary_emb.inv_freq")
"""Tensors of old files that hold what rope computes."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A weight that an architecture has: `ne` innermost first; `layer` None outside the layers."""

    name: str
    ne: tuple[int, ...]
    layer: int | None = None
    required: bool = True


class Weights:
    """Weights by name: `weights[name]`, or `weights.get(name)` for those that may be missing."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.contexts: dict[Backend, Context] = {}
        self.buffers: dict[Backend, object] = {}
        self.mapped: dict[Backend, bool] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        for buffer in self.buffers.values():
            buffer.close()
        for ctx in self.contexts.values():
            ctx.close()
        self.buffers, self.contexts, self.tensors = {}, {}, {}


def load_weights(file: GGUFFile, specs: Iterable[Spec], place: Place, use_mmap: bool = True) -> Weights:
    """Find, check, place and load.

    FileFormatError for a missing tensor, a wrong shape or one that the architecture does not have;
    PlacementError and OutOfMemory as the backends raise them.  After an exception nothing is held.
    """
    weights = Weights()
    try:
        groups = _group(file, specs, place)
        for backend, members in groups.items():
            ctx = weights.contexts[backend] = Context(f"weights on {backend.name}")
            # Only these tensors live in the context: a backend may allocate all of it.
            pairs = [(ctx.restore("NONE", info.type, *_layout(info), name=info.name, resident="weight"), info)
                     for info in members]
            buffer = _map(backend, file, pairs) if use_mmap else None
            weights.mapped[backend] = buffer is not None
            weights.buffers[backend] = _copy(backend, file, ctx, pairs) if buffer is None else buffer
            weights.tensors.update((info.name, tensor) for tensor, info in pairs)
    except BaseException:
        weights.close()
        raise
    return weights


def _group(file: GGUFFile, specs: Iterable[Spec], place: Place) -> dict[Backend, list[TensorInfo]]:
    """The tensors of the file that each backend holds."""
    groups: dict[Backend, list[TensorInfo]] = {}
    known = set()
    for spec in specs:
        known.add(spec.name)
        info = file.tensors.get(spec.name)
        if info is None:
            if spec.required:
                raise FileFormatError(f"{file.name}: no tensor {spec.name!r}, which this architecture needs")
            continue
        if _trim(info.ne) != _trim(spec.ne):
            raise FileFormatError(
                f"{file.name}: tensor {spec.name!r} has extents {list(info.ne)}, not {list(spec.ne)}")
        groups.setdefault(place(spec.name, spec.layer), []).append(info)
    for name in file.tensors:
        if name not in known and not name.endswith(IGNORED_SUFFIXES):
            # Leaving it out would compute something else than the file means.
            raise FileFormatError(f"{file.name}: tensor {name!r} is not one that this architecture has")
    return groups


def _trim(ne: tuple[int, ...]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return tuple(ne)


def _layout(info: TensorInfo) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """ne and nb, four each."""
    ne = (*info.ne, 1, 1, 1)[:4]
    nb = [info.type.type_size, ne[0] // info.type.block_size * info.type.type_size]
    for extent in ne[1:3]:
        nb.append(nb[-1] * extent)
    return ne, tuple(nb)


def _map(backend: Backend, file: GGUFFile, pairs):
    """A buffer over the file's own bytes with the tensors bound to it, or None where that cannot be."""
    wrap = getattr(backend, "buffer_from_ptr", None)
    if wrap is None:
        return None
    memory = file.memory
    base = memory.ctypes.data
    if any((base + info.offset) % ELEMENT_ALIGNMENT for _, info in pairs):
        return None
    first = min(info.offset for _, info in pairs)
    last = max(info.offset + info.nbytes for _, info in pairs)
    start = first - (base + first) % BASE_ALIGNMENT
    if start < 0:
        return None
    buffer = wrap(memory[start:last])
    try:
        buffer.usage = "weights"
        for tensor, info in pairs:
            bind_resident(tensor, buffer, info.offset - start)
            buffer.init_tensor(tensor)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _copy(backend: Backend, file: GGUFFile, ctx: Context, pairs):
    """A buffer that the backend allocated, filled from the file."""
    buffer = backend.alloc_tensors(ctx)
    try:
        buffer.usage = "weights"
        for tensor, info in pairs:
            data: np.ndarray = file.data(info)
            for start in range(0, info.nbytes, CHUNK):
                backend.set_tensor(tensor, data[start : start + CHUNK], start)
    except BaseException:
        buffer.close()
        raise
    return buffer
