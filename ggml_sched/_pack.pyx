# cython: language_level=3
"""Packing: offsets for rectangles, which live for a time and take some bytes.  Knows no tensors.

A contents page.  All imports stand here; the parts below, in core/pack/, are read in order:

    prepare             lifetimes become sections
    two_ends            one pass from both ends of the arena
    place               lists: one order, each at the lowest gap
    blocks              free blocks, and ggml's choice among them; also for _core's allocators
    best_fit            ggml's online best fit, for comparison and as a promise
    state, search       exact search: place or lift
    join                buffers joined to solid blocks
    fill                what is to stay empty, as buffers of its own
    run                 the whole stack
    api                 `pack`, for people
    times               the same for callers in C
"""

from operator import index as _index

import numpy as np

from ggml_sched.errors import Error, no_host_memory

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
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

include "core/pack/prepare.pxi"
include "core/pack/two_ends.pxi"
include "core/pack/place.pxi"
include "core/pack/blocks.pxi"
include "core/pack/best_fit.pxi"
include "core/pack/state.pxi"
include "core/pack/search.pxi"
include "core/pack/join.pxi"
include "core/pack/fill.pxi"
include "core/pack/run.pxi"
include "core/pack/api.pxi"
include "core/pack/times.pxi"
