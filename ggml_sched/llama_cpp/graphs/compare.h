/* ggml_sched/llama_cpp/graphs/compare.h -- a tensor beside the mark of an id: what it names, whose memory it has. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_COMPARE_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_COMPARE_H

#include "looks.h"

/* Tensors from one that is compared to one that is fetched. */
#define GH_AHEAD 6
#define GH_MARKS_AHEAD 24

/* Room for ids, and for nodes or leafs.  False without memory. */
bool gh_looks_make_room(gh_looks *l, int32_t n, int32_t listed);

/* Whether a tensor has memory.  Where plans are of backends, too, views get their root's, and that they have it is no
 * news. */
static inline int32_t gh_memory_of(const gx_tensor *t, bool whole)
{
    if (whole && t->view_src != NULL) {
        return 0;
    }
    return (t->data != NULL ? GH_HAS_DATA : 0) | (t->buffer != NULL ? GH_HAS_BUFFER : 0);
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

/* The bits that differ between what a tensor names and the tensors of those ids. */
static inline uint64_t gh_differing_links(const gh_looks *l, const gh_mark *mark, const gx_tensor *t)
{
    static const gx_tensor nothing;
    _Static_assert(GH_N_REST % 2 == 0, "the rest is compared in pairs");
    gx_tensor *const *named = l->tensor;
    uint64_t found = (uintptr_t)named[mark->link[GH_ROOT]] ^ (uintptr_t)t->view_src;
    for (int k = 0; k < GH_ROOT; k++) {
        found |= (uintptr_t)named[mark->link[k]] ^ (uintptr_t)t->src[k];
    }
    if (mark->has >> GH_REST_SHIFT == 0) {
        const gh_pair some = gh_differing(&t->src[GH_ROOT], &nothing.src[GH_ROOT], GH_N_REST / 2);
        found |= some[0] | some[1];
    } else {
        const int32_t *rest = l->rest[(mark->has >> GH_REST_SHIFT) - 1];
        for (int k = GH_ROOT; k < GS_MAX_SRC; k++) {
            found |= (uintptr_t)named[rest[k - GH_ROOT]] ^ (uintptr_t)t->src[k];
        }
    }
    return found;
}

/* The bits by which the memory of an id differs from a tensor's. */
static inline uint64_t gh_differing_memory(const gh_looks *l, int32_t id, const gx_tensor *t, gh_buffers *buffers,
                                           bool whole)
{
    const uint64_t has = (uint64_t)((l->mark[id].has ^ gh_memory_of(t, whole)) & (GH_HAS_DATA | GH_HAS_BUFFER));
    return has | (whole ? l->memory[id] ^ gh_sort_of(buffers, t) : 0);
}

static inline int gh_place_of_source(int k)
{
    return k < GH_ROOT ? k : k + 1;
}

#endif
