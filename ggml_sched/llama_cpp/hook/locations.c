/* ggml_sched/llama_cpp/hook/locations.c -- in which buffers of which pool the ids of a plan lie.  See plan_cache.h.
 *
 * A pool is the buffers of one type.  The planner gives every backend an arena of its own; backends with the same
 * buffer type share a pool, and their arenas are packed again as one, by the lifetimes of all their tensors, which
 * takes less memory than arenas side by side.  Where computes may overlap each backend has a pool of its own: the next
 * compute of one backend may begin while another still reads.
 */
#include "plan_cache.h"

#include <stdio.h>

static bool make_room(gh_plan *p, int32_t n_needs)
{
    return gh_grow(&p->places.chunk, sizeof *p->places.chunk, p->view.n)
        && gh_grow(&p->places.offset, sizeof *p->places.offset, p->view.n)
        && gh_grow(&p->need, sizeof *p->need, n_needs);
}

/* The backend whose arena holds an id; -1: no arena does.  A placed tensor without bytes has an address in the arena of
 * the backend that it was assigned to. */
static int32_t backend_of(const gh_plan *p, int32_t id)
{
    if (p->view.arena_of[id] >= 0) {
        return p->view.offset[id] >= 0 ? p->view.arena_of[id] : -1;
    }
    return id < p->n && p->role[id] == GH_ROLE_PLACED && p->arrays.layout[id].nbytes == 0
        ? p->problem.assigned[id] : -1;
}

static int64_t offset_of(const gh_plan *p, int32_t id)
{
    return p->view.offset[id] >= 0 ? p->view.offset[id] : 0;
}

static bool is_in_pool(const gh_plan_cache *c, const gh_plan *p, int pool, int32_t id)
{
    return p->view.arena_of[id] >= 0 && c->pool_of[p->view.arena_of[id]] == pool;
}

/* Whether two ids share bytes of an arena. */
static bool overlaps(const gs_plan *v, int32_t a, int32_t b)
{
    return v->arena_of[a] >= 0 && v->arena_of[a] == v->arena_of[b] && v->offset[a] >= 0 && v->offset[b] >= 0
        && v->offset[a] < v->offset[b] + v->size[b] && v->offset[b] < v->offset[a] + v->size[a];
}

/* Fill until[id]: the position up to which the memory of each id is taken.  It is the planned death, except for a copy
 * that is a source of a node which may be fused with the next one (fusion.h): such a copy is taken until that next node
 * is done.  The planner cannot do this: its alloc dependencies are between tensors of the graph, not copies.  Returns
 * whether, at the planned offsets, some copy that is taken longer would be overwritten. */
static bool extend_copies(const gh_plan *p, const gh_reader *r, int32_t *until)
{
    const gs_plan *v = &p->view;
    bool found = false;
    int32_t position = 0;
    for (int32_t id = 0; id < v->n; id++) {
        until[id] = v->death[id];
    }
    for (int32_t i = 0; v->n_copies > 0 && i + 1 < r->size.n_nodes; i++) {
        const int32_t id = r->order[i], next = r->order[i + 1];
        if (v->assign[id] != v->assign[next] || r->item[id].n_readers != 1) {
            continue;
        }
        for (int32_t k = v->src_begin[next]; k < v->src_begin[next + 1]; k++) {
            if (v->src[k] != id) {
                continue;
            }
            while (position < v->n_seq && v->seq[position] != next) {
                position++;
            }
            for (int32_t j = v->src_begin[id]; j < v->src_begin[id + 1]; j++) {
                const int32_t copy = v->src[j];
                if (copy >= v->n_tensors && v->root[copy] < 0 && until[copy] < position && position < v->n_seq) {
                    until[copy] = position;
                    found |= overlaps(v, copy, next);
                }
            }
        }
    }
    return found;
}

static int32_t root_of(const gs_plan *v, int32_t id)
{
    while (v->root[id] >= 0) {
        id = v->root[id];
    }
    return id;
}

/* Pack the arenas of a pool as one: choose new offsets for everything in them.  until[id]: the last position at which
 * the memory of an id is taken (extend_copies).  Returns the bytes that the arena needs, -1 without memory. */
static int64_t pack_pool(const gh_plan_cache *c, gh_plan *p, int pool, const int32_t *until)
{
    const gs_plan *v = &p->view;
    gs_pack_result result;
    int64_t *numbers = malloc(4 * sizeof *numbers * (size_t)(v->n > 0 ? v->n : 1));
    int64_t *lower = numbers, *upper = lower + v->n, *size = upper + v->n, *offset = size + v->n;
    int32_t n = 0, k = 0;
    int64_t found = -1;
    if (numbers == NULL) {
        return -1;
    }
    for (int32_t id = 0; id < v->n; id++) {
        if (is_in_pool(c, p, pool, id) && v->root[id] < 0 && v->birth[id] >= 0) {
            lower[n] = v->birth[id];
            upper[n] = (int64_t)until[id] + 1;
            size[n++] = v->size[id];
        }
    }
    if (gh_api->pack(n, lower, upper, size, GS_PACK_NO_CAPACITY, GS_PACK_PLANNER_BUDGET, offset, &result, NULL)
        == GS_OK) {
        found = result.arena;
        for (int32_t id = 0; id < v->n; id++) {
            if (is_in_pool(c, p, pool, id) && v->root[id] < 0 && v->birth[id] >= 0) {
                p->places.offset[id] = offset[k++];
            }
        }
        for (int32_t id = 0; id < v->n; id++) {
            if (is_in_pool(c, p, pool, id) && v->offset[id] >= 0) {
                const int32_t root = root_of(v, id);
                p->places.chunk[id] = gh_chunk_index(pool, 0);
                p->places.offset[id] = p->places.offset[root] + v->offset[id] - v->offset[root];
            }
        }
    }
    free(numbers);
    return found;
}

/* Whether the arenas of a pool should be packed as one: several are in use, or (`extended`) some copy is taken longer
 * than planned.  Not if an arena has several chunks, or if all together may be larger than the largest buffer. */
static bool is_packed(const gh_plan_cache *c, const gh_plan *p, int pool, bool extended)
{
    const gs_plan *v = &p->view;
    const int64_t limit = gh_max_buffer(c->pool[pool].max_size);
    int64_t total = 0;
    int n = 0;
    for (int b = 0; b < c->n_backends; b++) {
        if (c->pool_of[b] != pool || v->arena[b].nbytes == 0) {
            continue;
        }
        if (v->arena[b].n_chunks > 1) {
            return false;
        }
        total += v->arena[b].nbytes;
        n++;
    }
    return (n > 1 || (n == 1 && extended)) && (limit == 0 || total <= limit);
}

/* Keep the planner's offsets: give each chunk of each arena of a pool a buffer of its own, from p->need[at] on.
 * Returns the index after the last. */
static int32_t line_up(const gh_plan_cache *c, gh_plan *p, int pool, int32_t at)
{
    const gs_plan *v = &p->view;
    int32_t base[GH_MAX_BACKENDS], first = at;
    for (int b = 0; b < c->n_backends; b++) {
        const gs_arena_result *arena = &v->arena[b];
        bool is_used = false;
        base[b] = at - first;
        for (int32_t id = 0; c->pool_of[b] == pool && id < v->n && !is_used; id++) {
            is_used = backend_of(p, id) == b;
        }
        if (is_used && arena->n_chunks == 0) {
            p->need[at++] = 0;
        }
        for (int32_t k = 0; is_used && k < arena->n_chunks; k++) {
            p->need[at++] = v->chunk_nbytes[arena->first_chunk + k];
        }
    }
    for (int32_t id = 0; id < v->n; id++) {
        const int32_t b = backend_of(p, id);
        if (b >= 0 && c->pool_of[b] == pool) {
            const int64_t stride = v->arena[b].stride, offset = offset_of(p, id);
            p->places.chunk[id] = gh_chunk_index(pool, base[b] + (stride > 0 ? (int32_t)(offset / stride) : 0));
            p->places.offset[id] = stride > 0 ? offset % stride : offset;
        }
    }
    return at;
}

/* In a pool that is not packed again, give each copy that is taken longer than planned (`until`) a buffer of its own,
 * from p->need[at] on.  Returns the index after the last. */
static int32_t set_apart(const gh_plan_cache *c, gh_plan *p, int pool, const int32_t *until, int32_t at)
{
    const gs_plan *v = &p->view;
    for (int32_t copy = v->n_tensors; copy < v->n; copy++) {
        if (!is_in_pool(c, p, pool, copy) || v->root[copy] >= 0 || until[copy] <= v->death[copy]) {
            continue;
        }
        for (int32_t id = 0; id < v->n; id++) {
            if (v->offset[id] >= 0 && root_of(v, id) == copy) {
                p->places.chunk[id] = gh_chunk_index(pool, at - p->need_begin[pool]);
                p->places.offset[id] = v->offset[id] - v->offset[copy];
            }
        }
        p->need[at++] = v->size[copy];
    }
    return at;
}

/* Whether every tensor that the plan places, and every copy, has a location. */
static bool has_all_places(const gh_plan *p)
{
    bool has = true;
    for (int32_t id = 0; id < p->view.n; id++) {
        const bool needs = id < p->n ? p->role[id] == GH_ROLE_PLACED : id >= p->view.n_tensors;
        has &= !needs || p->places.chunk[id] != GH_NO_CHUNK;
    }
    return has;
}

bool gh_plan_locate(const gh_plan_cache *c, gh_plan *p, const gh_reader *r)
{
    const gs_plan *v = &p->view;
    int32_t at = 0, *until = NULL;
    bool extended = false, done = make_room(p, v->n_chunks + 2 * c->n_backends + v->n_copies + v->n_slots);
    if (done && c->key.is_scheduler && c->n_backends > 1) {
        until = malloc((size_t)v->n * sizeof *until + 1);
        done = until != NULL;
        extended = done && extend_copies(p, r, until);
        p->is_repacked = extended;
    }
    for (int32_t id = 0; done && id < v->n; id++) {
        p->places.chunk[id] = GH_NO_CHUNK;
        p->places.offset[id] = 0;
    }
    for (int pool = 0; done && pool < c->n_pools; pool++) {
        p->need_begin[pool] = at;
        if (until != NULL && is_packed(c, p, pool, extended)) {
            p->is_repacked = true;
            p->need[at] = pack_pool(c, p, pool, until);
            done = p->need[at++] >= 0;
        } else {
            at = line_up(c, p, pool, at);
            at = extended ? set_apart(c, p, pool, until, at) : at;
        }
    }
    p->need_begin[c->n_pools] = at;
    free(until);
    return done && has_all_places(p);
}

/* -- buffers ------------------------------------------------------------------------------------------------------- */

bool gh_pools_fit(const gh_plan_cache *c, const gh_plan *p)
{
    for (int pool = 0; pool < c->n_pools; pool++) {
        const int32_t from = p->need_begin[pool];
        if (!gh_arena_fits(&c->pool[pool], p->need + from, p->need_begin[pool + 1] - from)) {
            return false;
        }
    }
    return true;
}

size_t gh_plan_nbytes(const gh_plan *p, int pool)
{
    size_t total = 0;
    for (int32_t i = p->need_begin[pool]; i < p->need_begin[pool + 1]; i++) {
        total += (size_t)p->need[i];
    }
    return total;
}

bool gh_pools_grow(gh_plan_cache *c, const gh_plan *p, void (*wait)(void *owner), gs_error *error)
{
    bool waited = wait == NULL;
    for (int pool = 0; pool < c->n_pools; pool++) {
        const int64_t *need = p->need + p->need_begin[pool];
        const int32_t n = p->need_begin[pool + 1] - p->need_begin[pool];
        if (gh_arena_fits(&c->pool[pool], need, n)) {
            continue;
        }
        if (!waited) {
            wait(c->owner);
            gh_count_one(GH_COUNT_SYNCHRONISED);
            waited = true;
        }
        gh_count_one(GH_COUNT_GROWN);
        if (!gh_arena_grow(&c->pool[pool], c->lib, need, n)) {
            error->status = GS_OUT_OF_MEMORY;
            error->backend = c->first_of[pool];
            error->value = 0;
            for (int32_t k = 0; k < n; k++) {
                error->value += need[k];
            }
            snprintf(error->message, sizeof error->message, "%.64s refused compute buffers: %lld bytes are needed",
                     c->lib->backend_buft_name(c->pool[pool].buft), (long long)error->value);
            return false;
        }
    }
    return true;
}

bool gh_pools_own(const gh_plan_cache *c, const void *buffer)
{
    for (int pool = 0; pool < c->n_pools; pool++) {
        for (int32_t k = 0; k < c->pool[pool].n_chunks; k++) {
            if (c->pool[pool].chunk[k].buffer == buffer) {
                return true;
            }
        }
    }
    return false;
}

/* -- addresses ----------------------------------------------------------------------------------------------------- */

void gh_place_tensors(const gh_plan_cache *c, const gh_plan_entry *e, bool placed)
{
    const gh_plan *p = e->plan;
    const gh_places places = gh_entry_places(e);
    const bool inits = !placed || gh_arenas_have_init_tensor(c->pool, c->n_pools, c->lib);
    for (int pool = 0; pool < c->n_pools; pool++) {
        gh_arena_reset(&c->pool[pool], c->lib);
    }
    for (int32_t id = 0; inits && id < p->n; id++) {
        if (p->role[id] == GH_ROLE_PLACED) {
            gx_tensor *t = gh_entry_tensor(e, id);
            gh_place(t, gh_chunk_at(c->pool, places.chunk[id]), places.offset[id]);
            gh_init_tensor(c->lib, t->buffer, t);
        }
    }
    for (int32_t i = 0; i < p->n_viewers; i++) {
        gx_tensor *t = gh_entry_tensor(e, p->viewer[i]), *root = t->view_src;
        /* Views of a root that has memory and no buffer stay as they are, as in ggml: the client gave that memory. */
        if (t->buffer == NULL && root->buffer != NULL) {
            t->buffer = root->buffer;
            t->data = (char *)root->data + t->view_offs;
            gh_init_tensor(c->lib, t->buffer, t);
        }
    }
}
