/* ggml_sched/llama_cpp/looks.c -- whether a graph is one that was planned: the quick way.  See scheduler.h.
 *
 * The same tensors that look the same, byte for byte in all that a plan or a backend's answer depends on: nothing is
 * read, asked or planned then.  A graph that differs in its wiring alone looks otherwise.
 */
#include "differ.h"
#include "scheduler.h"

#include <stddef.h>
#include <string.h>

/* -- looks --------------------------------------------------------------------------------------------------------- */

_Static_assert(offsetof(gx_tensor, nb) == offsetof(gx_tensor, ne) + 32, "ne and nb are one run of 64 bytes");
_Static_assert(offsetof(gx_tensor, view_offs) == offsetof(gx_tensor, src) + 88, "sources and root are one of 96");

/* Tensors from one that is compared to one that is fetched. */
#define GH_AHEAD 8

static void take_look(gh_look *look, const gx_tensor *t)
{
    look->tensor = t;
    memcpy(look->shape, t->ne, sizeof look->shape);
    memcpy(look->params, t->op_params, sizeof look->params);
    memcpy(look->links, t->src, sizeof look->links);
    /* Views get their root's memory; whether they have it yet changes nothing. */
    look->buffer = t->view_src == NULL ? t->buffer : NULL;
    look->has_data = t->view_src == NULL && t->data != NULL;
    look->type = t->type;
    look->op = t->op;
    look->flags = t->flags;
}

static inline bool looks_so(const gh_look *look)
{
    const gx_tensor *t = look->tensor;
    const gh_pair found = gh_differing(look->shape, t->ne, 4) | gh_differing(look->links, t->src, 6)
                        | gh_differing(look->params, t->op_params, 4);
    const int32_t differs = (look->type ^ t->type) | (look->op ^ t->op) | (look->flags ^ t->flags);
    return ((uint64_t)(uint32_t)differs | found[0] | found[1]) == 0
        && (t->view_src != NULL || (look->buffer == t->buffer && look->has_data == (t->data != NULL)));
}

bool gh_looks_like(const gh_sched *s, const gh_prepared *p, void *graph)
{
    const gh_choices *c = &s->choices;
    if (s->lib->graph_n_nodes(graph) != p->n_given || gh_graph_n_leafs(s->lib, graph) != p->n_leafs
        || c->n != p->n_chosen || !gh_same(c->tensor, p->chosen, c->n, sizeof *c->tensor)
        || !gh_same(c->backend, p->chosen_backend, c->n, sizeof *c->backend)
        || !gh_same(s->lib->graph_nodes(graph), p->given, p->n_given, sizeof *p->given)
        || !gh_same(gh_graph_leafs(s->lib, graph), p->leafs, p->n_leafs, sizeof *p->leafs)) {
        return false;
    }
    /* What the graph does not list is named by the sources of what it does, and comes after it. */
    for (int32_t i = 0; i < p->reading.n; i++) {
        gh_prefetch(p->look[i + GH_AHEAD < p->reading.n ? i + GH_AHEAD : i].tensor);
        if (!looks_so(&p->look[i])) {
            return false;
        }
    }
    return true;
}

/* What a graph looks like that was just read, in the order in which it came. */
bool gh_take_looks(gh_sched *s, gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    const int32_t listed = r->n_nodes > r->n_leafs ? r->n_nodes : r->n_leafs;
    if (listed > p->room_listed) {
        const int32_t room = listed + listed / 4;
        if (!gh_grow(&p->given, sizeof *p->given, room) || !gh_grow(&p->ordered, sizeof *p->ordered, room)
            || !gh_grow(&p->leafs, sizeof *p->leafs, room)) {
            return false;
        }
        p->room_listed = room;
    }
    if (s->choices.n > p->room_chosen) {
        if (!gh_grow(&p->chosen, sizeof *p->chosen, s->choices.n)
            || !gh_grow(&p->chosen_backend, sizeof *p->chosen_backend, s->choices.n)) {
            return false;
        }
        p->room_chosen = s->choices.n;
    }
    p->n_chosen = s->choices.n;
    if (p->n_chosen > 0) {
        memcpy(p->chosen, s->choices.tensor, (size_t)p->n_chosen * sizeof *p->chosen);
        memcpy(p->chosen_backend, s->choices.backend, (size_t)p->n_chosen * sizeof *p->chosen_backend);
    }
    p->n_given = r->n_nodes;
    p->n_leafs = r->n_leafs;
    if (p->n_given > 0) {
        memcpy(p->given, r->nodes, (size_t)p->n_given * sizeof *p->given);
        memcpy(p->ordered, r->nodes, (size_t)p->n_given * sizeof *p->ordered);
    }
    if (p->n_leafs > 0) {
        memcpy(p->leafs, r->leafs, (size_t)p->n_leafs * sizeof *p->leafs);
    }
    for (int32_t i = 0; i < r->n; i++) {
        take_look(&p->look[i], r->item[i].tensor);
    }
    return true;
}

