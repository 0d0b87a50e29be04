/* ggml_sched/llama_cpp/ggml/introspect.h -- what is found out about a library that bits just been met. */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_INTROSPECT_H
#define GGML_SCHED_LLAMA_CPP_GGML_INTROSPECT_H

#include "library.h"

/* The planner's numbers of its ops and types, and which of them its kernels compute in place. */
void gh_find_op_map(gh_ggml *lib);

/* Which functions a buffer may be without, and its type: where they are. */
void gh_find_buffer_hooks(gh_ggml *lib);

/* Make tensors and a graph, and look where their fields are: what is not as we know it, or NULL. */
const char *gh_probe(gh_ggml *lib);

#endif
