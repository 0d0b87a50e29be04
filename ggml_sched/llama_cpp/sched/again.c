/* ggml_sched/llama_cpp/sched/again.c -- graphs that come again: the same tensors, or others that look the same.
 *
 * A client builds the same graph at other addresses for its next batch, and for its next context: the plan stays, and
 * its ids stand for the other tensors from then on.  See scheduler.h.
 */
#include "scheduler.h"

#include <string.h>

/* Whether a graph is one that was planned, with the same choices. */
bool gh_looks_like(const gh_sched *s, const gh_prepared *p, void *graph)
{
    const gh_choices *c = &s->choices;
    return c->n == p->n_chosen && gh_same(c->tensor, p->chosen, c->n, sizeof *c->tensor)
        && gh_same(c->backend, p->chosen_backend, c->n, sizeof *c->backend) && gh_looks_match(&p->looks, graph);
}

/* What a graph looks like that was just read, in the order in which it came. */
bool gh_take_looks(gh_sched *s, gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    if (r->n_nodes > p->room_ordered) {
        if (!gh_grow(&p->ordered, sizeof *p->ordered, r->n_nodes + r->n_nodes / 4)) {
            return false;
        }
        p->room_ordered = r->n_nodes + r->n_nodes / 4;
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
    if (r->n_nodes > 0) {
        memcpy(p->ordered, r->nodes, (size_t)r->n_nodes * sizeof *p->ordered);
    }
    return gh_looks_take(&p->looks, &s->forms, r);
}

bool gh_is_asked_alike(gh_sched *s, const gh_prepared *p)
{
    gs_error error = {0};
    bool alike;
    if (p->used > s->born) {
        return true;
    }
    s->asked.reading = p->reading;
    s->asked.arrays = p->arrays;
    alike = gh_ask(s, &s->asked, &s->choices, &error) == GS_OK && gh_same_problem(s, p, &s->asked);
    memset(&s->asked.reading, 0, sizeof s->asked.reading);
    return alike;
}

bool gh_may_serve(const gh_sched *s, const gh_prepared *p)
{
    return p->plan != NULL && (!p->replayed || gh_pools_fit(s, p));
}

/* Whether the client chose the same backends for the tensors of a graph as for those of the same id in another. */
static bool chose_the_same(const gh_sched *s, const gh_prepared *p, gx_tensor *const *now)
{
    const gh_choices *c = &s->choices;
    if (c->n != p->n_chosen || !gh_same(c->backend, p->chosen_backend, c->n, sizeof *c->backend)) {
        return false;
    }
    for (int32_t i = 0; i < c->n; i++) {
        const int32_t id = gh_reading_id(&p->reading, p->chosen[i]);
        if (id >= 0 && now[id] != c->tensor[i]) {
            return false;
        }
        /* What was in no graph then is to be in none now. */
        for (int32_t k = 0; id < 0 && k < p->looks.n; k++) {
            if (now[k] == c->tensor[i]) {
                return false;
            }
        }
    }
    return true;
}

/* Let the ids of a plan stand for the tensors that it now looks like. */
static void become(gh_sched *s, gh_prepared *p, void *graph)
{
    gh_reading_move(&p->reading, p->looks.tensor, graph);
    if (p->n_chosen > 0) {
        memcpy(p->chosen, s->choices.tensor, (size_t)p->n_chosen * sizeof *p->chosen);
    }
    if (p->looks.n_nodes > 0) {
        memcpy(p->ordered, gh_looks_nodes(&p->looks), (size_t)p->looks.n_nodes * sizeof *p->ordered);
    }
    p->generation = 0;
}

gh_prepared *gh_find_elsewhere(gh_sched *s, void *graph)
{
    for (int i = 0; i < GH_N_PREPARED; i++) {
        gh_prepared *p = &s->prepared[i];
        if (gh_may_serve(s, p) && gh_looks_match_before(&p->looks, graph)
            && chose_the_same(s, p, p->looks.before)) {
            gh_looks_return(&p->looks);
            become(s, p, graph);
            if (gh_is_asked_alike(s, p)) {
                gh_count_one(GH_COUNT_SAME);
                return p;
            }
        }
    }
    for (int i = 0; i < GH_N_PREPARED; i++) {
        gh_prepared *p = &s->prepared[i];
        if (!gh_may_serve(s, p) || !gh_looks_match_elsewhere(&p->looks, &s->elsewhere, graph)
            || !chose_the_same(s, p, s->elsewhere.tensor)) {
            continue;
        }
        gh_looks_move(&p->looks, &s->elsewhere);
        become(s, p, graph);
        if (gh_is_asked_alike(s, p)) {
            gh_count_one(GH_COUNT_EQUAL);
            return p;
        }
    }
    return NULL;
}
