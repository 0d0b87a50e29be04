/* ggml_sched/llama_cpp/sched/prepare.c -- a graph with its plan: found again, or read, planned and shown to backends
 * that reorder it.  See scheduler.h.
 */
#include "scheduler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "alloc.h"

/* -- splits ------------------------------------------------------------------------------------------------------- */

/* Where the splits of a plan begin among ggml's nodes.  The planner leaves out nodes that are leafs to it, and adds
 * some of its own: splits of those alone are empty, and none to ggml. */
static bool cut(gh_prepared *p)
{
    const gs_plan_arrays *v = &p->view;
    const gh_reading *r = &p->reading;
    if (v->n_splits + 1 > p->room_cuts) {
        if (!gh_grow(&p->cut, sizeof *p->cut, v->n_splits + 1)) {
            return false;
        }
        p->room_cuts = v->n_splits + 1;
    }
    p->n_splits = 0;
    p->cut[v->n_splits] = r->n_nodes;
    for (int32_t i = v->n_splits - 1; i >= 0; i--) {
        int32_t at = v->split_start[i];
        while (at < v->split_stop[i] && r->item[r->order[at]].node == GH_NOWHERE) {
            at++;
        }
        p->cut[i] = at < v->split_stop[i] ? r->item[r->order[at]].node : p->cut[i + 1];
        p->n_splits += p->cut[i] < p->cut[i + 1];
    }
    /* What comes before the first of them is nobody's: leafs. */
    for (int32_t i = 0, first = v->n_splits > 0 ? p->cut[0] : 0; i < v->n_splits && p->cut[i] == first; i++) {
        if (p->cut[i] < p->cut[i + 1]) {
            p->cut[i] = 0;
            break;
        }
        p->cut[i] = 0;
    }
    return true;
}

/* -- backends that reorder ---------------------------------------------------------------------------------------- */

static void add_dep(void *user, gx_tensor *tensor, gx_tensor *until)
{
    gh_sched *s = user;
    for (int32_t i = 0; i < s->n_deps; i++) {
        if (s->dep[2 * i] == tensor && s->dep[2 * i + 1] == until) {
            return;
        }
    }
    if (s->n_deps == s->room_deps) {
        if (!gh_grow(&s->dep, 2 * sizeof *s->dep, 2 * (int64_t)s->room_deps + 16)) {
            s->dep_failed = true;
            return;
        }
        s->room_deps = 2 * s->room_deps + 16;
    }
    s->dep[2 * s->n_deps] = tensor;
    s->dep[2 * s->n_deps++ + 1] = until;
}

/* Let the backends of a plan's splits reorder their nodes, and say what they want kept. */
static bool reorder(gh_sched *s, const gh_prepared *p, void *graph)
{
    const gh_optimize_params params = {.add_alloc_dep = add_dep, .user = s};
    s->n_deps = 0;
    s->dep_failed = false;
    for (int32_t i = 0; i < p->view.n_splits; i++) {
        const int b = p->view.split_backend[i];
        if (s->optimize[b] != NULL && p->cut[i] < p->cut[i + 1]) {
            gh_part part = s->rt->graph_view(graph, p->cut[i], p->cut[i + 1]);
            s->optimize[b](s->backend[b], &part, &params);
        }
    }
    return !s->dep_failed;
}

static bool is_in_order(const gh_sched *s, const gh_prepared *p, void *graph)
{
    return gh_same(s->lib->graph_nodes(graph), p->ordered, p->looks.n_nodes, sizeof *p->ordered)
        && s->n_deps == p->n_deps && gh_same(s->dep, p->dep, 2 * (int64_t)s->n_deps, sizeof *s->dep);
}

/* What backends want kept, as the planner reads it.  What is no node, or comes too late, they cannot mean. */
static bool keep_deps(gh_sched *s, gh_prepared *p)
{
    if (s->n_deps > p->room_deps) {
        if (!gh_grow(&p->dep, 2 * sizeof *p->dep, s->n_deps)) {
            return false;
        }
        p->room_deps = s->n_deps;
    }
    p->n_deps = s->n_deps;
    p->keeps.n = 0;
    for (int32_t i = 0; i < s->n_deps; i++) {
        const gh_reading *r = &p->reading;
        int32_t kept = gh_reading_id(r, s->dep[2 * i]);
        const int32_t node = gh_reading_id(r, s->dep[2 * i + 1]);
        p->dep[2 * i] = s->dep[2 * i];
        p->dep[2 * i + 1] = s->dep[2 * i + 1];
        if (kept >= 0 && r->item[kept].root >= 0) {
            kept = r->item[kept].root;
        }
        if (kept < 0 || node < 0 || r->item[node].op == GS_OP_NONE || r->item[kept].role != GH_PLACED
            || (r->item[kept].op != GS_OP_NONE && r->item[kept].node >= r->item[node].node)) {
            continue;
        }
        if (p->keeps.n == p->keeps.room) {
            const int32_t room = 2 * p->keeps.room + 16;
            if (!gh_grow(&p->keeps.node, sizeof(int32_t), room) || !gh_grow(&p->keeps.kept, sizeof(int32_t), room)) {
                return false;
            }
            p->keeps.room = room;
        }
        p->keeps.node[p->keeps.n] = node;
        p->keeps.kept[p->keeps.n++] = kept;
    }
    return true;
}

/* Plan a graph again that backends have reordered, everything staying where it was. */
static int plan_reordered(gh_sched *s, gh_prepared *p, void *graph)
{
    int status = GS_OK;
    gh_choices_clear(&s->kept_choices);
    for (int32_t i = 0; i < p->reading.n; i++) {
        if (p->view.assign[i] >= 0
            && !gh_choices_set(&s->kept_choices, p->reading.item[i].tensor, p->view.assign[i])) {
            return GS_NO_HOST_MEMORY;
        }
    }
    gh_api->plan_free(p->plan);
    p->plan = NULL;
    status = gh_read(&p->reading, s->lib, graph);
    if (status == GS_OK && !keep_deps(s, p)) {
        status = GS_NO_HOST_MEMORY;
    }
    if (status == GS_OK) {
        status = gh_plan(s, p, &s->kept_choices);
    }
    if (status == GS_OK && !cut(p)) {
        status = GS_NO_HOST_MEMORY;
    }
    if (status == GS_OK) {
        memcpy(p->ordered, p->reading.nodes, (size_t)p->looks.n_nodes * sizeof *p->ordered);
    }
    return status;
}

/* -- finding ------------------------------------------------------------------------------------------------------ */

static gh_prepared *older(gh_prepared *a, gh_prepared *b)
{
    return a == NULL || b->used < a->used ? b : a;
}

/* One to be written over: of those that have a reserved one's plan the one used longest ago, where they are many; an
 * unused one; else the one used longest ago, what is reserved last. */
static gh_prepared *oldest(gh_sched *s)
{
    gh_prepared *replayed = NULL, *unused = NULL, *other = NULL, *reserved = NULL;
    int n_replayed = 0;
    for (int i = 0; i < GH_N_PREPARED; i++) {
        gh_prepared *p = &s->prepared[i];
        if (p->used == 0) {
            unused = p;
        } else if (p->reserved) {
            reserved = older(reserved, p);
        } else if (p->replayed) {
            replayed = older(replayed, p);
            n_replayed++;
        } else {
            other = older(other, p);
        }
    }
    if (replayed != NULL && (n_replayed >= GH_N_REPLAYED || unused == NULL)) {
        return replayed;
    }
    return unused != NULL ? unused : other != NULL ? other : reserved;
}

static gh_prepared *find(gh_sched *s, void *graph)
{
    for (int i = 0; i < GH_N_PREPARED; i++) {
        gh_prepared *p = &s->prepared[i];
        if (!gh_may_serve(s, p) || !gh_looks_like(s, p, graph) || !gh_is_asked_alike(s, p)) {
            continue;
        }
        if (s->some_optimize) {
            if (!reorder(s, p, graph) || !is_in_order(s, p, graph)) {
                return NULL;
            }
        }
        gh_count_one(GH_COUNT_SAME);
        return p;
    }
    return s->some_optimize ? NULL : gh_find_elsewhere(s, graph);
}

static void forget(gh_prepared *p)
{
    gh_api->plan_free(p->plan);
    p->plan = NULL;
    p->used = p->generation = 0;
    p->reserved = p->replayed = p->waits = false;
    p->keeps.n = p->n_deps = 0;
    p->copies.n_nodes = p->copies.n_were = 0;
}

/* Whether a node writes to memory that a client has given. */
static bool is_written(const gh_reading *r, int32_t leaf)
{
    for (int32_t i = 0; i < r->size.n_nodes; i++) {
        const gh_item *item = &r->item[r->order[i]];
        if (item->root == leaf && !gh_is_view_op(item->op)) {
            return true;
        }
    }
    return false;
}

/* Whether a backend reads what lies in another's memory, or was computed by another, without a copy. */
static bool finds_waits(const gh_sched *s, const gh_prepared *p)
{
    const gs_plan_arrays *v = &p->view;
    for (int32_t i = 0; i < p->reading.size.n_nodes; i++) {
        const int32_t id = p->reading.order[i], b = v->assign[id];
        for (int32_t k = v->src_begin[id]; k < v->src_begin[id + 1]; k++) {
            const int32_t src = v->src[k];
            if (src < v->n_tensors && v->assign[src] != b
                && (v->home[src] >= 0 || p->reading.item[src].op != GS_OP_NONE || is_written(&p->reading, src))) {
                return true;
            }
        }
    }
    return s->n_pools < s->n_backends;
}

void gh_compact_graphs(gh_sched *s)
{
    gh_looks *looks[GH_N_PREPARED];
    int n = 0;
    for (int i = 0; i < GH_N_PREPARED; i++) {
        if (s->prepared[i].plan != NULL) {
            looks[n++] = &s->prepared[i].looks;
        }
    }
    gh_looks_compact(looks, n, &s->forms);
}

static void say_unread(const gh_sched *s, void *graph, int status)
{
    gs_error error = {.status = status, .tensor = -1, .backend = -1, .index = -1};
    snprintf(error.message, sizeof error.message, "a graph of %d nodes cannot be read", s->lib->graph_n_nodes(graph));
    gh_failed(&error);
}

gh_prepared *gh_prepare(gh_sched *s, void *graph, bool reserves)
{
    gh_prepared *p;
    int status;
    s->now = NULL;
    p = find(s, graph);
    if (p == NULL) {
        gh_compact_graphs(s);
        p = oldest(s);
        forget(p);
        status = gh_read(&p->reading, s->lib, graph);
        if (status != GS_OK) {
            say_unread(s, graph, status);
        }
        status = status == GS_OK ? gh_plan(s, p, &s->choices) : status;
        if (status == GS_OK && (!cut(p) || !gh_take_looks(s, p))) {
            status = GS_NO_HOST_MEMORY;
        }
        if (status == GS_OK && s->some_optimize) {
            status = reorder(s, p, graph) ? GS_OK : GS_NO_HOST_MEMORY;
            if (status == GS_OK && !is_in_order(s, p, graph)) {
                status = plan_reordered(s, p, graph);
            }
        }
        if (status == GS_OK && (!gh_pools_locate(s, p) || !gh_names_take(&p->names, &p->reading))) {
            status = GS_NO_HOST_MEMORY;
        }
        if (status != GS_OK) {
            forget(p);
            return NULL;
        }
        p->waits = s->n_backends > 1 && finds_waits(s, p);
    }
    p->used = ++s->clock;
    p->reserved |= reserves;
    s->n_splits = p->n_splits;
    return p;
}

void gh_prepared_free(gh_prepared *p)
{
    gh_api->plan_free(p->plan);
    gh_api->graph_free(p->graph);
    gh_reading_free(&p->reading);
    gh_keeps_free(&p->keeps);
    gh_looks_free(&p->looks);
    gh_names_free(&p->names);
    free(p->copies.tensor);
    free(p->copies.of);
    free(p->copies.was);
    free(p->copies.nodes);
    free(p->copies.were);
    free(p->copies.n_reads);
    free(p->ordered);
    free(p->dep);
    free(p->chosen);
    free(p->chosen_backend);
    free(p->resident);
    free(p->buffer);
    free(p->assigned);
    free(p->usage);
    free(p->supports);
    free(p->offloads);
    free(p->nbytes);
    free(p->reads_buffer);
    free(p->cut);
    free(p->spot);
    free(p->slot);
    free(p->viewer);
    free(p->home);
    free(p->offset);
    free(p->need);
    memset(p, 0, sizeof *p);
}
