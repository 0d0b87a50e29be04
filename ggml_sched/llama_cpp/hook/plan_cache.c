/* ggml_sched/llama_cpp/hook/plan_cache.c -- lookup, insertion and eviction of entries.  See plan_cache.h.
 *
 * A lookup tries, in this order:
 *   1. an entry of these very tensors, unchanged: its plan serves;
 *   2. an entry of an equal graph of other tensors: the entry is rebound to these tensors;
 *   3. an entry of the same wiring in which no tensor is smaller: a new entry reuses its plan;
 *   4. none of these: the graph is read and planned (planning.c).
 * The first three find plain graphs only (graph_signature.h).  Where backends reorder the nodes of their splits, an
 * entry is found only if they leave the nodes in the order that was planned.
 */
#include "plan_cache.h"

#include <stdio.h>

/* -- entries ------------------------------------------------------------------------------------------------------- */

/* Note that an entry is used now; with GH_PIN, also pin it. */
static gh_plan_entry *touch(gh_plan_cache *c, gh_plan_entry *e, int flags)
{
    e->used = ++c->clock;
    e->is_pinned |= (flags & GH_PIN) != 0;
    return e;
}

gh_plan_entry *gh_plan_cache_last(const gh_plan_cache *c)
{
    gh_plan_entry *last = NULL;
    for (int i = 0; i < c->n_entries; i++) {
        if (c->entry[i]->used > c->born && (last == NULL || c->entry[i]->used > last->used)) {
            last = c->entry[i];
        }
    }
    return last;
}

static int64_t arena_bytes(const gs_plan *p)
{
    int64_t nbytes = 0;
    for (int b = 0; b < p->n_backends; b++) {
        nbytes += p->arena[b].nbytes;
    }
    return nbytes;
}

gh_plan_entry *gh_plan_cache_largest(const gh_plan_cache *c)
{
    gh_plan_entry *largest = NULL;
    for (int i = 0; i < c->n_entries; i++) {
        gh_plan_entry *e = c->entry[i];
        if (e->used > c->born && !e->reuses
            && (largest == NULL || arena_bytes(&e->plan->view) > arena_bytes(&largest->plan->view))) {
            largest = e;
        }
    }
    return largest;
}

void gh_plan_cache_compact(gh_plan_cache *c)
{
    gh_signature *signatures[GH_N_ENTRIES];
    for (int i = 0; i < c->n_entries; i++) {
        signatures[i] = &c->entry[i]->signature;
    }
    gh_signatures_compact(signatures, c->n_entries, &c->descriptors);
}

/* The index of the entry to evict before one more is inserted; -1: there is room.  Entries that reuse a plan are
 * evicted first, then others that are not pinned, then pinned ones; of each kind the one used longest ago.  `reuses`:
 * the new entry reuses a plan, too; then an entry that reuses one is evicted as soon as there are GH_N_REUSING. */
static int entry_to_evict(const gh_plan_cache *c, bool reuses)
{
    int oldest[3] = {-1, -1, -1}, n_reusing = 0;
    for (int i = 0; i < c->n_entries; i++) {
        const gh_plan_entry *e = c->entry[i];
        const int rank = e->is_pinned ? 2 : e->reuses ? 0 : 1;
        n_reusing += e->reuses;
        if (oldest[rank] < 0 || e->used < c->entry[oldest[rank]]->used) {
            oldest[rank] = i;
        }
    }
    if (oldest[0] >= 0 && ((reuses && n_reusing >= GH_N_REUSING) || c->n_entries == GH_N_ENTRIES)) {
        return oldest[0];
    }
    return c->n_entries < GH_N_ENTRIES ? -1 : oldest[1] >= 0 ? oldest[1] : oldest[2];
}

/* Whether the plan of e serves every graph that the plan of `other` serves: both have the same wiring and problem, and
 * the plan of e has room for everything. */
static bool covers(const gh_plan_entry *e, const gh_plan_entry *other)
{
    const gs_plan *v = &e->plan->view, *w = &other->plan->view;
    if (e->plan == other->plan || other->used == 0 || e->plan->order != NULL || other->plan->order != NULL
        || !gh_signature_same_wiring(&e->signature, &other->signature)
        || !gh_problem_same(&e->plan->problem, &other->plan->problem) || v->n != w->n) {
        return false;
    }
    for (int32_t id = 0; id < v->n; id++) {
        if (w->arena_of[id] >= 0 && (v->arena_of[id] != w->arena_of[id] || w->size[id] > v->size[id])) {
            return false;
        }
    }
    return true;
}

void gh_plan_cache_evict(gh_plan_cache *c, int i)
{
    gh_plan_entry_clear(c->entry[i]);
    c->n_entries--;
    GH_SWAP(gh_plan_entry *, c->entry[i], c->entry[c->n_entries]);
}

/* Evict those of the present owner's entries whose graphs the new plan of e serves, too; e is pinned if one of them
 * was. */
static void evict_covered(gh_plan_cache *c, gh_plan_entry *e)
{
    for (int i = c->n_entries - 1; i >= 0 && !e->reuses; i--) {
        gh_plan_entry *other = c->entry[i];
        if (!other->reuses && other->used > c->born && covers(e, other)) {
            e->is_pinned |= other->is_pinned;
            gh_plan_cache_evict(c, i);
        }
    }
}

/* Add the entry that was filled, c->entry[n_entries], to those that lookups find, and return it; another entry is
 * evicted if the cache is full. */
static gh_plan_entry *insert(gh_plan_cache *c, int flags)
{
    const int filled = c->n_entries;
    gh_plan_entry *e = c->entry[filled];
    int at;
    evict_covered(c, e);
    at = entry_to_evict(c, e->reuses);
    if (at >= 0) {
        gh_plan_cache_evict(c, at);
    }
    GH_SWAP(gh_plan_entry *, c->entry[filled], c->entry[c->n_entries]);
    c->n_entries++;
    return touch(c, e, flags);
}

/* An empty entry to fill, c->entry[n_entries]: an evicted one or a new one.  NULL without memory. */
static gh_plan_entry *empty_entry(gh_plan_cache *c)
{
    gh_plan_entry **e = &c->entry[c->n_entries];
    if (*e != NULL) {
        gh_plan_entry_clear(*e);
    } else {
        *e = calloc(1, sizeof **e);
    }
    return *e;
}

/* -- finding ------------------------------------------------------------------------------------------------------- */

/* Whether the plan of an entry may serve.  A plan that was made for a larger graph serves only if the caller allows
 * reuse (GH_REUSE) and the buffers already have the larger size. */
static bool may_serve(const gh_plan_cache *c, const gh_plan_entry *e, int flags)
{
    return !e->reuses || ((flags & GH_REUSE) && gh_pools_fit(c, e->plan));
}

/* Whether the plan of e is valid for the present owner.  An entry that this owner has not used yet is valid if devices
 * and buffer types, queried now, answer as they did when the plan was made. */
static bool answers_hold(gh_plan_cache *c, const gh_plan_entry *e)
{
    gs_error error = {0};
    return e->used > c->born
        || (c->level->collect(c->owner, e, &c->problem, &error) == GS_OK
            && gh_plan_has_room(e->plan, &c->problem));
}

/* Let backends reorder a graph that an entry matches; returns whether the new order is the planned one.  If not, the
 * caller reads the graph in its new order, and drops the entry, because the client's next such graph would match,
 * too. */
static bool keeps_order(gh_plan_cache *c, const gh_plan_entry *e, void *graph)
{
    bool same = true;
    return !c->key.reorders || (c->level->reorder(c->owner, e, graph, &same) && same);
}

/* An entry whose graph equals this one; NULL: none.  `moved` false: only a graph of these same tensors, unchanged,
 * counts; true: only an equal graph of other tensors, and the entry is rebound to these tensors. */
static gh_plan_entry *find_equal(gh_plan_cache *c, void *graph, int flags, bool moved, bool *placed)
{
    const bool early = c->level->writes_addresses;
    for (int i = 0; i < c->n_entries; i++) {
        gh_plan_entry *e = c->entry[i];
        /* Addresses are written while tensors are compared only if nothing can refuse the entry after that. */
        const bool place = early && !moved && placed != NULL && e->used > c->born && gh_pools_fit(c, e->plan);
        if (!may_serve(c, e, flags) || (early && !c->level->same_demand(c->owner, e, NULL))) {
            continue;
        }
        if (!(moved ? gh_signature_match_moved(&e->signature, &c->moved, graph)
                    : gh_signature_match(&e->signature, graph, c->pool, place ? e->plan->role : NULL,
                                         gh_entry_places(e)))
            || (!early && !c->level->same_demand(c->owner, e, moved ? c->moved.tensor : e->signature.tensor))) {
            continue;
        }
        if (moved) {
            gh_signature_rebind(&e->signature, &c->moved);
        }
        if (!answers_hold(c, e)) {
            continue;
        }
        if (!keeps_order(c, e, graph)) {
            gh_plan_cache_evict(c, i);
            return NULL;
        }
        if (place) {
            *placed = true;
        }
        gh_count_one(moved ? GH_COUNT_EQUAL : GH_COUNT_SAME);
        return e;
    }
    return NULL;
}

/* Let the new entry e reuse the plan of `base`, if that was made for a larger graph of the same wiring; returns whether
 * it was. */
static bool reuse(gh_plan_cache *c, gh_plan_entry *e, const gh_plan_entry *base, void *graph)
{
    gs_error error = {0};
    e->plan = base->plan;
    e->plan->refs++;
    e->reuses = true;
    return gh_signature_match_wiring(&e->signature, &base->signature, graph) && c->level->take_demand(c->owner, e)
        && c->level->collect(c->owner, e, &c->problem, &error) == GS_OK && gh_plan_serves(c, e, &c->problem)
        && keeps_order(c, e, graph);
}

/* Make the empty entry e reuse the plan of a larger graph of the graph's wiring, and insert it; NULL: no plan
 * serves. */
static gh_plan_entry *find_larger(gh_plan_cache *c, gh_plan_entry *e, void *graph, int flags)
{
    for (int i = 0; i < c->n_entries; i++) {
        gh_plan_entry *base = c->entry[i];
        if (base->reuses || base->plan->order != NULL || !gh_pools_fit(c, base->plan)
            || (c->level->writes_addresses && !c->level->same_demand(c->owner, base, NULL))) {
            continue;
        }
        if (reuse(c, e, base, graph)) {
            gh_count_one(GH_COUNT_REPLAYED);
            base->used = base->used > c->born ? base->used : ++c->clock;
            return insert(c, flags & ~GH_PIN);
        }
        gh_plan_entry_clear(e);
    }
    return NULL;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

/* Read a graph into c->reader, and fill the signature, the demand and a new plan of the entry e from it. */
static int read_graph(gh_plan_cache *c, gh_plan_entry *e, void *graph, gs_error *error)
{
    const int status = gh_reader_read(&c->reader, c->lib, graph);
    if (status != GS_OK) {
        snprintf(error->message, sizeof error->message, "a graph of %d nodes cannot be read",
                 c->lib->graph_n_nodes(graph));
        return status;
    }
    e->plan = gh_plan_new();
    if (e->plan == NULL || !gh_signature_fill(&e->signature, &c->descriptors, &c->reader)
        || !gh_plan_take_graph(e->plan, &c->reader) || !c->level->take_demand(c->owner, e)) {
        return GS_NO_HOST_MEMORY;
    }
    /* Share the wiring of an entry that has an equal one: graphs of prompts and of tokens have, even where backends
     * answer differently about them. */
    for (int i = 0; i < c->n_entries && !gh_signature_share_wiring(&e->signature, &c->entry[i]->signature); i++) {
    }
    return GS_OK;
}

/* Read a graph that no entry matches, plan it and insert the entry e for it.  Backends may reorder the nodes of each
 * split; since only a plan says where splits begin, the graph is then planned a second time in the new order. */
static gh_plan_entry *read_and_plan(gh_plan_cache *c, gh_plan_entry *e, void *graph, int flags, gs_error *error)
{
    bool same = true;
    int status = read_graph(c, e, graph, error);
    if (status == GS_OK) {
        status = gh_plan_graph(c, e, flags, error);
    }
    if (status == GS_OK && c->key.reorders) {
        status = c->level->reorder(c->owner, e, graph, &same) ? GS_OK : GS_NO_HOST_MEMORY;
        if (status == GS_OK && !same) {
            status = c->level->plan_reordered(c->owner, e, graph, error);
        }
    }
    /* The reader's arrays are kept only where graphs are read often: where backends reorder them. */
    if (!c->key.reorders) {
        gh_reader_free(&c->reader);
    }
    if (status != GS_OK) {
        gh_plan_entry_clear(e);
        error->status = status;
        return NULL;
    }
    return insert(c, flags);
}

gh_plan_entry *gh_plan_cache_get(gh_plan_cache *c, void *graph, int flags, bool *placed, gs_error *error)
{
    gh_plan_entry *e = find_equal(c, graph, flags, false, placed), *empty;
    memset(error, 0, sizeof *error);
    error->tensor = error->backend = error->index = -1;
    if (e != NULL) {
        return touch(c, e, flags);
    }
    gh_plan_cache_compact(c);
    e = find_equal(c, graph, flags, true, NULL);
    if (e != NULL) {
        return touch(c, e, flags);
    }
    empty = empty_entry(c);
    if (empty == NULL) {
        error->status = GS_NO_HOST_MEMORY;
        return NULL;
    }
    e = flags & GH_REUSE ? find_larger(c, empty, graph, flags) : NULL;
    return e != NULL ? e : read_and_plan(c, empty, graph, flags, error);
}

gh_plan_entry *gh_plan_cache_get_backed(gh_plan_cache *c, void *graph, int flags, bool *placed,
                                        void (*wait)(void *owner), gs_error *error)
{
    for (;;) {
        gh_plan_entry *e = gh_plan_cache_get(c, graph, flags, placed, error);
        if (e == NULL || (placed != NULL && *placed) || gh_pools_grow(c, e->plan, wait, error)) {
            if (e != NULL && (flags & GH_PIN)) {
                gh_compare(c, e, graph);
            }
            return e;
        }
        /* A device refused the memory for this plan: evict its entry, so that no other graph reuses the plan.  If the
         * plan had room for larger graphs (GH_HINTS), a plan without that room may fit. */
        for (int i = 0; i < c->n_entries; i++) {
            if (c->entry[i] == e) {
                gh_plan_cache_evict(c, i);
                break;
            }
        }
        if (!(flags & GH_HINTS)) {
            return NULL;
        }
        flags &= ~GH_HINTS;
    }
}

bool gh_log_failure(const gh_ggml *lib, gs_error *error)
{
    if (error->message[0] == 0) {
        const char *name = gh_api->status_name(error->status);
        snprintf(error->message, sizeof error->message, "%s", name != NULL ? name : "no plan");
    }
    if (lib->log_internal != NULL) {
        lib->log_internal(GH_LOG_ERROR, "ggml_sched: %s\n", error->message);
    }
    return gh_failed(error);
}
