"""Saves a sequence to a file and reads it: its tokens, its rows of the cache, and its recurrent state.

Owns the format, below.  Invariants: a sequence is replaced only by a file that was checked to its end; no more than the
rows of one layer are held at a time.
Corresponds to llama.cpp's llama_state_seq_save_file and llama_state_seq_load_file.

    magic, version, arch, type of the cache, fingerprint of hyperparameters and shapes, number of tokens, bytes of a
    row, bytes of a recurrent state, CRC-32 of the rest; tokens (i32), for each layer rows of K and of V, state
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np

from ggml_sched._files import read_up_to, replace_file, write_all
from ggml_sched.llama.builder import rope_factors
from ggml_sched.llama.errors import ContextFull, StateFormatError
from ggml_sched.llama.runner import Runner

if TYPE_CHECKING:
    File: TypeAlias = str | os.PathLike[str] | IO[bytes]
    """A path, or a binary file."""

__all__ = ["reading", "save"]

HEAD = struct.Struct("<8sI32s16s32sIQQI")
MAGIC = b"ggsched\0"
VERSION = 1


def save(target: File, runner: Runner, seq: int, ids: list[int]) -> None:
    """Write sequence `seq`, whose tokens are `ids`, to a path or a binary file; a path is replaced atomically, when the
    file is complete."""
    rows = runner.cells.rows_of(seq)

    def body() -> Iterator[bytes]:
        yield np.array(ids, "<i4").tobytes()
        yield from runner.read_each(seq, rows)

    # The head, which comes first, has the CRC: the rows are read twice, because both at once take much more memory.
    crc = 0
    for part in body():
        crc = zlib.crc32(part, crc)
    parts = chain([HEAD.pack(MAGIC, VERSION, *_facts(runner), len(ids), *runner.sizes(), crc)], body())
    if not hasattr(target, "write"):
        replace_file(_path(target), parts)
        return
    for part in parts:
        write_all(cast("IO[bytes]", target), part)


class Saved(NamedTuple):
    """A saved sequence that is being read."""

    ids: list[int]
    rows: Iterator[np.ndarray]
    """What `KVCache.write_each` takes; read from the file as it goes on."""
    states: Iterator[np.ndarray]
    """What `KVCache.write_state` takes, after the rows.  Its end raises StateFormatError for a damaged file."""


@contextmanager
def reading(source: File, runner: Runner) -> Iterator[Saved]:
    """Read a saved sequence.  StateFormatError, here or at the end of `Saved.states`, for an invalid file, or the file
    of a model of other sizes; ContextFull for more tokens than the cache has rows."""
    if hasattr(source, "read"):
        yield _read(cast("IO[bytes]", source), "the saved sequence", runner, False)
        return
    name = _path(source)
    with open(name, "rb") as file:
        yield _read(file, name, runner, True)


def _path(given: File) -> str:
    """A path; TypeError and ValueError, which say what is needed, for what is none, as the bytes of a state are."""
    needed = "a saved sequence is given as a path or a binary file (bytes of one: io.BytesIO)"
    try:
        path: str = os.fspath(cast("str | os.PathLike[str]", given))
    except TypeError:
        raise TypeError(f"{needed}, not as {type(given).__name__}") from None
    if ("\0" if isinstance(path, str) else b"\0") in path:
        raise ValueError(f"{needed}: a path has no null byte")
    return path


def _facts(runner: Runner) -> tuple[bytes, bytes, bytes]:
    """Three values that must be equal where a sequence is saved and restored: architecture, type of the cache, and a
    hash of the hyperparameters and of the shapes of the file's weights; with longrope also of the table of factors that
    has turned the keys, which the length of the context chooses."""
    import hashlib  # here: loading it takes longer than the rest of this package

    digest = hashlib.sha256(repr(runner.hparams).encode())
    for name, tensor in sorted(runner.weights.tensors.items()):
        if name not in runner.weights.twins:
            digest.update(f"{name} {tensor.ne}".encode())
    factors = rope_factors(runner.hparams, runner.weights, runner.cache) if runner.hparams.longrope else None
    if factors is not None:
        digest.update(f"turned by {factors.name}".encode())
    return (runner.hparams.arch.encode()[:32].ljust(32, b"\0"),
            str(runner.cache.kv_type).encode()[:16].ljust(16, b"\0"), digest.digest())


def _read(file: IO[bytes], name: str, runner: Runner, whole: bool) -> Saved:
    """`whole`: nothing may follow in the file."""

    def wrong(what: str) -> StateFormatError:
        return StateFormatError(f"{name}: {what}")

    def take(n: int, what: str) -> bytearray:
        data = read_up_to(file, n)
        if len(data) != n:
            raise wrong(f"{n} bytes of {what} are needed, {len(data)} are there")
        return data

    magic, version, *facts, n, row_bytes, state_bytes, crc = HEAD.unpack(take(HEAD.size, "head"))
    if magic != MAGIC:
        raise wrong("not a saved sequence")
    if version != VERSION:
        raise wrong(f"version {version}; known: {VERSION}")
    own = _facts(runner)
    for what, theirs, ours in zip(("architecture", "cache type"), facts, own, strict=False):
        if theirs != ours:
            raise wrong(f"saved with {what} {_shown(theirs)}, this model has {_shown(ours)}")
    if facts != list(own):
        raise wrong("saved by a model of other sizes" + (
            f", or in a context on the other side of {runner.hparams.rope.n_ctx_orig} tokens, whose keys other factors "
            "have turned" if runner.hparams.longrope and runner.hparams.rope is not None else ""))
    if (row_bytes, state_bytes) != runner.sizes():
        raise wrong(f"rows of {row_bytes} bytes and a state of {state_bytes}, not {runner.sizes()}")
    tokens = take(4 * n, "tokens")
    ids, found = np.frombuffer(tokens, "<i4"), zlib.crc32(tokens)

    def parts(shapes: Iterable[tuple[int, ...]], what: str) -> Iterator[np.ndarray]:
        nonlocal found
        for shape in shapes:
            data = take(prod(shape), what)
            found = zlib.crc32(data, found)
            yield np.frombuffer(data, np.uint8).reshape(shape)

    def states() -> Iterator[np.ndarray]:
        yield from parts(runner.cache.shapes_of_states(), "state")
        if found != crc:
            raise wrong(f"damaged: CRC-32 {found:08x}, not {crc:08x}")
        if n and not 0 <= ids.min() <= ids.max() < runner.hparams.n_vocab:
            raise wrong(f"a token is not in 0 .. {runner.hparams.n_vocab - 1}")
        if whole and file.read(1):
            raise wrong(f"more bytes than a sequence of {n} tokens has")

    saved = Saved(ids.tolist(), parts(runner.cache.shapes_of_rows(n), "rows"), states())
    if n > runner.cells.n_rows:
        for _ in chain(saved.rows, saved.states):
            pass
        raise ContextFull(f"{name}: {n} tokens do not fit a context of {runner.cells.n_rows}", 0, n,
                          runner.cells.n_rows)
    return saved


def _shown(value: bytes) -> str:
    return repr(value.rstrip(b"\0").decode("ascii", "replace"))
