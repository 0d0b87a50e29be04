/* ggml_sched/llama_cpp/sched/listed.c -- the schedulers of the process, so that plans() finds them.
 *
 * Who looks at a scheduler holds it: its plans do not change meanwhile, and it is not freed.  Computing goes on.
 */
#include "listed.h"

#include <stdio.h>

static struct {
    pthread_mutex_t lock;
    gh_sched *first;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

void gh_list(gh_sched *s)
{
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_lock(&all.lock);
    s->next = all.first;
    all.first = s;
    pthread_mutex_unlock(&all.lock);
}

void gh_unlist(gh_sched *s)
{
    pthread_mutex_lock(&all.lock);
    for (gh_sched **at = &all.first; *at != NULL; at = &(*at)->next) {
        if (*at == s) {
            *at = s->next;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
    /* Whoever has found it before is done once it can be locked. */
    pthread_mutex_lock(&s->lock);
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_destroy(&s->lock);
}

gh_sched *gh_hold(int i, int *n_schedulers)
{
    gh_sched *found = NULL;
    int n = 0;
    pthread_mutex_lock(&all.lock);
    for (gh_sched *s = all.first; s != NULL; s = s->next) {
        n++;
    }
    *n_schedulers = n;
    for (gh_sched *s = all.first; s != NULL; s = s->next) {
        /* The newest comes first in the list. */
        if (--n == i) {
            found = s;
            pthread_mutex_lock(&s->lock);
        }
    }
    pthread_mutex_unlock(&all.lock);
    return found;
}

void gh_release(gh_sched *s)
{
    pthread_mutex_unlock(&s->lock);
}

const gh_prepared *gh_show(const gh_sched *s, gh_known *shown, gh_arena_facts *facts)
{
    const gh_prepared *p = NULL;
    for (int i = 0; i < GH_N_PREPARED; i++) {
        if (s->prepared[i].plan != NULL && s->prepared[i].used > s->born
            && (p == NULL || s->prepared[i].used > p->used)) {
            p = &s->prepared[i];
        }
    }
    if (p == NULL) {
        return NULL;
    }
    memset(shown, 0, sizeof *shown);
    shown->n_arenas = s->n_backends;
    shown->arrays = p->arrays;
    shown->view = p->view;
    shown->keeps = p->keeps;
    shown->resident = p->resident;
    shown->nbytes = p->nbytes;
    shown->some_larger = p->some_larger;
    shown->names = p->names;
    shown->size = p->reading.size;
    for (int b = 0; b < s->n_backends; b++) {
        snprintf(facts[b].name, sizeof facts[b].name, "%s", s->rt->backend_name(s->backend[b]));
        facts[b].alignment = s->info[b].alignment;
        facts[b].max_size = s->info[b].max_buffer;
        facts[b].nbytes = s->first_of[s->pool_of[b]] == b
                              ? (int64_t)gh_arena_nbytes(&s->pool[s->pool_of[b]], s->lib) : 0;
        facts[b].inplace = s->info[b].inplace;
    }
    return p;
}
