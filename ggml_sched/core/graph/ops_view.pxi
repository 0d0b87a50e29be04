# Op methods of a Context: views, which share their root's memory and compute nothing.

cdef class ViewOps(CopyOps):
    """Views, which share their root's memory and compute nothing."""

    cdef Tensor window(self, Tensor a, int64_t *ne, int64_t *nb, int64_t offset):
        """A VIEW of a with extents ne[4] and strides nb[4] at byte offset."""
        cdef gs_layout layout
        cdef int32_t[2] words
        cdef int i
        layout.type = a.layout.type
        for i in range(GS_MAX_DIMS):
            layout.ne[i] = ne[i]
            layout.nb[i] = nb[i]
            if ne[i] < 0 or nb[i] < 0:
                raise GraphError(f"view: extent {ne[i]} with stride {nb[i]} in dimension {i} of {describe(a)}")
        if ne[0] % traits[layout.type].block_size:
            raise GraphError(f"view: rows of {ne[0]} elements of {describe(a)} do not hold whole blocks")
        if layout_set_nbytes(&layout) != GS_OK:
            raise GraphError(f"view: the extents of a view of {describe(a)} overflow")
        memcpy(words, &offset, sizeof(words))
        return with_params(self.add_named(GS_OP_VIEW, &layout, (a,), a, offset, a, ENDS_VIEW), words, 2)

    def view_1d(self, Tensor a not None, ne0, offset=0):
        """A view of ne0 elements of a, from byte `offset`."""
        return self.view(a, ne0, 1, 1, 1, None, None, None, offset)

    def view_2d(self, Tensor a not None, ne0, ne1, nb1, offset=0):
        """A view [ne0, ne1] of a with row stride nb1 bytes, from byte `offset`."""
        return self.view(a, ne0, ne1, 1, 1, nb1, None, None, offset)

    def view_3d(self, Tensor a not None, ne0, ne1, ne2, nb1, nb2, offset=0):
        """A view [ne0, ne1, ne2] of a with byte strides nb1 and nb2, from byte `offset`."""
        return self.view(a, ne0, ne1, ne2, 1, nb1, nb2, None, offset)

    def view_4d(self, Tensor a not None, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset=0):
        """A view [ne0, ne1, ne2, ne3] of a with byte strides nb1..nb3 (None: dense), from byte `offset`."""
        return self.view(a, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset)

    cdef Tensor view(self, Tensor a, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset):
        """A view [ne0, ne1, ne2, ne3] of a with byte strides nb1..nb3 (None: dense), from byte `offset`."""
        cdef int64_t[4] ne
        cdef int64_t[4] nb
        cdef int64_t row
        cdef int i
        ne[0], ne[1] = whole("view", a, "ne0", ne0), whole("view", a, "ne1", ne1)
        ne[2], ne[3] = whole("view", a, "ne2", ne2), whole("view", a, "ne3", ne3)
        if ne[0] < 0 or gs_checked_mul(ne[0] // traits[a.layout.type].block_size, traits[a.layout.type].type_size, &row) != GS_OK:
            raise GraphError(f"view: rows of {ne[0]} elements of {describe(a)}")
        nb[0] = traits[a.layout.type].type_size
        nb[1] = row if nb1 is None else whole("view", a, "nb1", nb1)
        for i in range(2, GS_MAX_DIMS):
            given = nb2 if i == 2 else nb3
            if given is not None:
                nb[i] = whole("view", a, "nb2" if i == 2 else "nb3", given)
            elif ne[i - 1] < 0 or nb[i - 1] < 0:
                nb[i] = 0               # `window`, called below, refuses such extents, and its error names the tensor
            elif gs_checked_mul(nb[i - 1], ne[i - 1], &nb[i]) != GS_OK:
                raise GraphError(f"view: the extents of a view of {describe(a)} overflow")
        return self.window(a, ne, nb, whole("view", a, "offset", offset))

    def reshape(self, Tensor a not None, *ne):
        """A view of the contiguous tensor a with one to four other extents, innermost first."""
        if len(ne) == 1 and hasattr(ne[0], "__iter__") and not PyIndex_Check(ne[0]):
            ne = tuple(ne[0])
        elif len(ne) == 1:
            return self.reshaped(a, ne[0])
        return self.reshaped(a, ne)

    cdef Tensor reshaped(self, Tensor a, object ne):
        """A view of the contiguous tensor a with the extents in `ne`, or in the one number `ne`."""
        cdef gs_layout layout
        if not layout_contiguous(&a.layout):
            raise GraphError(f"reshape: {describe(a)} is not contiguous")
        read_ne(ne, layout.ne, "reshape", a)
        check_same_count("reshape", a, layout.ne)
        fill_dense(&layout, GS_OP_RESHAPE, a.layout.type, layout.ne[0], layout.ne[1], layout.ne[2], layout.ne[3])
        return self.add_named(GS_OP_RESHAPE, &layout, (a,), a, 0, a, ENDS_RESHAPED)

    def reshape_1d(self, Tensor a not None, ne0):
        """reshape to one dimension."""
        return self.reshape(a, ne0)

    def reshape_2d(self, Tensor a not None, ne0, ne1):
        """reshape to two dimensions."""
        return self.reshaped(a, (ne0, ne1))

    def reshape_3d(self, Tensor a not None, ne0, ne1, ne2):
        """reshape to three dimensions."""
        return self.reshaped(a, (ne0, ne1, ne2))

    def reshape_4d(self, Tensor a not None, ne0, ne1, ne2, ne3):
        """reshape to four dimensions."""
        return self.reshaped(a, (ne0, ne1, ne2, ne3))

    def permute(self, Tensor a not None, axis0, axis1, axis2, axis3):
        """A view of a; dimension i of a becomes dimension axis_i of the view."""
        cdef gs_layout layout = a.layout
        cdef int32_t[4] axes
        cdef int i, seen = 0
        axes[0], axes[1] = whole32("permute", a, "axis0", axis0), whole32("permute", a, "axis1", axis1)
        axes[2], axes[3] = whole32("permute", a, "axis2", axis2), whole32("permute", a, "axis3", axis3)
        for i in range(GS_MAX_DIMS):
            if 0 <= axes[i] < GS_MAX_DIMS:
                seen |= 1 << axes[i]
        if seen != 0b1111:
            raise GraphError(f"permute: {(axes[0], axes[1], axes[2], axes[3])} is not an order of the dimensions 0..3")
        if traits[a.layout.type].block_size > 1 and axes[0] != 0:
            raise GraphError(f"permute: the blocks of {describe(a)} lie along dimension 0")
        for i in range(GS_MAX_DIMS):
            layout.ne[axes[i]] = a.layout.ne[i]
            layout.nb[axes[i]] = a.layout.nb[i]
        return with_params(self.add_named(GS_OP_PERMUTE, &layout, (a,), a, 0, a, ENDS_PERMUTED), axes, 4)

    def transpose(self, Tensor a not None):
        """A view of a with dimensions 0 and 1 exchanged."""
        cdef gs_layout layout = a.layout
        if traits[a.layout.type].block_size > 1:
            raise GraphError(f"transpose: the blocks of {describe(a)} lie along dimension 0")
        layout.ne[0], layout.ne[1] = a.layout.ne[1], a.layout.ne[0]
        layout.nb[0], layout.nb[1] = a.layout.nb[1], a.layout.nb[0]
        return self.add_named(GS_OP_TRANSPOSE, &layout, (a,), a, 0, a, ENDS_TRANSPOSED)
