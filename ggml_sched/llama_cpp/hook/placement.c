/* ggml_sched/llama_cpp/hook/placement.c -- addresses for tensors.  See plan_cache.h. */
#include "plan_cache.h"

bool gh_find_address(const gh_plan_cache *c, const gh_plan_entry *e, int32_t id, void **buffer, void **data)
{
    const gh_location *at = &gh_entry_layout((gh_plan_entry *)e)->location[id];
    const gh_chunk *chunk;
    if (at->pool < 0 || at->chunk >= c->pool[at->pool].n_chunks) {
        return false;
    }
    chunk = &c->pool[at->pool].chunk[at->chunk];
    *buffer = chunk->buffer;
    *data = chunk->base + at->offset;
    return true;
}

bool gh_resolve(const gh_plan_cache *c, gh_plan_entry *e)
{
    gh_layout *layout = gh_entry_layout(e);
    for (int32_t i = 0; i < e->plan->n_slots && layout->generation != c->generation; i++) {
        gh_slot *slot = &layout->slot[i];
        if (!gh_find_address(c, e, slot->id, &slot->buffer, &slot->data)) {
            return false;
        }
    }
    layout->generation = c->generation;
    return true;
}

void gh_place_tensors(const gh_plan_cache *c, const gh_plan_entry *e, bool placed)
{
    const gh_plan *p = e->plan;
    for (int pool = 0; pool < c->n_pools; pool++) {
        gh_arena_reset(&c->pool[pool], c->lib);
    }
    for (int32_t i = 0; i < p->n_slots && (!placed || gh_arenas_have_init_tensor(c->pool, c->n_pools, c->lib)); i++) {
        const gh_slot *slot = &gh_entry_layout((gh_plan_entry *)e)->slot[i];
        gx_tensor *t = gh_entry_tensor(e, slot->id);
        t->buffer = slot->buffer;
        t->data = slot->data;
        gh_init_tensor(c->lib, slot->buffer, t);
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
