/* ggml_sched/llama_cpp/ggml/probe.c -- whether a library's tensors and graphs have the expected fields.  See
 * library.h. */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* Bytes that ggml puts in front of each tensor of a context. */
#define GH_OBJECT_SIZE 32
#define GH_PROBE_LEAFS 3

/* Make tensors with the library, and check that their fields are where abi.h declares them.  Returns the names of the
 * first fields that are elsewhere; NULL: none is. */
static const char *probe_tensor(const gh_ggml *lib, void *ctx)
{
    gx_tensor *a = lib->new_tensor_4d(ctx, 1, 3, 5, 7, 2), *b, *c;
    if (a == NULL) {
        return "no tensor";
    }
    lib->set_name(a, "a probe");
    lib->set_output(a);
    b = lib->view_1d(ctx, a, 4, 6);
    c = lib->scale(ctx, a, 0.5f);
    if (a->type != 1 || a->ne[0] != 3 || a->ne[1] != 5 || a->ne[2] != 7 || a->ne[3] != 2 || a->nb[0] != 2
        || a->nb[1] != 6 || a->nb[2] != 30 || a->nb[3] != 210) {
        return "ne and nb";
    }
    if (strcmp(a->name, "a probe") != 0 || a->flags != GH_FLAG_OUTPUT || a->buffer != NULL || a->extra != NULL) {
        return "name, flags and buffer";
    }
    if (a->data == NULL || a->data != lib->get_data(a) || b->view_src != a || b->view_offs != 6
        || (char *)b->data != (char *)a->data + 6) {
        return "data and views";
    }
    if (c->src[0] != a || c->op <= 0 || c->op >= GH_N_OPS || strcmp(lib->op_name(c->op), "SCALE") != 0
        || c->op_params[0] != 0x3f000000) {
        return "op and sources";
    }
    return NULL;
}

/* Find the offsets of the leafs and of their number in ggml's graph struct, for which ggml exports no function.  Builds
 * a graph of two nodes and three leafs, and searches the bytes of its struct for the numbers 2 and 3 and for a pointer
 * to an array of these leafs.  Returns what was not found; NULL: all was found. */
static const char *probe_graph(gh_ggml *lib, void *ctx)
{
    gx_tensor *leaf[GH_PROBE_LEAFS], *x, *y;
    char *graph = lib->new_graph_custom(ctx, 16, false);
    const int counts[2] = {2, GH_PROBE_LEAFS};
    if (graph == NULL) {
        return "no graph";
    }
    for (int i = 0; i < GH_PROBE_LEAFS; i++) {
        leaf[i] = lib->new_tensor_4d(ctx, 0, 4, 1, 1, 1);
    }
    x = lib->add(ctx, leaf[0], leaf[1]);
    y = lib->add(ctx, x, leaf[2]);
    lib->build_forward_expand(graph, y);
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
    /* The pointer to the leafs comes after that to the nodes; up to two pointers between them are NULL in this
     * graph. */
    for (size_t at = 16; lib->at_n_leafs != 0 && at < 64; at += sizeof(void *)) {
        gx_tensor **list;
        memcpy(&list, graph + at, sizeof list);
        /* Follow only what can be a pointer to an array of this graph: its arrays lie after it in the context. */
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

const char *gh_probe(gh_ggml *lib)
{
    gx_init_params params = {.mem_size = 1 << 16, .mem_buffer = NULL, .no_alloc = false};
    const char *unsupported;
    void *ctx;
    if (lib->tensor_overhead() != sizeof(gx_tensor) + GH_OBJECT_SIZE) {
        return "the size of a tensor";
    }
    ctx = lib->init(params);
    if (ctx == NULL) {
        return "no context";
    }
    unsupported = probe_tensor(lib, ctx);
    if (unsupported == NULL) {
        unsupported = probe_graph(lib, ctx);
    }
    lib->free(ctx);
    return unsupported;
}

/* Find the offset of a graph's unique id.  Versions whose graph struct has `with` bytes have the id as its last word.
 * The size of the struct is found by letting ggml write one into marked bytes: it ends where the marks are untouched.
 */
void gh_find_uid(gh_ggml *lib)
{
    enum { previous = 88, with = 96 };
    gh_part part, *result = &part;
    uint64_t graph[64] = {0};
    void (*view)(gh_part *, void *, int, int);
    size_t stop = sizeof part;
    lib->at_uid = 0;
    if (lib->graph_next_uid == NULL) {
        return;
    }
    memset(&part, 0xa5, sizeof part);
    /* A function that returns a large struct is called with the address for it as a hidden first parameter. */
    memcpy(&view, &lib->graph_view, sizeof view);
    view(result, graph, 0, 0);
    while (stop > 0 && (unsigned char)part.bytes[stop - 1] == 0xa5) {
        stop--;
    }
    if (stop == with) {
        lib->at_uid = previous;
    }
}

/* ggml's struct of a backend is a pointer to its guid, then pointers to its functions, its device, its own data.  How
 * many functions there are depends on the version: the position of the device shows it.  Where there are 14 or 16, the
 * last one reorders nodes, and is returned; it may be NULL. */
gh_optimize gh_find_optimize(const gh_ggml *lib, void *backend)
{
    const void *device = lib->backend_get_device(backend);
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
