/* ggml_sched/llama_cpp/hook/placement.c -- addresses for tensors.  See plan_cache.h. */
#include "plan_cache.h"

void gh_place_tensors(const gh_plan_cache *c, const gh_plan_entry *e, bool placed)
{
    const gh_plan *p = e->plan;
    for (int pool = 0; pool < c->n_pools; pool++) {
        gh_arena_reset(&c->pool[pool], c->lib);
    }
    for (int32_t i = 0; i < p->n_slots && (!placed || gh_arenas_have_init_tensor(c->pool, c->n_pools, c->lib)); i++) {
        const gh_slot *slot = &gh_entry_slots(e)[i];
        gx_tensor *t = gh_entry_tensor(e, slot->id);
        gh_place(t, slot, gh_chunk_at(c->pool, slot->chunk));
        gh_init_tensor(c->lib, t->buffer, t);
    }
    for (int32_t i = 0; i < p->n_viewers; i++) {
        gx_tensor *t = gh_entry_tensor(e, p->viewer[i]), *root = t->view_src;
        /* A view of memory without a buffer has none either. */
        if (t->buffer == NULL && root->buffer != NULL) {
            t->buffer = root->buffer;
            t->data = (char *)root->data + t->view_offs;
            gh_init_tensor(c->lib, t->buffer, t);
        }
    }
}
