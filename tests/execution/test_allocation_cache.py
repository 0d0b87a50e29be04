"""Graphs computed in turn: backends' prepared plans stay, in bounded number, as long as the arena."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest
from devices import device, resident

import ggml_sched as gs


def preparing(name="CPU", answers=None):
    """A backend that counts what it prepares and frees, and other calls that touch the device."""
    counts = Counter()
    counted = ("graph_plan_create", "graph_plan_free", "graph_compute", *TOUCHING)
    return device(name=name, before={method: lambda *_, method=method: counts.update([method]) for method in counted},
                  answers=answers, attributes={"counts": counts})


TOUCHING = ("alloc_buffer", "set_tensor_async", "synchronize", "graph_plan_compute")


def made_and_freed(*backends):
    return tuple(sum(b.counts[method] for b in backends) for method in ("graph_plan_create", "graph_plan_free"))


def squares(size, n=1):
    """(input, result, graph): x ** (2 ** n)."""
    ctx = gs.Context()
    t = x = ctx.tensor("f32", size, "x", input=True)
    for _ in range(n):
        t = ctx.sqr(t)
    return x, t, gs.Graph(ctx.set_output(t))


def compute(scheduler, case, value):
    x, y, graph = case
    scheduler.alloc(graph)
    x.set(np.full(x.ne[0], value, np.float32))
    scheduler.compute(graph)
    assert y.numpy()[0] == value ** (2 ** len(graph))


def test_switching_back_prepares_nothing():
    backend = preparing()
    cases = [squares(64, n) for n in (3, 1, 2)]
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(*(graph for _, _, graph in cases))
        for turn in range(4):
            for k, case in enumerate(cases):
                compute(scheduler, case, 1 + k + turn % 2)
        assert made_and_freed(backend) == (3, 0)
    assert made_and_freed(backend) == (3, 3)


def test_switching_touches_no_device_and_brings_addresses_back():
    backend = preparing()
    one, two = squares(64, 2), squares(64, 3)
    with gs.Scheduler([backend]) as scheduler:
        compute(scheduler, one, 2)
        compute(scheduler, two, 2)
        before = [backend.counts[method] for method in TOUCHING]
        for x, y, graph in (one, two, one):
            plan = scheduler.alloc(graph)
            assert plan.graph is graph and y.backend is backend and y.offset == plan.offset_of(y)
            assert x.buffer is y.buffer
        assert two[1].buffer is None and [backend.counts[method] for method in TOUCHING] == before


def test_an_exception_while_addresses_are_brought_back_is_raised_and_frees_what_was_prepared(monkeypatch):
    backend = preparing()
    x, y, graph = squares(64, 2)
    ctx = gs.Context()
    other = ctx.set_output(ctx.sqr(x))          # x gets another address with each graph
    cases = one, two = (x, y, graph), (x, other, gs.Graph(other))

    def out_of_memory(*_):
        raise MemoryError

    with gs.Scheduler([backend]) as scheduler:
        for case in cases:
            compute(scheduler, case, 2)
        with monkeypatch.context() as patch:
            patch.setattr("ggml_sched.execution.allocation.bind_plan", out_of_memory)
            with pytest.raises(MemoryError):
                scheduler.alloc(graph)
        assert made_and_freed(backend) == (2, 1)
        for case in (one, two, one):
            compute(scheduler, case, 2)
    assert made_and_freed(backend) == (3, 3)


def test_inputs_are_loaded_again_after_another_graph_has_used_the_arena():
    backend = preparing()
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([backend]) as scheduler:
        compute(scheduler, one, 3)
        compute(scheduler, two, 2)
        scheduler.compute(one[2])               # x of one was set before
        assert one[1].numpy().tolist() == [9] * 64 and two[1].buffer is None


def test_a_larger_arena_ends_what_was_prepared_for_the_smaller_one():
    backend = preparing()
    small, large = squares(64), squares(6400)
    with gs.Scheduler([backend]) as scheduler:
        compute(scheduler, small, 2)
        compute(scheduler, large, 2)
        assert made_and_freed(backend) == (2, 1)
        compute(scheduler, small, 3)
        assert made_and_freed(backend) == (3, 1)
        compute(scheduler, large, 3)
        assert made_and_freed(backend) == (3, 1)


def test_no_more_rest_than_plans_are_kept():
    backend = preparing()
    cases = [squares(64, n) for n in range(1, 8)]
    with gs.Scheduler([backend], plan_cache=2) as scheduler:
        scheduler.reserve(*(graph for _, _, graph in cases))
        for case in cases:
            compute(scheduler, case, 1)
        assert made_and_freed(backend)[1] >= 7 - 3
        for case, made in ((cases[-2], 7), (cases[0], 8)):
            compute(scheduler, case, 1)
            assert made_and_freed(backend)[0] == made
    assert made_and_freed(backend) == (8, 8)


def test_without_a_cache_nothing_rests():
    backend = preparing()
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([backend], plan_cache=0) as scheduler:
        scheduler.reserve(one[2], two[2])
        for _ in range(3):
            compute(scheduler, one, 1)
            compute(scheduler, two, 1)
        assert made_and_freed(backend) == (6, 5)


def test_graphs_that_are_gone_keep_nothing():
    """A runner that builds its graph anew for every token."""
    alive = weakref.WeakSet()

    def prepare(inherited, graph):
        plan = inherited(graph)
        alive.add(plan)
        return plan

    backend = preparing(answers={"graph_plan_create": prepare})
    with gs.Scheduler([backend]) as scheduler:
        for _ in range(6):
            case = squares(64, 2)
            compute(scheduler, case, 2)
            gone = weakref.ref(case[2])
        del case
        gc.collect()
        compute(scheduler, squares(64, 2), 2)
        gc.collect()
        made, freed = made_and_freed(backend)
        assert gone() is None and len(alive) <= 2 and made - freed <= 2


def test_all_graphs_that_are_gone_keep_nothing():
    """Also where no other graph has been allocated since."""
    backend = preparing()
    cases = [squares(64, 2) for _ in range(5)]
    with gs.Scheduler([backend]) as scheduler:
        for case in cases:
            compute(scheduler, case, 2)
        new = squares(64, 2)
        del case, cases
        gc.collect()
        compute(scheduler, new, 2)
        assert made_and_freed(backend) == (6, 5)


def test_what_is_prepared_anew_is_freed_before():
    """The cached allocation holds prepared plans, and an assignment has changed since."""
    a, b = preparing("a"), preparing("b")
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([a, b]) as scheduler:
        compute(scheduler, one, 2)
        compute(scheduler, two, 2)
        scheduler.set_tensor_backend(one[1], one[1].backend)
        compute(scheduler, one, 3)
        assert made_and_freed(a, b) == (3, 1)
    assert made_and_freed(a, b) == (3, 3)


def test_weights_that_moved_end_what_was_prepared(ctx):
    backend = preparing()
    w = resident(backend, "w", np.full(64, 5.0))
    y = ctx.set_output(ctx.sqr(w))
    graph, other = gs.Graph(y), squares(64, 2)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.compute(graph)
        compute(scheduler, other, 2)
        moved = backend.alloc_buffer(512)
        gs.bind_resident(w, moved, 256)
        w.set(np.full(64, 7.0))
        scheduler.compute(graph)
        assert y.numpy().tolist() == [49] * 64 and made_and_freed(backend)[0] == 3


def test_an_assignment_that_changed_ends_what_was_prepared():
    a, b = preparing("a"), preparing("b")
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([a, b]) as scheduler:
        compute(scheduler, one, 2)
        compute(scheduler, two, 2)
        scheduler.set_tensor_backend(one[1], a if one[1].backend is b else b)
        where = scheduler.get_tensor_backend(one[1])
        compute(scheduler, one, 3)
        assert one[1].backend is where and made_and_freed(a, b)[0] == 3


@pytest.mark.parametrize("policy", ["seed", "default"])
def test_graphs_that_share_tensors_take_turns(ctx, policy):
    backend = preparing()
    x = ctx.tensor("f32", 64, "x", input=True)
    y = ctx.set_output(ctx.sqr(x))
    z = ctx.set_output(ctx.sqr(y))
    short, long = gs.Graph(y), gs.Graph(z)
    with gs.Scheduler([backend], policy) as scheduler:
        scheduler.reserve(short, long)
        for value in (1, 2, 3):
            scheduler.alloc(short)
            x.set(np.full(64, value))
            scheduler.compute(short)
            assert y.numpy()[0] == value**2 and z.buffer is None
            scheduler.compute(long)
            assert z.numpy()[0] == value**4
        assert made_and_freed(backend) == (2, 0)


def test_a_backend_may_refuse_to_prepare():
    backend = preparing(answers={"graph_plan_create": lambda inherited, graph: None})
    with gs.Scheduler([backend]) as scheduler:
        case = squares(64, 2)
        for value in (1, 2, 3):
            compute(scheduler, case, value)
    assert made_and_freed(backend) == (1, 0) and backend.counts["graph_compute"] == 3


@pytest.mark.parametrize("queued", [False, True])
def test_taking_turns_with_queued_computes(queued):
    """What is queued for one graph is done before another one gets the arena."""
    backend = preparing()
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([backend]) as scheduler:
        for value in range(1, 6):
            for x, y, graph in (one, two):
                scheduler.alloc(graph)
                x.set(np.full(64, value))
                if queued:
                    scheduler.compute_async(graph)
                else:
                    scheduler.compute(graph)
                if value % 2:
                    assert y.numpy()[0] == value ** (2 ** len(graph))
        scheduler.synchronize()
        assert two[1].numpy()[0] == 5**4
        assert made_and_freed(backend)[0] == 2


# -- residents that an allocator has placed ---------------------------------------------------------------------------


def test_a_tensor_that_its_allocator_has_moved_is_read_at_its_new_address():
    with gs.CpuBackend(1) as cpu, gs.Scheduler([cpu]) as scheduler:
        homes, ctx = gs.Context("L"), gs.Context()
        moved, other = homes.tensor("f32", 4, "moved"), homes.tensor("f32", 64, "other")
        allocator = gs.TensorAllocator(cpu.alloc_buffer(4096))
        allocator.alloc(moved)
        moved.set(np.ones(4, np.float32))
        out = ctx.set_output(ctx.scale(moved, 10.0))
        graph = gs.Graph(out)
        scheduler.compute(graph)
        before = moved.offset
        allocator.reset()
        for tensor, value in ((other, 7), (moved, 2)):
            allocator.alloc(tensor)
            tensor.set(np.full(tensor.ne[0], value, np.float32))
        assert moved.offset != before
        scheduler.compute(graph)
        assert np.all(out.numpy() == 20)


def test_a_kept_copy_of_an_allocators_tensor_is_made_again_after_a_node_has_written_to_it():
    first, second = (device(gs.CpuBackend, name, reads=[]) for name in "AB")
    weights, ctx = gs.Context("L"), gs.Context()
    weight = weights.tensor("f32", 4, "weight")
    buffer = first.alloc_buffer(1024)
    buffer.usage = "weights"
    gs.TensorAllocator(buffer).alloc(weight)
    weight.set(np.ones(4, np.float32))
    out = ctx.set_output(ctx.scale(weight, 10.0))
    x = ctx.tensor("f32", 4, "x", input=True)
    written = ctx.cpy(x, weight)
    reads, writes = gs.Graph(out), gs.Graph(written)
    with gs.Scheduler([first, second]) as reader, gs.Scheduler([first, second]) as writer:
        reader.set_tensor_backend(out, second)
        writer.set_tensor_backend(written, first)
        reader.compute(reads)
        assert np.all(out.numpy() == 10)
        writer.alloc(writes)
        x.set(np.full(4, 5, np.float32))
        writer.compute(writes)
        reader.compute(reads)
        assert np.all(out.numpy() == 50)
