/* ggml_sched/llama_cpp/alloc.c -- graph allocators under a client of ggml's: planned by us, in ggml's buffers.
 *
 * What a call does, until it is done:
 *   1. the graph is one of the last few, byte for byte: its plan and addresses are known;
 *   2. it is read, and equal to one of them: its plan serves;
 *   3. it has the wiring of one, and no larger tensors: that plan is replayed;
 *   4. it is planned.
 * Reserving then sees to buffers that hold the plan; allocating writes addresses into the tensors.  No failure aborts:
 * what went wrong is kept for `last error`, and the client gets false.
 *
 * One allocator is used by one thread at a time, as ggml's; different ones by any.  Each has a lock only for the sake
 * of those who look at its plans meanwhile.
 */
#define _GNU_SOURCE
#include "alloc.h"
#include "follow.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Graphs remembered by an allocator: prompts and tokens take turns, and each may come with and without outputs. */
#define GH_N_KNOWN 4
#define GH_MAX_KEEPS 16

/* What begins ours.  ggml's own begin with an address, and come here, too: from calls inside its library. */
#define GH_MAGIC UINT64_C(0x67675f736368656c)

struct gh_gallocr {
    uint64_t magic;
    const gh_ggml *lib;
    pthread_mutex_t lock;
    gh_gallocr *next;           /* among all, the newest first; the registry's lock                         */
    int32_t n_bufts;
    int32_t *arena_of;          /* [n_bufts] equal types share one                                          */
    gh_arena *arena;
    int32_t n_arenas;
    uint64_t generation;        /* changes with any buffer                                                  */
    gh_reading reading;
    gh_known *known[GH_N_KNOWN]; /* the last used first; NULL at the end                                    */
    gh_known *spare;
    /* Where the caller wanted the nodes and leafs of the last graph that it reserved. */
    int32_t *node_arena;
    int32_t *leaf_arena;
    int32_t n_node_ids;
    int32_t n_leaf_ids;
    int32_t room_ids;
    gs_backend_info *info;      /* [n_arenas]                                                               */
    unsigned char *reads;       /* [n_arenas][n_arenas] all 1: the caller has made the copies               */
};

atomic_llong gh_counts[GH_N_COUNTS];
atomic_bool gh_pass_through;

/* All allocators of the process, so that plans() finds them, and the last failure. */
static struct {
    pthread_mutex_t lock;
    gh_gallocr *first;
    gs_error error;
    const char *not_understood;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void count(enum gh_count what, long long by)
{
    atomic_fetch_add_explicit(&gh_counts[what], by, memory_order_relaxed);
}

static long long now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static bool failed(const gs_error *error)
{
    count(GH_COUNT_FAILED, 1);
    pthread_mutex_lock(&all.lock);
    all.error = *error;
    pthread_mutex_unlock(&all.lock);
    return false;
}

static bool failed_with(int status, const char *message)
{
    gs_error error = {.status = status, .tensor = -1, .backend = -1, .index = -1};
    snprintf(error.message, sizeof error.message, "%s", message);
    return failed(&error);
}

/* -- making and freeing --------------------------------------------------------------------------------------- */

static void destroy(gh_gallocr *a)
{
    for (int i = 0; i < GH_N_KNOWN; i++) {
        gh_known_drop(a->known[i]);
    }
    gh_known_drop(a->spare);
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

/* The library whose own allocator somebody calls; NULL: the allocator is ours. */
static inline const gh_ggml *owner_of(const gh_gallocr *a, const void *caller)
{
    return a->magic == GH_MAGIC ? NULL : gh_ggml_find(caller, NULL, 0);
}

static gh_gallocr *make(const void *caller, void **bufts, int n)
{
    const gh_ggml *lib = n > 0 && n <= GS_MAX_BACKENDS ? gh_ggml_find(caller, bufts, n) : NULL;
    gh_gallocr *a;
    if (lib == NULL) {
        failed_with(GS_BAD_ARGUMENT, "no library of ggml is found for the buffer types of a graph allocator");
        return NULL;
    }
    if (lib->wrong != NULL || atomic_load(&gh_pass_through)) {
        pthread_mutex_lock(&all.lock);
        if (lib->wrong != NULL && all.not_understood == NULL) {
            all.not_understood = lib->wrong;
        }
        pthread_mutex_unlock(&all.lock);
        count(GH_COUNT_NEW, 1);
        count(GH_COUNT_STOCK, 1);
        return lib->gallocr_new_n != NULL ? lib->gallocr_new_n(bufts, n) : NULL;
    }
    a = calloc(1, sizeof *a);
    if (a == NULL) {
        return NULL;
    }
    a->magic = GH_MAGIC;
    a->lib = lib;
    pthread_mutex_init(&a->lock, NULL);
    if (!make_arenas(a, bufts, n)) {
        destroy(a);
        return NULL;
    }
    count(GH_COUNT_NEW, 1);
    pthread_mutex_lock(&all.lock);
    a->next = all.first;
    all.first = a;
    pthread_mutex_unlock(&all.lock);
    return a;
}

gh_gallocr *ggml_gallocr_new_n(void **bufts, int n)
{
    return make(__builtin_return_address(0), bufts, n);
}

gh_gallocr *ggml_gallocr_new(void *buft)
{
    return make(__builtin_return_address(0), &buft, 1);
}

void ggml_gallocr_free(gh_gallocr *a)
{
    const gh_ggml *owner = a != NULL ? owner_of(a, __builtin_return_address(0)) : NULL;
    if (owner != NULL) {
        owner->gallocr_free(a);
    }
    if (a == NULL || owner != NULL) {
        return;
    }
    pthread_mutex_lock(&all.lock);
    for (gh_gallocr **at = &all.first; *at != NULL; at = &(*at)->next) {
        if (*at == a) {
            *at = a->next;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
    destroy(a);
}

/* -- planning ------------------------------------------------------------------------------------------------- */

/* The known graph number i is the last used. */
static gh_known *first(gh_gallocr *a, int i)
{
    gh_known *k = a->known[i];
    for (; i > 0; i--) {
        a->known[i] = a->known[i - 1];
    }
    a->known[0] = k;
    return k;
}

/* The spare is known now; what was longest not used makes room, and is the next spare unless somebody looks at it. */
static gh_known *remember(gh_gallocr *a)
{
    gh_known *k = a->spare;
    a->spare = a->known[GH_N_KNOWN - 1];
    a->known[GH_N_KNOWN - 1] = k;
    return first(a, GH_N_KNOWN - 1);
}

static gh_known *spare(gh_gallocr *a)
{
    if (a->spare != NULL && atomic_load(&a->spare->refs) > 1) {
        gh_known_drop(a->spare);
        a->spare = NULL;
    }
    if (a->spare == NULL) {
        a->spare = gh_known_new();
    }
    return a->spare;
}

/* The planner's graph of what was read, with what some known graph's nodes keep. */
static int make_graph(gh_gallocr *a, gh_known *k, const gh_keeps *keeps, gs_error *error)
{
    const bool some = keeps->n > 0;
    return gh_read_graph(&a->reading, false, some ? keeps->dep_begin : NULL, some ? keeps->dep : NULL, &k->graph,
                         &k->arrays, error);
}

static gs_problem problem_of(gh_gallocr *a, const gh_known *k)
{
    gs_problem problem;
    memset(&problem, 0, sizeof problem);
    gh_api->policy_default(&problem.policy);
    for (int32_t b = 0; b < a->n_arenas; b++) {
        const gh_arena *arena = &a->arena[b];
        gs_backend_info *info = &a->info[b];
        info->name = a->lib->buft_name(arena->buft);
        info->alignment = (int64_t)(arena->alignment > 0 ? arena->alignment : 1);
        info->inplace = a->lib->inplace;
        info->max_buffer = arena->max_size < (size_t)INT64_MAX / 2 ? (int64_t)arena->max_size : 0;
        /* ggml gives a tensor that is too large a buffer of its own, and leaves it to the device to refuse. */
        for (int32_t i = 0; info->max_buffer > 0 && i < k->n_slots; i++) {
            const int64_t size = k->nbytes[(int64_t)b * k->n_all + k->slot[i].id];
            if (k->assigned[k->slot[i].id] == b && size > info->max_buffer) {
                info->max_buffer = (size + info->alignment - 1) / info->alignment * info->alignment;
            }
        }
    }
    problem.n_backends = a->n_arenas;
    problem.backends = a->info;
    problem.resident = k->resident;
    problem.reads = a->reads;
    problem.assigned = k->assigned;
    problem.nbytes = k->some_larger ? k->nbytes : NULL;
    return problem;
}

/* Plan the spare; where nodes that may be computed as one would overwrite what they read, again, with that kept. */
static int plan(gh_gallocr *a, gh_known *k, gs_error *error)
{
    for (int round = 0;; round++) {
        gs_problem problem = problem_of(a, k);
        int32_t clashes;
        int status = gh_api->plan_new(k->graph, &problem, &k->plan, error);
        if (status != GS_OK) {
            return status;
        }
        gh_api->plan_view(k->plan, &k->view);
        if (!gh_fused_risks(&a->reading, &k->arrays, &k->view, &k->risks)) {
            return GS_NO_HOST_MEMORY;
        }
        clashes = k->risks.n > 0 ? gh_fused_clashes(&a->reading, &k->arrays, &k->view, &k->keeps) : 0;
        if (clashes == 0) {
            gh_known_take_names(k, &a->reading);
            k->planned = true;
            return GS_OK;
        }
        gh_api->plan_free(k->plan);
        k->plan = NULL;
        if (clashes < 0 || round == GH_MAX_KEEPS) {
            error->status = clashes < 0 ? clashes : GS_OUT_OF_MEMORY;
            snprintf(error->message, sizeof error->message, "%d results would overwrite what fused nodes read",
                     k->keeps.n);
            return error->status;
        }
        status = gh_keeps_lay_out(&k->keeps, k->n_all);
        if (status == GS_OK) {
            status = make_graph(a, k, &k->keeps, error);
        }
        if (status != GS_OK) {
            return status;
        }
    }
}

/* Whether a plan that another graph was given lets what is fused with these layouts overlap. */
static bool clashes_in(gh_gallocr *a, gh_known *k, const gs_plan_arrays *view)
{
    const int32_t found = gh_fused_clashes(&a->reading, &k->arrays, view, &k->keeps);
    k->keeps.n = 0; /* the graph keeps nothing yet */
    return found != 0;
}

/* A known graph that the one just read equals, or whose plan serves it; the spare has the graph and the problem. */
static gh_known *serve(gh_gallocr *a, gh_known *k, bool replay, gs_error *error)
{
    static const gh_keeps none;
    const gh_keeps *made_with = &none;
    for (int pass = 0; pass < (replay ? 2 : 1); pass++) {
        for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
            gh_known *o = a->known[i];
            int serves = 0;
            if (!o->planned || !o->drawn || !gh_known_same_problem(o, k, pass == 0)) {
                continue;
            }
            if (o->keeps.n != made_with->n || o->keeps.n > 0) {
                if (make_graph(a, k, &o->keeps, error) != GS_OK) {
                    return NULL;
                }
                made_with = &o->keeps;
            }
            if (pass == 0 && gh_api->graph_equal(o->graph, k->graph)) {
                gh_known_rebind(o, k);
                count(GH_COUNT_EQUAL, 1);
                return first(a, i);
            }
            if (pass == 1 && gh_api->graph_same_wiring(o->graph, k->graph)) {
                gs_problem problem;
                if (gh_known_serves(o, k)) {
                    if (clashes_in(a, k, &o->view)) {
                        continue;
                    }
                    gh_known_borrow(k, o);
                    count(GH_COUNT_REPLAYED, 1);
                    return remember(a);
                }
                if (o->plan == NULL) {
                    continue;       /* its lender may be known, too */
                }
                problem = problem_of(a, k);
                if (gh_api->plan_replay(o->plan, o->graph, k->graph, &problem, &k->plan, &serves, error) != GS_OK) {
                    return NULL;
                }
                if (!serves) {
                    continue;
                }
                gh_api->plan_view(k->plan, &k->view);
                if (clashes_in(a, k, &k->view)) {
                    gh_api->plan_free(k->plan);
                    k->plan = NULL;
                    continue;
                }
                if (!gh_fused_risks(&a->reading, &k->arrays, &k->view, &k->risks)) {
                    return NULL;
                }
                gh_known_take_names(k, &a->reading);
                k->planned = k->replayed = true;
                count(GH_COUNT_REPLAYED, 1);
                return remember(a);
            }
        }
    }
    if (made_with->n > 0) {
        make_graph(a, k, &none, error);
    }
    return NULL;
}

/* Whether the caller wants the nodes and leafs where a known graph has its. */
static bool wants_same_arenas(const gh_gallocr *a, const gh_known *o)
{
    return a->n_arenas == 1
        || (memcmp(o->node_arena, a->node_arena, (size_t)o->n_nodes * sizeof(int32_t)) == 0
            && memcmp(o->leaf_arena, a->leaf_arena, (size_t)o->n_leafs * sizeof(int32_t)) == 0);
}

/* A graph that is wired as a known one: that itself, now of other tensors, or the spare with its plan.  NULL: read it. */
static gh_known *follow(gh_gallocr *a, void *graph, gh_known *k)
{
    gh_known *base = NULL;
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL && base == NULL; i++) {
        gh_known *o = a->known[i]->lender != NULL ? a->known[i]->lender : a->known[i];
        bool tried = !a->known[i]->planned || o->n_nodes != a->n_node_ids || o->n_leafs != a->n_leaf_ids
                  || !wants_same_arenas(a, o);
        for (int j = 0; j < i; j++) {
            tried |= o == a->known[j] || o == a->known[j]->lender;
        }
        base = !tried && gh_follow(k, o, a->lib, graph) ? o : NULL;
    }
    if (base == NULL) {
        return NULL;
    }
    memcpy(k->nodes, a->lib->graph_nodes(graph), (size_t)base->n_nodes * sizeof *k->nodes);
    memcpy(k->leafs, gh_graph_leafs(a->lib, graph), (size_t)base->n_leafs * sizeof *k->leafs);
    memcpy(k->node_arena, a->node_arena, (size_t)base->n_nodes * sizeof(int32_t));
    memcpy(k->leaf_arena, a->leaf_arena, (size_t)base->n_leafs * sizeof(int32_t));
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        gh_known *o = a->known[i];
        if (o->n_nodes == base->n_nodes && o->n_leafs == base->n_leafs && wants_same_arenas(a, o)
            && gh_follow_equals(k, base, o)) {
            gh_known_move(o, k);
            count(GH_COUNT_EQUAL, 1);
            return first(a, i);
        }
    }
    if (!gh_follow_borrows(k, base, a->lib, a->arena)) {
        return NULL;
    }
    count(GH_COUNT_REPLAYED, 1);
    return remember(a);
}

/* The graph's plan: known, replayed or new.  NULL: it has none, and `error` says why. */
static gh_known *prepare(gh_gallocr *a, void *graph, bool replay, gs_error *error)
{
    gh_known *k;
    int status;
    memset(error, 0, sizeof *error);
    error->tensor = error->backend = error->index = -1;
    for (int i = 0; i < GH_N_KNOWN && a->known[i] != NULL; i++) {
        if ((replay || !a->known[i]->replayed)
            && gh_known_matches(a->known[i], a->lib, graph, a->node_arena, a->leaf_arena)) {
            count(GH_COUNT_SAME, 1);
            return first(a, i);
        }
    }
    k = spare(a);
    if (k == NULL) {
        error->status = GS_NO_HOST_MEMORY;
        return NULL;
    }
    if (replay) {
        gh_known *followed;
        gh_known_forget(k);
        followed = follow(a, graph, k);
        if (followed != NULL) {
            return followed;
        }
    }
    status = gh_read(&a->reading, a->lib, graph);
    if (status != GS_OK) {
        snprintf(error->message, sizeof error->message, "a graph of %d nodes cannot be read",
                 a->lib->graph_n_nodes(graph));
    }
    if (status == GS_OK) {
        status = gh_known_take(k, &a->reading, a->node_arena, a->leaf_arena, a->n_arenas);
    }
    if (status == GS_OK) {
        gh_keeps none = {0};
        status = make_graph(a, k, &none, error);
        k->drawn = status == GS_OK;
    }
    if (status == GS_OK) {
        gh_known *serving;
        gh_known_measure(k, &a->reading, a->arena);
        serving = serve(a, k, replay, error);
        if (serving != NULL) {
            return serving;
        }
        status = plan(a, k, error);
    }
    if (status != GS_OK) {
        error->status = status;
        return NULL;
    }
    count(GH_COUNT_PLANNED, 1);
    return remember(a);
}

/* -- memory --------------------------------------------------------------------------------------------------- */

/* The bytes of each buffer that a plan asks for of one arena; how many.  None where nothing lies in it. */
static int32_t needs(const gh_known *k, int32_t arena, const int64_t **nbytes)
{
    const gs_arena_result *result = &k->view.arena[arena];
    *nbytes = k->view.chunk_nbytes + result->first_chunk;
    if (result->nbytes > 0) {
        return result->n_chunks;
    }
    for (int32_t i = 0; i < k->n_slots; i++) {
        if (k->assigned[k->slot[i].id] == arena) {
            return 1;           /* of no bytes, but tensors lie in a buffer */
        }
    }
    return 0;
}

static bool fits(const gh_gallocr *a, const gh_known *k)
{
    for (int32_t b = 0; b < a->n_arenas; b++) {
        const int64_t *nbytes;
        const int32_t n = needs(k, b, &nbytes);
        if (!gh_arena_fits(&a->arena[b], nbytes, n)) {
            return false;
        }
    }
    return true;
}

/* Buffers that hold a plan; those that do are left alone. */
static bool make_fit(gh_gallocr *a, const gh_known *k, gs_error *error)
{
    if (fits(a, k)) {
        return true;
    }
    a->generation++;
    for (int32_t b = 0; b < a->n_arenas; b++) {
        const int64_t *nbytes;
        const int32_t n = needs(k, b, &nbytes);
        if (!gh_arena_fits(&a->arena[b], nbytes, n)) {
            count(GH_COUNT_GROWN, 1);
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

/* What the caller says of where nodes and leafs go, by arena. */
static bool take_ids(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    const int32_t n_nodes = a->lib->graph_n_nodes(graph), n_leafs = gh_graph_n_leafs(a->lib, graph);
    const int32_t room = (n_nodes > n_leafs ? n_nodes : n_leafs) + 1;
    if (room > a->room_ids) {
        int32_t *nodes = realloc(a->node_arena, (size_t)room * 2 * sizeof(int32_t)), *leafs;
        if (nodes == NULL) {
            return false;
        }
        a->node_arena = nodes;
        leafs = realloc(a->leaf_arena, (size_t)room * 2 * sizeof(int32_t));
        if (leafs == NULL) {
            return false;
        }
        a->leaf_arena = leafs;
        a->room_ids = room * 2;
    }
    for (int32_t i = 0; a->n_arenas > 1 && i < n_nodes; i++) {
        const int id = node_ids != NULL ? node_ids[i] : 0;
        a->node_arena[i] = id >= 0 && id < a->n_bufts ? a->arena_of[id] : -1;
    }
    for (int32_t i = 0; a->n_arenas > 1 && i < n_leafs; i++) {
        const int id = leaf_ids != NULL ? leaf_ids[i] : 0;
        a->leaf_arena[i] = id >= 0 && id < a->n_bufts ? a->arena_of[id] : -1;
    }
    if (a->n_arenas == 1) {
        memset(a->node_arena, 0, (size_t)n_nodes * sizeof(int32_t));
        memset(a->leaf_arena, 0, (size_t)n_leafs * sizeof(int32_t));
    }
    a->n_node_ids = n_nodes;
    a->n_leaf_ids = n_leafs;
    return true;
}

/* -- what ggml calls ------------------------------------------------------------------------------------------ */

static bool reserve(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    gs_error error;
    gh_known *k;
    if (!take_ids(a, graph, node_ids, leaf_ids)) {
        return failed_with(GS_NO_HOST_MEMORY, "no memory to reserve a graph");
    }
    k = prepare(a, graph, true, &error);
    return k != NULL && make_fit(a, k, &error) ? true : failed(&error);
}

static bool reserve_timed(const gh_ggml *owner, gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    const long long began = now();
    bool done;
    if (owner != NULL) {
        done = owner->gallocr_reserve_n((void *)a, graph, node_ids, leaf_ids);
    } else {
        pthread_mutex_lock(&a->lock);
        done = reserve(a, graph, node_ids, leaf_ids);
        pthread_mutex_unlock(&a->lock);
    }
    count(GH_COUNT_RESERVE, 1);
    count(GH_COUNT_RESERVE_NS, now() - began);
    return done;
}

bool ggml_gallocr_reserve_n(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids)
{
    return reserve_timed(owner_of(a, __builtin_return_address(0)), a, graph, node_ids, leaf_ids);
}

bool ggml_gallocr_reserve(gh_gallocr *a, void *graph)
{
    return reserve_timed(owner_of(a, __builtin_return_address(0)), a, graph, NULL, NULL);
}

void ggml_gallocr_reserve_n_size(gh_gallocr *a, void *graph, const int *node_ids, const int *leaf_ids, size_t *sizes)
{
    gs_error error = {.status = GS_NO_HOST_MEMORY, .tensor = -1, .backend = -1, .index = -1};
    gh_known *k;
    const gh_ggml *owner = owner_of(a, __builtin_return_address(0));
    if (owner != NULL) {
        if (owner->gallocr_reserve_n_size != NULL) {
            owner->gallocr_reserve_n_size((void *)a, graph, node_ids, leaf_ids, sizes);
        }
        return;
    }
    pthread_mutex_lock(&a->lock);
    /* What these bytes are for has no memory yet: those of a reserved plan would be too many. */
    k = take_ids(a, graph, node_ids, leaf_ids) ? prepare(a, graph, false, &error) : NULL;
    for (int32_t i = 0; i < a->n_bufts; i++) {
        bool again = false;
        for (int32_t j = 0; j < i; j++) {
            again |= a->arena_of[j] == a->arena_of[i];
        }
        sizes[i] = k != NULL && !again ? (size_t)k->view.arena[a->arena_of[i]].nbytes : 0;
    }
    pthread_mutex_unlock(&a->lock);
    if (k == NULL) {
        failed(&error);
    }
}

static bool alloc_graph(gh_gallocr *a, void *graph)
{
    gs_error error;
    gh_known *k;
    if (a->n_arenas == 1) {
        if ((a->n_node_ids != a->lib->graph_n_nodes(graph) || a->n_leaf_ids != gh_graph_n_leafs(a->lib, graph))
            && !take_ids(a, graph, NULL, NULL)) {
            return failed_with(GS_NO_HOST_MEMORY, "no memory to allocate a graph");
        }
    } else if (a->n_node_ids != a->lib->graph_n_nodes(graph) || a->n_leaf_ids != gh_graph_n_leafs(a->lib, graph)) {
        return false;           /* where its nodes go only the caller knows: it reserves, and comes back */
    }
    k = prepare(a, graph, true, &error);
    if (k == NULL) {
        return failed(&error);
    }
    /* With several types the caller waits for its devices before buffers change, which it does when it reserves. */
    if (!fits(a, k) && (a->n_arenas > 1 || !make_fit(a, k, &error))) {
        return a->n_arenas > 1 ? false : failed(&error);
    }
    if (!gh_known_resolve(k, a->arena, a->generation)) {
        return failed_with(GS_BAD_PLACEMENT, "a tensor that is to be placed was not");
    }
    for (int32_t b = 0; b < a->n_arenas; b++) {
        gh_arena_reset(&a->arena[b], a->lib);
    }
    gh_known_commit(k, a->lib);
    return true;
}

bool ggml_gallocr_alloc_graph(gh_gallocr *a, void *graph)
{
    const gh_ggml *owner = owner_of(a, __builtin_return_address(0));
    const long long began = now();
    bool done;
    if (owner != NULL) {
        done = owner->gallocr_alloc_graph((void *)a, graph);
    } else {
        pthread_mutex_lock(&a->lock);
        done = alloc_graph(a, graph);
        pthread_mutex_unlock(&a->lock);
    }
    count(GH_COUNT_ALLOC, 1);
    count(GH_COUNT_ALLOC_NS, now() - began);
    return done;
}

size_t ggml_gallocr_get_buffer_size(gh_gallocr *a, int id)
{
    const gh_ggml *owner = owner_of(a, __builtin_return_address(0));
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

/* -- looking at it -------------------------------------------------------------------------------------------- */

static gh_arena_facts *facts_of(const gh_gallocr *a)
{
    gh_arena_facts *facts = calloc((size_t)a->n_arenas, sizeof *facts);
    for (int32_t i = 0; facts != NULL && i < a->n_arenas; i++) {
        const gh_arena *arena = &a->arena[i];
        snprintf(facts[i].name, sizeof facts[i].name, "%s", a->lib->buft_name(arena->buft));
        facts[i].alignment = (int64_t)arena->alignment;
        facts[i].max_size = arena->max_size < (size_t)INT64_MAX / 2 ? (int64_t)arena->max_size : 0;
        facts[i].nbytes = (int64_t)gh_arena_nbytes(arena, a->lib);
        facts[i].inplace = a->lib->inplace;
    }
    return facts;
}

/* A plan of its own for a graph that another's serves: the same decisions, for its own sizes. */
static bool own_plan(gh_gallocr *a, gh_known *k)
{
    gs_error error;
    int serves = 1;
    if (gh_known_draw(k, &error) != GS_OK) {
        return false;
    }
    if (k->plan == NULL) {
        gs_problem problem = problem_of(a, k);
        gs_api_plan *plan = NULL;
        if (gh_api->plan_replay(k->lender->plan, k->lender->graph, k->graph, &problem, &plan, &serves, &error) != GS_OK
            || !serves) {
            return false;
        }
        gh_known_own(k, plan);
    }
    return true;
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
        if (a->known[0] != NULL && a->known[0]->planned && own_plan(a, a->known[0]) && (*arenas = facts_of(a)) != NULL) {
            k = a->known[0];
            atomic_fetch_add(&k->refs, 1);
        }
        pthread_mutex_unlock(&a->lock);
    }
    pthread_mutex_unlock(&all.lock);
    return k;
}

bool gh_last_error(gs_error *error)
{
    pthread_mutex_lock(&all.lock);
    *error = all.error;
    pthread_mutex_unlock(&all.lock);
    return error->status != GS_OK;
}

bool gh_failed(const gs_error *error)
{
    return failed(error);
}

void gh_note_not_understood(const char *why)
{
    pthread_mutex_lock(&all.lock);
    if (all.not_understood == NULL) {
        all.not_understood = why;
    }
    pthread_mutex_unlock(&all.lock);
}

const char *gh_not_understood(void)
{
    const char *why;
    pthread_mutex_lock(&all.lock);
    why = all.not_understood;
    pthread_mutex_unlock(&all.lock);
    return why;
}
