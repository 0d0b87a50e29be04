/* kernels.h -- all kernels but matrix products, compiled for the instruction set GS_LEVEL, and the function GS_ENTRY,
 * which appends the calls of a node (gs_build_node in build.h).
 *
 * Included by kernels_portable.c, kernels_avx2.c and kernels_avx512.c, which define GS_LEVEL and GS_ENTRY.
 */
#include "build.h"
#include "convert.h"
#include "op_rules.h"

#include "vector.h"
#include "rows.h"
#include "elementwise.h"
#include "norm.h"
#include "copies.h"
#include "rope.h"
#include "sort.h"
#include "attention.h"
#include "ssm.h"

int GS_ENTRY(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    const gs_layout *a = node->n_src > 0 ? &node->src[0]->layout : &node->layout;
    int64_t width = a->ne[0], spare = a->nb[0] != 4 || node->layout.nb[0] != 4 ? width : 0;
    /* clang-format off */
    switch (node->op) {
    case GS_OP_ADD: case GS_OP_SUB: case GS_OP_MUL: case GS_OP_DIV: case GS_OP_ADD1: case GS_OP_ADD_ID:
    case GS_OP_SCALE: case GS_OP_SQR: case GS_OP_SQRT: case GS_OP_LOG: case GS_OP_CLAMP: case GS_OP_UNARY:
    case GS_OP_GLU: return build_elementwise(node, position, to);
    case GS_OP_RMS_NORM: case GS_OP_NORM: case GS_OP_L2_NORM:
        return add_rows(node, position, to, run_norm, width, spare, ROW_WORK);
    case GS_OP_SUM_ROWS: case GS_OP_MEAN: return add_rows(node, position, to, run_sum_rows, width, spare, ROW_WORK);
    case GS_OP_DIAG_MASK_INF: case GS_OP_DIAG_MASK_ZERO:
        return add_rows(node, position, to, run_diag_mask, width, 0, ROW_WORK);
    case GS_OP_SOFT_MAX:
        return masks_are_dense(node->n_src > 1 ? node->src[1] : NULL, node->n_src > 2 ? node->src[2] : NULL)
            ? add_rows(node, position, to, run_soft_max, width, spare, ROW_WORK / 2) : GS_UNSUPPORTED_OP;
    case GS_OP_CPY: case GS_OP_DUP: case GS_OP_CONT: return build_copy(node, position, to);
    case GS_OP_CONCAT: return build_concat(node, position, to);
    case GS_OP_REPEAT: return add_rows(node, position, to, run_repeat, node->layout.ne[0], 0, COPY_WORK);
    case GS_OP_GET_ROWS: return build_get_rows(node, position, to);
    case GS_OP_SET_ROWS: return build_set_rows(node, position, to);
    case GS_OP_ROPE: return build_rope(node, position, to, tables);
    case GS_OP_ARGSORT: case GS_OP_TOP_K: return build_sort(node, position, to);
    case GS_OP_ARGMAX: return build_argmax(node, position, to);
    case GS_OP_FLASH_ATTN_EXT: return build_attention(node, position, to, tables);
    case GS_OP_SSM_CONV: return build_ssm_conv(node, position, to);
    case GS_OP_SSM_SCAN: return build_ssm_scan(node, position, to);
    default: return GS_UNSUPPORTED_OP;
    }
    /* clang-format on */
}
