"""The typed view of graph._dlpack."""

from typing import Any, Final, Protocol

from typing_extensions import disjoint_base

class _Gives(Protocol):
    def __dlpack__(self, *, max_version: tuple[int, int] | None = ...) -> Any: ...

HOST: Final[tuple[int, int]]
PINNED_HOST: Final[int]

@disjoint_base
class Import:
    kind: Final[str]
    bits: Final[int]
    __array_interface__: Final[dict[str, Any]]

def export(memory: Any, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, bits: int,
           versioned: bool) -> Any: ...
def take(given: _Gives) -> Import: ...
