/* ggml_sched/llama_cpp/library.c -- finding a client's ggml, and asking it once what it is.  See library.h. */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "inplace.h"

const gs_api *gh_api;

/* The libraries met so far.  Entries are written once, under the lock; there is one in nearly every process. */
#define GH_N_LIBRARIES 16
static struct {
    pthread_mutex_t lock;
    atomic_int n;
    gh_ggml at[GH_N_LIBRARIES];
} libraries = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char *const key_name = "ggml_backend_buft_alloc_buffer";

/* -- functions ------------------------------------------------------------------------------------------------ */

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

/* -- numbers -------------------------------------------------------------------------------------------------- */

/* Whether an address lies in the library that a function is of. */
static bool is_of(const char *(*function)(int), const char *address)
{
    Dl_info mine, found;
    void *at;
    memcpy(&at, &function, sizeof at);
    return address != NULL && dladdr(at, &mine) != 0 && dladdr(address, &found) != 0
        && mine.dli_fbase == found.dli_fbase;
}

/* Up to the last name that a version has: beyond an enum's end there is no asking.  GLU, the last since there are such
 * ops (June 2025), came behind what was the last before. */
static void find_ops(gh_ggml *lib)
{
    const char *last = lib->glu_op_name != NULL ? "GLU" : "OPT_STEP_ADAMW";
    memset(lib->op, GS_OP_CUSTOM, sizeof lib->op);
    memset(lib->unary, GS_OP_CUSTOM, sizeof lib->unary);
    memset(lib->glu, GS_OP_CUSTOM, sizeof lib->glu);
    for (int i = 0; i < GH_N_OPS; i++) {
        const char *name = lib->op_name(i);
        uint64_t mask = 0;
        int number;
        if (name == NULL) {
            break;
        }
        number = gh_api->op_of_name(name);
        if (strcmp(name, "UNARY") == 0) {
            number = GS_OP_UNARY;
            mask = 1;
        } else if (strcmp(name, "GLU") == 0) {
            number = GS_OP_GLU;
        }
        if (number >= 0) {
            lib->op[i] = (unsigned char)number;
        }
#define GH_X(op, sources) mask = number == GS_OP_##op ? (sources) : mask;
        GH_INPLACE(GH_X)
#undef GH_X
        if (lib->op_can_inplace != NULL && !lib->op_can_inplace(i)) {
            mask = 0;
        }
        for (int k = 0; mask != 0 && k < (number == GS_OP_UNARY ? GS_N_UNARY_OPS : 1); k++) {
            lib->inplace[number + k] = mask;
        }
        if (strcmp(name, last) == 0) {
            break;
        }
    }
}

/* `last` is the last name that every version has.  Those behind it are believed as long as we know them: what lies
 * behind an enum's names are other words of the library, or nothing. */
static void find_sub_ops(unsigned char *numbers, const char *(*name_of)(int), const char *family, const char *last)
{
    char whole[64];
    bool certain = true;
    for (int i = 0; i < GH_N_OPS; i++) {
        const char *name = name_of(i);
        int number;
        if (!is_of(name_of, name) || strlen(name) > sizeof whole - 16) {
            break;
        }
        strcpy(whole, family);
        strcat(whole, name);
        number = gh_api->op_of_name(whole);
        if (number >= 0) {
            numbers[i] = (unsigned char)number;
        } else if (!certain) {
            break;
        }
        certain &= strcmp(name, last) != 0;
    }
}

/* Types keep their numbers in all versions; one that is not what we call so is foreign.  Behind the last that a version
 * has there may be anything in the place of a name. */
static void find_types(gh_ggml *lib)
{
    for (int i = 0; i < GH_N_TYPES; i++) {
        const char *ours = gh_api->type_name(i);
        gs_type_traits traits;
        lib->type[i] = GH_FOREIGN_TYPE + i;
        if (ours != NULL && gh_api->type_traits(i, &traits) == GS_OK) {
            const char *theirs = lib->type_name(i);
            if (is_of(lib->type_name, theirs) && strcasecmp(ours, theirs) == 0 && lib->blck_size(i) == traits.block_size
                && lib->type_size(i) == (size_t)traits.type_size) {
                lib->type[i] = i;
            }
        }
    }
}

/* -- layouts -------------------------------------------------------------------------------------------------- */

typedef struct {
    void *(*init)(gx_init_params);
    void (*free)(void *);
    gx_tensor *(*new_tensor_4d)(void *, int, int64_t, int64_t, int64_t, int64_t);
    gx_tensor *(*view_1d)(void *, gx_tensor *, int64_t, size_t);
    gx_tensor *(*scale)(void *, gx_tensor *, float);
    gx_tensor *(*add)(void *, gx_tensor *, gx_tensor *);
    gx_tensor *(*set_name)(gx_tensor *, const char *);
    void (*set_output)(gx_tensor *);
    void *(*get_data)(const gx_tensor *);
    size_t (*tensor_overhead)(void);
    void *(*new_graph_custom)(void *, size_t, bool);
    void (*build_forward_expand)(void *, gx_tensor *);
} gh_maker;

static bool find_maker(gh_maker *m, void *handle)
{
    static const struct {
        const char *name;
        size_t offset;
    } all[] = {
#define GH_M(field) {"ggml_" #field, offsetof(gh_maker, field)}
        GH_M(init), GH_M(free), GH_M(new_tensor_4d), GH_M(view_1d), GH_M(scale), GH_M(add), GH_M(set_name),
        GH_M(set_output), GH_M(get_data), GH_M(tensor_overhead), GH_M(new_graph_custom), GH_M(build_forward_expand),
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        void *found = dlsym(handle, all[i].name);
        if (found == NULL) {
            return false;
        }
        memcpy((char *)m + all[i].offset, &found, sizeof found);
    }
    return true;
}

/* Bytes of what ggml puts before each tensor of a context. */
#define GH_OBJECT_SIZE 32
#define GH_PROBE_LEAFS 3

/* What of a tensor is not where abi.h says, or NULL. */
static const char *probe_tensor(const gh_maker *m, const gh_ggml *lib, void *ctx)
{
    gx_tensor *a = m->new_tensor_4d(ctx, 1, 3, 5, 7, 2), *b, *c;
    if (a == NULL) {
        return "no tensor";
    }
    m->set_name(a, "a probe");
    m->set_output(a);
    b = m->view_1d(ctx, a, 4, 6);
    c = m->scale(ctx, a, 0.5f);
    if (a->type != 1 || a->ne[0] != 3 || a->ne[1] != 5 || a->ne[2] != 7 || a->ne[3] != 2 || a->nb[0] != 2
        || a->nb[1] != 6 || a->nb[2] != 30 || a->nb[3] != 210) {
        return "ne and nb";
    }
    if (strcmp(a->name, "a probe") != 0 || a->flags != GH_FLAG_OUTPUT || a->buffer != NULL || a->extra != NULL) {
        return "name, flags and buffer";
    }
    if (a->data == NULL || a->data != m->get_data(a) || b->view_src != a || b->view_offs != 6
        || (char *)b->data != (char *)a->data + 6) {
        return "data and views";
    }
    if (c->src[0] != a || c->op <= 0 || c->op >= GH_N_OPS || strcmp(lib->op_name(c->op), "SCALE") != 0
        || c->op_params[0] != 0x3f000000) {
        return "op and sources";
    }
    return NULL;
}

/* Where a graph keeps its leafs: found in one of two nodes and three leafs, whose addresses are known. */
static const char *probe_graph(const gh_maker *m, gh_ggml *lib, void *ctx)
{
    gx_tensor *leaf[GH_PROBE_LEAFS], *x, *y;
    char *graph = m->new_graph_custom(ctx, 16, false);
    const int counts[2] = {2, GH_PROBE_LEAFS};
    if (graph == NULL) {
        return "no graph";
    }
    for (int i = 0; i < GH_PROBE_LEAFS; i++) {
        leaf[i] = m->new_tensor_4d(ctx, 0, 4, 1, 1, 1);
    }
    x = m->add(ctx, leaf[0], leaf[1]);
    y = m->add(ctx, x, leaf[2]);
    m->build_forward_expand(graph, y);
    if (lib->graph_n_nodes(graph) != 2 || lib->graph_nodes(graph)[0] != x || lib->graph_nodes(graph)[1] != y) {
        return "the nodes of a graph";
    }
    lib->at_leafs = lib->at_n_leafs = 0;
    for (size_t at = 0; at < 64; at += sizeof(int)) {
        if (memcmp(graph + at, counts, sizeof counts) == 0) {
            lib->at_n_leafs = at + sizeof(int);
            break;
        }
    }
    /* Behind the nodes there are up to two arrays that this graph does not have. */
    for (size_t at = 16; lib->at_n_leafs != 0 && at < 64; at += sizeof(void *)) {
        gx_tensor **list;
        memcpy(&list, graph + at, sizeof list);
        /* All arrays of a graph lie behind it, in its own object of the context. */
        if ((char *)list <= graph || (char *)list > graph + 4096 || (uintptr_t)list % sizeof(void *) != 0) {
            continue;
        }
        if (list != lib->graph_nodes(graph) && memcmp(list, leaf, sizeof leaf) == 0) {
            lib->at_leafs = at;
            break;
        }
    }
    return lib->at_leafs == 0 ? "the leafs of a graph" : NULL;
}

static const char *probe(gh_ggml *lib)
{
    gh_maker m;
    gx_init_params params = {.mem_size = 1 << 16, .mem_buffer = NULL, .no_alloc = false};
    const char *wrong;
    void *ctx;
    if (!find_maker(&m, lib->handle)) {
        return "a function to make tensors";
    }
    if (m.tensor_overhead() != sizeof(gx_tensor) + GH_OBJECT_SIZE) {
        return "the size of a tensor";
    }
    ctx = m.init(params);
    if (ctx == NULL) {
        return "no context";
    }
    wrong = probe_tensor(&m, lib, ctx);
    if (wrong == NULL) {
        wrong = probe_graph(&m, lib, ctx);
    }
    m.free(ctx);
    return wrong;
}

/* -- finding -------------------------------------------------------------------------------------------------- */

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
    /* Only by name: dlsym in any other library would find what that has loaded besides. */
    if (info->dlpi_name != NULL && strstr(info->dlpi_name, "ggml-base") != NULL) {
        *found = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
        if (*found != NULL && dlsym(*found, key_name) == NULL) {
            dlclose(*found);
            *found = NULL;
        }
    }
    return *found != NULL;
}

static void learn(gh_ggml *lib, void *handle, const void *key)
{
    memset(lib, 0, sizeof *lib);
    lib->handle = handle;
    lib->key = key;
    lib->wrong = find_functions(lib);
    if (lib->wrong == NULL && gh_api == NULL) {
        lib->wrong = "no planner was given";
    }
    if (lib->wrong == NULL) {
        lib->wrong = probe(lib);
    }
    if (lib->wrong == NULL) {
        find_ops(lib);
        find_sub_ops(lib->unary, lib->unary_op_name, "UNARY:", "EXP");
        if (lib->glu_op_name != NULL) {
            find_sub_ops(lib->glu, lib->glu_op_name, "GLU:", "SWIGLU");
        }
        find_types(lib);
    }
}

const gh_ggml *gh_ggml_find(const void *caller, void *const *bufts, int n_bufts)
{
    const gh_ggml *found = NULL;
    const void *key;
    void *handle = NULL;
    /* A buffer type begins with an address in the library that has made it, as a backend does.  Who called is known
     * less well: the last call of a function may leave no trace of it. */
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
        learn(&libraries.at[libraries.n], handle, key);
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
