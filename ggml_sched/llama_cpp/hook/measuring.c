/* ggml_sched/llama_cpp/hook/measuring.c -- sizes of graphs in dry runs.  See measuring.h. */
#include "measuring.h"

#include "open_buffers.h"

static void (*report)(const gh_measured *found);

/* The scheduler whose graph was measured last.  Splits of a scheduler are not measured before that: a client first
 * splits graphs that it will not reserve, to see where nodes are placed. */
static const void *last_sched;
static bool is_inside;

/* Bytes of the buffers of the graph allocator that the scheduler calls while a graph is measured. */
static size_t measured[GH_MAX_BUFTS];

bool gh_measures(void)
{
    return report != NULL;
}

void gh_set_measures(void (*each)(const gh_measured *found))
{
    report = each;
    last_sched = NULL;
    gh_set_dry_arenas(each != NULL);
}

bool gh_measures_split(const void *sched)
{
    return gh_measures() && !is_inside && sched == last_sched;
}

void gh_report_measured(const gh_ggml *lib, const void *sched, void *const *bufts, const size_t *nbytes, int n)
{
    gh_measured found = {.n = n};
    last_sched = sched;
    for (int b = 0; b < n; b++) {
        found.type[b] = lib->backend_buft_name(bufts[b]);
        found.device[b] = gh_device_of(lib, bufts[b]);
        found.nbytes[b] = nbytes[b];
    }
    report(&found);
}

bool gh_measure_stock(const gh_ggml *lib, void *sched, void *graph, size_t *sizes)
{
    const int n = lib->backend_sched_get_n_backends(sched);
    void *bufts[GH_MAX_BACKENDS];
    bool done;
    memset(measured, 0, sizeof measured);
    is_inside = true;
    done = lib->backend_sched_reserve(sched, graph);
    is_inside = false;
    for (int b = 0; b < n; b++) {
        bufts[b] = lib->backend_sched_get_buffer_type(sched, lib->backend_sched_get_backend(sched, b));
    }
    if (sizes != NULL) {
        memcpy(sizes, measured, (size_t)n * sizeof *sizes);
    }
    if (done) {
        gh_report_measured(lib, sched, bufts, measured, n);
    }
    return done;
}

size_t *gh_measured_bytes(void)
{
    return measured;
}
