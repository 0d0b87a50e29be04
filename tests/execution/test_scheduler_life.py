"""The life of a scheduler: closing, failing, running out of memory, and working afterwards."""

import gc
import pickle
import re
import threading
import weakref

import numpy as np
import pytest
from devices import device, resident, resident_tensor
from processes import run_python

import ggml_sched as gs
from ggml_sched._core import bind_plan, new_lease

POLICIES = pytest.mark.parametrize("policy", ["seed", "default"])


def chain(n: int = 4, size: int = 8, scale: float = 2.0) -> tuple[gs.Tensor, gs.Tensor, gs.Graph]:
    """(input, result, graph): x times scale ** n."""
    ctx = gs.Context("chain")
    x = ctx.tensor("f32", size, "x", input=True)
    t = x
    for _ in range(n):
        t = ctx.scale(t, scale)
    return x, ctx.set_name(t, "result"), gs.Graph(t)


def computed(sched: gs.Scheduler, n: int = 4, size: int = 8) -> gs.Graph:
    """Compute a chain and assert its result: the scheduler works."""
    x, y, graph = chain(n, size)
    sched.alloc(graph)
    x.set(np.ones(size))
    sched.compute(graph)
    assert y.numpy().tolist() == [2.0**n] * size
    return graph


# -- making one ---------------------------------------------------------------------------------


def test_wrong_arguments():
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    for error, args, kwargs in [
        (ValueError, ([],), {}),
        (TypeError, ([a, "B"],), {}),
        (TypeError, ([a, None],), {}),
        (TypeError, (a,), {}),
        (ValueError, ([a, a],), {}),
        (ValueError, ([a, b],), {"policy": "guess"}),
        (ValueError, ([a, b],), {"policy": None}),
        (ValueError, ([a, b],), {"copies": 0}),
        (ValueError, ([a, b],), {"copies": 65}),
        (TypeError, ([a, b],), {"copies": 1.5}),
        (ValueError, ([a, b],), {"plan_cache": -1}),
        (TypeError, ([a, b],), {"plan_cache": 1.5}),
        (TypeError, ([a, b],), {"budgets": {a: 1.5}}),
        (TypeError, ([a, b],), {"budgets": 3}),
        (ValueError, ([a, b],), {"budgets": {a: -1}}),
    ]:
        with pytest.raises(error):
            gs.Scheduler(*args, **kwargs)
    with gs.Scheduler(iter((a, b))) as sched:
        assert sched.backends == (a, b)


def test_something_that_is_no_tensor_is_a_type_error():
    _, _, graph = chain()
    with gs.Scheduler([gs.DryBackend("A")]) as sched:
        plan = sched.plan(graph)
        for call in (sched.get_tensor_backend, plan.backend_of, plan.offset_of, plan.chunk_of, plan.explain):
            for wrong in (None, "x", 3):
                with pytest.raises(TypeError, match="not a Tensor"):
                    call(wrong)


def test_backends_may_share_a_name():
    a, b = gs.DryBackend("same"), gs.DryBackend("same")
    _, y, graph = chain()
    with gs.Scheduler([a, b]) as sched:
        sched.set_tensor_backend(y, b)
        assert sched.alloc(graph).backend_of(y) is b


@POLICIES
def test_not_a_graph(policy):
    with gs.Scheduler([gs.DryBackend("A")], policy=policy) as sched:
        for call in (sched.plan, sched.alloc, sched.compute, sched.reserve):
            for wrong in (None, "graph", [], chain()[0]):
                with pytest.raises(TypeError):
                    call(wrong)
        for wrong in (None, "x"):
            with pytest.raises(TypeError):
                sched.set_tensor_backend(wrong, sched.backends[0])
        with pytest.raises((TypeError, gs.PlacementError)):
            sched.set_tensor_backend(chain()[0], "A")


# -- closing ------------------------------------------------------------------------------------


@POLICIES
def test_close_is_idempotent_and_final(policy):
    backend = gs.CpuBackend(1)
    sched = gs.Scheduler([backend], policy=policy)
    graph = computed(sched)
    assert backend.used > 0
    sched.close()
    sched.close()
    assert sched.closed and backend.used == 0 and sched.buffer_size(backend) == 0
    for call in (lambda: sched.plan(graph), lambda: sched.alloc(graph), lambda: sched.compute(graph),
                 lambda: sched.reserve(graph), sched.reset, lambda: sched.set_tensor_backend(graph.nodes[0], backend),
                 sched.synchronize, lambda: sched.compute_async(graph)):
        with pytest.raises(gs.Error, match="closed"):
            call()
    for t in graph.tensors:
        assert t.buffer is None and t.backend is None and t.offset is None
        with pytest.raises(gs.PlacementError, match=re.escape(t.name) or f"tensor {graph.id_of(t)} has no address"):
            t.numpy()
    assert "closed" in repr(sched)
    with gs.Scheduler([backend], policy=policy) as another:
        another.compute(graph)


def test_context_manager_closes_after_an_exception():
    with pytest.raises(ZeroDivisionError), gs.Scheduler([gs.CpuBackend(1)]) as sched:
        computed(sched)
        raise ZeroDivisionError
    assert sched.closed


def test_nothing_is_kept_alive_by_a_scheduler_that_is_gone():
    """No cycles: buffers and graphs go with the last reference, without the collector."""
    backend = gs.CpuBackend(1)
    sched = gs.Scheduler([backend])
    graph = computed(sched)
    seen = weakref.ref(graph)
    sched.reset()
    del graph
    gc.collect()
    assert seen() is None
    alive = weakref.ref(sched)
    del sched
    gc.collect()
    assert alive() is None


def test_a_plan_outlives_its_scheduler_and_needs_no_memory():
    backend = gs.DryBackend("A", memory=0)
    _, y, graph = chain()
    with gs.Scheduler([gs.DryBackend("free")]) as sched:
        plan = sched.plan(graph)
        assert sched.buffer_size(sched.backends[0]) == 0
    assert plan.buffer_sizes[0] > 0 and plan.offset_of(y) is not None
    assert plan.backend_of(y).name == "free" and backend.used == 0
    with pytest.raises(gs.GraphError, match="'x'"):
        plan.offset_of(chain()[0])
    assert repr(plan)


# -- plans and their cache ----------------------------------------------------------------------


def test_a_plan_cannot_be_changed():
    _, y, graph = chain()
    with gs.Scheduler([gs.DryBackend("A")]) as sched:
        plan = sched.plan(graph)
        for name in ("graph", "data", "backends", "policy", "splits", "copies", "buffer_sizes", "anything"):
            with pytest.raises(AttributeError, match=r"cannot assign|cannot delete|setter"):
                setattr(plan, name, None)
        with pytest.raises(AttributeError):
            del plan.graph
        for part in (plan.splits[0], plan.data):
            with pytest.raises(AttributeError):
                part.n_splits = 0
        assert plan.graph is graph and plan.splits is plan.splits and sched.plan(graph).data is plan.data


def test_equal_graphs_share_a_plan_as_long_as_the_cache_keeps_it():
    with gs.Scheduler([gs.DryBackend("A")], plan_cache=2) as sched:
        def planned(n: int, size: int = 8):
            return sched.plan(chain(n, size)[2]).data

        first, second = planned(1), planned(2)
        assert first is not second and planned(2) is second and planned(1) is first
        planned(1, size=16)
        assert planned(1) is first and planned(2) is not second         # what was used last stays
        sched.reset()
        assert planned(1) is not first
    _, _, graph = chain()
    with gs.Scheduler([gs.DryBackend("A")], plan_cache=0) as sched:
        assert sched.plan(graph).data is not sched.plan(graph).data


def test_a_plan_depends_on_where_weights_live():
    a, b = gs.DryBackend("A"), gs.DryBackend("B")

    def build(backend):
        w = resident_tensor(backend, 8)
        return gs.Graph(gs.Context().mul(w, w))

    with gs.Scheduler([a, b], policy="seed") as sched:
        on_a, on_b = build(a), build(b)
        assert on_a.fingerprint == on_b.fingerprint
        assert sched.plan(on_a).backend_of(on_a.nodes[0]) is a
        assert sched.plan(on_b).backend_of(on_b.nodes[0]) is b


@POLICIES
def test_weights_placed_after_planning_are_noticed(policy):
    a, b = gs.CpuBackend(1, "A"), gs.CpuBackend(1, "B")
    home, ctx = gs.Context(), gs.Context()
    w = home.tensor("f32", 4, "w")
    y = ctx.scale(w, 3.0)
    graph = gs.Graph(y)
    with gs.Scheduler([a, b], policy=policy) as sched:
        sched.compute(graph, zero=True)
        b.alloc_tensors(home)
        w.set(np.ones(4))
        sched.compute(graph)
        assert y.numpy().tolist() == [3] * 4
        assert sched.plan(graph).offset_of(w) is None and w.backend is b


@POLICIES
def test_a_weight_whose_buffer_is_closed_is_an_error_that_names_it(policy):
    backend = gs.CpuBackend(1)
    home, ctx = gs.Context(), gs.Context()
    w = home.tensor("f32", 4, "the weight")
    buffer = backend.alloc_tensors(home)
    graph = gs.Graph(ctx.set_name(ctx.scale(w, 3.0), "y"))
    with gs.Scheduler([backend], policy=policy) as sched:
        w.set(np.ones(4))
        sched.compute(graph)
        buffer.close()
        buffer.close()
        assert w.buffer is None
        for call in (sched.compute, sched.plan, sched.alloc):
            with pytest.raises(gs.PlacementError, match="'the weight'"):
                call(graph)
        computed(sched)
        backend.alloc_tensors(home)     # it has no address, so it can have a new one
        w.set(np.ones(4))
        sched.compute(graph)
        assert graph.nodes[0].numpy().tolist() == [3] * 4


# -- assignments --------------------------------------------------------------------------------


@POLICIES
def test_what_get_tensor_backend_says(policy):
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    w = resident_tensor(b, 8)
    x, y, graph = chain()
    with gs.Scheduler([a, b], policy=policy) as sched:
        assert sched.get_tensor_backend(w) is b
        assert sched.get_tensor_backend(y) is None
        plan = sched.alloc(graph)
        assert sched.get_tensor_backend(y) is plan.backend_of(y)
        sched.set_tensor_backend(y, b)
        assert sched.get_tensor_backend(y) is b
        sched.reset()
        assert sched.get_tensor_backend(y) is b         # survives
        assert sched.plan(graph).backend_of(y) is b
        sched.set_tensor_backend(y, None)
        sched.set_tensor_backend(y, None)
        assert sched.get_tensor_backend(y) is None


def test_assignments_do_not_keep_tensors_alive():
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    with gs.Scheduler([a, b]) as sched:
        x, y, graph = chain()
        sched.set_tensor_backend(y, b)
        seen = weakref.ref(y)
        del x, y, graph
        gc.collect()
        assert seen() is None
        sched.plan(chain()[2])


# -- memory -------------------------------------------------------------------------------------


@POLICIES
def test_buffers_grow_and_are_reused(policy):
    backend = gs.DryBackend("A", alignment=32)
    with gs.Scheduler([backend], policy=policy) as sched:
        small, large = chain(size=8)[2], chain(size=800)[2]
        sched.alloc(small)
        before = sched.buffer_size(backend)
        assert before == sched.plan(small).buffer_sizes[0] == backend.used
        sched.alloc(large)
        grown = sched.buffer_size(backend)
        assert grown == sched.plan(large).buffer_sizes[0] == backend.used > before
        sched.alloc(small)
        assert sched.buffer_size(backend) == grown
        sched.reset()
        assert sched.buffer_size(backend) == grown
    assert backend.used == 0


def test_reserve_takes_the_largest_of_each_backend():
    a, b = gs.DryBackend("A", accepts_computes=True), gs.DryBackend("B")
    first, second = chain(size=100), chain(size=200)
    with gs.Scheduler([a, b], policy="seed") as sched:
        for node in second[2].nodes:
            sched.set_tensor_backend(node, b)
        sizes = [sched.plan(graph).buffer_sizes for graph in (first[2], second[2])]
        sched.reserve(first[2], second[2])
        assert [sched.buffer_size(x) for x in (a, b)] == [max(pair) for pair in zip(*sizes, strict=True)]
        buffers = sched._arenas.buffers
        sched.compute(first[2])
        sched.compute(second[2])
        assert sched._arenas.buffers == buffers


def test_when_the_second_backend_has_no_memory_the_first_keeps_its_buffer():
    a, b = gs.DryBackend("A"), gs.DryBackend("B", memory=128)
    x, y, graph = chain(size=8)
    with gs.Scheduler([a, b], policy="seed") as sched:
        sched.alloc(graph)
        before = a.used, b.used
        _, end, large = chain(size=1000)
        sched.set_tensor_backend(end, b)
        with pytest.raises(gs.OutOfMemory) as failed:
            sched.alloc(large)
        assert failed.value.backend == "B"
        assert (a.used, b.used) == before
        sched.set_tensor_backend(end, None)
        sched.alloc(large)


# -- failures while computing --------------------------------------------------------------------


FAILING = ("graph_plan_create", "graph_plan_compute", "cpy_tensor_from", "supports_op", "alloc_buffer", "synchronize")


@pytest.mark.parametrize("method", FAILING)
@pytest.mark.parametrize("error", [RuntimeError("mood"), gs.BackendError("mood"), KeyboardInterrupt("mood")],
                         ids=lambda e: type(e).__name__)
@POLICIES
def test_exceptions_of_a_backend_reach_the_caller_and_the_retry_succeeds(policy, method, error, capfd):
    a, b = device(name="A", fails=FAILING), device(name="B", fails=FAILING)
    ctx, w = gs.Context(), resident(a, "w", np.full(4, 3.0))
    x = ctx.tensor("f32", 4, "x", input=True)
    middle = ctx.mul(w, x)
    y = ctx.sqr(middle)
    graph = gs.Graph(y)
    with gs.Scheduler([a, b], policy=policy) as sched:
        sched.set_tensor_backend(y, b)
        if method not in ("supports_op", "alloc_buffer"):
            sched.alloc(graph)
            x.set(np.ones(4))
        for backend in (b, a):
            if method in ("supports_op", "alloc_buffer"):
                sched.reset()
                for held in sched._arenas.buffers:
                    for buffer in held:
                        buffer.close()
            if method == "cpy_tensor_from" and backend is a:
                continue                    # nothing is copied to A: what the caller has set is sent there
            backend.fail_next(method, error)
            if method == "graph_plan_create":
                sched.reset()
            with pytest.raises(type(error), match="mood"):
                sched.compute(graph)
            assert not backend.errors
            sched.alloc(graph)
            x.set(np.ones(4))
            sched.compute(graph)
            assert y.numpy().tolist() == [9] * 4
    assert capfd.readouterr() == ("", "")


@POLICIES
def test_a_backend_that_closes_is_an_error_and_the_others_go_on(policy):
    a, b = gs.CpuBackend(1, "A"), gs.CpuBackend(1, "B")
    x, y, graph = chain()
    with gs.Scheduler([a, b], policy=policy) as sched:
        for node in graph.nodes:
            sched.set_tensor_backend(node, a)
        sched.set_tensor_backend(x, a)
        sched.alloc(graph)
        x.set(np.ones(8))
        a.close()
        a.close()
        with pytest.raises(gs.BackendError, match="'A' is closed"):
            sched.compute(graph)
        for node in graph.nodes:
            sched.set_tensor_backend(node, b)
        sched.set_tensor_backend(x, b)
        sched.alloc(graph)
        x.set(np.ones(8))
        sched.compute(graph)
        assert y.numpy().tolist() == [16] * 8


# -- threads and callbacks -----------------------------------------------------------------------


def test_a_second_thread_gets_an_error_and_disturbs_nothing():
    entered, leave = threading.Event(), threading.Event()

    def hold(_plan):
        entered.set()
        assert leave.wait(20)

    x, y, graph = chain()
    with gs.Scheduler([device(before={"graph_plan_compute": hold})]) as sched:
        sched.alloc(graph)
        x.set(np.ones(8))
        worker = threading.Thread(target=sched.compute, args=(graph,))
        worker.start()
        assert entered.wait(20)
        try:
            for call in (lambda: sched.compute(graph), lambda: sched.plan(graph), lambda: sched.alloc(graph),
                         sched.reset, sched.close, sched.synchronize, lambda: sched.reserve(graph),
                         lambda: sched.compute_async(graph), lambda: sched.set_tensor_backend(y, None)):
                with pytest.raises(gs.Error, match="at work"):
                    call()
        finally:
            leave.set()
            worker.join(20)
        assert not sched.closed
        assert y.numpy().tolist() == [16] * 8
        sched.compute(graph)


# -- several schedulers, several graphs ----------------------------------------------------------


@POLICIES
def test_two_schedulers_take_turns_with_one_graph(policy):
    x, y, graph = chain()
    one, two = (gs.Scheduler([gs.CpuBackend(1, name)], policy=policy) for name in "AB")
    with one, two:
        one.alloc(graph)
        x.set(np.ones(8))
        for sched in (one, two, one, one, two):
            sched.compute(graph)
            assert y.backend is sched.backends[0]
            assert y.numpy().tolist() == [16] * 8
        one.close()
        assert y.numpy().tolist() == [16] * 8           # two's results are not one's to take away


def test_data_goes_to_what_has_an_address():
    x, y, graph = chain()
    with pytest.raises(gs.PlacementError, match="'x'"):
        x.set(np.ones(8))
    with pytest.raises(gs.PlacementError, match="'result'"):
        y.numpy()
    with gs.Scheduler([gs.CpuBackend(1)]) as sched:
        sched.alloc(graph)
        for wrong in (np.ones(7), np.ones((2, 4)), np.ones(9)):
            with pytest.raises(ValueError, match="'x'"):
                x.set(wrong)
        for wrong in (np.ones(8, complex), np.array(["a"] * 8)):
            with pytest.raises(TypeError, match="'x'"):
                x.set(wrong)
        x.set(np.ones(8, np.float64))
        x.set([2.0] * 8)
        sched.compute(graph)
        assert y.numpy().tolist() == [32] * 8


# -- processes -----------------------------------------------------------------------------------


def test_leaving_with_everything_alive_prints_nothing():
    ran = run_python("-W", "error", "-c", """
import numpy as np, ggml_sched as gs
ctx = gs.Context()
x = ctx.tensor("f32", 8, "x", input=True)
y = ctx.sqr(x)
graph = gs.Graph(y)
a, b = gs.CpuBackend(2, "A"), gs.CpuBackend(1, "B")
weights = gs.Context()
w = weights.tensor("f32", 8, "w")
buffer = a.alloc_tensors(weights)
sched = gs.Scheduler([a, b])
sched.set_tensor_backend(y, b)
sched.alloc(graph)
x.set(np.ones(8))
sched.compute(graph)
sched.compute_async(graph)
tallocr = gs.TensorAllocator.from_memory(np.zeros(4096, np.uint8))
allocator = gs.GraphAllocator()
other = gs.Scheduler([gs.DryBackend("D")])
other.plan(graph)
cycle = [sched, graph, tallocr]
cycle.append(cycle)
""")
    assert ran.stdout == ran.stderr == ""


# -- errors --------------------------------------------------------------------------------------


def test_errors_are_typed_and_survive_pickling():
    error = gs.OutOfMemory("no room", "GPU0", 100, 7)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is gs.OutOfMemory
    assert (str(again), again.backend, again.needed, again.available) == ("no room", "GPU0", 100, 7)
    bare = pickle.loads(pickle.dumps(gs.OutOfMemory("no room")))
    assert (bare.backend, bare.needed, bare.available) == (None, None, None)
    for kind in (gs.Error, gs.GraphError, gs.FileFormatError, gs.PlacementError, gs.UnsupportedOp, gs.HazardError,
                 gs.BackendError):
        again = pickle.loads(pickle.dumps(kind("what and where")))
        assert type(again) is kind and str(again) == "what and where"
        assert issubclass(kind, gs.Error)
    assert issubclass(gs.OutOfMemory, (gs.Error, MemoryError))
    assert not issubclass(gs.Error, (ValueError, TypeError))


def test_a_plan_is_bound_to_no_other_graph():
    backend = gs.DryBackend("A")
    graphs = [chain(n)[2] for n in (1, 3)]
    with gs.Scheduler([backend]) as scheduler:
        plan = scheduler.plan(graphs[0])
        with pytest.raises(gs.HazardError, match="bound to another graph"):
            bind_plan(graphs[1], plan.data, ((backend.alloc_buffer(4096),),), new_lease())
        assert all(t.buffer is None for t in graphs[1].tensors)


def test_an_alignment_that_planning_would_not_see_is_refused():
    class Hidden(gs.DryBackend):
        alignment = 256

    with pytest.raises(ValueError, match="'A'.* has alignment 256 by an attribute .* made with 32: .*__init__"):
        gs.Scheduler([Hidden("A"), gs.CpuBackend(1)])
    with gs.Scheduler([gs.DryBackend("A", alignment=256), gs.CpuBackend(1)]) as scheduler:
        assert scheduler.backends[0].alignment == 256


def test_a_backend_in_place_of_a_sequence_is_refused_with_the_way_to_write_it():
    with gs.CpuBackend(1) as backend, pytest.raises(TypeError, match=r"Scheduler\(\[backend\]\), not <CpuBackend"):
        gs.Scheduler(backend)
