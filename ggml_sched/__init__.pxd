# The Cython API: what other modules cimport, under one name (docs/cython-api.md).

from ggml_sched._c cimport (
    GS_BACKEND_FAILED, GS_BAD_ARGUMENT, GS_BAD_PLACEMENT, GS_HAZARD, GS_MAX_DIMS, GS_MAX_OP_PARAMS, GS_MAX_SRC,
    GS_NOT_DONE, GS_NO_HOST_MEMORY, GS_OK, GS_OUT_OF_MEMORY, GS_OVERFLOW, GS_UNSUPPORTED_OP, gs_api, gs_backend,
    gs_checked_add, gs_checked_align, gs_checked_mul, gs_error, gs_graph, gs_import_api, gs_layout, gs_node, gs_op_family,
    gs_op_name, gs_plan, gs_policy, gs_problem, gs_program, gs_range_fits, gs_run_nodes, gs_status_name, gs_step,
    gs_traits_of_type, gs_type_name, gs_type_traits,
)
from ggml_sched._core cimport PlanData
from ggml_sched._graph cimport BackendBase, BufferBase, ContextBase, Graph, Lease, NodeTable, Tensor
