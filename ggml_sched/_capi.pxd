# The C view of _capi.  Consumers need none of this: they take the functions from the capsule (ggml_sched/api.h), in Cython
# by `from ggml_sched._c cimport gs_api, gs_import_api`.

from libc.stdint cimport int64_t, uint64_t

from ggml_sched._c cimport gs_graph, gs_graph_size, gs_plan
from ggml_sched.core.plan.problem cimport gs_asked


# What a gs_api_graph is.
ctypedef struct gs_graph_box:
    gs_graph g                  # stands in `block`, deps too
    void *block                 # owned
    int64_t room                # bytes of it
    gs_graph_size size
    uint64_t filling            # how often it has been made writable
    bint finished


# What a gs_api_plan is.
ctypedef struct gs_plan_box:
    gs_plan c                   # owned
    gs_asked asked              # owned: what it was made for; its graph and answers are forgotten
    const gs_graph_box *graph   # of the caller, who says that it is still there
    uint64_t filling            # of that graph
    gs_graph_size size          # of that graph
