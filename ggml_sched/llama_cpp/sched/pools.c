/* ggml_sched/llama_cpp/sched/pools.c -- where in which buffers the ids of a plan lie.  See scheduler.h.
 *
 * A pool is the buffers of one type.  The planner gives every backend an arena of its own; those of one type are packed
 * anew as one, as the lifetimes of all are known.  Not where computes overlap: then each backend has its own pool,
 * since the next compute of one may begin while the other still reads.
 */
#include "scheduler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "alloc.h"

/* No chunk is larger than two to this. */
#define GH_CHUNK_BITS 48

static bool room_for(gh_prepared *p, int32_t n_needs)
{
    if (p->view.n > p->room_spots) {
        if (!gh_grow(&p->spot, sizeof *p->spot, p->view.n) || !gh_grow(&p->home, sizeof *p->home, p->view.n)
            || !gh_grow(&p->offset, sizeof *p->offset, p->view.n)) {
            return false;
        }
        p->room_spots = p->view.n;
    }
    if (n_needs > p->room_need) {
        if (!gh_grow(&p->need, sizeof *p->need, n_needs)) {
            return false;
        }
        p->room_need = n_needs;
    }
    return true;
}

/* Whether two ids share bytes of an arena other than by the first being the second's memory. */
static bool overlaps(const gs_plan_arrays *v, int32_t a, int32_t b)
{
    return v->home[a] >= 0 && v->home[a] == v->home[b] && v->offset[a] >= 0 && v->offset[b] >= 0
        && v->offset[a] < v->offset[b] + v->size[b] && v->offset[b] < v->offset[a] + v->size[a];
}

/* What a fused kernel reads of copies (fused.h) while it writes its last result: a copy that two nodes in a row may
 * read together lives until the second is done.  Lifetimes here alone know of it: to the planner, a node keeps tensors
 * of the graph.  True: some copy lives longer, *until says which. */
static bool keep_copies(const gh_prepared *p, int32_t *until)
{
    const gs_plan_arrays *v = &p->view;
    const gh_reading *r = &p->reading;
    bool found = false;
    int32_t position = 0;
    for (int32_t id = 0; id < v->n; id++) {
        until[id] = v->death[id];
    }
    for (int32_t i = 0; i + 1 < r->size.n_nodes; i++) {
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
                const int32_t c = v->src[j];
                if (c >= v->n_tensors && v->root[c] < 0 && until[c] < position && position < v->n_seq) {
                    until[c] = position;
                    found |= overlaps(v, c, next);
                }
            }
        }
    }
    return found;
}

/* Offsets of everything in the arenas of a pool, packed as one; the bytes that they need, -1 without memory. */
static int64_t pack_pool(const gh_sched *s, gh_prepared *p, int pool, const int32_t *until)
{
    const gs_plan_arrays *v = &p->view;
    gs_pack_result result;
    int64_t *numbers = malloc(4 * sizeof *numbers * (size_t)(v->n > 0 ? v->n : 1));
    int64_t *lower = numbers, *upper = lower + v->n, *size = upper + v->n, *offset = size + v->n;
    int32_t n = 0, k = 0;
    int64_t found = -1;
    if (numbers == NULL) {
        return -1;
    }
    for (int32_t i = 0; i < v->n; i++) {
        if (v->home[i] >= 0 && s->pool_of[v->home[i]] == pool && v->root[i] < 0 && v->birth[i] >= 0) {
            lower[n] = v->birth[i];
            upper[n] = (int64_t)until[i] + 1;
            size[n++] = v->size[i];
        }
    }
    if (gh_api->pack(n, lower, upper, size, GS_PACK_NO_CAPACITY, GS_PACK_PLANNER_BUDGET, offset, &result, NULL)
        == GS_OK) {
        found = result.arena;
        for (int32_t i = 0; i < v->n; i++) {
            if (v->home[i] >= 0 && s->pool_of[v->home[i]] == pool && v->root[i] < 0 && v->birth[i] >= 0) {
                p->spot[i].offset = offset[k++];
            }
        }
        /* What shares memory moves with whose it is. */
        for (int32_t i = 0; i < v->n; i++) {
            int32_t root = i;
            if (v->home[i] < 0 || s->pool_of[v->home[i]] != pool || v->root[i] < 0 || v->offset[i] < 0) {
                continue;
            }
            while (v->root[root] >= 0) {
                root = v->root[root];
            }
            p->spot[i].offset = p->spot[root].offset + v->offset[i] - v->offset[root];
        }
    }
    free(numbers);
    return found;
}

/* Whether the arenas of a pool are to be packed anew, as one: there are several, or copies live longer than planned.
 * Not where arenas have several chunks, or a bound that all together might exceed. */
static bool is_packed(const gh_sched *s, const gh_prepared *p, int pool, bool longer)
{
    const gs_plan_arrays *v = &p->view;
    int64_t total = 0;
    int n = 0;
    for (int b = 0; b < s->n_backends; b++) {
        if (s->pool_of[b] != pool || v->arena[b].nbytes == 0) {
            continue;
        }
        if (v->arena[b].n_chunks > 1) {
            return false;
        }
        total += v->arena[b].nbytes;
        n++;
    }
    return (n > 1 || (n == 1 && longer))
        && (s->info[s->first_of[pool]].max_buffer == 0 || total <= s->info[s->first_of[pool]].max_buffer);
}

/* The chunks of the arenas of a pool, one after the other, and what lies in them. */
static int32_t line_up(const gh_sched *s, gh_prepared *p, int pool, int32_t at)
{
    const gs_plan_arrays *v = &p->view;
    int32_t base[GH_MAX_BACKENDS], first = at;
    for (int b = 0; b < s->n_backends; b++) {
        const gs_arena_result *arena = &v->arena[b];
        bool is_used = false;
        base[b] = at - first;
        if (s->pool_of[b] != pool) {
            continue;
        }
        for (int32_t i = 0; i < v->n && !is_used; i++) {
            is_used = v->home[i] == b && v->offset[i] >= 0;
        }
        for (int32_t k = 0; is_used && k < arena->n_chunks; k++) {
            p->need[at++] = v->chunk_nbytes[arena->first_chunk + k];
        }
    }
    for (int32_t i = 0; i < v->n; i++) {
        const int32_t b = v->home[i];
        if (b >= 0 && s->pool_of[b] == pool && v->offset[i] >= 0) {
            const int64_t stride = v->arena[b].stride;
            p->spot[i].pool = pool;
            p->spot[i].chunk = base[b] + (stride > 0 ? (int32_t)(v->offset[i] / stride) : 0);
            p->spot[i].offset = stride > 0 ? v->offset[i] % stride : v->offset[i];
        }
    }
    return at;
}

/* Copies that live longer than planned lie apart, where their pool is not packed anew: in buffers of their own. */
static int32_t set_aside(const gh_sched *s, gh_prepared *p, int pool, const int32_t *until, int32_t at)
{
    const gs_plan_arrays *v = &p->view;
    for (int32_t c = v->n_tensors; c < v->n; c++) {
        if (v->home[c] < 0 || s->pool_of[v->home[c]] != pool || v->root[c] >= 0 || until[c] <= v->death[c]) {
            continue;
        }
        for (int32_t i = 0; i < v->n; i++) {
            int32_t root = i;
            while (v->root[root] >= 0) {
                root = v->root[root];
            }
            if (root == c && v->offset[i] >= 0) {
                p->spot[i].chunk = at - p->need_begin[pool];
                p->spot[i].offset = v->offset[i] - v->offset[c];
            }
        }
        p->need[at++] = v->size[c];
    }
    return at;
}

bool gh_pools_locate(gh_sched *s, gh_prepared *p)
{
    const gs_plan_arrays *v = &p->view;
    int32_t at = 0;
    bool longer = false;
    if (!room_for(p, v->n_chunks + s->n_backends + v->n_copies + v->n_places)) {
        return false;
    }
    if (s->n_backends > 1) {
        /* Where addresses are told later, positions are kept until then. */
        longer = v->n_copies > 0 && keep_copies(p, p->home);
        if (v->n_copies == 0) {
            memcpy(p->home, v->death, (size_t)v->n * sizeof *p->home);
        }
    }
    for (int32_t i = 0; i < v->n; i++) {
        p->spot[i] = (gh_spot){.pool = -1, .chunk = 0, .offset = 0};
    }
    for (int pool = 0; pool < s->n_pools; pool++) {
        p->need_begin[pool] = at;
        if (s->n_backends == 1 || !is_packed(s, p, pool, longer)) {
            at = line_up(s, p, pool, at);
            at = longer ? set_aside(s, p, pool, p->home, at) : at;
            continue;
        }
        p->need[at] = pack_pool(s, p, pool, p->home);
        if (p->need[at] < 0) {
            return false;
        }
        for (int32_t i = 0; i < v->n; i++) {
            if (v->home[i] >= 0 && s->pool_of[v->home[i]] == pool && v->offset[i] >= 0) {
                p->spot[i].pool = pool;
            }
        }
        at++;
    }
    p->need_begin[s->n_pools] = at;
    for (int32_t i = 0; i < v->n; i++) {
        p->home[i] = p->spot[i].pool;
        p->offset[i] = p->home[i] < 0 ? -1 : ((int64_t)p->spot[i].chunk << GH_CHUNK_BITS) + p->spot[i].offset;
    }
    return true;
}

bool gh_pools_fit(const gh_sched *s, const gh_prepared *p)
{
    for (int pool = 0; pool < s->n_pools; pool++) {
        const int32_t from = p->need_begin[pool];
        if (!gh_arena_fits(&s->pool[pool], p->need + from, p->need_begin[pool + 1] - from)) {
            return false;
        }
    }
    return true;
}

bool gh_pools_grow(gh_sched *s, const gh_prepared *p)
{
    bool waited = false;
    for (int pool = 0; pool < s->n_pools; pool++) {
        gh_arena *a = &s->pool[pool];
        int64_t *need = p->need + p->need_begin[pool];
        const int32_t n = p->need_begin[pool + 1] - p->need_begin[pool];
        int64_t *sizes;
        int32_t n_sizes = n > a->n_chunks ? n : a->n_chunks;
        bool grown;
        if (gh_arena_fits(a, need, n)) {
            continue;
        }
        sizes = malloc((size_t)(n_sizes > 0 ? n_sizes : 1) * sizeof *sizes);
        if (sizes == NULL) {
            return false;
        }
        /* Buffers only grow: what was reserved before still fits. */
        for (int32_t k = 0; k < n_sizes; k++) {
            sizes[k] = k < n ? need[k] : 0;
            if (k < a->n_chunks && a->chunk[k].nbytes > sizes[k]) {
                sizes[k] = a->chunk[k].nbytes;
            }
        }
        for (int b = 0; b < s->n_backends && !waited; b++) {
            s->rt->backend_synchronize(s->backend[b]);
        }
        if (!waited) {
            gh_count_one(GH_COUNT_SYNCHRONISED);
        }
        waited = true;
        gh_count_one(GH_COUNT_GROWN);
        s->generation++;
        grown = gh_arena_grow(a, s->lib, sizes, n_sizes);
        free(sizes);
        if (!grown) {
            gs_error error = {.status = GS_OUT_OF_MEMORY, .tensor = -1, .backend = s->first_of[pool], .index = -1};
            for (int32_t k = 0; k < n; k++) {
                error.value += need[k];
            }
            snprintf(error.message, sizeof error.message, "%.64s refused compute buffers: %lld bytes are needed",
                     s->lib->buft_name(a->buft), (long long)error.value);
            gh_failed(&error);
            return false;
        }
    }
    return true;
}

bool gh_pools_own(const gh_sched *s, const void *buffer)
{
    for (int pool = 0; pool < s->n_pools; pool++) {
        for (int32_t k = 0; k < s->pool[pool].n_chunks; k++) {
            if (s->pool[pool].chunk[k].buffer == buffer) {
                return true;
            }
        }
    }
    return false;
}
