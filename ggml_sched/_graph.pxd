# The C view of core/graph under one name.

from ggml_sched.core.graph.context cimport ContextBase
from ggml_sched.core.graph.flat cimport (
    flat_bytes, flat_check, flat_classify, flat_equal, flat_fingerprint, flat_lay_out, flat_same_wiring, kind_words,
    node_of_kind,
)
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport (
    ASKS_OFFLOAD, ASKS_SIZE, ASKS_SUPPORTS, COMPUTES, COPIES, BackendBase, BufferBase, ContextState, Lease, NodeTable,
    Tensor,
    label,
)
from ggml_sched.core.graph.types cimport layout_equal, layout_same_ne, op_is_view
