/* ggml_sched/llama_cpp/graphs/forms.h -- how tensors look, each look kept once.
 *
 * A form is all of a tensor that a plan or a backend's answer depends on, but for its memory and what it names.  The
 * thousand tensors of a graph have a few dozen: comparing a tensor with its form reads what is at hand, every byte.
 * Forms are numbered as they come and stay until all are forgotten.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_FORMS_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_FORMS_H

#include <string.h>
#include "library.h"

/* Forms below which none are forgotten; above, once they are twice as many as were kept. */
#define GH_FEW_FORMS 128

typedef struct gh_form {
    int64_t shape[8];       /* ne, nb                                                               */
    int32_t op;
    int32_t params[16];     /* those that count: all, or the first of a family of ops, or none      */
    int32_t type;
    int32_t flags;
    int32_t counts[4];      /* bits of op and the first params that do                              */
    uint64_t view_offs;
    int64_t nbytes;         /* that ggml says of it                                                 */
} gh_form;

typedef struct gh_forms {
    const gh_ggml *lib;
    bool whole;             /* all parameters of ops count, and whose memory it is: backends look   */
    void *(*buffer_get_type)(void *buffer); /* of whole forms                                       */
    int (*buffer_get_usage)(void *buffer);
    int32_t n;
    int32_t n_kept;         /* forms that are looked through only where they are more               */
    int32_t room;
    gh_form *form;
    int32_t *place;         /* an open-addressing table of number + 1, `mask` + 1 places            */
    uint32_t mask;
} gh_forms;

/* Two words at once, as every processor that ggml runs on has them. */
typedef uint64_t gh_pair __attribute__((vector_size(16)));

_Static_assert(offsetof(gx_tensor, nb) == offsetof(gx_tensor, ne) + 32, "ne and nb are one run of 64 bytes");
_Static_assert(offsetof(gx_tensor, op_params) == offsetof(gx_tensor, op) + 4, "op and params are one run, as in forms");

/* The bits by which something differs: most differs in none, so that all is compared before anything is decided. */
typedef struct gh_difference {
    gh_pair pairs;
    uint64_t words;
} gh_difference;

static inline bool gh_is_some(gh_difference d)
{
    return (d.pairs[0] | d.pairs[1] | d.words) != 0;
}

/* The bits that differ in n pairs of words. */
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

/* Add those by which a tensor differs from a form. */
static inline void gh_compare_form(gh_difference *d, const gx_tensor *t, const gh_form *f, bool whole)
{
    gh_pair counts;
    memcpy(&counts, f->counts, sizeof counts);
    d->words |= (uint32_t)((f->type ^ t->type) | (f->flags ^ t->flags)) | (f->view_offs ^ t->view_offs);
    d->pairs |= gh_differing(f->shape, t->ne, 4) | (gh_differing(&f->op, &t->op, 1) & counts);
    if (whole) {
        d->pairs |= gh_differing(f->params, t->op_params, 4);
    }
}

static inline bool gh_is_of_form(const gx_tensor *t, const gh_form *f, bool whole)
{
    gh_difference d = {{0, 0}, 0};
    gh_compare_form(&d, t, f, whole);
    return !gh_is_some(d);
}

/* Whether two forms are of one type and shape. */
static inline bool gh_same_shape(const gh_form *a, const gh_form *b)
{
    return a == b || (a->type == b->type && memcmp(a->shape, b->shape, sizeof a->shape) == 0);
}

/* Whether two forms differ in shape and offset alone. */
static inline bool gh_same_kind(const gh_form *a, const gh_form *b)
{
    return a->type == b->type && a->flags == b->flags && a->op == b->op
        && memcmp(a->params, b->params, sizeof a->params) == 0;
}

void gh_forms_init(gh_forms *forms, const gh_ggml *lib, bool whole);

/* The number of a tensor's form, new if it is; -1 without memory. */
int32_t gh_form_of(gh_forms *forms, const gx_tensor *t);

/* Keep `n` forms: form i as number[i], ascending, or not at all where that is -1. */
void gh_forms_keep(gh_forms *forms, const int32_t *number, int32_t n);

void gh_forms_free(gh_forms *forms);

#endif
