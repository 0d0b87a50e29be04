/* ggml_sched/llama_cpp/graph/tensor_descriptors.c -- the hash table by which a tensor's descriptor is found.  See
 * tensor_descriptors.h. */
#include "arrays.h"
#include "tensor_descriptors.h"

#include <stdlib.h>

void gh_descriptors_init(gh_descriptors *descriptors, const gh_ggml *lib, bool full)
{
    memset(descriptors, 0, sizeof *descriptors);
    descriptors->lib = lib;
    descriptors->full = full;
    descriptors->n_kept = GH_FEW_DESCRIPTORS;
}

/* Copy ne and nb of a tensor, which lie side by side there. */
static inline void shape_of(int64_t shape[8], const gx_tensor *t)
{
    memcpy(shape, (const char *)t + offsetof(gx_tensor, ne), 8 * sizeof *shape);
}

static uint32_t hash_of(const int64_t shape[8], int32_t type, int32_t op, uint64_t view_offs)
{
    uint64_t h = gs_mix((uint64_t)(uint32_t)op << 32 | (uint32_t)type, view_offs);
    for (int k = 0; k < 8; k++) {
        h = gs_mix(h, (uint64_t)shape[k]);
    }
    return (uint32_t)(h >> 32);
}

static void fill_table(const gh_descriptors *descriptors, int32_t *bucket, uint32_t mask)
{
    for (int32_t i = 0; i < descriptors->n; i++) {
        const gh_descriptor *f = &descriptors->descriptor[i];
        uint32_t at = hash_of(f->shape, f->type, f->op, f->view_offs) & mask;
        while (bucket[at] != 0) {
            at = (at + 1) & mask;
        }
        bucket[at] = i + 1;
    }
}

/* Make room for one more descriptor.  The hash table has at least four buckets for each descriptor that there is room
 * for. */
static bool make_room(gh_descriptors *descriptors)
{
    const int32_t room = descriptors->room > 0 ? descriptors->room + descriptors->room / 2 : 128;
    uint32_t mask = 511;
    int32_t *bucket;
    if (descriptors->n < descriptors->room) {
        return true;
    }
    if (!gh_grow(&descriptors->descriptor, sizeof *descriptors->descriptor, room)) {
        return false;
    }
    while (mask < 4 * (uint32_t)room - 1) {
        mask = 2 * mask + 1;
    }
    bucket = calloc((size_t)mask + 1, sizeof *bucket);
    if (bucket == NULL) {
        return false;
    }
    fill_table(descriptors, bucket, mask);
    free(descriptors->bucket);
    descriptors->bucket = bucket;
    descriptors->mask = mask;
    descriptors->room = room;
    return true;
}

int32_t gh_descriptor_intern(gh_descriptors *descriptors, const gx_tensor *t)
{
    int64_t shape[8];
    uint32_t at;
    gh_descriptor *f;
    if (!make_room(descriptors)) {
        return -1;
    }
    shape_of(shape, t);
    at = hash_of(shape, t->type, t->op, t->view_offs) & descriptors->mask;
    for (; descriptors->bucket[at] != 0; at = (at + 1) & descriptors->mask) {
        if (gh_has_descriptor(t, &descriptors->descriptor[descriptors->bucket[at] - 1], descriptors->full)) {
            return descriptors->bucket[at] - 1;
        }
    }
    f = &descriptors->descriptor[descriptors->n];
    memset(f, 0, sizeof *f);
    memcpy(f->shape, shape, sizeof f->shape);
    f->view_offs = t->view_offs;
    f->type = t->type;
    f->op = t->op;
    f->flags = t->flags;
    f->counts[0] = -1;
    f->counts[1] = gh_is_of_family(descriptors->lib, t->op) ? -1 : 0;
    f->params[0] = t->op_params[0] & f->counts[1];
    if (descriptors->full) {
        memcpy(f->params, t->op_params, sizeof f->params);
    }
    f->nbytes = (int64_t)descriptors->lib->nbytes(t);
    descriptors->bucket[at] = ++descriptors->n;
    return descriptors->n - 1;
}

void gh_descriptors_keep(gh_descriptors *descriptors, const int32_t *number, int32_t n)
{
    for (int32_t i = 0; i < descriptors->n; i++) {
        if (number[i] >= 0) {
            descriptors->descriptor[number[i]] = descriptors->descriptor[i];
        }
    }
    descriptors->n = n;
    descriptors->n_kept = 2 * n > GH_FEW_DESCRIPTORS ? 2 * n : GH_FEW_DESCRIPTORS;
    memset(descriptors->bucket, 0, ((size_t)descriptors->mask + 1) * sizeof *descriptors->bucket);
    fill_table(descriptors, descriptors->bucket, descriptors->mask);
}

void gh_descriptors_free(gh_descriptors *descriptors)
{
    free(descriptors->descriptor);
    free(descriptors->bucket);
    memset(descriptors, 0, sizeof *descriptors);
}
