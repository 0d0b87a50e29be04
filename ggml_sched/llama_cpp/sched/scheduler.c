/* ggml_sched/llama_cpp/sched/scheduler.c -- the functions of ggml's scheduler, as clients call them.  See scheduler.h.
 *
 * A scheduler that is not ours is ggml's own (our functions are what its own calls reach, too): such calls are passed
 * on to the library that they come from.  Where ggml would abort, the answer is that of a failure.
 */
#include "scheduler.h"

#include <stdlib.h>
#include "alloc.h"
#include "listed.h"

#define GH_CALLER __builtin_return_address(0)

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

static const gh_runtime *theirs(const void *sched, const void *caller)
{
    return sched != NULL ? gh_runtime_of_caller(caller) : NULL;
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

static void describe(gh_sched *s)
{
    for (int b = 0; b < s->n_backends; b++) {
        gs_backend_info *info = &s->info[b];
        info->name = s->rt->backend_name(s->backend[b]);
        info->alignment = (int64_t)s->lib->buft_get_alignment(s->buft[b]);
        info->max_buffer = gh_max_buffer(s->lib->buft_get_max_size(s->buft[b]));
        info->inplace = s->lib->inplace;
        s->optimize[b] = gh_runtime_optimize(s->rt, s->backend[b]);
        s->some_optimize |= s->optimize[b] != NULL;
        for (int c = 0; c < s->n_backends; c++) {
            s->reads[b * s->n_backends + c] = b == c || s->rt->backend_supports_buft(s->backend[b], s->buft[c]);
        }
    }
}

static void make_events(gh_sched *s)
{
    for (int b = 0; b < s->n_backends && s->n_places > 1; b++) {
        void *device = s->rt->backend_get_device(s->backend[b]);
        for (int k = 0; k < s->n_places && device != NULL; k++) {
            s->event[b][k] = s->rt->backend_event_new(device);
            s->overlaps |= s->event[b][k] != NULL;
        }
    }
}

static void make_pools(gh_sched *s)
{
    for (int b = 0; b < s->n_backends; b++) {
        int pool = s->n_pools;
        for (int k = 0; k < s->n_pools && !s->overlaps; k++) {
            if (s->pool[k].buft == s->buft[b]) {
                pool = k;
            }
        }
        s->pool_of[b] = pool;
        if (pool == s->n_pools) {
            s->first_of[pool] = b;
            gh_arena_init(&s->pool[s->n_pools++], s->lib, s->buft[b]);
        }
    }
}

static bool serves(const gh_runtime *rt, void *const *backends, void *const *bufts, int n)
{
    if (rt->wrong != NULL) {
        gh_note_not_understood(rt->wrong);
        return false;
    }
    if (!atomic_load(&schedules)) {
        return false;
    }
    for (int b = 0; b < n; b++) {
        void *buft = bufts != NULL ? bufts[b] : rt->backend_get_default_buffer_type(backends[b]);
        /* Tensors of several devices at once have addresses of another kind. */
        if (rt->backend_buft_is_meta != NULL && rt->backend_buft_is_meta(buft)) {
            return false;
        }
    }
    return true;
}

GH_EXPORT void *ggml_backend_sched_new(void **backends, void **bufts, int n_backends, size_t graph_size, bool parallel,
                                       bool op_offload)
{
    const gh_runtime *rt;
    gh_sched *s;
    void *device;
    if (n_backends < 1 || n_backends > GH_MAX_BACKENDS || backends == NULL) {
        return NULL;
    }
    rt = gh_runtime_find(GH_CALLER, bufts != NULL ? bufts : backends, n_backends);
    if (rt == NULL) {
        return NULL;
    }
    if (rt->backend_sched_new != NULL && !serves(rt, backends, bufts, n_backends)) {
        return rt->backend_sched_new(backends, bufts, n_backends, graph_size, parallel, op_offload);
    }
    device = rt->backend_get_device(backends[n_backends - 1]);
    if (device == NULL || rt->backend_dev_type(device) != GH_DEVICE_CPU) {
        return NULL;
    }
    s = calloc(1, sizeof *s);
    if (s == NULL) {
        return NULL;
    }
    s->magic = GH_SCHED_MAGIC;
    s->generation = 1;
    s->rt = rt;
    s->lib = rt->lib;
    s->n_backends = n_backends;
    s->n_places = parallel ? GH_MAX_PLACES : 1;
    /* Clients of before May 2025 pass five parameters: the last is whatever a register holds. */
    s->offload = !rt->asks_offload || op_offload;
    for (int b = 0; b < n_backends; b++) {
        s->backend[b] = backends[b];
        s->buft[b] = bufts != NULL ? bufts[b] : rt->backend_get_default_buffer_type(backends[b]);
        if (!rt->backend_supports_buft(s->backend[b], s->buft[b])) {
            free(s);
            return NULL;
        }
    }
    describe(s);
    make_events(s);
    make_pools(s);
    gh_unshelve(s);
    gh_list(s);
    gh_count_one(GH_COUNT_NEW);
    return s;
}

GH_EXPORT void ggml_backend_sched_free(void *sched)
{
    gh_sched *s = ours(sched);
    if (s == NULL) {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL) {
            rt->backend_sched_free(sched);
        }
        return;
    }
    gh_unlist(s);
    for (int b = 0; b < s->n_backends; b++) {
        for (int k = 0; k < GH_MAX_PLACES; k++) {
            if (s->event[b][k] != NULL) {
                s->rt->backend_event_free(s->event[b][k]);
            }
        }
    }
    gh_shelve(s);
    for (int k = 0; k < s->n_pools; k++) {
        gh_arena_free(&s->pool[k], s->lib);
    }
    gh_looks_free(&s->elsewhere);
    gh_choices_free(&s->choices);
    gh_choices_free(&s->kept_choices);
    free(s->part);
    free(s->ids);
    free(s->is_used);
    free(s->dep);
    s->magic = 0;
    free(s);
}

/* -- allocating ---------------------------------------------------------------------------------------------------- */

static void reset(gh_sched *s)
{
    gh_choices_clear(&s->choices);
    s->now = NULL;
    s->is_allocated = false;
}

static void synchronize(gh_sched *s)
{
    gh_synchronize(s);
    if (!s->is_allocated) {
        s->next_place = 0;
    }
}

/* A graph's plan, and where it is `wanted` the buffers for it; NULL: a device refuses, or an error was logged. */
static gh_prepared *plan(gh_sched *s, void *graph, bool wanted, bool reserves)
{
    gh_prepared *p;
    pthread_mutex_lock(&s->lock);
    p = gh_prepare(s, graph, reserves);
    if (p != NULL && wanted && !gh_pools_grow(s, p)) {
        p = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    return p;
}

static bool allocate(gh_sched *s, void *graph)
{
    gh_prepared *p;
    s->place = s->next_place;
    s->next_place = (s->next_place + 1) % s->n_places;
    s->is_allocated = false;
    gh_unbind(s, graph);
    p = plan(s, graph, true, false);
    if (p == NULL || !gh_bind(s, p, graph)) {
        return false;
    }
    s->now = p;
    return s->is_allocated = true;
}

GH_EXPORT void ggml_backend_sched_reset(void *sched)
{
    gh_sched *s = ours(sched);
    if (s != NULL) {
        reset(s);
    } else {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL) {
            rt->backend_sched_reset(sched);
        }
    }
}

GH_EXPORT void ggml_backend_sched_split_graph(void *sched, void *graph)
{
    gh_sched *s = ours(sched);
    const long long began = gh_now();
    if (s != NULL) {
        gh_unbind(s, graph);
        s->is_allocated = false;
        s->now = plan(s, graph, false, false);
    } else {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL && rt->backend_sched_split_graph != NULL) {
            rt->backend_sched_split_graph(sched, graph);
        }
    }
    gh_count_call(GH_COUNT_SPLIT, began);
}

GH_EXPORT void ggml_backend_sched_reserve_size(void *sched, void *graph, size_t *sizes)
{
    gh_sched *s = ours(sched);
    gh_prepared *p;
    if (s == NULL) {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL && rt->backend_sched_reserve_size != NULL) {
            rt->backend_sched_reserve_size(sched, graph, sizes);
        }
        return;
    }
    reset(s);
    synchronize(s);
    gh_unbind(s, graph);
    p = plan(s, graph, false, false);
    memset(sizes, 0, (size_t)s->n_backends * sizeof *sizes);
    for (int k = 0; p != NULL && k < s->n_pools; k++) {
        for (int32_t i = p->need_begin[k]; i < p->need_begin[k + 1]; i++) {
            sizes[s->first_of[k]] += (size_t)p->need[i];
        }
    }
    s->now = p;
}

static bool reserve(gh_sched *s, void *graph)
{
    gh_prepared *p;
    synchronize(s);
    gh_unbind(s, graph);
    p = plan(s, graph, true, true);
    if (p == NULL) {
        return false;
    }
    reset(s);
    return true;
}

GH_EXPORT bool ggml_backend_sched_reserve(void *sched, void *graph)
{
    gh_sched *s = ours(sched);
    const gh_runtime *rt = s == NULL ? theirs(sched, GH_CALLER) : NULL;
    const long long began = gh_now();
    const bool done = s != NULL ? reserve(s, graph) : rt != NULL && rt->backend_sched_reserve(sched, graph);
    gh_count_call(GH_COUNT_SCHED_RESERVE, began);
    return done;
}

GH_EXPORT bool ggml_backend_sched_alloc_graph(void *sched, void *graph)
{
    gh_sched *s = ours(sched);
    const gh_runtime *rt = s == NULL ? theirs(sched, GH_CALLER) : NULL;
    const long long began = gh_now();
    const bool done = s != NULL ? !s->is_allocated && allocate(s, graph)
                                : rt != NULL && rt->backend_sched_alloc_graph(sched, graph);
    gh_count_call(GH_COUNT_SCHED_ALLOC, began);
    return done;
}

/* -- computing ----------------------------------------------------------------------------------------------------- */

GH_EXPORT int ggml_backend_sched_graph_compute_async(void *sched, void *graph)
{
    gh_sched *s = ours(sched);
    if (s == NULL) {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        return rt != NULL ? rt->backend_sched_graph_compute_async(sched, graph) : GH_STATUS_FAILED;
    }
    if (!s->is_allocated && s->now != NULL) {
        reset(s);
    }
    if (!s->is_allocated && !allocate(s, graph)) {
        return GH_STATUS_ALLOC_FAILED;
    }
    return gh_compute(s);
}

GH_EXPORT int ggml_backend_sched_graph_compute(void *sched, void *graph)
{
    gh_sched *s = ours(sched);
    int status;
    if (s == NULL) {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        return rt != NULL ? rt->backend_sched_graph_compute(sched, graph) : GH_STATUS_FAILED;
    }
    status = ggml_backend_sched_graph_compute_async(sched, graph);
    synchronize(s);
    return status;
}

GH_EXPORT void ggml_backend_sched_synchronize(void *sched)
{
    gh_sched *s = ours(sched);
    if (s != NULL) {
        synchronize(s);
    } else {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL) {
            rt->backend_sched_synchronize(sched);
        }
    }
}

GH_EXPORT void ggml_backend_sched_set_eval_callback(void *sched, gh_eval_callback callback, void *user)
{
    gh_sched *s = ours(sched);
    if (s != NULL) {
        s->callback = callback;
        s->callback_user = user;
    } else {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL) {
            rt->backend_sched_set_eval_callback(sched, callback, user);
        }
    }
}

/* -- asking -------------------------------------------------------------------------------------------------------- */

#define GH_ASK(type, name, parameters, arguments, none, answer)                                  \
    GH_EXPORT type ggml_backend_sched_##name parameters                                          \
    {                                                                                            \
        gh_sched *s = ours(sched);                                                               \
        if (s == NULL) {                                                                         \
            const gh_runtime *rt = theirs(sched, GH_CALLER);                                     \
            return rt != NULL && rt->backend_sched_##name != NULL ? rt->backend_sched_##name arguments : (none); \
        }                                                                                        \
        answer                                                                                   \
    }

GH_ASK(int, get_n_backends, (void *sched), (sched), 0, return s->n_backends;)
GH_ASK(int, get_n_splits, (void *sched), (sched), 0, return s->n_splits;)
GH_ASK(int, get_n_copies, (void *sched), (sched), 0, return s->n_places;)
GH_ASK(void *, get_backend, (void *sched, int i), (sched, i), NULL,
       return i >= 0 && i < s->n_backends ? s->backend[i] : NULL;)
GH_ASK(void *, get_buffer_type, (void *sched, void *backend), (sched, backend), NULL,
       const int b = index_of(s, backend);
       return b >= 0 ? s->buft[b] : NULL;)
GH_ASK(size_t, get_buffer_size, (void *sched, void *backend), (sched, backend), 0,
       const int b = index_of(s, backend);
       return b >= 0 && s->first_of[s->pool_of[b]] == b ? gh_arena_nbytes(&s->pool[s->pool_of[b]], s->lib) : 0;)
GH_ASK(void *, get_tensor_backend, (void *sched, gx_tensor *tensor), (sched, tensor), NULL,
       const int32_t id = s->now != NULL ? gh_reading_id(&s->now->reading, tensor) : -1;
       const int32_t b = id >= 0 ? s->now->view.assign[id] : gh_choices_get(&s->choices, tensor);
       return b >= 0 ? s->backend[b] : NULL;)

GH_EXPORT void ggml_backend_sched_set_tensor_backend(void *sched, gx_tensor *tensor, void *backend)
{
    gh_sched *s = ours(sched);
    if (s != NULL) {
        const int b = index_of(s, backend);
        if (b >= 0) {
            gh_choices_set(&s->choices, tensor, b);
        }
    } else {
        const gh_runtime *rt = theirs(sched, GH_CALLER);
        if (rt != NULL) {
            rt->backend_sched_set_tensor_backend(sched, tensor, backend);
        }
    }
}
