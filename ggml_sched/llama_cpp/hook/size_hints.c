/* ggml_sched/llama_cpp/hook/size_hints.c -- the sizes for which a new plan makes room.  See plan_cache.h.
 *
 * A client reserves the largest graphs of some wirings.  Graphs of other wirings it only allocates, perhaps a small one
 * first: batches of embeddings, for example.  Most nodes of such a graph are also in a reserved graph, and are planned
 * with their sizes there, so that larger batches of the same wiring need no further plan.  A graph that is larger than
 * the cached ones of its wiring is planned for the largest sizes of them all, whatever backends the client assigned.
 */
#include "plan_cache.h"

/* Raise the bytes of an id on backend b to `most`, if they are fewer; returns whether they were. */
static bool raise_to(gh_problem *p, const gs_graph_arrays *arrays, int b, int32_t id, int64_t most)
{
    int64_t *nbytes = &p->nbytes[(int64_t)b * p->n + id];
    const bool raised = most > *nbytes;
    *nbytes = raised ? most : *nbytes;
    p->some_larger |= *nbytes > arrays->layout[id].nbytes;
    return raised;
}

static void raise_size(gh_problem *p, const gs_graph_arrays *arrays, int32_t id, const gh_problem *from, int32_t other)
{
    for (int b = 0; b < p->n_backends; b++) {
        raise_to(p, arrays, b, id, from->nbytes[(int64_t)b * from->n + other]);
    }
}

/* Whether a tensor of one graph may correspond to a tensor of another graph: both have the same op, type and role. */
static bool resemble(const gh_plan_entry *e, int32_t id, const gh_plan_entry *other, int32_t other_id)
{
    const gh_descriptor *a = gh_descriptor_at(&e->signature, id), *b = gh_descriptor_at(&other->signature, other_id);
    return a->op == b->op && a->type == b->type && e->plan->role[id] == other->plan->role[other_id];
}

/* Raise the sizes of e's inputs to those of the other graph's tensors of the same name.  The latter need not be inputs:
 * what one graph computes, such as the embeddings of tokens, may be an input of the other. */
static void raise_inputs(gh_plan_entry *e, const gh_plan_entry *other)
{
    for (int32_t i = 0; i < e->signature.n_leafs; i++) {
        const int32_t id = gh_listed_id(&e->signature, i);
        const gx_tensor *input = e->signature.tensor[id];
        for (int32_t k = 0; e->plan->role[id] == GH_ROLE_PLACED && input->name[0] != 0 && k < other->plan->n; k++) {
            if (other->plan->role[k] == GH_ROLE_PLACED && gh_descriptor_at(&other->signature, k)->type == input->type
                && strcmp(gh_plan_name(other->plan, k), input->name) == 0) {
                raise_size(&e->plan->problem, &e->plan->arrays, id, &other->plan->problem, k);
            }
        }
    }
}

/* The id of the node at a position of the client's graph. */
static int32_t node_id(const gh_plan_entry *e, int32_t position)
{
    return gh_listed_id(&e->signature, e->signature.n_leafs + position);
}

/* Two graphs are similar if the nodes at their starts and at their ends that resemble each other pairwise are at least
 * half of e's nodes.  Then raise the sizes of these nodes of e, and of e's inputs, to those in the other graph. */
static void raise_nodes(gh_plan_entry *e, const gh_plan_entry *other)
{
    const int32_t n = e->signature.n_nodes, m = other->signature.n_nodes, most = n < m ? n : m;
    int32_t begin = 0, end = 0;
    while (begin < most && resemble(e, node_id(e, begin), other, node_id(other, begin))) {
        begin++;
    }
    while (end < most - begin && resemble(e, node_id(e, n - 1 - end), other, node_id(other, m - 1 - end))) {
        end++;
    }
    for (int32_t i = 0; begin + end >= n / 2 && i < begin + end; i++) {
        const int32_t id = node_id(e, i < begin ? i : n - (begin + end - i));
        const int32_t other_id = node_id(other, i < begin ? i : m - (begin + end - i));
        if (e->plan->role[id] == GH_ROLE_PLACED) {
            raise_size(&e->plan->problem, &e->plan->arrays, id, &other->plan->problem, other_id);
        }
    }
    if (begin + end >= n / 2) {
        raise_inputs(e, other);
    }
}

/* The id of the original if `id` is a copy that ggml's scheduler has made (level alloc); else `id`.  Such a copy is a
 * node without sources, and a view of its original is listed just before it. */
static int32_t original_of(const gh_plan_entry *e, int32_t id)
{
    const gh_signature_item *item = e->signature.wiring->item;
    const int32_t before = id < e->plan->n && e->plan->node[id] > 0 ? node_id(e, e->plan->node[id] - 1) : -1;
    const bool is_copy = before >= 0 && e->plan->role[id] == GH_ROLE_PLACED && item[id].link[0] < 0
                      && e->plan->role[before] == GH_ROLE_ALIAS && item[before].link[0] >= 0;
    return is_copy ? item[before].link[0] : id;
}

/* The most rows that a node may gather (GET_ROWS) in graphs of its wiring, where `numbers`, its tensor of row numbers,
 * is a view of an input; -1: `numbers` is no such view.  Each graph divides the input's numbers anew among several
 * views: those of the batch's sequences, and those of other sequences whose states move.  So the view may have all
 * numbers of the input, or one less if it does not begin with the first number, which then belongs to another view. */
static int64_t most_rows(const gh_plan_entry *e, int b, int32_t numbers)
{
    const int32_t view = original_of(e, numbers);
    const int32_t input = view < e->plan->n ? e->plan->arrays.view_src[view] : -1;
    if (input < 0 || input >= e->plan->n || e->plan->role[input] != GH_ROLE_PLACED
        || e->plan->op[input] != GS_OP_NONE) {
        return -1;
    }
    return e->plan->problem.nbytes[(int64_t)b * e->plan->problem.n + input] / (int64_t)sizeof(int32_t)
        - (gh_descriptor_at(&e->signature, view)->view_offs > 0);
}

/* The bytes of the tensor of row numbers are raised, too: a view takes no memory, but its copy on another backend
 * does. */
bool gh_size_hints_raise_rows(gh_plan_entry *e)
{
    const gs_graph_arrays *arrays = &e->plan->arrays;
    bool raised = false;
    for (int32_t id = 0; e->signature.plain && id < e->plan->n; id++) {
        const int32_t begin = arrays->src_begin[id];
        if (e->plan->op[id] != GS_OP_GET_ROWS || arrays->src_begin[id + 1] - begin != 2) {
            continue;
        }
        for (int b = 0; b < e->plan->problem.n_backends; b++) {
            const int32_t numbers = arrays->src[begin + 1];
            const int64_t n_rows = most_rows(e, b, numbers);
            int64_t nbytes;
            if (n_rows > 0 && !__builtin_mul_overflow(n_rows, arrays->layout[id].nb[1], &nbytes)) {
                raised |= raise_to(&e->plan->problem, arrays, b, id, nbytes);
                raise_to(&e->plan->problem, arrays, b, numbers, n_rows * (int64_t)sizeof(int32_t));
            }
        }
    }
    return raised;
}

void gh_size_hints_raise(const gh_plan_cache *c, gh_plan_entry *e)
{
    for (int i = 0; i < c->n_entries; i++) {
        const gh_plan_entry *other = c->entry[i];
        if (other->reuses || other->plan->order != NULL || other->used <= c->born || !e->signature.plain
            || !other->signature.plain) {
            continue;
        }
        if (!gh_signature_same_wiring(&e->signature, &other->signature)) {
            raise_nodes(e, other);
        } else {
            const int32_t n = e->plan->n_all < other->plan->n_all ? e->plan->n_all : other->plan->n_all;
            for (int32_t id = 0; id < n; id++) {
                raise_size(&e->plan->problem, &e->plan->arrays, id, &other->plan->problem, id);
            }
        }
    }
    gh_size_hints_raise_rows(e);
}
