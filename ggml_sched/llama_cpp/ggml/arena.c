/* ggml_sched/llama_cpp/ggml/arena.c -- allocates and frees buffers through ggml.  See arena.h. */
#include "arena.h"

#include <stdlib.h>
#include <string.h>

void gh_arena_init(gh_arena *a, const gh_ggml *lib, void *buft)
{
    memset(a, 0, sizeof *a);
    a->buft = buft;
    memcpy(a->interface, buft, sizeof a->interface);
    a->alignment = lib->backend_buft_get_alignment(buft);
    a->max_size = lib->backend_buft_get_max_size(buft);
}

bool gh_arena_fits(const gh_arena *a, const int64_t *nbytes, int32_t n)
{
    if (n > a->n_chunks) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        if (nbytes[i] > a->chunk[i].nbytes) {
            return false;
        }
    }
    return true;
}

bool gh_arena_grow(gh_arena *a, const gh_ggml *lib, const int64_t *nbytes, int32_t n)
{
    gh_arena_free(a, lib);
    a->chunk = calloc((size_t)(n > 0 ? n : 1), sizeof *a->chunk);
    if (a->chunk == NULL) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        gh_chunk *chunk = &a->chunk[i];
        chunk->buffer = lib->backend_buft_alloc_buffer(a->buft, (size_t)nbytes[i]);
        if (chunk->buffer == NULL) {
            if (lib->log_internal != NULL) {
                lib->log_internal(GH_LOG_ERROR, "ggml_sched: %s refused a compute buffer of %lld bytes\n",
                         lib->backend_buft_name(a->buft), (long long)nbytes[i]);
            }
            gh_arena_free(a, lib);
            return false;
        }
        a->n_chunks = i + 1;
        lib->backend_buffer_set_usage(chunk->buffer, GH_USAGE_COMPUTE);
        chunk->base = lib->backend_buffer_get_base(chunk->buffer);
        chunk->nbytes = nbytes[i];
    }
    return true;
}

bool gh_arenas_have_init_tensor(const gh_arena *arenas, int32_t n, const gh_ggml *lib)
{
    bool found = false;
    for (int32_t b = 0; b < n; b++) {
        for (int32_t i = 0; i < arenas[b].n_chunks; i++) {
            found |= gh_has_init_tensor(lib, arenas[b].chunk[i].buffer);
        }
    }
    return found;
}

void gh_arena_reset(const gh_arena *a, const gh_ggml *lib)
{
    for (int32_t i = 0; i < a->n_chunks; i++) {
        lib->backend_buffer_reset(a->chunk[i].buffer);
    }
}

size_t gh_arena_nbytes(const gh_arena *a, const gh_ggml *lib)
{
    size_t total = 0;
    for (int32_t i = 0; i < a->n_chunks; i++) {
        total += lib->backend_buffer_get_size(a->chunk[i].buffer);
    }
    return total;
}

void gh_arena_free(gh_arena *a, const gh_ggml *lib)
{
    for (int32_t i = 0; i < a->n_chunks; i++) {
        lib->backend_buffer_free(a->chunk[i].buffer);
    }
    free(a->chunk);
    a->chunk = NULL;
    a->n_chunks = 0;
}
