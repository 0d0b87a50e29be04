"""Plan files: plans as JSON, to be made on one machine and used on another.

A file holds a plan and its program, the fingerprint of the graph, and what the planner knew of the backends: their
order, over which sources their kernels can write, the memory that each can read, their answers to support queries, and
the buffers of residents.  Another graph or other backends are refused, with an error that names the difference.  Files
are not trusted: every defect of one raises a `gs.Error`, and `load_plan` verifies the plan.  A pickle also holds the
graph, what each backend refuses, and its work memory; recorded.py makes backends from that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, cast

import numpy as np

from ggml_sched._core import PlanData, plan_from_values, plan_values
from ggml_sched._files import write_text
from ggml_sched._graph import BackendBase, Graph, Tensor, measure_buffer
from ggml_sched.backend import Backend, Buffer, checked_backends
from ggml_sched.errors import FileFormatError, GraphError, PlacementError
from ggml_sched.graph.graphfile import check_text, graph_from_dict, graph_to_dict
from ggml_sched.planning.compiler import arrays_of
from ggml_sched.planning.fallbacks import refusals_of
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import bank_of, program_values
from ggml_sched.planning.recorded import BackendDescription, PlanFile, recorded_backends

__all__ = ["load_plan", "plan_from_dict", "plan_to_dict", "save_plan"]

FORMAT = "ggml-sched plan"
VERSION = 3
"""The version of a file with stores.  Without them a plan with fusion groups is written as version 2, any other as
version 1, which older releases read."""
MAX_FILE_BYTES = 1 << 30
"""A larger plan file is refused, before it takes more memory than this."""


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON; an existing file is replaced atomically."""
    write_text(path, json.dumps(plan_to_dict(plan, plan.given_graph), separators=(",", ":")))


def load_plan(path: str | os.PathLike[str], graph: Graph, backends: Sequence[Backend]) -> Plan:
    """Load and verify the plan of a file (`Plan.save`), for an equal graph over the same backends.

    Give the plan to `Scheduler.adopt` to use it.  Raises FileFormatError for a file that holds no plan, GraphError for
    another graph, PlacementError for other backends or other buffers of residents, HazardError for an unsound plan.
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"not a Graph: {graph!r}")
    backends = checked_backends(backends, "load_plan takes a sequence of backends: load_plan(path, graph, [backend])")
    path = os.fsdecode(path)
    plan = plan_from_dict(_parsed(path), graph, backends, path)
    plan.verify()
    return plan


def _parsed(path: str) -> object:
    """The parsed JSON of a file; FileFormatError for a file that is too large or not JSON."""
    with open(path, "rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise FileFormatError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not JSON: {error}") from error


def plan_to_dict(plan: Plan, given: Graph | None = None) -> PlanFile:
    """The content of a plan file as plain values.

    `given` is the graph that `load_plan` must be given for this file: `plan.given_graph`, or by default `plan.graph`.
    """
    graph, data, backends = plan.graph, plan.data, plan.backends
    given = graph if given is None else given
    return {
        "format": FORMAT,
        "version": VERSION if any(b.is_store for b in backends) else 2 if data.groups else 1,
        "policy": plan.policy,
        "graph": f"{given.fingerprint:032x}",
        "order": None if graph is given else [given.position_of(node) for node in graph.nodes],
        "backends": _describe_backends(graph, backends),
        "needs": _needs(graph, data, backends),
        "residents": _describe_residents(graph, backends),
        "owners": _owners(graph, backends),
        "plan": plan_values(data),
        "program": program_values(plan.program),
        "assigned_by": plan.assigned_by,
    }


def plan_from_dict(data: object, given: Graph, backends: Sequence[Backend], where: str = "plan") -> Plan:
    """The plan that a parsed file holds; `load_plan` verifies it.

    Raises FileFormatError if `data` is not a plan, GraphError for another graph, PlacementError for other backends or
    other buffers of residents.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileFormatError(f"{where}: not a plan of ggml-sched")
    if data.get("version") not in (1, 2, VERSION):
        raise FileFormatError(f"{where}: version {data.get('version')!r} of the format, this is {VERSION}")
    if not isinstance(data.get("policy"), str):
        raise FileFormatError(f"{where}: no policy")
    if not isinstance(data.get("assigned_by"), str | None):
        raise FileFormatError(f"{where}: assigned_by is not a text")
    for field in ("policy", "assigned_by"):
        check_text(data.get(field), f"{where}: {field}")
    if data.get("graph") != f"{given.fingerprint:032x}":
        raise GraphError(f"{where}: made for graph {data.get('graph')}, this one is {given.fingerprint:032x}")
    graph = _ordered(data.get("order"), given, where)
    _compare_backends(data.get("backends"), _describe_backends(graph, backends), where)
    _compare_residents(data.get("residents"), _describe_residents(graph, backends), graph, where)
    _compare_owners(data.get("owners"), graph, backends, where)
    try:
        made = plan_from_values(data.get("plan"), len(graph))
    except GraphError as error:
        raise FileFormatError(f"{where}: {error}") from error
    if made.n_tensors != len(graph.tensors) or len(made.buffer_sizes) != len(backends):
        raise FileFormatError(f"{where}: {made.n_tensors} tensors over {len(made.buffer_sizes)} backends, not "
                              f"{len(graph.tensors)} over {len(backends)}")
    _compare_tensors(data["plan"], graph, made, where)
    needs = _needs(graph, made, backends)
    if data.get("needs") != needs:
        raise PlacementError(f"{where}: support queries have other results than when the plan was made: "
                             f"{_first_difference(data.get('needs'), needs, graph)}")
    _check_memory(data["plan"], needs, graph, made, backends, where)
    _compare_groups(graph, made, backends, where)
    plan = Plan(graph, made, tuple(backends), data["policy"], given, data.get("assigned_by"))
    if data.get("program") != program_values(plan.program):
        raise FileFormatError(f"{where}: the program is not the one that this plan gives")
    return plan


def _ordered(order: object, graph: Graph, where: str) -> Graph:
    """The graph with its nodes in the order that a file gives: a list of positions, or None for the graph's own."""
    if order is None:
        return graph
    if not isinstance(order, list) or not all(type(k) is int and 0 <= k < len(graph) for k in order):
        raise FileFormatError(f"{where}: no order of {len(graph)} nodes")
    try:
        return graph.with_order([graph.nodes[k] for k in order])
    except GraphError as error:
        raise FileFormatError(f"{where}: {error}") from error


def _compare_tensors(values: dict[str, Any], graph: Graph, made: PlanData, where: str) -> None:
    """Raise FileFormatError if a tensor's op, view offset or number of sources is not that of the graph.

    A node that reuses memory in place is no view in the graph; in the file its view offset is its distance from the
    start of that memory.
    """
    arrays = arrays_of(graph)
    offsets, places = arrays["view_offs"].tolist(), values["offset"]
    for i, root in enumerate(values["root"][:made.n_tensors]):
        if made.is_inplace(i) and root >= 0:
            offsets[i] = places[i] - places[root]
    for field, expected in (("op", arrays["op"].tolist()), ("view_offs", offsets),
                            ("src", np.diff(arrays["src_begin"]).tolist())):
        found = [len(row) for row in values["src"]] if field == "src" else values[field]
        for i, of_tensor in enumerate(expected):
            if found[i] != of_tensor:
                what = "sources" if field == "src" else field
                raise FileFormatError(
                    f"{where}: {graph.tensors[i].name!r} has {what} {found[i]}, the graph {of_tensor}")


def _check_memory(values: dict[str, Any], needs: list[list[int]], graph: Graph, made: PlanData,
                  backends: Sequence[BackendBase], where: str) -> None:
    """Raise FileFormatError if an id has memory of a wrong size, or shares another's and is neither a view nor written
    in place.  `needs` is the result of `_needs`."""
    least = list(values["size"])    # for each id that owns memory, the bytes that in-place reuse never frees
    for i, place in enumerate(values["offset"]):
        if made.is_inplace(i):
            owner = _owner(values["root"], i)
            least[owner] = min(least[owner], place - values["offset"][owner] + values["size"][i])
    for i, (_, need) in enumerate(needs):
        is_view = i < made.n_tensors and graph.tensors[i].is_view
        if made.is_inplace(i) + is_view != (made.root(i) >= 0):     # refuses an id that is both, too
            raise FileFormatError(f"{where}: id {i} shares the memory of id {made.root(i)}")
        if is_view or made.offset(i) < 0:
            continue
        alignment, size, rest = backends[made.memory_index(i)].alignment, values["size"][i], values["rest"][i]
        need += _margin(graph, made, i)
        if size != -(-need // alignment) * alignment or made.root(i) < 0 and not least[i] <= rest <= size:
            raise FileFormatError(f"{where}: id {i} needs {need} bytes, aligned to {alignment}; it has {size}, "
                                  f"of which {rest} stay")


def _owner(roots: list[int], i: int) -> int:
    """The id whose memory id i shares; i itself if it shares none."""
    while roots[i] >= 0:
        i = roots[i]
    return i


# -- descriptions of graph and backends ------------------------------------------------------------------------


def _describe_backends(graph: Graph, backends: Sequence[Backend]) -> list[BackendDescription]:
    """The properties of each backend on which a plan depends: sizes, the sources that its kernels can overwrite, the
    indices of the backends whose memory it reads, and the margin of a store."""
    ops = sorted({node.op for node in graph.nodes if node.computes})
    found: list[BackendDescription] = [{
        "name": b.name,
        "alignment": b.alignment,
        "max_buffer_size": None if b.max_buffer_size is None else index(b.max_buffer_size),
        "concurrent_copies": bool(b.concurrent_copies),
        "inplace": {op: index(b.inplace_sources(op)) for op in ops},
        "reads": [k for k, other in enumerate(backends) if other is b or b.supports_buffer(measure_buffer(other))],
    } for b in backends]
    for fields, b in zip(found, backends, strict=True):
        if b.is_store:
            fields["margin"] = index(b.margin)
    return found


def _describe_residents(graph: Graph, backends: Sequence[BackendBase]) -> dict[str, list[Any]]:
    """{id of a resident: [usage of its buffer, indices of the backends that can read it]}; for a weight whose experts
    are in slots also [index of the store, number of the bank]."""
    found: dict[str, list[Any]] = {}
    known: dict[Buffer, list[Any]] = {}
    for i, t in enumerate(graph.tensors):
        buffer = t.buffer
        if buffer is None or not _is_resident(t):
            continue
        if buffer not in known:
            readers = [k for k, b in enumerate(backends) if buffer.backend is b or b.supports_buffer(buffer)]
            known[buffer] = [buffer.usage, readers]
            bank = bank_of(buffer)
            if bank is not None:
                store = next((k for k, b in enumerate(backends) if b is bank.store), -1)
                known[buffer].append([store, bank.number])
        found[str(i)] = known[buffer]
    return found


def _owners(graph: Graph, backends: Sequence[BackendBase]) -> dict[str, int]:
    """{id of a resident: index of the backend that owns its buffer, -1 for one outside the plan}."""
    index_of = {backend: k for k, backend in enumerate(backends)}
    return {str(i): index_of.get(t.buffer.backend, -1) for i, t in enumerate(graph.tensors)
            if t.buffer is not None and _is_resident(t)}


def _is_resident(t: Tensor) -> bool:
    """Whether a tensor is no view and has memory that no plan gave it."""
    return not t.is_view and t.buffer is not None and (t.lease is None or not t.lease.transient)


def _needs(graph: Graph, data: PlanData, backends: Sequence[BackendBase]) -> list[list[int]]:
    """For each id: [1 if its backend supports it, else 0; the bytes that the backend allocates for it, 0 for none]."""
    found = []
    copies = [*data.copies, *(data.copies[c] for c in data.slot_copies)]
    like = [*graph.tensors, *(graph.tensors[i] for i, _ in copies)]
    for i, t in enumerate(like):
        runs, holder = data.backend_index(i), data.memory_index(i)
        supported = i >= data.n_tensors or not t.computes or runs < 0 or bool(backends[runs].supports_op(t))
        has_memory = holder >= 0 and (i >= data.n_tensors or not t.is_view)
        found.append([int(supported), index(backends[holder].alloc_size(t)) if has_memory else 0])
    return found


def _margin(graph: Graph, made: PlanData, i: int) -> int:
    """The bytes that a copy which a store fetches takes beyond those of its weight; 0 for other ids."""
    if i < made.n_tensors:
        return 0
    owner = graph.tensors[made.copies[made.copy_of(i)][0]].root.backend
    return owner.margin if owner is not None and owner.is_store else 0


def _compare_groups(graph: Graph, data: PlanData, backends: Sequence[BackendBase], where: str) -> None:
    """Raise PlacementError for a fusion group of the file that its backend does not compute as one kernel."""
    groups_of: dict[int, set[tuple[int, ...]]] = {}
    for group in data.groups:
        b = data.backend_index(graph.id_of(graph.nodes[group[0]]))
        if b not in groups_of:
            groups_of[b] = set() if b < 0 else {tuple(members) for members in backends[b].fusion_groups(graph)}
        if group not in groups_of[b]:
            named = ", ".join(repr(graph.nodes[k].name) for k in group)
            raise PlacementError(f"{where}: backend {backends[b].name!r} does not compute the nodes {list(group)} "
                                 f"({named}) as one; the plan was made for that")


def _compare_backends(old: object, new: list[BackendDescription], where: str) -> None:
    """Raise PlacementError for the first difference of the given backends, `new`, from those of a file, `old`."""
    if not isinstance(old, list) or not all(isinstance(b, dict) for b in old):
        raise FileFormatError(f"{where}: no list of backends")
    if len(old) != len(new):
        names = ", ".join(str(b.get("name")) for b in old)
        raise PlacementError(f"{where}: made for {len(old)} backends ({names}), not for {len(new)}")
    for k, (a, b) in enumerate(zip(old, new, strict=True)):
        for field, value in (b | {"margin": b.get("margin")}).items():
            if a.get(field) != value:
                what = f"backend {k}, {b['name']!r}, has {field} {value!r}"
                raise PlacementError(f"{where}: {what}; the plan was made for {a.get(field)!r}")


def _compare_residents(old: object, new: dict[str, list[Any]], graph: Graph, where: str) -> None:
    """Raise PlacementError for the first resident with another buffer in the graph, `new`, than in a file, `old`."""
    if not isinstance(old, dict):
        raise FileFormatError(f"{where}: no residents")
    names = {str(i): t.name for i, t in enumerate(graph.tensors)}
    for i in sorted(old.keys() | new.keys(), key=lambda i: (len(i), i)):
        if old.get(i) != new.get(i):
            name = names.get(i, i[:40])
            raise PlacementError(f"{where}: tensor {name!r} has memory {_buffer_text(new.get(i))}; the plan was made "
                                 f"for it {_buffer_text(old.get(i))}")


def _compare_owners(old: object, graph: Graph, backends: Sequence[Backend], where: str) -> None:
    """Raise PlacementError for the first resident whose buffer belongs to another backend in the graph than in a file,
    `old`; files of earlier releases do not say to which."""
    if old is None:
        return
    new = _owners(graph, backends)
    if not isinstance(old, dict) or old.keys() != new.keys():
        raise FileFormatError(f"{where}: no owners of {len(new)} residents")
    for i, owner in new.items():
        if old[i] != owner:
            raise PlacementError(f"{where}: the memory of tensor {graph.tensors[int(i)].name!r} belongs to "
                                 f"{_owner_text(owner, backends)}; the plan was made for it in memory of "
                                 f"{_owner_text(old[i], backends)}")


def _owner_text(owner: object, backends: Sequence[Backend]) -> str:
    """A description, for messages, of the owner of a resident in a plan file."""
    if owner == -1:
        return "a backend outside the plan"
    if isinstance(owner, int) and 0 <= owner < len(backends):
        return f"backend {owner}, {backends[owner].name!r}"
    return f"backend {owner!r}"


def _buffer_text(found: object) -> str:
    """A description, for messages, of the buffer of a resident in a plan file."""
    if found is None:
        return "of no buffer"
    if isinstance(found, list) and (len(found) == 2 or len(found) == 3 and isinstance(found[2], list)):
        return f"of usage {found[0]!r} that backends {found[1]} read" + (
            f", with experts in slots of the store and bank {found[2]}" if len(found) == 3 else "")
    return repr(found)


def _first_difference(old: object, new: list[list[int]], graph: Graph) -> str:
    """For a message: the first id for which the results of `_needs` in a file, `old`, and now, `new`, differ."""
    if not isinstance(old, list) or len(old) != len(new):
        return f"there are {len(new)} ids"
    i = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    name = graph.tensors[i].name if i < len(graph.tensors) else f"copy {i - len(graph.tensors)}"
    return f"{name!r} is {'not ' if not new[i][0] else ''}supported and takes {new[i][1]} bytes; the file says {old[i]}"


# -- pickles ----------------------------------------------------------------------------------------


def reduce_plan(plan: Plan) -> tuple[Callable[..., Plan], tuple[Any, ...]]:
    """For pickle: the function that makes the plan again, and its arguments, the caller's graph and the content of a
    plan file with the nodes that each backend refuses, its work memory and its worker, and the names of owners of
    residents outside the plan."""
    values = plan_to_dict(plan, plan.given_graph)
    values["refused"] = refusals_of(plan)
    values["work_sizes"], values["host_work_sizes"] = [*plan.work_sizes], [*plan.host_work_sizes]
    values["workers"] = [backend.worker for backend in plan.backends]
    values["outside"] = {i: cast("Backend", plan.graph.tensors[int(i)].backend).name
                         for i, owner in values["owners"].items() if owner < 0}
    return _restored, (graph_to_dict(plan.given_graph), values)


def _restored(graph_dict: dict[str, Any], plan_dict: PlanFile) -> Plan:
    """The plan of a pickle, over recorded backends."""
    given = graph_from_dict(graph_dict, where="pickled graph")
    graph = _ordered(plan_dict["order"], given, "pickled plan")
    return plan_from_dict(plan_dict, given, recorded_backends(plan_dict, graph), "pickled plan")
