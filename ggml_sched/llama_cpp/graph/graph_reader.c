/* ggml_sched/llama_cpp/graph/graph_reader.c -- reads a graph of ggml's in two passes: the first gives the listed
 * tensors their ids, the second finds the sources of each.  See graph_reader.h. */
#include "graph_reader.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Most views of views that are followed.  ggml lets a view name its root directly, so a chain this long is a cycle. */
#define GH_MAX_CHAIN 64
#define GH_MAX_SRC 10
/* How many nodes ahead of the one that is read are fetched into the processor's cache. */
#define GH_NODES_AHEAD 8

/* -- memory ---------------------------------------------------------------------------------------------------- */

/* Let all arrays have room for n ids.  False without memory, or for more ids than a graph may have. */
static bool make_room(gh_reader *r, int64_t n)
{
    if (n <= r->room_items) {
        return true;
    }
    n += n / 2;
    if (n > GS_MAX_TENSORS / 16) {
        return false;
    }
    if (!gh_grow(&r->item, sizeof *r->item, n) || !gh_grow(&r->src_begin, sizeof(int32_t), n + 1)
        || !gh_grow(&r->order, sizeof(int32_t), n) || !gh_grow(&r->leaf, sizeof(int32_t), n)
        || !gh_grow(&r->src, sizeof(int32_t), n * GH_MAX_SRC) || !gh_grow(&r->slot, 1, n * GH_MAX_SRC)
        || !gh_grow(&r->node_id, sizeof(int32_t), n)) {
        return false;
    }
    r->room_items = (int32_t)n;
    return true;
}

void gh_reader_free(gh_reader *r)
{
    free(r->item);
    free(r->index.slot);
    free(r->node_id);
    free(r->src_begin);
    free(r->src);
    free(r->slot);
    free(r->order);
    free(r->leaf);
    memset(r, 0, sizeof *r);
}

/* -- ids ------------------------------------------------------------------------------------------------------- */

int32_t gh_reader_id(const gh_reader *r, const gx_tensor *tensor)
{
    return r->n == 0 ? -1 : *gs_index_find(&r->index, r->item, sizeof *r->item, tensor) - 1;
}

static inline bool is_full(const gh_reader *r)
{
    return r->n >= r->room_items || r->n >= gs_index_capacity(&r->index);
}

/* The id of a tensor.  A tensor without one gets the next id; -1: the arrays have no room for it. */
static int32_t intern(gh_reader *r, gx_tensor *t)
{
    int32_t *slot = gs_index_find(&r->index, r->item, sizeof *r->item, t);
    gh_item *item;
    if (*slot != 0) {
        return *slot - 1;
    }
    if (is_full(r)) {
        return -1;
    }
    item = &r->item[r->n];
    item->tensor = t;
    item->node = item->leaf = item->reader = GH_NOWHERE;
    item->root = -1;
    item->role = t->view_src != NULL ? GH_ROLE_VIEW
        : t->data != NULL || t->buffer != NULL ? GH_ROLE_EXTERNAL : GH_ROLE_PLACED;
    item->n_readers = 0;
    item->op = -1;
    *slot = ++r->n;
    return r->n - 1;
}

static gx_tensor *root_of(gx_tensor *t)
{
    int left = GH_MAX_CHAIN;
    while (t->view_src != NULL && left-- > 0) {
        t = t->view_src;
    }
    return left > 0 ? t : NULL;
}

/* Begin to read a graph, with room for `extra` tensors that it does not list. */
static int start(gh_reader *r, const gh_ggml *lib, void *graph, int64_t extra)
{
    r->lib = lib;
    r->n_nodes = lib->graph_n_nodes(graph);
    r->nodes = lib->graph_nodes(graph);
    r->n_leafs = gh_graph_n_leafs(lib, graph);
    r->leafs = gh_graph_leafs(lib, graph);
    r->n = r->n_all = 0;
    r->plain = true;
    if (r->n_nodes < 0 || r->n_leafs < 0) {
        return GS_BAD_ARGUMENT;
    }
    extra += (int64_t)r->n_nodes + r->n_leafs;
    return make_room(r, extra) && gs_index_reset(&r->index, extra) ? GS_OK : GS_NO_HOST_MEMORY;
}

static inline bool is_node(const gh_item *item)
{
    return item->node != GH_NOWHERE && item->op != GS_OP_NONE;
}

/* Whether a tensor is an input node: a node that the client writes before the graph runs, in memory that the plan
 * gives. */
static inline bool is_input(const gh_item *item)
{
    return item->role == GH_ROLE_PLACED && is_node(item) && item->tensor->flags & GH_FLAG_INPUT;
}

/* Choose the op with which a tensor appears in the planner's graph, and whether the tensor is an alias: a view without
 * an op, in whose place its readers read the tensor that it views.  An op that the planner does not have, and a view
 * that lacks its source, become GS_OP_CUSTOM, of which the planner assumes nothing. */
static void classify(gh_reader *r, gh_item *item)
{
    const gx_tensor *t = item->tensor;
    if (item->node == GH_NOWHERE) {
        item->op = GS_OP_NONE;
        if (item->role == GH_ROLE_VIEW) {
            item->role = GH_ROLE_ALIAS;
        }
    } else if (t->op != 0) {
        item->op = gh_op(r->lib, t);
        if (gh_is_view_op(item->op) && (t->view_src == NULL || t->src[0] == NULL)) {
            item->op = GS_OP_CUSTOM;
        }
    } else if (item->role == GH_ROLE_VIEW) {
        item->op = GS_OP_CUSTOM;
        item->role = GH_ROLE_ALIAS;
    } else if (item->leaf != GH_NOWHERE || item->role == GH_ROLE_EXTERNAL || t->flags & GH_FLAG_INPUT) {
        item->op = GS_OP_NONE;
    } else {
        item->op = GS_OP_CUSTOM;
    }
}

/* Give every leaf and node that the graph lists its id.  This comes before any source is followed, because a source may
 * be listed after its reader, and would otherwise be taken for a tensor that is not listed. */
static int intern_listed(gh_reader *r)
{
    int32_t n_of_leafs;
    for (int32_t i = 0; i < r->n_leafs; i++) {
        const int32_t id = r->leafs[i] != NULL ? intern(r, r->leafs[i]) : -1;
        if (id < 0) {
            return GS_BAD_ARGUMENT;
        }
        if (r->item[id].leaf == GH_NOWHERE) {
            r->item[id].leaf = i;
        }
    }
    n_of_leafs = r->n;
    for (int32_t i = 0; i < r->n_nodes; i++) {
        int32_t id;
        gh_prefetch(r->nodes[i + GH_NODES_AHEAD < r->n_nodes ? i + GH_NODES_AHEAD : i]);
        id = r->nodes[i] != NULL ? intern(r, r->nodes[i]) : -1;
        if (id < 0) {
            return GS_BAD_ARGUMENT;
        }
        r->node_id[i] = id;
        if (r->item[id].node == GH_NOWHERE) {
            r->item[id].node = i;
            classify(r, &r->item[id]);
        }
    }
    for (int32_t id = 0; id < n_of_leafs; id++) {
        gh_item *item = &r->item[id];
        if (item->node == GH_NOWHERE && item->op < 0) {
            classify(r, item);
        }
    }
    r->n_listed = r->n;
    return GS_OK;
}

/* -- sources --------------------------------------------------------------------------------------------------- */

/* The id that the node at position `reader` reads when it names tensor t: that of t, or of the tensor that t is an
 * alias of.  A tensor without an id gets one.  -1: the arrays have no room; -2: a cycle of views. */
static int32_t read_id(gh_reader *r, gx_tensor *t, int32_t reader)
{
    for (int left = GH_MAX_CHAIN; left > 0; left--) {
        const int32_t n_before = r->n;
        const int32_t id = intern(r, t);
        if (id < 0) {
            return -1;
        }
        if (id == n_before) {
            r->item[id].reader = reader;
            classify(r, &r->item[id]);
        }
        if (r->item[id].role != GH_ROLE_ALIAS) {
            return id;
        }
        t = t->view_src;
    }
    return -2;
}

static inline void put_src(gh_reader *r, int32_t *n_src, int32_t id, int slot)
{
    r->src[*n_src] = id;
    r->slot[*n_src] = (unsigned char)slot;
    r->item[id].n_readers++;
    ++*n_src;
}

/* Append the sources of a node to r->src, from *n_src on.  The root of a view is always among the sources of the
 * planner's graph: it is added where ggml does not name it.  Tensors that the graph does not list get their ids
 * here. */
static int wire_node(gh_reader *r, int32_t id, int32_t *n_src)
{
    gx_tensor *t = r->item[id].tensor;
    const int32_t position = r->item[id].node, first = *n_src;
    const bool views = r->item[id].role == GH_ROLE_VIEW;
    bool reads_root = false, first_shares = false;
    int last = -1;
    for (int k = 0; k < GH_MAX_SRC; k++) {
        int32_t s;
        if (t->src[k] == NULL) {
            continue;
        }
        s = read_id(r, t->src[k], position);
        if (s == id) {
            continue;
        }
        if (s < 0) {
            return s == -1 ? GS_NO_HOST_MEMORY : GS_BAD_ARGUMENT;
        }
        /* A node without an op only keeps its sources' memory until its position; a source that is computed later has
         * no memory yet and is left out. */
        if (t->op == 0 && is_node(&r->item[s]) && r->item[s].node > position) {
            continue;
        }
        put_src(r, n_src, s, k);
        last = k;
    }
    /* The last source of an input node is the leaf that add_input_leafs will add for it, -1 until then: the node
     * becomes a view of that leaf. */
    if (is_input(&r->item[id])) {
        if (last + 1 >= GH_MAX_SRC) {
            return GS_BAD_ARGUMENT;
        }
        r->src[*n_src] = -1;
        r->slot[(*n_src)++] = (unsigned char)(last + 1);
    }
    /* A view without an op is no view to the planner, but the tensor that it views gets an id: a signature compares all
     * tensors that the graph names. */
    if (r->item[id].role == GH_ROLE_ALIAS && read_id(r, t->view_src, position) < 0) {
        return is_full(r) ? GS_NO_HOST_MEMORY : GS_BAD_ARGUMENT;
    }
    if (views) {
        gx_tensor *at = root_of(t);
        const int32_t root = at != NULL ? read_id(r, at, position) : -2;
        if (root < 0 || root == id) {
            return root == -1 ? GS_NO_HOST_MEMORY : GS_BAD_ARGUMENT;
        }
        r->item[id].root = root;
        r->plain &= at == t->view_src;
        for (int32_t k = first; k < *n_src; k++) {
            const gh_item *s = &r->item[r->src[k]];
            if (r->src[k] == root || (s->tensor->view_src != NULL && root_of(s->tensor) == at)) {
                reads_root = true;
                first_shares |= k == first && r->slot[k] == 0;
            }
        }
        if (gh_is_view_op(r->item[id].op) && !first_shares) {
            r->item[id].op = GS_OP_CUSTOM;
        }
        if (!reads_root) {
            if (last + 1 >= GH_MAX_SRC) {
                return GS_BAD_ARGUMENT;
            }
            put_src(r, n_src, root, last + 1);
        }
    }
    return GS_OK;
}

/* Add a tensor that only the planner's graph has, and return its id; -1: no room. */
static int32_t add_planner_tensor(gh_reader *r, int op)
{
    gh_item *item;
    if (r->n_all >= r->room_items) {
        return -1;
    }
    item = &r->item[r->n_all];
    memset(item, 0, sizeof *item);
    item->node = item->leaf = item->reader = GH_NOWHERE;
    item->root = -1;
    item->op = op;
    return r->n_all++;
}

/* The planner gives memory only to leafs that are read, ggml to all.  So unread leafs get a node that reads them and
 * computes nothing: a keeper, one for every ten, the most sources that a node has.  With `inputs`, add the keepers of
 * leafs that are inputs and no outputs, as the first nodes: such a leaf is written before the graph runs, and its
 * memory may be reused from then on.  Otherwise add the keepers of all other leafs, as the last nodes: the client may
 * read these leafs at the end. */
static int add_keepers(gh_reader *r, bool inputs, int32_t *n_src)
{
    int32_t keeper = -1, held = 0;
    for (int32_t i = 0; i < r->n; i++) {
        const gh_item *item = &r->item[i];
        if (item->op != GS_OP_NONE || item->role != GH_ROLE_PLACED || item->n_readers != 0
            || ((item->tensor->flags & (GH_FLAG_INPUT | GH_FLAG_OUTPUT)) == GH_FLAG_INPUT) != inputs) {
            continue;
        }
        if (keeper < 0 || held == GH_MAX_SRC) {
            keeper = add_planner_tensor(r, GS_OP_CUSTOM);
            if (keeper < 0) {
                return GS_NO_HOST_MEMORY;
            }
            held = 0;
            r->item[keeper].reader = inputs ? 0 : r->n_nodes;
            r->src_begin[keeper] = *n_src;
            r->order[r->size.n_nodes++] = keeper;
        }
        put_src(r, n_src, i, held++);
        r->src_begin[keeper + 1] = *n_src;
    }
    return GS_OK;
}

/* For each node that is flagged as an input, add a leaf to the planner's graph that owns the node's memory.  The client
 * writes the input before the graph runs, so its memory must be taken from the start, not from the node on. */
static int add_input_leafs(gh_reader *r)
{
    for (int32_t i = 0; i < r->n; i++) {
        gh_item *item = &r->item[i];
        int32_t leaf;
        if (!is_input(item)) {
            continue;
        }
        leaf = add_planner_tensor(r, GS_OP_NONE);
        if (leaf < 0) {
            return GS_NO_HOST_MEMORY;
        }
        r->item[leaf].reader = item->node;
        r->item[leaf].role = GH_ROLE_PLACED;
        r->item[leaf].n_readers = 1;
        /* A leaf has no root; here the field holds the node whose shape the leaf has. */
        r->item[leaf].root = i;
        item->root = leaf;
        item->op = GS_OP_CUSTOM;
        r->src[r->src_begin[i + 1] - 1] = leaf;
    }
    /* An input node is now a view of its leaf.  Views of the node become views of the leaf, because a root is no
     * view. */
    for (int32_t i = 0; i < r->n && r->n_all > r->n; i++) {
        gh_item *item = &r->item[i];
        if (item->root >= 0 && item->root < r->n && r->item[item->root].root >= r->n) {
            item->root = r->item[item->root].root;
        }
    }
    return GS_OK;
}

/* Find the sources of all nodes, in the order of ids, and list nodes and leafs of the planner's graph.  Tensors that
 * get their ids meanwhile, because a node names them, are leafs: they have no sources. */
static int wire(gh_reader *r)
{
    int32_t n_src = 0, id;
    int status = GS_OK;
    for (id = 0; id < r->n && status == GS_OK; id++) {
        r->src_begin[id] = n_src;
        if (is_node(&r->item[id])) {
            status = wire_node(r, id, &n_src);
        }
    }
    if (status != GS_OK) {
        return status;
    }
    r->n_all = r->n;
    r->src_begin[r->n] = n_src;
    status = add_input_leafs(r);
    for (id = r->n; id <= r->n_all; id++) {
        r->src_begin[id] = n_src;
    }
    r->size.n_nodes = 0;
    if (status == GS_OK) {
        status = add_keepers(r, true, &n_src);
    }
    for (int32_t i = 0; i < r->n_nodes; i++) {
        const int32_t node = r->node_id[i];
        if (r->item[node].node == i && is_node(&r->item[node])) {
            r->order[r->size.n_nodes++] = node;
        }
    }
    if (status == GS_OK) {
        status = add_keepers(r, false, &n_src);
    }
    r->src_begin[r->n_all] = n_src;
    r->size.n_leafs = 0;
    for (id = 0; id < r->n_all; id++) {
        if (r->item[id].op == GS_OP_NONE) {
            r->leaf[r->size.n_leafs++] = id;
        }
    }
    r->size.n_src = n_src;
    return status;
}

int gh_reader_read(gh_reader *r, const gh_ggml *lib, void *graph)
{
    int status = GS_NO_HOST_MEMORY;
    /* The first attempt has room for 64 tensors more than the graph read before had unlisted, which is nearly always
     * enough; the second for as many unlisted tensors as the nodes can name. */
    for (int attempt = 0; attempt < 2 && status == GS_NO_HOST_MEMORY; attempt++) {
        status = start(r, lib, graph, attempt == 0 ? 64 + r->n_unlisted
                                                   : (int64_t)r->n_nodes * (GH_MAX_SRC + 3) + r->n_leafs + 64);
        if (status == GS_OK) {
            status = intern_listed(r);
        }
        if (status == GS_OK) {
            status = wire(r);
        }
    }
    if (status != GS_OK) {
        r->n = r->n_all = 0;
    }
    r->n_unlisted = status == GS_OK ? r->n - r->n_listed : 0;
    r->size.n_tensors = r->n_all;
    r->size.n_params = r->size.n_deps = 0;
    return status;
}
