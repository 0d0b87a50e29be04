# The C view of core/pack/api: packing from any 64-bit times, and the names of the packing methods.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_pack_result


cpdef str method_name(int method)
cdef const char *pack_method_word(int method) noexcept nogil
# `pack` for callers in C.  failed[0]: the index of the buffer that an error is about, or -1.
cdef int pack_any_times(int32_t n, const int64_t *lower, const int64_t *upper, const int64_t *size, int64_t capacity,
                        int64_t budget, int64_t *offsets, gs_pack_result *out, int32_t *failed) noexcept nogil
