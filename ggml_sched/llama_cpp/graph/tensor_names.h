/* ggml_sched/llama_cpp/graphs/names.h -- the names of a graph's tensors, which may be gone when somebody asks. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_TENSOR_NAMES_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_TENSOR_NAMES_H

#include "graph_reader.h"

typedef struct gh_tensor_names {
    int32_t n;
    int32_t room;
    int32_t *at;            /* [n] where in text each begins                    */
    char *text;             /* one behind the other, each with its end          */
    int64_t room_text;
} gh_tensor_names;

/* Those of a graph that was read, by id.  False without memory: there are none then. */
bool gh_tensor_names_fill(gh_tensor_names *names, const gh_reader *r);

bool gh_names_copy(gh_tensor_names *to, const gh_tensor_names *from);

/* NULL for an id that only planning knows. */
static inline const char *gh_tensor_name(const gh_tensor_names *names, int32_t id)
{
    return id < names->n ? names->text + names->at[id] : NULL;
}

void gh_tensor_names_free(gh_tensor_names *names);

#endif
