"""The type hints of the compiled module _exchange, written by hand."""

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Longs = npt.NDArray[np.int64]
_Ints = npt.NDArray[np.int32]

def repaired(first: _Longs, group: _Longs, cost: _Floats, memory: _Longs, budget: _Longs, path: _Longs,
             multipliers: _Floats, unit: _Floats) -> bool: ...
def improved(first: _Longs, group: _Longs, cost: _Floats, memory: _Longs, budget: _Longs, path: _Longs,
             multipliers: _Floats, least: float, paired: int) -> None: ...
def spliced(classes: _Ints, before: _Longs, after: _Longs, cost: _Floats, memory: _Longs, budget: _Longs,
            tables: _Floats, columns: _Longs, path: _Longs, least: float) -> bool: ...
