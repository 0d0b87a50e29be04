# The names of the reasons why a tensor is on its backend; the codes are in include/ggml_sched/policy.h.
#
# Every pass that assigns a backend also writes a reason; `Plan.explain` makes sentences of them.

_ASSIGNED = {
    GS_REASON_USER: "",
    GS_REASON_USER_UNSUPPORTED: " to a backend that does not support the op; this is the best that does",
}
"""How the sentences of reasons go on that begin with who assigned the backend."""

_REASONS = {
    GS_REASON_NOTHING: "no node of the graph uses it, so it has no memory",
    GS_REASON_RESIDENT: "its memory is there already, and memory does not move",
    GS_REASON_WEIGHT: "a source that was allocated before planning (a weight or cache) is there",
    GS_REASON_SOURCE: "the best backend among its sources, by rank and size",
    GS_REASON_CONSUMER: "its first consumer runs there",
    GS_REASON_ROOT: "it is a view, and its root is there",
    GS_REASON_FIRST: "no other rule applies, and it is the first backend that supports it",
    GS_REASON_UNSUPPORTED: "the backend that the rules chose does not support the op; this is the best that does",
    GS_REASON_INPUT: "an input of the graph starts on the last (host) backend",
    GS_REASON_OFFLOAD: "its weights are on the host, and this backend offers to run the op (offload_op)",
    GS_REASON_NEIGHBOUR: "the nearest node of the graph that was already placed is there",
    GS_REASON_UPGRADE: "a better backend that reads the same memory supports it",
    GS_REASON_MOST_INPUTS: "most of its sources are there",
    GS_REASON_BOUNDARY: "a split boundary was moved to where fewer bytes cross",
    **{code: f"the caller assigned it (set_tensor_backend){rest}" for code, rest in _ASSIGNED.items()},
}


def _reason_names():
    """{code: name}."""
    names = {}
    for reason in _REASONS:
        names[reason] = (<bytes>gs_reason_name(<int>reason)).decode()
    return names


_REASON_NAMES = _reason_names()
