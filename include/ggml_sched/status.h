/* ggml_sched/status.h -- the result codes that C parts of ggml-sched return.
 *
 * C code never raises, prints or aborts: it returns one of these, and one layer
 * of Cython turns it into a typed Python exception that names tensor, backend
 * and numbers.  Zero is success; every failure is negative.
 */
#ifndef GGML_SCHED_STATUS_H
#define GGML_SCHED_STATUS_H

typedef enum gs_status {
    GS_OK = 0,
    GS_NO_HOST_MEMORY = -1,   /* malloc of bookkeeping memory failed      */
    GS_OVERFLOW = -2,         /* a size or offset left the 64-bit range   */
    GS_OUT_OF_MEMORY = -3,    /* a tensor does not fit into its buffer    */
    GS_BAD_ARGUMENT = -4,     /* a caller's number makes no sense         */
    GS_BAD_PLACEMENT = -5,    /* a tensor lives where nobody may read it  */
    GS_UNSUPPORTED_OP = -6,   /* no backend runs this op                  */
    GS_HAZARD = -7            /* a plan would read or overwrite wrong data */
} gs_status;

#endif
