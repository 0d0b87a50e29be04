/* ggml_sched/llama_cpp/ggml/arena.c -- allocates and frees buffers through ggml.  See arena.h. */
#include "arena.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static atomic_bool is_dry;

void gh_set_dry_arenas(bool on)
{
    atomic_store(&is_dry, on);
}

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
    const int32_t n_chunks = n > a->n_chunks ? n : a->n_chunks;
    gh_chunk *chunks = calloc((size_t)(n_chunks > 0 ? n_chunks : 1), sizeof *chunks);
    if (chunks == NULL) {
        return false;
    }
    for (int32_t i = 0; i < n_chunks; i++) {
        const int64_t held = i < a->n_chunks ? a->chunk[i].nbytes : 0, needed = i < n ? nbytes[i] : 0;
        chunks[i].nbytes = held > needed ? held : needed;
    }
    gh_arena_free(a, lib);
    a->chunk = chunks;
    for (; a->n_chunks < n_chunks; a->n_chunks++) {
        gh_chunk *chunk = &chunks[a->n_chunks];
        /* A dry arena has buffers of no bytes, which ggml makes without calling the device. */
        chunk->buffer = lib->backend_buft_alloc_buffer(a->buft, atomic_load(&is_dry) ? 0 : (size_t)chunk->nbytes);
        if (chunk->buffer == NULL) {
            if (lib->log_internal != NULL) {
                lib->log_internal(GH_LOG_ERROR, "ggml_sched: %s refused a compute buffer of %lld bytes\n",
                         lib->backend_buft_name(a->buft), (long long)chunk->nbytes);
            }
            gh_arena_free(a, lib);
            return false;
        }
        lib->backend_buffer_set_usage(chunk->buffer, GH_USAGE_COMPUTE);
        chunk->base = lib->backend_buffer_get_base(chunk->buffer);
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
        const size_t held = lib->backend_buffer_get_size(a->chunk[i].buffer), needed = (size_t)a->chunk[i].nbytes;
        total += held > needed ? held : needed;
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
