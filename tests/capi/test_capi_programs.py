"""Programs of the C API run on backends that are tables of C functions, with the results of gs.Scheduler.

toy_backends.c has the backends: one computes at once, one has a queue that runs as late as it may.
"""

import ctypes
from contextlib import ExitStack
from ctypes import POINTER, byref, c_int64, c_void_p

import numpy as np
import pytest
from capi_calls import CArenas, CProgram, Failure, Refused, functions
from capi_toys import (
    BACKEND_FAILED,
    BAD_ARGUMENT,
    BAD_PLACEMENT,
    FUNCTIONS,
    HAZARD,
    KINDS,
    OUT_OF_MEMORY,
    Case,
    PythonToy,
    Toys,
    chain,
    kinds_of,
    ran,
    read_last,
    resident_bytes,
    values_of,
)
from fusing import anything, nothing
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes
from random_results import kept, raw

import ggml_sched as gs
from ggml_sched.planning.compiler import program_of
from ggml_sched.planning.program import program_values


def is_view_of_leaf(t: gs.Tensor) -> bool:
    """Whether a node shows what the caller has set: it need not be in the backend's memory."""
    while not t.computes and t.src:
        t = t.src[0]
    return t.op == "NONE"


class Twin:
    """A random graph under gs.Scheduler and as a program in C, whose results are compared after each compute."""

    def __init__(self, built: Built, backends: list[gs.Backend], copies: int, wishes, usage: str) -> None:
        self.built, self.case = built, Case(built.graph, built.homes, backends, copies, wishes, usage)
        self.plan, self.program, self.seeds = None, None, []

    def is_planned(self) -> bool:
        """Whether it has a plan: not where a resident is where its node may not run."""
        try:
            self.plan = self.case.sched.plan(self.built.graph)
            self.case.sched.alloc(self.built.graph)
        except gs.PlacementError:
            return False
        self.set_python(7, residents=True)
        self.residents = resident_bytes(self.built.graph)
        return True

    def make_program(self, where: Toys | CArenas) -> None:
        self.program = self.case.program(where, self.residents)
        view = self.program.view()
        expected = program_of(self.built.graph, self.plan.data, self.case.backends)
        assert values_of(view) == program_values(expected)
        self.loaded = {view.steps[k].tensor for k in range(view.n_steps) if view.steps[k].kind == 0}

    def set_python(self, seed: int, residents: bool = False) -> dict:
        values = self.built.values(seed)
        for t, data in values.items():
            if t.buffer is not None and (residents or t not in self.built.residents):
                t.set(data)
        return values

    def compute(self, seed: int) -> None:
        values = self.set_python(seed)
        for i in sorted(self.loaded) if self.seeds[-1:] != [seed] else ():
            t = self.built.graph.tensors[i]
            self.program.set(i, np.ascontiguousarray(values[t]).tobytes())
        self.seeds.append(seed)
        assert self.case.sched.compute(self.built.graph)
        self.program.run()

    def compare(self) -> None:
        for i in kept(self.built):
            t = self.built.ctx.tensors[i]
            if t.nbytes and t.nb[0] == 4 and t.is_contiguous and not is_view_of_leaf(t):
                assert self.program.read(self.built.graph.id_of(t), t.nbytes) == raw(t), repr(t)
        self.program.synchronize()
        for i, memory in self.residents.items():
            t = self.built.graph.tensors[i]
            assert memory.tobytes() == bytes(t.buffer.bytes[t.offset : t.offset + t.nbytes]), repr(t)

    def close(self) -> None:
        self.case.sched.close()
        if self.program is not None:
            self.program.free()


REFUSABLE = ("ADD", "MUL", "CPY", "CONT", "MUL_MAT", "MUL_MAT_ID", "SET_ROWS", "UNARY:RELU", "SCALE", "GET_ROWS")
REFUSALS = st.lists(st.sets(st.sampled_from(REFUSABLE)), min_size=2, max_size=2)
USAGES = st.sampled_from(["weights", "any"])
WISHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=5)


def backends_of(toys, n: int, refuses, concurrent: bool, offloads: bool, offer) -> list[gs.Backend]:
    return [PythonToy(toys, f"b{k}", frozenset(refuses[k]) if k < n - 1 else frozenset(), concurrent,
                      offloads and k < n - 1, offer=offer) for k in range(n)]


@quick(25)
@given(recipe=recipes(18), n=st.integers(1, 3), queued=st.integers(0, 7), direct=st.booleans(),
       concurrent=st.booleans(), copies=st.integers(1, 3), offloads=st.booleans(), refuses=REFUSALS, wishes=WISHES,
       usage=USAGES, fused=st.integers(0, 50))
def test_random_graphs_give_the_bytes_of_the_python_scheduler(toys, recipe, n, queued, direct, concurrent, copies,
                                                              offloads, refuses, wishes, usage, fused):
    backends = backends_of(toys, n, refuses, concurrent, offloads, anything(fused) if fused else nothing)
    twin = Twin(Built(recipe, n), backends, copies, wishes, usage)
    with Toys(toys, queued=[bool(queued >> k & 1) for k in range(n)], copies=direct, concurrent=concurrent) as table:
        try:
            if twin.is_planned():
                twin.make_program(table)
                for seed in (7, 8, 8, 9):
                    twin.compute(seed)
                    twin.compare()
        finally:
            twin.close()


@quick(12)
@given(several=st.lists(recipes(12), min_size=2, max_size=3), n=st.integers(1, 3), queued=st.integers(0, 7),
       copies=st.integers(1, 2), refuses=REFUSALS, wishes=WISHES, usage=USAGES,
       order=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=3, max_size=9))
def test_random_programs_in_shared_arenas_give_the_bytes_of_the_python_scheduler(toys, several, n, queued, copies,
                                                                                 refuses, wishes, usage, order):
    twins = [Twin(Built(recipe, n), backends_of(toys, n, refuses, False, False, nothing), copies, wishes, usage)
             for recipe in several]
    with Toys(toys, queued=[bool(queued >> k & 1) for k in range(n)]) as table, ExitStack() as stack:
        for twin in twins:
            stack.callback(twin.close)
        if not all(twin.is_planned() for twin in twins):
            return
        plans = [stack.enter_context(twin.case.planned())[1] for twin in twins]
        arenas = CArenas(plans, table.tables)
        for twin in twins:
            twin.make_program(arenas)
        arenas.free()
        for turn, (which, is_compared) in enumerate(order):
            twin = twins[which % len(twins)]
            twin.compute(7 + turn // 2)
            if is_compared:
                twin.compare()


# -- fusion groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queued", "copies"), [(False, 1), (True, 1), (True, 2)])
def test_a_fusion_group_reaches_the_backend_with_what_need_not_be_written(toys, queued, copies):
    """Nodes 0 .. 3 are neg, relu, add, mul; the host computes the last one, and reads the result of relu."""
    ctx, homes = gs.Context(), [gs.Context(), gs.Context()]
    x = ctx.tensor("f32", (8, 4), "x", input=True)
    first = ctx.neg(x)
    second = ctx.relu(first)
    third = ctx.add(second, first)
    last = ctx.set_output(ctx.mul(third, second))
    offers = lambda graph: [(0, 1, 2)]     # noqa: E731
    backends = [PythonToy(toys, "dev", frozenset({"MUL"}), offer=offers),
                PythonToy(toys, "host", frozenset({"UNARY:NEG", "UNARY:RELU", "ADD"}))]
    case = Case(gs.Graph(last), homes, backends, copies)
    assert [t.op for t in case.graph.nodes] == ["UNARY:NEG", "UNARY:RELU", "ADD", "MUL"]
    with case.sched, Toys(toys, queued=[queued, queued]) as table:
        assert case.sched.plan(case.graph).data.groups == ((0, 1, 2),)
        case.sched.alloc(case.graph)
        program = case.program(table, {})
        for turn in range(3):
            x.set(np.full((4, 8), turn, np.float32))
            case.sched.compute(case.graph)
            program.set(case.graph.id_of(x), np.full(32, turn, np.float32).tobytes())
            program.run()
            assert read_last(case, program) == raw(last)
        # Of each group the result of neg alone is read by nothing outside.
        assert [(toy.n_fused, toy.n_skipped) for toy in table.toys] == [(3, 3), (0, 0)]
        with pytest.raises(Refused, match="not in memory"):
            program.read(case.graph.id_of(first), 4)
        program.free()


# -- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("kind", ["input", "view of an input", "computed"])
def test_only_the_experts_that_are_used_are_copied(toys, kind, queued):
    ctx, homes = gs.Context(), [gs.Context(), gs.Context()]
    x = ctx.tensor("f32", (8, 1, 2), "x", input=True)
    if kind == "computed":
        ids = ctx.top_k(ctx.reshape(x, 8, 2), 1)
    else:
        given = ids = ctx.tensor("i32", (1, 2 if kind == "input" else 5), "ids", input=True)
        if kind != "input":
            ids = ctx.view_2d(given, 1, 2, 4, 12)
    value = x
    for _ in range(3):      # three are too much to keep, so that each compute copies the experts that it uses
        value = ctx.mul_mat_id(homes[1].tensor("f32", (8, 8, 5)), value, ids)
    case = Case(gs.Graph(ctx.set_output(value)), homes, [
        PythonToy(toys, "dev", frozenset({"TOP_K"}), offloads=True), PythonToy(toys, "host")])
    weights = [t for t in case.graph.tensors if t.buffer is not None]
    for k, t in enumerate(weights):
        t.set(np.arange(320, dtype=np.float32).reshape(5, 8, 8) + k)
    with case.sched, Toys(toys, queued=[queued, queued]) as table:
        case.sched.alloc(case.graph)
        program = case.program(table, resident_bytes(case.graph))
        assert kinds_of(program.view()).count("copy experts") == 3
        for turn, used in enumerate(((3, 3), (0, 4), (2, 1), (1, 1))):
            x.set(np.full((2, 1, 8), turn, np.float32))
            program.set(case.graph.id_of(x), np.full(16, turn, np.float32).tobytes())
            if kind != "computed":
                numbers = np.array(used if kind == "input" else (4, 4, 4, *used), np.int32)
                given.set(numbers.reshape(-1, 1))
                program.set(case.graph.id_of(given), numbers.tobytes())
            case.sched.compute(case.graph)
            before = sum(table.calls("copy"))
            program.run()
            copies = sum(table.calls("copy")) - before
            assert read_last(case, program) == raw(value)
            if kind != "computed":
                assert copies - kinds_of(program.view()).count("copy") == 3 * len(set(used))
        program.free()


# -- failures ---------------------------------------------------------------------------------------------------


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
        for k in range(2):
            for name in ("alloc", "free", "write", "read", "run", "synchronize", "event_new", "event_free",
                         "event_record", "event_synchronize"):
                kept_function = getattr(table.tables[k], name)
                if kept_function is None:
                    continue        # the second one has no queue
                setattr(table.tables[k], name, None)
                with pytest.raises(Refused, match=f"backend {k} '{('mid', 'host')[k]}' lacks {name}(,|$)") as refused:
                    case.program(table, residents)
                assert (refused.value.status, refused.value.error.backend) == (BAD_ARGUMENT, k)
                setattr(table.tables[k], name, kept_function)
        table.tables[1].event_wait = table.tables[0].event_wait
        with pytest.raises(Refused, match="backend 1 'host' lacks synchronize, and has event_wait"):
            case.program(table, residents)
        table.tables[1].event_wait = None
        program = case.program(table, residents)
        with pytest.raises(Refused, match=r"tensor \d+: an input was never set") as refused:
            program.run()
        assert (refused.value.status, refused.value.error.tensor in ids.values()) == (HAZARD, True)
        for tensor, data in ((ids["x"], bytes(3)), (last, bytes(128)), (-2, b""), (999, b"")):
            with pytest.raises(Refused) as refused:
                program.set(tensor, data)
            assert refused.value.status == BAD_ARGUMENT
        with pytest.raises(Refused, match=f"tensor {last}: it is no resident"):
            program.touch(last)
        with pytest.raises(Refused, match=f"tensor {ids['x']} has 128 bytes, not 3; or data is NULL"):
            program.set(ids["x"], bytes(3))
        ran(case, program)
        for offset, nbytes in ((-1, 4), (128, 1), (0, 129), (2**62, 2**62)):
            with pytest.raises(Refused) as refused:
                call_read(program, last, offset, nbytes)
            assert refused.value.status == BAD_ARGUMENT
        with pytest.raises(Refused, match="no tensor of the graph"):
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
        kept_loads = sum(s.if_changed for s in steps if KINDS[s.kind] == "load")
        before = sum(toy.calls[FUNCTIONS.index("write")] for toy in table.toys)
        program.run()
        again = sum(toy.calls[FUNCTIONS.index("write")] for toy in table.toys) - before
        assert program.read(case.graph.id_of(case.graph.nodes[-1]), 128) == first
        program.touch(-1)
        program.run()
        all_of_them = sum(toy.calls[FUNCTIONS.index("write")] for toy in table.toys) - before - again
        assert all_of_them == again + kept_loads
        program.free()
