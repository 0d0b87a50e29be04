# cython: language_level=3
"""The compiled core of ggml-sched: graphs become integers here, integers become plans.

A contents page.  All imports stand here; the parts below are read in order:

    _core_types         element types, checked shape arithmetic
    _core_ops_table     op names and in-place rules
    _core_tensor        Tensor, its address, and the bases of Buffer and Backend
    _core_context       the makers of tensors, and who owns them
    _core_ops_*         the ops, one family a file; the last one ends in class Context
    _core_graph         Graph: an immutable order, with flat arrays
    _core_pack_*        offsets for lifetimes: sections, list placement, exact search, and `pack`
"""

import enum
from operator import index as _index
from struct import pack as _struct_pack
from struct import unpack as _struct_unpack

import numpy as np
from ggml_sched.errors import Error, GraphError, PlacementError

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport ceil, isfinite
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

include "_core_types.pxi"
include "_core_ops_table.pxi"
include "_core_tensor.pxi"
include "_core_context.pxi"
include "_core_ops_elementwise.pxi"
include "_core_ops_matrix.pxi"
include "_core_ops_view.pxi"
include "_core_ops_attention.pxi"
include "_core_graph.pxi"
include "_core_pack_prepare.pxi"
include "_core_pack_place.pxi"
include "_core_pack_best_fit.pxi"
include "_core_pack_state.pxi"
include "_core_pack_search.pxi"
include "_core_pack_run.pxi"
include "_core_pack_api.pxi"
