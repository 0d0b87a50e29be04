/* ggml_sched/llama_cpp/hook/scheduler.c -- ggml's functions of schedulers, as clients call them.  See scheduler.h.
 *
 * Schedulers that ggml's own library made arrive here, too, because these functions have ggml's names: such calls are
 * passed on to the library that they come from.  Where ggml would abort, these functions return a failure.
 */
#include "scheduler.h"

#include "measuring.h"

#include <stdio.h>

static atomic_bool schedules;

void gh_set_schedules(bool on)
{
    atomic_store(&schedules, on);
}

static gh_sched *ours(void *sched)
{
    gh_sched *s = sched;
    return s != NULL && s->magic == GH_SCHED_MAGIC ? s : NULL;
}

static int index_of(const gh_sched *s, const void *backend)
{
    for (int b = 0; b < s->n_backends; b++) {
        if (s->backend[b] == backend) {
            return b;
        }
    }
    return -1;
}

/* -- making -------------------------------------------------------------------------------------------------------- */

static void make_events(gh_sched *s, gh_cache_key *key)
{
    for (int b = 0; b < s->n_backends && s->n_copies > 1; b++) {
        void *device = s->lib->backend_get_device(s->backend[b]);
        for (int k = 0; k < s->n_copies && device != NULL; k++) {
            s->event[b][k] = s->lib->backend_event_new(device);
            key->overlaps |= s->event[b][k] != NULL;
        }
    }
}

/* Fill the cache key: everything that plans depend on, besides graph and problem. */
static void make_key(gh_sched *s, gh_cache_key *key, bool offloads)
{
    memset(key, 0, sizeof *key);
    key->lib = s->lib;
    key->is_scheduler = true;
    key->offloads = offloads;
    key->n_backends = s->n_backends;
    key->n_copies = s->n_copies;
    for (int b = 0; b < s->n_backends; b++) {
        key->device[b] = s->lib->backend_get_device(s->backend[b]);
        gh_arena_init(&key->type[b], s->lib, s->buft[b]);
        s->optimize[b] = gh_find_optimize(s->lib, s->backend[b]);
        key->reorders |= s->optimize[b] != NULL;
        for (int c = 0; c < s->n_backends; c++) {
            key->reads[b * s->n_backends + c] = b == c || s->lib->backend_supports_buft(s->backend[b], s->buft[c]);
        }
    }
    make_events(s, key);
}

static bool make_cache(gh_sched *s, bool offloads)
{
    gh_cache_key key;
    gh_plan_cache *c;
    make_key(s, &key, offloads);
    c = s->cache = gh_plan_cache_acquire(&key, &gh_sched_level, s);
    if (c == NULL) {
        return false;
    }
    c->policy.leafs_first = 1;
    c->policy.stream = 1; /* copy weights anew in each compute: clients write to them without calling us       */
    c->policy.n_copies = s->n_copies;
    for (int b = 0; b < s->n_backends; b++) {
        c->name[b] = s->lib->backend_name(s->backend[b]);
    }
    gh_plan_cache_publish(c);
    return true;
}

static void destroy(gh_sched *s)
{
    if (s->cache != NULL) {
        gh_plan_cache_release(s->cache);
    }
    for (int b = 0; b < s->n_backends; b++) {
        for (int k = 0; k < GH_MAX_COPIES; k++) {
            if (s->event[b][k] != NULL) {
                s->lib->backend_event_free(s->event[b][k]);
            }
        }
    }
    gh_assignments_free(&s->assignments);
    free(s->part);
    free(s->original);
    free(s->ids);
    free(s->is_used);
    free(s->deps.pair);
    s->magic = 0;
    free(s);
}

/* Whether a scheduler of ours serves these backends; otherwise the library's own does. */
static bool serves(const gh_ggml *lib, void *const *backends, void *const *bufts, int n)
{
    if (lib->unsupported_scheduler != NULL) {
        gh_note_unsupported(lib->unsupported_scheduler);
        return false;
    }
    if (!atomic_load(&schedules)) {
        return false;
    }
    for (int b = 0; b < n; b++) {
        void *buft = bufts != NULL ? bufts[b] : lib->backend_get_default_buffer_type(backends[b]);
        /* A meta buffer type stands for several devices at once: base plus offset is not an address there. */
        if (lib->backend_buft_is_meta != NULL && lib->backend_buft_is_meta(buft)) {
            return false;
        }
    }
    return true;
}

GH_EXPORT void *ggml_backend_sched_new(void **backends, void **bufts, int n_backends, size_t graph_size, bool parallel,
                                       bool op_offload)
{
    const gh_ggml *lib;
    gh_sched *s;
    void *device;
    bool offloads;
    if (n_backends < 1 || n_backends > GH_MAX_BACKENDS || backends == NULL) {
        return NULL;
    }
    lib = gh_ggml_find(GH_CALLER, bufts != NULL ? bufts : backends, n_backends);
    if (lib == NULL) {
        return NULL;
    }
    if (lib->backend_sched_new != NULL && !serves(lib, backends, bufts, n_backends)) {
        return lib->backend_sched_new(backends, bufts, n_backends, graph_size, parallel, op_offload);
    }
    device = lib->backend_get_device(backends[n_backends - 1]);
    if (device == NULL || lib->backend_dev_type(device) != GH_DEVICE_CPU) {
        return NULL;
    }
    s = calloc(1, sizeof *s);
    if (s == NULL) {
        return NULL;
    }
    s->magic = GH_SCHED_MAGIC;
    s->lib = lib;
    s->n_backends = n_backends;
    s->n_copies = parallel ? GH_MAX_COPIES : 1;
    /* Clients of before May 2025 pass five parameters: op_offload, the sixth, is undefined then. */
    offloads = !lib->has_op_offload || op_offload;
    for (int b = 0; b < n_backends; b++) {
        s->backend[b] = backends[b];
        s->buft[b] = bufts != NULL ? bufts[b] : lib->backend_get_default_buffer_type(backends[b]);
        if (!lib->backend_supports_buft(s->backend[b], s->buft[b])) {
            free(s);
            return NULL;
        }
    }
    if (!make_cache(s, offloads)) {
        destroy(s);
        return NULL;
    }
    return s;
}

GH_EXPORT void ggml_backend_sched_free(void *sched)
{
    GH_PASS_ON(ours(sched), (void)0, backend_sched_free, sched);
    destroy(sched);
}

/* -- allocating ---------------------------------------------------------------------------------------------------- */

static void reset(gh_sched *s)
{
    gh_assignments_clear(&s->assignments);
    s->current = NULL;
    s->is_allocated = false;
}

static void synchronize(gh_sched *s)
{
    gh_synchronize(s);
    if (!s->is_allocated) {
        s->next_copy = 0;
    }
}

static void wait_for_all(void *owner)
{
    gh_synchronize(owner);
}

/* The entry of a graph, with a plan.  `grows`: also grow the buffers to what the plan needs.  NULL: last_error() has
 * the reason. */
static gh_plan_entry *get_entry(gh_sched *s, void *graph, int flags, bool grows)
{
    gs_error error;
    gh_plan_entry *e;
    pthread_mutex_lock(&s->cache->lock);
    s->current = NULL;
    e = grows ? gh_plan_cache_get_backed(s->cache, graph, flags, NULL, wait_for_all, &error)
              : gh_plan_cache_get(s->cache, graph, flags, NULL, &error);
    if (e != NULL && !gh_plan_find_splits(s, e->plan)) {
        error.status = GS_NO_HOST_MEMORY;
        e = NULL;
    }
    pthread_mutex_unlock(&s->cache->lock);
    if (e != NULL) {
        s->n_splits = e->plan->n_splits;
    } else {
        gh_log_failure(s->lib, &error);
    }
    return e;
}

static bool allocate(gh_sched *s, void *graph)
{
    gh_plan_entry *e;
    s->cur_copy = s->next_copy;
    s->next_copy = (s->next_copy + 1) % s->n_copies;
    s->is_allocated = false;
    gh_unbind(s, graph);
    e = get_entry(s, graph, GH_REUSE | GH_HINTS, true);
    if (e == NULL || !gh_bind(s, e, graph)) {
        return false;
    }
    s->current = e;
    return s->is_allocated = true;
}

static bool reserve(gh_sched *s, void *graph)
{
    synchronize(s);
    gh_unbind(s, graph);
    if (get_entry(s, graph, GH_PIN | GH_REUSE, true) == NULL) {
        return false;
    }
    reset(s);
    return true;
}

/* Measure a graph in a dry run (measuring.h): reserve it in arenas without memory, and report their sizes.  `s`: the
 * scheduler if it is ours, else NULL. */
static void measure(gh_sched *s, const void *caller, void *sched, void *graph, size_t *sizes)
{
    size_t nbytes[GH_MAX_BACKENDS] = {0};
    if (s == NULL) {
        const gh_ggml *lib = gh_ggml_of_caller(caller);
        if (lib != NULL && lib->backend_sched_reserve != NULL && lib->backend_sched_get_buffer_type != NULL) {
            gh_measure_stock(lib, sched, graph, sizes);
        }
        return;
    }
    if (!reserve(s, graph)) {
        return;
    }
    for (int pool = 0; pool < s->cache->n_pools; pool++) {
        nbytes[s->cache->first_of[pool]] = gh_arena_nbytes(&s->cache->pool[pool], s->lib);
    }
    if (sizes != NULL) {
        memcpy(sizes, nbytes, (size_t)s->n_backends * sizeof *sizes);
    }
    gh_report_measured(s->lib, s, s->buft, nbytes, s->n_backends);
}

GH_EXPORT void ggml_backend_sched_reset(void *sched)
{
    GH_PASS_ON(ours(sched), (void)0, backend_sched_reset, sched);
    reset(sched);
}

GH_EXPORT void ggml_backend_sched_split_graph(void *sched, void *graph)
{
    GH_TIMED(GH_COUNT_SPLIT);
    gh_sched *const s = ours(sched);
    if (gh_measures_split(sched)) {
        measure(s, GH_CALLER, sched, graph, NULL);
        return;
    }
    GH_PASS_ON(s, (void)0, backend_sched_split_graph, sched, graph);
    gh_unbind(s, graph);
    s->is_allocated = false;
    s->current = get_entry(s, graph, GH_REUSE, false);
}

GH_EXPORT void ggml_backend_sched_reserve_size(void *sched, void *graph, size_t *sizes)
{
    gh_sched *const s = ours(sched);
    gh_plan_entry *e;
    if (gh_measures()) {
        measure(s, GH_CALLER, sched, graph, sizes);
        return;
    }
    GH_PASS_ON(s, (void)0, backend_sched_reserve_size, sched, graph, sizes);
    reset(s);
    synchronize(s);
    gh_unbind(s, graph);
    e = get_entry(s, graph, 0, false);
    memset(sizes, 0, (size_t)s->n_backends * sizeof *sizes);
    for (int pool = 0; e != NULL && pool < s->cache->n_pools; pool++) {
        sizes[s->cache->first_of[pool]] = gh_plan_nbytes(e->plan, pool);
    }
    s->current = e;
}

GH_EXPORT bool ggml_backend_sched_reserve(void *sched, void *graph)
{
    GH_TIMED(GH_COUNT_SCHED_RESERVE);
    gh_sched *const s = ours(sched);
    GH_PASS_ON(s, false, backend_sched_reserve, sched, graph);
    return reserve(s, graph);
}

GH_EXPORT bool ggml_backend_sched_alloc_graph(void *sched, void *graph)
{
    GH_TIMED(GH_COUNT_SCHED_ALLOC);
    gh_sched *const s = ours(sched);
    GH_PASS_ON(s, false, backend_sched_alloc_graph, sched, graph);
    return !s->is_allocated && allocate(s, graph);
}

/* -- computing ----------------------------------------------------------------------------------------------------- */

static int compute(gh_sched *s, void *graph)
{
    if (!s->is_allocated && s->current != NULL) {
        reset(s);
    }
    if (!s->is_allocated && !allocate(s, graph)) {
        return GH_STATUS_ALLOC_FAILED;
    }
    return gh_compute(s);
}

GH_EXPORT int ggml_backend_sched_graph_compute_async(void *sched, void *graph)
{
    GH_PASS_ON(ours(sched), GH_STATUS_FAILED, backend_sched_graph_compute_async, sched, graph);
    return compute(sched, graph);
}

GH_EXPORT int ggml_backend_sched_graph_compute(void *sched, void *graph)
{
    int status;
    GH_PASS_ON(ours(sched), GH_STATUS_FAILED, backend_sched_graph_compute, sched, graph);
    status = compute(sched, graph);
    synchronize(sched);
    return status;
}

GH_EXPORT void ggml_backend_sched_synchronize(void *sched)
{
    GH_PASS_ON(ours(sched), (void)0, backend_sched_synchronize, sched);
    synchronize(sched);
}

GH_EXPORT void ggml_backend_sched_set_eval_callback(void *sched, gh_eval_callback callback, void *user)
{
    gh_sched *const s = ours(sched);
    GH_PASS_ON(s, (void)0, backend_sched_set_eval_callback, sched, callback, user);
    s->callback = callback;
    s->callback_user = user;
}

GH_EXPORT void ggml_backend_sched_set_tensor_backend(void *sched, gx_tensor *tensor, void *backend)
{
    gh_sched *const s = ours(sched);
    int b;
    GH_PASS_ON(s, (void)0, backend_sched_set_tensor_backend, sched, tensor, backend);
    b = index_of(s, backend);
    if (b >= 0) {
        gh_assignments_set(&s->assignments, tensor, b);
    }
}

/* -- queries ------------------------------------------------------------------------------------------------------- */

#define GH_QUERY(type, name, parameters, none, answer, ...)     \
    GH_EXPORT type ggml_backend_sched_##name parameters         \
    {                                                           \
        gh_sched *const s = ours(sched);                        \
        GH_PASS_ON(s, none, backend_sched_##name, __VA_ARGS__); \
        answer                                                  \
    }

GH_QUERY(int, get_n_backends, (void *sched), 0, return s->n_backends;, sched)
GH_QUERY(int, get_n_splits, (void *sched), 0, return s->n_splits;, sched)
GH_QUERY(int, get_n_copies, (void *sched), 0, return s->n_copies;, sched)
GH_QUERY(void *, get_backend, (void *sched, int i), NULL,
         return i >= 0 && i < s->n_backends ? s->backend[i] : NULL;, sched, i)
GH_QUERY(void *, get_buffer_type, (void *sched, void *backend), NULL,
         const int b = index_of(s, backend);
         return b >= 0 ? s->buft[b] : NULL;, sched, backend)
GH_QUERY(size_t, get_buffer_size, (void *sched, void *backend), 0,
         const int b = index_of(s, backend);
         return b >= 0 && s->cache->first_of[s->cache->pool_of[b]] == b
                    ? gh_arena_nbytes(&s->cache->pool[s->cache->pool_of[b]], s->lib) : 0;, sched, backend)
GH_QUERY(void *, get_tensor_backend, (void *sched, gx_tensor *tensor), NULL,
         const int32_t id = s->current != NULL ? gh_entry_id(s->current, tensor) : -1;
         const int32_t b = id >= 0 ? s->current->plan->view.assign[id] : gh_assignments_get(&s->assignments, tensor);
         return b >= 0 ? s->backend[b] : NULL;, sched, tensor)
