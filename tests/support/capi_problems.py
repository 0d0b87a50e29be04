"""Converts Python's planning problems to gs_problem, and plan_view of a gs_plan to the values of PlanData."""

import itertools

import numpy as np
from capi_calls import N_OPS, Problem, policy_struct

import ggml_sched as gs
from ggml_sched._core import Devices, PlanData, Policy, Request, make_plan
from ggml_sched._graph import measure_buffer, op_numbers

VIEWS = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


def problem_of(graph: gs.Graph, backends, policy: Policy, assigned=None) -> Problem:
    """The gs_problem of a Python problem, from one query at a time: backends, residents and assignments."""
    ids = {t: i for i, t in enumerate(graph.tensors)}
    infos = []
    for b in backends:
        masks = np.zeros(N_OPS, np.uint64)
        for name, number in op_numbers().items():
            masks[number] = b.inplace_sources(name) & 0xFFFFFFFFFFFFFFFF
        infos.append((b.alignment, b.max_buffer_size or 0, masks))
    buffers: list[gs.Buffer] = []
    resident, usage, buffer = [], [], []
    for t in graph.tensors:
        root = t.view_src or t
        if root.buffer is None:
            resident.append(-1), usage.append(0), buffer.append(0)
            continue
        if root.buffer not in buffers:
            buffers.append(root.buffer)
        readers = [k for k, b in enumerate(backends) if reads(b, root.buffer)]
        owner = [k for k, b in enumerate(backends) if b is root.buffer.backend]
        resident.append((owner or readers)[0])
        usage.append(root.buffer.usage == "weights")
        buffer.append(buffers.index(root.buffer))
    groups = sorted((group[0], b, tuple(group)) for b, backend in enumerate(backends)
                    for group in backend.fusion_groups(graph))
    return Problem(
        policy_struct(policy), infos, len(buffers), len(groups),
        resident=resident, usage=usage, buffer=buffer if buffers else None,
        reads_buffer=[[reads(b, one) for one in buffers] for b in backends] if buffers else None,
        reads=[[b is c or b.supports_buffer(measure_buffer(c)) for c in backends] for b in backends],
        assigned=None if not assigned else [
            next((k for k, b in enumerate(backends) if b is assigned.get(t)), -1) for t in ids],
        supports=[[t.op == "NONE" or t.op in VIEWS or b.supports_op(t) for t in graph.tensors] for b in backends],
        offloads=[[t.op != "NONE" and t.op not in VIEWS and b.offload_op(t) for t in graph.tensors] for b in backends],
        nbytes=[[b.alloc_size(t) for t in graph.tensors] for b in backends],
        group_backend=[b for _, b, _ in groups] or None,
        group_begin=[0, *itertools.accumulate(len(group) for *_, group in groups)] if groups else None,
        group_member=[k for *_, group in groups for k in group] or None)


def reads(backend: gs.Backend, buffer: gs.Buffer) -> bool:
    return buffer.backend is backend or backend.supports_buffer(buffer)


def python_plan(graph: gs.Graph, backends, policy: Policy, assigned=None) -> PlanData:
    return make_plan(Request(graph, Devices(tuple(backends)), assigned), policy)


def values_of(view: dict) -> dict:
    """plan_view, after plan_find_exclusive, as the values that PlanData pickles (`__reduce__`)."""
    ends = [0, *view["split_inputs"]]
    src = [view["src"][a:b] for a, b in itertools.pairwise(view["src_begin"])]
    chunks = [view["chunk_nbytes"][first:first + n] for *_, first, n in view["arena"]]
    return {
        "n_backends": view["n_backends"], "n_tensors": view["n_tensors"], "assign": view["assign"],
        "reason": view["reason"],
        "splits": [[b, i, j, view["inputs"][ends[k]:ends[k + 1]]] for k, (b, i, j) in enumerate(
            zip(view["split_backend"], view["split_start"], view["split_stop"], strict=True))],
        "copies": [list(row) for row in zip(*(view[f"copy_{name}"] for name in ("like", "from", "backend", "kept")),
                                            strict=True)],
        "places": view["slot_copy"], "home": view["arena_of"],
        "write_backs": [list(row) for row in zip(view["back_node"], view["back_copy"], strict=True)],
        "src": src,
        "arenas": [[live, stride, method, sizes] for (_, live, stride, method, *_), sizes in zip(
            view["arena"], chunks, strict=True)],
        "groups": [view["group_member"][a:b] for a, b in itertools.pairwise(view["group_begin"])],
        **{name: view[name] for name in ("root", "birth", "death", "trimmed", "size", "view_offs", "offset",
                                         "rest", "op", "flags", "state", "seq")},
    }
