"""The typed view of _locks, written by hand."""

from collections.abc import Callable
from types import TracebackType
from typing import Final

from typing_extensions import disjoint_base

from ggml_sched.errors import Error

@disjoint_base
class OneAtATime:
    closed: bool
    def __init__(self, busy: Callable[[], Error], ended: Callable[[], Error]) -> None: ...
    locked: Final[bool]
    def __enter__(self) -> None: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 /) -> None: ...

@disjoint_base
class ForkLock:
    locked: Final[bool]
    def __enter__(self) -> None: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 /) -> None: ...
