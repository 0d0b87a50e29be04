# cython: language_level=3
"""Flat graphs: gs_graph, arrays indexed by tensor id (include/ggml_sched/graph.h), without Python objects.

Defines how these arrays lie in memory, and computes the derived arrays that all passes use.

Includes, before the code below:

    check        Checking graphs whose arrays were written by a caller of the C API.
    equal        Comparing two flat graphs entry by entry.
    fingerprint  Fingerprints: hashes of flat graphs, equal for graphs that can share plans.
    kinds        Kinds of tensors: tensors that every backend must treat alike.
"""

from ggml_sched.errors import no_host_memory

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.types cimport layout_equal, layout_set_nbytes, op_is_view, traits

include "check.pxi"
include "equal.pxi"
include "fingerprint.pxi"
include "kinds.pxi"


cdef int64_t flat_given_bytes(const gs_graph_size *size) noexcept nogil:
    """The bytes of the given arrays of a gs_graph: those that are not derived.  Counts are below 2**31."""
    cdef int64_t n = size.n_tensors, n_src = size.n_src
    cdef int64_t n_ids = (3 * n + 2 + size.n_params + n_src + size.n_nodes + size.n_leafs
                          + (n + 1 + size.n_deps if size.n_deps else 0))
    return n * <int64_t>(sizeof(gs_layout) + sizeof(int64_t) + 1) + n_ids * <int64_t>sizeof(int32_t) + n_src


cdef inline int64_t derived_begin(const gs_graph_size *size) noexcept nogil:
    """The offset in a block at which the derived arrays begin: after the given ones, at a multiple of 8 bytes."""
    return (flat_given_bytes(size) + 7) // 8 * 8


cdef int64_t flat_bytes(const gs_graph_size *size) noexcept nogil:
    """The bytes of all arrays of a gs_graph with these counts, which are below 2**31."""
    cdef int64_t n = size.n_tensors
    return (derived_begin(size) + (10 * n + 1 + size.n_src + size.n_nodes) * <int64_t>sizeof(int32_t)
            + n * <int64_t>(2 * sizeof(int64_t) + 2))


cdef inline void lay_out_behind_leafs(gs_graph *g, const gs_graph_size *size) noexcept nogil:
    """Set the pointers of alloc dependencies, slots and flags, which lie behind the leafs in every kind of block."""
    g.slot = <unsigned char *>(g.leaf + size.n_leafs)
    if size.n_deps:
        g.dep_begin = g.leaf + size.n_leafs
        g.dep = g.dep_begin + size.n_tensors + 1
        g.slot = <unsigned char *>(g.dep + size.n_deps)
    g.flags = g.slot + size.n_src


cdef void flat_lay_out_given(gs_graph *g, void *block, const gs_graph_size *size) noexcept nogil:
    """Let the given arrays of `g` lie in `block`, which has flat_given_bytes bytes or more, and clear all else of `g`.

    The first of them, g.layout, is at the block's start.  The pointers of derived arrays become NULL.
    """
    cdef int64_t n = size.n_tensors
    memset(g, 0, sizeof(gs_graph))
    g.n_tensors, g.n_nodes, g.n_leafs = size.n_tensors, size.n_nodes, size.n_leafs
    # Arrays of wide elements first, so that each array is aligned.
    g.layout = <gs_layout *>block
    g.view_offs = <int64_t *>(g.layout + n)
    g.view_src = <int32_t *>(g.view_offs + n)
    g.src_begin = g.view_src + n
    g.param_begin = g.src_begin + n + 1
    g.param = g.param_begin + n + 1
    g.src = g.param + size.n_params
    g.node = g.src + size.n_src
    g.leaf = g.node + size.n_nodes
    lay_out_behind_leafs(g, size)


cdef int64_t flat_wiring_bytes(const gs_graph_size *size) noexcept nogil:
    """The bytes of the arrays of a gs_graph that flat_keep_wiring keeps, for counts below 2**31."""
    cdef int64_t n = size.n_tensors
    cdef int64_t n_ids = (3 * n + 1 + size.n_src + size.n_nodes + size.n_leafs
                          + (n + 1 + size.n_deps if size.n_deps else 0))
    return n_ids * <int64_t>sizeof(int32_t) + size.n_src + 2 * n


cdef void flat_lay_out_wiring(gs_graph *g, void *block, const gs_graph_size *size) noexcept nogil:
    """Set the pointers of the wiring's arrays into a block of at least flat_wiring_bytes bytes; the others to NULL."""
    cdef int64_t n = size.n_tensors
    memset(g, 0, sizeof(gs_graph))
    g.n_tensors, g.n_nodes, g.n_leafs = size.n_tensors, size.n_nodes, size.n_leafs
    g.type = <int32_t *>block
    g.view_src = g.type + n
    g.src_begin = g.view_src + n
    g.src = g.src_begin + n + 1
    g.node = g.src + size.n_src
    g.leaf = g.node + size.n_nodes
    lay_out_behind_leafs(g, size)
    g.op = g.flags + n


cdef void flat_keep_wiring(gs_graph *g, const gs_graph_size *size) noexcept nogil:
    """Keep only the wiring of a graph: move the wiring's arrays to the start of the block, over the arrays that go.

    The arrays are in the same order as before, and each moves down, so none overwrites one that is still to be moved.
    """
    cdef gs_graph old = g[0]
    cdef int64_t n = size.n_tensors, i
    flat_lay_out_wiring(g, old.layout, size)
    for i in range(n):
        g.type[i] = old.layout[i].type
    memmove(g.view_src, old.view_src, n * sizeof(int32_t))
    memmove(g.src_begin, old.src_begin, (n + 1) * sizeof(int32_t))
    memmove(g.src, old.src, size.n_src * sizeof(int32_t))
    memmove(g.node, old.node, size.n_nodes * sizeof(int32_t))
    memmove(g.leaf, old.leaf, size.n_leafs * sizeof(int32_t))
    if size.n_deps:
        memmove(g.dep_begin, old.dep_begin, (n + 1) * sizeof(int32_t))
        memmove(g.dep, old.dep, size.n_deps * sizeof(int32_t))
    memmove(g.slot, old.slot, size.n_src)
    memmove(g.flags, old.flags, n)
    memmove(g.op, old.op, n)


cdef void flat_lay_out(gs_graph *g, void *block, const gs_graph_size *size) noexcept nogil:
    """Set the array pointers into a block of flat_bytes bytes; g.layout is its start."""
    cdef int64_t n = size.n_tensors
    flat_lay_out_given(g, block, size)
    g.nbytes = <int64_t *>(<char *>block + derived_begin(size))
    g.layout_hash = <uint64_t *>(g.nbytes + n)
    g.position = <int32_t *>(g.layout_hash + n)
    g.memory = g.position + n
    g.view = g.memory + n
    g.root = g.view + n
    g.n_readers = g.root + n
    g.n_viewers = g.n_readers + n
    g.alike = <uint32_t *>(g.n_viewers + n)
    g.first_view = g.n_viewers + 2 * n
    g.next_view = g.first_view + n
    g.reader_begin = g.next_view + n
    g.reader = g.reader_begin + n + 1
    g.work = g.reader + size.n_src
    g.op = <unsigned char *>(g.work + size.n_nodes)
    g.role = g.op + n


cdef int flat_alloc(gs_graph *g, const gs_graph_size *size) except -1:
    """Allocate all arrays in one block."""
    cdef void *block = malloc(flat_bytes(size))
    if block == NULL:
        raise no_host_memory(f"a graph of {size.n_tensors} tensors")
    flat_lay_out(g, block, size)
    return 0


cdef inline bint op_has_small_weights(int op) noexcept nogil:
    """Whether the op's weights are small (factors, sinks), so that they do not decide its backend."""
    return op == GS_OP_ROPE or op == GS_OP_SOFT_MAX or op == GS_OP_FLASH_ATTN_EXT


cdef void flat_classify(gs_graph *g) noexcept nogil:
    """Compute the derived arrays of a complete graph."""
    cdef int32_t i, k, id
    memset(g.n_readers, 0, g.n_tensors * sizeof(int32_t))
    memset(g.n_viewers, 0, g.n_tensors * sizeof(int32_t))
    memset(g.alike, 0, g.n_tensors * sizeof(uint32_t))
    g.n_work = g.n_roots = g.n_views = 0
    for i in range(g.n_tensors):
        g.op[i] = <unsigned char>g.layout[i].op
        g.nbytes[i] = g.layout[i].nbytes
        g.memory[i] = g.view_src[i] if g.view_src[i] >= 0 else i
        g.role[i] = GS_ROLE_VIEW if op_is_view(g.op[i]) else 0
        if g.view_src[i] < 0:
            g.root[g.n_roots] = i
            g.n_roots += 1
            if g.position[i] < 0 and g.flags[i] & GS_FLAG_INPUT:
                g.role[i] |= GS_ROLE_INPUT
        elif g.op[i] > GS_OP_TRANSPOSE:
            g.role[i] |= GS_ROLE_WRITES
        else:
            g.view[g.n_views] = i
            g.n_views += 1
        if g.position[i] >= 0 and not g.role[i] & GS_ROLE_VIEW and not op_has_small_weights(g.op[i]):
            g.role[i] |= GS_ROLE_FOLLOWS
    for i in range(g.n_nodes):
        id = g.node[i]
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            g.n_readers[g.src[k]] += 1
            if layout_equal(&g.layout[id], &g.layout[g.src[k]]):
                g.alike[id] |= <uint32_t>1 << g.slot[k]
        if g.dep_begin != NULL:
            # An alloc dependency counts as a reader; since it is no source, the node never reuses its memory in place.
            for k in range(g.dep_begin[id], g.dep_begin[id + 1]):
                g.n_readers[g.dep[k]] += 1
        if g.view_src[id] >= 0:
            g.n_viewers[g.view_src[id]] += 1
        if not g.role[id] & GS_ROLE_VIEW:
            g.work[g.n_work] = id
            g.n_work += 1
    for i in range(g.n_views):
        # A view that is not a node uses its root until the view's last reader has run; the caller reads outputs, too.
        id = g.view[i]
        if g.position[id] < 0 and (g.n_readers[id] or g.flags[id] & GS_FLAG_OUTPUT):
            g.n_viewers[g.view_src[id]] += 1
    flat_list_views_and_readers(g)


cdef void flat_list_views_and_readers(gs_graph *g) noexcept nogil:
    """List the views of each root, and the computing nodes that read each tensor."""
    cdef int32_t i, k, id
    memset(g.first_view, 0xff, g.n_tensors * sizeof(int32_t))       # -1
    for i in range(g.n_tensors - 1, -1, -1):
        if g.view_src[i] >= 0:
            g.next_view[i] = g.first_view[g.view_src[i]]
            g.first_view[g.view_src[i]] = i
    memset(g.reader_begin, 0, (g.n_tensors + 1) * sizeof(int32_t))
    for i in range(g.n_work):
        id = g.work[i]
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            g.reader_begin[g.src[k] + 1] += 1
    for i in range(g.n_tensors):
        g.reader_begin[i + 1] += g.reader_begin[i]
    for i in range(g.n_work):
        id = g.work[i]
        for k in range(g.src_begin[id], g.src_begin[id + 1]):
            g.reader[g.reader_begin[g.src[k]]] = id
            g.reader_begin[g.src[k]] += 1
    # Filling has advanced reader_begin[i] to the end of tensor i's readers, where those of i + 1 begin: shift by one.
    for i in range(g.n_tensors, 0, -1):
        g.reader_begin[i] = g.reader_begin[i - 1]
    g.reader_begin[0] = 0


cdef dict flat_arrays(const gs_graph *g):
    """{name: bytes} of the arrays that a program is made from; their types are those of Graph.arrays."""
    cdef Py_ssize_t n = g.n_tensors, n_src = g.src_begin[n]
    return {
        "src_begin": (<char *>g.src_begin)[:4 * (n + 1)], "src": (<char *>g.src)[:4 * n_src],
        "memory": (<char *>g.memory)[:4 * n], "position": (<char *>g.position)[:4 * n],
        "node": (<char *>g.node)[:4 * g.n_nodes], "work": (<char *>g.work)[:4 * g.n_work],
        "view_offs": (<char *>g.view_offs)[:8 * n], "nbytes": (<char *>g.nbytes)[:8 * n],
        "slot": (<char *>g.slot)[:n_src], "op": (<char *>g.op)[:n], "role": (<char *>g.role)[:n],
        "flags": (<char *>g.flags)[:n],
    }
