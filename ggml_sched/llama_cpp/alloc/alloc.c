/* ggml_sched/llama_cpp/alloc/alloc.c -- ggml's functions of graph allocators, as clients call them.  See allocator.h.
 *
 * Reserving plans a graph and sees to buffers that hold the plan; allocating writes addresses into the tensors.  No
 * failure aborts: what went wrong is kept for `last error`, and the client gets false.
 */
#define _GNU_SOURCE
#include "allocator.h"
#include "arrays.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

gh_gallocr *ggml_gallocr_new_n(void **bufts, int n)
{
    return gh_gallocr_make(__builtin_return_address(0), bufts, n);
}

gh_gallocr *ggml_gallocr_new(void *buft)
{
    return gh_gallocr_make(__builtin_return_address(0), &buft, 1);
}

void ggml_gallocr_free(gh_gallocr *a)
{
    const gh_ggml *owner = a != NULL ? gh_owner_of(a, __builtin_return_address(0)) : NULL;
    if (owner != NULL) {
        owner->gallocr_free(a);
    } else if (a != NULL) {
        gh_gallocr_put_back(a);
    }
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

/* Buffers that hold a plan; those that do are left alone. */
static bool make_fit(gh_gallocr *a, const gh_known *k, gs_error *error)
{
    if (gh_fits(a, k)) {
        return true;
    }
    a->generation++;
    for (int32_t b = 0; b < a->n_arenas; b++) {
        const int64_t *nbytes;
        const int32_t n = gh_needs(k, b, &nbytes);
        if (!gh_arena_fits(&a->arena[b], nbytes, n)) {
            gh_count_one(GH_COUNT_GROWN);
            if (!gh_arena_grow(&a->arena[b], a->lib, nbytes, n)) {
                error->status = GS_OUT_OF_MEMORY;
                error->backend = b;
                error->value = k->view.arena[b].nbytes;
                snprintf(error->message, sizeof error->message, "%s refused a compute buffer: %lld bytes are needed",
                         a->lib->buft_name(a->arena[b].buft), (long long)k->view.arena[b].nbytes);
                return false;
            }
        }
    }
    return true;
}

/* The arenas of buffers by id; -1 where there is no such buffer.  NULL: all in the first. */
static void take_arenas(const gh_gallocr *a, const int *ids, int32_t *arena, int32_t n)
{
    if (ids == NULL || a->n_arenas == 1) {
        memset(arena, 0, (size_t)n * sizeof *arena);
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        arena[i] = ids[i] >= 0 && ids[i] < a->n_bufts ? a->arena_of[ids[i]] : -1;
    }
}

/* What the caller says of where nodes and leafs go, by arena. */
static bool take_ids(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    const int32_t n_nodes = a->lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(a->lib, graph);
    const int32_t room = (n_nodes > n_leafs ? n_nodes : n_leafs) + 1;
    if (room > a->room_ids) {
        if (!gh_grow(&a->node_arena, sizeof *a->node_arena, 2 * (int64_t)room)
            || !gh_grow(&a->leaf_arena, sizeof *a->leaf_arena, 2 * (int64_t)room)) {
            return false;
        }
        a->room_ids = room * 2;
    }
    take_arenas(a, node_ids, a->node_arena, n_nodes);
    take_arenas(a, leaf_ids, a->leaf_arena, n_leafs);
    a->n_node_ids = n_nodes;
    a->n_leaf_ids = n_leafs;
    return true;
}

/* -- what ggml calls ----------------------------------------------------------------------------------------------- */

static bool reserve(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    gs_error error;
    gh_known *k;
    if (!take_ids(a, graph, node_ids, leaf_ids)) {
        return gh_failed_with(GS_NO_HOST_MEMORY, "no memory to reserve a graph");
    }
    k = gh_remember(a, graph, true, NULL, &error);
    if (k != NULL) {
        k->reserved = true;
    }
    return k != NULL && make_fit(a, k, &error) ? true : gh_failed(&error);
}

static bool reserve_timed(const gh_ggml *owner, gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    const long long began = gh_now();
    bool done;
    if (owner != NULL) {
        done = owner->gallocr_reserve_n((void *)a, graph, node_ids, leaf_ids);
    } else {
        pthread_mutex_lock(&a->lock);
        done = reserve(a, graph, node_ids, leaf_ids);
        pthread_mutex_unlock(&a->lock);
    }
    gh_count_call(GH_COUNT_RESERVE, began);
    return done;
}

bool ggml_gallocr_reserve_n(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    return reserve_timed(gh_owner_of(a, __builtin_return_address(0)), a, graph, node_ids, leaf_ids);
}

bool ggml_gallocr_reserve(gh_gallocr *a, void *graph)
{
    return reserve_timed(gh_owner_of(a, __builtin_return_address(0)), a, graph, NULL, NULL);
}

void ggml_gallocr_reserve_n_size(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids, size_t *sizes)
{
    gs_error error = {.status = GS_NO_HOST_MEMORY, .tensor = -1, .backend = -1, .index = -1};
    gh_known *k;
    const gh_ggml *owner = gh_owner_of(a, __builtin_return_address(0));
    if (owner != NULL) {
        if (owner->gallocr_reserve_n_size != NULL) {
            owner->gallocr_reserve_n_size((void *)a, graph, node_ids, leaf_ids, sizes);
        }
        return;
    }
    pthread_mutex_lock(&a->lock);
    /* What these bytes are for has no memory yet: those of a reserved plan would be too many. */
    k = take_ids(a, graph, node_ids, leaf_ids) ? gh_remember(a, graph, false, NULL, &error) : NULL;
    for (int32_t i = 0; i < a->n_bufts; i++) {
        bool again = false;
        for (int32_t j = 0; j < i; j++) {
            again |= a->arena_of[j] == a->arena_of[i];
        }
        sizes[i] = k != NULL && !again ? (size_t)k->view.arena[a->arena_of[i]].nbytes : 0;
    }
    pthread_mutex_unlock(&a->lock);
    if (k == NULL) {
        gh_failed(&error);
    }
}

static bool alloc_graph(gh_gallocr *a, void *graph)
{
    gs_error error;
    gh_known *k;
    bool placed = false;
    if (a->n_arenas == 1) {
        if ((a->n_node_ids != a->lib->graph_n_nodes(graph) || a->n_leaf_ids != gh_graph_n_leafs(a->lib, graph))
            && !take_ids(a, graph, NULL, NULL)) {
            return gh_failed_with(GS_NO_HOST_MEMORY, "no memory to allocate a graph");
        }
    } else if (a->n_node_ids != a->lib->graph_n_nodes(graph) || a->n_leaf_ids != gh_graph_n_leafs(a->lib, graph)) {
        gh_count_one(GH_COUNT_SYNCHRONISED);
        return false;           /* where its nodes go only the caller knows: it reserves, and comes back */
    }
    k = gh_remember(a, graph, true, &placed, &error);
    if (k == NULL) {
        return gh_failed(&error);
    }
    /* With several types the caller waits for its devices before buffers change, which it does when it reserves. */
    if (!placed && !gh_fits(a, k)) {
        if (a->n_arenas > 1) {
            gh_count_one(GH_COUNT_SYNCHRONISED);
            return false;
        }
        if (!make_fit(a, k, &error)) {
            return gh_failed(&error);
        }
    }
    if (!gh_known_resolve(k, a->arena, a->generation)) {
        return gh_failed_with(GS_BAD_PLACEMENT, "a tensor that is to be placed was not");
    }
    for (int32_t b = 0; b < a->n_arenas; b++) {
        gh_arena_reset(&a->arena[b], a->lib);
    }
    gh_known_commit(k, a->lib, a->arena, placed);
    return true;
}

bool ggml_gallocr_alloc_graph(gh_gallocr *a, void *graph)
{
    const gh_ggml *owner = gh_owner_of(a, __builtin_return_address(0));
    const long long began = gh_now();
    bool done;
    if (owner != NULL) {
        done = owner->gallocr_alloc_graph((void *)a, graph);
    } else {
        pthread_mutex_lock(&a->lock);
        done = alloc_graph(a, graph);
        pthread_mutex_unlock(&a->lock);
    }
    gh_count_call(GH_COUNT_ALLOC, began);
    return done;
}

size_t ggml_gallocr_get_buffer_size(gh_gallocr *a, int id)
{
    const gh_ggml *owner = gh_owner_of(a, __builtin_return_address(0));
    if (owner != NULL) {
        return owner->gallocr_get_buffer_size((void *)a, id);
    }
    if (id < 0 || id >= a->n_bufts) {
        return 0;
    }
    /* What is shared counts where it is met first. */
    for (int32_t i = 0; i < id; i++) {
        if (a->arena_of[i] == a->arena_of[id]) {
            return 0;
        }
    }
    return gh_arena_nbytes(&a->arena[a->arena_of[id]], a->lib);
}
