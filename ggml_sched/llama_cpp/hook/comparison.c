/* ggml_sched/llama_cpp/hook/comparison.c -- the bytes that ggml's own allocator would hold for what was reserved.
 *
 * Comparing takes as long as reserving with ggml's own allocator, so it is off unless the user turns it on.
 */
#include "plan_cache.h"

static atomic_bool compares;

void gh_set_compares(bool on)
{
    atomic_store(&compares, on);
}

/* The buffer ids of an allocator's nodes and leafs, as ggml's own allocator takes them.  NULL without memory. */
static int *ids_of(const gh_demand *demand)
{
    const signed char *arena = demand->value;
    int *ids = malloc(((size_t)demand->n + 1) * sizeof *ids);
    for (int32_t i = 0; ids != NULL && i < demand->n; i++) {
        ids[i] = (int)arena[i];
    }
    return ids;
}

void gh_compare(gh_plan_cache *c, const gh_plan_entry *e, void *graph)
{
    const gh_ggml *lib = c->lib;
    size_t nbytes[GH_MAX_BACKENDS];
    void *buft[GH_MAX_BACKENDS];
    int *ids = NULL;
    /* With several backends ggml's scheduler would make other splits and copies than ours: then nothing is measured. */
    if (!atomic_load(&compares) || lib->gallocr_reserve_n_size == NULL || (c->key.is_scheduler && c->n_backends > 1)) {
        return;
    }
    for (int b = 0; b < c->n_backends; b++) {
        buft[b] = c->key.type[b].buft;
    }
    if (c->stock == NULL) {
        c->stock = lib->gallocr_new_n(buft, c->n_backends);
    }
    if (c->n_backends > 1) {
        ids = ids_of(&e->demand);
    }
    if (c->stock != NULL && (c->n_backends == 1 || ids != NULL)) {
        lib->gallocr_reserve_n_size(c->stock, graph, ids, ids != NULL ? ids + e->signature.n_nodes : NULL, nbytes);
        for (int pool = 0; pool < c->n_pools; pool++) {
            const size_t now = nbytes[c->first_of[pool]];
            c->stock_nbytes[pool] = now > c->stock_nbytes[pool] ? now : c->stock_nbytes[pool];
        }
    }
    free(ids);
}

void gh_compare_end(gh_plan_cache *c)
{
    if (c->stock != NULL) {
        c->lib->gallocr_free(c->stock);
    }
    c->stock = NULL;
    memset(c->stock_nbytes, 0, sizeof c->stock_nbytes);
}
