/* ggml_sched/llama_cpp/ggml/runtime.c -- looks up the functions that runtime.h lists. */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define GH_N_RUNTIMES 16
static struct {
    pthread_mutex_t lock;
    int n;
    gh_runtime at[GH_N_RUNTIMES];
} runtimes = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char *find_functions(gh_runtime *rt)
{
    const char *missing = NULL;
    void *found;
#define GH_X(result, name, parameters, needed)         \
    found = dlsym(rt->lib->handle, "ggml_" #name);     \
    memcpy(&rt->name, &found, sizeof found);           \
    if (found == NULL && (needed)) {                   \
        missing = "ggml_" #name;                       \
    }
    GH_RUNTIME(GH_X)
#undef GH_X
    return missing;
}

/* Find the offset of a graph's unique id.  The size of a view of a graph tells the version: the id is its last word.
 * The size shows in the bytes that the call leaves untouched. */
static void find_uid(gh_runtime *rt)
{
    enum { previous = 88, with = 96 };
    gh_part part, *result = &part;
    uint64_t graph[64] = {0};
    void (*view)(gh_part *, void *, int, int);
    size_t stop = sizeof part;
    rt->at_uid = 0;
    if (rt->graph_next_uid == NULL) {
        return;
    }
    memset(&part, 0xa5, sizeof part);
    /* A large result is written through a hidden first parameter. */
    memcpy(&view, &rt->graph_view, sizeof view);
    view(result, graph, 0, 0);
    while (stop > 0 && (unsigned char)part.bytes[stop - 1] == 0xa5) {
        stop--;
    }
    if (stop == with) {
        rt->at_uid = previous;
    }
}

static void introspect(gh_runtime *rt, const gh_ggml *lib)
{
    memset(rt, 0, sizeof *rt);
    rt->lib = lib;
    /* Both functions were added in the same days of May 2025. */
    rt->asks_offload = dlsym(lib->handle, "ggml_opt_prepare_alloc") != NULL;
    rt->unsupported = find_functions(rt);
    if (rt->unsupported == NULL) {
        rt->unsupported = lib->unsupported;
    }
    if (rt->unsupported == NULL) {
        find_uid(rt);
    }
}

const gh_runtime *gh_runtime_find(const void *caller, void *const *bufts, int n_bufts)
{
    const gh_ggml *lib = gh_ggml_find(caller, bufts, n_bufts);
    const gh_runtime *found = NULL;
    if (lib == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&runtimes.lock);
    for (int i = 0; i < runtimes.n; i++) {
        if (runtimes.at[i].lib == lib) {
            found = &runtimes.at[i];
        }
    }
    if (found == NULL && runtimes.n < GH_N_RUNTIMES) {
        introspect(&runtimes.at[runtimes.n], lib);
        found = &runtimes.at[runtimes.n++];
    }
    pthread_mutex_unlock(&runtimes.lock);
    return found;
}

const gh_runtime *gh_runtime_of_caller(const void *caller)
{
    /* A client calls from a few dozen addresses, and dladdr costs more than most of these calls. */
    enum { places = 256, probes = 16 };
    static _Thread_local struct {
        const void *caller;
        const gh_runtime *rt;
    } known[places];
    const size_t home = (size_t)(((uintptr_t)caller * UINT64_C(0x9e3779b97f4a7c15)) >> 56) % places;
    size_t at = home;
    for (size_t i = 0; i < probes; i++) {
        at = (home + i) % places;
        if (known[at].rt == NULL) {
            break;
        }
        if (known[at].caller == caller) {
            return known[at].rt;
        }
    }
    if (known[at].rt != NULL) {
        at = home;
    }
    known[at].rt = gh_runtime_find(caller, NULL, 0);
    known[at].caller = caller;
    return known[at].rt;
}

/* A backend is: pointer to its guid, its functions, its device, its own data.  The number of functions tells the
 * version: the last of 14, and the last of 16, reorders nodes. */
gh_optimize gh_runtime_optimize(const gh_runtime *rt, void *backend)
{
    const void *device = rt->backend_get_device(backend);
    void *const *words = backend;
    for (int i = 1; device != NULL && i <= 17; i++) {
        if (words[i] == device) {
            gh_optimize found = NULL;
            if (i == 15 || i == 17) {
                memcpy(&found, &words[i - 1], sizeof found);
            }
            return found;
        }
    }
    return NULL;
}
