# cython: language_level=3
"""The compiled core of ggml-sched: graphs become integers here, integers become plans.

A contents page.  All imports stand here; the parts below are read in order:

    _core_types         element types, checked shape arithmetic
    _core_ops_table     op names and in-place rules
    _core_tensor        Tensor, its address, and the bases of Buffer and Backend
    _core_context       the makers of tensors, and who owns them
    _core_ops_*         the ops, one family a file; the last one ends in class Context
    _core_tensor_set    an open-addressing hash set of tensors
    _core_graph         Graph: an immutable order, with flat arrays
    _core_pack_*        offsets for lifetimes: sections, two ends, lists, exact search, joined buffers, and `pack`
    _core_blocks        free blocks and best fit
    _core_tallocr       TensorAllocator: single tensors in one buffer
    _core_ints          growing arrays
    _core_request       what a placement depends on besides the graph
    _core_why           reasons
    _core_routes        splits, and the copies between them
    _core_seed          the first generation's passes
    _core_default       the default policy's placement and splits
    _core_boundary      the default policy's last pass: where splits meet
    _core_flow          what an allocation pass walks over
    _core_gallocr       graph allocation, first generation
    _core_placing       offsets that serve another flow of the same wiring
    _core_gallocr_api   GraphAllocator
    _core_allocr        Allocator: single tensors and graphs in one buffer
    _core_offsets       the offsets of an arena, all lifetimes known
    _core_arenas        what the memory of a routed graph comes to, heirs weighed
    _core_plan          from a request to a plan
    _core_replay        a reserved plan for a smaller graph of the same wiring
    _core_bind          addresses for a graph's tensors
"""

import enum
import itertools
from operator import index as _index
from struct import pack as _struct_pack
from struct import unpack as _struct_unpack

import numpy as np

from ggml_sched.errors import Error, GraphError, HazardError, OutOfMemory, PlacementError, UnsupportedOp

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX, PY_SSIZE_T_MIN
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.math cimport ceil, isfinite
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

include "_core_types.pxi"
include "_core_ops_table.pxi"
include "_core_tensor.pxi"
include "_core_context.pxi"
include "_core_ops_elementwise.pxi"
include "_core_ops_matrix.pxi"
include "_core_ops_view.pxi"
include "_core_ops_attention.pxi"
include "_core_tensor_set.pxi"
include "_core_graph.pxi"
include "_core_pack_prepare.pxi"
include "_core_pack_two_ends.pxi"
include "_core_pack_place.pxi"
include "_core_pack_best_fit.pxi"
include "_core_pack_state.pxi"
include "_core_pack_search.pxi"
include "_core_pack_join.pxi"
include "_core_pack_run.pxi"
include "_core_pack_api.pxi"
include "_core_blocks.pxi"
include "_core_tallocr.pxi"
include "_core_ints.pxi"
include "_core_request.pxi"
include "_core_why.pxi"
include "_core_routes.pxi"
include "_core_seed.pxi"
include "_core_default.pxi"
include "_core_boundary.pxi"
include "_core_flow.pxi"
include "_core_gallocr.pxi"
include "_core_placing.pxi"
include "_core_gallocr_api.pxi"
include "_core_allocr.pxi"
include "_core_offsets.pxi"
include "_core_arenas.pxi"
include "_core_plan.pxi"
include "_core_replay.pxi"
include "_core_bind.pxi"
