/* ggml_sched/llama_cpp/hook/measuring.h -- dry runs: what a client would reserve, without reserving it.
 *
 * A client that only simulates its allocations measures the first graph that it would reserve
 * (ggml_backend_sched_reserve_size), and splits the others (ggml_backend_sched_split_graph).  While measuring is on,
 * each of these graphs goes the way of a graph that is reserved, plans and arenas included, but the arenas have sizes
 * and no memory.  So the sizes are those that the client reserves when it does allocate.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_MEASURING_H
#define GGML_SCHED_LLAMA_CPP_HOOK_MEASURING_H

#include "plan_cache.h"

/* The bytes that one measured graph needs in the buffer type of each backend.  The bytes of a type that several
 * backends share are those of the first of these. */
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

/* Report what a graph of a scheduler needs: its backends' buffer types, and their bytes. */
void gh_report_measured(const gh_ggml *lib, const void *sched, void *const *bufts, const size_t *nbytes, int n);

/* Measure a graph with ggml's own scheduler, and report it.  It is reserved as in a client that allocates, since
 * ggml_backend_sched_reserve_size drops the client's assignments first and places nodes otherwise.  `sizes` receives
 * the bytes for each backend; NULL: the caller does not need them.  False: the scheduler refused. */
bool gh_measure_stock(const gh_ggml *lib, void *sched, void *graph, size_t *sizes);

/* While gh_measure_stock runs: where a graph allocator that is called stores the bytes of its buffers. */
size_t *gh_measured_bytes(void);

/* Whether a split of this scheduler's graph is to be measured: another graph of it was measured before, and this call
 * does not come from measuring itself. */
bool gh_measures_split(const void *sched);

#endif
