/* ggml_sched/llama_cpp/hook/registry.c -- all plan caches of the process, and those that were released.
 *
 * A client opens contexts for one model again and again, and touching memory that is new to a process costs more time
 * than planning.  So a cache whose allocator or scheduler is freed keeps its entries, plans and working memory, without
 * buffers, for the next one with the same key.  Before an entry serves the new owner, devices and buffer types are
 * queried again.
 */
#include "plan_cache.h"

#define GH_N_RELEASED 2         /* most released caches of allocators; as many of schedulers */

static struct {
    pthread_mutex_t lock;
    gh_plan_cache *live;        /* with an owner; newest first        */
    gh_plan_cache *released;    /* without owner; last released first */
} caches = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void (*_Atomic watch)(gh_plan_cache *c);

void gh_watch_releases(void (*each)(gh_plan_cache *c))
{
    watch = each;
}

static void destroy(gh_plan_cache *c)
{
    for (int i = 0; i <= GH_N_ENTRIES; i++) {
        gh_plan_entry_free(c->entry[i]);
    }
    gh_descriptors_free(&c->descriptors);
    gh_reader_free(&c->reader);
    gh_signature_free(&c->moved);
    gh_problem_free(&c->problem);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* Make a pool for each buffer type of the key, which all backends of that type share; where computes may overlap, one
 * for each backend, because one backend may already write for the next compute while another still reads. */
static void make_pools(gh_plan_cache *c)
{
    c->n_pools = 0;
    for (int b = 0; b < c->n_backends; b++) {
        int pool = c->n_pools;
        for (int k = 0; k < c->n_pools && !c->key.overlaps; k++) {
            pool = c->pool[k].buft == c->key.type[b].buft ? k : pool;
        }
        c->pool_of[b] = pool;
        if (pool == c->n_pools) {
            c->first_of[pool] = b;
            c->pool[c->n_pools++] = c->key.type[b];
        }
    }
}

static gh_plan_cache *make(const gh_cache_key *key)
{
    gh_plan_cache *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return NULL;
    }
    pthread_mutex_init(&c->lock, NULL);
    memcpy(&c->key, key, sizeof *key);
    c->lib = key->lib;
    c->n_backends = key->n_backends;
    gh_api->policy_default(&c->policy);
    gh_descriptors_init(&c->descriptors, key->lib, key->is_scheduler);
    make_pools(c);
    return c;
}

gh_plan_cache *gh_plan_cache_acquire(const gh_cache_key *key, const gh_cache_level *level, void *owner)
{
    gh_plan_cache *found = NULL;
    pthread_mutex_lock(&caches.lock);
    for (gh_plan_cache **at = &caches.released; *at != NULL; at = &(*at)->next) {
        if (memcmp(&(*at)->key, key, sizeof *key) == 0) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&caches.lock);
    if (found == NULL) {
        found = make(key);
    }
    if (found != NULL) {
        found->level = level;
        found->owner = owner;
    }
    return found;
}

void gh_plan_cache_publish(gh_plan_cache *c)
{
    pthread_mutex_lock(&caches.lock);
    c->next = caches.live;
    caches.live = c;
    pthread_mutex_unlock(&caches.lock);
    gh_count_one(GH_COUNT_NEW);
}

void gh_plan_cache_release(gh_plan_cache *c)
{
    gh_plan_cache *dropped = NULL;
    int n[2] = {0, 0};
    pthread_mutex_lock(&caches.lock);
    for (gh_plan_cache **at = &caches.live; *at != NULL; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            break;
        }
    }
    pthread_mutex_unlock(&caches.lock);
    /* A thread that found the cache in the registry holds its lock: once this thread has locked it, no other uses the
     * cache. */
    pthread_mutex_lock(&c->lock);
    pthread_mutex_unlock(&c->lock);
    void (*const each)(gh_plan_cache *c) = watch;
    if (each != NULL) {
        each(c);
    }
    for (int pool = 0; pool < c->n_pools; pool++) {
        gh_arena_free(&c->pool[pool], c->lib);
    }
    gh_compare_end(c);
    c->born = c->clock;
    for (int i = 0; i < c->n_entries; i++) {
        c->entry[i]->is_pinned = false;
    }
    gh_plan_cache_compact(c);
    pthread_mutex_lock(&caches.lock);
    c->next = caches.released;
    caches.released = c;
    /* Drop the oldest cache beyond GH_N_RELEASED of its kind, allocator or scheduler. */
    for (gh_plan_cache **at = &caches.released; *at != NULL && dropped == NULL;) {
        if (++n[(*at)->key.is_scheduler] > GH_N_RELEASED) {
            dropped = *at;
            *at = dropped->next;
        } else {
            at = &(*at)->next;
        }
    }
    pthread_mutex_unlock(&caches.lock);
    if (dropped != NULL) {
        destroy(dropped);
    }
}

gh_plan_cache *gh_plan_cache_lock(int i, int *n)
{
    gh_plan_cache *found = NULL;
    int left;
    *n = 0;
    pthread_mutex_lock(&caches.lock);
    for (gh_plan_cache *c = caches.live; c != NULL; c = c->next) {
        ++*n;
    }
    left = *n;
    for (gh_plan_cache *c = caches.live; c != NULL; c = c->next) {
        if (--left == i) {
            found = c;
            pthread_mutex_lock(&c->lock);
        }
    }
    pthread_mutex_unlock(&caches.lock);
    return found;
}

void gh_plan_cache_unlock(gh_plan_cache *c)
{
    pthread_mutex_unlock(&c->lock);
}
