/* ggml_sched/llama_cpp/ggml/library.c -- finds a client's ggml and examines it once.  See library.h. */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

const gs_api *gh_api;

/* The libraries found so far: nearly always one.  An entry is written once, under the lock, before `n` counts it, and
 * never changes, so that other threads may hold pointers to it. */
#define GH_N_LIBRARIES 16
static struct {
    pthread_mutex_t lock;
    atomic_int n;
    gh_ggml at[GH_N_LIBRARIES];
} libraries = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char *const key_name = "ggml_backend_buft_alloc_buffer";

/* Look up all functions of GH_FUNCTIONS in the library.  The name of a missing one is stored as the reason not to serve
 * the library. */
static void find_functions(gh_ggml *lib)
{
    static const struct {
        const char *name;
        size_t offset;
        enum gh_need need;
    } functions[] = {
#define GH_X(result, name, parameters, need) {"ggml_" #name, offsetof(gh_ggml, name), need},
        GH_FUNCTIONS(GH_X)
#undef GH_X
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(lib->handle, functions[i].name);
        memcpy((char *)lib + functions[i].offset, &found, sizeof found);
        if (found == NULL && functions[i].need == GH_BY_BOTH) {
            lib->unsupported = functions[i].name;
        } else if (found == NULL && functions[i].need == GH_BY_SCHEDULER) {
            lib->unsupported_scheduler = functions[i].name;
        }
    }
}

/* -- finding --------------------------------------------------------------------------------------------------- */

/* A handle (of dlopen) of the loaded library that an address lies in, if that library has ggml's functions itself or
 * depends on one that has; else NULL.  Also NULL for an address in the hook, although the hook's functions have ggml's
 * names: such an address arrives as the caller's if the hook called ggml, and ggml's function ended with a tail
 * call. */
static void *handle_at(const void *address)
{
    Dl_info info, own;
    void *handle;
    if (address == NULL || dladdr(address, &info) == 0 || info.dli_fname == NULL
        || (dladdr(&libraries, &own) != 0 && own.dli_fbase == info.dli_fbase)) {
        return NULL;
    }
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (handle != NULL && dlsym(handle, key_name) == NULL) {
        dlclose(handle);
        return NULL;
    }
    return handle;
}

/* For dl_iterate_phdr: stop at a loaded library that is ggml's base library, and store its handle in *out. */
static int visit(struct dl_phdr_info *info, size_t size, void *out)
{
    void **found = out;
    (void)size;
    /* Only libraries of this name are searched: dlsym also finds functions of the libraries that the searched one
     * needs. */
    if (info->dlpi_name != NULL && strstr(info->dlpi_name, "ggml-base") != NULL) {
        *found = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
        if (*found != NULL && dlsym(*found, key_name) == NULL) {
            dlclose(*found);
            *found = NULL;
        }
    }
    return *found != NULL;
}

static void introspect(gh_ggml *lib, void *handle, const void *key)
{
    memset(lib, 0, sizeof *lib);
    lib->handle = handle;
    lib->key = key;
    /* Nothing shows whether ggml_backend_sched_new has the parameter op_offload, but ggml_opt_prepare_alloc was added
     * at the same time, in May 2025. */
    lib->has_op_offload = dlsym(handle, "ggml_opt_prepare_alloc") != NULL;
    find_functions(lib);
    if (lib->unsupported == NULL) {
        lib->unsupported = gh_api == NULL ? "no planner was given" : gh_probe(lib);
    }
    if (lib->unsupported == NULL) {
        gh_find_op_map(lib);
        gh_find_buffer_hooks(lib);
    } else {
        lib->unsupported_scheduler = lib->unsupported;
    }
    if (lib->unsupported_scheduler == NULL) {
        gh_find_uid(lib);
    }
}

const gh_ggml *gh_ggml_find(const void *caller, void *const *bufts, int n_bufts)
{
    const gh_ggml *found = NULL;
    const void *key;
    void *handle = NULL;
    /* Buffer types and backends begin with an address inside of the library that made them.  The return address into
     * the caller is less reliable: after a tail call it is that of another function. */
    for (int i = 0; handle == NULL && i < n_bufts; i++) {
        handle = handle_at(bufts[i] != NULL ? *(void *const *)bufts[i] : NULL);
    }
    if (handle == NULL) {
        handle = handle_at(caller);
    }
    if (handle == NULL && atomic_load(&libraries.n) == 1) {
        return &libraries.at[0];
    }
    if (handle == NULL) {
        dl_iterate_phdr(visit, &handle);
    }
    if (handle == NULL) {
        return NULL;
    }
    key = dlsym(handle, key_name);
    pthread_mutex_lock(&libraries.lock);
    for (int i = 0; i < libraries.n; i++) {
        if (libraries.at[i].key == key) {
            found = &libraries.at[i];
        }
    }
    if (found == NULL && libraries.n < GH_N_LIBRARIES) {
        introspect(&libraries.at[libraries.n], handle, key);
        found = &libraries.at[libraries.n];
        atomic_fetch_add(&libraries.n, 1);
        handle = NULL;
    }
    pthread_mutex_unlock(&libraries.lock);
    if (handle != NULL) {
        dlclose(handle);
    }
    return found;
}

const gh_ggml *gh_ggml_of_caller(const void *caller)
{
    /* A hash table by calling address: a client calls from a few dozen places in its code, and dladdr, by which the
     * library is found, costs more than most of the calls do. */
    enum { places = 256, probes = 16 };
    static _Thread_local struct {
        const void *caller;
        const gh_ggml *lib;
    } cached[places];
    const size_t first = (size_t)(((uintptr_t)caller * UINT64_C(0x9e3779b97f4a7c15)) >> 56) % places;
    size_t at = first;
    for (size_t i = 0; i < probes; i++) {
        at = (first + i) % places;
        if (cached[at].lib == NULL) {
            break;
        }
        if (cached[at].caller == caller) {
            return cached[at].lib;
        }
    }
    if (cached[at].lib != NULL) {
        at = first;
    }
    cached[at].lib = gh_ggml_find(caller, NULL, 0);
    cached[at].caller = caller;
    return cached[at].lib;
}
