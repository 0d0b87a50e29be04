/* ggml_sched/llama_cpp/graph/graph_signature.c -- fills signatures and matches graphs with them: graphs of the same
 * tensors, equal graphs of other tensors, and graphs of the same wiring.  See graph_signature.h. */
#include "arrays.h"
#include "graph_signature.h"

#include <stdlib.h>

/* How many tensors, and how many items of the signature, are fetched into the processor's cache ahead of the compared
 * one. */
#define GH_AHEAD 6
#define GH_ITEMS_AHEAD 24

/* -- memory -------------------------------------------------------------------------------------------------------- */

static bool make_room_for_tensors(gh_signature *s, int32_t n)
{
    if (n > s->room_tensor || s->tensor == NULL) {
        gx_tensor **tensor = realloc(s->tensor != NULL ? s->tensor - 1 : NULL, ((size_t)n + 1) * sizeof *tensor);
        if (tensor == NULL) {
            return false;
        }
        tensor[0] = NULL;
        s->tensor = tensor + 1;
        s->room_tensor = n;
    }
    return true;
}

static bool make_room(gh_signature *s, int32_t n)
{
    if (!make_room_for_tensors(s, n)) {
        return false;
    }
    if (n > s->room || s->descriptor == NULL) {
        if (!gh_grow(&s->descriptor, sizeof *s->descriptor, n)) {
            return false;
        }
        s->room = n;
    }
    return true;
}

void gh_signature_clear(gh_signature *s)
{
    gh_wiring *w = s->wiring;
    s->wiring = NULL;
    if (w != NULL && --w->refs == 0) {
        free(w->item);
        free(w->memory);
        free(w->listed);
        free(w->rest);
        free(w);
    }
}

/* Give a signature a new wiring for n ids, which is its own until others share it.  False without memory. */
static bool make_wiring(gh_signature *s, int32_t n)
{
    gh_signature_clear(s);
    s->wiring = calloc(1, sizeof *s->wiring);
    if (s->wiring == NULL) {
        return false;
    }
    s->wiring->refs = 1;
    return gh_grow(&s->wiring->item, sizeof *s->wiring->item, n)
        && (!s->descriptors->full || gh_grow(&s->wiring->memory, sizeof *s->wiring->memory, n));
}

void gh_signature_free(gh_signature *s)
{
    free(s->tensor != NULL ? s->tensor - 1 : NULL);
    free(s->descriptor);
    gh_signature_clear(s);
    memset(s, 0, sizeof *s);
}

void gh_signature_rebind(gh_signature *s, gh_signature *other)
{
    GH_SWAP(gx_tensor **, s->tensor, other->tensor);
    GH_SWAP(int32_t, s->room_tensor, other->room_tensor);
}

/* Whether the leafs and nodes that two graphs list have the same ids; both graphs list equally many. */
static bool same_lists(const gh_signature *a, const gh_signature *b)
{
    const int32_t *v = a->wiring->listed, *w = b->wiring->listed;
    return v == w || (v != NULL && w != NULL && gh_same(v, w, (int64_t)a->n_leafs + a->n_nodes, sizeof *v));
}

/* Whether two signatures are plain and have equal wirings, apart from gh_wiring.memory. */
static bool same_items(const gh_signature *a, const gh_signature *b)
{
    const gh_wiring *v = a->wiring, *w = b->wiring;
    return a->descriptors == b->descriptors && a->plain && b->plain && a->n == b->n && a->n_nodes == b->n_nodes
        && a->n_leafs == b->n_leafs && a->n_listed == b->n_listed
        && (v == w || (v->n_rest == w->n_rest && gh_same(v->rest, w->rest, v->n_rest, sizeof *v->rest)
                       && same_lists(a, b)
                       && gh_same(v->item, w->item, a->n, sizeof *v->item)));
}

bool gh_signature_share_wiring(gh_signature *s, const gh_signature *other)
{
    if (!same_items(s, other)
        || (s->descriptors->full && !gh_same(s->wiring->memory, other->wiring->memory, s->n, sizeof(uintptr_t)))) {
        return false;
    }
    other->wiring->refs++;
    gh_signature_clear(s);
    s->wiring = other->wiring;
    return true;
}

bool gh_signature_same_wiring(const gh_signature *a, const gh_signature *b)
{
    bool same = same_items(a, b);
    for (int32_t id = 0; same && id < a->n; id++) {
        same = gh_same_kind(gh_descriptor_at(a, id), gh_descriptor_at(b, id));
    }
    return same;
}

void gh_signatures_compact(gh_signature *const *s, int n, gh_descriptors *descriptors)
{
    int32_t *number, count = 0;
    if (descriptors->n <= descriptors->n_kept) {
        return;
    }
    number = calloc((size_t)descriptors->n, sizeof *number);
    if (number == NULL) {
        return;
    }
    for (int i = 0; i < n; i++) {
        for (int32_t id = 0; id < s[i]->n; id++) {
            number[s[i]->descriptor[id]] = 1;
        }
    }
    for (int32_t descriptor = 0; descriptor < descriptors->n; descriptor++) {
        count += number[descriptor];
        number[descriptor] = number[descriptor] ? count - 1 : -1;
    }
    gh_descriptors_keep(descriptors, number, count);
    for (int i = 0; i < n; i++) {
        for (int32_t id = 0; id < s[i]->n; id++) {
            s[i]->descriptor[id] = number[s[i]->descriptor[id]];
        }
    }
    free(number);
}

/* -- the memory of a tensor ---------------------------------------------------------------------------------------- */

/* Which of data and buffer a tensor has, as GH_HAS_* bits.  `full`, under a scheduler: a view counts as having neither,
 * because our scheduler gives views their addresses itself. */
static inline int32_t memory_bits(const gx_tensor *t, bool full)
{
    if (full && t->view_src != NULL) {
        return 0;
    }
    return (t->data != NULL ? GH_HAS_DATA : 0) | (t->buffer != NULL ? GH_HAS_BUFFER : 0);
}

/* Whether a tensor that had constant data, such as a weight, has data still. */
static inline bool has_constant_data(const gx_tensor *t)
{
    return t->view_src == NULL && t->data != NULL;
}

/* The last buffer and its kind (memory_kind), kept because consecutive tensors mostly share a buffer. */
typedef struct {
    const gh_ggml *lib;
    void *last;
    uintptr_t kind;
} buffer_kinds;

/* A number for what a plan depends on of a tensor's buffer: its type and its usage.  0: a view, or no buffer. */
static inline uintptr_t memory_kind(buffer_kinds *b, const gx_tensor *t)
{
    if (t->view_src != NULL || t->buffer == NULL) {
        return 0;
    }
    if (t->buffer != b->last) {
        b->last = t->buffer;
        b->kind = (uintptr_t)b->lib->backend_buffer_get_type(t->buffer)
            + (uintptr_t)b->lib->backend_buffer_get_usage(t->buffer);
    }
    return b->kind;
}

/* -- filling ------------------------------------------------------------------------------------------------------- */

/* The index of source k in this sequence: an item's first two sources, its root, its further sources. */
static inline int link_of_source(int k)
{
    return k < GH_ROOT ? k : k + 1;
}

/* The address at which the id of an item's source k is stored; for the first further source of an item, a row is added
 * to w->rest.  NULL without memory. */
static int32_t *source_link(gh_wiring *w, gh_signature_item *item, int k)
{
    if (k < GH_ROOT) {
        return &item->link[k];
    }
    if (item->bits >> GH_REST_SHIFT == 0) {
        if (!gh_make_room(&w->rest, sizeof *w->rest, &w->room_rest, w->n_rest + 1)) {
            return NULL;
        }
        memset(w->rest[w->n_rest], -1, sizeof w->rest[0]);
        item->bits |= ++w->n_rest << GH_REST_SHIFT;
    }
    return &w->rest[(item->bits >> GH_REST_SHIFT) - 1][k - GH_ROOT];
}

/* Store the ids of the tensors that tensor `id` names.  A source that is an alias is stored with the alias's own id,
 * although the planner's graph has the viewed tensor there.  If a named tensor has no id, the graph is not plain.
 * False without memory. */
static bool take_links(gh_signature *s, const gh_reader *r, int32_t id)
{
    const gx_tensor *t = s->tensor[id];
    for (int k = 0; k < GS_MAX_SRC; k++) {
        const int32_t source = t->src[k] != NULL ? gh_reader_id(r, t->src[k]) : -1;
        int32_t *link = source >= 0 ? source_link(s->wiring, &s->wiring->item[id], k) : NULL;
        if (link != NULL) {
            *link = source;
        } else if (source >= 0) {
            return false;
        }
        s->plain &= t->src[k] == NULL || source >= 0;
    }
    if (t->view_src != NULL) {
        s->wiring->item[id].link[GH_ROOT] = gh_reader_id(r, t->view_src);
        s->plain &= s->wiring->item[id].link[GH_ROOT] >= 0;
    }
    return true;
}

/* Store the ids of the leafs and nodes that a graph lists, if it lists some twice: inputs that ggml's scheduler has
 * copied several times.  False without memory. */
static bool take_lists(gh_signature *s, const gh_reader *r)
{
    const int32_t n = r->n_leafs + r->n_nodes;
    if (r->n_listed == n) {
        return true;
    }
    if (!gh_grow(&s->wiring->listed, sizeof *s->wiring->listed, n)) {
        return false;
    }
    for (int32_t i = 0; i < r->n_leafs; i++) {
        s->wiring->listed[i] = gh_reader_id(r, r->leafs[i]);
    }
    gh_copy(s->wiring->listed + r->n_leafs, r->node_id, r->n_nodes, sizeof *r->node_id);
    return true;
}

bool gh_signature_fill(gh_signature *s, gh_descriptors *descriptors, const gh_reader *r)
{
    buffer_kinds kinds = {.lib = descriptors->lib};
    s->descriptors = descriptors;
    if (!make_room(s, r->n) || !make_wiring(s, r->n)) {
        return false;
    }
    s->n = r->n;
    s->n_nodes = r->n_nodes;
    s->n_leafs = r->n_leafs;
    s->n_listed = r->n_listed;
    s->plain = r->plain;
    for (int32_t id = 0; id < r->n; id++) {
        const gh_item *read = &r->item[id];
        const gx_tensor *t = read->tensor;
        gh_signature_item *item = &s->wiring->item[id];
        s->tensor[id] = read->tensor;
        memset(item->link, -1, sizeof item->link);
        item->bits = memory_bits(t, descriptors->full);
        s->descriptor[id] = gh_descriptor_intern(descriptors, t);
        if (s->descriptor[id] < 0) {
            return false;
        }
        if (descriptors->full) {
            s->wiring->memory[id] = memory_kind(&kinds, t);
        } else if (read->role == GH_ROLE_EXTERNAL && t->data != NULL && read->op == GS_OP_NONE
                   && read->node == GH_NOWHERE) {
            item->bits |= GH_HAS_CONSTANT_DATA;
        }
    }
    if (!take_lists(s, r)) {
        return false;
    }
    for (int32_t id = 0; id < r->n && s->plain; id++) {
        if (!(s->wiring->item[id].bits & GH_HAS_CONSTANT_DATA) && !take_links(s, r, id)) {
            return false;
        }
    }
    return true;
}

/* -- comparing one tensor ------------------------------------------------------------------------------------------ */

/* Add to *d the bits in which the addresses of the tensors that t names differ from the expected addresses, which are
 * named[id] for each id in the item's links. */
static inline void compare_links(gh_difference *d, const gh_signature *s, gx_tensor *const *named,
                                 const gh_signature_item *item, const gx_tensor *t)
{
    static const gx_tensor nothing;
    _Static_assert(GH_N_REST % 2 == 0, "the rest is compared in pairs");
    d->words |= (uintptr_t)named[item->link[GH_ROOT]] ^ (uintptr_t)t->view_src;
    for (int k = 0; k < GH_ROOT; k++) {
        d->words |= (uintptr_t)named[item->link[k]] ^ (uintptr_t)t->src[k];
    }
    if (item->bits >> GH_REST_SHIFT == 0) {
        d->pairs |= gh_differing(&t->src[GH_ROOT], &nothing.src[GH_ROOT], GH_N_REST / 2);
    } else {
        const int32_t *rest = s->wiring->rest[(item->bits >> GH_REST_SHIFT) - 1];
        for (int k = GH_ROOT; k < GS_MAX_SRC; k++) {
            d->words |= (uintptr_t)named[rest[k - GH_ROOT]] ^ (uintptr_t)t->src[k];
        }
    }
}

/* Add to *d the bits in which a tensor's memory (which of data and buffer it has, and the buffer's kind) differs from
 * that stored for `id`. */
static inline void compare_memory(gh_difference *d, const gh_signature *s, int32_t id, const gx_tensor *t,
                                  buffer_kinds *kinds, bool full)
{
    const int32_t bits = s->wiring->item[id].bits & (GH_HAS_DATA | GH_HAS_BUFFER);
    if (!full && bits == 0) {
        d->words |= (uintptr_t)t->data | (uintptr_t)t->buffer; /* most tensors have neither */
        return;
    }
    d->words |= (uint64_t)(bits ^ memory_bits(t, full));
    if (full) {
        d->words |= s->wiring->memory[id] ^ memory_kind(kinds, t);
    }
}

/* Whether t has the descriptor and the memory that the signature has for `id`, and names the tensor named[i] wherever
 * the signature has the id i. */
static inline bool matches_item(const gh_signature *s, int32_t id, const gx_tensor *t, gx_tensor *const *named,
                                const gh_descriptor *descriptor, buffer_kinds *kinds, bool full)
{
    gh_difference d = {{0, 0}, 0};
    compare_links(&d, s, named, &s->wiring->item[id], t);
    gh_compare_descriptor(&d, t, descriptor, full);
    compare_memory(&d, s, id, t, kinds, full);
    return !gh_is_some(d);
}

/* -- the same tensors ---------------------------------------------------------------------------------------------- */

/* Arguments of `matches`: the roles of ids, and the arenas and places by which the tensors that the plan places get
 * their addresses.  `n` receives how many ids have matched. */
typedef struct {
    const gh_arena *arenas;
    const unsigned char *role;
    gh_places places;
    int32_t n;
} placing;

/* Whether the signature's tensors with ids `first` to `stop` - 1 are unchanged, and are those of the array `listed`, in
 * this order; `listed` NULL: only whether they are unchanged.  Writes addresses as gh_signature_match says. */
static inline __attribute__((always_inline)) bool matches(const gh_signature *s, gx_tensor *const *listed,
                                                          int32_t first, int32_t stop, bool full, placing *to)
{
    const gh_descriptor *descriptor = s->descriptors->descriptor;
    const gh_signature_item *items = s->wiring->item;
    const int32_t *number = s->descriptor;
    gx_tensor *const *tensor = s->tensor;
    const unsigned char *const role = to->role;
    const gh_places places = to->places;
    const int32_t n = s->n;
    buffer_kinds kinds = {.lib = s->descriptors->lib};
    gh_chunk chunk = {0};           /* the last tensor's, kept: consecutive tensors mostly have the same */
    uint32_t index = GH_NO_CHUNK;
    bool same = true;
    int32_t id = first;
    for (; id < stop; id++) {
        gx_tensor *t = tensor[id];
        const gh_signature_item *item = &items[id];
        const int32_t ahead = id + GH_AHEAD < n ? id + GH_AHEAD : id;
        if (listed != NULL && listed[id - first] != t) {
            same = false;
            break;
        }
        __builtin_prefetch(item + GH_ITEMS_AHEAD);
        if (items[ahead].bits & GH_HAS_CONSTANT_DATA) {
            __builtin_prefetch((const char *)tensor[ahead] + offsetof(gx_tensor, view_src));
        } else {
            gh_prefetch(tensor[ahead]);
        }
        if (item->bits & GH_HAS_CONSTANT_DATA) {
            same = has_constant_data(t);
        } else {
            same = matches_item(s, id, t, tensor, &descriptor[number[id]], &kinds, full);
        }
        if (!same) {
            break;
        }
        if (!full && role != NULL && role[id] == GH_ROLE_PLACED) {
            if (places.chunk[id] != index) {
                index = places.chunk[id];
                chunk = *gh_chunk_at(to->arenas, index);
            }
            gh_place(t, &chunk, places.offset[id]);
        }
    }
    to->n = id;
    return same;
}

/* The loop for full descriptors and the loop for others are functions of their own that are not inlined, so that each
 * has all registers to itself. */
static __attribute__((noinline)) bool matches_full(const gh_signature *s, gx_tensor *const *listed, int32_t first,
                                                    int32_t stop, placing *to)
{
    return matches(s, listed, first, stop, true, to);
}

static __attribute__((noinline)) bool matches_placing(const gh_signature *s, gx_tensor *const *listed, int32_t first,
                                                      int32_t stop, placing *to)
{
    return matches(s, listed, first, stop, false, to);
}

/* Whether a graph can match a signature at all: the signature's graph was plain and had as many nodes and leafs. */
static bool has_counts_of(const gh_signature *s, void *graph)
{
    const gh_ggml *lib = s->descriptors->lib;
    return s->plain && lib->graph_n_nodes(graph) == s->n_nodes && gh_graph_n_leafs(lib, graph) == s->n_leafs;
}

/* Whether a graph lists the tensors of a signature, at the same positions. */
static bool lists_same(const gh_signature *s, void *graph)
{
    gx_tensor *const *leafs = gh_graph_leafs(s->descriptors->lib, graph);
    gx_tensor *const *nodes = s->descriptors->lib->graph_nodes(graph);
    for (int32_t i = 0; i < s->n_leafs + s->n_nodes; i++) {
        if ((i < s->n_leafs ? leafs[i] : nodes[i - s->n_leafs]) != s->tensor[gh_listed_id(s, i)]) {
            return false;
        }
    }
    return true;
}

bool gh_signature_match(const gh_signature *s, void *graph, const gh_arena *arenas, const unsigned char *role,
                        gh_places places)
{
    const gh_ggml *lib = s->descriptors->lib;
    const int32_t n_leafs = s->n_leafs;
    bool (*const match)(const gh_signature *, gx_tensor *const *, int32_t, int32_t, placing *) =
        s->descriptors->full ? matches_full : matches_placing;
    placing to = {arenas, role, places, 0};
    if (!has_counts_of(s, graph)) {
        return false;
    }
    /* Leafs are compared first: graphs of a prompt and of one token differ in their inputs, so a mismatch is found
     * early.  Tensors that the graph does not list come last: the nodes that name them have matched by then, so these
     * pointers belong to this graph and may be followed. */
    if (s->wiring->listed != NULL ? lists_same(s, graph) && match(s, NULL, 0, s->n, &to)
        : match(s, gh_graph_leafs(lib, graph), 0, n_leafs, &to)
              && match(s, lib->graph_nodes(graph), n_leafs, s->n_listed, &to)
              && match(s, NULL, s->n_listed, s->n, &to)) {
        return true;
    }
    for (int32_t id = 0; role != NULL && id < to.n; id++) {
        if (role[id] == GH_ROLE_PLACED) {
            s->tensor[id]->buffer = s->tensor[id]->data = NULL;
        }
    }
    return false;
}

/* -- other tensors ------------------------------------------------------------------------------------------------- */

/* Whether an item names, or may name, a tensor that the graph does not list: one with an id from n_listed on. */
static bool names_unlisted(const gh_signature_item *item, int32_t n_listed)
{
    int32_t most = -1;
    for (int k = 0; k < GH_N_LINKS; k++) {
        most = item->link[k] > most ? item->link[k] : most;
    }
    return most >= n_listed || item->bits >> GH_REST_SHIFT != 0;
}

/* Take from t, which should match `item`, the tensors that the graph does not list: where the item has the id of such a
 * tensor and tensor[id] is still NULL, tensor[id] becomes the one that t names there. */
static inline void intern(const gh_signature *s, gx_tensor **tensor, const gh_signature_item *item, const gx_tensor *t)
{
    const int32_t rest = item->bits >> GH_REST_SHIFT;
    if (s->n_listed == s->n || !names_unlisted(item, s->n_listed)) {
        return;
    }
    for (int k = 0; k <= GS_MAX_SRC; k++) {
        const int link = k < GS_MAX_SRC ? link_of_source(k) : GH_ROOT;
        const int32_t id = link <= GH_ROOT ? item->link[link]
                         : rest > 0        ? s->wiring->rest[rest - 1][link - GH_ROOT - 1] : -1;
        if (id >= s->n_listed && tensor[id] == NULL) {
            tensor[id] = k < GS_MAX_SRC ? t->src[k] : t->view_src;
        }
    }
}

/* Copy the tensors that a graph lists to s->tensor; those that it does not list become NULL.  False: the graph cannot
 * match `base`, or there is no memory. */
static bool take_listed(gh_signature *s, const gh_signature *base, void *graph)
{
    const gh_ggml *lib = base->descriptors->lib;
    gx_tensor *const *leafs, *const *nodes;
    if (!has_counts_of(base, graph) || !make_room_for_tensors(s, base->n)) {
        return false;
    }
    memset(s->tensor, 0, (size_t)base->n * sizeof *s->tensor);
    leafs = gh_graph_leafs(lib, graph);
    nodes = lib->graph_nodes(graph);
    for (int32_t i = 0; i < base->n_leafs + base->n_nodes; i++) {
        gx_tensor *t = i < base->n_leafs ? leafs[i] : nodes[i - base->n_leafs];
        gx_tensor **at = &s->tensor[gh_listed_id(base, i)];
        if (*at != NULL && *at != t) {
            return false;
        }
        *at = t;
    }
    return true;
}

/* Whether all n tensors are different.  A graph in which one tensor stands in the place of two has another wiring, but
 * would match tensor by tensor. */
static bool all_differ(gx_tensor *const *tensor, int32_t n)
{
    gs_index seen = {NULL, 0, 0};
    bool differ = gs_index_reset(&seen, n);
    for (int32_t id = 0; id < n && differ; id++) {
        int32_t *slot = gs_index_find(&seen, tensor, sizeof *tensor, tensor[id]);
        differ = *slot == 0;
        *slot = id + 1;
    }
    free(seen.slot);
    return differ;
}

/* -- equal graphs, and graphs of the same wiring ------------------------------------------------------------------- */

/* The number of the descriptor of t, whose counterpart in the base graph has descriptor `was`; -1: the two differ in
 * type, flags, op or sub-op, or there is no memory.  Tensors that shared a descriptor mostly share one again, so
 * latest[was], the one found last for `was`, is tried before the hash table. */
static inline int32_t descriptor_after(gh_descriptors *descriptors, int32_t *latest, int32_t was, const gx_tensor *t)
{
    int32_t found = latest[was];
    if (gh_has_descriptor(t, &descriptors->descriptor[found], descriptors->full)) {
        return found;
    }
    found = gh_descriptor_intern(descriptors, t);
    if (found < 0 || !gh_same_kind(&descriptors->descriptor[found], &descriptors->descriptor[was])) {
        return -1;
    }
    return latest[was] = found;
}

/* Whether the graph whose listed tensors are in `s` has the wiring of `base`; fills in the tensors that the graph does
 * not list.  `latest` NULL: all descriptors must be those of `base`; else `s` gets the graph's own descriptors, with
 * `latest` as scratch (descriptor_after). */
static bool matches_other(gh_signature *s, const gh_signature *base, int32_t *latest)
{
    const gh_descriptor *descriptor = base->descriptors->descriptor;
    const bool full = base->descriptors->full;
    buffer_kinds kinds = {.lib = base->descriptors->lib};
    for (int32_t id = 0; id < base->n; id++) {
        const gh_signature_item *was = &base->wiring->item[id];
        const gx_tensor *t = s->tensor[id];
        gh_difference d = {{0, 0}, 0};
        if (id + GH_AHEAD < base->n_listed) {
            gh_prefetch(s->tensor[id + GH_AHEAD]);
        }
        if (t == NULL) {
            return false;
        }
        intern(base, s->tensor, was, t);
        if (latest == NULL && was->bits & GH_HAS_CONSTANT_DATA && t == base->tensor[id]) {
            if (!has_constant_data(t)) {
                return false;
            }
            continue;
        }
        if (latest == NULL) {
            gh_compare_descriptor(&d, t, &descriptor[base->descriptor[id]], full);
        } else {
            s->descriptor[id] = descriptor_after(s->descriptors, latest, base->descriptor[id], t);
            d.words = s->descriptor[id] < 0;
        }
        compare_links(&d, base, s->tensor, was, t);
        compare_memory(&d, base, id, t, &kinds, full);
        if (gh_is_some(d)) {
            return false;
        }
    }
    return all_differ(s->tensor, base->n);
}

bool gh_signature_match_moved(const gh_signature *s, gh_signature *other, void *graph)
{
    return take_listed(other, s, graph) && matches_other(other, s, NULL);
}

bool gh_signature_match_wiring(gh_signature *s, const gh_signature *base, void *graph)
{
    const int32_t n_descriptors = base->descriptors->n;
    bool found;
    int32_t *latest;
    s->descriptors = base->descriptors;
    gh_signature_clear(s);
    if (!take_listed(s, base, graph) || !make_room(s, base->n)) {
        return false;
    }
    latest = malloc((size_t)n_descriptors * sizeof *latest + 1);
    if (latest == NULL) {
        return false;
    }
    for (int32_t i = 0; i < n_descriptors; i++) {
        latest[i] = i;
    }
    s->n = base->n;
    s->n_nodes = base->n_nodes;
    s->n_leafs = base->n_leafs;
    s->n_listed = base->n_listed;
    s->plain = true;
    found = matches_other(s, base, latest);
    free(latest);
    if (found) {
        s->wiring = base->wiring;
        s->wiring->refs++;
    }
    return found;
}
