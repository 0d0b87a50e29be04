/* ggml_sched/llama_cpp/ggml/arena.h -- an arena: the buffers of one of ggml's buffer types in which tensors are placed
 * (ggml's vbuffer).  It has several buffers, its chunks, where the device bounds the size of one.
 *
 * Invariant: an arena has all the buffers that gh_arena_grow was called for, or none.
 */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_ARENA_H
#define GGML_SCHED_LLAMA_CPP_GGML_ARENA_H

#include "library.h"

typedef struct gh_chunk {
    void *buffer;
    char *base;
    int64_t nbytes;
} gh_chunk;

/* Where the tensors of a graph lie, by id: `offset` bytes into a chunk of one of several arenas. */
typedef struct gh_places {
    uint32_t *chunk;        /* of each id: gh_chunk_index; GH_NO_CHUNK: outside of the arenas       */
    int64_t *offset;        /* of each id: bytes from the start of its chunk                        */
} gh_places;

#define GH_NO_CHUNK UINT32_MAX

/* Bytes at the start of ggml's struct of a buffer type that hold pointers to its functions, in all versions. */
#define GH_BUFT_INTERFACE 48

typedef struct gh_arena {
    void *buft;             /* ggml's buffer type                                                   */
    unsigned char interface[GH_BUFT_INTERFACE]; /* copy of its functions: a part of a cache's key (gh_arena_init) */
    size_t alignment;
    size_t max_size;        /* bytes that one buffer may have at most; SIZE_MAX: no limit           */
    gh_chunk *chunk;
    int32_t n_chunks;
} gh_arena;

/* The limit for the largest buffer as the planner takes it: 0 if there is none, which ggml expresses by a huge number.
 */
static inline int64_t gh_max_buffer(size_t max_size)
{
    return max_size < (size_t)1 << 47 ? (int64_t)max_size : 0;
}

/* Raise the planner's limit for the largest buffer so that a tensor of nbytes fits; false: it fits already.  ggml, too,
 * gives a tensor that is larger than the largest buffer a buffer of its own size, which the device may refuse. */
static inline bool gh_raise_max_size(gs_backend_info *info, int64_t nbytes)
{
    if (info->max_buffer == 0 || nbytes <= info->max_buffer - info->max_buffer % info->alignment) {
        return false;
    }
    info->max_buffer = (nbytes + info->alignment - 1) / info->alignment * info->alignment;
    return true;
}

/* Chunk number `chunk` of arena number `arena`, as one number.  gh_chunk_at finds the chunk again. */
static inline uint32_t gh_chunk_index(int32_t arena, int32_t chunk)
{
    return (uint32_t)arena << 26 | (uint32_t)chunk;
}

static inline const gh_chunk *gh_chunk_at(const gh_arena *arenas, uint32_t index)
{
    return &arenas[index >> 26].chunk[index & ((1U << 26) - 1)];
}

static inline void gh_place(gx_tensor *t, const gh_chunk *chunk, int64_t offset)
{
    t->buffer = chunk->buffer;
    t->data = chunk->base + offset;
}

/* Make an empty arena of a buffer type.  It keeps a copy of the type's functions: a type may be freed and another made
 * at the same address, and released plan caches must not take the one for the other. */
void gh_arena_init(gh_arena *a, const gh_ggml *lib, void *buft);

/* Whether the arena has at least n buffers, and buffer i has at least nbytes[i] bytes. */
bool gh_arena_fits(const gh_arena *a, const int64_t *nbytes, int32_t n);

/* Replace the buffers by at least n, of which buffer i has nbytes[i] bytes, or as many as the old one had if those are
 * more: what was reserved before still fits.  The old buffers are freed first, because a device may not have memory for
 * both.  False: the device refused, and the arena is empty then; or there is no host memory, and nothing has
 * changed. */
bool gh_arena_grow(gh_arena *a, const gh_ggml *lib, const int64_t *nbytes, int32_t n);

/* Whether some buffer of the n arenas has an init_tensor function, which must be called for each tensor placed in it.
 */
bool gh_arenas_have_init_tensor(const gh_arena *arenas, int32_t n, const gh_ggml *lib);

/* Call ggml's reset function of each buffer, as ggml does before tensors get new addresses: some backends then free
 * what they keep for each tensor. */
void gh_arena_reset(const gh_arena *a, const gh_ggml *lib);

/* Bytes of all buffers, as ggml reports them, which may be more than requested; of a dry arena, those requested. */
size_t gh_arena_nbytes(const gh_arena *a, const gh_ggml *lib);

void gh_arena_free(gh_arena *a, const gh_ggml *lib);

/* Choose whether arenas that grow from now on have sizes and no memory: for dry runs, in which no graph is allocated.
 * */
void gh_set_dry_arenas(bool on);

#endif
