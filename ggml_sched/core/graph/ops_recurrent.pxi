# Op methods of a Context for recurrent (state space) models: a short convolution, and a scan with a state.

cdef class RecurrentOps(ViewOps):
    """The convolution and the scan of Mamba."""

    def ssm_conv(self, Tensor sx not None, Tensor c not None):
        """A causal convolution along the tokens: each channel with its own short filter (Gu and Dao 2023).

        sx f32 [d_conv - 1 + n_tokens, d_inner, n_seqs], contiguous rows: the last d_conv - 1 inputs and the new ones;
        c f32 [d_conv, d_inner] -> f32 [d_inner, n_tokens, n_seqs].
        """
        cdef int64_t d_conv = c.layout.ne[0], n_tokens = sx.layout.ne[0] - c.layout.ne[0] + 1
        check_f32_rows("ssm_conv", sx)
        check_f32_rows("ssm_conv", c)
        if (sx.layout.ne[3] != 1 or c.layout.ne[2] != 1 or c.layout.ne[3] != 1 or c.layout.ne[1] != sx.layout.ne[1]
                or d_conv < 1 or n_tokens < 0):
            raise GraphError(f"ssm_conv: {describe(sx)} and filters {describe(c)} do not fit together")
        if sx.layout.ne[1] > 1 and sx.layout.nb[1] != sx.layout.ne[0] * sx.layout.nb[0]:
            raise GraphError(f"ssm_conv: the rows of {describe(sx)} have gaps: {strides_of(&sx.layout)}")
        return self.add_dense(GS_OP_SSM_CONV, GS_TYPE_F32, sx.layout.ne[1], n_tokens, sx.layout.ne[2], 1, (sx, c))

    def ssm_scan(self, Tensor s not None, Tensor x not None, Tensor dt not None, Tensor A not None, Tensor B not None,
                 Tensor C not None, Tensor ids not None):
        """The selective scan: for each token, state = state * exp(dt' A) + dt' x B and y = state C, dt' = softplus(dt).

        s [d_state, head_dim, n_head, n_states] is a table of states; ids (i32 [n_seqs]) has the index of the state that
        each sequence starts from.  x [head_dim, n_head, n_tokens, n_seqs], dt [n_head, n_tokens, n_seqs], A [d_state
        or 1, n_head], B and C [d_state, n_group, n_tokens, n_seqs], all f32; n_head is a multiple of n_group.
        The result is f32 [n]: y, laid out as x is, then the last states, [d_state, head_dim, n_head, n_seqs].
        """
        cdef int64_t d_state = s.layout.ne[0], head_dim = x.layout.ne[0], n_head = x.layout.ne[1]
        cdef int64_t n_tokens = x.layout.ne[2], n_seqs = x.layout.ne[3], n_group = B.layout.ne[1]
        cdef int64_t kept, total
        cdef int32_t snapshots = 1          # ggml's parameter: how many of each sequence's last states are returned
        cdef Tensor t
        for t in (s, x, dt, A, B, C):
            check_f32_rows("ssm_scan", t)
        for t in (s, dt, A):
            if not layout_contiguous(&t.layout):
                raise GraphError(f"ssm_scan: {describe(t)} is not contiguous")
        for t in (x, B, C):
            if t.layout.ne[1] > 1 and t.layout.nb[1] != t.layout.ne[0] * t.layout.nb[0]:
                raise GraphError(f"ssm_scan: the rows of {describe(t)} have gaps: {strides_of(&t.layout)}")
        if s.layout.ne[1] != head_dim or s.layout.ne[2] != n_head:
            raise GraphError(f"ssm_scan: states {describe(s)} do not fit {describe(x)}")
        if not ne_is(dt, n_head, n_tokens, n_seqs, 1):
            raise GraphError(f"ssm_scan: steps {describe(dt)} do not fit {describe(x)}")
        if not (ne_is(A, d_state, n_head, 1, 1) or ne_is(A, 1, n_head, 1, 1)):
            raise GraphError(f"ssm_scan: A {describe(A)} is neither [{d_state}, {n_head}] nor [1, {n_head}]")
        if not ne_is(B, d_state, n_group, n_tokens, n_seqs) or n_group < 1 or n_head % n_group:
            raise GraphError(f"ssm_scan: B {describe(B)} does not fit states {describe(s)} and {describe(x)}")
        if not layout_same_ne(&B.layout, &C.layout):
            raise GraphError(f"ssm_scan: {describe(B)} and {describe(C)} differ in shape")
        if ids.layout.type != GS_TYPE_I32 or not ne_is(ids, n_seqs, 1, 1, 1) or not layout_contiguous(&ids.layout):
            raise GraphError(f"ssm_scan: ids {describe(ids)} must be i32 [{n_seqs}], one for each sequence")
        if (gs_checked_mul(d_state, head_dim, &kept) != GS_OK or gs_checked_mul(kept, n_head, &kept) != GS_OK
                or gs_checked_mul(kept, n_seqs, &kept) != GS_OK
                or gs_checked_add(layout_n_elements(&x.layout), kept, &total) != GS_OK):
            raise GraphError(f"ssm_scan: {describe(x)} with states {describe(s)} overflows")
        return with_params(self.add_dense(GS_OP_SSM_SCAN, GS_TYPE_F32, total, 1, 1, 1, (s, x, dt, A, B, C, ids)),
                           &snapshots, 1)


cdef int check_f32_rows(str op, Tensor t) except -1:
    """GraphError unless the elements of rows are f32 and lie side by side."""
    if t.layout.type != GS_TYPE_F32:
        raise GraphError(f"{op}: {describe(t)} must be f32")
    if t.layout.ne[0] > 1 and t.layout.nb[0] != traits[GS_TYPE_F32].type_size:
        raise GraphError(f"{op}: the elements of {describe(t)} do not lie side by side: {strides_of(&t.layout)}")
    return 0


cdef inline bint ne_is(Tensor t, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) noexcept:
    return t.layout.ne[0] == ne0 and t.layout.ne[1] == ne1 and t.layout.ne[2] == ne2 and t.layout.ne[3] == ne3
