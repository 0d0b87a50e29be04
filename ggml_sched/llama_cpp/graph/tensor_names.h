/* ggml_sched/llama_cpp/graph/tensor_names.h -- copies of tensors' names, for plans that outlive their graphs. */
#ifndef GGML_SCHED_LLAMA_CPP_GRAPH_TENSOR_NAMES_H
#define GGML_SCHED_LLAMA_CPP_GRAPH_TENSOR_NAMES_H

#include "graph_reader.h"

typedef struct gh_tensor_names {
    int32_t n;
    int32_t room;
    int32_t *at;            /* [n] where each name begins in text          */
    char *text;             /* one name behind the other, each with its end */
    int64_t room_text;
} gh_tensor_names;

/* Copy the names of the graph that was read, by id.  False without memory: there are none then. */
bool gh_tensor_names_fill(gh_tensor_names *names, const gh_reader *r);

/* NULL for an id that only the planner knows. */
static inline const char *gh_tensor_name(const gh_tensor_names *names, int32_t id)
{
    return id < names->n ? names->text + names->at[id] : NULL;
}

void gh_tensor_names_free(gh_tensor_names *names);

#endif
