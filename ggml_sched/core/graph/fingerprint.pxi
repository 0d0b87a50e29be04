# Fingerprints: hashes of flat graphs, equal for graphs that can share plans.  No Python objects.
#
# The fingerprint has two independent 64-bit hashes of the same input.  The wiring is a third hash, without parameters,
# shapes, strides and view offsets.

ctypedef struct gs_lanes:
    uint64_t a
    uint64_t b


cdef inline void lanes_mix(gs_lanes *h, uint64_t x) noexcept nogil:
    h.a = gs_mix(h.a, x)
    h.b = gs_mix_other(h.b, x)


cdef inline gs_lanes hash_of_layout(const gs_layout *layout) noexcept nogil:
    """Hash type, extents and strides."""
    cdef gs_lanes h
    cdef int32_t k
    h.a, h.b = 0x243F6A8885A308D3, 0x13198A2E03707344
    lanes_mix(&h, <uint64_t>layout.type)
    for k in range(GS_MAX_DIMS):
        lanes_mix(&h, <uint64_t>layout.ne[k])
        lanes_mix(&h, <uint64_t>layout.nb[k])
    return h


cdef void flat_fingerprint(const gs_graph *g, uint64_t *layout_hash, uint64_t *found, uint64_t *wiring) noexcept nogil:
    """Compute the fingerprint, 128 bits to `found`, and the hash of the wiring, 64 bits to `wiring`.

    Writes the hash of each tensor's type, extents and strides to `layout_hash`, unless that is NULL.
    """
    cdef gs_lanes all, h
    cdef uint64_t x, w, wired = gs_mix(<uint64_t>g.n_tensors, <uint64_t>g.n_nodes)
    cdef int32_t i, k
    all.a, all.b = 0xA4093822299F31D0, 0x082EFA98EC4E6C89
    lanes_mix(&all, <uint64_t>g.n_tensors)
    lanes_mix(&all, (<uint64_t>g.n_nodes << 32) | <uint64_t>g.n_leafs)
    for i in range(g.n_tensors):
        h = hash_of_layout(&g.layout[i])
        if layout_hash != NULL:
            layout_hash[i] = h.a
        lanes_mix(&h, (<uint64_t>(g.param_begin[i + 1] - g.param_begin[i]) << 32) | g.op[i])
        for k in range(g.param_begin[i], g.param_begin[i + 1]):
            lanes_mix(&h, <uint64_t><uint32_t>g.param[k])
        x = (<uint64_t>(g.src_begin[i + 1] - g.src_begin[i]) << 40) | (<uint64_t>g.flags[i] << 32) | (
            <uint64_t><uint32_t>g.view_src[i])
        w = gs_mix((<uint64_t>g.layout[i].op << 32) | <uint64_t>g.layout[i].type, x)
        lanes_mix(&h, x)
        lanes_mix(&h, <uint64_t>g.view_offs[i])
        for k in range(g.src_begin[i], g.src_begin[i + 1]):
            # The slot is part of the hash: the same tensor in another slot makes another node.
            x = (<uint64_t>g.slot[k] << 32) | <uint64_t>g.src[k]
            lanes_mix(&h, x)
            w = gs_mix(w, x)
        all.a = gs_mix(all.a, h.a)
        all.b = gs_mix_other(all.b, h.b)
        wired = gs_mix(wired, w)
    for i in range(g.n_nodes):
        lanes_mix(&all, <uint64_t>g.node[i])
        wired = gs_mix(wired, <uint64_t>g.node[i])
    if g.dep_begin != NULL:
        for i in range(g.n_tensors):
            for k in range(g.dep_begin[i], g.dep_begin[i + 1]):
                x = (<uint64_t>i << 32) ^ <uint64_t>g.dep[k]
                lanes_mix(&all, x)
                wired = gs_mix(wired, x)
    found[0], found[1], wiring[0] = all.a, all.b, wired
