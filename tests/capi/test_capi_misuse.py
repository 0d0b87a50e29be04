"""Wrong use of the C API from a runner: each call returns a status and a message, and the handles work afterwards."""

import ctypes
import threading
from ctypes import CFUNCTYPE, POINTER, byref, c_char, c_int, c_int32, c_int64, c_void_p, sizeof

import capi_toys
import numpy as np
import pytest
from capi_calls import (
    CALLS,
    LATER_CALLS,
    LATER_SIZES,
    SIZES,
    BackendTable,
    CGraph,
    CPlan,
    CProgram,
    Failure,
    Program,
    Refused,
    Table,
    arrays_of,
    call,
    functions,
)
from capi_toys import (
    BACKEND_FAILED,
    BAD_ARGUMENT,
    FUNCTIONS,
    HAZARD,
    OUT_OF_MEMORY,
    Case,
    PythonToy,
    Toys,
    chain,
    kinds_of,
    ran,
    read_last,
    resident_bytes,
)

import ggml_sched as gs

RUN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
MOVE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)


def program_of(case: Case, table: Toys) -> CProgram:
    return case.program(table, resident_bytes(case.graph))


def refused(name: str, *arguments) -> Failure:
    with pytest.raises(Refused) as found:
        call(name, *arguments)
    assert found.value.status == found.value.error.status
    return found.value.error


@pytest.mark.parametrize("name", [*CALLS, *LATER_CALLS])
def test_null_for_every_argument_is_an_error_and_never_a_crash(name):
    """Of functions with a gs_error the last argument is one, once, and once NULL."""
    kinds = (CALLS | LATER_CALLS)[name]._argtypes_
    nothing = [0 if kind in (c_int, c_int32, c_int64) else None for kind in kinds]
    function = getattr(functions(), name)
    if kinds and kinds[-1] is POINTER(Failure):
        if name == "pack":
            nothing[0] = 1
        error = Failure()
        assert function(*nothing[:-1], byref(error)) == BAD_ARGUMENT == error.status
        assert "NULL" in error.message
    if kinds == (c_int,):
        nothing = [-1000]
    found = function(*nothing)
    assert found in (BAD_ARGUMENT, -1, 0, None), name


def test_a_view_of_nothing_is_empty():
    view = Program(n_steps=7)
    functions().program_view(None, byref(view))
    assert bytes(view) == bytes(sizeof(Program))


@pytest.mark.parametrize("field", ["major", "minor", "size", *(f"size_{name}" for name in SIZES | LATER_SIZES)])
def test_a_table_of_another_version_or_with_other_structs_is_refused(toys, field):
    table, error = Table.from_buffer_copy(functions()), Failure()
    assert toys.toy_check(byref(table), byref(error)) == 0
    setattr(table, field, getattr(table, field) - 1)
    assert toys.toy_check(byref(table), byref(error)) == BAD_ARGUMENT
    assert "the C API of ggml_sched is " in error.message and "compiled against 2.2" in error.message
    assert toys.toy_check(byref(table), None) == BAD_ARGUMENT


def test_a_function_of_a_backend_that_uses_its_own_program_is_refused(toys):
    case, found = chain(toys), []
    with case.sched, Toys(toys, queued=[False, False]) as table:
        computes = ctypes.cast(table.tables[1].run, RUN)
        error, room, x = Failure(), (c_int64 * 64)(), 0

        def again(context, run, said):
            api = functions()
            found.extend([api.program_run(program.handle, byref(error)), api.program_synchronize(program.handle, None),
                          api.program_read(program.handle, x, room, 0, 8, None),
                          api.program_set(program.handle, x, room, 8, None),
                          api.program_touch(program.handle, -1, None)])
            return computes(context, run, said)

        again = RUN(again)
        table.tables[1].run = ctypes.cast(again, c_void_p)
        program = program_of(case, table)
        first = ran(case, program)
        assert found == [HAZARD] * 5 and "is using a program of the same arenas" in error.message
        assert ran(case, program) == first
        program.free()


def test_threads_that_use_one_program_get_a_result_or_an_error(toys):
    case, statuses = chain(toys, 64), []
    with case.sched, Toys(toys, queued=[True, False]) as table:
        program = program_of(case, table)
        expected = ran(case, program)

        def work():
            error = Failure()
            for _ in range(200):
                status = functions().program_run(program.handle, byref(error))
                statuses.append((status, status == 0 or "another thread" in error.message))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {status for status, _ in statuses} <= {0, HAZARD} and all(said for _, said in statuses)
        assert ran(case, program) == expected
        program.free()


def test_threads_with_programs_of_their_own_run_at_once(toys):
    wrong = []

    def work(rows):
        case = cases[rows]
        with Toys(toys, queued=[True, rows % 2 == 0]) as table:
            for _ in range(20):
                program = program_of(case, table)
                if ran(case, program) != ran(case, program):
                    wrong.append(rows)
                program.free()

    cases = {rows: chain(toys, rows) for rows in (4, 5, 6, 7)}
    threads = [threading.Thread(target=work, args=(rows,)) for rows in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("queued", [False, True])
def test_an_empty_graph_is_a_program_without_steps(toys, queued):
    case = Case(gs.Graph(), [gs.Context(), gs.Context()], [PythonToy(toys, "dev"), PythonToy(toys, "host")])
    with case.sched, Toys(toys, queued=[queued, queued]) as table:
        program = program_of(case, table)
        assert (program.view().n_steps, table.calls("alloc")) == (0, [0, 0])
        program.run()
        program.synchronize()
        for read in (program.read, lambda i, n: program.set(i, bytes(n))):
            with pytest.raises(Refused):
                read(0, 4)
        program.free()


def test_tensors_without_bytes_are_computed_set_and_read(toys):
    """No backend is called for them but to compute."""
    ctx, homes = gs.Context(), [gs.Context(), gs.Context()]
    w, x = homes[0].tensor("f32", (0, 4)), ctx.tensor("f32", (0, 4), "x", input=True)
    product = ctx.set_output(ctx.mul(ctx.add(w, x), x))
    case = Case(gs.Graph(product), homes, [PythonToy(toys, "dev", frozenset({"MUL"})), PythonToy(toys, "host")])
    with case.sched, Toys(toys, queued=[True, False]) as table:
        program = case.program(table, {})
        for i in {program.view().steps[k].tensor for k in range(program.view().n_steps)
                  if program.view().steps[k].kind == 0} - {case.graph.id_of(w)}:
            program.set(i, b"")
        program.run()
        assert read_last(case, program) == b""
        assert table.calls("write") == table.calls("read") == table.calls("copy") == [0, 0]
        program.free()


@pytest.mark.parametrize("name", ["write", "read", "run", "alloc", "synchronize", "event_new", "event_record",
                                  "event_synchronize"])
@pytest.mark.parametrize("status", [1, 2**31 - 1, -(2**31), -9])
def test_a_status_that_a_function_may_not_return_is_a_failed_backend(toys, name, status):
    case = chain(toys)
    with case.sched, Toys(toys, queued=[True, True], copies=False) as table:
        for k in range(2):
            toy, program = table.toys[k], None
            toy.fails, toy.status, toy.fails_after = FUNCTIONS.index(name), status, toy.calls[FUNCTIONS.index(name)]
            with pytest.raises(Refused) as found:
                program = program_of(case, table)
                ran(case, program)
            assert (found.value.status, found.value.error.backend) == (BACKEND_FAILED, k)
            toy.fails = -1
            if program is not None:
                program.free()


def test_a_message_without_an_end_is_cut(toys):
    case = chain(toys)

    def talks(context, to, source, nbytes, error):
        ctypes.memset(error + Failure.text.offset, ord("x"), Failure.text.size)
        return OUT_OF_MEMORY

    talks = MOVE(talks)
    with case.sched, Toys(toys, queued=[False, False]) as table:
        name = ctypes.create_string_buffer(b"n" * 1000)
        table.tables[0].write, table.tables[0].name = ctypes.cast(talks, c_void_p), ctypes.addressof(name)
        program = program_of(case, table)
        with pytest.raises(Refused) as found:
            ran(case, program)
        assert found.value.error.message.startswith("backend 0 'nnn") and "xxx" in found.value.error.message
        assert len(found.value.error.message) < 256
        program.free()


def test_plans_and_graphs_that_do_not_belong_together_make_no_program(toys):
    case, other = chain(toys), chain(toys, 8)
    with case.sched, Toys(toys, queued=[False, False]) as table, case.planned() as (graph, plan):
        with CGraph(arrays_of(other.graph)) as wrong:
            with pytest.raises(Refused, match="plan was not made for what graph holds"):
                CProgram(wrong, plan, table.tables, {})     # not finished
            with pytest.raises(Refused, match="plan was not made for what graph holds"):
                CProgram(wrong.finish(), plan, table.tables, {})
        graph.refill(arrays_of(case.graph)).finish()        # equal, and yet another filling
        with pytest.raises(Refused, match="plan was not made for what graph holds"):
            CProgram(graph, plan, table.tables, {})
        again = CPlan.made(graph, case.problem)
        graph.trim()
        with pytest.raises(Refused, match="graph is trimmed"):
            CProgram(graph, again, table.tables, {})
        again.free()


def test_a_program_outlives_its_graph_plan_and_the_table_of_backends(toys):
    case = chain(toys)
    with case.sched, Toys(toys, queued=[True, True]) as table:
        program = program_of(case, table)       # graph and plan are freed by now
        expected = ran(case, program)
        ctypes.memset(table.tables, 0, sizeof(BackendTable) * 2)
        assert ran(case, program) == expected
        program.free()
        program.free()      # NULL now


def test_every_call_works_without_a_place_for_the_error(toys):
    case = chain(toys)
    with case.sched, Toys(toys, queued=[True, False]) as table:
        program, api, room = program_of(case, table), functions(), (c_char * 256)()
        assert api.program_run(program.handle, None) == HAZARD
        assert api.program_set(program.handle, 99, room, 4, None) == BAD_ARGUMENT
        assert api.program_touch(program.handle, 99, None) == BAD_ARGUMENT
        assert api.program_read(program.handle, 0, room, 0, 10**6, None) == BAD_ARGUMENT
        for name in FUNCTIONS:
            table.toys[0].fails, table.toys[0].status = FUNCTIONS.index(name), OUT_OF_MEMORY
            table.toys[0].fails_after = table.toys[0].calls[FUNCTIONS.index(name)]
            api.program_run(program.handle, None)
            api.program_synchronize(program.handle, None)
            table.toys[0].fails = -1
        assert ran(case, program) == ran(case, program)
        program.free()


@pytest.mark.parametrize("kind", [0, 50], ids=["f32", "unknown"])
def test_experts_whose_numbers_are_none_are_left_out(toys, monkeypatch, kind):
    """The kernel refuses such numbers; the copy of experts must not read or write outside of the weight, whose type may
    be one that this package does not know."""
    arrays_of = capi_toys.arrays_of

    def with_kind(graph):
        found = arrays_of(graph)
        for i, t in enumerate(graph.tensors):
            if t.ne[2] == 3:
                found["layout"][i]["type"], found["layout"][i]["nbytes"] = kind, t.nbytes
        return found

    monkeypatch.setattr(capi_toys, "arrays_of", with_kind)
    ctx, homes = gs.Context(), [gs.Context(), gs.Context()]
    x, ids = ctx.tensor("f32", (8, 1, 2), "x", input=True), ctx.tensor("i32", (1, 2), "ids", input=True)
    value = x
    for _ in range(3):      # three are too much to keep, so that each compute copies the experts that it uses
        value = ctx.mul_mat_id(homes[1].tensor("f32", (8, 8, 3)), value, ids)
    case = Case(gs.Graph(ctx.set_output(value)), homes, [
        PythonToy(toys, "dev", offloads=True), PythonToy(toys, "host")])
    ran_nodes = []

    def counts(context, run, error):
        ran_nodes.append(1)
        return 0

    counts = RUN(counts)
    with case.sched, Toys(toys, queued=[False, False]) as table:
        table.tables[0].run = ctypes.cast(counts, c_void_p)
        program = case.program(table, resident_bytes(case.graph))
        assert "copy experts" in kinds_of(program.view())
        program.set(case.graph.id_of(x), bytes(x.nbytes))
        for numbers in ((-1, 3), (2**31 - 1, -(2**31)), (0, 2)):
            program.set(case.graph.id_of(ids), np.array(numbers, np.int32).tobytes())
            program.run()
        assert len(ran_nodes) == 9
        program.free()
