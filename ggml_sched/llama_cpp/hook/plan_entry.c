/* ggml_sched/llama_cpp/hook/plan_entry.c -- memory of cache entries and plans.  See plan_cache.h. */
#include "plan_cache.h"

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
    gh_api->graph_free(p->graph);
    gh_tensor_names_free(&p->names);
    free(p->deps.dep);
    gh_problem_free(&p->problem);
    free(p->hazards.hazard);
    free(p->role);
    free(p->viewer);
    free(p->node);
    free(p->input_of);
    free(p->location);
    free(p->slot);
    free(p->need);
    free(p->split_at);
    free(p);
}

bool gh_plan_take_graph(gh_plan *p, const gh_reader *r)
{
    p->n = r->n;
    p->n_all = r->n_all;
    p->n_nodes = r->n_nodes;
    p->size = r->size;
    if (!gh_grow(&p->role, 1, r->n) || !gh_grow(&p->viewer, sizeof *p->viewer, r->n)
        || !gh_grow(&p->node, sizeof *p->node, r->n)
        || !gh_grow(&p->input_of, sizeof *p->input_of, r->n_all - r->n)
        || !gh_grow(&p->slot, sizeof *p->slot, r->n)) {
        return false;
    }
    p->n_slots = p->n_viewers = 0;
    for (int32_t id = 0; id < r->n; id++) {
        p->role[id] = (unsigned char)r->item[id].role;
        p->node[id] = r->item[id].node;
        if (r->item[id].role == GH_ROLE_PLACED) {
            p->slot[p->n_slots++] = (gh_slot){.id = id};
        } else if (r->item[id].role != GH_ROLE_EXTERNAL) {
            p->viewer[p->n_viewers++] = id;
        }
    }
    for (int32_t id = r->n; id < r->n_all; id++) {
        p->input_of[id - r->n] = r->item[id].root;
    }
    return true;
}

gh_plan_entry *gh_plan_entry_new(void)
{
    return calloc(1, sizeof(gh_plan_entry));
}

void gh_plan_entry_clear(gh_plan_entry *e)
{
    gh_plan_drop(e->plan);
    e->plan = NULL;
    e->used = 0;
    e->is_pinned = e->reuses = e->is_compact = false;
    gh_signature_clear(&e->signature);
    e->n_deps = e->demand.n = 0;
    /* The copies stay: nodes of a graph that comes again may name them. */
    e->copies.n_nodes = e->copies.n_previous = 0;
    free(e->reordered);
    e->reordered = NULL;
}

void gh_plan_entry_free(gh_plan_entry *e)
{
    if (e == NULL) {
        return;
    }
    gh_plan_entry_clear(e);
    gh_signature_free(&e->signature);
    free(e->compact);
    free(e->demand.node);
    free(e->demand.leaf);
    free(e->demand.id);
    free(e->demand.backend);
    free(e->copies.tensor);
    free(e->copies.original);
    free(e->copies.previous);
    free(e->copies.nodes);
    free(e->copies.previous_nodes);
    free(e->copies.n_reads);
    free(e->order);
    free(e->dep);
    free(e);
}

gx_tensor *gh_entry_tensor(const gh_plan_entry *e, int32_t id)
{
    return e->reordered != NULL ? e->reordered[id] : e->signature.tensor[id];
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

gx_tensor *gh_shape_of(const gh_plan *p, const gh_plan_entry *e, int32_t id)
{
    if (id >= p->n) {
        id = p->input_of[id - p->n];
    }
    return id >= 0 ? gh_entry_tensor(e, id) : NULL;
}

bool gh_demand_copy(gh_demand *to, const gh_demand *from)
{
    const int32_t listed = from->n_nodes > from->n_leafs ? from->n_nodes : from->n_leafs;
    if (listed > to->room) {
        if (!gh_grow(&to->node, sizeof *to->node, listed) || !gh_grow(&to->leaf, sizeof *to->leaf, listed)) {
            return false;
        }
        to->room = listed;
    }
    if (from->n > to->room_tensors) {
        if (!gh_grow(&to->id, sizeof *to->id, from->n) || !gh_grow(&to->backend, sizeof *to->backend, from->n)) {
            return false;
        }
        to->room_tensors = from->n;
    }
    to->n_nodes = from->n_nodes;
    to->n_leafs = from->n_leafs;
    to->n = from->n;
    gh_copy(to->node, from->node, from->n_nodes, sizeof *to->node);
    gh_copy(to->leaf, from->leaf, from->n_leafs, sizeof *to->leaf);
    gh_copy(to->id, from->id, from->n, sizeof *to->id);
    gh_copy(to->backend, from->backend, from->n, sizeof *to->backend);
    return true;
}
