/* ggml_sched/llama_cpp/hook/counters.c -- the counters and the last failure, which all threads share.  See counters.h.
 */
#define _GNU_SOURCE
#include "counters.h"

#include <pthread.h>
#include <stdio.h>

atomic_llong gh_counters[GH_N_COUNTS];
atomic_bool gh_pass_through;

static struct {
    pthread_mutex_t lock;
    gs_error error;
    const char *unsupported;
} last = {.lock = PTHREAD_MUTEX_INITIALIZER};

bool gh_failed(const gs_error *error)
{
    gh_count_one(GH_COUNT_FAILED);
    pthread_mutex_lock(&last.lock);
    last.error = *error;
    pthread_mutex_unlock(&last.lock);
    return false;
}

bool gh_failed_with(int status, const char *message)
{
    gs_error error = {.status = status, .tensor = -1, .backend = -1, .index = -1};
    snprintf(error.message, sizeof error.message, "%s", message);
    return gh_failed(&error);
}

bool gh_last_error(gs_error *error)
{
    pthread_mutex_lock(&last.lock);
    *error = last.error;
    pthread_mutex_unlock(&last.lock);
    return error->status != GS_OK;
}

void gh_note_unsupported(const char *why)
{
    pthread_mutex_lock(&last.lock);
    if (last.unsupported == NULL) {
        last.unsupported = why;
    }
    pthread_mutex_unlock(&last.lock);
}

const char *gh_unsupported(void)
{
    const char *why;
    pthread_mutex_lock(&last.lock);
    why = last.unsupported;
    pthread_mutex_unlock(&last.lock);
    return why;
}
