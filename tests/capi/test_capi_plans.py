"""Invalid problems give errors that name the field; reserved plans serve as in Python; packing, names, threads."""

import ctypes
import threading
from ctypes import byref

import numpy as np
import pytest
from capi_calls import (
    BAD_ARGUMENT,
    NO_HOST_MEMORY,
    OUT_OF_MEMORY,
    OVERFLOW,
    UNSUPPORTED_OP,
    CGraph,
    CPlan,
    PackResult,
    PolicyStruct,
    Problem,
    Refused,
    TypeTraits,
    arrays_of,
    c_pack,
    call,
    functions,
    policy_struct,
)
from capi_problems import problem_of, python_plan, values_of
from configs import configured_graph, graph_names
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import quick

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, plan_values, replay_plan
from ggml_sched._graph import op_numbers
from ggml_sched.planning.planner import POLICIES


def chain(n: int = 8, rows: int = 4, inputs: bool = False) -> gs.Graph:
    """Ids: leafs w 0, x 1; nodes y = w x 2, v = first row of y 3, a = relu v 4, o = a + a 5."""
    ctx = gs.Context()
    w, x = ctx.tensor("f32", (n, n), "w"), ctx.tensor("f32", (n, rows), "x")
    if inputs:
        ctx.set_input(x)
    y = ctx.mul_mat(w, x)
    a = ctx.relu(ctx.view_1d(y, n, 0))
    return gs.Graph(ctx.add(a, a))


POLICY = policy_struct(Policy())
ONE = [(32, 0, None)]
TWO = [(32, 0, None), (64, 0, None)]


def with_policy(**fields) -> PolicyStruct:
    found = policy_struct(Policy())
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def groups(*members, backends=None) -> dict:
    return {"n_groups": len(members), "group_backend": backends or [0] * len(members),
            "group_begin": np.cumsum([0, *map(len, members)]), "group_member": [k for m in members for k in m]}


ROW = [1, 1, 1, 1, 1, 1]
WRONG = {
    "placement": (with_policy(placement=2), ONE, {}, -1, -1, "policy.placement = 2"),
    "offsets": (with_policy(offsets=-1), ONE, {}, -1, -1, "policy.offsets = -1"),
    "reuse": (with_policy(reuse=4), ONE, {}, -1, -1, "policy.reuse = 4"),
    "places": (with_policy(n_copies=0), ONE, {}, -1, -1, "policy.n_copies = 0"),
    "no backends": (POLICY, [], {}, -1, -1, "n_backends = 0"),
    "too many backends": (POLICY, ONE * 257, {}, -1, -1, "n_backends = 257"),
    "alignment": (POLICY, [*ONE, (0, 0, None)], {}, -1, 1, "backend 1: alignment = 0"),
    "huge alignment": (POLICY, [((1 << 30) + 1, 0, None)], {}, -1, 0, "alignment"),
    "largest buffer": (POLICY, [(1, -1, None)], {}, -1, 0, "max_buffer = -1"),
    "resident": (POLICY, TWO, {"resident": [0, 2, -1, -1, -1, -1]}, 1, -1, "resident[1] = 2"),
    "resident below": (POLICY, TWO, {"resident": [0, -2, -1, -1, -1, -1]}, 1, -1, "resident[1] = -2"),
    "usage": (POLICY, TWO, {"resident": [0] * 6, "usage": [0, 2, 0, 0, 0, 0]}, 1, 0, "usage[1] = 2"),
    "buffers without readers": (POLICY, TWO, {"n_buffers": 1}, -1, -1, "n_buffers = 1"),
    "readers without buffers": (POLICY, TWO, {"reads_buffer": [[1], [1]]}, -1, -1, "n_buffers = 0"),
    "buffer": (POLICY, TWO, {"resident": [1, -1, -1, -1, -1, -1], "n_buffers": 1, "buffer": [1] * 6,
                             "reads_buffer": [[0], [1]]}, 0, 1, "buffer[0] = 1"),
    "assigned": (POLICY, TWO, {"assigned": [-1, -1, 2, -1, -1, -1]}, 2, -1, "assigned[2] = 2"),
    "bytes": (POLICY, TWO, {"nbytes": [[256, 128, 128, 32, 32, 32], [256, 128, 127, 32, 32, 32]]}, 2, 1,
              "nbytes[8] = 127"),
    "groups without arrays": (POLICY, ONE, {"n_groups": 1}, -1, -1, "n_groups = 1"),
    "negative groups": (POLICY, ONE, {"n_groups": -1}, -1, -1, "n_groups = -1"),
    "a group of one": (POLICY, ONE, groups((0,)), -1, -1, "group_begin[1] = 1"),
    "a group of one among others": (POLICY, ONE, groups((0,), (0, 2, 3)), -1, 0, "group_begin[1] = 1"),
    "a group that falls": (POLICY, ONE, groups((2, 0)), -1, 0, "group_member[1] = 0"),
    "a group past the nodes": (POLICY, ONE, groups((0, 4)), -1, 0, "group_member[1] = 4"),
    "a group of a stranger": (POLICY, ONE, groups((0, 2), backends=[1]), -1, -1, "group_backend[0] = 1"),
    "a group with a view": (POLICY, ONE, groups((0, 1)), 3, 0, "group_member[1] = 1"),
    "groups that share a node": (POLICY, ONE, groups((0, 2), (2, 3)), 4, 0, "group_member[2] = 2 is in another"),
    "groups in another order": (POLICY, TWO, groups((2, 3), (0, 2), backends=[0, 1]), -1, 1,
                                "group_member[2] = 0 begins"),
    "groups of equal backends": (POLICY, TWO, groups((0, 2), (0, 3)), -1, 0, "group_member[2] = 0 begins"),
    "more members than nodes": (POLICY, ONE, groups((0, 2), (0, 2), (0, 3)), -1, -1, "group_begin[3] = 6"),
}


@pytest.fixture(scope="module")
def graph():
    with CGraph(arrays_of(chain())) as found:
        yield found.finish()


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_problem_is_named(graph, what):
    policy, backends, arrays, tensor, backend, said = WRONG[what]
    with pytest.raises(Refused) as refused:
        CPlan.made(graph, Problem(policy, backends, **arrays))
    error = refused.value.error
    assert (refused.value.status, error.tensor, error.backend) == (BAD_ARGUMENT, tensor, backend)
    assert said in error.message


def test_what_has_no_plan_says_why(graph):
    with pytest.raises(Refused, match=r"tensor 2 \(MUL_MAT\): none of the 2 backends supports it") as refused:
        CPlan.made(graph, Problem(POLICY, TWO, supports=[[1, 1, 0, 1, 1, 1]] * 2))
    assert (refused.value.status, refused.value.error.tensor) == (UNSUPPORTED_OP, 2)
    said = r"tensor 0 \(NONE\): 256 bytes exceed the maximum buffer size 200 of backend 0"
    with pytest.raises(Refused, match=said) as refused:
        CPlan.made(graph, Problem(POLICY, [(32, 200, None)]))
    error = refused.value.error
    assert (error.status, error.tensor, error.backend, error.value, error.limit) == (OUT_OF_MEMORY, 0, 0, 256, 200)
    said = r"tensor 0 \(NONE\): 256 bytes exceed the maximum buffer size 200 of backend 1"
    with pytest.raises(Refused, match=said) as refused:
        CPlan.made(graph, Problem(POLICY, [(32, 100, None), (32, 200, None)], assigned=[1] * 6))
    assert (refused.value.error.backend, refused.value.error.limit) == (1, 200)
    big = (1 << 63) - 1
    with pytest.raises(Refused, match="leave the 64-bit range") as refused:
        CPlan.made(graph, Problem(POLICY, ONE, nbytes=[[big] * 6]))
    assert refused.value.status == OVERFLOW


@pytest.mark.parametrize("name, called", [((), "backend 1"), ((b"cuda",), "backend 1 'cuda'"),
                                          ((b"x" * 500,), f"backend 1 '{'x' * 40}'")])
def test_errors_about_a_backend_name_it(graph, name, called):
    """By its index, and by its name where the caller gave one."""
    def said(backend: tuple, **arrays) -> str:
        with pytest.raises(Refused) as refused:
            CPlan.made(graph, Problem(POLICY, [(32, 0, None), (*backend, *name)], **arrays))
        assert refused.value.error.backend == 1
        return refused.value.error.message

    assert said((0, 0, None)).startswith(f"{called}: alignment = 0 ")
    assert said((32, 0, None), nbytes=[[256, 128, 128, 32, 32, 32], [256, 128, 127, 32, 32, 32]]).startswith(
        f"tensor 2 on {called}: nbytes[8] = 127 ")
    assert said((32, 200, None), assigned=[1] * 6).endswith(f"exceed the maximum buffer size 200 of {called}")
    computed = {"resident": [-1, -1, 1, -1, -1, -1], "supports": [[1] * 6, [1, 1, 0, 1, 1, 1]]}
    assert said((32, 0, None), **computed) == f"tensor 2 (MUL_MAT) has memory on {called}, which does not support it"


def test_what_is_not_given_has_a_default(graph):
    """A NULL array means the same as an array of defaults."""
    plain = CPlan.made(graph, Problem(POLICY, TWO))
    masks = [0xFFFFFFFFFFFFFFFF if k in gs._core.inplace_ops() else 0 for k in names_by_number()]
    said = CPlan.made(graph, Problem(
        POLICY, [(32, 0, masks), (64, 0, masks)], resident=[-1] * 6, usage=[0] * 6, reads=[[1, 0], [0, 1]],
        assigned=[-1] * 6, supports=[ROW, ROW], offloads=[[0] * 6] * 2, nbytes=[[256, 128, 128, 32, 32, 32]] * 2))
    assert plain.arrays() == said.arrays()
    # Residents without buffers are in one for each backend.
    where = {"resident": [1, 0, -1, -1, -1, -1], "reads": [[0, 1], [0, 0]]}
    plain = CPlan.made(graph, Problem(POLICY, TWO, **where))
    said = CPlan.made(graph, Problem(POLICY, TWO, **where, n_buffers=2, buffer=[1, 0, 0, 0, 0, 0],
                                     reads_buffer=[[1, 1], [0, 1]]))
    assert plain.arrays() == said.arrays()


def names_by_number() -> list[str]:
    names = {number: name for name, number in op_numbers().items()}
    return [names.get(k, "") for k in range(256)]


def test_policies_are_those_of_python():
    for name in ("default", "seed"):
        found = PolicyStruct(-1, -1, -1, -1, -1, -1)
        getattr(functions(), f"policy_{name}")(byref(found))
        assert bytes(found) == bytes(policy_struct(POLICIES[name]))


# -- replay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy(), Policy(n_copies=2), POLICIES["seed"]], ids=str)
def test_a_reserved_plan_serves_what_it_serves_in_python(policy):
    backends = (gs.DryBackend("a"), gs.DryBackend("host", 64))
    reserved, sizes = chain(16, 8, True), [(16, 8), (16, 3), (12, 8), (17, 8), (16, 9), (4, 2)]
    mine = python_plan(reserved, backends, policy)
    served = []
    with CGraph(arrays_of(reserved)) as first, CGraph(arrays_of(reserved)) as other:
        plan = CPlan.made(first.finish(), problem_of(reserved, backends, policy))
        for n, rows in sizes:
            graph = chain(n, rows, True)
            problem = problem_of(graph, backends, policy)
            found = plan.replay(first, other.refill(arrays_of(graph)).finish(), problem)
            want = replay_plan(Request(graph, Devices(backends), None), mine, policy)
            assert (found is None) == (want is None)
            served.append(found is not None)
            if found:
                functions().plan_find_exclusive(found.handle)
                assert values_of(found.arrays()) == {"groups": [], **plan_values(want)}
                found.free()
        plan.free()
    assert served == [True, True, True, False, False, True]


def test_compacted_offsets_are_those_of_a_replayed_plan():
    backends = (gs.DryBackend("a"), gs.DryBackend("host", 64))
    reserved, graph = chain(16, 8, True), chain(12, 3, True)
    problem = problem_of(graph, backends, Policy())
    with CGraph(arrays_of(reserved)) as first, CGraph(arrays_of(graph)) as other:
        plan = CPlan.made(first.finish(), problem_of(reserved, backends, Policy()))
        found = plan.replay(first, other.finish(), problem)
        sizes, want, largest = found.arrays()["size"], found.arrays()["offset"], plan.arrays()["size"]
        offsets = (ctypes.c_int64 * len(want))()

        def compact(sizes, in_order: bool = False) -> int:
            return functions().plan_compact(plan.handle, (ctypes.c_int64 * len(sizes))(*sizes), in_order, offsets)

        assert compact(sizes) == 0 and list(offsets) == list(want)
        was = list(plan.arrays()["offset"])
        assert list(want) != was
        assert compact(sizes, in_order=True) == 0 and list(offsets) != was
        assert all(now <= before for now, before in zip(offsets, was, strict=True))
        assert compact(largest) == 0 and list(offsets) == was
        for i in (0, len(sizes) - 1):
            assert compact([*largest[:i], largest[i] + 1, *largest[i + 1:]]) == BAD_ARGUMENT
            assert compact([*largest[:i], -1, *largest[i + 1:]]) == BAD_ARGUMENT
        assert functions().plan_compact(None, offsets, False, offsets) == BAD_ARGUMENT
        found.free()
        plan.free()


def test_a_reserved_plan_does_not_serve_another_problem():
    """A graph of other wiring, or with other answers that the plan depends on, is not served; nor is another graph's
    plan."""
    arrays = arrays_of(chain())
    with CGraph(arrays) as first, CGraph(arrays) as other:
        first.finish(), other.finish()
        base = {"resident": [0, -1, -1, -1, -1, -1], "assigned": [-1] * 6, **groups((0, 2))}
        plan = CPlan.made(first, Problem(POLICY, TWO, **base))

        def serves(backends=TWO, policy=POLICY, **changed) -> bool:
            found = plan.replay(first, other, Problem(policy, backends, **{**base, **changed}))
            if found:
                found.free()
            return found is not None

        assert serves()
        assert not serves(resident=[1, -1, -1, -1, -1, -1])
        assert not serves(usage=[1] * 6)
        assert not serves(assigned=[-1, -1, -1, -1, 1, -1])
        assert not serves(assigned=None)
        assert not serves(**groups((2, 3)))
        assert not serves(backends=[(32, 0, None), (32, 0, None)])
        assert not serves(backends=[(32, 0, [0] * 256), (64, 0, None)])
        assert not serves(backends=[(32, 4096, None), (64, 0, None)])
        assert not serves(policy=with_policy(n_copies=2))
        assert not serves(reads=[[1, 1], [1, 1]])
        # Asked anew each time: a backend may judge by shapes.
        assert not serves(supports=[[1, 1, 0, 1, 1, 1]] * 2)
        assert not serves(nbytes=[[256, 128, 4096, 32, 32, 32]] * 2)
        for change in ({"flags": 4}, {"slot": 1}):
            wired = {name: array.copy() for name, array in arrays.items()}
            for name, index in change.items():
                wired[name][index] += 2
            other.refill(wired).finish()
            assert not serves()
        other.refill(arrays).finish()
        assert serves()
        with pytest.raises(Refused, match="was not made for"):
            plan.replay(other, first, Problem(POLICY, TWO, **base))
        first.refill(arrays).finish()
        with pytest.raises(Refused, match="was not made for"):
            plan.replay(first, other, Problem(POLICY, TWO, **base))
        plan.free()


# -- packing and names ------------------------------------------------------------------------------------------

TIMES = st.one_of(st.integers(0, 12), st.integers(-(1 << 63), (1 << 63) - 1))


@quick(60)
@given(st.lists(st.tuples(TIMES, TIMES, st.integers(0, 1 << 40)), max_size=30), st.sampled_from([-1, 0, 100]))
def test_packing_is_that_of_python(rows, budget):
    rows = [(min(a, b), max(a, b), size) for a, b, size in rows]
    want = gs.pack(*(zip(*rows, strict=True) if rows else ((), (), ())), budget=None if budget < 0 else budget)
    offsets, found = c_pack(rows, budget=budget)
    assert offsets == want.offsets.tolist()
    assert (found.arena, found.bound, found.tries) == (want.arena, want.bound, want.tries)
    assert found.optimal == want.optimal
    assert functions().pack_method_name(found.method).decode() == want.method and found.proven <= found.arena


def test_what_cannot_be_packed_is_refused():
    for rows, kwargs, status, index in (([(0, 1, 4), (2, 1, 4)], {}, BAD_ARGUMENT, 1),
                                        ([(0, 1, -4)], {}, BAD_ARGUMENT, 0),
                                        ([(0, 1, 4)], {"capacity": -2}, BAD_ARGUMENT, -1),
                                        ([(0, 1, 4)], {"budget": -3}, BAD_ARGUMENT, -1),
                                        ([(0, 1, 1 << 62)] * 3, {}, OVERFLOW, -1)):
        with pytest.raises(Refused) as refused:
            c_pack(rows, **kwargs)
        assert (refused.value.status, refused.value.error.index) == (status, index)
    with pytest.raises(Refused):
        call("pack", -1, None, None, None, -1, -1, None, byref(PackResult()))
    with pytest.raises(Refused):
        call("pack", 1, None, None, None, -1, -1, None, byref(PackResult()))


def test_names_and_numbers_are_those_of_python():
    table = functions()
    ops = op_numbers()
    for number in range(-2, 300):
        name = table.op_name(number)
        assert (None if name is None else ops[name.decode()]) == (None if name is None else number)
    assert {name: table.op_of_name(name.encode()) for name in ops} == ops
    assert {table.type_of_name(str(t).encode()): table.type_name(t).decode() for t in gs.Type} == {
        int(t): str(t) for t in gs.Type}
    for number in range(-2, 70):
        found = TypeTraits()
        status = table.type_traits(number, byref(found))
        if number in set(map(int, gs.Type)):
            t = gs.Type(number)
            assert (status, found.block_size, found.type_size) == (0, t.block_size, t.type_size)
        else:
            assert status == BAD_ARGUMENT and table.type_name(number) is None
    assert table.op_of_name(b"NOTHING") == table.type_of_name(b"f31") == table.op_of_name(None) == -1
    assert [table.reason_name(k).decode() for k in (0, 1, 13, 15)] == [
        "nothing", "user", "most inputs", "user unsupported"]
    assert table.reason_name(16) is table.reason_name(-1) is table.pack_method_name(9) is table.status_name(1) is None
    assert table.status_name(0) == b"ok" and table.status_name(-4) == b"bad argument"


# -- threads ----------------------------------------------------------------------------------------------------


def test_threads_read_one_graph_and_plan_at_once():
    """ctypes calls without the GIL: plans of a graph that all threads share, and of one that each refills."""
    graph, config = configured_graph(graph_names()[0], "c4")
    arrays, problem = arrays_of(graph), problem_of(graph, config.backends, Policy())
    shared = CGraph(arrays).finish()
    reserved = CPlan.made(shared, problem)
    want, wrong = reserved.arrays(), []

    def work() -> None:
        with CGraph(arrays) as own:
            for _ in range(4):
                own.finish()
                made = [CPlan.made(shared, problem), CPlan.made(own, problem), reserved.replay(shared, own, problem)]
                if made[0].arrays() != want or made[1].arrays() != want or made[2].arrays()["offset"] != want["offset"]:
                    wrong.append("a plan differs")
                if not functions().graph_equal(own.handle, shared.handle) or own.fingerprint() != shared.fingerprint():
                    wrong.append("a graph differs")
                for plan in made:
                    plan.free()
                own.refill(arrays)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    reserved.free()
    shared.free()


def test_more_places_than_ids_are_no_memory(ctx):
    n = 20_000
    leafs = [ctx.tensor("f32", (1,)) for _ in range(n)]
    for t in leafs:
        ctx.set_input(t)
    arrays = arrays_of(gs.Graph(*(ctx.sqr(t) for t in leafs)))
    computed = np.isin(np.arange(2 * n), arrays["node"])
    problem = Problem(with_policy(n_copies=60_000), TWO, assigned=np.where(computed, 0, 1))
    with pytest.raises(Refused) as refused:
        CPlan.made(CGraph(arrays).finish(), problem)
    assert refused.value.status == NO_HOST_MEMORY
