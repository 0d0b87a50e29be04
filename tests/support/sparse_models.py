"""Model files of real sizes that take no disk space: metadata and a hole where the weights would be."""

from __future__ import annotations

import io
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ggml_sched._graph import Type
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.synthetic import is_matrix, outline

__all__ = ["LLAMA_70B", "LLAMA_7B", "sparse_model"]

LLAMA_7B = {"vocab_size": 32000, "context_length": 4096, "embedding_length": 4096, "block_count": 32,
            "feed_forward_length": 11008, "attention.head_count": 32, "attention.head_count_kv": 32,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 128}
LLAMA_70B = {**LLAMA_7B, "vocab_size": 128256, "context_length": 8192, "embedding_length": 8192, "block_count": 80,
             "feed_forward_length": 28672, "attention.head_count": 64, "attention.head_count_kv": 8}


class _Holes(io.RawIOBase):
    """A file in which long runs of bytes become holes."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out

    def write(self, data: Any) -> int:
        if len(data) >= 1 << 16:
            self.out.seek(len(data), io.SEEK_CUR)
        else:
            self.out.write(data)
        return len(data)


def sparse_model(path: Path, arch: str = "llama", metadata: Mapping[str, Any] = LLAMA_7B, kind: str = "q4_0",
                 optional: Sequence[str] = (), tied: bool = False) -> Path:
    """Write a model of an architecture with matrices of one type, all zeros; returns the path."""
    values, specs = outline(arch, metadata, optional=optional, tied=tied)
    sizes = {}
    for spec in specs:
        own = Type[kind.upper()] if is_matrix(spec) and spec.ne[0] % Type[kind.upper()].block_size == 0 else Type.F32
        n = own.type_size
        for extent in spec.ne:
            n *= extent
        sizes[spec.name] = own, spec.ne, n // own.block_size
    with mmap.mmap(-1, max(size for *_, size in sizes.values())) as zeros, open(path, "wb") as out:
        view = memoryview(zeros)
        tensors = {name: (own, ne, view[:size]) for name, (own, ne, size) in sizes.items()}
        write_gguf(_Holes(out), values, tensors)  # type: ignore[arg-type]
        tensors.clear()
        view.release()
        out.truncate()
    return path
