"""The typed view of _chain, written by hand."""

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Longs = npt.NDArray[np.int64]
_Ints = npt.NDArray[np.int32]

def undominated(first: _Longs, memory: _Longs) -> npt.NDArray[np.bool_]: ...
def suffixes(classes: _Ints, table: _Floats) -> _Floats: ...
def prefixes(classes: _Ints, table: _Floats, start: _Floats) -> _Floats: ...
def exchanges(bytes_: _Longs, state: int, swaps: _Ints, state_swaps: _Ints) -> tuple[int, list[int]]: ...
def labels(classes: _Ints, start: _Floats, ranges: _Longs, cost: _Floats, reduced: _Floats, memory: _Longs,
           after: _Ints, budget: _Longs, multipliers: _Floats, constants: _Floats, suffix: _Floats, least: _Longs,
           swaps: _Ints, state_swaps: _Ints, stop: float, width: int,
           effort: int) -> tuple[_Ints | None, float, int]: ...
