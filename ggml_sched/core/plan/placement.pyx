# cython: language_level=3
"""The default policy: which backend computes each node, and how the graph is cut into splits.

Includes, in this order:

    ints      Growing arrays of int32 for the passes.
    splits    Splits: cutting a graph with assigned backends into splits, and the copies between them.
    default   The placement of the default policy, and its splits.
    fetching  Fetching ahead: copies of stored weights, made before the splits that read them.
    boundary  Boundaries: moving the boundary of two splits to the position where the fewest bytes are copied.
"""


from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.types cimport layout_equal

include "ints.pxi"
include "splits.pxi"
include "default.pxi"
include "fetching.pxi"
include "boundary.pxi"
