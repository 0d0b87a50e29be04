/* ggml_sched/llama_cpp/hook/gallocr.c -- ggml's functions of graph allocators (ggml-alloc.h), as clients call them.
 *
 * They are exported under ggml's names, so that the dynamic linker binds a client's calls to them.  Reserving plans a
 * graph and grows buffers to what the plan needs; allocating writes addresses into the tensors.  Nothing aborts: a call
 * that fails returns false, and last_error() has the reason.  A call for an allocator that ggml's own library made is
 * passed on to that library.
 */
#define _GNU_SOURCE
#include "measuring.h"

/* The first word of an allocator of ours.  ggml's own allocators, for which calls arrive here, too, begin with an
 * address. */
#define GH_GALLOCR_MAGIC UINT64_C(0x67675f736368656c)

typedef struct gh_gallocr {
    uint64_t magic;
    const gh_ggml *lib;
    gh_plan_cache *cache;
    int32_t n_bufts;
    int32_t *arena_of;      /* [n_bufts] by buffer id: the arena (a backend of the cache); equal types share one */
    signed char *chosen;    /* [n_nodes + n_leafs] arenas that the client chose for the graph reserved last; -1: none */
    int32_t n_nodes;        /* of the graph that `chosen` is for                                */
    int32_t n_leafs;        /* of the graph that `chosen` is for                                */
    int32_t room;
} gh_gallocr;

/* -- members of the cache level ------------------------------------------------------------------------------------ */

static bool same_demand(const void *owner, const gh_plan_entry *e, gx_tensor *const *tensors)
{
    const gh_gallocr *a = owner;
    (void)tensors;
    return e->signature.n_nodes == a->n_nodes && e->signature.n_leafs == a->n_leafs
        && gh_same(e->demand.value, a->chosen, e->demand.n, sizeof *a->chosen);
}

static bool take_demand(const void *owner, gh_plan_entry *e)
{
    const gh_signature *s = &e->signature;
    const gh_gallocr *a = owner;
    gh_demand *demand = &e->demand;
    demand->n = a->cache->n_backends == 1 ? 0 : s->n_nodes + s->n_leafs;
    if (!gh_make_room(&demand->value, sizeof *a->chosen, &demand->room, demand->n)) {
        return false;
    }
    gh_copy(demand->value, a->chosen, demand->n, sizeof *a->chosen);
    return true;
}

/* The arena that the client chose for an id; -1: the client named a buffer that the allocator does not have.  A tensor
 * that the graph does not list goes to the arena of its first reader. */
static int32_t chosen_arena(const gh_gallocr *a, const gh_plan *p, const gh_reader *r, int32_t id)
{
    const gh_item *item = &r->item[id];
    if (item->leaf != GH_NOWHERE && item->op == GS_OP_NONE) {
        return a->chosen[a->n_nodes + item->leaf];
    }
    if (item->node != GH_NOWHERE) {
        return a->chosen[item->node];
    }
    return item->reader != GH_NOWHERE && item->reader < p->n_nodes ? a->chosen[item->reader] : 0;
}

/* For the graph that was just read: fill problem->assigned, the arena of each id, and problem->resident. */
static int collect_arenas(const gh_gallocr *a, const gh_plan *p, gh_problem *problem, gs_error *error)
{
    const gh_reader *r = &a->cache->reader;
    for (int32_t id = 0; id < p->n_all; id++) {
        const gh_item *item = &r->item[id];
        const int32_t arena = chosen_arena(a, p, r, id);
        const bool external = (item->role == GH_ROLE_EXTERNAL && item->tensor != NULL)
                           || (item->role == GH_ROLE_ALIAS && item->op == GS_OP_NONE);
        problem->assigned[id] = arena;
        problem->resident[id] = !external ? -1 : arena < 0 ? 0 : arena;
        if (id < p->n && item->role == GH_ROLE_PLACED && arena < 0) {
            error->tensor = id;
            strcpy(error->message, "a tensor is to be in a buffer that the allocator does not have");
            return GS_BAD_PLACEMENT;
        }
    }
    return GS_OK;
}

static int collect(void *owner, const gh_plan_entry *e, gh_problem *problem, gs_error *error)
{
    const gh_plan *p = e->plan;
    const gh_gallocr *a = owner;
    const bool is_read = problem == &p->problem;
    int status = GS_OK;
    if (!gh_problem_make_room(problem, p->n_all, a->cache->n_backends, false)) {
        return GS_NO_HOST_MEMORY;
    }
    problem->some_assigned = true;
    if (is_read) {
        status = collect_arenas(a, p, problem, error);
    } else {
        /* The graph has the wiring and the demand of p, so arenas and residents are those of p. */
        gh_copy(problem->assigned, p->problem.assigned, p->n_all, sizeof *problem->assigned);
        gh_copy(problem->resident, p->problem.resident, p->n_all, sizeof *problem->resident);
    }
    if (status == GS_OK) {
        gh_collect_sizes(a->cache, e, problem);
    }
    return status;
}

static const gh_cache_level level = {
    .same_demand = same_demand, .take_demand = take_demand, .collect = collect, .writes_addresses = true};

/* -- making and freeing -------------------------------------------------------------------------------------------- */

static void destroy(gh_gallocr *a)
{
    if (a->cache != NULL) {
        gh_plan_cache_release(a->cache);
    }
    free(a->arena_of);
    free(a->chosen);
    a->magic = 0;
    free(a);
}

/* Fill the cache key: a backend for each different buffer type.  Every backend reads every other's memory, because at
 * level alloc ggml's scheduler has already made the copies. */
static void make_key(gh_gallocr *a, void **bufts, gh_cache_key *key)
{
    memset(key, 0, sizeof *key);
    key->lib = a->lib;
    key->n_copies = 1;
    for (int i = 0; i < a->n_bufts; i++) {
        int at = 0;
        while (at < key->n_backends && key->type[at].buft != bufts[i]) {
            at++;
        }
        a->arena_of[i] = at;
        if (at == key->n_backends) {
            gh_arena_init(&key->type[at], a->lib, bufts[i]);
            key->n_backends++;
        }
    }
    memset(key->reads, 1, sizeof key->reads);
}

static gh_gallocr *make(const gh_ggml *lib, void **bufts, int n)
{
    gh_gallocr *a = calloc(1, sizeof *a);
    gh_cache_key key;
    if (a == NULL) {
        return NULL;
    }
    a->magic = GH_GALLOCR_MAGIC;
    a->lib = lib;
    a->n_bufts = n;
    a->arena_of = calloc((size_t)n, sizeof *a->arena_of);
    if (a->arena_of != NULL) {
        make_key(a, bufts, &key);
        a->cache = gh_plan_cache_acquire(&key, &level, a);
    }
    if (a->cache == NULL) {
        destroy(a);
        return NULL;
    }
    for (int b = 0; b < a->cache->n_backends; b++) {
        a->cache->name[b] = lib->backend_buft_name(key.type[b].buft);
    }
    gh_plan_cache_publish(a->cache);
    return a;
}

/* Whether an allocator of ours serves these buffer types: no more than GH_MAX_BACKENDS are different. */
static bool serves(void *const *bufts, int n)
{
    int n_types = 0;
    for (int i = 0; i < n; i++) {
        int k = 0;
        while (k < i && bufts[k] != bufts[i]) {
            k++;
        }
        n_types += k == i;
    }
    return n_types <= GH_MAX_BACKENDS;
}

static gh_gallocr *new_n(const void *caller, void **bufts, int n)
{
    const gh_ggml *lib = n > 0 ? gh_ggml_find(caller, bufts, n) : NULL;
    if (lib == NULL) {
        gh_failed_with(GS_BAD_ARGUMENT, "no library of ggml is found for the buffer types of a graph allocator");
        return NULL;
    }
    if (lib->unsupported != NULL || atomic_load(&gh_pass_through) || !serves(bufts, n)) {
        if (lib->unsupported != NULL) {
            gh_note_unsupported(lib->unsupported);
        }
        gh_count_one(GH_COUNT_NEW);
        gh_count_one(GH_COUNT_STOCK);
        return lib->gallocr_new_n != NULL ? lib->gallocr_new_n(bufts, n) : NULL;
    }
    return make(lib, bufts, n);
}

static bool is_ours(const gh_gallocr *a)
{
    return a->magic == GH_GALLOCR_MAGIC;
}

GH_EXPORT gh_gallocr *ggml_gallocr_new_n(void **bufts, int n)
{
    return new_n(GH_CALLER, bufts, n);
}

GH_EXPORT gh_gallocr *ggml_gallocr_new(void *buft)
{
    return new_n(GH_CALLER, &buft, 1);
}

GH_EXPORT void ggml_gallocr_free(gh_gallocr *a)
{
    if (a != NULL) {
        GH_PASS_ON(is_ours(a), (void)0, gallocr_free, a);
        destroy(a);
    }
}

/* -- reserving ----------------------------------------------------------------------------------------------------- */

/* Translate the client's buffer ids to arenas; -1: the allocator has no such buffer.  ids NULL: all in the first. */
static void take_arenas(const gh_gallocr *a, const int *ids, signed char *arena, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        arena[i] = ids == NULL || a->cache->n_backends == 1 ? 0
                 : ids[i] >= 0 && ids[i] < a->n_bufts ? (signed char)a->arena_of[ids[i]] : -1;
    }
}

/* Whether the arenas that were chosen last are for a graph of as many nodes and leafs as this one. */
static bool has_chosen_for(const gh_gallocr *a, void *graph)
{
    return a->n_nodes == a->lib->graph_n_nodes(graph) && a->n_leafs == gh_graph_n_leafs(a->lib, graph);
}

/* Store in a->chosen the arenas that the client chooses for the nodes and leafs of a graph.  False without memory. */
static bool take_ids(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    const int32_t n_nodes = a->lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(a->lib, graph);
    if (!gh_make_room(&a->chosen, sizeof *a->chosen, &a->room, (int64_t)n_nodes + n_leafs)) {
        return false;
    }
    take_arenas(a, node_ids, a->chosen, n_nodes);
    take_arenas(a, leaf_ids, a->chosen + n_nodes, n_leafs);
    a->n_nodes = n_nodes;
    a->n_leafs = n_leafs;
    return true;
}

static bool reserve(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    gs_error error = {.status = GS_NO_HOST_MEMORY, .message = "no memory to reserve a graph"};
    bool done;
    pthread_mutex_lock(&a->cache->lock);
    done = take_ids(a, graph, node_ids, leaf_ids)
        && gh_plan_cache_get_backed(a->cache, graph, GH_PIN | GH_REUSE, NULL, NULL, &error) != NULL;
    pthread_mutex_unlock(&a->cache->lock);
    return done || gh_log_failure(a->lib, &error);
}

/* Bytes that are held for a buffer id.  Those of an arena that several buffer ids share are reported for the first of
 * them alone, so that the client's sum is right. */
static size_t buffer_size(const gh_gallocr *a, int32_t id)
{
    for (int32_t i = 0; i < a->n_bufts && i <= id; i++) {
        if (a->arena_of[i] == a->arena_of[id]) {
            return i == id ? gh_arena_nbytes(&a->cache->pool[a->arena_of[id]], a->lib) : 0;
        }
    }
    return 0;
}

/* Measure a graph in a dry run (measuring.h): reserve it in arenas without memory, or let ggml's own allocator measure
 * it. */
static bool measure(gh_gallocr *a, const void *caller, void *graph, const int *node_ids, const int *leaf_ids)
{
    size_t *sizes = gh_measured_bytes();
    if (!is_ours(a)) {
        const gh_ggml *lib = gh_ggml_of_caller(caller);
        const bool measures = lib != NULL && lib->gallocr_reserve_n_size != NULL;
        if (measures) {
            lib->gallocr_reserve_n_size(a, graph, node_ids, leaf_ids, sizes);
        }
        return measures;
    }
    if (a->n_bufts > GH_MAX_BUFTS || !reserve(a, graph, node_ids, leaf_ids)) {
        return false;
    }
    for (int32_t i = 0; i < a->n_bufts; i++) {
        sizes[i] = buffer_size(a, i);
    }
    return true;
}

GH_EXPORT bool ggml_gallocr_reserve_n(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    GH_TIMED(GH_COUNT_RESERVE);
    if (gh_measures()) {
        return measure(a, GH_CALLER, graph, node_ids, leaf_ids);
    }
    GH_PASS_ON(is_ours(a), false, gallocr_reserve_n, a, graph, node_ids, leaf_ids);
    return reserve(a, graph, node_ids, leaf_ids);
}

GH_EXPORT bool ggml_gallocr_reserve(gh_gallocr *a, void *graph)
{
    GH_TIMED(GH_COUNT_RESERVE);
    GH_PASS_ON(is_ours(a), false, gallocr_reserve_n, a, graph, NULL, NULL);
    return reserve(a, graph, NULL, NULL);
}

GH_EXPORT void ggml_gallocr_reserve_n_size(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids,
                                           size_t *sizes)
{
    gs_error error = {.status = GS_NO_HOST_MEMORY, .message = "no memory to measure a graph"};
    gh_plan_entry *e;
    GH_PASS_ON(is_ours(a), (void)0, gallocr_reserve_n_size, a, graph, node_ids, leaf_ids, sizes);
    pthread_mutex_lock(&a->cache->lock);
    /* Without GH_REUSE: the result is what this graph needs, and the plan of a larger one needs more. */
    e = take_ids(a, graph, node_ids, leaf_ids) ? gh_plan_cache_get(a->cache, graph, 0, NULL, &error) : NULL;
    for (int32_t i = 0; i < a->n_bufts; i++) {
        bool is_counted = e == NULL;
        for (int32_t k = 0; k < i; k++) {
            is_counted |= a->arena_of[k] == a->arena_of[i];
        }
        sizes[i] = is_counted ? 0 : gh_plan_nbytes(e->plan, a->arena_of[i]);
    }
    pthread_mutex_unlock(&a->cache->lock);
    if (e == NULL) {
        gh_log_failure(a->lib, &error);
    }
}

/* -- allocating ---------------------------------------------------------------------------------------------------- */

/* Return false, upon which the client (ggml's scheduler) synchronises its devices, reserves and calls again.  With
 * several buffer types this is the only way to have nodes assigned to buffers anew, and to wait for the devices before
 * buffers change: only the client can do both. */
static bool request_reserve(void)
{
    gh_count_one(GH_COUNT_SYNCHRONISED);
    return false;
}

static bool alloc_graph(gh_gallocr *a, void *graph)
{
    const bool has_one_type = a->cache->n_backends == 1;
    bool placed = false;
    gs_error error;
    gh_plan_entry *e;
    if (!has_chosen_for(a, graph)) {
        if (!has_one_type) {
            return request_reserve();
        }
        if (!take_ids(a, graph, NULL, NULL)) {
            return gh_failed_with(GS_NO_HOST_MEMORY, "no memory to allocate a graph");
        }
    }
    e = has_one_type ? gh_plan_cache_get_backed(a->cache, graph, GH_REUSE | GH_HINTS, &placed, NULL, &error)
                     : gh_plan_cache_get(a->cache, graph, GH_REUSE | GH_HINTS, &placed, &error);
    if (e == NULL) {
        return gh_log_failure(a->lib, &error);
    }
    if (!placed && !has_one_type && !gh_pools_fit(a->cache, e->plan)) {
        return request_reserve();
    }
    gh_place_tensors(a->cache, e, placed);
    return true;
}

GH_EXPORT bool ggml_gallocr_alloc_graph(gh_gallocr *a, void *graph)
{
    GH_TIMED(GH_COUNT_ALLOC);
    bool done;
    GH_PASS_ON(is_ours(a), false, gallocr_alloc_graph, a, graph);
    pthread_mutex_lock(&a->cache->lock);
    done = alloc_graph(a, graph);
    pthread_mutex_unlock(&a->cache->lock);
    return done;
}

GH_EXPORT size_t ggml_gallocr_get_buffer_size(gh_gallocr *a, int id)
{
    GH_PASS_ON(is_ours(a), 0, gallocr_get_buffer_size, a, id);
    return buffer_size(a, id);
}
