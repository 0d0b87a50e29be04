# Reasons: why a tensor is where it is, one code for each rule.
#
# Every pass that assigns a backend writes one of these beside it; `Plan.explain`
# turns them into sentences.

cdef enum:
    WHY_NOTHING
    WHY_USER
    WHY_RESIDENT
    WHY_WEIGHT
    WHY_SOURCE
    WHY_CONSUMER
    WHY_ROOT
    WHY_FIRST
    WHY_UNSUPPORTED
    WHY_INPUT
    WHY_OFFLOAD
    WHY_NEIGHBOUR
    WHY_UPGRADE
    WHY_MOST_INPUTS
    WHY_BOUNDARY

_WHY = {
    WHY_NOTHING: "nothing in the graph uses it, so it has no place",
    WHY_USER: "the caller assigned it (set_tensor_backend)",
    WHY_RESIDENT: "its memory is there already, and memory does not move",
    WHY_WEIGHT: "a source that was allocated beforehand (a weight or cache) lives there",
    WHY_SOURCE: "the best backend among its sources, by rank and size",
    WHY_CONSUMER: "its first consumer runs there",
    WHY_ROOT: "it is a view, and its root is there",
    WHY_FIRST: "nothing decided it, so the first backend that supports it",
    WHY_UNSUPPORTED: "the backend that the rules chose does not support the op; this is the best that does",
    WHY_INPUT: "an input of the graph starts on the last (host) backend",
    WHY_OFFLOAD: "its weights are on the host, and this backend offers to run the op (offload_op)",
    WHY_NEIGHBOUR: "the nearest node of the graph that was already placed is there",
    WHY_UPGRADE: "a better backend that reads the same memory supports it",
    WHY_MOST_INPUTS: "most of its sources are there",
    WHY_BOUNDARY: "a split boundary was moved to where fewer bytes cross",
}

# Those that `Plan.explain` tells apart.
REASON_USER = _WHY[WHY_USER]
REASON_CONSUMER = _WHY[WHY_CONSUMER]
