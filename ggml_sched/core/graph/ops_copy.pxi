# Op methods of a Context that move elements: rows, copies, repetition, joining, padding.

cdef class CopyOps(MatrixOps):
    """Rows, copies, repetition, joining, padding."""

    def get_rows(self, Tensor a not None, Tensor ids not None):
        """The rows of a[n, m, p, q] with the indices in ids (i32 [k, p, q]) -> [n, k, p, q], f32 (i32 for i32 rows)."""
        if ids.layout.type != GS_TYPE_I32:
            raise GraphError(f"get_rows: ids {describe(ids)} must be i32")
        if a.layout.ne[2] != ids.layout.ne[1] or a.layout.ne[3] != ids.layout.ne[2] or ids.layout.ne[3] != 1:
            raise GraphError(f"get_rows: {describe(a)} and ids {describe(ids)} do not fit together")
        return self.add_dense(GS_OP_GET_ROWS, GS_TYPE_I32 if a.layout.type == GS_TYPE_I32 else GS_TYPE_F32, a.layout.ne[0],
                              ids.layout.ne[0], ids.layout.ne[1], ids.layout.ne[2], (a, ids))

    def set_rows(self, Tensor a not None, Tensor b not None, Tensor ids not None):
        """Write the rows of b (f32 [n, k, p, q]) to the rows of a[n, m, p, q] with the indices in ids; a view of a.

        ids is i64 or i32 [k, p / r, q / s], for whole numbers r and s.
        """
        cdef gs_layout layout = a.layout
        if ids.layout.type != GS_TYPE_I64 and ids.layout.type != GS_TYPE_I32:
            raise GraphError(f"set_rows: ids {describe(ids)} must be i64 or i32")
        if b.layout.type != GS_TYPE_F32:
            raise GraphError(f"set_rows: rows {describe(b)} must be f32")
        if not (a.layout.ne[0] == b.layout.ne[0] and a.layout.ne[2] == b.layout.ne[2] and a.layout.ne[3] == b.layout.ne[3]
                and b.layout.ne[1] == ids.layout.ne[0] and ids.layout.ne[3] == 1
                and ids.layout.ne[1] > 0 and b.layout.ne[2] % ids.layout.ne[1] == 0
                and ids.layout.ne[2] > 0 and b.layout.ne[3] % ids.layout.ne[2] == 0):
            raise GraphError(f"set_rows: {describe(a)}, rows {describe(b)} and ids {describe(ids)} do not fit together")
        return self.add_named(GS_OP_SET_ROWS, &layout, (b, ids, a), a, 0, a, ENDS_VIEW)

    def set(self, Tensor a not None, Tensor b not None, nb1, nb2, nb3, offset, bint inplace=False):
        """a, with b written into it from byte `offset` on, at the byte strides nb1..nb3."""
        cdef gs_layout window = b.layout
        cdef int64_t start = whole("set", a, "offset", offset)
        cdef int64_t end
        cdef int64_t[4] given
        cdef int32_t[5] words
        cdef int i
        if a.layout.type != b.layout.type:
            raise GraphError(f"set: {describe(a)} and {describe(b)} differ in type")
        if not layout_contiguous(&a.layout) or not layout_contiguous(&b.layout):
            raise GraphError(f"set: {describe(a)} and {describe(b)} must be contiguous")
        window.nb[0] = traits[a.layout.type].type_size
        window.nb[1], window.nb[2] = whole("set", a, "nb1", nb1), whole("set", a, "nb2", nb2)
        window.nb[3] = whole("set", a, "nb3", nb3)
        if (start < 0 or layout_set_nbytes(&window) != GS_OK or gs_checked_add(start, window.nbytes, &end) != GS_OK
                or end > a.layout.nbytes):
            raise GraphError(f"set: {describe(b)} at offset {offset} with strides {nb1}, {nb2}, {nb3} "
                             f"does not lie inside {describe(a)}")
        given[0], given[1], given[2], given[3] = window.nb[1], window.nb[2], window.nb[3], start
        for i in range(4):
            if given[i] > INT32_MAX:
                raise GraphError(f"set: stride or offset {given[i]} is beyond int32")
            words[i] = <int32_t>given[i]
        words[4] = inplace
        return with_params(self.add_like(GS_OP_SET, a, (a, b), inplace), words, 5)

    def dup(self, Tensor a not None):
        """A contiguous copy."""
        return self.add_like(GS_OP_DUP, a, (a,))

    def cpy(self, Tensor a not None, Tensor b not None):
        """Write a into b, which has as many elements, converting types and layouts; returns a view of b."""
        cdef gs_layout layout = b.layout
        cdef Tensor t
        if layout_n_elements(&a.layout) != layout_n_elements(&b.layout):
            raise GraphError(f"cpy: {describe(a)} and {describe(b)} differ in number of elements")
        if not (b.endings or b._name):
            return self.add_named(GS_OP_CPY, &layout, (a, b), b, 0, a, ENDS_COPY)
        t = self.add_tensor(GS_OP_CPY, &layout, (a, b), b, 0)
        t._name = bounded_name(f"{b.full_name()} (copy of {a.full_name()})")
        return t

    def cont(self, Tensor a not None, ne=None):
        """A contiguous copy, with the extents `ne` when given."""
        cdef int64_t[4] extents
        cdef Tensor t
        if ne is None:
            extents = a.layout.ne
        else:
            read_ne(ne, extents, "cont", a)
            check_same_count("cont", a, extents)
        t = self.add_dense(GS_OP_CONT, a.layout.type, extents[0], extents[1], extents[2], extents[3], (a,))
        t.name_after(a, ENDS_CONT)
        return t

    def cast(self, Tensor a not None, type):
        """A contiguous copy as `type`."""
        cdef gs_layout layout
        fill_dense(&layout, GS_OP_CPY, type_id(type), a.layout.ne[0], a.layout.ne[1], a.layout.ne[2], a.layout.ne[3])
        return self.add_named(GS_OP_CPY, &layout, (a,), None, 0, a, ENDS_COPY)

    def repeat(self, Tensor a not None, Tensor like not None):
        """a repeated to the shape of `like`."""
        if not layout_can_repeat(&a.layout, &like.layout):
            raise GraphError(f"repeat: {describe(a)} does not repeat to {describe(like)}")
        return self.add_dense(GS_OP_REPEAT, a.layout.type, like.layout.ne[0], like.layout.ne[1], like.layout.ne[2],
                              like.layout.ne[3], (a,))

    def concat(self, Tensor a not None, Tensor b not None, dim):
        """a and b joined along dimension `dim`."""
        cdef int64_t ne[4]
        cdef int i
        cdef int32_t axis = whole32("concat", a, "dim", dim)
        if not 0 <= axis < GS_MAX_DIMS:
            raise GraphError(f"concat: dimension {axis} of {describe(a)} and {describe(b)} is not in 0..3")
        if a.layout.type != b.layout.type:
            raise GraphError(f"concat: {describe(a)} and {describe(b)} differ in type")
        for i in range(GS_MAX_DIMS):
            ne[i] = a.layout.ne[i]
            if i == axis:
                if gs_checked_add(a.layout.ne[i], b.layout.ne[i], &ne[i]) != GS_OK:
                    raise GraphError(f"concat: dimension {axis} of {describe(a)} and {describe(b)} overflows")
            elif a.layout.ne[i] != b.layout.ne[i]:
                raise GraphError(f"concat: {describe(a)} and {describe(b)} differ in dimension {i}")
        return with_params(self.add_dense(GS_OP_CONCAT, a.layout.type, ne[0], ne[1], ne[2], ne[3], (a, b)), &axis, 1)

    def pad(self, Tensor a not None, p0, p1=0, p2=0, p3=0):
        """a (f32) with p0 zeros appended along dimension 0, p1 along dimension 1, and so on."""
        cdef int64_t ne[4]
        cdef int64_t count
        cdef int32_t[8] words
        cdef int i
        if a.layout.type != GS_TYPE_F32:
            raise GraphError(f"pad: {describe(a)} must be f32")
        pads = (whole("pad", a, "p0", p0), whole("pad", a, "p1", p1), whole("pad", a, "p2", p2),
                whole("pad", a, "p3", p3))
        for i in range(GS_MAX_DIMS):
            count = pads[i]
            if not 0 <= count <= INT32_MAX or gs_checked_add(a.layout.ne[i], count, &ne[i]) != GS_OK:
                raise GraphError(f"pad: {count} along dimension {i} of {describe(a)}")
            words[2 * i], words[2 * i + 1] = 0, <int32_t>count      # ggml stores (left, right) for each dimension
        return with_params(self.add_dense(GS_OP_PAD, GS_TYPE_F32, ne[0], ne[1], ne[2], ne[3], (a,)), words, 8)
