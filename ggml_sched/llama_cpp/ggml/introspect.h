/* ggml_sched/llama_cpp/ggml/introspect.h -- introspection of a library of ggml's at its first use. */
#ifndef GGML_SCHED_LLAMA_CPP_GGML_INTROSPECT_H
#define GGML_SCHED_LLAMA_CPP_GGML_INTROSPECT_H

#include "library.h"

/* Map the library's numbers of ops and types to the planner's, and find which ops its kernels compute in place. */
void gh_find_op_map(gh_ggml *lib);

/* Find the offsets of the functions that buffers and buffer types may lack. */
void gh_find_buffer_hooks(gh_ggml *lib);

/* Make tensors and a graph, and compare the offsets of their fields with those expected: what differs, or NULL. */
const char *gh_probe(gh_ggml *lib);

#endif
