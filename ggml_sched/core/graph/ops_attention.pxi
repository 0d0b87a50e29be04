# Op methods of a Context for attention: masks, soft_max, rope, flash attention.

cdef dict _ROPE_MODES = {"normal": 0, "neox": 2, 0: 0, 2: 2}


cdef class AttentionOps(RecurrentOps):
    """Masks, soft_max, rope and flash attention."""

    def diag_mask_inf(self, Tensor a not None, n_past, bint inplace=False):
        """a[n, m, ...] with -inf where column > n_past + row: attention scores of keys that come after the query."""
        cdef int32_t word = whole32("diag_mask_inf", a, "n_past", n_past)
        return with_params(self.add_like(GS_OP_DIAG_MASK_INF, a, (a,), inplace), &word, 1)

    def diag_mask_zero(self, Tensor a not None, n_past, bint inplace=False):
        """a[n, m, ...] with 0 where column > n_past + row."""
        cdef int32_t word = whole32("diag_mask_zero", a, "n_past", n_past)
        return with_params(self.add_like(GS_OP_DIAG_MASK_ZERO, a, (a,), inplace), &word, 1)

    def soft_max(self, Tensor a not None, Tensor mask=None, scale=1.0, max_bias=0.0, Tensor sinks=None,
                 bint inplace=False):
        """soft_max over rows of a * scale + slope * mask.

        a[n_kv, n_rows, n_head, n_batch] is contiguous; mask (f32 or f16) [n_kv, >= n_rows, n_head / r, n_batch / s],
        for whole numbers r and s.  slope is 1, or with max_bias > 0 the ALiBi slope of the head (Press et al. 2021).
        sinks (f32 [n_head]) are one more score of each row, which only adds exp(sink) to the denominator.
        """
        return self.add_soft_max(a, mask, scale, max_bias, sinks, inplace)

    cdef Tensor add_soft_max(self, Tensor a, Tensor mask, scale, max_bias, Tensor sinks, bint inplace):
        cdef double bias = number("soft_max", a, "max_bias", max_bias)
        cdef int32_t[2] words
        if not layout_contiguous(&a.layout):
            raise GraphError(f"soft_max: {describe(a)} is not contiguous")
        check_mask("soft_max", mask, bias, a, a.layout.ne[0])
        check_sinks("soft_max", sinks, a.layout.ne[2])
        words[0], words[1] = f32_word("soft_max", a, "scale", scale), f32_word("soft_max", a, "max_bias", bias)
        return with_params(self.add_like(GS_OP_SOFT_MAX, a, cut_none((a, mask, sinks)), inplace), words, 2)

    def soft_max_ext(self, Tensor a not None, Tensor mask, scale, max_bias):
        """soft_max with the argument order of ggml's function of this name."""
        return self.add_soft_max(a, mask, scale, max_bias, None, False)

    def rope(self, Tensor a not None, Tensor positions not None, n_dims, mode="normal", Tensor freq_factors=None,
             n_ctx_orig=0, freq_base=10000.0, freq_scale=1.0, ext_factor=0.0,
             attn_factor=1.0, beta_fast=32.0, beta_slow=1.0, bint inplace=False):
        """Rotary position embedding of the first n_dims of each row (Su et al. 2021).

        a[n_embd_head, n_head, n_tokens, n_batch] f32 or f16; positions i32 [n_tokens]; freq_factors f32
        [>= n_dims / 2] divide the angles.  mode "normal" (pairs side by side) or "neox" (halves), or ggml's number.
        ext_factor, attn_factor, beta_fast, beta_slow: YaRN (Peng et al. 2023).
        """
        return self.add_rope(a, positions, n_dims, mode, freq_factors, n_ctx_orig, freq_base, freq_scale, ext_factor,
                             attn_factor, beta_fast, beta_slow, inplace)

    cdef Tensor add_rope(self, Tensor a, Tensor positions, n_dims, mode, Tensor freq_factors, n_ctx_orig,
                         freq_base, freq_scale, ext_factor, attn_factor, beta_fast,
                         beta_slow, bint inplace):
        cdef int n_rotated = whole32("rope", a, "n_dims", n_dims)
        cdef int32_t[11] words
        try:
            found = _ROPE_MODES.get(mode)
        except TypeError:       # a list, which has no hash
            found = None
        if found is None:
            raise GraphError(f'rope: mode for {describe(a)} is "normal" or "neox", not {shown(mode)}')
        if a.layout.type != GS_TYPE_F32 and a.layout.type != GS_TYPE_F16:
            raise GraphError(f"rope: {describe(a)} must be f32 or f16")
        if positions.layout.type != GS_TYPE_I32 or layout_n_elements(&positions.layout) != a.layout.ne[2]:
            raise GraphError(f"rope: positions {describe(positions)} must be i32 [{a.ne[2]}] for {describe(a)}")
        if n_rotated < 0 or n_rotated % 2 or n_rotated > a.layout.ne[0]:
            raise GraphError(f"rope: n_dims = {n_rotated} of rows of {describe(a)}")
        if freq_factors is not None and (freq_factors.layout.type != GS_TYPE_F32 or freq_factors.layout.ne[0] < n_rotated // 2):
            raise GraphError(f"rope: freq_factors {describe(freq_factors)} must be f32 [>= {n_rotated // 2}]")
        words[0], words[1], words[2], words[3] = 0, n_rotated, found, 0
        words[4], words[5] = whole32("rope", a, "n_ctx_orig", n_ctx_orig), f32_word("rope", a, "freq_base", freq_base)
        words[6] = f32_word("rope", a, "freq_scale", freq_scale)
        words[7] = f32_word("rope", a, "ext_factor", ext_factor)
        words[8] = f32_word("rope", a, "attn_factor", attn_factor)
        words[9], words[10] = f32_word("rope", a, "beta_fast", beta_fast), f32_word("rope", a, "beta_slow", beta_slow)
        return with_params(self.add_like(GS_OP_ROPE, a, cut_none((a, positions, freq_factors)), inplace), words, 11)

    def rope_ext(self, Tensor a not None, Tensor b not None, Tensor c, n_dims, mode, n_ctx_orig, freq_base,
                 freq_scale, ext_factor, attn_factor, beta_fast, beta_slow):
        """rope with the argument order of ggml's function of this name."""
        return self.add_rope(a, b, n_dims, mode, c, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor,
                             beta_fast, beta_slow, False)

    def flash_attn_ext(self, Tensor q not None, Tensor k not None, Tensor v not None, Tensor mask=None, scale=1.0,
                       max_bias=0.0, logit_softcap=0.0, Tensor sinks=None):
        """soft_max(scale * q k^T + mask) v without keeping the scores.

        q[d, n_rows, n_head, n_batch], k[d, n_kv, n_head_kv, n_batch], v[d_v, n_kv, n_head_kv, n_batch],
        mask (f16 or f32) [n_kv, >= n_rows, n_head / r, n_batch / s] -> f32 [d_v, n_head, n_rows, n_batch].
        """
        cdef double bias = number("flash_attn_ext", q, "max_bias", max_bias)
        cdef int32_t[3] words
        if not (q.layout.ne[0] == k.layout.ne[0] and k.layout.ne[1] == v.layout.ne[1] and k.layout.ne[2] == v.layout.ne[2]
                and q.layout.ne[3] == k.layout.ne[3] == v.layout.ne[3]):
            raise GraphError(f"flash_attn_ext: {describe(q)}, {describe(k)} and {describe(v)} do not fit together")
        check_batches("flash_attn_ext", k, q)
        check_mask("flash_attn_ext", mask, bias, q, k.layout.ne[1])
        check_sinks("flash_attn_ext", sinks, q.layout.ne[2])
        words[0] = f32_word("flash_attn_ext", q, "scale", scale)
        words[1] = f32_word("flash_attn_ext", q, "max_bias", bias)
        words[2] = f32_word("flash_attn_ext", q, "logit_softcap", logit_softcap)
        return with_params(self.add_dense(GS_OP_FLASH_ATTN_EXT, GS_TYPE_F32, v.layout.ne[0], q.layout.ne[2], q.layout.ne[1],
                                          q.layout.ne[3], cut_none((q, k, v, mask, sinks))), words, 3)


cdef class Context(AttentionOps):
    """Owns tensor metadata, no data.  The ops are its methods, named as ggml names them.

    Every op method takes and returns `Tensor`s, computes nothing, and raises
    `GraphError` naming the tensors and numbers that do not fit together.  Shapes in
    the docstrings are in ggml's order: `[ne0, ne1, ne2, ne3]`, innermost first.
    A context manager; `close()` makes its tensors unusable in new graphs.
    """
