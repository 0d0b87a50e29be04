# Rules for the sources, the root and the destination of each op.
#
# Op methods of a Context make only valid tensors; a tensor with all fields given (Context.restore) is checked here.
# Planning derives order, lifetimes and in-place reuse from sources and roots.  It would make a plan with wrong results
# for a view whose root is not that of its source, or for a product without factors.

cdef unsigned char least_sources[GS_N_OPS]      # by op: how many sources a node must have, in its first slots

# The ops that need another number of sources than one.  All sub-ops of UNARY and GLU need one.
cdef dict _LEAST_SOURCES = {
    0: ("NONE", "ARANGE", "CUSTOM"),
    2: ("ADD", "ADD1", "SUB", "MUL", "DIV", "ROPE", "ROPE_BACK", "SILU_BACK", "RMS_NORM_BACK", "SOFT_MAX_BACK", "ACC",
        "COUNT_EQUAL", "CONCAT", "MUL_MAT", "OUT_PROD", "SET", "GET_ROWS", "GET_ROWS_BACK", "SET_ROWS",
        "CONV_TRANSPOSE_1D", "IM2COL", "IM2COL_BACK", "IM2COL_3D", "CONV_2D", "CONV_3D", "CONV_2D_DW",
        "CONV_TRANSPOSE_2D", "POOL_2D_BACK", "SSM_CONV", "SOLVE_TRI", "MAP_CUSTOM2", "CROSS_ENTROPY_LOSS"),
    3: ("ADD_ID", "MUL_MAT_ID", "FLASH_ATTN_EXT", "ADD_REL_POS", "MAP_CUSTOM3", "CROSS_ENTROPY_LOSS_BACK",
        "OPT_STEP_SGD"),
    4: ("FLASH_ATTN_BACK",),
    5: ("GATED_LINEAR_ATTN", "GATED_DELTA_NET", "OPT_STEP_ADAMW"),
    6: ("SSM_SCAN", "RWKV_WKV6"),
    7: ("RWKV_WKV7",),
}


def _fill_least_sources():
    memset(least_sources, 1, sizeof(least_sources))
    for count, names in _LEAST_SOURCES.items():
        for name in names:
            least_sources[<int>OP_IDS[name]] = count


_fill_least_sources()


cdef str strides_of(const gs_layout *layout):
    return f"ne {numbers_of(layout.ne)}, nb {numbers_of(layout.nb)}"


cdef str called(str name, int op):
    """The description of a tensor that is not made yet, for messages."""
    return f"{f'tensor {name!r}' if name else 'unnamed tensor'} ({OP_NAMES[op]})"


cdef int check_wiring(str name, const gs_layout *layout, tuple src, Tensor root, int64_t view_offs,
                      str resident) except -1:
    """GraphError unless a tensor may have these sources and this root (None: it is no view)."""
    cdef int op = layout.op
    cdef int i
    cdef Tensor s
    if root is None and view_offs != 0:
        raise GraphError(f"{called(name, op)} has view_offs {view_offs} and no view_src")
    if root is not None and root.view_src is not None:
        raise GraphError(f"{called(name, op)} has view_src {describe(root)}, which is itself a view, of "
                         f"{label(root.view_src)}")
    if resident not in ("", "weight", "kv") or resident and op != GS_OP_NONE:
        raise GraphError(f"{called(name, op)} is resident as {resident!r}: leafs may be, as 'weight' or 'kv'")
    if op == GS_OP_NONE:
        if src:
            raise GraphError(f"{called(name, op)} is a leaf with {len(src)} sources")
        if root is not None and root.layout.op != GS_OP_NONE:
            raise GraphError(f"{called(name, op)} is a leaf and a view of {describe(root)}, which is computed")
        return 0
    for i in range(least_sources[op]):
        if i >= len(src) or src[i] is None:
            raise GraphError(f"{called(name, op)} has no source {i}; it needs {least_sources[op]}")
    if op_is_view(op):
        return check_view(name, layout, src[0], root, view_offs)
    if layout_may_overlap(layout):
        raise GraphError(f"{called(name, op)} is written to, and elements of it share bytes: {strides_of(layout)}")
    if root is None and not layout_contiguous(layout) and not layout_is_empty(layout):
        # Views of the tensor's memory could read the bytes in the gaps, which are never written.
        raise GraphError(f"{called(name, op)} is computed into memory of its own, and leaves gaps: {strides_of(layout)}")
    if root is None and op == OP_IDS["SET_ROWS"]:
        raise GraphError(f"{called(name, op)} has no view_src to write rows of, and memory of its own that it leaves "
                         "unwritten")
    if root is not None:
        for s in src:
            if s is not None and (s is root or s.view_src is root):
                return 0
        raise GraphError(f"{called(name, op)} computes into {describe(root)}, which none of its sources is or views")
    return 0


cdef int check_view(str name, const gs_layout *layout, Tensor s, Tensor root, int64_t view_offs) except -1:
    """GraphError unless a VIEW, RESHAPE, PERMUTE or TRANSPOSE of s is in the memory of s, with the layout that the op
    gives it."""
    cdef gs_layout turned
    cdef bint fits
    if root is None:
        raise GraphError(f"{called(name, layout.op)} is a view without view_src")
    if root is not s and root is not s.view_src:
        raise GraphError(f"{called(name, layout.op)} is a view of {describe(s)}, but its view_src is {describe(root)}")
    if layout.type != s.layout.type:
        raise GraphError(f"{called(name, layout.op)} is a view as {TYPE_NAMES[layout.type]} of {describe(s)}")
    if layout.op == GS_OP_VIEW:
        return 0
    if layout.op == GS_OP_RESHAPE:
        fits = (layout_contiguous(layout) and layout_contiguous(&s.layout)
                and layout_n_elements(layout) == layout_n_elements(&s.layout))
    elif layout.op == GS_OP_TRANSPOSE:
        turned = s.layout
        turned.ne[0], turned.ne[1] = s.layout.ne[1], s.layout.ne[0]
        turned.nb[0], turned.nb[1] = s.layout.nb[1], s.layout.nb[0]
        fits = layout_equal(layout, &turned)
    else:
        fits = layout_permutes(layout, &s.layout)
    if not fits or view_offs != s.view_offs:
        raise GraphError(f"{called(name, layout.op)}: {strides_of(layout)} at byte {view_offs} of {root.name!r} is not "
                         f"what the op makes of {describe(s)}: {strides_of(&s.layout)} at byte {s.view_offs}")
    return 0
