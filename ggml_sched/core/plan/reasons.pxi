# Reasons: why a tensor is where it is, one code for each rule.
#
# Every pass that assigns a backend writes one of these beside it; `Plan.explain`
# turns them into sentences.

_REASONS = {
    GS_REASON_NOTHING: "nothing in the graph uses it, so it has no place",
    GS_REASON_USER: "the caller assigned it (set_tensor_backend)",
    GS_REASON_RESIDENT: "its memory is there already, and memory does not move",
    GS_REASON_WEIGHT: "a source that was allocated beforehand (a weight or cache) lives there",
    GS_REASON_SOURCE: "the best backend among its sources, by rank and size",
    GS_REASON_CONSUMER: "its first consumer runs there",
    GS_REASON_ROOT: "it is a view, and its root is there",
    GS_REASON_FIRST: "nothing decided it, so the first backend that supports it",
    GS_REASON_UNSUPPORTED: "the backend that the rules chose does not support the op; this is the best that does",
    GS_REASON_INPUT: "an input of the graph starts on the last (host) backend",
    GS_REASON_OFFLOAD: "its weights are on the host, and this backend offers to run the op (offload_op)",
    GS_REASON_NEIGHBOUR: "the nearest node of the graph that was already placed is there",
    GS_REASON_UPGRADE: "a better backend that reads the same memory supports it",
    GS_REASON_MOST_INPUTS: "most of its sources are there",
    GS_REASON_BOUNDARY: "a split boundary was moved to where fewer bytes cross",
}

_REASON_NAMES = {
    GS_REASON_NOTHING: "nothing",
    GS_REASON_USER: "user",
    GS_REASON_RESIDENT: "resident",
    GS_REASON_WEIGHT: "weight",
    GS_REASON_SOURCE: "source",
    GS_REASON_CONSUMER: "consumer",
    GS_REASON_ROOT: "root",
    GS_REASON_FIRST: "first",
    GS_REASON_UNSUPPORTED: "unsupported",
    GS_REASON_INPUT: "input",
    GS_REASON_OFFLOAD: "offload",
    GS_REASON_NEIGHBOUR: "neighbour",
    GS_REASON_UPGRADE: "upgrade",
    GS_REASON_MOST_INPUTS: "most inputs",
    GS_REASON_BOUNDARY: "boundary",
}
