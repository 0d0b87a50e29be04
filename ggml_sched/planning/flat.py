"""Graphs of the C API as planning/compiler.py reads them: arrays by tensor id, without Tensors.

`FlatGraph` has those attributes of `Graph` that a program is made from.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FlatBackend", "FlatGraph", "FlatTensor", "FlatType"]


class FlatBackend:
    """A backend of the C API, where it is a table of functions; compared by identity."""

    def __init__(self, concurrent_copies: bool, is_store: bool = False) -> None:
        self.concurrent_copies = concurrent_copies
        self.is_store = is_store


class FlatType(NamedTuple):
    """The elements and the bytes of a block of a type; (1, 0) for a type that this package does not know."""

    block_size: int
    type_size: int


class FlatTensor(NamedTuple):
    """`ne` in elements, `nb` in bytes, innermost first; `backend` owns the memory of a resident, None for others."""

    ne: tuple[int, ...]
    nb: tuple[int, ...]
    type: FlatType
    backend: FlatBackend | None


class FlatGraph:
    """A graph in which ids stand for tensors: `deps` is {id of a node: ids}, and `id_of` returns its argument."""

    def __init__(self, arrays: dict[str, bytes], tensors: list[FlatTensor], deps: dict[int, tuple[int, ...]]) -> None:
        self._arrays = arrays
        self.tensors = tensors
        self.deps = deps

    def arrays(self) -> dict[str, bytes]:
        """The arrays of `Graph.arrays`."""
        return self._arrays

    def id_of(self, tensor: int) -> int:
        return tensor
