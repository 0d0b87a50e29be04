# The C view of the core: `from ggml_sched cimport _core` (or `from ggml_sched._core cimport Tensor`).

from ggml_sched._c cimport gs_checked_add, gs_checked_align, gs_checked_mul, gs_error, gs_graph, gs_layout, gs_plan
from ggml_sched._c cimport gs_policy, gs_problem, gs_range_fits
from ggml_sched.core.first_generation.allocators cimport TensorAllocator
from ggml_sched.core.graph.context cimport ContextBase
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport BackendBase, BufferBase, ContextState, Lease, NodeTable, Tensor
from ggml_sched.core.plan.make cimport gs_plan_free, gs_plan_make, gs_plan_replay, plan_mark_exclusive
from ggml_sched.core.plan.plan_data cimport PlanData
from ggml_sched.core.plan.request cimport Devices, Request
