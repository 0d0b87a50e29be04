"""The typed view of _ggml, written by hand.  Addresses and handles of ggml's are ints."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from typing_extensions import disjoint_base

from ggml_sched._graph import BackendBase, Tensor

TENSOR_SIZE: int
FUNCTIONS: tuple[str, ...]
QUIET: int

@disjoint_base
class Api:
    def __new__(cls, addresses: dict[str, int], ops: Mapping[Any, int], sub_ops: Mapping[int, int],
                types: Iterable[int]) -> Self: ...
    has_plans: Final[bool]

@disjoint_base
class Device:
    def __new__(cls, api: Api, dev: int, n_threads: int, host: bool) -> Self: ...
    api: Final[Api]
    n_threads: Final[int]
    host: Final[bool]
    has_host_plans: Final[bool]
    work_size: Final[int]
    def set_threads(self, n: int) -> int: ...
    def allocate(self, buft: int, size: int) -> tuple[int, int]: ...
    def release(self, buffer: int) -> None: ...
    def alloc_size(self, buft: int, t: Tensor) -> int: ...
    def prepare(self, buffer: int, address: int, t: Tensor) -> None: ...
    def move(self, buffer: int, address: int, view: Any, into: bool) -> None: ...

@disjoint_base
class RepackedWeight:
    size: Final[int]

    def outdate(self) -> None: ...

@disjoint_base
class GraphPart: ...

@disjoint_base
class OwnProducts: ...

@disjoint_base
class GraphPlan:
    def __new__(cls, backend: BackendBase, device: Device, nodes: tuple[Tensor, ...]) -> Self: ...
    device: Final[Device]
    freed: Final[bool]
    def free(self) -> None: ...

@disjoint_base
class GgmlBase(BackendBase):
    def adopt(self, device: Device) -> None: ...

def drop_pages(address: int, size: int) -> None: ...
def run_graph_plan(program: GraphPlan) -> None: ...
def tensor_at(address: int) -> dict[str, Any]: ...
def tolerated_sources(op: int) -> int: ...
