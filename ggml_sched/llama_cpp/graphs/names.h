/* ggml_sched/llama_cpp/graphs/names.h -- the names of a graph's tensors, which may be gone when somebody asks. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPHS_NAMES_H
#define GGML_SCHED_LLAMA_CPP_GRAPHS_NAMES_H

#include "read.h"

typedef struct gh_names {
    int32_t n;
    int32_t room;
    int32_t *at;            /* [n] where in text each begins                    */
    char *text;             /* one behind the other, each with its end          */
    int64_t room_text;
} gh_names;

/* Those of a graph that was read, by id.  False without memory: there are none then. */
bool gh_names_take(gh_names *names, const gh_reading *r);

bool gh_names_copy(gh_names *to, const gh_names *from);

/* NULL for an id that only planning knows. */
static inline const char *gh_name_of(const gh_names *names, int32_t id)
{
    return id < names->n ? names->text + names->at[id] : NULL;
}

void gh_names_free(gh_names *names);

#endif
