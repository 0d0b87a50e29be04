/* ggml_sched/llama_cpp/graph/tensor_descriptors.h -- descriptors of ggml's tensors, each kept once and numbered.
 *
 * A descriptor is everything that a plan, or a backend's answer to a support query, depends on of one tensor, except
 * its memory and the tensors that it names.  Signatures (graph_signature.h) hold descriptors by number, so that the
 * plan cache compares graphs quickly: the thousands of tensors of a graph have a few dozen descriptors, and those stay
 * in the processor's cache.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_TENSOR_DESCRIPTORS_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_TENSOR_DESCRIPTORS_H

#include <string.h>
#include "library.h"

/* Unused descriptors are removed only when there are more than this many descriptors, and more than twice as many as
 * were left by the last removal. */
#define GH_FEW_DESCRIPTORS 128

typedef struct gh_descriptor {
    int64_t shape[8];       /* ne and nb, as in the tensor                                          */
    int32_t op;
    int32_t params[16];     /* full descriptors: all op parameters; others: the first of UNARY and GLU, else 0 */
    int32_t type;
    int32_t flags;
    int32_t counts[4];      /* masks of op and the first three params: bits that are 0 here are not compared */
    uint64_t view_offs;     /* bytes                                                                */
    int64_t nbytes;         /* ggml_nbytes of the tensor                                            */
} gh_descriptor;

typedef struct gh_descriptors {
    const gh_ggml *lib;
    bool full;              /* under a scheduler: descriptors have all op parameters, as support queries need them */
    int32_t n;
    int32_t n_kept;         /* descriptors are removed only when n is larger than this (GH_FEW_DESCRIPTORS) */
    int32_t room;
    gh_descriptor *descriptor;
    int32_t *bucket;         /* [mask + 1] hash table of descriptors: number + 1, or 0: empty        */
    uint32_t mask;
} gh_descriptors;

/* Two words of 64 bits, compared in one vector operation. */
typedef uint64_t gh_pair __attribute__((vector_size(16)));

_Static_assert(offsetof(gx_tensor, nb) == offsetof(gx_tensor, ne) + 32, "ne and nb are one run of 64 bytes");
_Static_assert(offsetof(gx_tensor, op_params) == offsetof(gx_tensor, op) + 4, "op and params are one run");

/* The bits in which a tensor differs from what is expected.  Nearly always there are none, so everything is compared
 * before the first branch. */
typedef struct gh_difference {
    gh_pair pairs;
    uint64_t words;
} gh_difference;

static inline bool gh_is_some(gh_difference d)
{
    return (d.pairs[0] | d.pairs[1] | d.words) != 0;
}

/* The bits in which two arrays of n pairs differ, all pairs combined by "or". */
static inline gh_pair gh_differing(const void *a, const void *b, int n)
{
    gh_pair found = {0, 0};
    for (int i = 0; i < n; i++) {
        gh_pair x, y;
        memcpy(&x, (const char *)a + 16 * i, 16);
        memcpy(&y, (const char *)b + 16 * i, 16);
        found |= x ^ y;
    }
    return found;
}

/* Add to *d the bits in which a tensor differs from a descriptor; `full`: whether all op parameters are compared. */
static inline void gh_compare_descriptor(gh_difference *d, const gx_tensor *t, const gh_descriptor *f, bool full)
{
    gh_pair counts;
    memcpy(&counts, f->counts, sizeof counts);
    d->words |= (uint32_t)((f->type ^ t->type) | (f->flags ^ t->flags)) | (f->view_offs ^ t->view_offs);
    d->pairs |= gh_differing(f->shape, t->ne, 4) | (gh_differing(&f->op, &t->op, 1) & counts);
    if (full) {
        d->pairs |= gh_differing(f->params, t->op_params, 4);
    }
}

static inline bool gh_has_descriptor(const gx_tensor *t, const gh_descriptor *f, bool full)
{
    gh_difference d = {{0, 0}, 0};
    gh_compare_descriptor(&d, t, f, full);
    return !gh_is_some(d);
}

/* Whether two descriptors have the same type and shape. */
static inline bool gh_same_shape(const gh_descriptor *a, const gh_descriptor *b)
{
    return a == b || (a->type == b->type && memcmp(a->shape, b->shape, sizeof a->shape) == 0);
}

/* Whether two descriptors agree in type, flags, op and sub-op; shapes, view offsets and other parameters may differ. */
static inline bool gh_same_kind(const gh_descriptor *a, const gh_descriptor *b)
{
    return a->type == b->type && a->flags == b->flags && a->op == b->op
        && ((a->params[0] ^ b->params[0]) & a->counts[1]) == 0;
}

void gh_descriptors_init(gh_descriptors *descriptors, const gh_ggml *lib, bool full);

/* The number of a tensor's descriptor, which is added if it is new; -1 without memory. */
int32_t gh_descriptor_intern(gh_descriptors *descriptors, const gx_tensor *t);

/* Keep n descriptors: descriptor i gets the number number[i], or is removed where that is -1.  The numbers of those
 * that stay are 0 to n - 1, in the same order. */
void gh_descriptors_keep(gh_descriptors *descriptors, const int32_t *number, int32_t n);

void gh_descriptors_free(gh_descriptors *descriptors);

#endif
