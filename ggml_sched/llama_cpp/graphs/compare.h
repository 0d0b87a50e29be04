/* ggml_sched/llama_cpp/graphs/compare.h -- a tensor beside an id: its form, what it names, whose memory it has. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_COMPARE_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_COMPARE_H

#include "looks.h"

/* Tensors from one that is compared to one that is fetched. */
#define GH_AHEAD 6
#define GH_MARKS_AHEAD 24

/* Room for ids, for their tensors alone, and for nodes or leafs.  False without memory. */
bool gh_looks_make_room(gh_looks *l, int32_t n, int32_t listed);
bool gh_looks_make_room_for_tensors(gh_looks *l, int32_t n);

/* Whether a tensor has memory.  Where plans are of backends, too, views get their root's, and that they have it is no
 * news. */
static inline int32_t gh_memory_of(const gx_tensor *t, bool whole)
{
    if (whole && t->view_src != NULL) {
        return 0;
    }
    return (t->data != NULL ? GH_HAS_DATA : 0) | (t->buffer != NULL ? GH_HAS_BUFFER : 0);
}

/* Whether a tensor that had data and was not computed is so still. */
static inline bool gh_is_still(const gx_tensor *t)
{
    return t->view_src == NULL && t->data != NULL;
}

/* What sort of memory a buffer is: many tensors in a row have the same. */
typedef struct gh_buffers {
    const gh_forms *forms;
    void *last;
    uintptr_t sort;
} gh_buffers;

static inline uintptr_t gh_sort_of(gh_buffers *b, const gx_tensor *t)
{
    if (t->view_src != NULL || t->buffer == NULL) {
        return 0;
    }
    if (t->buffer != b->last) {
        b->last = t->buffer;
        b->sort = (uintptr_t)b->forms->buffer_get_type(t->buffer) + (uintptr_t)b->forms->buffer_get_usage(t->buffer);
    }
    return b->sort;
}

/* Add the bits that differ between what a tensor names and the tensors of those ids, which are `named`. */
static inline void gh_compare_links(gh_difference *d, const gh_looks *l, gx_tensor *const *named, const gh_mark *mark,
                                    const gx_tensor *t)
{
    static const gx_tensor nothing;
    _Static_assert(GH_N_REST % 2 == 0, "the rest is compared in pairs");
    d->words |= (uintptr_t)named[mark->link[GH_ROOT]] ^ (uintptr_t)t->view_src;
    for (int k = 0; k < GH_ROOT; k++) {
        d->words |= (uintptr_t)named[mark->link[k]] ^ (uintptr_t)t->src[k];
    }
    if (mark->has >> GH_REST_SHIFT == 0) {
        d->pairs |= gh_differing(&t->src[GH_ROOT], &nothing.src[GH_ROOT], GH_N_REST / 2);
    } else {
        const int32_t *rest = l->rest[(mark->has >> GH_REST_SHIFT) - 1];
        for (int k = GH_ROOT; k < GS_MAX_SRC; k++) {
            d->words |= (uintptr_t)named[rest[k - GH_ROOT]] ^ (uintptr_t)t->src[k];
        }
    }
}

/* Add the bits by which the memory of an id differs from a tensor's. */
static inline void gh_compare_memory(gh_difference *d, const gh_looks *l, int32_t id, const gx_tensor *t,
                                     gh_buffers *buffers, bool whole)
{
    const int32_t has = l->mark[id].has & (GH_HAS_DATA | GH_HAS_BUFFER);
    if (!whole && has == 0) {
        d->words |= (uintptr_t)t->data | (uintptr_t)t->buffer; /* as most */
        return;
    }
    d->words |= (uint64_t)(has ^ gh_memory_of(t, whole));
    if (whole) {
        d->words |= l->memory[id] ^ gh_sort_of(buffers, t);
    }
}

/* Whether a tensor looks like that of an id, and names the tensors of those ids, which are `named`. */
static inline bool gh_is_like(const gh_looks *l, int32_t id, const gx_tensor *t, gx_tensor *const *named,
                              const gh_form *form, gh_buffers *buffers, bool whole)
{
    gh_difference d = {{0, 0}, 0};
    gh_compare_links(&d, l, named, &l->mark[id], t);
    gh_compare_form(&d, t, form, whole);
    gh_compare_memory(&d, l, id, t, buffers, whole);
    return !gh_is_some(d);
}

static inline int gh_place_of_source(int k)
{
    return k < GH_ROOT ? k : k + 1;
}

#endif
