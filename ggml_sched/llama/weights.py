"""The weights of a model: tensors and their memory.

Owns one context and a few buffers of each backend.  Invariant: every tensor that the architecture
requires exists, has the required shape and an address; the memory stays until `close()`.

On a backend that takes memory of its caller (`buffer_from_ptr`) no weight is copied: the buffer is the file's mapping
itself (one for each file of a split model), if each of its weights is aligned to ELEMENT_ALIGNMENT bytes; the buffer is
then `file_backed`.  ELEMENT_ALIGNMENT is less than the 64 bytes of a backend's own allocations, because GGUF aligns to
32 bytes unless the metadata has another value, and the CPU kernels need only whole elements.  Otherwise the bytes are
copied, and the memory of the file's pages is released meanwhile, so that the weights do not take memory twice.  Bytes
of a mapping may move to huge pages later (huge_pages.py), at the same addresses.

Under a limit of memory some weights are in a store: their tensors have addresses in its files.  The other weights are
then read through the store and copied, because no limit can bound the pages of a mapping.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ggml_sched._graph import Context, Tensor, Type, bind_resident
from ggml_sched.backend import Backend, Buffer, wait_since
from ggml_sched.errors import FileFormatError
from ggml_sched.llama.defaults import PlaceFunction
from ggml_sched.llama.gguf import GGUFFile, TensorInfo

if TYPE_CHECKING:
    from ggml_sched.backends.store import ExpertSlots, Store
    from ggml_sched.llama.expert_slots import SlotsSpec
    from ggml_sched.llama.huge_pages import Ranges

__all__ = ["Progress", "Spec", "Weights", "grouped", "layout_of", "load_weights"]

Progress = Callable[[int, int], object]
"""`progress(done, total)`, in bytes of weights, called at the start and after each chunk; its error ends the load."""

Pairs = list[tuple[Tensor, TensorInfo]]

ELEMENT_ALIGNMENT = 8
"""Bytes of the largest element of any type: a weight is used in the file's mapping only if it is aligned to these."""
BASE_ALIGNMENT = 64
CHUNK = 1 << 24
"""The most bytes of one copy to a backend that cannot use the mapping, and of a mapping read between two reports."""
READ = 1 << 22
"""The most bytes that are read from a store's file at once, to be copied to the memory of a backend."""
IGNORED = ("*.attn_rot_embd", "*.attention.rotary_emb.inv_freq")
"""Names of tensors that are ignored: values in old files that rope computes itself."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A weight that an architecture reads from a file: `ne` innermost first; `layer` is None outside the layers."""

    name: str
    ne: tuple[int, ...]
    layer: int | None = None
    required: bool = True


class Weights:
    """Weights by name: `weights[name]`, or `weights.get(name)` for those that may be missing."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.twins: frozenset[str] = frozenset()
        """Names of weights that the file does not have: each is a second copy of another one."""
        self.contexts: dict[Backend, Context] = {}
        self.buffers: dict[Backend, list[Buffer]] = {}
        self.mapped: dict[Backend, bool] = {}
        self.homes: dict[str, Backend] = {}
        """{name of a weight in a store: the backend that computes with it}."""
        self._files: list[Buffer] = []
        """The buffers of the store, one for each file of the model; empty without a store."""
        self.slots: ExpertSlots | None = None
        """The slots of weights that are read expert by expert; None where no weight is."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def mapped_ranges(self, used: Collection[str]) -> dict[Buffer, Ranges]:
        """Addresses [first, stop) of the weights with these names that kernels read in mapped files, in runs that have
        no gap of a page or more."""
        found: dict[Buffer, Ranges] = {}
        for tensor in map(self.tensors.__getitem__, used):
            buffer, offset = tensor.buffer, tensor.offset
            if isinstance(buffer, Buffer) and buffer.file_backed and offset is not None and buffer.is_read(offset):
                first = buffer.base + offset
                found.setdefault(buffer, []).append((first, first + tensor.nbytes))
        for buffer, ranges in found.items():
            runs: Ranges = []
            for first, stop in sorted(ranges):
                if runs and first - runs[-1][1] < mmap.PAGESIZE:
                    first = runs.pop()[0]
                runs.append((first, stop))
            found[buffer] = runs
        return found

    def close(self) -> None:
        """Free the memory; idempotent.  Tensors of weights have no address afterwards."""
        if self.slots is not None:
            self.slots.close()
            self.slots = None
        for buffers in (*self.buffers.values(), self._files):
            for buffer in buffers:
                buffer.close()
        for ctx in self.contexts.values():
            ctx.close()
        self.buffers, self.contexts, self.tensors, self._files = {}, {}, {}, []


def load_weights(file: GGUFFile, specs: Iterable[Spec], place: PlaceFunction, use_mmap: bool = True,
                 progress: Progress | None = None, ignored: Iterable[str] = (),
                 twins: Mapping[str, str] | None = None, store: Store | None = None,
                 stored: Collection[str] = (), slots: SlotsSpec | None = None, huge_pages: bool = True) -> Weights:
    """Find, check, place and load the tensors `specs` of a file.

    `twins`: {name of a tensor that the file does not have: the tensor whose bytes it has}.  `ignored`: patterns, such
    as "*.bias", of names of tensors that are not loaded.  With `progress` mapped weights are read into memory at once,
    without it at their first use.  `huge_pages`: whether the operating system is to read them into huge pages, where it
    can.  With a `store` the weights named in `stored` stay in it, those of `slots` are read from it expert by expert,
    and all others are copied, not mapped.

    FileFormatError for a missing tensor, a wrong shape, a type that is not known, or a tensor that the architecture
    does not have; PlacementError and OutOfMemory as the backends raise them.  After an exception nothing is held.
    """
    weights = Weights()
    weights.twins = frozenset(twins or ())
    try:
        groups = grouped(file, specs, place, ignored, twins)
        slotted = frozenset() if slots is None else slots.names
        report = _Report(progress, sum(info.nbytes for members in groups.values() for info in members
                                       if info.name not in stored and info.name not in slotted))
        if store is not None:
            weights._files = [_stored_part(store, part) for part in file.parts]
            _bind_stored(weights, store, groups, stored)
            if slots is not None:
                from ggml_sched.llama.expert_slots import make_slots

                infos = {info.name: info for members in groups.values() for info in members}
                weights.slots = make_slots(slots, store, weights._files, infos, weights)
        for backend, members in groups.items():
            members = [info for info in members if info.name not in stored and info.name not in slotted]
            ctx = weights.contexts[backend] = Context(f"weights on {backend.name}")
            # One context for each backend, because the backend may allocate all tensors of a context in one buffer.
            pairs = [(ctx.restore("NONE", *layout_of(info), name=info.name, resident="weight"), info)
                     for info in members]
            buffers = weights.buffers[backend] = []
            copied = []
            for part in range(len(file.parts)):
                here = [pair for pair in pairs if pair[1].part == part]
                maps = use_mmap and store is None and here
                buffer = _map(backend, file.parts[part], here) if maps else None
                if buffer is None:
                    copied += here
                    continue
                buffers.append(buffer)
                if huge_pages and buffer.file_backed:
                    file.parts[part].prefer_huge_pages()
                if progress is not None:
                    _read_ahead(file.parts[part], here, report)
            weights.mapped[backend] = not copied
            if copied and store is not None:
                buffers.append(_read(backend, store, weights._files, ctx, copied, report))
            elif copied:
                buffers.append(_copy(backend, file, ctx, copied, report))
            weights.tensors.update((info.name, tensor) for tensor, info in pairs)
    except BaseException:
        weights.close()
        raise
    return weights


class _Report:
    """Counts the bytes of weights that are loaded, and calls `progress`, if there is one, after each chunk."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.done, self.total = progress, 0, total
        self.add(0)

    def add(self, size: int) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total)


def grouped(file: GGUFFile, specs: Iterable[Spec], place: PlaceFunction, ignored: Iterable[str] = (),
            twins: Mapping[str, str] | None = None) -> dict[Backend, list[TensorInfo]]:
    """Compare a file with `specs`, and return {backend: the tensors of the file that it will hold}; raises as
    `load_weights` does."""
    groups: dict[Backend, list[TensorInfo]] = {}
    twins = twins or {}
    known, patterns = set(), (*IGNORED, *ignored)
    for spec in specs:
        known.add(spec.name)
        info = file.tensors.get(spec.name)
        if info is None and spec.name in twins:
            info = replace(file.tensors[twins[spec.name]], name=spec.name)
        if info is None:
            if spec.required:
                raise FileFormatError(f"{file.name}: no tensor {spec.name!r}, which this architecture needs")
            continue
        if _trim(info.ne) != _trim(spec.ne):
            raise FileFormatError(
                f"{file.name}: tensor {spec.name!r} has extents {list(info.ne)}, not {list(spec.ne)}")
        if not isinstance(info.type, Type):
            raise FileFormatError(f"{file.name}: tensor {spec.name!r} has unknown type {info.type}")
        groups.setdefault(place(spec.name, spec.layer), []).append(info)
    for name in file.tensors:
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in patterns):
            # The model was trained with this tensor: without it the results would be wrong.
            raise FileFormatError(f"{file.name}: tensor {name!r} is not one that this architecture has")
    return groups


def _trim(ne: tuple[int, ...]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return tuple(ne)


def layout_of(info: TensorInfo) -> tuple[Type, tuple[int, ...], tuple[int, ...]]:
    """The type, the four extents and the four strides in bytes of a contiguous tensor of a known type."""
    kind, ne = Type(info.type), (*info.ne, 1, 1, 1)[:4]
    nb = [kind.type_size, ne[0] // kind.block_size * kind.type_size]
    for extent in ne[1:3]:
        nb.append(nb[-1] * extent)
    return kind, ne, tuple(nb)


def _map(backend: Backend, file: GGUFFile, pairs: Pairs) -> Buffer | None:
    """A buffer that is the file's mapping itself, with the tensors bound to it.

    None if the backend cannot use memory of its caller, or if a weight is not aligned: then weights are copied.
    """
    wrap: Callable[[np.ndarray], Buffer] | None = getattr(backend, "buffer_from_ptr", None)
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
        # A backend of the caller may copy the bytes, or give the buffer a base that is no address.
        buffer.file_backed = file.mapped and buffer.base == base + start
        for tensor, info in pairs:
            bind_resident(tensor, buffer, info.offset - start)
            buffer.init_tensor(tensor)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _stored_part(store: Store, part: GGUFFile) -> Buffer:
    """The buffer of a store over one file of a model; offsets in the buffer are those in the file."""
    open_file: Callable[..., Buffer] | None = getattr(store, "open_file", None)
    if open_file is None:
        return store.buffer_from_ptr(part.memory, usage="weights")
    return open_file(part.name, part.status)


def _bind_stored(weights: Weights, store: Store, groups: dict[Backend, list[TensorInfo]],
                 stored: Collection[str]) -> None:
    """Make tensors for the weights named in `stored`, with addresses in the buffers of the store."""
    ctx = weights.contexts[store] = Context(f"weights in {store.name}")
    for backend, members in groups.items():
        for info in members:
            if info.name in stored:
                tensor = ctx.restore("NONE", *layout_of(info), name=info.name, resident="weight")
                bind_resident(tensor, weights._files[info.part], info.offset)
                weights.tensors[info.name] = tensor
                weights.homes[info.name] = backend


def _read(backend: Backend, store: Store, files: list[Buffer], ctx: Context, pairs: Pairs, report: _Report) -> Buffer:
    """Allocate a buffer for the tensors of `ctx` that have no address, and read them from the files of a store."""
    buffer = backend.alloc_tensors(ctx)
    staging = np.empty(min(READ, max(info.nbytes for _, info in pairs)) + store.margin, np.uint8)
    try:
        for tensor, info in pairs:
            for start in range(0, info.nbytes, READ):
                size, first = min(READ, info.nbytes - start), info.offset + start
                at = store.shift_at(files[info.part], first, staging.ctypes.data)
                with store.naming(tensor):
                    store.read(files[info.part], first, staging, at, size, (0, staging.nbytes))
                backend.set_tensor(tensor, staging[at : at + size], start)
                report.add(size)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _read_ahead(file: GGUFFile, pairs: Pairs, report: _Report) -> None:
    """Read the mapped tensors into memory now, chunk by chunk, with a report after each."""
    for _, info in sorted(pairs, key=lambda pair: pair[1].offset):
        end = info.offset + info.nbytes
        for start in range(info.offset, end, CHUNK):
            stop = min(start + CHUNK, end)
            file.bring(start, stop)
            report.add(stop - start)


def _copy(backend: Backend, file: GGUFFile, ctx: Context, pairs: Pairs, report: _Report) -> Buffer:
    """Allocate a buffer for the tensors of `ctx` that have no address, and copy them from the file."""
    buffer = backend.alloc_tensors(ctx)
    failures = backend.failed[0]
    load_from_file: Callable[[Tensor, str, int, np.ndarray], bool] | None = getattr(backend, "load_from_file", None)
    try:
        for tensor, info in pairs:
            data, part = file.data(info), file.parts[info.part]
            if load_from_file is not None and part.mapped and load_from_file(tensor, part.name, info.offset, data):
                part.forget(info.offset, info.offset + info.nbytes)
                report.add(info.nbytes)
                continue
            for start in range(0, info.nbytes, CHUNK):
                piece = data[start : start + CHUNK]
                if backend.takes_at_once:
                    backend.set_tensor_async(tensor, memoryview(cast("Any", piece)), start)
                else:
                    backend.set_tensor(tensor, piece, start)
                part.forget(info.offset + start, info.offset + start + piece.nbytes)
                report.add(piece.nbytes)
        wait_since(backend, failures)
    except BaseException:
        buffer.close()
        raise
    return buffer
