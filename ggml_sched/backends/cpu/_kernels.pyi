"""The typed view of _kernels, written by hand."""

from collections.abc import Callable, Iterable
from typing import Final, Literal, Self

import numpy as np
from typing_extensions import disjoint_base

from ggml_sched._graph import BufferBase, NodeTable, Tensor

MAX_SHARED: int

def isa() -> Literal["portable", "avx2", "avx512"]: ...
def fits(node: Tensor) -> bool: ...

@disjoint_base
class Pool:
    n_threads: int
    def __new__(cls, n_threads: int) -> Self: ...
    def set_n_threads(self, n_threads: int) -> None: ...
    alive: Final[int]
    def close(self) -> None: ...

@disjoint_base
class CallList:
    name: str
    table: NodeTable
    def __new__(cls, name: str, nodes: Iterable[Tensor], memory_of: Callable[[BufferBase], np.ndarray],
                allocate: Callable[[int], np.ndarray]) -> Self: ...
    n_calls: Final[int]
    def node_of(self, i: int) -> Tensor: ...
    work_size: Final[int]
    buffers: Final[tuple[BufferBase, ...]]
    def held(self) -> list[np.ndarray]: ...
    def add(self, first: int, stop: int) -> int: ...
    def prepare(self, n_threads: int) -> None: ...
    def run(self, pool: Pool, first: int, last: int) -> None: ...

@disjoint_base
class Products: ...
