# The C view of _capi, for use inside the package.  Other code takes the functions from the capsule
# (ggml_sched/api.h), in Cython by `from ggml_sched._c cimport gs_api, gs_import_api`.

from libc.stdint cimport int64_t, uint64_t

from ggml_sched._c cimport gs_graph, gs_graph_size, gs_plan
from ggml_sched.core.plan.placement cimport gs_request


# The struct behind a gs_api_graph handle.
ctypedef struct gs_graph_box:
    gs_graph g                  # its arrays are in `block`
    void *block                 # owned
    int64_t room                # bytes of `block`
    gs_graph_size size
    uint64_t filling            # a number unique to these contents: calls of graph_new and graph_refill so far
    bint finished               # graph_finish has succeeded since the last of them
    bint trimmed                # graph_trim has freed the derived arrays since then


# The struct behind a gs_api_plan handle.
ctypedef struct gs_plan_box:
    gs_plan c                   # owned
    gs_request request          # its memory is owned; without pointers to arrays of the caller
    const gs_graph_box *graph   # the graph of the plan; never dereferenced unless the caller passes it again
    uint64_t filling            # of that graph, when the plan was made
    gs_graph_size size          # of that graph, when the plan was made
