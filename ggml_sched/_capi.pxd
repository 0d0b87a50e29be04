# The C view of _capi, for use inside the package.  Other code takes the functions from the capsule
# (ggml_sched/api.h), in Cython by `from ggml_sched._c cimport gs_api, gs_import_api`.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_backend, gs_graph, gs_graph_size, gs_node, gs_plan, gs_program, gs_run_nodes
from ggml_sched.core.plan.placement cimport gs_request

cdef extern from "<stdatomic.h>" nogil:
    ctypedef struct atomic_flag:
        pass
    bint atomic_flag_test_and_set(atomic_flag *flag)
    void atomic_flag_clear(atomic_flag *flag)


# The struct behind a gs_api_graph handle.
ctypedef struct gs_graph_box:
    gs_graph g                  # the graph; its arrays are in `block`
    void *block                 # memory of the arrays, owned
    int64_t room                # bytes of `block`
    gs_graph_size size
    uint64_t filling            # calls of graph_new and graph_refill so far, which number the contents
    bint finished               # graph_finish has succeeded for the present contents
    bint trimmed                # graph_trim or graph_keep_wiring has freed arrays of the present contents


# The struct behind a gs_api_plan handle.
ctypedef struct gs_plan_box:
    gs_plan c                   # the plan; its arrays are owned
    gs_request request          # its memory is owned; it has no pointers to arrays of the caller
    const gs_graph_box *graph   # the graph of the plan; never dereferenced unless the caller passes it again
    uint64_t filling            # graph.filling when the plan was made
    gs_graph_size size          # the size of the graph when the plan was made


# The event at the end of a step, for which other steps or the host wait, and the backend that records it.  `event` is
# NULL where there is nothing to wait for.
ctypedef struct gs_done:
    void *event
    int32_t backend


ctypedef struct gs_program_box


# The struct behind a gs_api_arenas handle, with its arrays in the same block.
ctypedef struct gs_arenas_box:
    int32_t n_backends
    int32_t n_owners            # its programs, and the caller until arenas_free; at 0 the arenas are freed
    gs_program_box *current     # the program whose data is in the arenas; NULL: none
    atomic_flag busy            # set while a function uses one of the programs
    gs_backend *backends        # [n_backends]
    int32_t *begin              # [n_backends + 1] index of a backend's first chunk in `chunk`
    void **chunk                # the memory of each chunk; NULL for a chunk without bytes
    int64_t *chunk_nbytes


# The struct behind a gs_api_program handle.  All arrays but those of `c` and `backends` are in `memory`.
ctypedef struct gs_program_box:
    gs_program c
    gs_arenas_box *arenas       # counts this program in n_owners
    void *steps                 # the block with the arrays of `c`, owned
    void *memory                # the block with the arrays below, owned
    int32_t n_tensors
    int32_t n_backends
    int32_t n_awaited           # steps for which others wait
    int32_t n_written           # residents that nodes write to
    int32_t depth               # events of each awaited step, one for each of the latest computes: c.reach + 1
    int32_t n_runs              # entries of `runs`
    int64_t n_twins             # twins of all runs: of nodes in runs that read copies, or compute into one
    int64_t n_listed            # nodes of all runs
    int64_t n_computed          # computes so far; this number chooses the copy slots
    int64_t n_queued            # computes since all backends were last synchronized
    bint has_results            # the last compute has succeeded so far
    gs_backend *backends        # [n_backends] those of `arenas`, not owned
    gs_node *nodes              # [c.n_ids] of each id: graph tensors, then copy slots
    gs_node *twins              # [n_twins]
    gs_run_nodes *runs          # [n_runs]
    const gs_node **listed      # [n_listed] the nodes of all runs, one run after another; a twin in place of its node
    int32_t *listed_ids         # [n_listed] the ids of these nodes
    int32_t *run_of             # [c.n_steps] index in `runs` of a step's first entry
    int32_t *n_turns            # [c.n_steps] how many entries of `runs` a step has: 1, or c.copy_slots
    int32_t *group_begin        # gs_run_nodes.group_begin of all runs, one after another
    int32_t *group_member       # gs_run_nodes.group_member of all runs
    unsigned char *needed       # [n_listed] gs_run_nodes.needed of all runs
    void **address              # [c.n_ids]
    int32_t *holder             # [c.n_ids] the backend of an id's memory; -1: none
    int32_t *root               # [n_tensors] the id that owns a tensor's memory
    int64_t *version            # [n_tensors] of each root a number that grows when the root's data changes
    int64_t *held               # [c.n_ids] the version of the data in an id's memory, for if_changed; -1: unknown
    const void **data           # [n_tensors] the data that the caller has set; NULL: none
    unsigned char *traits       # [n_tensors] IS_* bits
    int32_t *written            # [n_written] ids of the residents that nodes write to
    int32_t *awaited            # [c.n_steps] the row of an awaited step in `event` and `done`; -1: not awaited
    void **event                # [n_awaited][depth] of each awaited step; compute number k uses the k % depth-th
    gs_done *done               # [n_awaited][depth] what a wait for the step waits for: `event`, or an earlier one
    gs_done *last               # [n_backends] the last of `done` that was recorded in each queue
    void **follow               # [n_backends] an event of each queue, for copies between queues (let_follow)
    char *staging               # [n_staging] host memory through which copies go
    char *experts               # [n_expert_bytes] the tensor with the numbers of used experts, read to the host
    unsigned char *used         # [n_used] of each expert: 1 if it is used
    int64_t n_staging
    int64_t n_expert_bytes
    int64_t n_used


cdef enum:
    MAX_STAGING = 1 << 20       # bytes; larger copies go through host memory in parts
    IS_READABLE = 1             # the tensor's data is in its memory after a compute
    IS_RESIDENT = 2
    IS_LOADED = 4               # a leaf that the program loads
    IS_FILLED = 8               # a leaf that the program loads to the leaf's own memory
