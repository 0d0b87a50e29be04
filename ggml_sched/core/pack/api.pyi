"""The typed view of core.pack.api."""

from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

@disjoint_base
class Packing:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    offsets: Final[npt.NDArray[np.int64]]
    arena: Final[int]
    bound: Final[int]
    method: Final[str]
    optimal: Final[bool]
    tries: Final[int]
    def __len__(self) -> int: ...

def pack(lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, capacity: SupportsIndex | None = None,
         budget: SupportsIndex | None = None) -> Packing: ...
def method_name(method: int) -> str: ...

__pyx_capi__: dict[str, Any]
