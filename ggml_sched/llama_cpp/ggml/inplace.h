/* ggml_sched/llama_cpp/ggml/inplace.h -- which sources ggml's kernels allow as their destination: the table of them.
 *
 * ggml lets a node take over any source of the same layout for the ops of its list (ggml_op_can_inplace).  Ours is
 * shorter: elementwise products and sums may take either side; what reads a source once more after it bits begun to
 * write, or reads rows in another order, only the one that its kernels go through in step.  An op is asked for in the
 * library's own list, too, where that is exported.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_INPLACE_H
#define GGML_SCHED_LLAMA_CPP_GGML_INPLACE_H

/* X(name, sources: bits) */
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
