"""Node-by-node comparison of one graph on two backends."""

from contextlib import contextmanager

import numpy as np
import pytest
from devices import Stream, weights_on

import ggml_sched as gs


class Wrong(gs.CpuBackend):
    """Adds 1 to the first element of every result of `op`."""

    def __init__(self, op):
        super().__init__(1, name="wrong")
        self.op = op

    def graph_compute(self, graph):
        super().graph_compute(graph)
        for node in graph.nodes:
            if node.op == self.op:
                values = node.numpy()
                values.flat[0] += 1
                node.set(values)


@contextmanager
def prepared(a):
    """A graph whose inputs are set and planned for, its cache, and the scheduler."""
    graph, values, cache = small(a)
    with gs.Scheduler([a]) as scheduler:
        scheduler.alloc(graph)
        for t, array in values.items():
            t.set(array)
        yield graph, cache, scheduler


def small(backend):
    rng = np.random.default_rng(1)
    w = weights_on(backend, w=rng.normal(size=(8, 8)).astype(np.float32))["w"]
    cache = weights_on(backend, "any", cache=np.zeros((4, 8), np.float32))["cache"]
    ctx = gs.Context("small")
    x = ctx.tensor("f32", (8, 3), "x", input=True)
    row = ctx.tensor("i64", (3,), "row", input=True)
    h = ctx.set_name(ctx.mul_mat(w, x), "h")
    s = ctx.set_name(ctx.soft_max(ctx.reshape(h, 8, 3)), "s")
    stored = ctx.set_name(ctx.set_rows(cache, s, row), "stored")
    out = ctx.set_name(ctx.scale(stored, 2.0), "out")
    return gs.Graph(out), {x: rng.normal(size=(3, 8)).astype(np.float32), row: np.int64([2, 0, 1])}, cache


@pytest.mark.parametrize(
    "other", [lambda: gs.CpuBackend(2, "b", kernels="numpy"), lambda: Stream("stream")], ids=["cpu", "stream"]
)
def test_the_same_kernels_give_the_same(other):
    a, b = gs.CpuBackend(1, name="a", kernels="numpy"), other()
    with prepared(a) as (graph, cache, scheduler):
        found = gs.compare(graph, a, b)
        scheduler.compute(graph)
    assert [d.node.name for d in found] == ["h", "s", "stored", "out"]
    assert all(d.max_abs_diff == d.nmse == 0 for d in found)
    b.close()


def test_differences_begin_where_a_kernel_is_wrong_and_go_on_from_there():
    a, b = gs.CpuBackend(1, name="a"), Wrong("SOFT_MAX")
    with prepared(a) as (graph, cache, scheduler):
        found = {d.node.name: d for d in gs.compare(graph, a, b)}
        assert found["h"].nmse == 0 and found["s"].max_abs_diff == pytest.approx(1, rel=1e-6)
        assert found["out"].max_abs_diff == pytest.approx(2, rel=1e-6) and 0 < found["out"].nmse < np.inf
        assert [d.node.name for d in gs.compare(graph, a, b, rtol=1e-9)] == ["s", "stored", "out"]
        assert gs.compare(graph, a, b, rtol=1e9) == []


def test_the_graph_and_its_data_stay_as_they_are():
    a, b = gs.CpuBackend(1, name="a"), gs.CpuBackend(1, name="b")
    with prepared(a) as (graph, cache, scheduler):
        scheduler.compute(graph)
        before = [(t.buffer, t.offset) for t in graph.tensors], cache.numpy(), graph.nodes[-1].numpy()
        used = a.used, b.used
        gs.compare(graph, a, b)
        assert [(t.buffer, t.offset) for t in graph.tensors] == before[0]
        assert np.array_equal(cache.numpy(), before[1]) and np.array_equal(graph.nodes[-1].numpy(), before[2])
        assert (a.used, b.used) == used


def test_the_callback_sees_both_and_stops():
    a, b = gs.CpuBackend(1, name="a"), Wrong("MUL_MAT")
    with prepared(a) as (graph, cache, scheduler):
        seen = []

        def look(node, one, other):
            seen.append((node.name, float(other.flat[0] - one.flat[0])))
            return len(seen) < 2

        assert len(gs.compare(graph, a, b, look)) == 2
        assert seen[0][0] == "h" and seen[0][1] == pytest.approx(1, rel=1e-5) and seen[1][0] == "s"

        assert len(gs.compare(graph, a, b, lambda node, one, other: (one == other).all())) == 1

        def fail(node, one, other):
            raise LookupError

        used = a.used, b.used
        with pytest.raises(LookupError):
            gs.compare(graph, a, b, fail)
        assert (a.used, b.used) == used


def test_leafs_that_were_never_set_are_zero_on_both(ctx):
    graph = gs.Graph(ctx.add(ctx.tensor("f32", (4,), "a"), ctx.tensor("f32", (4,), "b")))
    seen = []
    gs.compare(graph, gs.CpuBackend(1, name="a"), gs.CpuBackend(1, name="b"),
               lambda node, one, other: seen.append((one.tolist(), other.tolist())))
    assert seen == [([0.0] * 4, [0.0] * 4)]


def test_errors_are_typed_and_nothing_is_left():
    a, small_one = gs.CpuBackend(1, name="a"), gs.CpuBackend(1, name="b", memory=64)
    graph, _, _ = small(a)
    used = a.used
    with pytest.raises(gs.OutOfMemory):
        gs.compare(graph, a, small_one)
    with pytest.raises(gs.UnsupportedOp, match="'dry'.*"):
        gs.compare(graph, a, gs.DryBackend("dry", supports_op=lambda t: t.op != "SCALE"))
    with pytest.raises(gs.BackendError):
        gs.compare(graph, a, gs.DryBackend("dry"))
    for wrong in ((None, a, a), (graph, a, None), (graph, "a", a)):
        with pytest.raises(TypeError, match="not a"):
            gs.compare(*wrong)
    assert a.used == used and small_one.used == 0


def test_the_module_is_a_module_and_can_be_called(ctx):
    import ggml_sched.testing.compare as module

    graph = gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "x")))
    with gs.CpuBackend(1) as a, gs.CpuBackend(1) as b:
        assert module is gs.compare and module.__name__ == "ggml_sched.testing.compare"
        assert gs.compare(graph, a, b) == module.compare(graph, a, b) != []
