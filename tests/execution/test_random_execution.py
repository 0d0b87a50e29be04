"""Random graphs compute the same bits in a shared arena as with every tensor in memory of its own: on one backend, on
several, queued, and with nodes computed as one (tests/support/fusing.py).

The arena is poisoned first, so that a tensor placed over live data, an input loaded too late or a
copy not refreshed shows up as other bits.
"""

import numpy as np
import pytest
from devices import POISON, device, poisoned
from fusing import Fusing, FusingDeferred, anything
from hypothesis import assume, given
from hypothesis import strategies as st
from random_graphs import Built, many_residents, quick, recipes, without_rounding
from random_results import (
    REFUSALS,
    check,
    check_three_computes,
    in_memory_of_their_own,
    raw,
    set_all,
    settle,
    take_turns,
)

import ggml_sched as gs
from ggml_sched.execution import allocation as executor
from ggml_sched.execution._steps import BoundLoad
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

POLICIES = st.sampled_from(["seed", "default"])
OFFLOADS = ("MUL_MAT", "MUL_MAT_ID", "ADD")
SEED = st.integers(0, 1000)
REFUSED = st.sets(st.sampled_from(REFUSALS), max_size=6)
WISHES = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 3)), max_size=3)


def backends_of(kind, refused, world=0, direct=True, seeds=(0,) * 4, one_by_one=False):
    """Backends with separate, poisoned memory, which refuse these ops.

    "late": their queues run late, in an order chosen by `world`, and copy by themselves (`direct`) or through the host;
    "fusing": each computes random groups of nodes as one.
    """
    options = {"queues": DeferredQueues(world), "copies": direct} if "late" in kind else {}
    groups = [{"offer": anything(seed), "one_by_one": one_by_one} if "fusing" in kind else {} for seed in seeds]
    base = {"plain": gs.CpuBackend, "late": DeferredBackend, "fusing": Fusing, "fusing late": FusingDeferred}[kind]
    return [poisoned(f"B{i}", ops, base=base, **options, **groups[i]) for i, ops in enumerate(refused)]


@pytest.mark.parametrize("fusing", [False, True], ids=["alone", "fused"])
@quick(40)
@given(recipes(), POLICIES, SEED, st.booleans(), st.booleans())
def test_a_scheduler_on_one_backend(fusing, recipe, policy, seed, one_by_one, reorder):
    built = Built(recipe)
    (backend,) = backends_of("fusing" if fusing else "plain", [()], seeds=[seed], one_by_one=one_by_one)
    policy, reorder = ("default", reorder) if fusing else (policy, False)
    with backend, gs.Scheduler([backend], policy=policy, reorder=reorder) as sched:
        backend.alloc_tensors(built.homes[0])
        plan = sched.alloc(built.graph)
        plan.verify()
        check_three_computes(built, recipe, sched, 0, "one backend")
        assert not fusing or len(backend.fused) == 3 * len(plan.data.groups)


@quick(50)
@given(recipes())
def test_compiled_kernels_compute_what_those_in_numpy_do(recipe):
    """On whole numbers, of which no sum is rounded.  Each tensor has memory of its own, as where the other tests get
    their expected results."""
    found = []
    for kernels in ("numpy", "compiled"):
        built = Built(without_rounding(recipe))
        with gs.CpuBackend(1, kernels=kernels) as backend, np.errstate(over="ignore", invalid="ignore"):
            for ctx in (*built.homes, built.ctx):
                backend.alloc_tensors(ctx)
            for tensor, values in built.values().items():
                tensor.set(np.rint(values).astype(values.dtype))
            backend.graph_compute(built.graph)
            found.append([tensor.numpy() for tensor in built.ctx.tensors if tensor in built.graph])
    assume(all(np.abs(values).max(initial=0) < 1 << 20 for values in found[0]))     # larger numbers are rounded
    for expected, values in zip(*found, strict=True):
        assert np.array_equal(values, expected)


@quick(50)
@given(recipes(), st.booleans(), st.booleans())
def test_a_graph_allocator_over_lent_memory(recipe, measured, planned):
    """TensorAllocator over a poisoned array that is exactly as large as measured."""
    expected = in_memory_of_their_own(recipe)
    built = Built(recipe)
    graph = built.graph
    allocator = gs.GraphAllocator()
    gs.CpuBackend(1).alloc_tensors(built.homes[0])
    with gs.TensorAllocator.measure(64) as tallocr:
        size = allocator.alloc_graph(tallocr, graph)
    if not measured:
        allocator, size = gs.GraphAllocator(), 4 * size
    block = np.full(size + 64, POISON, np.uint8)
    start = -block.__array_interface__["data"][0] % 64
    with gs.TensorAllocator.from_memory(block[start:][:size], 64) as tallocr:
        allocator.alloc_graph(tallocr, graph)
        # The memory belongs to a CpuBackend that from_memory made.
        runner = device(reads=[tallocr.buffer.backend, *(t.backend for t in built.residents)])
        set_all(built)
        for attempt in range(2):
            set_all(built, only_residents=True)
            if planned:
                plan = runner.graph_plan_create(graph)
                runner.graph_plan_compute(plan)
                runner.graph_plan_free(plan)
            else:
                runner.graph_compute(graph)
            check(built, expected, f"compute {attempt}")


@pytest.mark.parametrize("kind", ["plain", "late", "fusing"])
@quick(30)
@given(recipes(), st.integers(2, 4), st.lists(REFUSED, min_size=3, max_size=3), WISHES, POLICIES, st.integers(0, 3),
       st.sampled_from([0, 0, *range(1, 4096, 63)]), st.sets(st.sampled_from(OFFLOADS)), st.integers(0, 15), SEED,
       st.booleans(), st.lists(SEED, min_size=4, max_size=4), st.booleans(), st.booleans(),
       st.sampled_from(["weights", "any"]), st.sampled_from([None, None, 2048, 4096, 8192]))
def test_several_backends(kind, recipe, n_backends, refused, wishes, policy, queued, shared, offloads, shy, world,
                          direct, seeds, one_by_one, flagged, usage, largest):
    """Random residency, refused ops and assigned tensors over backends with separate memory; three computes.

    The last backend supports everything, so every graph can run.  `queued`: computed asynchronously, with that
    many slots for each copy.  `shared`: which backend reads which other's memory, a bit for each pair.  The first
    backend `offloads` ops with weights of the last one.  `shy`: which backends take no data while they compute.
    `flagged`: whether inputs have their flag.  `largest`: bytes of the largest buffer, so that arenas need several.
    """
    recipe = many_residents(recipe)
    built = Built(recipe, n_backends, flag_inputs=flagged)
    backends = backends_of(kind, [*refused, set()][-n_backends:], world, direct, seeds, one_by_one)
    if kind == "fusing":
        policy = "default"
    else:
        backends[0].offloads = frozenset(offloads)
    if kind != "late":
        for i, backend in enumerate(backends):
            backend.concurrent_copies = not shy >> i & 1
        pairs = [(a, b) for a in backends for b in backends if a is not b]
        for bit, (reader, other) in enumerate(pairs):
            if shared >> bit & 1:
                reader.reads += (other,)
    with gs.Scheduler(backends, policy=policy, copies=max(queued, 1)) as sched:
        settle(built, sched, backends, wishes, usage)
        for backend in backends:
            backend.max_buffer_size = largest
        try:
            plan = sched.alloc(built.graph)
        except gs.OutOfMemory as failed:
            assert failed.needed > failed.available == largest      # one tensor is larger
            return
        plan.verify()
        assert all(plan.backend_of(t).supports_op(t) for t in built.graph.nodes)
        check_three_computes(built, recipe, sched, queued, f"{plan.splits} {plan.data.groups}")
        assert kind != "fusing" or sum(len(b.fused) for b in backends) == 3 * len(plan.data.groups)


@pytest.mark.parametrize("kind", ["plain", "late", "fusing late"])
@quick(15)
@given(st.lists(recipes(), min_size=1, max_size=2), st.integers(1, 4), st.integers(1, 3),
       st.lists(REFUSED, min_size=3, max_size=3), WISHES, SEED, st.booleans(), st.lists(SEED, min_size=4, max_size=4),
       POLICIES, st.booleans())
def test_graphs_take_turns(kind, pair, n_backends, copies, refused, wishes, world, direct, seeds, policy, queued):
    """One or two graphs in turn, each computed several times: it finds its inputs again, although the other has used
    the memory."""
    backends = backends_of(kind, [*refused, set()][-n_backends:], world, direct, seeds, seeds[0] % 2 == 1)
    cases = []
    with gs.Scheduler(backends, policy, copies=copies) as sched:
        for recipe in map(many_residents, pair):
            built = Built(recipe, n_backends)
            settle(built, sched, backends, wishes)
            cases.append((built, in_memory_of_their_own(recipe, n_backends)))
        take_turns(sched, cases, 3, sched.compute_async if queued else sched.compute, f"{copies} copies")


@pytest.mark.parametrize("policy", ["seed", "default"])
def test_the_poison_is_seen(ctx, policy, monkeypatch):
    """An input that was not loaded reads as poison: the tests above would notice."""
    run = executor.run_in_order
    monkeypatch.setattr(executor, "run_in_order", lambda steps, alive: run(
        [s for s in steps if not isinstance(s, BoundLoad)], alive))
    x = ctx.tensor("f32", 4, "x")
    y = ctx.dup(x)
    with poisoned() as backend, gs.Scheduler([backend], policy=policy) as sched:
        sched.compute(gs.Graph(y), zero=True)
        assert raw(y) == bytes([POISON]) * 16
