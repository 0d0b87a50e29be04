/* ggml_sched/llama_cpp/ggml/library.c -- finds a client's ggml and introspects it once.  See library.h. */
#define _GNU_SOURCE
#include "introspect.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

const gs_api *gh_api;

/* The libraries found so far: nearly always one.  An entry is written once, under the lock. */
#define GH_N_LIBRARIES 16
static struct {
    pthread_mutex_t lock;
    atomic_int n;
    gh_ggml at[GH_N_LIBRARIES];
} libraries = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char *const key_name = "ggml_backend_buft_alloc_buffer";

/* -- functions ------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    size_t offset;
    bool needed;
} gh_function;

#define GH_F(field, needed) {"ggml_" #field, offsetof(gh_ggml, field), needed}
#define GH_B(field) {"ggml_backend_" #field, offsetof(gh_ggml, field), true}
static const gh_function functions[] = {
    GH_F(op_name, true), GH_F(unary_op_name, true), GH_F(glu_op_name, false), GH_F(type_name, true),
    GH_F(type_size, true), GH_F(blck_size, true), GH_F(op_can_inplace, false), GH_F(nbytes, true),
    GH_F(graph_n_nodes, true), GH_F(graph_nodes, true),
    GH_B(buft_name), GH_B(buft_alloc_buffer), GH_B(buft_get_alignment), GH_B(buft_get_max_size),
    GH_B(buft_get_alloc_size), GH_B(buffer_get_base), GH_B(buffer_get_size), GH_B(buffer_free), GH_B(buffer_reset),
    GH_B(buffer_set_usage), GH_B(buffer_init_tensor),
    GH_F(gallocr_new_n, true), GH_F(gallocr_free, true), GH_F(gallocr_reserve_n, true),
    {"ggml_log_internal", offsetof(gh_ggml, log), false},
    GH_F(gallocr_reserve_n_size, false), GH_F(gallocr_alloc_graph, true), GH_F(gallocr_get_buffer_size, true),
};

/* The name of a function that is missing, or NULL. */
static const char *find_functions(gh_ggml *lib)
{
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(lib->handle, functions[i].name);
        if (found == NULL && functions[i].needed) {
            return functions[i].name;
        }
        memcpy((char *)lib + functions[i].offset, &found, sizeof found);
    }
    return NULL;
}

/* -- finding --------------------------------------------------------------------------------------------------- */

/* A handle of the loaded library that an address lies in, if it has ggml's functions or needs a library that has. */
static void *handle_at(const void *address)
{
    Dl_info info;
    void *handle;
    if (address == NULL || dladdr(address, &info) == 0 || info.dli_fname == NULL) {
        return NULL;
    }
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (handle != NULL && dlsym(handle, key_name) == NULL) {
        dlclose(handle);
        return NULL;
    }
    return handle;
}

static int visit(struct dl_phdr_info *info, size_t size, void *out)
{
    void **found = out;
    (void)size;
    /* By name alone: dlsym in another library would also find functions of the libraries that it has loaded. */
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
    lib->unsupported = find_functions(lib);
    if (lib->unsupported == NULL && gh_api == NULL) {
        lib->unsupported = "no planner was given";
    }
    if (lib->unsupported == NULL) {
        lib->unsupported = gh_probe(lib);
    }
    if (lib->unsupported == NULL) {
        gh_find_op_map(lib);
        gh_find_buffer_hooks(lib);
    }
}

const gh_ggml *gh_ggml_find(const void *caller, void *const *bufts, int n_bufts)
{
    const gh_ggml *found = NULL;
    const void *key;
    void *handle = NULL;
    /* Buffer types and backends begin with an address inside of the library that made them.  The caller's address is
     * less reliable: a tail call leaves none. */
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
