/* ggml_sched/status.h -- the result codes that C parts of ggml-sched return.
 *
 * C code never raises, prints or aborts: it returns one of these, and one layer
 * of Cython turns it into a typed Python exception that names tensor, backend
 * and numbers.  Zero is success; every failure is negative.
 */
#ifndef GGML_SCHED_STATUS_H
#define GGML_SCHED_STATUS_H

#include <stddef.h>
#include <stdint.h>

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

/* What a failure is about.  Fields that do not apply are -1, value and limit 0. */
typedef struct gs_error {
    int32_t status;             /* gs_status                                                        */
    int32_t tensor;             /* id                                                               */
    int32_t backend;            /* index                                                            */
    int32_t index;              /* where in the array that the message names                        */
    int64_t value;              /* what was found there, or the bytes that were asked for           */
    int64_t limit;              /* what it may be at most, or the bytes that there are              */
    char message[256];          /* one line of English, ends with a zero                            */
} gs_error;

/* How a code is called, NULL for a number that is none. */
static inline const char *gs_status_name(int status) {
    switch (status) {
    case GS_OK: return "ok";
    case GS_NO_HOST_MEMORY: return "no host memory";
    case GS_OVERFLOW: return "overflow";
    case GS_OUT_OF_MEMORY: return "out of memory";
    case GS_BAD_ARGUMENT: return "bad argument";
    case GS_BAD_PLACEMENT: return "bad placement";
    case GS_UNSUPPORTED_OP: return "unsupported op";
    case GS_HAZARD: return "hazard";
    default: return NULL;
    }
}

#endif
