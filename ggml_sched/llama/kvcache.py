"""The cache of a model: keys and values of evaluated tokens, and the states of recurrent layers.

Owns one buffer of each backend that holds layers.  `_cells` owns the map from rows to tokens.  Invariant: a row that no
token has written since `clear` or `clear_rows` is zero.  Attention multiplies masked rows by 0, and 0 times the NaN of
an uninitialised row would be NaN.

    cache_k_l{i}    [n_embd_k, n_ctx], a row for each token
    cache_v_l{i}    [n_embd_v, n_ctx] with flash attention; otherwise this memory holds the transposed matrix
    cache_r_l{i}    [(n_conv - 1) * n_inner, n_seq], the last inputs of a convolution, a row for each sequence
    cache_s_l{i}    [n_state * n_inner, n_seq], the state of a recurrent layer

Corresponds to llama.cpp's llama_kv_cache and llama_memory_recurrent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ggml_sched._graph import Context, Tensor, Type, bind_resident
from ggml_sched.backend import Backend, Buffer, tensor_copy, tensor_layout
from ggml_sched.errors import FileFormatError
from ggml_sched.llama.defaults import PlaceFunction
from ggml_sched.llama.hparams import Hparams

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["KV_TYPES", "KVCache", "type_of"]

PLAIN = (Type.F32, Type.F16, Type.BF16)
"""The types that a cache can have without flash attention, which then reads V transposed."""

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Names of the types that a cache can have."""


class KVCache:
    """`k[l]`, `v[l]`, `r[l]`, `s[l]`: the tensors of layer l, None where the layer has none.

    `n_ctx` rows of `kv_type` (a Type or its name), states for `n_seq` sequences.  `flash`: the layout for flash
    attention, with V not transposed.  `has_memory` False: the tensors have addresses for planning alone.  ValueError
    for a type that the layout, or the width of the heads, does not allow; OutOfMemory and PlacementError as backends
    raise them.
    """

    def __init__(self, hparams: Hparams, n_ctx: int, place: PlaceFunction, kv_type: Type | str = "f32",
                 n_seq: int = 1, *, flash: bool = False, has_memory: bool = True) -> None:
        kv_type = type_of(kv_type)
        if not flash and kv_type not in PLAIN:
            raise ValueError(f"a KV cache of {kv_type} needs flash attention; without it f32, f16 or bf16")
        self.hparams = hparams
        self.n_ctx = n_ctx
        self.n_seq = n_seq
        self.flash = flash
        self.kv_type: Type = kv_type
        self.k: list[Tensor | None] = []
        self.v: list[Tensor | None] = []
        self.r: list[Tensor | None] = []
        self.s: list[Tensor | None] = []
        self._rows: dict[tuple[str, int], Tensor] = {}
        self.contexts: dict[Backend, Context] = {}
        self.buffers: dict[Backend, Buffer] = {}
        try:
            for i, layer in enumerate(hparams.layers):
                ssm = hparams.ssm if layer.recurrent else None
                for letter, tensors, element, width, n_rows in (
                        ("k", self.k, kv_type, layer.n_embd_k, n_ctx), ("v", self.v, kv_type, layer.n_embd_v, n_ctx),
                        ("r", self.r, Type.F32, (ssm.n_conv - 1) * ssm.n_inner if ssm else 0, n_seq),
                        ("s", self.s, Type.F32, ssm.n_state * ssm.n_inner if ssm else 0, n_seq)):
                    # Attention views each head of a row.
                    head = width // max(layer.n_head_kv, 1)
                    if head % element.block_size:
                        raise ValueError(f"heads of {head} elements do not hold whole blocks of {element}, which are "
                                         f"{element.block_size} elements each")
                    tensors.append(self._tensor(place, f"cache_{letter}_l{i}", i, element, width, n_rows)
                                   if width else None)
            for backend, ctx in self.contexts.items():
                self.buffers[backend] = (backend.alloc_tensors(ctx, usage="any") if has_memory
                                         else _without_memory(backend, ctx))
            if has_memory:
                self.clear()
        except BaseException:
            self.close()
            raise
        # Graphs without attention read no rows: 0 makes `padded` return 1 for every number of rows.
        self._padding = 0 if not any(self.k) else max(backend.kv_padding for backend in self.contexts)

    def _tensor(self, place: PlaceFunction, name: str, layer: int, element: Type, width: int, n_rows: int) -> Tensor:
        backend = place(name, layer)
        ctx = self.contexts.setdefault(backend, Context(f"KV cache on {backend.name}"))
        with Context() as scratch:
            plain = scratch.tensor(element, (width, n_rows))  # raises if the size overflows
            return ctx.restore("NONE", plain.type, plain.ne, plain.nb, name=name, resident="kv")

    def padded(self, n_rows: int) -> int:
        """The number of rows that attention reads when all rows in use are among the first n_rows.

        It is n_rows, rounded up so that one graph serves many tokens before the number grows; 1 without attention.
        """
        if not self._padding:
            return 1
        return min(-(-max(n_rows, 1) // self._padding) * self._padding, self.n_ctx)

    @property
    def half_a_step(self) -> int:
        """Half of the step by which `padded` grows; 0 without attention."""
        return self._padding // 2

    # -- clearing -------------------------------------------------------------------------

    def clear(self) -> None:
        """Zero all tensors."""
        for buffer in self.buffers.values():
            buffer.clear(0)

    def clear_rows(self, rows: Sequence[int] | np.ndarray) -> None:
        """Zero these rows of every layer, which a failed evaluation may have written."""
        self.write_each(rows, (np.zeros(shape, np.uint8) for shape in self.shapes_of_rows(len(rows))))

    def clear_state(self, row: int) -> None:
        """Zero one row of every state tensor: the state of an empty sequence."""
        self.write_state(row, [np.zeros(t.nb[1], np.uint8) for t in self._states()])

    # -- reading and writing rows -----------------------------------------------------------

    def shapes_of_rows(self, m: int) -> list[tuple[int, int]]:
        """The shapes of the arrays that `read_rows` returns for m rows."""
        return [(m, t.nb[1]) for t in self._attention()]

    def read_rows(self, rows: npt.ArrayLike) -> list[np.ndarray]:
        """For each attention layer the bytes of m rows, in their order: keys, then values, each u8 [m, bytes of a row].

        The bytes are the same with and without `flash`.  ValueError for a row outside the cache.
        """
        return [*self.read_each(rows)]

    def read_each(self, rows: npt.ArrayLike) -> Iterator[np.ndarray]:
        """The arrays of `read_rows`, one after another: an array is read only when the iteration comes to it."""
        rows = self._checked(rows)
        for t in self._attention():
            yield (self._transposed(t)[:, rows].transpose(1, 0, 2).reshape(len(rows), t.nb[1])
                   if self._is_transposed(t) else _read(t, rows))

    def write_rows(self, rows: npt.ArrayLike, data: Sequence[np.ndarray]) -> None:
        """Write `data`, which `read_rows` of a cache of this type returned, to some rows.

        FileFormatError for data of other shapes; then nothing was written.
        """
        rows = self._checked(rows)
        if [np.shape(part) for part in data] != self.shapes_of_rows(len(rows)):
            raise FileFormatError(f"saved rows do not fit {len(rows)} rows of {len(self._attention()) // 2} layers of "
                                  "this cache")
        self.write_each(rows, data)

    def write_each(self, rows: npt.ArrayLike, data: Iterable[np.ndarray]) -> None:
        """`write_rows` of arrays that come one after another and have the right shapes.  What comes before an exception
        is written."""
        rows = self._checked(rows)
        for t, part in zip(self._attention(), data, strict=True):
            if not self._is_transposed(t):
                _write(t, rows, part)
            elif len(rows):
                columns = self._transposed(t)
                columns[:, rows] = np.asarray(part, np.uint8).reshape(len(rows), t.ne[0], -1).transpose(1, 0, 2)
                t.backend.set_tensor(t, columns.reshape(-1))

    def read_keys(self, rows: np.ndarray, layers: Sequence[int]) -> list[np.ndarray]:
        """The bytes of these rows of the keys of some layers, each u8 [m, bytes of a row]."""
        return [_read(t, rows) for t in self._keys(layers)]

    def write_keys(self, rows: np.ndarray, layers: Sequence[int], keys: Sequence[np.ndarray]) -> None:
        """Write what `read_keys` returned."""
        for t, part in zip(self._keys(layers), keys, strict=True):
            _write(t, rows, part)

    def _keys(self, layers: Sequence[int]) -> list[Tensor]:
        return [t for t in (self.k[layer] for layer in layers) if t is not None]

    def _is_transposed(self, t: Tensor) -> bool:
        return not self.flash and t.name.startswith("cache_v")

    def _transposed(self, v: Tensor) -> np.ndarray:
        """The bytes of a transposed V: [n_embd_v, n_ctx, bytes of an element]."""
        out = np.empty(v.nbytes, np.uint8)
        v.backend.get_tensor(v, out)
        return out.reshape(v.ne[0], self.n_ctx, v.nb[0])

    def _attention(self) -> list[Tensor]:
        return [t for pair in zip(self.k, self.v, strict=True) for t in pair if t is not None]

    def _checked(self, rows: npt.ArrayLike) -> np.ndarray:
        """The rows as an array; ValueError for one outside 0 .. n_ctx - 1, and for a repeated one."""
        rows = np.asarray(rows, np.int64).reshape(-1)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n_ctx or len(np.unique(rows)) < len(rows)):
            raise ValueError(f"rows are different numbers in 0 .. {self.n_ctx - 1}")
        return rows

    # -- reading and writing states -----------------------------------------------------------

    def shapes_of_states(self) -> list[tuple[int]]:
        """The shapes of the arrays that `read_state` returns."""
        return [(t.nb[1],) for t in self._states()]

    def read_state(self, row: int) -> list[np.ndarray]:
        """The bytes (u8) of one row of every state tensor: that of a sequence, or a backup copy that `Runner` made."""
        out = [np.empty(shape, np.uint8) for shape in self.shapes_of_states()]
        for t, part in zip(self._states(), out, strict=True):
            t.backend.get_tensor(t, part, self._at(t, row))
        return out

    def write_state(self, row: int, states: Sequence[np.ndarray]) -> None:
        """Write what `read_state` returned to one row of every state tensor.  FileFormatError for other shapes; then
        nothing was written."""
        tensors = self._states()
        if [np.shape(state) for state in states] != self.shapes_of_states():
            raise FileFormatError(f"saved states do not fit the {len(tensors)} of this cache")
        for t, state in zip(tensors, states, strict=True):
            t.backend.set_tensor(t, np.ascontiguousarray(state, np.uint8), self._at(t, row))

    def copy_state(self, a: int, b: int) -> None:
        """Copy the states of sequence a to sequence b, within the memory of each backend."""
        for t in self._states():
            src, dst, backend = self._row(t, a), self._row(t, b), t.backend
            t.touch()
            if not (backend.asynchronous and backend.concurrent_copies and backend.cpy_tensor_async(src, dst)):
                tensor_copy(src, dst)

    def _row(self, t: Tensor, row: int) -> Tensor:
        """One row of a state tensor, as a tensor of its own."""
        found = self._rows.get((t.name, row))
        if found is None:
            with Context() as scratch:
                plain = scratch.tensor(t.type, (t.ne[0],))
                found = self._rows[t.name, row] = self.contexts[t.backend].restore(
                    "NONE", plain.type, plain.ne, plain.nb, name=f"{t.name} {row}")
            bind_resident(found, self.buffers[t.backend], t.offset + self._at(t, row))
        return found

    def _states(self) -> list[Tensor]:
        return [t for pair in zip(self.r, self.s, strict=True) for t in pair if t is not None]

    def _at(self, t: Tensor, row: int) -> int:
        if not 0 <= row < self.n_seq:
            raise ValueError(f"state {row} is not in 0 .. {self.n_seq - 1}")
        return row * t.nb[1]

    # -- closing --------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory; idempotent."""
        for buffer in self.buffers.values():
            buffer.close()
        for ctx in self.contexts.values():
            ctx.close()
        self.buffers, self.contexts = {}, {}
        self.k, self.v, self.r, self.s, self._rows = [], [], [], [], {}


def _without_memory(backend: Backend, ctx: Context) -> Buffer:
    """A buffer without memory in which the tensors of a context have the addresses that `alloc_tensors` would give."""
    placed, total = tensor_layout(backend, ctx)
    buffer = Buffer(backend, total, usage="any")
    for tensor, offset in placed:
        bind_resident(tensor, buffer, offset)
    return buffer


def type_of(kv_type: Type | str) -> Type:
    """The `Type` for a Type or the name of one; ValueError for a type that a cache cannot have."""
    if str(kv_type).lower() not in KV_TYPES:
        raise ValueError(f"kv_type = {str(kv_type)!r}; known: {', '.join(KV_TYPES)}")
    return Type[str(kv_type).upper()]


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """The ranges of consecutive rows, each moved by one call: pairs (first index, last index + 1) into `rows`."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True)) if len(rows) else []


def _read(t: Tensor, rows: np.ndarray) -> np.ndarray:
    out = np.empty((len(rows), t.nb[1]), np.uint8)
    for first, end in _runs(rows):
        t.backend.get_tensor(t, out[first:end].reshape(-1), int(rows[first]) * t.nb[1])
    return out


def _write(t: Tensor, rows: np.ndarray, data: npt.ArrayLike) -> None:
    data = np.ascontiguousarray(data, np.uint8)
    for first, end in _runs(rows):
        t.backend.set_tensor(t, data[first:end].reshape(-1), int(rows[first]) * t.nb[1])
