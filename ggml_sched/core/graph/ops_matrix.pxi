# Op methods of a Context: matrix products.

cdef class MatrixOps(ElementwiseOps):
    """Matrix products, with the same matrix for all columns or with one of several."""

    def mul_mat(self, Tensor a not None, Tensor b not None):
        """b times a transposed: a[k, m, p, q], b[k, n, p*r, q*s] -> f32 [m, n, p*r, q*s]."""
        if a.layout.ne[0] != b.layout.ne[0]:
            raise GraphError(f"mul_mat: rows of {describe(a)} and {describe(b)} differ in length")
        check_batches("mul_mat", a, b)
        if a.layout.nb[0] > a.layout.nb[1] and a.layout.ne[1] > 1 and a.layout.ne[0] > 0:
            raise GraphError(f"mul_mat: {describe(a)} is transposed; make it contiguous first")
        return self.add_dense(GS_OP_MUL_MAT, GS_TYPE_F32, a.layout.ne[1], b.layout.ne[1], b.layout.ne[2], b.layout.ne[3],
                              (a, b))

    def mul_mat_id(self, Tensor experts not None, Tensor b not None, Tensor ids not None):
        """Each token's vectors in b times the weights of the experts chosen for this token (a mixture of experts).

        experts[k, m, n_expert], b[k, n_used or 1, n_tokens], ids i32 [n_used, n_tokens] -> f32 [m, n_used, n_tokens].
        ids[i, t] is the i-th expert of token t.
        """
        if ids.layout.type != GS_TYPE_I32:
            raise GraphError(f"mul_mat_id: ids {describe(ids)} must be i32")
        if experts.layout.ne[3] != 1 or b.layout.ne[3] != 1 or ids.layout.ne[2] != 1 or ids.layout.ne[3] != 1:
            raise GraphError(f"mul_mat_id: too many dimensions in {describe(experts)}, {describe(b)} or {describe(ids)}")
        if experts.layout.ne[0] != b.layout.ne[0]:
            raise GraphError(f"mul_mat_id: rows of {describe(experts)} and {describe(b)} differ in length")
        if ids.layout.ne[1] != b.layout.ne[2]:
            raise GraphError(f"mul_mat_id: {describe(b)} and ids {describe(ids)} differ in tokens")
        if b.layout.ne[1] == 0 or ids.layout.ne[0] % b.layout.ne[1]:
            raise GraphError(f"mul_mat_id: {b.ne[1]} rows of {describe(b)} do not spread over {ids.ne[0]} used experts")
        return self.add_dense(GS_OP_MUL_MAT_ID, GS_TYPE_F32, experts.layout.ne[1], ids.layout.ne[0], b.layout.ne[2], 1,
                              (experts, b, ids))
