"""The JSON graph format: `{"meta", "tensors", "nodes", "leafs"}`, plain or gzipped.

A tensor has the fields `name op type ne nb src view_src view_offs flags op_params resident deps`.  `src` lists the ids
of its sources, -1 for an empty source slot; `deps` the ids of its alloc dependencies.  Files are not trusted: a defect
raises a `gs.Error` that names the tensor and the field.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from io import BufferedReader
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

from ggml_sched._files import replace_file
from ggml_sched._graph import BackendBase, Context, Graph, Tensor, bind_resident
from ggml_sched.backend import Buffer
from ggml_sched.errors import FileFormatError, GraphError

__all__ = ["check_text", "graph_from_dict", "graph_to_dict", "load_graph", "save_graph"]


class StandIn(Protocol):
    """An object that stands for a backend, such as a `Device`."""

    @property
    def backend(self) -> BackendBase: ...


Chosen: TypeAlias = "BackendBase | StandIn"
"""The result of `place` for a resident."""

MAX_FILE_BYTES = 1 << 30
"""A graph file that is larger, after unpacking, is refused."""


def load_graph(path: str | os.PathLike[str], place: Callable[[Tensor], Chosen] | None = None) -> Graph:
    """Read a graph; `graph.tensors[i]` is tensor i of the file.

    `place(tensor)` returns the backend of a resident tensor (weight, KV cache), or a `Device`, which stands for its
    backend: `place=fit.place`.  The tensor gets an address on that backend, but no memory: enough to plan, not to
    compute.  Raises FileFormatError or GraphError.
    """
    path = os.fsdecode(path)
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            text = _read(file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(f"{path}: not a complete gzip file: {error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise FileFormatError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not JSON: {error}") from error
    graph = graph_from_dict(data, where=path)
    check_text(graph.meta, f"{path}: meta")
    if place is not None:
        _place_residents(graph, place)
    return graph


def _read(file: BufferedReader | gzip.GzipFile) -> bytes:
    """The bytes of a file, or somewhat more than MAX_FILE_BYTES of a larger one.

    It is read in parts, because read(n) allocates n bytes beforehand.
    """
    parts, total = [], 0
    while total <= MAX_FILE_BYTES and (part := file.read(1 << 20)):
        parts.append(part)
        total += len(part)
    return b"".join(parts)


def graph_from_dict(data: Any, place: Callable[[Tensor], Chosen] | None = None, where: str = "graph",
                    ctx: Context | None = None) -> Graph:
    """The graph of a parsed file; its tensors are made in `ctx` (None: a new context)."""
    tensors = _list(data, "tensors", where)
    nodes, leafs = _list(data, "nodes", where), _list(data, "leafs", where)
    meta = data.get("meta", {})
    if not isinstance(meta, dict):
        raise FileFormatError(f"{where}: meta is not an object")
    if ctx is None:
        ctx = Context(str(meta.get("model", os.path.basename(where))))
    by_id: dict[int, Tensor] = {}
    for i in _creation_order(tensors, where):
        by_id[i] = _tensor(ctx, tensors, i, by_id, where)
    made = [by_id[i] for i in range(len(tensors))]
    for i, fields in enumerate(tensors):
        for k in _list(fields, "deps", f"{where}: tensor {i}") if "deps" in fields else ():
            _keep(ctx, made[_check_id(k, len(tensors), f"{where}: tensor {i}: deps")], made[i], f"{where}: tensor {i}")
    ids = {"nodes": nodes, "leafs": leafs}
    for field, members in ids.items():
        for k in members:
            _check_id(k, len(tensors), f"{where}: {field}")
    graph = Graph.from_order(made, [made[k] for k in nodes], [made[k] for k in leafs], meta)
    if place is not None:
        _place_residents(graph, place)
    return graph


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph in the format that `load_graph` reads; gzipped when the path ends in .gz.  An existing file is
    replaced atomically."""
    text = json.dumps(graph_to_dict(graph), separators=(",", ":"), sort_keys=True).encode()
    if os.fsdecode(path).endswith(".gz"):
        # mtime=0 leaves out the time stamp, so that equal graphs give equal files.
        text = gzip.compress(text, mtime=0)
    replace_file(path, [text])


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """A graph as plain Python values, as `save_graph` writes them."""
    ids, deps = {t: i for i, t in enumerate(graph.tensors)}, graph.deps
    return {
        "meta": graph.meta,
        "tensors": [_fields(t, ids, graph.flags_of(t), deps.get(t, ())) for t in graph.tensors],
        "nodes": [ids[t] for t in graph.nodes],
        "leafs": [ids[t] for t in graph.leafs],
    }


def _fields(t: Tensor, ids: dict[Tensor, int], flags: frozenset[str], deps: tuple[Tensor, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": t.name, "op": t.op, "type": str(t.type), "ne": list(t.ne), "nb": list(t.nb)}
    if t.src:
        fields["src"] = [-1 if s is None else ids[s] for s in t.src]
    if t.view_src is not None:
        fields["view_src"], fields["view_offs"] = ids[t.view_src], t.view_offs
    if flags:
        fields["flags"] = sorted(flags)
    if t.op_params:
        fields["op_params"] = list(t.op_params)
    if t.resident:
        fields["resident"] = t.resident
    if deps:
        fields["deps"] = [ids[s] for s in deps]
    return fields


def _list(data: Any, field: str, where: str) -> list[Any]:
    if not isinstance(data, dict) or not isinstance(data.get(field), list):
        raise FileFormatError(f"{where}: no list {field!r}")
    found: list[Any] = data[field]
    return found


def _check_id(k: Any, count: int, what: str) -> int:
    if type(k) is not int or not 0 <= k < count:
        raise FileFormatError(f"{what}: {k!r} is not the id of one of {count} tensors")
    return k


def _needs(fields: Any, i: int, count: int, where: str) -> list[int]:
    """The ids of the tensors that must be made before tensor i: its sources and its root."""
    what = f"{where}: tensor {i}"
    if not isinstance(fields, dict):
        raise FileFormatError(f"{what} is not an object")
    src = fields.get("src", [])
    if not isinstance(src, list):
        raise FileFormatError(f"{what}: src is not a list")
    needs = [_check_id(k, count, f"{what}: src") for k in src if k != -1]
    if fields.get("view_src", -1) != -1:
        needs.append(_check_id(fields["view_src"], count, f"{what}: view_src"))
    return needs


def _creation_order(tensors: list[Any], where: str) -> list[int]:
    """All ids in an order in which tensors can be made: each after those it refers to.  GraphError on a cycle."""
    needs = [_needs(fields, i, len(tensors), where) for i, fields in enumerate(tensors)]
    state = bytearray(len(tensors))  # 0: not visited, 1: waits for tensors that it refers to, 2: in `order`
    order = []
    for start in range(len(tensors)):
        stack = [start]
        while stack:
            i = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            missing = [k for k in needs[i] if state[k] != 2]
            if not missing:
                state[i] = 2
                order.append(i)
                stack.pop()
                continue
            if state[i] == 1:
                name = tensors[i].get("name", "")
                raise GraphError(f"{where}: tensor {i} {name!r} depends on itself: the graph has a cycle")
            state[i] = 1
            stack.extend(missing)
    return order


def _tensor(ctx: Context, tensors: list[Any], i: int, made: dict[int, Tensor], where: str) -> Tensor:
    fields = tensors[i]
    try:
        view = fields.get("view_src", -1)
        return ctx.restore(
            fields["op"], fields["type"], fields["ne"], fields["nb"],
            [None if k == -1 else made[k] for k in fields.get("src", [])],
            None if view == -1 else made[view], fields.get("view_offs", 0),
            fields.get("op_params", ()), fields.get("flags", ()), fields.get("name", ""),
            fields.get("resident", ""))
    except GraphError as error:
        raise GraphError(f"{where}: tensor {i}: {error}") from error
    except KeyError as error:
        raise FileFormatError(f"{where}: tensor {i} has no field {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"{where}: tensor {i}: {error}") from error


def check_text(value: Any, what: str) -> None:
    """FileFormatError for a lone surrogate in a value of JSON, which can write it: no text that is encoded can have it.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FileFormatError(f"{what}: {error}") from error
    except UnicodeEncodeError as error:
        raise FileFormatError(f"{what} {value!r} has the lone surrogate U+{ord(error.object[error.start]):04X}"
                              ) from error


def _keep(ctx: Context, t: Tensor, node: Tensor, what: str) -> None:
    try:
        ctx.keep_until(t, node)
    except GraphError as error:
        raise GraphError(f"{what}: {error}") from error


class _ResidentSpace(Buffer):
    """A buffer without memory, which only gives resident tensors addresses on a backend, for planning."""


def _place_residents(graph: Graph, place: Callable[[Tensor], Chosen]) -> None:
    groups: dict[tuple[BackendBase, str], list[Tensor]] = {}
    for t in graph.tensors:
        if t.resident and t.view_src is None:
            chosen = place(t)
            backend = chosen if isinstance(chosen, BackendBase) else getattr(chosen, "backend", None)
            if not isinstance(backend, BackendBase):
                raise TypeError(f"place({t.name!r}) returned {chosen!r}, not a Backend")
            groups.setdefault((backend, t.resident), []).append(t)
    for (backend, usage), members in groups.items():
        ends = [0]
        for t in members:
            ends.append(-(-(ends[-1] + t.nbytes) // backend.alignment) * backend.alignment)
            if ends[-1] >= 1 << 63:
                raise GraphError(f"tensor {t.name!r} of {t.nbytes} bytes, after {ends[-2]} bytes of others on backend "
                                 f"{backend.name!r}, leaves the 63 bits of an offset")
        buffer = _ResidentSpace(backend, ends[-1], usage="weights" if usage == "weight" else "any")
        for t, (offset, _) in zip(members, pairwise(ends), strict=True):
            bind_resident(t, buffer, offset)
