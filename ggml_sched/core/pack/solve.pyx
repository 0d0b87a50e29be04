# cython: language_level=3
"""Packing buffers over sections of time, and the free blocks of an arena.

Includes, in this order:

    blocks    Free blocks: the free ranges of one arena, and best fit among them as in ggml's first generation.
    prepare   Preparing a problem: converting lifetimes to sections.
    two_ends  Packing in one pass: long lifetimes from the bottom of the arena, and short ones from its top.
    place     Packing in one pass over the buffers, each into the lowest gap that it fits.
    best_fit  Packing by best fit, as an online allocator does it.
    state     The state of the exact search, and its two moves, place and lift.
    search    The exact search.
    join      Joining buffers to larger blocks, which gives a smaller problem.
    fill      Filling memory that a good packing leaves empty, which makes the problem easier to search.
    run       The sequence of all packing methods.
"""


from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from ggml_sched._c cimport *

include "blocks.pxi"
include "prepare.pxi"
include "two_ends.pxi"
include "place.pxi"
include "best_fit.pxi"
include "state.pxi"
include "search.pxi"
include "join.pxi"
include "fill.pxi"
include "run.pxi"
