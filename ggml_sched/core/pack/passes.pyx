# cython: language_level=3
"""Packing in one pass: buffers over sections of time, each placed once, in several orders; and free blocks.

A contents page; the parts, read in this order:

    blocks    Free blocks: the free ranges of one arena and the first generation's way to choose among them.
    prepare   Packing: lifetimes become sections.
    two_ends  Packing: long lives from the bottom, short ones from the top.
    place     Packing: one pass over the buffers, each to the lowest gap it fits.
    best_fit  Packing: what an online allocator would do.
"""


from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport (
    GS_BAD_ARGUMENT,
    GS_NO_HOST_MEMORY,
    GS_OK,
    GS_OUT_OF_MEMORY,
    GS_OVERFLOW,
    gs_block,
    gs_checked_add,
    gs_checked_mul,
    gs_mix,
)

include "blocks.pxi"
include "prepare.pxi"
include "two_ends.pxi"
include "place.pxi"
include "best_fit.pxi"
