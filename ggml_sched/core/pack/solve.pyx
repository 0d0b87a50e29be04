# cython: language_level=3
"""Packing by exact search, and the sequence of all packing methods.

Includes, in this order:

    state   The state of an exact search, and its two moves, place and lift.
    search  The exact search.
    join    Joining buffers to larger blocks, which gives a smaller problem.
    fill    Filling space that should stay empty with further buffers.
    run     The sequence of all packing methods.
"""


from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport GS_NO_HOST_MEMORY, GS_OK, GS_OUT_OF_MEMORY, gs_mix
from ggml_sched.core.pack.passes cimport (
    PACK_BY_LONG_AREA, PACK_BY_TAW, PACK_BY_TWA, PACK_BY_WAT, PACK_CARRY_LIMIT, PACK_ORDERS, gs_pack, pack_best_fit,
    pack_bits, pack_fill_carry, pack_find_peaks, pack_free, pack_place_far, pack_place_near, pack_prepare, pack_settle,
    pack_sort, pack_take, pack_two_ends,
)

include "state.pxi"
include "search.pxi"
include "join.pxi"
include "fill.pxi"
include "run.pxi"
