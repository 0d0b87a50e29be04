/* ggml_sched/llama_cpp/ggml/arena.h -- the buffers of one buffer type (ggml's vbuffer).
 *
 * Invariant: an arena has all the buffers that it was grown to, or none.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_ARENA_H
#define GGML_SCHED_LLAMA_CPP_GGML_ARENA_H

#include "library.h"

typedef struct gh_chunk {
    void *buffer;
    char *base;
    int64_t nbytes;
} gh_chunk;

/* Where a tensor is placed: `offset` bytes into a chunk of one of several arenas. */
typedef struct gh_slot {
    int64_t offset;
    int32_t id;
    uint32_t chunk;         /* gh_chunk_index                                                       */
} gh_slot;

/* Bytes at the start of a buffer type that hold its functions, in all versions of ggml. */
#define GH_BUFT_INTERFACE 48

typedef struct gh_arena {
    void *buft;
    unsigned char interface[GH_BUFT_INTERFACE];
    size_t alignment;
    size_t max_size;
    gh_chunk *chunk;
    int32_t n_chunks;
} gh_arena;

/* The planner's limit for the largest buffer of a type; 0: there is none. */
static inline int64_t gh_max_buffer(size_t max_size)
{
    return max_size < (size_t)1 << 47 ? (int64_t)max_size : 0;
}

/* Raise the largest buffer so that a tensor of nbytes fits; false: it fits already.  ggml, too, gives such a tensor a
 * buffer of its own size, which the device may refuse. */
static inline bool gh_raise_max_size(gs_backend_info *info, int64_t nbytes)
{
    if (info->max_buffer == 0 || nbytes <= info->max_buffer - info->max_buffer % info->alignment) {
        return false;
    }
    info->max_buffer = (nbytes + info->alignment - 1) / info->alignment * info->alignment;
    return true;
}

/* One number for a chunk of an arena, and that chunk. */
static inline uint32_t gh_chunk_index(int32_t arena, int32_t chunk)
{
    return (uint32_t)arena << 26 | (uint32_t)chunk;
}

static inline const gh_chunk *gh_chunk_at(const gh_arena *arenas, uint32_t index)
{
    return &arenas[index >> 26].chunk[index & ((1U << 26) - 1)];
}

/* Give a tensor the address of its slot. */
static inline void gh_place(gx_tensor *t, const gh_slot *slot, const gh_chunk *chunk)
{
    t->buffer = chunk->buffer;
    t->data = chunk->base + slot->offset;
}

/* A type that was freed may be followed by another at its address, so that its interface is kept for comparison. */
void gh_arena_init(gh_arena *a, const gh_ggml *lib, void *buft);

/* Whether there are buffers of at least these bytes. */
bool gh_arena_fits(const gh_arena *a, const int64_t *nbytes, int32_t n);

/* Replace the buffers by buffers of these bytes.  The old ones are freed first, so that both are never held at once.
 * False: the device refused, or there is no host memory; the arena is empty then. */
bool gh_arena_grow(gh_arena *a, const gh_ggml *lib, const int64_t *nbytes, int32_t n);

/* Whether some of the arenas' buffers have an init_tensor function. */
bool gh_arenas_have_init_tensor(const gh_arena *arenas, int32_t n, const gh_ggml *lib);

/* Call the buffers' reset function: tensors are about to get new addresses. */
void gh_arena_reset(const gh_arena *a, const gh_ggml *lib);

/* Bytes of all buffers, as the buffers say. */
size_t gh_arena_nbytes(const gh_arena *a, const gh_ggml *lib);

void gh_arena_free(gh_arena *a, const gh_ggml *lib);

#endif
