"""Graphs written in place: mistakes give errors with a message, and handles stay usable."""

from ctypes import byref, c_void_p
from pathlib import Path

import numpy as np
import pytest
from capi_calls import (
    BAD_ARGUMENT,
    GRAPH_ARRAYS,
    NO_HOST_MEMORY,
    OVERFLOW,
    CGraph,
    CPlan,
    GraphArrays,
    GraphSize,
    PolicyStruct,
    Problem,
    Refused,
    arrays_of,
    call,
    functions,
)
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes

import ggml_sched as gs


def small() -> gs.Graph:
    """Ids: leafs w 0, x 1; nodes y = w x 2, v = view of y 3, r = v repeated 4, z = y + r in y 5, o = relu z 6.

    o keeps x.
    """
    ctx = gs.Context("small")
    w, x = ctx.tensor("f32", (8, 8), "w"), ctx.tensor("f32", (8, 4), "x")
    y = ctx.mul_mat(w, x)
    v = ctx.view_1d(y, 8, 32)
    z = ctx.add(y, ctx.repeat(v, x), inplace=True)
    o = ctx.relu(z)
    ctx.keep_until(x, o)
    ctx.set_output(o)
    graph = gs.Graph(o)
    assert [t.op for t in graph.tensors] == ["NONE", "NONE", "MUL_MAT", "VIEW", "REPEAT", "ADD", "UNARY:RELU"]
    return graph


def policy() -> PolicyStruct:
    found = PolicyStruct()
    functions().policy_default(byref(found))
    return found


def one_backend() -> Problem:
    return Problem(policy(), [(32, 0, None)])


def plan_of(graph: CGraph, problem: Problem | None = None) -> dict:
    plan = CPlan.made(graph, problem or one_backend())
    found = plan.arrays()
    plan.free()
    return found


def put(name: str, index, value, field: str | None = None):
    """A change of one entry."""
    def change(arrays):
        if field is None:
            arrays[name][index] = value
        else:
            arrays[name][field][index] = value
    return change


WRONG = {
    "an op with no number": (put("layout", 2, 127, "op"), BAD_ARGUMENT, 2, "layout.op[2] = 127"),
    "an op past all numbers": (put("layout", 2, 256, "op"), BAD_ARGUMENT, 2, "layout.op[2] = 256"),
    "a negative op": (put("layout", 2, -1, "op"), BAD_ARGUMENT, 2, "layout.op[2] = -1"),
    "a negative type": (put("layout", 2, -1, "type"), BAD_ARGUMENT, 2, "layout.type[2] = -1"),
    "a type of the caller's, with negative bytes": (put("layout", 2, 63, "type"), BAD_ARGUMENT, 2,
                                                    "layout.nbytes[2] = -7"),
    "a negative extent": (put("layout", (2, 1), -4, "ne"), BAD_ARGUMENT, 2, "layout.ne[1] = -4"),
    "a negative stride": (put("layout", (2, 3), -4, "nb"), BAD_ARGUMENT, 2, "layout.nb[3] = -4"),
    "half a block": (put("layout", 1, 2, "type"), BAD_ARGUMENT, 1, "layout.ne[0] = 8 is no whole number of blocks"),
    "too many elements": (put("layout", (2, 0), 1 << 62, "ne"), OVERFLOW, 2, f"layout.ne[0] = {1 << 62}"),
    "too wide a stride": (put("layout", (2, 1), 1 << 62, "nb"), OVERFLOW, 2, "63 bits"),
    "a flag that is none": (put("flags", 2, 4), BAD_ARGUMENT, 2, "flags[2] = 4"),
    "a source past the tensors": (put("src", 0, 7), BAD_ARGUMENT, 2, "src[0] = 7 is no tensor"),
    "a negative source": (put("src", 0, -1), BAD_ARGUMENT, 2, "src[0] = -1 is no tensor"),
    "a node that reads itself": (put("src", 0, 2), BAD_ARGUMENT, 2, "src[0] = 2 is the tensor itself"),
    "a node that reads a later one": (put("src", 0, 6), BAD_ARGUMENT, 2,
                                      "src[0] = 6 is neither a leaf nor an earlier node"),
    "slots that do not ascend": (put("slot", 0, 1), BAD_ARGUMENT, 2, "slot[1] = 1"),
    "a slot past all slots": (put("slot", 1, 10), BAD_ARGUMENT, 2, "slot[1] = 10"),
    "sources that begin late": (put("src_begin", 0, 1), BAD_ARGUMENT, -1, "src_begin[0] = 1"),
    "sources that fall": (put("src_begin", 3, -1), BAD_ARGUMENT, 2, "src_begin[3] = -1"),
    "sources past the end": (put("src_begin", 3, 99), BAD_ARGUMENT, 2, "src_begin[3] = 99"),
    "sources left over": (put("src_begin", 7, 6), BAD_ARGUMENT, -1, "src_begin[7] = 6"),
    "sources of a leaf": (put("src_begin", 2, 1), BAD_ARGUMENT, 1, "src[0] = 0 is the source of a tensor that is not"),
    "parameters that fall": (put("param_begin", 3, -1), BAD_ARGUMENT, 2, "param_begin[3] = -1"),
    "deps past the end": (put("dep_begin", 5, 2), BAD_ARGUMENT, 4, "dep_begin[5] = 2"),
    "a dep that is no tensor": (put("dep", 0, 9), BAD_ARGUMENT, 6, "dep[0] = 9"),
    "a node that keeps itself": (put("dep", 0, 6), BAD_ARGUMENT, 6, "dep[0] = 6"),
    "a root past the tensors": (put("view_src", 3, 7), BAD_ARGUMENT, 3, "view_src[3] = 7"),
    "a root of -2": (put("view_src", 3, -2), BAD_ARGUMENT, 3, "view_src[3] = -2"),
    "a view of a view": (put("view_src", 5, 3), BAD_ARGUMENT, 5, "view_src[5] = 3"),
    "a view of itself": (put("view_src", 3, 3), BAD_ARGUMENT, 3, "view_src[3] = 3"),
    "a view that is none": (put("view_src", 3, -1), BAD_ARGUMENT, 3, "view_offs[3] = 32"),
    "an op that makes views, without root": (lambda a: (put("view_src", 3, -1)(a), put("view_offs", 3, 0)(a)),
                                             BAD_ARGUMENT, 3, "view_src[3] = -1"),
    "a view of another root": (put("view_src", 3, 1), BAD_ARGUMENT, 3, "view_src[3] = 1"),
    "a write to what is not read": (put("view_src", 5, 1), BAD_ARGUMENT, 5, "view_src[5] = 1"),
    "a view outside of its root": (put("view_offs", 3, 100), BAD_ARGUMENT, 3, "view_offs[3] = 100"),
    "a view far outside": (put("view_offs", 3, (1 << 63) - 1), BAD_ARGUMENT, 3, "view_offs[3]"),
    "a view before its root": (put("view_offs", 3, -4), BAD_ARGUMENT, 3, "view_offs[3] = -4"),
    "a leaf that is computed": (put("leaf", 0, 2), BAD_ARGUMENT, 2, "leaf[0] = 2"),
    "a leaf twice": (put("leaf", 0, 1), BAD_ARGUMENT, 1, "leaf[1] = 1"),
    "a leaf that is no tensor": (put("leaf", 0, 7), BAD_ARGUMENT, -1, "leaf[0] = 7"),
    "a node twice": (put("node", 4, 2), BAD_ARGUMENT, 2, "node[4] = 2"),
    "a node that is a leaf": (put("node", 4, 0), BAD_ARGUMENT, 0, "node[4] = 0"),
    "a node that is no tensor": (put("node", 4, -1), BAD_ARGUMENT, -1, "node[4] = -1"),
    "nodes in the wrong order": (lambda a: a["node"].__setitem__(slice(0, 2), [3, 2]), BAD_ARGUMENT, 3,
                                 "view_src[3] = 2 is not computed before its view"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_and_can_be_mended(what):
    change, status, tensor, said = WRONG[what]
    right = arrays_of(small())
    wrong = {name: array.copy() for name, array in right.items()}
    change(wrong)
    with CGraph(wrong) as graph:
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                graph.finish()
            error = refused.value.error
            assert (refused.value.status, error.tensor, error.backend) == (status, tensor, -1)
            assert said in error.message and (tensor < 0 or error.message.startswith(f"tensor {tensor} ("))
        with pytest.raises(Refused, match="not finished"):
            CPlan.made(graph, one_backend())
        graph.put(right, graph.fill)
        assert plan_of(graph.finish())["n_seq"] == 5


def test_a_node_left_out_is_named():
    arrays = arrays_of(small())
    arrays["node"] = arrays["node"][:-1]
    with CGraph(arrays) as graph, pytest.raises(Refused, match=r"layout.op\[6\] = .* not among the nodes") as refused:
        graph.finish()
    assert refused.value.error.tensor == 6


def test_a_leaf_that_views_a_node_is_refused():
    arrays = arrays_of(small())
    arrays["view_src"][1], arrays["layout"]["ne"][1] = 2, (8, 1, 1, 1)
    with CGraph(arrays) as graph, pytest.raises(Refused, match=r"view_src\[1\] = 2 is computed"):
        graph.finish()


@pytest.mark.parametrize("sizes", [(-1, 0, 0, 0, 0, 0), (1, 2, 0, 0, 0, 0), (1, 0, 2, 0, 0, 0), (1, -1, 1, 0, 0, 0),
                                   (1, 1, 1, 0, 0, 0), (1, 1, 0, -1, 0, 0), (1, 1, 0, 0, -1, 0), (1, 1, 0, 0, 0, -1),
                                   (0x40000000, 0, 0, 0, 0, 0), (1, 1, 0, 0x40000000, 0, 0)])
def test_sizes_that_make_no_sense_give_no_graph(sizes):
    handle = c_void_p(1)
    with pytest.raises(Refused) as refused:
        call("graph_new", byref(GraphSize(*sizes)), byref(GraphArrays()), byref(handle))
    assert refused.value.status == BAD_ARGUMENT and not handle


def test_what_no_host_has_memory_for_is_an_error():
    """More than any address space under a limit: a graph of a billion tensors, with all the sources there may be."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if not statm.exists() or int(statm.read_text().split()[0]) * resource.getpagesize() > 32 << 30:
        pytest.skip("a process that takes this much already, under sanitizers, cannot be limited")
    with CGraph(arrays_of(small())) as graph:
        handle = c_void_p(1)
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
        try:
            size = GraphSize(0x3FFFFFFF, 0, 0, 0x3FFFFFFF, 0x3FFFFFFF, 0x3FFFFFFF)
            with pytest.raises(Refused) as refused:
                call("graph_new", byref(size), byref(GraphArrays()), byref(handle))
            assert refused.value.status == NO_HOST_MEMORY and not handle
            # Refilling is refused, too, and what was there is there.
            with pytest.raises(Refused):
                call("graph_refill", graph.handle, byref(size), byref(GraphArrays()))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        graph.finish()


@pytest.mark.parametrize("missing", range(3))
def test_refilling_without_a_graph_a_size_or_arrays_is_refused(missing):
    size, arrays = GraphSize(0, 0, 0, 0, 0, 0), GraphArrays()
    with CGraph(arrays_of(small())) as graph:
        arguments = [graph.handle, byref(size), byref(arrays)]
        arguments[missing] = None
        with pytest.raises(Refused, match="graph, size or fill is NULL") as refused:
            call("graph_refill", *arguments)
        error = refused.value.error
        assert (error.status, error.value, error.limit) == (BAD_ARGUMENT, 0, 0)
        assert plan_of(graph.finish())["n"] == 7


def test_an_empty_graph_is_planned():
    with CGraph(arrays_of(gs.Graph())) as graph:
        found = plan_of(graph.finish())
    assert (found["n"], found["n_seq"], found["n_splits"], found["chunk_nbytes"]) == (0, 0, 0, [0])


def test_a_type_of_the_callers_own_takes_the_bytes_that_it_says():
    arrays = arrays_of(small())
    for number in (40, 63, 64, 1 << 20):
        arrays["layout"]["type"][6], arrays["layout"]["nbytes"][6] = number, 1000
        with CGraph(arrays) as graph:
            assert plan_of(graph.finish())["size"][6] == 1024


def test_a_graph_is_finished_once_and_refilled_in_the_same_memory():
    arrays = arrays_of(small())
    with CGraph(arrays) as graph:
        graph.finish()
        with pytest.raises(Refused, match="finished already"):
            graph.finish()
        plan = CPlan.made(graph, one_backend())
        before, where = plan.arrays(), graph.fill.layout
        for changed in (False, True):
            if changed:
                arrays["layout"]["ne"][:, 1] = 1
                arrays["view_offs"][3] = 0
            graph.refill(arrays)
            assert graph.fill.layout == where
            with pytest.raises(Refused, match="not finished"):
                CPlan.made(graph, one_backend())
            assert functions().graph_equal(graph.handle, graph.handle) == 0
            graph.finish()
        assert plan_of(graph)["size"] != before["size"]
        # Smaller and larger than it ever was; the plan made before stands alone.
        assert plan_of(graph.refill(arrays_of(gs.Graph())).finish())["n"] == 0
        assert graph.fill.layout == where
        big = gs.Context()
        t = big.tensor("f32", 4)
        for _ in range(40):
            t = big.relu(t)
        assert plan_of(graph.refill(arrays_of(gs.Graph(t))).finish())["n_seq"] == 40
        assert plan.arrays() == before
        plan.free()


def test_graphs_are_compared_entry_by_entry():
    table, graph = functions(), small()
    one = CGraph(arrays_of(graph)).finish()

    def compare(name: str | None = None, index=None, value=None, field=None) -> tuple[int, int]:
        arrays = arrays_of(graph)
        if name:
            put(name, index, value, field)(arrays)
        with CGraph(arrays) as other:
            other.finish()
            both = (one.handle, other.handle)
            assert (one.fingerprint()[0] == other.fingerprint()[0]) == table.graph_equal(*both)
            assert (one.fingerprint()[1] == other.fingerprint()[1]) == table.graph_same_wiring(*both)
            return table.graph_equal(*both), table.graph_same_wiring(*both)

    same, sizes, other = (1, 1), (0, 1), (0, 0)
    assert compare() == same
    assert compare("layout", (6, 1), 2, "ne") == sizes
    assert compare("layout", (6, 3), 999, "nb") == sizes
    assert compare("view_offs", 3, 64) == sizes
    assert compare("layout", 6, 1, "type") == other
    assert compare("layout", 6, 137, "op") == other
    assert compare("flags", 0, 1) == other
    assert compare("dep", 0, 0) == other
    assert compare("src", 1, 0) == other
    assert compare("slot", 1, 2) == other
    assert table.graph_equal(None, one.handle) == table.graph_equal(one.handle, None) == 0
    one.free()


def test_a_graph_that_is_filled_is_equal_to_a_finished_one():
    """A plan of the finished graph serves the filled one, so it need not be finished; only sizes are missing in it."""
    table, arrays = functions(), arrays_of(small())
    arrays["layout"]["type"][6], arrays["layout"]["nbytes"][6] = 99, 4096
    with CGraph(arrays) as one, CGraph(arrays) as filled, CGraph(arrays_of(gs.Graph())) as empty:
        assert not table.graph_equal(one.handle, filled.handle)
        one.finish()
        assert table.graph_equal(one.handle, filled.handle) and table.graph_equal(filled.handle, one.handle)
        assert not table.graph_same_wiring(one.handle, filled.handle)
        assert not table.graph_equal(one.handle, empty.handle) and not table.graph_equal(empty.handle, one.handle)
        for name in ("src_begin", "param_begin", "dep_begin"):
            changed = {**arrays, name: arrays[name].copy()}
            changed[name][-1] = (1 << 31) - 1
            assert not table.graph_equal(filled.refill(changed).handle, one.handle)
        arrays["layout"]["nbytes"][6] = 4095
        assert not table.graph_equal(filled.refill(arrays).handle, one.handle)
        arrays["layout"]["nbytes"][6], arrays["layout"]["nbytes"][5] = 4096, 12345
        assert table.graph_equal(filled.refill(arrays).handle, one.handle)


def test_a_trimmed_graph_has_its_contents_and_makes_no_plans():
    arrays = arrays_of(small())
    with CGraph(arrays) as graph, CGraph(arrays) as equal:
        assert functions().graph_trim(graph.handle, byref(graph.fill), None) == BAD_ARGUMENT
        plan = CPlan.made(graph.finish(), one_backend())
        before, equal_plan = plan.arrays(), plan_of(equal.finish())
        for _ in range(2):
            graph.trim()
            assert all(np.array_equal(graph.array(name, len(arrays[name])), arrays[name]) for name in GRAPH_ARRAYS
                       if name != "layout")
        assert np.array_equal(graph.array("layout", len(arrays["layout"]))["ne"], arrays["layout"]["ne"])
        assert functions().graph_equal(graph.handle, equal.handle) == 1
        assert functions().graph_same_wiring(equal.handle, graph.handle) == 1
        assert plan.arrays() == before
        replayed = plan.replay(graph, equal, one_backend())
        assert replayed is not None and replayed.arrays()["offset"] == before["offset"]
        for refused in (lambda: plan_of(graph), graph.fingerprint, lambda: plan.replay(graph, graph, one_backend())):
            with pytest.raises(Refused, match="trimmed"):
                refused()
        replayed.free()
        plan.free()
        assert plan_of(graph.refill(arrays).finish()) == equal_plan


@pytest.mark.parametrize("keeps", [True, False], ids=["with alloc dependencies", "without"])
def test_a_graph_that_keeps_its_wiring_serves_to_replay_its_plan(keeps: bool):
    arrays = arrays_of(small())
    if not keeps:
        arrays |= {"dep_begin": arrays["dep_begin"][:0], "dep": arrays["dep"][:0]}
    lost = {"layout", "view_offs", "param_begin", "param"}
    with CGraph(arrays) as graph, CGraph(arrays) as equal:
        keep = functions().graph_keep_wiring
        assert keep(graph.handle, byref(graph.fill), None) == BAD_ARGUMENT
        plan = CPlan.made(graph.finish(), one_backend())
        before, equal_plan = plan.arrays(), plan_of(equal.finish())
        graph.keep_wiring()
        assert not any(getattr(graph.fill, name) for name in lost)
        assert all(np.array_equal(graph.array(name, len(arrays[name])), arrays[name]) for name in GRAPH_ARRAYS
                   if name not in lost)
        assert functions().graph_same_wiring(graph.handle, equal.handle) == 1
        assert functions().graph_same_wiring(equal.handle, graph.handle) == 1
        assert functions().graph_equal(graph.handle, equal.handle) == 0
        assert functions().graph_equal(equal.handle, graph.handle) == 0
        assert functions().graph_equal(graph.handle, graph.handle) == 1
        for change in (put("layout", 6, 1, "type"), put("layout", 6, 137, "op"), put("flags", 0, 1)):
            change(other := {name: array.copy() for name, array in arrays.items()})
            with CGraph(other) as changed:
                assert functions().graph_same_wiring(graph.handle, changed.finish().handle) == 0
        assert plan.arrays() == before
        replayed = plan.replay(graph, equal, one_backend())
        assert replayed is not None and replayed.arrays()["offset"] == before["offset"]
        for refused in (lambda: plan_of(graph), graph.fingerprint, graph.keep_wiring, graph.trim,
                        lambda: plan.replay(graph, graph, one_backend())):
            with pytest.raises(Refused, match="trimmed|its wiring alone"):
                refused()
        replayed.free()
        plan.free()
        assert plan_of(graph.refill(arrays).finish()) == equal_plan
        graph.trim()
        with pytest.raises(Refused, match="trimmed"):
            graph.keep_wiring()


def test_parameters_tell_graphs_apart_but_wirings_not():
    def scaled(factor: float) -> CGraph:
        ctx = gs.Context()
        return CGraph(arrays_of(gs.Graph(ctx.scale(ctx.tensor("f32", 4), factor)))).finish()

    a, b, c = scaled(0.5), scaled(0.5), scaled(0.25)
    assert functions().graph_equal(a.handle, b.handle) == 1
    assert functions().graph_equal(a.handle, c.handle) == 0
    assert functions().graph_same_wiring(a.handle, c.handle) == 1
    for graph in (a, b, c):
        graph.free()


def test_null_is_an_error_or_nothing():
    table = functions()
    table.graph_free(None)
    table.plan_free(None)
    assert table.graph_finish(None, None) == BAD_ARGUMENT
    assert table.graph_new(None, None, None, None) == BAD_ARGUMENT
    assert table.graph_refill(None, None, None, None) == BAD_ARGUMENT
    assert table.graph_fingerprint(None, None, None, None) == BAD_ARGUMENT
    assert table.graph_trim(None, None, None) == BAD_ARGUMENT
    assert table.graph_keep_wiring(None, None, None) == BAD_ARGUMENT
    assert table.plan_new(None, None, None, None) == BAD_ARGUMENT
    assert table.plan_replay(None, None, None, None, None, None, None) == BAD_ARGUMENT
    handle = c_void_p(1)
    assert table.graph_new(None, None, byref(handle), None) == BAD_ARGUMENT and not handle
    handle = c_void_p(1)
    assert table.plan_new(None, byref(one_backend().c), byref(handle), None) == BAD_ARGUMENT and not handle
    # Without an error to fill in, too.
    arrays = arrays_of(small())
    arrays["src"][0] = 99
    with CGraph(arrays) as graph:
        assert table.graph_finish(graph.handle, None) == BAD_ARGUMENT


# -- random array contents -----------------------------------------------------------------------------------


def check_plan(plan: dict, n_src: int) -> None:
    """Assert that every index is valid, and that ranges that are alive together in one arena do not overlap."""
    n, n_seq = plan["n"], plan["n_seq"]
    assert all(-1 <= b < plan["n_backends"] for b in plan["assign"] + plan["arena_of"])
    assert all(0 <= i < n for i in plan["seq"] + plan["src"] + plan["like"]) and all(-1 <= i < n for i in plan["root"])
    assert len(plan["src"]) == n_src + plan["n_copies"] + plan["n_slots"]
    rectangles = []
    for i in range(n):
        if plan["birth"][i] < 0 or plan["root"][i] >= 0 or plan["arena_of"][i] < 0 or not plan["size"][i]:
            continue
        first, last, size = plan["birth"][i], plan["death"][i], plan["size"][i]
        at, arena = plan["offset"][i], plan["arena"][plan["arena_of"][i]]
        assert 0 <= first <= last <= n_seq and at >= 0 and (arena[2] or at + size <= arena[0])
        if plan["trimmed"][i]:
            rectangles.append((plan["arena_of"][i], first, plan["trimmed"][i], at, at + size))
            size = plan["rest"][i]
        rectangles.append((plan["arena_of"][i], first, last, at, at + size))
        owner = len(rectangles)
        for other in rectangles[:owner - 1 - bool(plan["trimmed"][i])]:
            for mine in rectangles[owner - 1 - bool(plan["trimmed"][i]):]:
                assert (mine[0] != other[0] or mine[1] > other[2] or other[1] > mine[2] or mine[3] >= other[4]
                        or other[3] >= mine[4]), (mine, other)


def survives(arrays: dict[str, np.ndarray], problems: list[Problem]) -> bool:
    """Whether the arrays are a valid graph; if so, assert that planning it fails with an error or gives a sound
    plan."""
    with CGraph(arrays) as graph:
        try:
            graph.finish()
        except Refused as refused:
            assert refused.status in (BAD_ARGUMENT, OVERFLOW)
            assert "[" in refused.error.message and -1 <= refused.error.tensor < len(arrays["layout"])
            return False
        graph.fingerprint()
        for problem in problems:
            try:
                plan = CPlan.made(graph, problem)
            except Refused as refused:
                assert -1 <= refused.error.tensor < len(arrays["layout"])
                continue
            functions().plan_find_exclusive(plan.handle)
            check_plan(plan.arrays(), len(arrays["src"]))
            plan.free()
    return True


def all_problems(n: int, seed: int) -> list[Problem]:
    rng = np.random.default_rng(seed)
    first = PolicyStruct()
    functions().policy_seed(byref(first))
    resident = rng.integers(-1, 3, n) * (rng.random(n) < 0.3) - (rng.random(n) < 0.5)
    return [one_backend(), Problem(first, [(32, 0, None)] * 2, assigned=rng.integers(-1, 2, n)),
            Problem(policy(), [(32, 256, None), (64, 0, None), (1, 0, None)], resident=np.clip(resident, -1, 2),
                    usage=rng.integers(0, 2, n), reads=rng.integers(0, 2, (3, 3)), supports=rng.random((3, n)) < 0.9,
                    offloads=rng.random((3, n)) < 0.2)]


INTERESTING = st.one_of(st.integers(-2, 40), st.sampled_from(
    [255, 256, 1 << 20, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 62) - 1, (1 << 63) - 1, -(1 << 63)]))


@quick(150)
@given(recipes(16), st.lists(st.tuples(st.sampled_from(sorted(GRAPH_ARRAYS)), st.integers(0, 999), INTERESTING),
                             min_size=1, max_size=4), st.integers(0, 99))
def test_mutated_arrays_are_refused_or_planned(recipe, changes, seed):
    arrays = arrays_of(Built(recipe).graph)
    n = len(arrays["layout"])
    for name, index, value in changes:
        array = arrays[name] if name != "layout" else arrays[name].view("<i8").reshape(n, -1)[:, :9].copy()
        flat = array.reshape(-1)
        if flat.size:
            info = np.iinfo(flat.dtype)
            flat[index % flat.size] = min(max(value, info.min), info.max)
        if name == "layout":
            for k, field in enumerate(("ne", "nb")):
                arrays["layout"][field] = array[:, 4 * k:4 * k + 4]
            arrays["layout"]["nbytes"] = array[:, 8]
            arrays["layout"]["type" if seed % 2 else "op"][index % n] = min(max(value, -(1 << 31)), (1 << 31) - 1)
    survives(arrays, all_problems(n, seed))


@quick(100)
@given(st.data())
def test_random_arrays_are_refused_or_planned(data):
    """Sources and roots at random, small enough that some are graphs."""
    n = data.draw(st.integers(1, 8))
    n_leafs = data.draw(st.integers(1, n))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    order = rng.permutation(n).astype(np.int32)
    layout = np.zeros(n, arrays_of(gs.Graph())["layout"].dtype)
    layout["op"][order[n_leafs:]] = rng.choice([1, 2, 8, 11, 40, 44, 48, 138], n - n_leafs)
    layout["ne"], layout["nb"] = rng.choice([1, 2, 8], (n, 1)), (4, 32, 32, 32)
    counts = np.zeros(n, int)
    counts[order[n_leafs:]] = rng.integers(0, 4, n - n_leafs)
    place = np.empty(n, int)
    place[order] = range(n)
    src = [order[rng.integers(0, max(place[i], 1))] for i in range(n) for _ in range(counts[i])]
    views = [i for i in range(n) if counts[i] and (layout["op"][i] < 3 or rng.random() < 0.3)]
    begins = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    view_src = np.full(n, -1, np.int32)
    for i in order:
        if i in views:
            s = src[begins[i]]
            view_src[i] = s if view_src[s] < 0 else view_src[s]
            layout["ne"][i] = layout["ne"][view_src[i]]
    arrays = {"layout": layout, "view_src": view_src, "view_offs": np.zeros(n, np.int64),
              "flags": rng.integers(0, 4, n).astype(np.uint8), "src_begin": begins, "src": np.array(src, np.int32),
              "slot": np.concatenate([np.arange(c) for c in counts] or [[]]).astype(np.uint8),
              "param_begin": np.zeros(n + 1, np.int32), "param": np.empty(0, np.int32), "node": order[n_leafs:],
              "leaf": order[:n_leafs], "dep_begin": np.zeros(n + 1, np.int32), "dep": np.empty(0, np.int32)}
    survives(arrays, all_problems(n, 5))


def test_some_random_arrays_are_graphs():
    """The test above reaches the planner: the small graph, and some of its mutations, are valid graphs."""
    arrays = arrays_of(small())
    assert survives(arrays, all_problems(7, 1))
    arrays["view_offs"][3] = 64
    assert survives(arrays, all_problems(7, 2))


def test_the_error_is_a_line_of_english_in_a_buffer_of_its_own():
    arrays = arrays_of(small())
    arrays["src"][0] = 99
    with CGraph(arrays) as graph, pytest.raises(Refused) as refused:
        graph.finish()
    error = refused.value.error
    assert error.message == "tensor 2 (MUL_MAT): src[0] = 99 is no tensor"
    assert (error.index, error.value, error.limit) == (0, 99, 6)
