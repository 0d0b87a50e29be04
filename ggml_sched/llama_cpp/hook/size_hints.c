/* ggml_sched/llama_cpp/hook/size_hints.c -- the sizes for which a new plan makes room.  See plan_cache.h.
 *
 * A client reserves some wirings at their largest and meets others only later, at whatever size comes first: batches of
 * embeddings, for example.  Such a graph shares most of its nodes with a reserved one.  It is planned for the sizes of
 * those, so that larger batches of its wiring need no other plan.  A wiring that is known and has become larger is
 * planned for the largest sizes that were seen.
 */
#include "plan_cache.h"

static void raise_size(gh_problem *p, const gs_graph_arrays *arrays, int32_t id, const gh_problem *from, int32_t other)
{
    for (int b = 0; b < p->n_backends; b++) {
        int64_t *nbytes = &p->nbytes[(int64_t)b * p->n + id];
        const int64_t seen = from->nbytes[(int64_t)b * from->n + other];
        *nbytes = seen > *nbytes ? seen : *nbytes;
        p->some_larger |= *nbytes > arrays->layout[id].nbytes;
    }
}

/* Whether two nodes, or two inputs, may be the same tensor of two graphs. */
static bool resemble(const gh_plan_entry *e, int32_t id, const gh_plan_entry *other, int32_t other_id)
{
    const gh_descriptor *a = gh_descriptor_at(&e->signature, id), *b = gh_descriptor_at(&other->signature, other_id);
    return a->op == b->op && a->type == b->type && e->plan->role[id] == other->plan->role[other_id];
}

/* Raise the sizes of inputs to those of the other graph's tensors of the same name: what one graph computes, such as
 * the embeddings of tokens, may be an input of the other. */
static void raise_inputs(gh_plan_entry *e, const gh_plan_entry *other)
{
    for (int32_t id = 0; id < e->signature.n_leafs; id++) {
        const gx_tensor *input = e->signature.tensor[id];
        for (int32_t k = 0; e->plan->role[id] == GH_ROLE_PLACED && input->name[0] != 0 && k < other->plan->n; k++) {
            if (other->plan->role[k] == GH_ROLE_PLACED && gh_descriptor_at(&other->signature, k)->type == input->type
                && strcmp(gh_tensor_name(&other->plan->names, k), input->name) == 0) {
                raise_size(&e->plan->problem, &e->plan->arrays, id, &other->plan->problem, k);
            }
        }
    }
}

/* Raise the sizes of the nodes that two graphs begin with, and end with; of none if these are fewer than half. */
static void raise_nodes(gh_plan_entry *e, const gh_plan_entry *other)
{
    const int32_t n = e->signature.n_nodes, m = other->signature.n_nodes, most = n < m ? n : m;
    const int32_t first = e->signature.n_leafs, other_first = other->signature.n_leafs;
    int32_t begin = 0, end = 0;
    while (begin < most && resemble(e, first + begin, other, other_first + begin)) {
        begin++;
    }
    while (end < most - begin && resemble(e, first + n - 1 - end, other, other_first + m - 1 - end)) {
        end++;
    }
    for (int32_t i = 0; begin + end >= n / 2 && i < begin + end; i++) {
        const int32_t at = i < begin ? i : n - (begin + end - i), other_at = i < begin ? i : m - (begin + end - i);
        if (e->plan->role[first + at] == GH_ROLE_PLACED) {
            raise_size(&e->plan->problem, &e->plan->arrays, first + at, &other->plan->problem, other_first + other_at);
        }
    }
    if (begin + end >= n / 2) {
        raise_inputs(e, other);
    }
}

void gh_size_hints_raise(const gh_plan_cache *c, gh_plan_entry *e)
{
    for (int i = 0; i < c->n_entries; i++) {
        const gh_plan_entry *other = c->entry[i];
        if (other->reuses || other->plan->is_replayed || other->used <= c->born || !e->signature.plain
            || !other->signature.plain) {
            continue;
        }
        if (!gh_signature_same_wiring(&e->signature, &other->signature)) {
            raise_nodes(e, other);
        } else if (gh_problem_same(&e->plan->problem, &other->plan->problem)) {
            for (int32_t id = 0; id < e->plan->n_all; id++) {
                raise_size(&e->plan->problem, &e->plan->arrays, id, &other->plan->problem, id);
            }
        }
    }
}
