/* ggml_sched/status.h -- the status codes that C code of ggml-sched returns.
 *
 * C code never raises, prints or aborts: it returns a status, from which one layer of Cython makes a typed Python
 * exception with tensor, backend and numbers.  Zero is success; every failure is negative.
 */
#ifndef GGML_SCHED_STATUS_H
#define GGML_SCHED_STATUS_H

#include <stddef.h>
#include <stdint.h>

typedef enum gs_status {
    GS_OK = 0,
    GS_NO_HOST_MEMORY = -1,   /* malloc failed                                                      */
    GS_OVERFLOW = -2,         /* a size or offset does not fit in 64 bits                           */
    GS_OUT_OF_MEMORY = -3,    /* a tensor exceeds the largest buffer, or a backend has no memory    */
    GS_BAD_ARGUMENT = -4,     /* an argument is invalid                                             */
    GS_BAD_PLACEMENT = -5,    /* a tensor is in memory that the backend of its reader cannot read   */
    GS_UNSUPPORTED_OP = -6,   /* no backend computes this op                                        */
    GS_HAZARD = -7,           /* data would be wrong: never set, or overwritten; or object in use   */
    GS_BACKEND_FAILED = -8    /* a function of a backend failed                                     */
} gs_status;

/* The description of a failure.  A field that has no meaning for it is -1; `value` and `limit` may be 0 then. */
typedef struct gs_error {
    int32_t status;             /* gs_status                                                        */
    int32_t tensor;             /* id of a tensor                                                   */
    int32_t backend;            /* index of a backend                                               */
    int32_t index;              /* position in the array that the message names                     */
    int64_t value;              /* the wrong value, or the number of bytes requested                */
    int64_t limit;              /* the largest allowed value, or the number of bytes available      */
    char message[256];          /* one line of English, zero-terminated                             */
} gs_error;

/* The name of a status, NULL for an unknown number. */
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
    case GS_BACKEND_FAILED: return "backend failed";
    default: return NULL;
    }
}

#endif
