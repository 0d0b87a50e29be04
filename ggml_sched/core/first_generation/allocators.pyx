# cython: language_level=3
"""The first generation's allocators: TensorAllocator, GraphAllocator, and Allocator, which is both.

Includes, in this order:

    tallocr          TensorAllocator: addresses for single tensors, best fit over one buffer.
    graph_allocator  GraphAllocator: the Python class of graph allocation.
    allocr           Allocator: single tensors and graphs in one buffer, as in ggml's first generation.
"""

from operator import index as _index

from ggml_sched.core.graph.tensor import measure_buffer, new_buffer
from ggml_sched.errors import GraphError, OutOfMemory, PlacementError, no_host_memory

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from ggml_sched._c cimport *
from ggml_sched.core.alloc.gallocr cimport (
    OUTSIDE, gallocr_run, gs_arena, gs_walk, walk_alloc, walk_can_replay, walk_free, walk_from_graph, walk_replay,
    walk_wiring,
)
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport (
    BackendBase, BufferBase, Lease, Tensor, checked_alloc_size, describe, fill_inplace_masks, label,
)
from ggml_sched.core.pack.solve cimport *

include "tallocr.pxi"
include "graph_allocator.pxi"
include "allocr.pxi"
