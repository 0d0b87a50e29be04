"""Graphs computed in turn: backends' prepared plans stay, in bounded number, as long as the arena."""

import gc
import weakref

import numpy as np
import pytest

import ggml_sched as gs


class Preparing(gs.CpuBackend):
    """Counts what it prepares, runs and frees, and every other call that touches the device."""

    def __init__(self, name="CPU"):
        super().__init__(1, name)
        self.made = self.freed = self.touched = 0
        self.live: weakref.WeakSet = weakref.WeakSet()

    def graph_plan_create(self, graph):
        self.made += 1
        plan = super().graph_plan_create(graph)
        self.live.add(plan)
        return plan

    def graph_plan_free(self, plan):
        self.freed += 1
        super().graph_plan_free(plan)

    def alloc_buffer(self, size):
        self.touched += 1
        return super().alloc_buffer(size)

    def set_tensor_async(self, tensor, data, offset=0):
        self.touched += 1
        super().set_tensor_async(tensor, data, offset)

    def synchronize(self):
        self.touched += 1
        super().synchronize()

    def graph_plan_compute(self, plan):
        self.touched += 1
        super().graph_plan_compute(plan)


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
    backend = Preparing()
    cases = [squares(64, n) for n in (3, 1, 2)]
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(*(graph for _, _, graph in cases))
        for turn in range(4):
            for k, case in enumerate(cases):
                compute(scheduler, case, 1 + k + turn % 2)
        assert (backend.made, backend.freed) == (3, 0)
    assert backend.made == backend.freed == 3


def test_switching_touches_no_device_and_brings_addresses_back():
    backend = Preparing()
    one, two = squares(64, 2), squares(64, 3)
    with gs.Scheduler([backend]) as scheduler:
        compute(scheduler, one, 2)
        compute(scheduler, two, 2)
        before = backend.touched
        for x, y, graph in (one, two, one):
            plan = scheduler.alloc(graph)
            assert plan.graph is graph and y.backend is backend and y.offset == plan.offset_of(y)
            assert x.buffer is y.buffer
        assert two[1].buffer is None and backend.touched == before


def test_inputs_are_loaded_again_after_another_graph_has_used_the_arena():
    backend = Preparing()
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([backend]) as scheduler:
        compute(scheduler, one, 3)
        compute(scheduler, two, 2)
        scheduler.compute(one[2])               # x of one was set before
        assert one[1].numpy().tolist() == [9] * 64


def test_a_larger_arena_ends_what_was_prepared_for_the_smaller_one():
    backend = Preparing()
    small, large = squares(64), squares(6400)
    with gs.Scheduler([backend]) as scheduler:
        compute(scheduler, small, 2)
        compute(scheduler, large, 2)
        assert (backend.made, backend.freed) == (2, 1)
        compute(scheduler, small, 3)
        assert (backend.made, backend.freed) == (3, 1)
        compute(scheduler, large, 3)
        assert (backend.made, backend.freed) == (3, 1)


def test_no_more_rest_than_plans_are_kept():
    backend = Preparing()
    cases = [squares(64, n) for n in range(1, 8)]
    with gs.Scheduler([backend], plan_cache=2) as scheduler:
        scheduler.reserve(*(graph for _, _, graph in cases))
        for case in cases:
            compute(scheduler, case, 1)
        assert backend.made - backend.freed <= 3
        compute(scheduler, cases[-2], 1)
        assert backend.made == 7
        compute(scheduler, cases[0], 1)
        assert backend.made == 8
    assert backend.made == backend.freed


def test_without_a_cache_nothing_rests():
    backend = Preparing()
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([backend], plan_cache=0) as scheduler:
        scheduler.reserve(one[2], two[2])
        for _ in range(3):
            compute(scheduler, one, 1)
            compute(scheduler, two, 1)
        assert backend.made == 6 and backend.made - backend.freed == 1


def test_graphs_that_are_gone_keep_nothing():
    """A runner that builds its graph anew for every token."""
    backend = Preparing()
    with gs.Scheduler([backend]) as scheduler:
        for _ in range(6):
            case = squares(64, 2)
            compute(scheduler, case, 2)
            gone = weakref.ref(case[2])
        del case
        gc.collect()
        compute(scheduler, squares(64, 2), 2)
        gc.collect()
        assert gone() is None and len(backend.live) <= 2 and backend.made - backend.freed <= 2


def test_all_graphs_that_are_gone_keep_nothing():
    """Also where no other graph has been allocated since."""
    backend = Preparing()
    cases = [squares(64, 2) for _ in range(5)]
    with gs.Scheduler([backend]) as scheduler:
        for case in cases:
            compute(scheduler, case, 2)
        new = squares(64, 2)
        del case, cases
        gc.collect()
        compute(scheduler, new, 2)
        assert (backend.made, backend.freed) == (6, 5)


def test_what_is_prepared_anew_is_freed_before():
    """The cached allocation holds prepared plans, and an assignment has changed since."""
    a, b = Preparing("a"), Preparing("b")
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([a, b]) as scheduler:
        compute(scheduler, one, 2)
        compute(scheduler, two, 2)
        scheduler.set_tensor_backend(one[1], one[1].backend)
        compute(scheduler, one, 3)
        assert (a.made + b.made, a.freed + b.freed) == (3, 1)
    assert a.freed + b.freed == 3


def test_weights_that_moved_end_what_was_prepared():
    backend, home = Preparing(), gs.Context()
    w = home.tensor("f32", 64, "w")
    backend.alloc_tensors(home)
    w.set(np.full(64, 5.0))
    ctx = gs.Context()
    y = ctx.set_output(ctx.sqr(w))
    graph, other = gs.Graph(y), squares(64, 2)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.compute(graph)
        compute(scheduler, other, 2)
        moved = backend.alloc_buffer(512)
        gs.bind_resident(w, moved, 256)
        w.set(np.full(64, 7.0))
        scheduler.compute(graph)
        assert y.numpy().tolist() == [49] * 64 and backend.made == 3


def test_an_assignment_that_changed_ends_what_was_prepared():
    a, b = Preparing("a"), Preparing("b")
    one, two = squares(64, 1), squares(64, 2)
    with gs.Scheduler([a, b]) as scheduler:
        compute(scheduler, one, 2)
        compute(scheduler, two, 2)
        scheduler.set_tensor_backend(one[1], a if one[1].backend is b else b)
        where = scheduler.get_tensor_backend(one[1])
        compute(scheduler, one, 3)
        assert one[1].backend is where and a.made + b.made == 3


def test_graphs_that_share_tensors_take_turns():
    backend = Preparing()
    ctx = gs.Context()
    x = ctx.tensor("f32", 64, "x", input=True)
    y = ctx.set_output(ctx.sqr(x))
    z = ctx.set_output(ctx.sqr(y))
    short, long = gs.Graph(y), gs.Graph(z)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(short, long)
        for value in (1, 2, 3):
            scheduler.alloc(short)
            x.set(np.full(64, value))
            scheduler.compute(short)
            assert y.numpy()[0] == value**2
            scheduler.compute(long)
            assert z.numpy()[0] == value**4
        assert (backend.made, backend.freed) == (2, 0)


def test_a_backend_may_refuse_to_prepare():
    class Refusing(Preparing):
        ran = 0

        def graph_plan_create(self, graph):
            self.made += 1

        def graph_compute(self, graph):
            self.ran += 1
            super().graph_compute(graph)

    backend = Refusing()
    with gs.Scheduler([backend]) as scheduler:
        case = squares(64, 2)
        for value in (1, 2, 3):
            compute(scheduler, case, value)
    assert (backend.made, backend.ran, backend.freed) == (1, 3, 0)


@pytest.mark.parametrize("queued", [False, True])
def test_taking_turns_with_queued_computes(queued):
    """What is queued for one graph is done before another one gets the arena."""
    backend = Preparing()
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
        assert backend.made == 2
