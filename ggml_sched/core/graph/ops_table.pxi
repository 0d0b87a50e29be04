# The op table: names and in-place rules by number.
#
# The Python view of include/ggml_sched/ops.h, which defines the numbers.  It has all ops of ggml, also those that no
# backend of this package computes, so that any graph file can be planned.  UNARY and GLU are families; each of their
# sub-ops has a number and a name of its own ("UNARY:SILU").

cdef list OP_NAMES = []                 # by number; None for a number that no op has
cdef dict OP_IDS = {}


def _fill_op_table():
    cdef int op
    for op in range(GS_N_OPS):
        name = gs_op_name(op)
        OP_NAMES.append(None if name == NULL else (<bytes>name).decode())
        if name != NULL:
            OP_IDS[OP_NAMES[op]] = op


def _kinds_of(str family):
    """The sub-ops of a family, in the order of their numbers."""
    kinds = []
    for name in OP_IDS:
        if name.startswith(family):
            kinds.append(name.removeprefix(family))
    return tuple(kinds)


def _names_in_place():
    """The ops that ggml computes in place."""
    names = set()
    for name, op in OP_IDS.items():
        if gs_op_inplace(<int>op):
            names.add(name)
    return frozenset(names)


_fill_op_table()
# The names of sub-ops, by the number that ggml keeps in op_params[0] of a node.
_UNARY_KINDS = _kinds_of("UNARY:")
_GLU_KINDS = _kinds_of("GLU:")
_INPLACE_OPS = _names_in_place()


def op_names():
    """The names of every op that a graph may hold, as a tuple of strings."""
    return tuple(OP_IDS)


def op_numbers():
    """{name: number} of every op; the numbers never change (include/ggml_sched/ops.h)."""
    return dict(OP_IDS)


def inplace_ops():
    """The ops that ggml computes in place, a frozenset of names."""
    return _INPLACE_OPS
