"""Backends that are tables of C functions (toy_backends.c), and graphs planned for them and for gs.Scheduler alike."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_void_p, sizeof
from pathlib import Path

import numpy as np
import pytest
from capi_calls import BackendTable, CArenas, CGraph, CPlan, CProgram, Node, arrays_of
from capi_problems import problem_of

import ggml_sched as gs
from ggml_sched._core import Policy
from ggml_sched._graph import NodeTable

FUNCTIONS = ("alloc", "write", "read", "copy", "run", "synchronize", "event_new", "event_record", "event_wait",
             "event_synchronize")
KINDS = ("load", "copy", "copy experts", "run", "write back")
BACKEND_FAILED, HAZARD, BAD_PLACEMENT, BAD_ARGUMENT, OUT_OF_MEMORY = -8, -7, -5, -4, -3


class Toy(ctypes.Structure):
    """The struct of that name in toy_backends.c."""

    _fields_ = [*((name, c_int32) for name in ("queued", "copies", "fails", "fails_after", "status")),
                ("calls", c_int64 * len(FUNCTIONS)),
                *((name, c_int64) for name in ("n_memory", "n_bytes", "n_fused", "n_skipped")),
                ("queue", c_void_p), *((name, c_int64) for name in ("room", "begin", "n_work", "n_done"))]


def compiled(folder: Path) -> ctypes.CDLL:
    """toy_backends.c as a library; skips the test where there is no gcc."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = folder / "toys.so"
    # Under the sanitizers an access of a kernel outside of an arena is seen, too.
    watched = ["-fsanitize=address,undefined", "-g"] if "libasan" in os.environ.get("LD_PRELOAD", "") else []
    done = subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-shared", "-fPIC",
                           *watched, f"-I{gs.get_include()}", str(Path(__file__).with_name("toy_backends.c")), "-o",
                           str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = ctypes.CDLL(str(library))
    found.toy_table.argtypes = [POINTER(Toy), c_char_p, c_int32, POINTER(BackendTable)]
    found.toy_end.argtypes = [POINTER(Toy)]
    found.toy_compute.argtypes = [POINTER(Node)]
    found.toy_size.restype = c_size_t
    assert found.toy_size() == sizeof(Toy)
    return found


class Toys:
    """Toy backends as tables, which are to be freed of all memory when the block ends."""

    def __init__(self, library: ctypes.CDLL, *, queued: list[bool], copies: bool = True,
                 concurrent: bool = False) -> None:
        self.library, n = library, len(queued)
        self.toys, self.tables = (Toy * n)(), (BackendTable * n)()
        for k in range(n):
            self.toys[k].queued, self.toys[k].copies, self.toys[k].fails = queued[k], copies, -1
            library.toy_table(byref(self.toys[k]), (b"dev", b"mid", b"host")[k - n], concurrent, byref(self.tables[k]))

    def __enter__(self) -> Toys:
        return self

    def __exit__(self, *_) -> None:
        for toy in self.toys:
            self.library.toy_end(byref(toy))
        assert [(toy.n_memory, toy.n_bytes) for toy in self.toys] == [(0, 0)] * len(self.toys)

    def calls(self, function: str) -> list[int]:
        """How often each toy was called so."""
        return [toy.calls[FUNCTIONS.index(function)] for toy in self.toys]


class Memory(gs.Buffer):
    """Bytes of the host."""

    def __init__(self, backend: gs.Backend, size: int) -> None:
        self.room = np.full(size + 256, 0xCD, np.uint8)
        skipped = -self.room.ctypes.data % 256
        self.bytes = self.room[skipped : skipped + size]
        super().__init__(backend, size, self.room.ctypes.data + skipped)

    def write(self, offset: int, data: memoryview) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset: int, out: memoryview) -> None:
        out[:] = self.bytes[offset : offset + len(out)].data


class PythonToy(gs.Backend):
    """A backend for gs.Scheduler with the kernels of the toys, in memory that no other backend reads."""

    def __init__(self, library: ctypes.CDLL, name: str, refuses: frozenset[str] = frozenset(),
                 concurrent: bool = False, offloads: bool = False, alignment: int = 64,
                 offer: Callable[[gs.Graph], Iterable[tuple[int, ...]]] = lambda graph: ()) -> None:
        super().__init__(name, alignment)
        self.library, self.refuses, self.offloads, self.concurrent_copies = library, refuses, offloads, concurrent
        self.fusion_groups = offer

    def alloc_buffer(self, size: int) -> gs.Buffer:
        return Memory(self, size)

    def supports_op(self, node: gs.Tensor) -> bool:
        return node.op not in self.refuses

    def offload_op(self, node: gs.Tensor) -> bool:
        return self.offloads

    def compute_node(self, node: gs.Tensor) -> None:
        table = NodeTable((node,))
        fields = [table.fields(0)] + [None] * 10
        nodes = (Node * 11)()
        for k, t in enumerate([node, *node.src]):
            if t is not None:
                nodes[k] = Node((c_int64 * 4)(*t.ne), (c_int64 * 4)(*t.nb), t.nbytes, int(t.type),
                                data=t.buffer.base + t.offset)
                nodes[0].src[max(k - 1, 0)] = ctypes.addressof(nodes[k]) if k else None
        nodes[0].op, nodes[0].sub_op, nodes[0].n_src = fields[0]["op"], fields[0]["sub_op"], len(node.src)
        nodes[0].params[:] = fields[0]["params"]
        self.library.toy_compute(byref(nodes[0]))


def addresses_of(residents: dict[int, np.ndarray]) -> dict[int, int]:
    return {i: memory.ctypes.data for i, memory in residents.items()}


def resident_bytes(graph: gs.Graph) -> dict[int, np.ndarray]:
    """{id of a resident root: a copy of its bytes}."""
    found = {}
    for i, t in enumerate(graph.tensors):
        if t.view_src is None and t.buffer is not None and (t.lease is None or not t.lease.transient):
            found[i] = t.buffer.bytes[t.offset : t.offset + t.nbytes].copy()
    return found


class Case:
    """One graph, planned for C and for Python alike.

    `homes` has a context of residents for each backend.  With the usage "any" copies of weights are not kept, and only
    the experts that are used are copied.
    """

    def __init__(self, graph: gs.Graph, homes: list[gs.Context], backends: list[gs.Backend], copies: int = 1,
                 wishes: Iterable[tuple[int, int]] = (), usage: str = "weights") -> None:
        self.graph, self.backends = graph, backends
        for ctx, backend in zip(homes, backends, strict=True):
            backend.alloc_tensors(ctx, usage)
        self.sched = gs.Scheduler(backends, copies=copies)
        assigned = {}
        for pick, k in wishes:
            t = graph.tensors[pick % len(graph.tensors)]
            assigned[t] = backends[k % len(backends)]
            self.sched.set_tensor_backend(t, assigned[t])
        self.problem = problem_of(graph, backends, Policy(n_copies=copies), assigned)

    @contextmanager
    def planned(self) -> Iterator[tuple[CGraph, CPlan]]:
        """The graph and its plan in C."""
        with CGraph(arrays_of(self.graph)) as graph:
            plan = CPlan.made(graph.finish(), self.problem)
            try:
                yield graph, plan
            finally:
                plan.free()

    def program(self, toys: Toys | CArenas, residents: dict[int, np.ndarray]) -> CProgram:
        """The program in memory of its own on these toys, or in arenas."""
        where = toys.tables if isinstance(toys, Toys) else toys
        with self.planned() as (graph, plan):
            program = CProgram(graph, plan, where, addresses_of(residents))
            program.residents = residents       # which it uses in place
            return program


def kinds_of(view) -> list[str]:
    """The kinds of the steps of a gs_program."""
    return [KINDS[view.steps[k].kind] for k in range(view.n_steps)]


def values_of(view) -> dict:
    """A gs_program as `program_values` has it."""
    def places(at: int, n: int) -> list:
        return [[p.id, p.backend, p.chunk, p.offset] for p in (view.locations[k] for k in range(at, at + n))]

    steps = []
    for k in range(view.n_steps):
        s = view.steps[k]
        kind, step = KINDS[s.kind], {"kind": KINDS[s.kind], "backend": s.backend}
        if kind == "run":
            reads = [view.reads[r] for r in range(s.read, s.read + s.n_reads)]
            step |= {"first": s.first, "last": s.last, "into": places(s.location, s.n_slots),
                     "reads": [[r.position, r.slot, places(r.location, r.n_slots)] for r in reads]}
        else:
            step |= {"tensor": s.tensor, "places": places(s.location, s.n_slots)}
        if kind == "load":
            step |= {"start": s.start, "nbytes": s.nbytes}
        if kind == "copy experts":
            step["ids"] = s.ids
        if kind in ("load", "copy"):
            step["keeps"] = bool(s.if_changed)
        waits = [view.waits[w] for w in range(s.wait, s.wait + s.n_waits)]
        steps.append(step | {"waits": [[w.step, w.back] for w in waits]})
    return {"turns": view.copy_slots, "inputs": [view.inputs[k] for k in range(view.n_inputs)], "steps": steps}


def chain(toys: ctypes.CDLL, rows: int = 4, alignment: int = 64, max_buffer_size: int | None = None) -> Case:
    """A weight and an input x are added on the device, the sum is multiplied by an input y on the host."""
    ctx, homes = gs.Context(), [gs.Context(), gs.Context()]
    w = homes[0].tensor("f32", (8, rows))
    x, y = ctx.tensor("f32", (8, rows), "x", input=True), ctx.tensor("f32", (8, rows), "y", input=True)
    product = ctx.set_output(ctx.mul(ctx.add(w, x), y))
    backends = [PythonToy(toys, "dev", frozenset({"MUL"}), alignment=alignment),
                PythonToy(toys, "host", frozenset({"ADD"}), alignment=alignment)]
    for backend in backends:
        backend.max_buffer_size = max_buffer_size
    return Case(gs.Graph(product), homes, backends)


def inputs_of(case: Case) -> dict[int, bytes]:
    return {i: (bytes(range(7 * i, 7 * i + 64)) * t.nbytes)[: t.nbytes]
            for i, t in enumerate(case.graph.tensors) if t.name in ("x", "y")}


def ran(case: Case, program: CProgram) -> bytes:
    for i, data in inputs_of(case).items():
        program.set(i, data)
    program.run()
    program.synchronize()
    return read_last(case, program)


def read_last(case: Case, program: CProgram) -> bytes:
    """The result of the last node."""
    last = case.graph.nodes[-1]
    return program.read(case.graph.id_of(last), last.nbytes)
