/* ggml_sched/llama_cpp/graph/signature_compare.h -- compares one tensor with one item of a signature. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_SIGNATURE_COMPARE_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_SIGNATURE_COMPARE_H

#include "graph_signature.h"

/* How many tensors, and items, ahead of the compared one are prefetched. */
#define GH_AHEAD 6
#define GH_ITEMS_AHEAD 24

/* Make room for n ids, for n tensors, and for `listed` nodes or leafs.  False without memory. */
bool gh_signature_make_room(gh_signature *l, int32_t n, int32_t listed);
bool gh_signature_make_room_for_tensors(gh_signature *l, int32_t n);

/* Which memory a tensor has.  With full descriptors a view's memory is not compared: schedulers place views
 * themselves. */
static inline int32_t gh_memory_bits(const gx_tensor *t, bool full)
{
    if (full && t->view_src != NULL) {
        return 0;
    }
    return (t->data != NULL ? GH_HAS_DATA : 0) | (t->buffer != NULL ? GH_HAS_BUFFER : 0);
}

/* Whether a tensor still has data that no node computes. */
static inline bool gh_has_constant_data(const gx_tensor *t)
{
    return t->view_src == NULL && t->data != NULL;
}

/* The kind of memory that a buffer is, with the last result: consecutive tensors mostly share a buffer. */
typedef struct gh_buffers {
    const gh_descriptors *descriptors;
    void *last;
    uintptr_t kind;
} gh_buffers;

static inline uintptr_t gh_memory_kind(gh_buffers *b, const gx_tensor *t)
{
    if (t->view_src != NULL || t->buffer == NULL) {
        return 0;
    }
    if (t->buffer != b->last) {
        b->last = t->buffer;
        b->kind = (uintptr_t)b->descriptors->lib->backend_buffer_get_type(t->buffer)
            + (uintptr_t)b->descriptors->lib->backend_buffer_get_usage(t->buffer);
    }
    return b->kind;
}

/* Add the bits in which the tensors that t names differ from those of the item's ids in `named`. */
static inline void gh_compare_links(gh_difference *d, const gh_signature *l, gx_tensor *const *named,
                                    const gh_signature_item *item, const gx_tensor *t)
{
    static const gx_tensor nothing;
    _Static_assert(GH_N_REST % 2 == 0, "the rest is compared in pairs");
    d->words |= (uintptr_t)named[item->link[GH_ROOT]] ^ (uintptr_t)t->view_src;
    for (int k = 0; k < GH_ROOT; k++) {
        d->words |= (uintptr_t)named[item->link[k]] ^ (uintptr_t)t->src[k];
    }
    if (item->bits >> GH_REST_SHIFT == 0) {
        d->pairs |= gh_differing(&t->src[GH_ROOT], &nothing.src[GH_ROOT], GH_N_REST / 2);
    } else {
        const int32_t *rest = l->rest[(item->bits >> GH_REST_SHIFT) - 1];
        for (int k = GH_ROOT; k < GS_MAX_SRC; k++) {
            d->words |= (uintptr_t)named[rest[k - GH_ROOT]] ^ (uintptr_t)t->src[k];
        }
    }
}

/* Add the bits in which a tensor's memory differs from that of an id. */
static inline void gh_compare_memory(gh_difference *d, const gh_signature *l, int32_t id, const gx_tensor *t,
                                     gh_buffers *buffers, bool full)
{
    const int32_t bits = l->item[id].bits & (GH_HAS_DATA | GH_HAS_BUFFER);
    if (!full && bits == 0) {
        d->words |= (uintptr_t)t->data | (uintptr_t)t->buffer; /* the common case */
        return;
    }
    d->words |= (uint64_t)(bits ^ gh_memory_bits(t, full));
    if (full) {
        d->words |= l->memory[id] ^ gh_memory_kind(buffers, t);
    }
}

/* Whether a tensor matches an item and names the tensors of its ids in `named`. */
static inline bool gh_matches_item(const gh_signature *l, int32_t id, const gx_tensor *t, gx_tensor *const *named,
                              const gh_descriptor *descriptor, gh_buffers *buffers, bool full)
{
    gh_difference d = {{0, 0}, 0};
    gh_compare_links(&d, l, named, &l->item[id], t);
    gh_compare_descriptor(&d, t, descriptor, full);
    gh_compare_memory(&d, l, id, t, buffers, full);
    return !gh_is_some(d);
}

static inline int gh_place_of_source(int k)
{
    return k < GH_ROOT ? k : k + 1;
}

#endif
