/* ggml_sched/llama_cpp/hook/plan_reuse.c -- whether a plan serves another graph of its wiring.  See plan_cache.h.
 *
 * A plan serves another graph if every tensor fits in the bytes planned for it, views lie inside their roots, a node
 * that is computed in place of a source still has that source's shape, and no fused kernel overwrites what it reads
 * (fusion.h).
 */
#include "plan_cache.h"

/* Whether a problem has the assignments that the plan was made for.  A tensor that had none then may be assigned to the
 * backend that the planner chose.  The plan of a reordered graph passes: it was made with every tensor assigned. */
static bool has_assignments(const gh_plan *plan, const gh_problem *problem)
{
    for (int32_t id = 0; id < problem->n && plan->order == NULL; id++) {
        const int32_t planned = plan->problem.assigned[id];
        if (problem->assigned[id] != (planned < 0 && problem->assigned[id] >= 0 ? plan->view.assign[id] : planned)) {
            return false;
        }
    }
    return true;
}

/* Whether every tensor of a problem fits in the bytes that were planned for it. */
static bool has_bytes(const gh_plan *plan, const gh_problem *problem)
{
    const gs_plan *v = &plan->view;
    for (int32_t id = 0; id < v->n; id++) {
        const int32_t like = v->like[id], arena = v->arena_of[id];
        /* Views take no memory of their own. */
        if (id < plan->n && (plan->role[id] != GH_ROLE_PLACED || plan->arrays.view_src[id] >= 0)) {
            continue;
        }
        if (arena >= 0 ? problem->nbytes[(int64_t)arena * problem->n + like] > v->size[id]
                      : problem->nbytes[like] > 0 && plan->problem.nbytes[like] == 0) {
            return false;
        }
    }
    return true;
}

bool gh_plan_has_room(const gh_plan *plan, const gh_problem *problem)
{
    return gh_problem_same_answers(&plan->problem, problem) && has_assignments(plan, problem)
        && has_bytes(plan, problem);
}

/* Whether e's plan, made for other assignments than the problem's, chooses the same backends as a cached plan that was
 * made for the problem's.  llama.cpp assigns norms in small batches alone, to the backend that the planner chooses
 * anyway: the larger of two such plans serves both. */
static bool is_placed_like_another(const gh_plan_cache *c, const gh_plan_entry *e, const gh_problem *problem)
{
    const gh_plan *plan = e->plan;
    for (int i = 0; i < c->n_entries; i++) {
        const gh_plan *other = c->entry[i]->plan;
        if (!c->entry[i]->reuses && other != plan && other->order == NULL && other->view.n == plan->view.n
            && gh_signature_same_wiring(&e->signature, &c->entry[i]->signature)
            && gh_problem_same_answers(&other->problem, problem) && has_assignments(other, problem)
            && gh_same(other->view.assign, plan->view.assign, plan->view.n, sizeof *plan->view.assign)) {
            return true;
        }
    }
    return false;
}

/* Whether nbytes at an offset lie inside of `room` bytes. */
static bool is_inside(int64_t nbytes, uint64_t offset, int64_t room)
{
    return nbytes <= room && offset <= (uint64_t)(room - nbytes);
}

/* Whether no extent, stride or size is negative, and views lie inside their roots. */
static bool has_valid_views(const gh_plan *plan, const gh_signature *s)
{
    for (int32_t id = 0; id < s->n; id++) {
        const gh_descriptor *d = gh_descriptor_at(s, id);
        const int32_t root = plan->arrays.view_src[id];
        int64_t signs = d->nbytes;
        for (int i = 0; i < 8; i++) {
            signs |= d->shape[i];
        }
        if (signs < 0 || (root >= 0 && d->nbytes > 0
                          && !is_inside(d->nbytes, d->view_offs,
                                        gh_descriptor_at(s, gh_layout_id(plan, root))->nbytes))) {
            return false;
        }
    }
    return true;
}

static bool has_same_shape(const gh_signature *s, int32_t a, int32_t b)
{
    return gh_same_shape(gh_descriptor_at(s, a), gh_descriptor_at(s, b));
}

/* Whether node `id`, which the plan computes in place of a source, may be computed so in a graph with the signature s:
 * there the source has the node's shape and, if it is a view, the planned offset in its root. */
static bool can_stay_in_place(const gh_plan *plan, const gh_signature *s, int32_t id)
{
    const gs_plan *v = &plan->view;
    const int32_t root = v->root[id];
    for (int32_t j = v->src_begin[id]; j < v->src_begin[id + 1]; j++) {
        const int32_t src = v->src[j], like = v->like[src];
        if (like < s->n && (src == root || v->root[src] == root) && v->offset[src] == v->offset[id]
            && has_same_shape(s, id, like)) {
            return src == root || plan->arrays.view_src[like] < 0
                || (int64_t)gh_descriptor_at(s, like)->view_offs == v->view_offs[src];
        }
    }
    return false;
}

/* -- fused kernels ------------------------------------------------------------------------------------------------- */

/* Whether two ids have the same type and shape in the graph with the signature s; s NULL: in the graph that was
 * planned. */
static bool same_shape(const gh_plan *plan, const gh_signature *s, int32_t a, int32_t b)
{
    return s != NULL ? has_same_shape(s, gh_layout_id(plan, a), gh_layout_id(plan, b))
                     : gh_same_layout(&plan->arrays.layout[a], &plan->arrays.layout[b]);
}

/* How many bytes of an id a kernel may access: at least those of its layout, because in a plan a view takes no
 * bytes. */
static int64_t bytes_read(const gh_plan *plan, const gh_signature *s, const int64_t *size, int32_t id)
{
    const int64_t own = s != NULL ? gh_descriptor_at(s, gh_layout_id(plan, id))->nbytes
                                  : plan->arrays.layout[id].nbytes;
    return size[id] > own ? size[id] : own;
}

int32_t gh_plan_find_hazard(const gh_plan *plan, const gh_signature *s, const gh_ggml *lib, const int64_t *offset,
                            const int64_t *size, int32_t from)
{
    for (int32_t i = from; i < plan->hazards.n; i++) {
        const gh_fusion_hazard *h = &plan->hazards.hazard[i];
        const uint32_t chunk = plan->places.chunk[h->source];
        const int64_t x = offset[h->source], y = offset[h->last];
        const bool overlap = chunk != GH_NO_CHUNK && chunk == plan->places.chunk[h->last]
                          && x < y + bytes_read(plan, s, size, h->last) && y < x + bytes_read(plan, s, size, h->source);
        /* The overlap does no harm if source and result are exactly the same bytes and `first` may be computed in
         * place: the kernel then reads each element before it writes the element. */
        if (overlap && same_shape(plan, s, h->first, h->mid) && same_shape(plan, s, h->mid, h->last)
            && !(x == y && lib->inplace[plan->op[h->first]] != 0
                 && same_shape(plan, s, h->source, h->last))) {
            return i;
        }
    }
    return -1;
}

/* -- compact offsets ----------------------------------------------------------------------------------------------- */

/* Fill size[id]: the bytes that each id takes of its arena in the smaller graph, a multiple of the alignment. */
static void take_sizes(const gh_plan_cache *c, const gh_plan *plan, const gh_problem *problem, int64_t *size)
{
    const gs_plan *v = &plan->view;
    gh_copy(size, v->size, v->n, sizeof *size);
    for (int32_t id = 0; id < plan->n; id++) {
        const int32_t arena = v->arena_of[id];
        if (arena >= 0 && plan->role[id] == GH_ROLE_PLACED && plan->arrays.view_src[id] < 0) {
            const int64_t alignment = c->key.type[arena].alignment > 0 ? (int64_t)c->key.type[arena].alignment : 1;
            size[id] = (problem->nbytes[(int64_t)arena * problem->n + id] + alignment - 1) / alignment * alignment;
        }
    }
}

/* Fill e->compact with offsets at the low end of the buffers, so that a small graph touches few pages of memory.
 * `in_order`: tensors keep the order of the plan's offsets.  False: some fused kernel would overwrite what it reads, or
 * only the plan's own offsets are possible, or there is no memory. */
static bool make_compact(const gh_plan_cache *c, const gh_plan *plan, gh_plan_entry *e, const int64_t *size,
                         bool in_order)
{
    const gs_plan *v = &plan->view;
    if (plan->is_repacked || c->key.overlaps || !gh_grow(&e->compact, sizeof *e->compact, v->n)
        || gh_api->plan_compact(plan->plan, size, in_order, e->compact) != GS_OK) {
        return false;
    }
    for (int32_t id = 0; id < v->n; id++) {
        if (v->arena_of[id] < 0 || e->compact[id] < 0) {
            e->compact[id] = plan->places.offset[id];
        } else if (v->arena[v->arena_of[id]].stride > 0) {
            e->compact[id] %= v->arena[v->arena_of[id]].stride;
        }
    }
    return gh_plan_find_hazard(plan, &e->signature, c->lib, e->compact, size, 0) < 0;
}

/* Choose the offsets of e's tensors: compact ones, else the plan's.  False: with both some fused kernel would overwrite
 * what it reads, or there is no memory. */
static bool choose_offsets(const gh_plan_cache *c, const gh_plan *plan, gh_plan_entry *e, const gh_problem *problem)
{
    int64_t *size = malloc((size_t)plan->view.n * sizeof *size + 1);
    bool serves = size != NULL;
    if (serves) {
        take_sizes(c, plan, problem, size);
        e->is_compact = make_compact(c, plan, e, size, false) || make_compact(c, plan, e, size, true);
        serves = e->is_compact || gh_plan_find_hazard(plan, &e->signature, c->lib, plan->places.offset,
                                                      plan->view.size, 0) < 0;
    }
    free(size);
    return serves;
}

bool gh_plan_serves(const gh_plan_cache *c, gh_plan_entry *e, const gh_problem *problem)
{
    const gh_plan *plan = e->plan;
    const gh_signature *s = &e->signature;
    if (s->n != plan->n || plan->view.n_groups != 0 || !gh_problem_same_answers(&plan->problem, problem)
        || !has_bytes(plan, problem) || !has_valid_views(plan, s)
        || (!has_assignments(plan, problem) && !is_placed_like_another(c, e, problem))) {
        return false;
    }
    for (int32_t id = 0; id < s->n; id++) {
        if (plan->view.state[id] & GS_STATE_INPLACE && !can_stay_in_place(plan, s, id)) {
            return false;
        }
    }
    return choose_offsets(c, plan, e, problem);
}
