"""Random graphs over random backends: plans verify, and compute the bits that one backend computes.

Backends have separate, poisoned memory; ops are refused here and there (never by the host), residents lie
anywhere, the caller assigns tensors at random, nodes are views, in-place ops and writes through views.
"""

import numpy as np
import pytest
from devices import alone, poisoned, verified
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes

import ggml_sched as gs

REFUSALS = ((), (), ("ADD",), ("SCALE", "MUL"), ("CPY", "SET_ROWS"), ("MUL_MAT", "UNARY:RELU", "CONT"),
            ("ADD", "SUB", "MUL", "SCALE", "CPY", "SET_ROWS", "DUP", "CONT", "SQR"))
COPIES = (1, 2, 3) if "compute_async" in dir(gs.Scheduler) else (1,)
"""Numbers of copy slots."""


class Case:
    """One recipe, realised once alone and once over several backends."""

    def __init__(self, recipe, choices, policy, copies=1, max_buffer_size=None):
        n_backends = 1 + choices(4)
        host = n_backends - 1
        self.backends = tuple(
            poisoned(f"B{k}", refuses=() if k == host else REFUSALS[choices(len(REFUSALS))],
                      offloads=("MUL_MAT", "ADD") if choices(4) == 0 else (),
                      reads=tuple(f"B{other}" for other in range(n_backends) if choices(8) == 0),
                      attributes={"max_buffer_size": max_buffer_size})
            for k in range(n_backends))
        self.built = Built(recipe, n_homes=n_backends, flag_inputs=choices(4) > 0)
        usages = ("weights", "any")
        for ctx, backend in zip(self.built.homes, self.backends, strict=True):
            backend.max_buffer_size, limit = None, backend.max_buffer_size
            backend.alloc_tensors(ctx, usages[choices(2)])
            backend.max_buffer_size = limit
        options = {} if copies == 1 else {"copies": copies}
        self.sched = gs.Scheduler(self.backends, policy, **options)
        if policy == "default" and choices(3) == 0:
            for t in self.built.graph.tensors:
                if choices(4) == 0:
                    self.sched.set_tensor_backend(t, self.backends[choices(n_backends)])
        reference = Built(recipe, flag_inputs=True)
        self.pairs = list(zip(self.built.graph.tensors, reference.graph.tensors, strict=True))
        self.values, self.reference = self.built.values(), reference

    def expected(self, scale):
        found = alone(self.reference.graph, scaled(self.reference.values(), scale))
        return {ours: found[theirs] for ours, theirs in self.pairs}

    def feed(self, scale):
        """Set everything; residents too, as nodes may have written to them."""
        for t, array in scaled(self.values, scale).items():
            if t.backend is not None:
                t.set(array)

    def check(self, scale):
        """Results and outputs are bit-equal to those of one backend without a scheduler."""
        graph = self.built.graph
        expected = self.expected(scale)
        read = {s for t in graph.tensors for s in (*t.src, t.view_src, *t.deps)}
        for t in graph.tensors:
            if t.backend is None or leaf_of(t) is not None and not t.is_resident:
                continue        # unused, or what the caller has set
            if t not in read or "output" in t.flags or t.is_resident:
                assert t.numpy().tobytes() == expected[t].tobytes(), t

    def close(self):
        self.sched.close()


def leaf_of(t):
    """The leaf that t is, or is a view of without a node in between; None for what a node computes."""
    while t.op in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"):
        t = t.src[0]
    return t if t.op == "NONE" else None


def scaled(values, scale):
    return {t: array * np.float32(scale) if array.dtype.kind == "f" else array
            for t, array in values.items()}


RANDOMS = st.randoms(use_true_random=False)


@pytest.mark.parametrize(("policy", "copies"), [*(("default", n) for n in COPIES), ("seed", 1)])
def test_random_graphs_compute_as_on_one_backend(policy, copies):
    @quick(150 if policy == "default" and copies == 1 else 60)
    @given(recipes(20), RANDOMS)
    def run(recipe, random):
        case = Case(recipe, random.randrange, policy, copies)
        try:
            verified(case.sched.alloc(case.built.graph))
            for scale in (1, -0.5, 0.75):
                case.feed(scale)
                assert case.sched.compute(case.built.graph)
                case.check(scale)
        finally:
            case.close()

    run()


@pytest.mark.parametrize("copies", COPIES)
def test_two_random_graphs_in_turn(copies):
    """Results alternate between two graphs of one scheduler's; neither sees the other's data."""

    @quick(60)
    @given(recipes(14), recipes(14), RANDOMS)
    def run(one, other, random):
        first = Case(one, random.randrange, "default", copies)
        second = Case(other, random.randrange, "default", copies)
        # One scheduler for both graphs: the first case's, with the second's residents on its backends.
        second.close()
        for ctx in second.built.homes:
            for t in ctx.tensors:
                if t.view_src is None and t.buffer is not None:
                    t.buffer.close()
        second.built = Built(other, n_homes=len(first.backends))
        for ctx, backend in zip(second.built.homes, first.backends, strict=True):
            backend.alloc_tensors(ctx)
        second.sched = first.sched
        second.values = second.built.values()
        second.pairs = list(zip(second.built.graph.tensors, second.reference.graph.tensors, strict=True))
        try:
            for scale in (1, -0.5, 0.75):
                for case in (first, second):
                    plan = verified(case.sched.alloc(case.built.graph))
                    assert plan.graph is case.built.graph
                    case.feed(scale)
                    assert case.sched.compute(case.built.graph)
                    case.check(scale)
        finally:
            first.close()

    run()


@quick(60)
@given(recipes(20), RANDOMS)
def test_random_graphs_in_chunked_arenas(recipe, random):
    """Buffers so small that an arena needs several."""
    case = Case(recipe, random.randrange, "default", max_buffer_size=random.choice([2048, 4096, 8192]))
    try:
        try:
            plan = verified(case.sched.alloc(case.built.graph))
        except gs.OutOfMemory as failed:
            assert failed.needed > failed.available         # one tensor beyond a buffer
            return
        for backend, sizes in zip(case.backends, plan.chunk_sizes, strict=True):
            assert all(size <= backend.max_buffer_size for size in sizes)
        for scale in (1, -0.5):
            case.feed(scale)
            assert case.sched.compute(case.built.graph)
            case.check(scale)
    finally:
        case.close()


@quick(60)
@given(recipes(16), RANDOMS)
def test_the_plan_does_not_depend_on_the_cache_or_on_history(recipe, random):
    """The same plan from a cold scheduler, from the cache, after a reset and without a cache."""
    case = Case(recipe, random.randrange, "default")
    graph = case.built.graph

    def shown(plan):
        return ([(s.backend, s.start, s.stop, s.inputs) for s in plan.splits], plan.buffer_sizes,
                [plan.offset_of(t) for t in graph.tensors], [plan.backend_of(t) for t in graph.tensors])

    try:
        first = shown(case.sched.plan(graph))
        assert shown(case.sched.plan(graph)) == first
        case.feed(1)
        case.sched.alloc(graph)
        case.feed(1)
        case.sched.compute(graph)
        assert shown(case.sched.plan(graph)) == first
        case.sched.reset()
        assert shown(case.sched.plan(graph)) == first
    finally:
        case.close()
