# The C view of core/graph/context: what makes and owns tensors.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_layout
from ggml_sched.core.graph.tensor cimport ContextState, Tensor


cdef class ContextBase:
    cdef ContextState context_state     # shared with the tensors, so that no reference cycle arises
    cdef list _tensors                  # keeps its tensors alive until close()
    cdef object __weakref__
    cdef Tensor add_tensor(self, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs)
    cdef Tensor add_named(self, int op, gs_layout *layout, tuple src, Tensor view, int64_t view_offs, Tensor like,
                          int ending)
    cdef Tensor add_like(self, int op, Tensor a, tuple src, bint inplace=*)
    cdef Tensor add_dense(self, int op, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, tuple src)


cdef Tensor with_params(Tensor t, const int32_t *words, int n)
