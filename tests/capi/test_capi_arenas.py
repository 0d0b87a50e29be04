"""Programs of the C API in arenas that they share: one runs at a time, in memory of the size of the largest."""

import ctypes
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, c_int64, c_void_p

import numpy as np
import pytest
from capi_calls import CArenas, Refused
from capi_toys import (
    BAD_ARGUMENT,
    BAD_PLACEMENT,
    FUNCTIONS,
    HAZARD,
    OUT_OF_MEMORY,
    Case,
    PythonToy,
    Toys,
    chain,
    inputs_of,
    ran,
    read_last,
    resident_bytes,
)

import ggml_sched as gs

ALLOC = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_int64, POINTER(c_void_p), c_void_p)
FREE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


@contextmanager
def sharing(cases, table):
    """The programs of these cases in arenas that are made for all of them; the programs alone hold the arenas."""
    programs = []
    with ExitStack() as stack:
        plans = [stack.enter_context(case.planned())[1] for case in cases]
        arenas = CArenas(plans, table.tables)
        try:
            for case in cases:
                programs.append(case.program(arenas, resident_bytes(case.graph)))
                stack.callback(programs[-1].free)
        finally:
            arenas.free()
        yield programs


def alone(cases, table) -> tuple[list[bytes], list[list[int]]]:
    """Each case in memory of its own: its result, and the bytes on each backend."""
    results, nbytes = [], []
    for case in cases:
        program = case.program(table, resident_bytes(case.graph))
        results.append(ran(case, program))
        nbytes.append([toy.n_bytes for toy in table.toys])
        program.free()
    return results, nbytes


@pytest.mark.parametrize("queued", [False, True])
def test_programs_take_turns_in_memory_of_the_size_of_the_largest(toys, queued):
    cases = [chain(toys, 4), chain(toys, 64), chain(toys, 16)]
    with Toys(toys, queued=[queued, queued]) as table:
        expected, nbytes = alone(cases, table)
        with sharing(cases, table) as programs:
            assert [toy.n_bytes for toy in table.toys] == nbytes[1] > nbytes[0]
            for k in (0, 1, 1, 2, 0, 2, 1, 0):
                assert ran(cases[k], programs[k]) == expected[k]
            for k in (0, 1, 2, 0, 1):       # the next one is queued before the last one is done
                programs[k].run()
            assert read_last(cases[1], programs[1]) == expected[1]


def test_each_buffer_is_as_large_as_one_of_the_plans_needs_it(toys):
    cases = [chain(toys, 24), chain(toys, 8)]
    cut = chain(toys, 20, max_buffer_size=1024)
    with Toys(toys, queued=[False, False]) as table:
        expected, nbytes = alone([*cases, cut], table)
        calls = table.calls("alloc")
        with sharing([*cases, cut], table) as programs:
            made = [after - before for after, before in zip(table.calls("alloc"), calls, strict=True)]
            assert max(made) > 1
            total = [toy.n_bytes for toy in table.toys]
            assert all(max(column) <= n < sum(column) for column, n in zip(zip(*nbytes, strict=True), total,
                                                                           strict=True))
            for k in (2, 0, 1, 2):
                assert ran([*cases, cut][k], programs[k]) == expected[k]


def test_a_result_ends_with_the_compute_of_another_program(toys):
    cases = [chain(toys, 4), chain(toys, 8)]
    with Toys(toys, queued=[True, True]) as table, sharing(cases, table) as (first, second):
        before = ran(cases[0], first)
        weight = next(i for i, t in enumerate(cases[0].graph.tensors) if t.buffer is not None)
        ran(cases[1], second)
        with pytest.raises(Refused, match="another program has computed in the same arenas") as refused:
            read_last(cases[0], first)
        assert refused.value.status == HAZARD
        assert first.read(weight, 128) == resident_bytes(cases[0].graph)[weight].tobytes()
        first.run()
        assert read_last(cases[0], first) == before


def test_the_first_one_keeps_its_result_while_the_second_has_not_run(toys):
    cases = [chain(toys, 4), chain(toys, 8)]
    with Toys(toys, queued=[True, False]) as table, sharing(cases, table) as (first, second):
        expected = ran(cases[0], first)
        with pytest.raises(Refused, match="an input was never set"):
            second.run()
        assert read_last(cases[0], first) == expected
        with pytest.raises(Refused, match="another program has computed"):
            read_last(cases[1], second)


def test_a_plan_that_does_not_fit_is_refused_with_both_sizes(toys):
    small, large = chain(toys, 4), chain(toys, 64)
    ctx = gs.Context()
    single = Case(gs.Graph(ctx.set_output(ctx.relu(ctx.tensor("f32", 4, input=True)))), [gs.Context()],
                  [PythonToy(toys, "host")])
    with Toys(toys, queued=[False, False]) as table, small.planned() as (_, plan), single.planned() as (_, other):
        expected = ran(small, program := small.program(table, resident_bytes(small.graph)))
        program.free()
        arenas = CArenas([plan], table.tables)
        with pytest.raises(Refused, match=r"backend 0 'mid': the plan needs a buffer of \d+ bytes") as refused:
            large.program(arenas, resident_bytes(large.graph))
        error = refused.value.error
        assert (refused.value.status, error.backend) == (OUT_OF_MEMORY, 0)
        assert error.value > error.limit == table.toys[0].n_bytes
        with pytest.raises(Refused, match="another number of backends") as refused:
            single.program(arenas, {})
        assert refused.value.status == BAD_ARGUMENT
        with pytest.raises(Refused, match="another number of backends") as refused:
            CArenas([plan, other], table.tables)
        assert (refused.value.status, refused.value.error.index) == (BAD_ARGUMENT, 1)
        program = small.program(arenas, resident_bytes(small.graph))     # the arenas work as before
        arenas.free()
        assert ran(small, program) == expected
        program.free()


def test_a_larger_alignment_than_that_of_the_arenas_is_refused(toys):
    case, wide, room = chain(toys, 64), chain(toys, 4, alignment=128), np.zeros(1 << 16, np.uint8)

    def odd(_, nbytes, memory, error):
        memory[0] = room.ctypes.data // 128 * 128 + 128 + 64
        return 0

    functions = [ALLOC(odd), FREE(lambda *_: None)]
    with Toys(toys, queued=[False, False]) as table, case.planned() as (_, plan):
        for k, name in enumerate(("alloc", "free")):
            setattr(table.tables[0], name, ctypes.cast(functions[k], c_void_p))
        arenas = CArenas([plan], table.tables)
        with pytest.raises(Refused, match="backend 0 'mid': the plan needs an alignment of 128") as refused:
            wide.program(arenas, resident_bytes(wide.graph))
        assert (refused.value.status, refused.value.error.backend) == (BAD_PLACEMENT, 0)
        arenas.free()


@pytest.mark.parametrize("function", ["alloc", "event_new"])
def test_a_failure_while_programs_are_made_leaves_the_others_usable(toys, function):
    cases = [chain(toys, 4), chain(toys, 8)]
    with Toys(toys, queued=[True, True]) as table, ExitStack() as stack:
        plans = [stack.enter_context(case.planned())[1] for case in cases]
        toy = table.toys[1]
        if function == "alloc":
            toy.fails, toy.status = FUNCTIONS.index("alloc"), OUT_OF_MEMORY
            with pytest.raises(Refused, match="allocating its arena"):
                CArenas(plans, table.tables)
            toy.fails = -1
            assert [one.n_bytes for one in table.toys] == [0, 0]
        arenas = CArenas(plans, table.tables)
        first = cases[0].program(arenas, resident_bytes(cases[0].graph))
        expected = ran(cases[0], first)
        if function == "event_new":
            toy.fails, toy.status = FUNCTIONS.index("event_new"), OUT_OF_MEMORY
            with pytest.raises(Refused, match="making an event"):
                cases[1].program(arenas, resident_bytes(cases[1].graph))
            toy.fails = -1
        assert read_last(cases[0], first) == expected
        arenas.free()
        first.free()


def test_an_error_of_queued_work_reaches_one_call_and_ends_all_results(toys):
    cases = [chain(toys, 4), chain(toys, 8)]
    with Toys(toys, queued=[True, True]) as table, sharing(cases, table) as (first, second):
        expected = [ran(cases[0], first), ran(cases[1], second)]
        toy = table.toys[0]
        for reader in (first, second):      # `second` has run last
            second.run()
            toy.fails, toy.status = FUNCTIONS.index("synchronize"), OUT_OF_MEMORY
            with pytest.raises(Refused, match="finishing queued work"):
                reader.synchronize()
            toy.fails = -1
            with pytest.raises(Refused, match="no compute has succeeded"):
                read_last(cases[1], second)
            assert ran(cases[1], second) == expected[1]
        toy.fails, toy.status = FUNCTIONS.index("synchronize"), OUT_OF_MEMORY
        with pytest.raises(Refused, match="finishing queued work"):
            first.run()         # which waits for `second`
        toy.fails = -1
        for case, program in zip(cases, (first, second), strict=True):
            with pytest.raises(Refused, match="no compute has succeeded"):
                read_last(case, program)
        assert [ran(cases[0], first), ran(cases[1], second)] == expected


@pytest.mark.parametrize("nbytes", [0, 64])
def test_memory_that_overlaps_another_buffer_or_ends_nowhere_is_refused(toys, nbytes):
    """`nbytes` is how far apart the buffers are that the backend returns."""
    freed, given = [], []

    def overlapping(_, size, memory, error):
        given.append((1 << 20) + len(given) * nbytes)
        memory[0] = given[-1]
        return 0

    def at_the_end(_, size, memory, error):
        memory[0] = 2**64 - 256
        return 0

    cut = chain(toys, 20, max_buffer_size=1024)
    with Toys(toys, queued=[False, False]) as table, cut.planned() as (_, plan):
        release = FREE(lambda context, memory, size: freed.append(memory))
        table.tables[1].free = ctypes.cast(release, c_void_p)
        for function, message in ((overlapping, "overlaps that of another buffer"), (at_the_end, "the address range")):
            made = ALLOC(function)
            table.tables[1].alloc = ctypes.cast(made, c_void_p)
            with pytest.raises(Refused, match=message) as refused:
                CArenas([plan], table.tables)
            assert (refused.value.status, refused.value.error.backend) == (BAD_PLACEMENT, 1)
        assert freed == [*given, 2**64 - 256]       # what the backend returned goes back to it


def test_inputs_stay_set_while_another_program_runs(toys):
    cases = [chain(toys, 4), chain(toys, 8)]
    with Toys(toys, queued=[True, False]) as table, sharing(cases, table) as (first, second):
        for i, data in inputs_of(cases[0]).items():
            first.set(i, data)
        ran(cases[1], second)
        first.run()
        found = read_last(cases[0], first)
    with Toys(toys, queued=[True, False]) as table:
        assert found == alone(cases, table)[0][0]
