"""The typed view of core.plan.request, written by hand.

Sizes and offsets are bytes; `ne` and `nb` are innermost first.
"""

from collections.abc import Mapping
from typing import Any, Self, SupportsIndex

from typing_extensions import disjoint_base

from ggml_sched.backend import Backend, Buffer
from ggml_sched.core.graph.graph import Graph
from ggml_sched.core.graph.tensor import BackendBase, Tensor

@disjoint_base
class Answers:
    def __new__(cls, n_backends: int) -> Self: ...

@disjoint_base
class Devices:
    def __new__(cls, backends: tuple[BackendBase, ...]) -> Self: ...
    @property
    def backends(self) -> tuple[Backend, ...]: ...
    @property
    def n_answers(self) -> int: ...
    def epoch(self) -> int: ...
    def unchanged(self, graph: Graph, buffers: list[Buffer], residence: int, answers: int) -> bool: ...
    def forget(self) -> None: ...

@disjoint_base
class Inquiry:
    def __new__(cls, graph: Graph, devices: Devices) -> Self: ...

@disjoint_base
class Policy:
    def __new__(
        cls,
        *,
        placement: str = "default",
        offsets: str = "packed",
        reuse: str = "all",
        leafs_first: bool = True,
        stream: bool = False,
        places: SupportsIndex = 1,
    ) -> Self: ...
    @property
    def placement(self) -> str: ...
    @property
    def offsets(self) -> str: ...
    @property
    def reuse(self) -> str: ...
    @property
    def leafs_first(self) -> bool: ...
    @property
    def stream(self) -> bool: ...
    @property
    def places(self) -> int: ...
    def replace(self, **fields: Any) -> Policy: ...
    def fields(self) -> dict[str, Any]: ...

@disjoint_base
class Request:
    def __new__(
        cls, graph: Graph, devices: Devices, assigned: Mapping[Tensor, BackendBase] | None
    ) -> Self: ...
    @property
    def key(self) -> int: ...
    @property
    def buffers(self) -> list[Buffer]: ...
    def groups(self, policy: Policy) -> tuple[tuple[int, tuple[int, ...]], ...]: ...

__pyx_capi__: dict[str, Any]
