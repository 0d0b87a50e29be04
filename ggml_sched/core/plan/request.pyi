"""The typed view of core.plan.request."""

from collections.abc import Mapping
from typing import Any, Final, Self

from typing_extensions import disjoint_base

from ggml_sched.backend import Backend, Buffer
from ggml_sched.core.graph.graph import Graph
from ggml_sched.core.graph.tensor import BackendBase, Tensor
from ggml_sched.core.plan.policy import Policy

@disjoint_base
class Devices:
    def __new__(cls, backends: tuple[BackendBase, ...]) -> Self: ...
    backends: Final[tuple[Backend, ...]]
    n_cached: Final[int]
    def epoch(self) -> int: ...
    def expect(self, graph: Graph) -> None: ...
    def unchanged(self, graph: Graph, buffers: list[Buffer], residence: int, support: int) -> bool: ...
    def clear(self) -> None: ...

@disjoint_base
class SupportQueries:
    def __new__(cls, graph: Graph, devices: Devices) -> Self: ...

@disjoint_base
class Request:
    def __new__(cls, graph: Graph, devices: Devices, assigned: Mapping[Tensor, BackendBase] | None) -> Self: ...
    key: Final[int]
    buffers: Final[list[Buffer]]
    def groups(self, policy: Policy) -> tuple[tuple[int, tuple[int, ...]], ...]: ...

__pyx_capi__: dict[str, Any]
