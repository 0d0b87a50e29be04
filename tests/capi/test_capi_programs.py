"""Programs of the C API run on backends that are tables of C functions, with the results of gs.Scheduler.

toy_backends.c has the backends: one computes at once, one has a queue that runs as late as it may.
"""

import ctypes
import shutil
import subprocess
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_void_p, sizeof
from pathlib import Path

import numpy as np
import pytest
from capi_calls import BackendTable, CGraph, CPlan, CProgram, Failure, Node, Refused, arrays_of, functions
from capi_problems import problem_of
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes
from random_results import kept, raw

import ggml_sched as gs
from ggml_sched._core import Policy
from ggml_sched._graph import NodeTable
from ggml_sched.planning.compiler import program_of
from ggml_sched.planning.program import program_values

if shutil.which("gcc") is None:
    pytest.skip("needs gcc", allow_module_level=True)

FUNCTIONS = ("alloc", "write", "read", "copy", "run", "synchronize", "event_new", "event_record", "event_wait",
             "event_synchronize")
KINDS = ("load", "copy", "copy experts", "run", "write back")
BACKEND_FAILED, HAZARD, BAD_PLACEMENT, BAD_ARGUMENT, OUT_OF_MEMORY = -8, -7, -5, -4, -3


class Toy(ctypes.Structure):
    """The struct of that name in toy_backends.c."""

    _fields_ = [*((name, c_int32) for name in ("queued", "copies", "fails", "fails_after", "status", "late")),
                ("calls", c_int64 * len(FUNCTIONS)),
                *((name, c_int64) for name in ("n_memory", "n_fused", "n_skipped")),
                ("queue", c_void_p), *((name, c_int64) for name in ("room", "begin", "n_work", "n_done"))]


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("toys") / "toys.so"
    done = subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-shared", "-fPIC",
                           f"-I{gs.get_include()}", str(Path(__file__).with_name("toy_backends.c")), "-o",
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

    def __enter__(self) -> "Toys":
        return self

    def __exit__(self, *_) -> None:
        for toy in self.toys:
            self.library.toy_end(byref(toy))
        assert [toy.n_memory for toy in self.toys] == [0] * len(self.toys)


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
                 concurrent: bool = False, offloads: bool = False) -> None:
        super().__init__(name)
        self.library, self.refuses, self.offloads, self.concurrent_copies = library, refuses, offloads, concurrent

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
    """One graph, planned for C and for Python alike."""

    def __init__(self, library, built: Built, backends: list[gs.Backend], copies: int, wishes=()) -> None:
        self.built, self.graph, self.backends = built, built.graph, backends
        for ctx, backend in zip(built.homes, backends, strict=True):
            backend.alloc_tensors(ctx)
        self.sched = gs.Scheduler(backends, copies=copies)
        assigned = {}
        for pick, k in wishes:
            t = built.graph.tensors[pick % len(built.graph.tensors)]
            assigned[t] = backends[k % len(backends)]
            self.sched.set_tensor_backend(t, assigned[t])
        self.problem = problem_of(self.graph, backends, Policy(n_copies=copies), assigned)

    def program(self, toys: Toys, residents: dict[int, np.ndarray]) -> CProgram:
        with CGraph(arrays_of(self.graph)) as graph:
            plan = CPlan.made(graph.finish(), self.problem)
            try:
                return CProgram(graph, plan, toys.tables, addresses_of(residents))
            finally:
                plan.free()

    def loaded(self, program: CProgram) -> list[int]:
        view = program.view()
        return sorted({view.steps[k].tensor for k in range(view.n_steps) if view.steps[k].kind == 0})


def values_of(view) -> dict:
    """A gs_program as `program_values` has it."""
    def places(at: int, n: int) -> list:
        return [[p.id, p.backend, p.chunk, p.offset] for p in (view.places[k] for k in range(at, at + n))]

    steps = []
    for k in range(view.n_steps):
        s = view.steps[k]
        kind, step = KINDS[s.kind], {"kind": KINDS[s.kind], "backend": s.backend}
        if kind == "run":
            reads = [view.reads[r] for r in range(s.read, s.read + s.n_reads)]
            step |= {"first": s.first, "last": s.last, "into": places(s.place, s.n_slots),
                     "reads": [[r.position, r.slot, places(r.place, r.n_slots)] for r in reads]}
        else:
            step |= {"tensor": s.tensor, "places": places(s.place, s.n_slots)}
        if kind == "load":
            step |= {"start": s.start, "nbytes": s.nbytes}
        if kind == "copy experts":
            step["ids"] = s.ids
        if kind in ("load", "copy"):
            step["keeps"] = bool(s.keeps)
        waits = [view.waits[w] for w in range(s.wait, s.wait + s.n_waits)]
        steps.append(step | {"waits": [[w.step, w.back] for w in waits]})
    return {"turns": view.turns, "inputs": [view.inputs[k] for k in range(view.n_inputs)], "steps": steps}


def is_view_of_leaf(t: gs.Tensor) -> bool:
    """Whether a node shows what the caller has set: it need not be in the backend's memory."""
    while not t.computes and t.src:
        t = t.src[0]
    return t.op == "NONE"


REFUSABLE = ("ADD", "MUL", "CPY", "CONT", "MUL_MAT", "MUL_MAT_ID", "SET_ROWS", "UNARY:RELU", "SCALE", "GET_ROWS")


@quick(25)
@given(recipe=recipes(18), n=st.integers(1, 3), queued=st.integers(0, 7), direct=st.booleans(),
       concurrent=st.booleans(), copies=st.integers(1, 3), offloads=st.booleans(),
       refuses=st.lists(st.sets(st.sampled_from(REFUSABLE)), min_size=2, max_size=2),
       wishes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=5))
def test_random_graphs_give_the_bytes_of_the_python_scheduler(toys, recipe, n, queued, direct, concurrent, copies,
                                                              offloads, refuses, wishes):
    built = Built(recipe, n)
    backends = [PythonToy(toys, f"b{k}", frozenset(refuses[k]) if k < n - 1 else frozenset(), concurrent,
                          offloads and k < n - 1) for k in range(n)]
    case = Case(toys, built, backends, copies, wishes)
    with case.sched, Toys(toys, queued=[bool(queued >> k & 1) for k in range(n)], copies=direct,
                          concurrent=concurrent) as table:
        try:
            plan = case.sched.plan(built.graph)
            case.sched.alloc(built.graph)
        except gs.PlacementError:       # a resident where its node may not run
            return
        program = None
        try:
            for turn, seed in enumerate((7, 8, 8, 9)):
                values = built.values(seed)
                for t, data in values.items():
                    if t.buffer is not None and (turn == 0 or t not in built.residents):
                        t.set(data)
                if program is None:
                    residents = resident_bytes(built.graph)
                    program = case.program(table, residents)
                    assert values_of(program.view()) == program_values(program_of(built.graph, plan.data, backends))
                    loaded = case.loaded(program)
                for i in loaded if seed != 8 or turn == 1 else ():
                    t = built.graph.tensors[i]
                    program.set(i, np.ascontiguousarray(values[t]).tobytes())
                assert case.sched.compute(built.graph)
                program.run()
                for i in kept(built):
                    t = built.ctx.tensors[i]
                    if t.nbytes and t.nb[0] == 4 and t.is_contiguous and not is_view_of_leaf(t):
                        assert program.read(built.graph.id_of(t), t.nbytes) == raw(t), repr(t)
                program.synchronize()
                for i, memory in residents.items():
                    t = built.graph.tensors[i]
                    assert memory.tobytes() == bytes(t.buffer.bytes[t.offset : t.offset + t.nbytes]), repr(t)
        finally:
            if program is not None:
                program.free()


# -- failures ---------------------------------------------------------------------------------------------------


def chain(toys: ctypes.CDLL) -> Case:
    """x (host) -> relu on the device, with a weight there -> sum on the host."""
    built = Built.__new__(Built)
    built.ctx, built.homes, built.residents = gs.Context(), [gs.Context(), gs.Context()], []
    w = built.homes[0].tensor("f32", (8, 4))
    x, y = built.ctx.tensor("f32", (8, 4), "x", input=True), built.ctx.tensor("f32", (8, 4), "y", input=True)
    a = built.ctx.add(w, x)
    b = built.ctx.mul(a, y)
    built.ctx.set_output(b)
    built.graph = gs.Graph(b)
    backends = [PythonToy(toys, "dev", frozenset({"MUL"})), PythonToy(toys, "host", frozenset({"ADD"}))]
    return Case(toys, built, backends, 1)


def inputs_of(case: Case) -> dict[int, bytes]:
    return {i: bytes(range(7 * i, 7 * i + 64)) * 2 for i, t in enumerate(case.graph.tensors) if t.name in ("x", "y")}


def ran(case: Case, program: CProgram) -> bytes:
    for i, data in inputs_of(case).items():
        program.set(i, data)
    program.run()
    program.synchronize()
    return program.read(case.graph.id_of(case.graph.nodes[-1]), 128)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_failure_of_each_function_names_the_backend_and_leaves_nothing_behind(toys, function, direct, queued):
    case = chain(toys)
    residents = resident_bytes(case.graph)
    with case.sched, Toys(toys, queued=[queued, queued], copies=direct) as table:
        program = case.program(table, residents)
        expected = ran(case, program)
        calls = [toy.calls[FUNCTIONS.index(function)] for toy in table.toys]
        program.free()
        for k, n in enumerate(calls):
            toy = table.toys[k]
            for after in range(n):
                toy.fails, toy.fails_after, toy.status = -1, after, OUT_OF_MEMORY
                toy.calls[FUNCTIONS.index(function)] = 0
                toy.fails = FUNCTIONS.index(function)
                program = None
                try:
                    with pytest.raises(Refused) as refused:
                        program = case.program(table, residents)
                        ran(case, program)
                    error = refused.value.error
                    assert (refused.value.status, error.backend) == (OUT_OF_MEMORY, k)
                    assert f"backend {k} '{('mid', 'host')[k]}' failed while " in error.message
                    assert error.message.endswith(": the toy was broken on purpose")
                    toy.fails = -1
                    if program is not None:     # it still works
                        assert ran(case, program) == expected
                finally:
                    toy.fails = -1
                    if program is not None:
                        program.free()
                assert [one.n_memory for one in table.toys] == [0, 0]


def test_a_status_that_is_none_is_a_failed_backend(toys):
    case = chain(toys)
    with case.sched, Toys(toys, queued=[False, False]) as table:
        program = case.program(table, resident_bytes(case.graph))
        table.toys[1].fails, table.toys[1].status = FUNCTIONS.index("run"), 99
        with pytest.raises(Refused) as refused:
            ran(case, program)
        node = case.graph.id_of(case.graph.nodes[-1])
        assert (refused.value.status, refused.value.error.tensor) == (BACKEND_FAILED, node)
        assert f"tensor {node} (MUL)" in refused.value.error.message
        with pytest.raises(Refused, match="no compute has succeeded") as refused:
            program.read(node, 4)
        assert refused.value.status == HAZARD
        program.free()


def test_calls_that_make_no_sense_are_refused(toys):
    case = chain(toys)
    ids = {t.name: i for i, t in enumerate(case.graph.tensors)}
    last = case.graph.id_of(case.graph.nodes[-1])
    residents = resident_bytes(case.graph)
    with case.sched, Toys(toys, queued=[True, False]) as table:
        with pytest.raises(Refused, match="a resident has no address"):
            case.program(table, {})
        for k, name in ((0, "run"), (1, "alloc"), (0, "event_new"), (0, "synchronize")):
            kept_function = getattr(table.tables[k], name)
            setattr(table.tables[k], name, None)
            with pytest.raises(Refused, match="a backend (lacks|has only some|with events lacks)") as refused:
                case.program(table, residents)
            assert (refused.value.status, refused.value.error.backend) == (BAD_ARGUMENT, k)
            setattr(table.tables[k], name, kept_function)
        program = case.program(table, residents)
        with pytest.raises(Refused, match="an input was never set") as refused:
            program.run()
        assert (refused.value.status, refused.value.error.tensor in ids.values()) == (HAZARD, True)
        for tensor, data in ((ids["x"], bytes(3)), (last, bytes(128)), (-2, b""), (999, b"")):
            with pytest.raises(Refused) as refused:
                program.set(tensor, data)
            assert refused.value.status == BAD_ARGUMENT
        with pytest.raises(Refused, match="no resident"):
            program.touch(last)
        ran(case, program)
        for offset, nbytes in ((-1, 4), (128, 1), (0, 129), (2**62, 2**62)):
            with pytest.raises(Refused) as refused:
                call_read(program, last, offset, nbytes)
            assert refused.value.status == BAD_ARGUMENT
        with pytest.raises(Refused, match="none of the graph's"):
            program.read(999, 1)
        program.free()
    functions().program_free(None)


def call_read(program: CProgram, tensor: int, offset: int, nbytes: int) -> None:
    error, room = Failure(), (c_int64 * 1)()
    status = functions().program_read(program.handle, tensor, room, offset, nbytes, byref(error))
    if status:
        raise Refused(status, error)


def test_an_address_that_is_not_aligned_is_refused(toys):
    case = chain(toys)
    room = np.zeros(1 << 16, np.uint8)
    alloc = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_int64, POINTER(c_void_p), c_void_p)
    free = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)

    def odd(_, nbytes, memory, error):
        memory[0] = room.ctypes.data // 64 * 64 + 64 + 4
        return 0

    odd, nothing = alloc(odd), free(lambda *_: None)
    with case.sched, Toys(toys, queued=[False, False]) as table:
        table.tables[0].alloc = ctypes.cast(odd, c_void_p)
        table.tables[0].free = ctypes.cast(nothing, c_void_p)
        with pytest.raises(Refused, match="the address is no multiple of 64") as refused:
            case.program(table, resident_bytes(case.graph))
        assert (refused.value.status, refused.value.error.backend) == (BAD_PLACEMENT, 0)


def test_data_in_place_is_moved_again_only_once_it_has_changed(toys):
    case = chain(toys)
    residents = resident_bytes(case.graph)
    with case.sched, Toys(toys, queued=[False, False]) as table:
        program = case.program(table, residents)
        first = ran(case, program)
        steps = [program.view().steps[k] for k in range(program.view().n_steps)]
        kept_loads = sum(s.keeps for s in steps if KINDS[s.kind] == "load")
        before = sum(toy.calls[FUNCTIONS.index("write")] for toy in table.toys)
        program.run()
        again = sum(toy.calls[FUNCTIONS.index("write")] for toy in table.toys) - before
        assert program.read(case.graph.id_of(case.graph.nodes[-1]), 128) == first
        program.touch(-1)
        program.run()
        all_of_them = sum(toy.calls[FUNCTIONS.index("write")] for toy in table.toys) - before - again
        assert all_of_them == again + kept_loads
        program.free()
