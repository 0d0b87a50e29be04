/* ggml_sched/llama_cpp/hook/plan_entry.c -- memory of cache entries, plans and problems.  See plan_cache.h. */
#include "plan_cache.h"

bool gh_problem_make_room(gh_problem *p, int32_t n, int32_t n_backends, bool has_answers)
{
    const int64_t m = n_backends, n_answers = n * m, n_readers = m * GH_MAX_BUFTS;
    const int64_t answer_bytes = (int64_t)sizeof(int32_t) * n
                               + (has_answers ? ((int64_t)sizeof(int32_t) + 1) * n + 2 * n_answers + n_readers : 0);
    const int64_t room = (int64_t)sizeof(int64_t) * n_answers + (int64_t)sizeof(int32_t) * n + answer_bytes;
    if (room > p->room) {
        if (!gh_grow(&p->memory, 1, room)) {
            return false;
        }
        p->room = room;
    }
    p->n = n;
    p->n_backends = n_backends;
    p->n_buffers = 0;
    p->some_larger = p->some_assigned = false;
    p->has_answers = has_answers;
    p->answer_bytes = answer_bytes;
    p->nbytes = p->memory;
    p->assigned = (int32_t *)(p->nbytes + n_answers);
    p->resident = p->assigned + n;
    if (has_answers) {
        p->buffer = p->resident + n;
        p->usage = (unsigned char *)(p->buffer + n);
        p->supports = p->usage + n;
        p->offloads = p->supports + n_answers;
        p->reads_buffer = p->offloads + n_answers;
        memset(p->reads_buffer, 0, (size_t)n_readers);
    }
    return true;
}

bool gh_problem_same(const gh_problem *a, const gh_problem *b)
{
    return gh_problem_same_answers(a, b) && gh_same(a->assigned, b->assigned, a->n, sizeof *a->assigned);
}

bool gh_problem_same_answers(const gh_problem *a, const gh_problem *b)
{
    return a->n == b->n && a->n_backends == b->n_backends && a->has_answers == b->has_answers
        && a->n_buffers == b->n_buffers && gh_same(a->resident, b->resident, a->answer_bytes, 1);
}

void gh_problem_free(gh_problem *p)
{
    free(p->memory);
    memset(p, 0, sizeof *p);
}

gh_plan *gh_plan_new(void)
{
    gh_plan *p = calloc(1, sizeof *p);
    if (p != NULL) {
        p->refs = 1;
    }
    return p;
}

void gh_plan_drop(gh_plan *p)
{
    if (p == NULL || --p->refs > 0) {
        return;
    }
    gh_api->plan_free(p->plan);
    if (!p->shares_graph) {
        gh_api->graph_free(p->graph);
    }
    free(p->name_at);
    free(p->names);
    free(p->deps.dep);
    gh_problem_free(&p->problem);
    free(p->hazards.hazard);
    free(p->role);
    free(p->op);
    free(p->viewer);
    free(p->node);
    free(p->input_of);
    free(p->order);
    free(p->pair);
    free(p->places.chunk);
    free(p->places.offset);
    free(p->need);
    free(p->split_at);
    free(p->read);
    free(p);
}

bool gh_plan_take_graph(gh_plan *p, const gh_reader *r)
{
    p->n = r->n;
    p->n_all = r->n_all;
    p->n_nodes = r->n_nodes;
    p->size = r->size;
    if (!gh_grow(&p->role, 1, r->n) || !gh_grow(&p->op, 1, r->n_all) || !gh_grow(&p->viewer, sizeof *p->viewer, r->n)
        || !gh_grow(&p->node, sizeof *p->node, r->n)
        || !gh_grow(&p->input_of, sizeof *p->input_of, r->n_all - r->n)) {
        return false;
    }
    p->n_viewers = 0;
    for (int32_t id = 0; id < r->n; id++) {
        p->role[id] = (unsigned char)r->item[id].role;
        p->op[id] = (unsigned char)r->item[id].op;
        p->node[id] = r->item[id].node;
        if (r->item[id].role == GH_ROLE_VIEW || r->item[id].role == GH_ROLE_ALIAS) {
            p->viewer[p->n_viewers++] = id;
        }
    }
    for (int32_t id = r->n; id < r->n_all; id++) {
        p->op[id] = (unsigned char)r->item[id].op;
        p->input_of[id - r->n] = r->item[id].root;
    }
    return true;
}

bool gh_plan_take_names(gh_plan *p, const gh_reader *r)
{
    enum { longest = 64 };  /* bytes of a name in ggml, with its zero byte */
    int32_t n = 0;
    if (!gh_grow(&p->name_at, sizeof *p->name_at, (int64_t)r->n + 1)) {
        return false;
    }
    for (int32_t id = 0; id < r->n; id++) {
        p->name_at[id] = n;
        n += (int32_t)strnlen(r->item[id].tensor->name, longest - 1) + 1;
    }
    p->name_at[r->n] = n;
    if (!gh_grow(&p->names, 1, n)) {
        return false;
    }
    for (int32_t id = 0; id < r->n; id++) {
        const int32_t at = p->name_at[id], last = p->name_at[id + 1] - 1;
        memcpy(p->names + at, r->item[id].tensor->name, (size_t)(last - at));
        p->names[last] = 0;
    }
    return true;
}

void gh_plan_entry_clear(gh_plan_entry *e)
{
    gh_plan_drop(e->plan);
    e->plan = NULL;
    e->used = 0;
    e->is_pinned = e->reuses = e->is_compact = false;
    gh_signature_clear(&e->signature);
    e->demand.n = 0;
}

void gh_plan_entry_free(gh_plan_entry *e)
{
    if (e == NULL) {
        return;
    }
    gh_plan_entry_clear(e);
    gh_signature_free(&e->signature);
    free(e->compact);
    free(e->demand.value);
    free(e->copies[0].copy);
    free(e->copies[1].copy);
    free(e);
}

int32_t gh_entry_id(const gh_plan_entry *e, const gx_tensor *tensor)
{
    for (int32_t id = 0; id < e->plan->n; id++) {
        if (gh_entry_tensor(e, id) == tensor) {
            return id;
        }
    }
    return -1;
}

gx_tensor *gh_shape_of(const gh_plan_entry *e, int32_t id)
{
    const int32_t like = gh_layout_id(e->plan, id);
    return like >= 0 ? gh_entry_tensor(e, like) : NULL;
}

void gh_collect_sizes(const gh_plan_cache *c, const gh_plan_entry *e, gh_problem *q)
{
    const gh_plan *p = e->plan;
    const bool is_scheduler = c->key.is_scheduler;
    for (int32_t id = 0; id < p->n_all; id++) {
        const gx_tensor *t = gh_shape_of(e, id);
        const int role = id < p->n ? p->role[id] : GH_ROLE_PLACED;
        const bool is_empty = t == NULL || role == GH_ROLE_ALIAS;
        const int64_t own = is_empty ? 0 : gh_entry_descriptor(e, gh_layout_id(p, id))->nbytes;
        /* With one backend only tensors that the plan places take memory.  With several a scheduler may copy any
         * tensor, and the copy takes memory. */
        const bool may_take = !is_empty && (role == GH_ROLE_PLACED || (is_scheduler && c->n_backends > 1));
        int64_t size = own;
        for (int b = 0; b < c->n_backends; b++) {
            if (may_take && (is_scheduler || q->assigned[id] == b)) {
                if (!is_scheduler || b == 0 || c->key.type[b].buft != c->key.type[b - 1].buft) {
                    size = gh_alloc_size(c->lib, c->key.type[b].buft, t, own);
                }
                q->some_larger |= size > own;
            } else {
                size = own;
            }
            q->nbytes[(int64_t)b * p->n_all + id] = size;
        }
    }
}
