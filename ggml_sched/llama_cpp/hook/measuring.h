/* ggml_sched/llama_cpp/hook/measuring.h -- dry runs: what a client would reserve, without reserving it.
 *
 * A client that only simulates its allocations measures the first graph that it would reserve
 * (ggml_backend_sched_reserve_size), and splits the others (ggml_backend_sched_split_graph).  While measuring is on,
 * each of these graphs is planned and gets arenas like a graph that is reserved, but the arenas have sizes and no
 * memory.  So the sizes are those that the client reserves when it does allocate.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_MEASURING_H
#define GGML_SCHED_LLAMA_CPP_HOOK_MEASURING_H

#include "plan_cache.h"

/* The bytes that one measured graph needs in the buffer type of each backend.  Where several backends share a type, the
 * first of them has its bytes, and the others have 0. */
typedef struct gh_measured {
    int n;
    const char *type[GH_MAX_BACKENDS];      /* names of buffer types                                    */
    const char *device[GH_MAX_BACKENDS];    /* names of their devices; NULL: the library does not say   */
    size_t nbytes[GH_MAX_BACKENDS];
} gh_measured;

/* Turn measuring on, or off again with NULL: `each` is called, on the client's thread, after every graph that was
 * measured.  No other thread may use ggml meanwhile. */
void gh_set_measures(void (*each)(const gh_measured *found));

bool gh_measures(void);

/* Call the function of gh_set_measures with what a graph of scheduler `sched` needs: for each of its n backends the
 * buffer type and the bytes. */
void gh_report_measured(const gh_ggml *lib, const void *sched, void *const *bufts, const size_t *nbytes, int n);

/* Measure a graph with ggml's own scheduler, and report it.  ggml_backend_sched_reserve is called, as by a client that
 * allocates, because ggml_backend_sched_reserve_size drops the client's assignments first and so places nodes
 * otherwise.  `sizes` receives the bytes for each backend; NULL: the caller does not need them.  False: the scheduler
 * refused. */
bool gh_measure_stock(const gh_ggml *lib, void *sched, void *graph, size_t *sizes);

/* The array in which a graph allocator that is called during gh_measure_stock stores the bytes of its buffers. */
size_t *gh_measured_bytes(void);

/* Whether ggml_backend_sched_split_graph is to measure the graph that it splits: this scheduler's graph was the last
 * one measured, and the call does not come from measuring itself. */
bool gh_measures_split(const void *sched);

#endif
