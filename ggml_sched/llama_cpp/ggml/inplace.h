/* ggml_sched/llama_cpp/ggml/inplace.h -- which sources of an op ggml's kernels accept as destination.
 *
 * ggml computes a node in place of any source of the same layout, for the ops of its list (ggml_op_can_inplace).  This
 * table allows less, because a kernel that reads a source elsewhere than it writes would read what it has overwritten.
 * Of an elementwise op of two sources it allows either; of other ops only the source that the kernel reads in step with
 * its writes.  An op must also be in the library's own list, where the library exports that.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_INPLACE_H
#define GGML_SCHED_LLAMA_CPP_GGML_INPLACE_H

/* X(op, sources that may be its destination: bit k for source k) */
#define GH_INPLACE(X) \
    X(SCALE, 1)          \
    X(DIAG_MASK_ZERO, 1) \
    X(DIAG_MASK_INF, 1)  \
    X(ADD, 3)            \
    X(ADD_ID, 1)         \
    X(ADD1, 1)           \
    X(SUB, 3)            \
    X(MUL, 3)            \
    X(DIV, 3)            \
    X(SQR, 1)            \
    X(SQRT, 1)           \
    X(LOG, 1)            \
    X(FILL, 1)           \
    X(CLAMP, 1)          \
    X(ROPE, 1)           \
    X(ROPE_BACK, 1)      \
    X(SILU_BACK, 3)      \
    X(RMS_NORM, 1)       \
    X(RMS_NORM_BACK, 2)  \
    X(SOFT_MAX, 1)       \
    X(SOFT_MAX_BACK, 1)

#endif
