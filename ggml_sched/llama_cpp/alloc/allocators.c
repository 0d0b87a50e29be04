/* ggml_sched/llama_cpp/alloc/allocators.c -- the allocators of the process: made, put back, looked at.
 *
 * What was put back keeps its plans and working memory, without buffers, and is the next that is asked for with the
 * same buffer types: contexts are opened again and again for one model, and memory that is new to a process is what
 * costs most.  See allocator.h.
 */
#include "allocator.h"
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Allocators that are put back and kept: those of the contexts that somebody opens in turn. */
#define GH_N_IDLE 2

/* All allocators of the process, so that plans() finds them. */
static struct {
    pthread_mutex_t lock;
    gh_gallocr *first;          /* alive, the newest first                                          */
    gh_gallocr *idle;           /* put back, the last first                                         */
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* -- making and freeing -------------------------------------------------------------------------------------------- */

static void destroy(gh_gallocr *a)
{
    for (int i = 0; i < GH_N_KNOWN; i++) {
        gh_known_drop(a->known[i]);
    }
    gh_known_drop(a->spare);
    gh_forms_free(&a->forms);
    for (int32_t i = 0; a->arena != NULL && i < a->n_arenas; i++) {
        gh_arena_free(&a->arena[i], a->lib);
    }
    gh_reading_free(&a->reading);
    free(a->arena);
    free(a->arena_of);
    free(a->node_arena);
    free(a->leaf_arena);
    free(a->info);
    free(a->reads);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

static bool make_arenas(gh_gallocr *a, void **bufts, int n)
{
    a->n_bufts = n;
    a->generation = 1;
    a->arena_of = calloc((size_t)n, sizeof *a->arena_of);
    a->arena = calloc((size_t)n, sizeof *a->arena);
    a->info = calloc((size_t)n, sizeof *a->info);
    a->reads = malloc((size_t)n * (size_t)n);
    if (a->arena_of == NULL || a->arena == NULL || a->info == NULL || a->reads == NULL) {
        return false;
    }
    memset(a->reads, 1, (size_t)n * (size_t)n);
    for (int i = 0; i < n; i++) {
        int32_t at = 0;
        while (at < a->n_arenas && a->arena[at].buft != bufts[i]) {
            at++;
        }
        a->arena_of[i] = at;
        if (at == a->n_arenas) {
            gh_arena_init(&a->arena[at], a->lib, bufts[i]);
            a->n_arenas++;
        }
    }
    return true;
}

const gh_ggml *gh_owner_of(const gh_gallocr *a, const void *caller)
{
    const gh_runtime *rt = a->magic == GH_MAGIC ? NULL : gh_runtime_of_caller(caller);
    return rt != NULL ? rt->lib : NULL;
}

/* Whether an allocator was made for these buffer types. */
static bool is_for(const gh_gallocr *a, const gh_ggml *lib, void *const *bufts, int n)
{
    if (a->lib != lib || a->n_bufts != n) {
        return false;
    }
    for (int i = 0; i < n; i++) {
        if (!gh_arena_is_of(&a->arena[a->arena_of[i]], lib, bufts[i])) {
            return false;
        }
    }
    return true;
}

/* One that was put back, taken from the list; NULL: none is for these. */
static gh_gallocr *take_idle(const gh_ggml *lib, void *const *bufts, int n)
{
    gh_gallocr *found = NULL;
    pthread_mutex_lock(&all.lock);
    for (gh_gallocr **at = &all.idle; *at != NULL; at = &(*at)->next) {
        if (is_for(*at, lib, bufts, n)) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
    return found;
}

static gh_gallocr *make(const gh_ggml *lib, void **bufts, int n)
{
    gh_gallocr *a = calloc(1, sizeof *a);
    if (a == NULL) {
        return NULL;
    }
    a->magic = GH_MAGIC;
    a->lib = lib;
    pthread_mutex_init(&a->lock, NULL);
    gh_forms_init(&a->forms, lib, false);
    if (!make_arenas(a, bufts, n)) {
        destroy(a);
        return NULL;
    }
    return a;
}

gh_gallocr *gh_gallocr_make(const void *caller, void **bufts, int n)
{
    const gh_ggml *lib = n > 0 && n <= GS_MAX_BACKENDS ? gh_ggml_find(caller, bufts, n) : NULL;
    gh_gallocr *a;
    if (lib == NULL) {
        gh_failed_with(GS_BAD_ARGUMENT, "no library of ggml is found for the buffer types of a graph allocator");
        return NULL;
    }
    if (lib->wrong != NULL || atomic_load(&gh_pass_through)) {
        if (lib->wrong != NULL) {
            gh_note_not_understood(lib->wrong);
        }
        gh_count_one(GH_COUNT_NEW);
        gh_count_one(GH_COUNT_STOCK);
        return lib->gallocr_new_n != NULL ? lib->gallocr_new_n(bufts, n) : NULL;
    }
    a = take_idle(lib, bufts, n);
    if (a == NULL) {
        a = make(lib, bufts, n);
    }
    if (a == NULL) {
        return NULL;
    }
    gh_count_one(GH_COUNT_NEW);
    pthread_mutex_lock(&all.lock);
    a->next = all.first;
    all.first = a;
    pthread_mutex_unlock(&all.lock);
    return a;
}

void gh_gallocr_put_back(gh_gallocr *a)
{
    gh_gallocr *last = NULL;
    int n = 0;
    pthread_mutex_lock(&all.lock);
    for (gh_gallocr **at = &all.first; *at != NULL; at = &(*at)->next) {
        if (*at == a) {
            *at = a->next;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
    for (int32_t i = 0; i < a->n_arenas; i++) {
        gh_arena_free(&a->arena[i], a->lib);
    }
    a->generation++;
    a->n_node_ids = a->n_leaf_ids = 0;
    a->life++;
    gh_compact_forms(a);
    pthread_mutex_lock(&all.lock);
    a->next = all.idle;
    all.idle = a;
    for (gh_gallocr *at = all.idle; at != NULL; at = at->next) {
        if (++n == GH_N_IDLE) {
            last = at->next;
            at->next = NULL;
        }
    }
    pthread_mutex_unlock(&all.lock);
    if (last != NULL) {
        destroy(last);
    }
}

/* -- looking at it ------------------------------------------------------------------------------------------------- */

static gh_arena_facts *facts_of(const gh_gallocr *a)
{
    gh_arena_facts *facts = calloc((size_t)a->n_arenas, sizeof *facts);
    for (int32_t i = 0; facts != NULL && i < a->n_arenas; i++) {
        const gh_arena *arena = &a->arena[i];
        snprintf(facts[i].name, sizeof facts[i].name, "%s", a->lib->buft_name(arena->buft));
        facts[i].alignment = (int64_t)arena->alignment;
        facts[i].max_size = gh_max_buffer(arena->max_size);
        facts[i].nbytes = (int64_t)gh_arena_nbytes(arena, a->lib);
        facts[i].inplace = a->lib->inplace;
    }
    return facts;
}

gh_known *gh_last_known(int i, int *n_allocators, gh_arena_facts **arenas)
{
    gh_known *k = NULL;
    int n = 0;
    *arenas = NULL;
    pthread_mutex_lock(&all.lock);
    for (gh_gallocr *a = all.first; a != NULL; a = a->next) {
        n++;
    }
    *n_allocators = n;
    for (gh_gallocr *a = all.first; a != NULL; a = a->next) {
        /* The newest comes first in the list. */
        if (--n != i) {
            continue;
        }
        pthread_mutex_lock(&a->lock);
        /* What it has from before it was put back nobody has asked it for. */
        if (a->known[0] != NULL && a->known[0]->life == a->life && gh_own_plan(a, a->known[0])) {
            *arenas = facts_of(a);
            k = *arenas != NULL ? a->known[0] : NULL;
        }
        if (k != NULL) {
            atomic_fetch_add(&k->refs, 1);
        }
        pthread_mutex_unlock(&a->lock);
    }
    pthread_mutex_unlock(&all.lock);
    return k;
}
