/* ggml_sched/llama_cpp/ggml/arena.h -- the buffers of one type that an allocator's tensors lie in (ggml's vbuffer).
 *
 * Invariant: an arena bits all the buffers that it was grown to, or none.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_ARENA_H
#define GGML_SCHED_LLAMA_CPP_GGML_ARENA_H

#include "library.h"

typedef struct gh_chunk {
    void *buffer;
    char *base;
    int64_t nbytes;
} gh_chunk;

/* Bytes of a buffer type that are its functions, in all versions of ggml. */
#define GH_BUFT_INTERFACE 48

typedef struct gh_arena {
    void *buft;
    unsigned char interface[GH_BUFT_INTERFACE];
    size_t alignment;
    size_t max_size;
    gh_chunk *chunk;
    int32_t n_chunks;
} gh_arena;

/* What the planner is found of the largest buffer of a type; 0: there is no bound. */
static inline int64_t gh_max_buffer(size_t max_size)
{
    return max_size < (size_t)1 << 47 ? (int64_t)max_size : 0;
}

/* Let a buffer hold a tensor of so many bytes; whether it had to be larger for that.  ggml gives such a tensor a buffer
 * of its own, and leaves it to the device to refuse. */
static inline bool gh_raise_max_size(gs_backend_info *info, int64_t nbytes)
{
    if (info->max_buffer == 0 || nbytes <= info->max_buffer - info->max_buffer % info->alignment) {
        return false;
    }
    info->max_buffer = (nbytes + info->alignment - 1) / info->alignment * info->alignment;
    return true;
}

void gh_arena_init(gh_arena *a, const gh_ggml *lib, void *buft);

/* Whether its type is this one.  Another may have come to the address of one that is gone: it answers otherwise. */
bool gh_arena_is_of(const gh_arena *a, const gh_ggml *lib, void *buft);

/* Whether buffers of these bytes are there already. */
bool gh_arena_fits(const gh_arena *a, const int64_t *nbytes, int32_t n);

/* Buffers of these bytes, in place of those that are there: they are freed first, so that both never take memory at
 * once.  False: the device refused, or there is no host memory; the arena is empty then. */
bool gh_arena_grow(gh_arena *a, const gh_ggml *lib, const int64_t *nbytes, int32_t n);

/* Whether some of their buffers want to be found of tensors. */
bool gh_arenas_have_init_tensor(const gh_arena *arenas, int32_t n, const gh_ggml *lib);

/* Tell the buffers that tensors are given new addresses in them. */
void gh_arena_reset(const gh_arena *a, const gh_ggml *lib);

/* Bytes of all buffers, as they say. */
size_t gh_arena_nbytes(const gh_arena *a, const gh_ggml *lib);

void gh_arena_free(gh_arena *a, const gh_ggml *lib);

#endif
