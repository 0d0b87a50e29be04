/* ggml_sched/llama_cpp/sched/shelves.c -- what is kept of a scheduler that is freed, for the next one.
 *
 * Contexts are opened again and again for one model: their graphs look the same, and memory that is new to a process
 * costs more than planning.  Graphs, plans and working memory are kept, without buffers, and handed to a scheduler for
 * the same devices and buffer types.  Before a plan serves there, its devices are asked again what they were asked.
 */
#include "scheduler.h"

#include <stdlib.h>
#include <string.h>

/* Schedulers whose graphs are kept. */
#define GH_N_SHELVES 2

typedef struct gh_shelf {
    struct gh_shelf *next;
    gh_terms terms;
    gh_forms forms;
    gh_prepared prepared[GH_N_PREPARED];
    gh_prepared asked;
    uint64_t clock;
} gh_shelf;

static struct {
    pthread_mutex_t lock;
    gh_shelf *first;            /* the last put there                       */
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void take_terms(gh_sched *s)
{
    gh_terms *terms = &s->terms;
    memset(terms, 0, sizeof *terms);
    terms->rt = s->rt;
    terms->n_backends = s->n_backends;
    terms->n_places = s->n_places;
    terms->offload = s->offload;
    terms->overlaps = s->overlaps;
    terms->some_optimize = s->some_optimize;
    memcpy(terms->reads, s->reads, sizeof terms->reads);
    for (int b = 0; b < s->n_backends; b++) {
        terms->device[b] = s->rt->backend_get_device(s->backend[b]);
        gh_arena_init(&terms->type[b], s->lib, s->buft[b]);
    }
}

static void empty(gh_shelf *shelf)
{
    for (int i = 0; i < GH_N_PREPARED; i++) {
        gh_prepared_free(&shelf->prepared[i]);
    }
    gh_prepared_free(&shelf->asked);
    gh_forms_free(&shelf->forms);
}

static void take_graphs(gh_sched *s, gh_shelf *shelf)
{
    shelf->forms = s->forms;
    shelf->clock = s->clock;
    shelf->asked = s->asked;
    memset(&s->asked, 0, sizeof s->asked);
    memcpy(shelf->prepared, s->prepared, sizeof shelf->prepared);
    memset(&s->forms, 0, sizeof s->forms);
    memset(s->prepared, 0, sizeof s->prepared);
    for (int i = 0; i < GH_N_PREPARED; i++) {
        shelf->prepared[i].reserved = false;
        shelf->prepared[i].generation = 0;
    }
}

void gh_shelve(gh_sched *s)
{
    gh_shelf *shelf = calloc(1, sizeof *shelf), *last = NULL;
    int n = 0;
    gh_compact_graphs(s);
    if (shelf == NULL) {
        gh_shelf none;
        take_graphs(s, &none);
        empty(&none);
        return;
    }
    shelf->terms = s->terms;
    take_graphs(s, shelf);
    pthread_mutex_lock(&all.lock);
    shelf->next = all.first;
    all.first = shelf;
    for (gh_shelf *at = all.first; at != NULL; at = at->next) {
        if (++n == GH_N_SHELVES) {
            last = at->next;
            at->next = NULL;
        }
    }
    pthread_mutex_unlock(&all.lock);
    if (last != NULL) {
        empty(last);
        free(last);
    }
}

void gh_unshelve(gh_sched *s)
{
    gh_shelf *found = NULL;
    take_terms(s);
    pthread_mutex_lock(&all.lock);
    for (gh_shelf **at = &all.first; *at != NULL; at = &(*at)->next) {
        if (memcmp(&(*at)->terms, &s->terms, sizeof s->terms) == 0) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&all.lock);
    if (found == NULL) {
        gh_forms_init(&s->forms, s->lib, true);
        s->forms.buffer_get_type = s->rt->backend_buffer_get_type;
        s->forms.buffer_get_usage = s->rt->backend_buffer_get_usage;
        return;
    }
    s->forms = found->forms;
    s->clock = s->born = found->clock;
    s->asked = found->asked;
    memcpy(s->prepared, found->prepared, sizeof s->prepared);
    for (int i = 0; i < GH_N_PREPARED; i++) {
        s->prepared[i].looks.forms = &s->forms;
    }
    free(found);
}
