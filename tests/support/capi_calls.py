"""The C API through ctypes: the function table behind the capsule, and wrappers for graphs, problems and plans.

Written from ggml_sched/api.h; `functions()` refuses a table whose structs are not of the sizes declared here.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ubyte,
    c_uint64,
    c_void_p,
)

import numpy as np

import ggml_sched as gs
from ggml_sched import _capi
from ggml_sched._core import Policy
from ggml_sched._graph import op_numbers

OK, NO_HOST_MEMORY, OVERFLOW, OUT_OF_MEMORY, BAD_ARGUMENT, BAD_PLACEMENT, UNSUPPORTED_OP = 0, -1, -2, -3, -4, -5, -6
N_OPS = 256
LAYOUT = np.dtype([("ne", "<i8", 4), ("nb", "<i8", 4), ("nbytes", "<i8"), ("type", "<i4"), ("op", "<i4")])


class PolicyStruct(Structure):
    _fields_ = [(name, c_int32) for name in ("placement", "offsets", "reuse", "leafs_first", "stream", "n_copies")]


class ArenaResult(Structure):
    _fields_ = [(name, c_int64) for name in ("nbytes", "live_bytes", "stride")] + [
        (name, c_int32) for name in ("method", "first_chunk", "n_chunks")]


class Failure(Structure):
    """gs_error."""

    _fields_ = [(name, c_int32) for name in ("status", "tensor", "backend", "index")] + [
        ("value", c_int64), ("limit", c_int64), ("text", c_char * 256)]

    @property
    def message(self) -> str:
        return self.text.decode()


class GraphSize(Structure):
    _fields_ = [(name, c_int32) for name in ("n_tensors", "n_nodes", "n_leafs", "n_src", "n_params", "n_deps")]


class GraphArrays(Structure):
    _fields_ = [(name, c_void_p) for name in (
        "layout", "view_src", "view_offs", "flags", "src_begin", "src", "slot", "param_begin", "param", "node", "leaf",
        "dep_begin", "dep")]


class BackendInfo(Structure):
    _fields_ = [("name", c_char_p), ("alignment", c_int64), ("max_buffer", c_int64), ("inplace", c_void_p)]


class ProblemStruct(Structure):
    _fields_ = [("policy", PolicyStruct), *((name, c_int32) for name in ("n_backends", "n_buffers", "n_groups")),
                ("backends", POINTER(BackendInfo)), *((name, c_void_p) for name in (
                    "resident", "usage", "buffer", "reads_buffer", "reads", "assigned", "supports", "offloads",
                    "nbytes", "group_backend", "group_begin", "group_member"))]


COUNTS = ("n_backends", "n_tensors", "n_copies", "n_slots", "n", "n_seq", "n_splits", "n_inputs", "n_write_backs",
          "n_chunks", "n_groups")
PLAN_ARRAYS = {
    "assign": ("<i4", "n_tensors"), "reason": ("u1", "n_tensors"),
    "split_backend": ("<i4", "n_splits"), "split_start": ("<i4", "n_splits"), "split_stop": ("<i4", "n_splits"),
    "split_inputs": ("<i4", "n_splits"), "inputs": ("<i4", "n_inputs"), "copy_like": ("<i4", "n_copies"),
    "copy_from": ("<i4", "n_copies"), "copy_backend": ("<i4", "n_copies"), "copy_kept": ("<i4", "n_copies"),
    "slot_copy": ("<i4", "n_slots"), "back_node": ("<i4", "n_write_backs"), "back_copy": ("<i4", "n_write_backs"),
    "like": ("<i4", "n"), "arena_of": ("<i4", "n"), "root": ("<i4", "n"), "birth": ("<i4", "n"), "death": ("<i4", "n"),
    "trimmed": ("<i4", "n"), "src_begin": ("<i4", "n + 1"), "src": ("<i4", "src"), "size": ("<i8", "n"),
    "view_offs": ("<i8", "n"), "offset": ("<i8", "n"), "rest": ("<i8", "n"), "op": ("u1", "n"), "flags": ("u1", "n"),
    "state": ("u1", "n"), "seq": ("<i4", "n_seq"), "arena": ("arena", "n_backends"),
    "chunk_nbytes": ("<i8", "n_chunks"),
    "group_begin": ("<i4", "group"), "group_member": ("<i4", "member")}


class PlanArrays(Structure):
    _fields_ = [*((name, c_int32) for name in COUNTS), *((name, c_void_p) for name in PLAN_ARRAYS)]


class PackResult(Structure):
    _fields_ = [(name, c_int64) for name in ("arena", "bound", "proven", "tries")] + [
        (name, c_int32) for name in ("method", "optimal")]


class TypeTraits(Structure):
    _fields_ = [("block_size", c_int32), ("type_size", c_int32)]


class Node(Structure):
    """gs_node; `src` are addresses of nodes, `data` is an address."""

    _fields_ = [("ne", c_int64 * 4), ("nb", c_int64 * 4), ("nbytes", c_int64), ("type", c_int32), ("full_op", c_int32),
                ("op", c_int32), ("sub_op", c_int32), ("params", c_int32 * 16), ("flags", c_int32), ("n_src", c_int32),
                ("src", c_void_p * 10), ("data", c_void_p)]


class Location(Structure):
    _fields_ = [(name, c_int32) for name in ("id", "backend", "chunk")] + [("offset", c_int64)]


class Wait(Structure):
    _fields_ = [(name, c_int32) for name in ("step", "back")]


class Read(Structure):
    _fields_ = [(name, c_int32) for name in ("position", "slot", "location", "n_slots")]


class Step(Structure):
    _fields_ = [*((name, c_int32) for name in (
        "kind", "backend", "tensor", "ids", "first", "last", "location", "n_slots", "read", "n_reads", "wait",
        "n_waits", "if_changed", "awaited")), ("start", c_int64), ("nbytes", c_int64)]


class Program(Structure):
    """gs_program."""

    _fields_ = [*((name, c_int32) for name in (
        "n_steps", "n_slots", "n_reads", "n_waits", "n_inputs", "n_ids", "copy_slots", "reach")),
        ("steps", POINTER(Step)), ("locations", POINTER(Location)), ("reads", POINTER(Read)), ("waits", POINTER(Wait)),
        ("inputs", POINTER(c_int32)), ("address", POINTER(c_void_p))]


class Run(Structure):
    _fields_ = [*((name, c_int32) for name in ("n_nodes", "step", "turn", "n_groups")), *((name, c_void_p) for name in (
        "nodes", "ids", "group_begin", "group_member", "needed"))]


class BackendTable(Structure):
    """gs_backend; the functions are addresses."""

    _fields_ = [("context", c_void_p), ("name", c_char_p), ("concurrent_copies", c_int32),
                *((name, c_void_p) for name in (
        "alloc", "free", "write", "read", "copy", "run", "synchronize", "event_new", "event_free", "event_record",
        "event_wait", "event_synchronize"))]


SIZES = {"layout": LAYOUT.itemsize, "policy": ctypes.sizeof(PolicyStruct), "arena_result": ctypes.sizeof(ArenaResult),
         "error": ctypes.sizeof(Failure), "graph_size": ctypes.sizeof(GraphSize),
         "graph_arrays": ctypes.sizeof(GraphArrays), "backend_info": ctypes.sizeof(BackendInfo),
         "problem": ctypes.sizeof(ProblemStruct), "plan": ctypes.sizeof(PlanArrays),
         "pack_result": ctypes.sizeof(PackResult)}
LATER_SIZES = {"node": ctypes.sizeof(Node), "location": ctypes.sizeof(Location), "wait": ctypes.sizeof(Wait),
               "read": ctypes.sizeof(Read), "step": ctypes.sizeof(Step), "program": ctypes.sizeof(Program),
               "run": ctypes.sizeof(Run), "backend": ctypes.sizeof(BackendTable)}
ERROR = POINTER(Failure)
CALLS = {
    "graph_new": CFUNCTYPE(c_int, POINTER(GraphSize), POINTER(GraphArrays), POINTER(c_void_p), ERROR),
    "graph_refill": CFUNCTYPE(c_int, c_void_p, POINTER(GraphSize), POINTER(GraphArrays), ERROR),
    "graph_finish": CFUNCTYPE(c_int, c_void_p, ERROR),
    "graph_free": CFUNCTYPE(None, c_void_p),
    "graph_equal": CFUNCTYPE(c_int, c_void_p, c_void_p),
    "graph_same_wiring": CFUNCTYPE(c_int, c_void_p, c_void_p),
    "graph_fingerprint": CFUNCTYPE(c_int, c_void_p, POINTER(c_uint64), POINTER(c_uint64), ERROR),
    "policy_default": CFUNCTYPE(None, POINTER(PolicyStruct)),
    "policy_seed": CFUNCTYPE(None, POINTER(PolicyStruct)),
    "plan_new": CFUNCTYPE(c_int, c_void_p, POINTER(ProblemStruct), POINTER(c_void_p), ERROR),
    "plan_replay": CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, POINTER(ProblemStruct), POINTER(c_void_p),
                             POINTER(c_int), ERROR),
    "plan_find_exclusive": CFUNCTYPE(None, c_void_p),
    "plan_view": CFUNCTYPE(None, c_void_p, POINTER(PlanArrays)),
    "plan_free": CFUNCTYPE(None, c_void_p),
    "pack": CFUNCTYPE(c_int, c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, POINTER(PackResult),
                      ERROR),
    "status_name": CFUNCTYPE(c_char_p, c_int),
    "reason_name": CFUNCTYPE(c_char_p, c_int),
    "pack_method_name": CFUNCTYPE(c_char_p, c_int),
    "op_name": CFUNCTYPE(c_char_p, c_int),
    "op_of_name": CFUNCTYPE(c_int, c_char_p),
    "type_name": CFUNCTYPE(c_char_p, c_int),
    "type_of_name": CFUNCTYPE(c_int, c_char_p),
    "type_traits": CFUNCTYPE(c_int, c_int, POINTER(TypeTraits)),
    "plan_compact": CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_void_p),
    "graph_trim": CFUNCTYPE(c_int, c_void_p, POINTER(GraphArrays), ERROR),
}
LATER_CALLS = {
    "program_new": CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(BackendTable), c_void_p, POINTER(c_void_p), ERROR),
    "program_view": CFUNCTYPE(None, c_void_p, POINTER(Program)),
    "program_set": CFUNCTYPE(c_int, c_void_p, c_int32, c_void_p, c_int64, ERROR),
    "program_touch": CFUNCTYPE(c_int, c_void_p, c_int32, ERROR),
    "program_run": CFUNCTYPE(c_int, c_void_p, ERROR),
    "program_synchronize": CFUNCTYPE(c_int, c_void_p, ERROR),
    "program_read": CFUNCTYPE(c_int, c_void_p, c_int32, c_void_p, c_int64, c_int64, ERROR),
    "program_free": CFUNCTYPE(None, c_void_p),
    "arenas_new": CFUNCTYPE(c_int, POINTER(c_void_p), c_int32, POINTER(BackendTable), POINTER(c_void_p), ERROR),
    "program_new_in": CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p), ERROR),
    "arenas_free": CFUNCTYPE(None, c_void_p),
    "graph_keep_wiring": CFUNCTYPE(c_int, c_void_p, POINTER(GraphArrays), ERROR),
}


class Table(Structure):
    """gs_api."""

    _fields_ = [("major", c_int32), ("minor", c_int32), ("size", c_size_t),
                *((f"size_{name}", c_size_t) for name in SIZES), *CALLS.items(),
                *((f"size_{name}", c_size_t) for name in LATER_SIZES), *LATER_CALLS.items()]


def address_of_table() -> int:
    """The address of the function table that the capsule holds."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    return pointer(_capi.api, b"ggml_sched._capi.api")


@functools.cache
def functions() -> Table:
    table = Table.from_address(address_of_table())
    assert table.major == 2 and table.size >= ctypes.sizeof(Table)
    sizes = SIZES | LATER_SIZES
    assert {name: getattr(table, f"size_{name}") for name in sizes} == sizes
    return table


class Refused(Exception):
    """A function failed: `status` is its return value, `error` its message."""

    def __init__(self, status: int, error: Failure) -> None:
        super().__init__(f"{status}: {error.message}")
        self.status, self.error = status, error


def call(name: str, *arguments) -> None:
    """Call a function that ends in a gs_error; raises Refused."""
    error = Failure(status=1)
    status = getattr(functions(), name)(*arguments, byref(error))
    if status != OK:
        assert error.status == status and error.message, (name, status, error.status, error.message)
        raise Refused(status, error)
    assert error.status == 1, "something was written where nothing failed"


def at(address: int | None, dtype, n: int) -> np.ndarray:
    """A NumPy array over memory of the library, without a copy."""
    dtype = np.dtype(dtype)
    if n == 0 or not address:
        return np.empty(0, dtype)
    return np.frombuffer((c_ubyte * (n * dtype.itemsize)).from_address(address), dtype)


GRAPH_ARRAYS = {"layout": LAYOUT, "view_src": "<i4", "view_offs": "<i8", "flags": "u1", "src_begin": "<i4",
                "src": "<i4", "slot": "u1", "param_begin": "<i4", "param": "<i4", "node": "<i4", "leaf": "<i4",
                "dep_begin": "<i4", "dep": "<i4"}


def arrays_of(graph: gs.Graph) -> dict[str, np.ndarray]:
    """A Python graph as the arrays of a gs_graph_arrays."""
    numbers, ids = op_numbers(), {t: i for i, t in enumerate(graph.tensors)}
    n = len(graph.tensors)
    layout = np.zeros(n, LAYOUT)
    src, slot, param, dep = [], [], [], []
    begins: dict[str, list[int]] = {"src_begin": [0], "param_begin": [0], "dep_begin": [0]}
    deps = graph.deps
    for i, t in enumerate(graph.tensors):
        layout[i] = (t.ne, t.nb, -7, int(t.type), numbers[t.op])
        for k, s in enumerate(t.src):
            if s is not None:
                src.append(ids[s])
                slot.append(k)
        if t.op not in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"):
            words = list(t.op_params)
            while words and not words[-1]:
                words.pop()
            param += words
        dep += [ids[s] for s in deps.get(t, ())]
        for name, values in (("src_begin", src), ("param_begin", param), ("dep_begin", dep)):
            begins[name].append(len(values))
    flags = [("input" in f) + 2 * ("output" in f) for f in map(graph.flags_of, graph.tensors)]
    return {
        "layout": layout,
        "view_src": np.array([-1 if t.view_src is None else ids[t.view_src] for t in graph.tensors], np.int32),
        "view_offs": np.array([t.view_offs for t in graph.tensors], np.int64),
        "flags": np.array(flags, np.uint8),
        "src": np.array(src, np.int32), "slot": np.array(slot, np.uint8), "param": np.array(param, np.int32),
        "node": np.array([ids[t] for t in graph.nodes], np.int32),
        "leaf": np.array([ids[t] for t in graph.leafs], np.int32),
        "dep": np.array(dep, np.int32), **{name: np.array(values, np.int32) for name, values in begins.items()}}


def size_of(arrays: dict[str, np.ndarray]) -> GraphSize:
    return GraphSize(len(arrays["layout"]), *(len(arrays[name]) for name in ("node", "leaf", "src", "param", "dep")))


class CGraph:
    """A gs_graph filled from arrays; the caller calls `finish`.  It is freed with this object at the latest."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.handle = c_void_p()
        fill = GraphArrays()
        call("graph_new", byref(size_of(arrays)), byref(fill), byref(self.handle))
        self.free_handle = weakref.finalize(self, functions().graph_free, self.handle.value)
        self.put(arrays, fill)

    def refill(self, arrays: dict[str, np.ndarray]) -> CGraph:
        fill = GraphArrays()
        call("graph_refill", self.handle, byref(size_of(arrays)), byref(fill))
        self.put(arrays, fill)
        return self

    def put(self, arrays: dict[str, np.ndarray], fill: GraphArrays) -> None:
        assert bool(fill.dep) == bool(fill.dep_begin) == (len(arrays["dep"]) > 0)
        self.fill = fill
        for name, dtype in GRAPH_ARRAYS.items():
            if name != "dep_begin" or fill.dep_begin:
                at(getattr(fill, name), dtype, len(arrays[name]))[:] = arrays[name]

    def finish(self) -> CGraph:
        call("graph_finish", self.handle)
        return self

    def trim(self) -> None:
        call("graph_trim", self.handle, byref(self.fill))

    def keep_wiring(self) -> None:
        call("graph_keep_wiring", self.handle, byref(self.fill))

    def array(self, name: str, n: int) -> np.ndarray:
        """The array in the graph's memory, of n entries."""
        return at(getattr(self.fill, name), GRAPH_ARRAYS[name], n)

    def fingerprint(self) -> tuple[int, int]:
        """The same two hashes as Graph.fingerprint and Graph.wiring."""
        found, wiring = (c_uint64 * 2)(), c_uint64()
        call("graph_fingerprint", self.handle, found, byref(wiring))
        return found[0] << 64 | found[1], wiring.value

    def free(self) -> None:
        self.free_handle()
        self.handle = c_void_p()

    def __enter__(self) -> CGraph:
        return self

    def __exit__(self, *_) -> None:
        self.free()


def policy_struct(policy: Policy) -> PolicyStruct:
    return PolicyStruct(*policy.numbers)


POINTERS = {"resident": np.int32, "usage": np.uint8, "buffer": np.int32, "reads_buffer": np.uint8, "reads": np.uint8,
            "assigned": np.int32, "supports": np.uint8, "offloads": np.uint8, "nbytes": np.int64,
            "group_backend": np.int32, "group_begin": np.int32, "group_member": np.int32}


class Problem:
    """A gs_problem, with the arrays that it points to.

    `backends`: (alignment, largest buffer, in-place masks or None).
    """

    def __init__(self, policy: PolicyStruct, backends, n_buffers: int = 0, n_groups: int = 0, **arrays) -> None:
        self.kept: list = []
        infos = (BackendInfo * len(backends))()
        for info, (alignment, largest, inplace, *name) in zip(infos, backends, strict=True):
            info.alignment, info.max_buffer = alignment, largest
            if name:
                info.name = name[0]
            if inplace is not None:
                info.inplace = self.keep(inplace, np.uint64)
        self.c = ProblemStruct(policy, len(backends), n_buffers, n_groups, infos)
        for name, values in arrays.items():
            if values is not None:
                setattr(self.c, name, self.keep(values, POINTERS[name]))

    def keep(self, values, dtype) -> int:
        array = np.ascontiguousarray(values, dtype)
        self.kept.append(array)
        return array.ctypes.data


class CPlan:
    """A gs_plan and its owner: it is freed with this object at the latest."""

    def __init__(self, handle: c_void_p) -> None:
        self.handle = handle
        self.free_handle = weakref.finalize(self, functions().plan_free, handle.value)

    @classmethod
    def made(cls, graph: CGraph, problem: Problem) -> CPlan:
        handle = c_void_p(1)
        try:
            call("plan_new", graph.handle, byref(problem.c), byref(handle))
        except Refused:
            assert not handle
            raise
        return cls(handle)

    def replay(self, reserved: CGraph, graph: CGraph, problem: Problem) -> CPlan | None:
        handle, serves = c_void_p(1), c_int(7)
        call("plan_replay", self.handle, reserved.handle, graph.handle, byref(problem.c), byref(handle), byref(serves))
        assert serves.value == bool(handle)
        return CPlan(handle) if serves.value else None

    def arrays(self) -> dict:
        """{name: array of plan_view}, copied."""
        view = PlanArrays()
        functions().plan_view(self.handle, byref(view))
        found: dict = {name: getattr(view, name) for name in COUNTS}
        lengths = {**found, "n + 1": view.n + 1, "group": view.n_groups + 1 if view.n_groups else 0}
        lengths["src"] = int(at(view.src_begin, "<i4", view.n + 1)[-1])
        lengths["member"] = int(at(view.group_begin, "<i4", view.n_groups + 1)[-1]) if view.n_groups else 0
        for name, (dtype, n) in PLAN_ARRAYS.items():
            if dtype == "arena":
                rows = (ArenaResult * lengths[n]).from_address(view.arena)
                found[name] = [tuple(getattr(row, field) for field, _ in ArenaResult._fields_) for row in rows]
            else:
                found[name] = at(getattr(view, name), dtype, lengths[n]).tolist()
        return found

    def free(self) -> None:
        self.free_handle()
        self.handle = c_void_p()


class CArenas:
    """A gs_api_arenas for several plans, on the backends of a ctypes array of BackendTable."""

    def __init__(self, plans: list[CPlan], tables) -> None:
        self.handle = c_void_p(1)
        handles = (c_void_p * max(len(plans), 1))(*(plan.handle.value for plan in plans))
        try:
            call("arenas_new", handles, len(plans), tables, byref(self.handle))
        except Refused:
            assert not self.handle
            raise

    def free(self) -> None:
        functions().arenas_free(self.handle)
        self.handle = c_void_p()


class CProgram:
    """A gs_api_program on the backends of a ctypes array of BackendTable, or in a CArenas; `resident` {id: address}."""

    def __init__(self, graph: CGraph, plan: CPlan, where, resident: dict[int, int]) -> None:
        self.handle, n = c_void_p(1), plan.arrays()["n_tensors"]
        addresses = (c_void_p * max(n, 1))()
        for i, address in resident.items():
            addresses[i] = address
        name, where = ("program_new_in", where.handle) if isinstance(where, CArenas) else ("program_new", where)
        try:
            call(name, graph.handle, plan.handle, where, ctypes.cast(addresses, c_void_p), byref(self.handle))
        except Refused:
            assert not self.handle
            raise
        self.data: dict[int, np.ndarray] = {}
        self.residents: dict[int, np.ndarray] = {}

    def view(self) -> Program:
        found = Program()
        functions().program_view(self.handle, byref(found))
        return found

    def set(self, tensor: int, data: bytes) -> None:
        """Set a leaf; the bytes are kept alive."""
        array = np.frombuffer(data, np.uint8).copy()
        call("program_set", self.handle, tensor, array.ctypes.data, len(array))
        self.data[tensor] = array

    def touch(self, tensor: int) -> None:
        call("program_touch", self.handle, tensor)

    def run(self) -> None:
        call("program_run", self.handle)

    def synchronize(self) -> None:
        call("program_synchronize", self.handle)

    def read(self, tensor: int, nbytes: int, offset: int = 0) -> bytes:
        found = np.zeros(max(nbytes, 1), np.uint8)
        call("program_read", self.handle, tensor, found.ctypes.data, offset, nbytes)
        return found[:nbytes].tobytes()

    def free(self) -> None:
        functions().program_free(self.handle)
        self.handle = c_void_p()


def c_pack(rows, capacity: int = -1, budget: int = -1) -> tuple[list[int], PackResult]:
    """Calls gs_pack for rows (lower, upper, size); returns the offsets and the other results."""
    columns = [np.array([row[k] for row in rows], np.int64) for k in range(3)]
    offsets, result = (c_int64 * max(len(rows), 1))(), PackResult()
    call("pack", len(rows), *(column.ctypes.data for column in columns), capacity, budget, offsets, byref(result))
    return offsets[:len(rows)], result
