"""Graph files with a few mistakes: each is refused, or computed as it is written.

`mutated` changes a parsed file in one to four places, mostly so that it still looks like one.  `attempt` loads what
came out, plans it, and computes it twice: with every tensor in memory of its own, in the order of the file, and by a
scheduler, on poisoned arenas.  Both give the same bits, or both refuse.
"""

import contextlib
import copy
import random

import numpy as np
from devices import poisoned
from random_graphs import Built, decode

import ggml_sched as gs
from ggml_sched._graph import op_names
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict

OPS = op_names()
COMMON = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "ADD", "MUL", "SCALE", "CPY", "CONT", "MUL_MAT",
          "SET_ROWS", "GET_ROWS", "CONCAT", "UNARY:RELU", "SOFT_MAX", "SUM_ROWS", "REPEAT", "SET", "ROPE")
TYPES = ("f32", "f32", "f16", "bf16", "i32", "i64", "q8_0", "q4_0", "i8")
VALUES = {"op": COMMON, "type": TYPES, "flags": (["input"], ["output"], ["input", "output"], []),
          "resident": ("weight", "kv", "", "cloud")}
"""{field of a tensor: values}."""
ENTRIES = {"ne": (0, 1, 2, 3, 4, 8, 12, 2**20, 2**40), "nb": (0, 1, 2, 4, 8, 16, 48, 2**20, 2**40),
           "op_params": (0, 1, -1, 3, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000)}
"""{list of a tensor: entries}."""
JUNK = (None, True, -1, 0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63), 2**200, 0.5, 1e300, float("nan"), "",
        "x", [], {}, [1], [[]], {"a": 1}, [2**62, 1, 1, 1], [0, 0, 0, 0])
LARGEST = 1 << 16
"""Bytes of the largest tensor that is computed; larger ones are only planned."""


def good_file(rng: random.Random) -> dict:
    """A random graph as a parsed file; now and then some leafs are weights."""
    data = graph_to_dict(Built(decode(rng.randbytes(10 + 4 * rng.randint(1, 12)))).graph)
    for t in data["tensors"]:
        if t["op"] == "NONE" and rng.random() < 0.1:
            t["resident"] = rng.choice(("weight", "kv"))
    return copy.deepcopy(data)


def mutated(rng: random.Random, data: dict) -> dict:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        # An earlier mutation may have left nothing to change.
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            rng.choice(MUTATIONS)(rng, data)
    return data


def _tensor(rng, data) -> dict:
    return rng.choice(data["tensors"])


def _id(rng, data) -> int:
    return rng.randrange(len(data["tensors"]))


def change_value(rng, data):
    field = rng.choice(("op", "op", "type", "flags", "resident"))
    _tensor(rng, data)[field] = rng.choice(OPS if field == "op" and rng.random() < 0.2 else VALUES[field])


def change_entry(rng, data):
    field = rng.choice(tuple(ENTRIES))
    entries = _tensor(rng, data).setdefault(field, [0])
    entries[rng.randrange(len(entries))] = rng.choice(ENTRIES[field])


def turn_layout(rng, data):
    t, order = _tensor(rng, data), rng.sample(range(4), 4)
    for field in rng.choice((("ne",), ("nb",), ("ne", "nb"))):
        t[field] = [t[field][k] for k in order]


def change_source(rng, data):
    src = _tensor(rng, data)["src"]
    src[rng.randrange(len(src))] = rng.choice((-1, _id(rng, data), _id(rng, data)))


def add_source(rng, data):
    t = _tensor(rng, data)
    t["src"] = [*t.get("src", []), rng.choice((-1, _id(rng, data)))]


def drop_source(rng, data):
    src = _tensor(rng, data)["src"]
    del src[rng.randrange(len(src))]


def swap_sources(rng, data):
    rng.shuffle(_tensor(rng, data)["src"])


def change_root(rng, data):
    _tensor(rng, data)["view_src"] = _id(rng, data)


def change_offset(rng, data):
    t = _tensor(rng, data)
    t["view_offs"] = rng.choice((0, 4, 16, -4, t.get("view_offs", 0) + rng.choice((-16, 4, 16)), 2**40))


def make_view(rng, data):
    """A tensor becomes a view of another, of whatever shape it is."""
    t, root = _tensor(rng, data), _id(rng, data)
    t.update(op=rng.choice(COMMON[:5]), src=[root], view_src=root, view_offs=rng.choice((0, 0, 4, 16)))


def keep(rng, data):
    _tensor(rng, data).setdefault("deps", []).append(_id(rng, data))


def swap_nodes(rng, data):
    nodes = data["nodes"]
    i, k = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    nodes[i], nodes[k] = nodes[k], nodes[i]


def drop_member(rng, data):
    members = data[rng.choice(("nodes", "leafs"))]
    del members[rng.randrange(len(members))]


def move_member(rng, data):
    """A node among the leafs, or a leaf among the nodes, or either twice."""
    members = data[rng.choice(("nodes", "leafs"))]
    member = members[rng.randrange(len(members))]
    if rng.random() < 0.7:
        members.remove(member)
    data[rng.choice(("nodes", "leafs"))].insert(rng.randrange(9), member)


def junk(rng, data):
    t = _tensor(rng, data)
    t[rng.choice((*t, "src", "view_src", "view_offs", "flags", "op_params", "resident", "deps"))] = rng.choice(JUNK)


def junk_on_top(rng, data):
    data[rng.choice(tuple(data))] = rng.choice(JUNK)


def drop_field(rng, data):
    t = _tensor(rng, data)
    del t[rng.choice(tuple(t))]


MUTATIONS = (*(change_value,) * 5, *(change_entry,) * 3, turn_layout, change_source, change_source, add_source,
             drop_source, swap_sources, change_root, change_offset, make_view, make_view, keep, swap_nodes, drop_member,
             move_member, junk, junk_on_top, drop_field, drop_field)


# -- invariants ---------------------------------------------------------------------------


def values(t: gs.Tensor, i: int) -> bytes:
    """Data of leaf number i: small numbers, the same in every realisation."""
    rng = np.random.default_rng(i)
    n = t.nbytes
    match str(t.type):
        case "f32":
            return rng.uniform(-2, 2, -(-n // 4)).astype("<f4").tobytes()[:n]
        case "f16":
            return rng.uniform(-2, 2, -(-n // 2)).astype("<f2").tobytes()[:n]
        case "i32" | "i64":
            size = t.type.type_size
            return rng.integers(0, 3, -(-n // size)).astype(f"<i{size}").tobytes()[:n]
    return bytes(n)


def ends(graph: gs.Graph) -> list[int]:
    """Ids of the nodes whose data can be read after a compute: outputs, and nodes without readers."""
    read = {s for t in graph.nodes for s in (*t.src, t.view_src, *t.deps)}
    return [graph.id_of(t) for t in graph.nodes if t not in read or "output" in t.flags]


def in_memory_of_their_own(data: dict) -> dict[int, bytes] | None:
    """Bytes of the ends, every tensor having a place of its own; None where that raises a gs.Error."""
    with gs.Context("own") as ctx, poisoned() as backend:
        graph = graph_from_dict(data, ctx=ctx)
        with backend.alloc_tensors(ctx):
            for i, t in enumerate(graph.tensors):
                if t.op == "NONE" and t.view_src is None:
                    backend.set_tensor(t, values(t, i))
            try:
                backend.graph_compute(graph)
            except gs.Error:
                return None
            return {i: graph.tensors[i].numpy().tobytes() for i in ends(graph)}


def scheduled(data: dict, policy: str, n_backends: int) -> dict[int, bytes] | None:
    """The same by a scheduler; weights are spread over its backends."""
    backends = tuple(poisoned(f"B{k}") for k in range(n_backends))
    homes = [gs.Context(backend.name) for backend in backends]
    made = gs.Context("scheduled")
    graph = graph_from_dict(data, ctx=made)
    buffers = []
    for k, t in enumerate(t for t in graph.tensors if t.resident and t.view_src is None):
        buffer = backends[k % n_backends].alloc_buffer(t.nbytes)
        buffer.usage = "weights" if t.resident == "weight" else "any"
        gs.bind_resident(t, buffer, 0)
        buffers.append(buffer)
    with gs.Scheduler(backends, policy=policy) as scheduler:
        try:
            for node in graph.nodes[::3]:
                scheduler.set_tensor_backend(node, backends[-1])
            scheduler.alloc(graph).verify()
            for i, t in enumerate(graph.tensors):
                if t.op == "NONE" and t.view_src is None and t.buffer is not None:
                    _set(t, values(t, i))
            scheduler.compute(graph)
            found = {i: graph.tensors[i].numpy().tobytes() for i in ends(graph)}
        except gs.HazardError:
            raise
        except gs.Error:
            found = None
    for closed in (*buffers, *homes, made):
        closed.close()
    return found


def _set(t: gs.Tensor, data: bytes) -> None:
    """Bytes into a leaf, by `set` as callers do it, whatever its type and strides."""
    if t.nbytes == 0:
        return
    if t.lease is not None and t.lease.stages:
        t.stash = data
        if t.lease.through:
            t.backend.set_tensor(t, data)
    else:
        t.backend.set_tensor(t, data)


def attempt(data: dict, rng: random.Random) -> str:
    """Load, plan and compute: "refused", "planned" (it is too large, or no backend supports it) or "computed"."""
    try:
        graph = graph_from_dict(copy.deepcopy(data))
    except gs.Error:
        return "refused"
    assert graph_from_dict(graph_to_dict(graph)).fingerprint == graph.fingerprint
    if max((t.nbytes for t in graph.tensors), default=0) > LARGEST or sum(t.n_elements for t in graph.nodes) > 1 << 20:
        backends = [gs.DryBackend("A"), gs.DryBackend("B")]
        placed = graph_from_dict(data, lambda t: rng.choice(backends))
        with gs.Scheduler(backends, policy=rng.choice(("default", "seed"))) as scheduler:
            try:
                scheduler.plan(placed).verify()
            except gs.HazardError:
                raise
            except gs.Error:
                return "refused"
        return "planned"
    expected = in_memory_of_their_own(data)
    policy, n_backends = rng.choice(("default", "seed")), rng.randint(1, 3)
    found = scheduled(data, policy, n_backends)
    assert found == expected, (f"policy {policy}, {n_backends} backends: "
                               f"{[graph.tensors[i] for i in expected or () if (found or {}).get(i) != expected[i]]}")
    return "computed" if expected is not None else "planned"
