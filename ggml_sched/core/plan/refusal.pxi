# The error for a node that no backend supports: its sources, and the types with which backends would support the node.
#
# A frequent cause is a weight of a type that no backend supports.  The types are found by support queries for nodes
# that differ from the refused one in the type of one leaf.

cdef tuple _FIRST_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q6_K", "q4_K")
"""The types that an error names before others."""


cdef str unsupported(Tensor t, tuple backends):
    """The message of UnsupportedOp for node t."""
    cdef list sources = []
    for s in t.src:
        if s is not None:
            sources.append(f"{label(s)} {s.type}")
    text = f"{describe(t)}: none of the backends {names_of(backends)} supports it"
    if sources:
        text += f", with the sources {', '.join(sources)}"
    cdef list refused = []
    cdef list accepted = []
    for b in backends:
        found = types_that_work(t, b)
        if found:
            accepted.append(f"{b.name!r} supports it with {' or '.join(found)}")
        else:
            refused.append(repr(b.name))
    if not accepted:
        kinds = "whatever the types of its leafs: " if any(leafs_of(t)) else ""
        return f"{text}; {kinds}a backend that computes {t.op} is missing"
    if refused:
        accepted.append(f"{', '.join(refused)} with no type of its leafs")
    return f"{text}; {'; '.join(accepted)}"


cdef list leafs_of(Tensor t):
    """For each source of t, whether it is a leaf that is no view: the caller could give it another type."""
    cdef list found = []
    for s in t.src:
        found.append(s is not None and s.op == "NONE" and s.view_src is None)
    return found


cdef list types_that_work(Tensor t, object backend):
    """"NAME of type A, B": for each leaf among the sources of t the types with which the backend supports t."""
    cdef list found = []
    if t.view_src is not None:
        return found
    cdef list works
    for k, is_leaf in enumerate(leafs_of(t)):
        if is_leaf:
            works = []
            for name in dict.fromkeys((*_FIRST_TYPES, *TYPE_NAMES.values())):
                if name != str(t.src[k].type) and works_with(t, k, name, backend):
                    works.append(name)
            if works:
                more = f" and {len(works) - 6} more" if len(works) > 6 else ""
                found.append(f"{label(t.src[k])} of type {', '.join(works[:6])}{more}")
    return found


cdef bint works_with(Tensor t, int k, str type, object backend) except -1:
    """Whether the backend supports a node like t whose source k is contiguous and of another type."""
    from ggml_sched.core.graph.context import Context       # here, because planning for the C API needs none

    cdef list sources = []
    ctx = Context("a support query")
    try:
        for i, s in enumerate(t.src):
            if s is None:
                sources.append(None)
            else:
                sources.append(ctx.tensor(type, s.ne) if i == k else ctx.restore("NONE", s.type, s.ne, s.nb))
        return bool(backend.supports_op(ctx.restore(t.op, t.type, t.ne, t.nb, sources, op_params=t.op_params)))
    except GraphError:
        return False
    finally:
        ctx.close()
