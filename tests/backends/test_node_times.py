"""Measuring the nodes of the CPU backend: which are measured, what their times add up to, and when it ends."""

import time

import numpy as np
import pytest
from op_results import place

import ggml_sched as gs

RNG = np.random.default_rng(28)


@pytest.fixture
def model():
    """(scheduler, graph, backend): a large product on two threads, and two small nodes."""
    ctx = gs.Context()
    w, x = ctx.tensor("f32", (512, 512), "w"), ctx.tensor("f32", (512, 64), "x")
    graph = gs.Graph(ctx.soft_max(ctx.silu(ctx.mul_mat(w, x))))
    with gs.CpuBackend(2) as cpu, gs.Scheduler([cpu]) as s:
        s.alloc(graph)
        for t in (w, x):
            t.set(RNG.standard_normal(t.ne[1::-1]).astype("f4"))
        yield s, graph, cpu


def test_every_node_that_is_computed_is_measured_as_often(model):
    s, graph, cpu = model
    s.compute(graph)
    with cpu.node_times() as times:
        assert times.nodes == []
        start = time.perf_counter()
        for _ in range(3):
            s.compute(graph)
        taken = time.perf_counter() - start
    found = times.nodes
    assert [(t.node.op, t.runs) for t in found] == [("MUL_MAT", 3), ("UNARY:SILU", 3), ("SOFT_MAX", 3)]
    assert all(t.seconds > 0 for t in found) and sum(t.seconds for t in found) < taken
    assert all(0 < t.busy <= 2 * t.seconds for t in found)


def test_a_node_of_one_part_is_busy_as_long_as_it_takes():
    ctx = gs.Context()
    x = ctx.tensor("f32", (8,), "x")
    with gs.CpuBackend(2) as cpu, gs.Scheduler([cpu]) as s:
        graph = gs.Graph(ctx.silu(x))
        s.alloc(graph)
        x.set(np.ones(8, "f4"))
        with cpu.node_times() as times:
            s.compute(graph)
    (found,) = times.nodes
    assert found.busy == found.seconds > 0


def test_products_that_one_call_computes_are_measured_as_the_first_of_them():
    ctx = gs.Context()
    x, w, v = ctx.tensor("f32", (64,)), ctx.tensor("f32", (64, 32)), ctx.tensor("f32", (64, 32))
    graph = gs.Graph(ctx.add(ctx.set_name(ctx.mul_mat(w, x), "query"), ctx.mul_mat(v, x)))
    with gs.CpuBackend(2) as cpu:
        place(ctx, cpu)
        with cpu.node_times() as times:
            cpu.graph_compute(graph)
    assert [(t.node.name or t.node.op, t.runs) for t in times.nodes] == [("query", 1), ("ADD", 1)]


def test_results_have_the_same_bits_while_they_are_measured(model):
    s, graph, cpu = model
    s.compute(graph)
    before = graph.nodes[-1].numpy().copy()
    with cpu.node_times():
        s.compute(graph)
    assert np.array_equal(graph.nodes[-1].numpy().view("u4"), before.view("u4"))


def test_nothing_is_measured_after_the_end_even_by_an_error(model):
    s, graph, cpu = model
    with pytest.raises(KeyboardInterrupt), cpu.node_times() as times:
        s.compute(graph)
        raise KeyboardInterrupt
    s.compute(graph)
    assert {t.runs for t in times.nodes} == {1}
    with cpu.node_times() as again:
        s.compute(graph)
    assert {t.runs for t in again.nodes} == {1}


def test_a_second_measurement_at_the_same_time_is_an_error(model):
    s, graph, cpu = model
    with cpu.node_times() as times:
        with pytest.raises(gs.Error, match="'CPU' is being measured"), cpu.node_times():
            pass
        s.compute(graph)
    assert {t.runs for t in times.nodes} == {1}


def test_the_oracle_is_not_measured():
    with gs.CpuBackend(kernels="numpy") as cpu, pytest.raises(ValueError, match="kernels='numpy'"), cpu.node_times():
        pass


def test_a_fault_in_a_kernel_does_not_end_the_measurement(model):
    _, _, cpu = model
    ctx = gs.Context()
    table, ids = ctx.tensor("f32", (4, 2), "table"), ctx.tensor("i32", (1,), "ids")
    with gs.Scheduler([cpu]) as s, cpu.node_times() as times:
        graph = gs.Graph(ctx.get_rows(table, ids))
        s.alloc(graph)
        table.set(np.ones((2, 4), "f4"))
        ids.set(np.array([7], "i4"))
        with pytest.raises(gs.BackendError, match="id 7"):
            s.compute(graph)
        ids.set(np.array([1], "i4"))
        s.compute(graph)
    assert [(t.node.op, t.runs) for t in times.nodes] == [("GET_ROWS", 2)]


def test_a_node_of_two_plans_has_run_as_often_as_both(model):
    _, graph, cpu = model
    first, second = cpu.graph_plan_create(graph), cpu.graph_plan_create(graph)
    with cpu.node_times() as times:
        for plan in (first, second, second):
            cpu.graph_plan_compute(plan)
    assert [(t.node.op, t.runs) for t in times.nodes] == [("MUL_MAT", 3), ("UNARY:SILU", 3), ("SOFT_MAX", 3)]


def test_calls_after_one_that_failed_have_not_run(model):
    _, _, cpu = model
    ctx = gs.Context()
    table, ids = ctx.tensor("f32", (4, 2), "table"), ctx.tensor("i32", (1,), "ids")
    with gs.Scheduler([cpu]) as s, cpu.node_times() as times:
        graph = gs.Graph(ctx.silu(ctx.get_rows(ctx.silu(table), ids)))
        s.alloc(graph)
        table.set(np.ones((2, 4), "f4"))
        ids.set(np.array([7], "i4"))
        with pytest.raises(gs.BackendError, match="id 7"):
            s.compute(graph)
    assert [(t.node.op, t.runs) for t in times.nodes] == [("UNARY:SILU", 1), ("GET_ROWS", 1)]
