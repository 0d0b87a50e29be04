# cython: language_level=3
"""Programs for the C API: compiles the plan of a flat graph, and writes the program's steps to a gs_program.

planning/compiler.py makes the program, as it does for Python; so there is one set of rules for both.  The C API imports
this module when it makes its first program, because planning alone needs neither NumPy nor this.
"""

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from ggml_sched._c cimport *
from ggml_sched.core.graph.flat cimport flat_arrays
from ggml_sched.core.graph.types cimport ints_tuple
from ggml_sched.core.plan.plan_values cimport values_of_plan

from ggml_sched._plan import plan_from_values
from ggml_sched.errors import no_host_memory
from ggml_sched.planning.compiler import make_program
from ggml_sched.planning.flat import FlatBackend, FlatGraph, FlatTensor, FlatType

KINDS = {"load": GS_STEP_LOAD, "copy": GS_STEP_COPY, "copy experts": GS_STEP_COPY_EXPERTS, "run": GS_STEP_RUN,
         "write back": GS_STEP_WRITE_BACK, "fetch": GS_STEP_COPY}


def write_program(size_t graph, size_t plan, size_t resident, tuple concurrent not None, size_t program):
    """Write the program of a plan to a gs_program; returns the address of the block with its arrays, which the caller
    frees.

    `graph`, `plan` and `program` are addresses of a gs_graph, its gs_plan and a gs_program; `resident` is that of an
    array with the resident backend of each tensor, -1 for none; `concurrent` has each backend's `concurrent_copies`.
    """
    cdef const gs_graph *g = <const gs_graph *>graph
    cdef const gs_plan *p = <const gs_plan *>plan
    backends = [FlatBackend(flag) for flag in concurrent]
    flat = flat_graph(g, <const int32_t *>resident, backends)
    made = make_program(flat, plan_from_values(values_of_plan(p), g.n_nodes), backends)
    return put_program(<gs_program *>program, made, p.n)


cdef object flat_graph(const gs_graph *g, const int32_t *resident, list backends):
    """A gs_graph as a FlatGraph."""
    cdef list tensors = []
    cdef dict types = {}, deps = {}
    cdef gs_type_traits traits
    cdef int32_t i, b
    for i in range(g.n_tensors):
        kind = types.get(g.layout[i].type)
        if kind is None:
            traits = gs_traits_of_type(g.layout[i].type)
            kind = FlatType(traits.block_size, traits.type_size) if traits.block_size else FlatType(1, 0)
            types[g.layout[i].type] = kind
        b = resident[g.memory[i]]
        tensors.append(FlatTensor(ints_tuple(g.layout[i].ne, GS_MAX_DIMS), ints_tuple(g.layout[i].nb, GS_MAX_DIMS),
                                  kind, backends[b] if b >= 0 else None))
        if g.dep_begin != NULL and g.dep_begin[i + 1] > g.dep_begin[i]:
            deps[i] = ints_tuple(g.dep + g.dep_begin[i], g.dep_begin[i + 1] - g.dep_begin[i])
    return FlatGraph(flat_arrays(g), tensors, deps)


cdef size_t put_program(gs_program *out, object program, int32_t n_ids) except 0:
    """Allocate one block for all arrays of a program, those of the widest elements first, fill it, and return its
    address."""
    cdef char *block
    cdef Py_ssize_t n_slots = 0, n_reads = 0, n_waits = 0
    for one in program.steps:
        n_waits += len(one.waits)
        if one.kind == "run":
            n_reads += len(one.reads)
            n_slots += len(one.into) + sum([len(found.locations) for found in one.reads])
        else:
            n_slots += len(one.locations)
    out.n_steps, out.n_slots, out.n_reads, out.n_waits = len(program.steps), n_slots, n_reads, n_waits
    out.n_inputs, out.n_ids = len(program.inputs), n_ids
    out.copy_slots, out.reach = program.copy_slots, program.reach
    block = <char *>malloc(1 + out.n_steps * sizeof(gs_step) + n_slots * sizeof(gs_location) + n_reads * sizeof(gs_read)
                           + n_waits * sizeof(gs_wait) + out.n_inputs * sizeof(int32_t))
    if block == NULL:
        raise no_host_memory(f"a program of {out.n_steps} steps")
    out.steps = <gs_step *>block
    out.locations = <gs_location *>(out.steps + out.n_steps)
    out.reads = <gs_read *>(out.locations + n_slots)
    out.waits = <gs_wait *>(out.reads + n_reads)
    out.inputs = <int32_t *>(out.waits + n_waits)
    try:
        fill_program(out, program)
    except BaseException:
        free(block)
        raise
    return <size_t>block


cdef int fill_program(gs_program *out, object program) except -1:
    """Write the steps, locations, reads, waits and inputs to the arrays of `out`."""
    cdef gs_step *step = <gs_step *>out.steps
    cdef gs_location *location = <gs_location *>out.locations
    cdef gs_wait *wait = <gs_wait *>out.waits
    cdef gs_read *read = <gs_read *>out.reads
    cdef int32_t *input = <int32_t *>out.inputs
    cdef Py_ssize_t k
    for k, i in enumerate(program.inputs):
        input[k] = i
    awaited = program.awaited
    for k, one in enumerate(program.steps):
        step.kind, step.backend = KINDS[one.kind], one.backend
        step.tensor = step.ids = step.first = step.last = -1
        step.start = step.nbytes = 0
        step.if_changed, step.awaited = one.if_changed, k in awaited
        step.read, step.n_reads = <int32_t>(read - out.reads), 0
        if one.kind == "run":
            step.first, step.last, step.n_reads = one.first, one.last, len(one.reads)
            for found in one.reads:
                read.position, read.slot, read.n_slots = found.position, found.slot, len(found.locations)
                read.location = <int32_t>(location - out.locations)
                location = put_locations(location, found.locations)
                read += 1
        else:
            step.tensor = one.tensor
            if one.kind == "load":
                step.start, step.nbytes = one.start, one.nbytes
            elif one.kind == "copy experts":
                step.ids = one.ids
        locations = one.into if one.kind == "run" else one.locations
        step.location, step.n_slots = <int32_t>(location - out.locations), len(locations)
        location = put_locations(location, locations)
        step.wait, step.n_waits = <int32_t>(wait - out.waits), len(one.waits)
        for other in one.waits:
            wait.step, wait.back = other.step, other.back
            wait += 1
        step += 1
    return 0


cdef gs_location *put_locations(gs_location *at, tuple locations) except NULL:
    """Write locations; returns the address after them."""
    for location in locations:
        at.id, at.backend, at.chunk, at.offset = location.id, location.backend, location.chunk, location.offset
        at += 1
    return at
