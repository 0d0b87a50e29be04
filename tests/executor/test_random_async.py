"""Random graphs over backends with separate memory: queued, in a ring, alternating, the same bits as one backend."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from poisoned import (
    REFUSALS,
    PoisonedBackend,
    PoisonedLate,
    check,
    disturb,
    in_memory_of_their_own,
    set_all,
    writes_to_residents,
)
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched.backends.late import LateWorld


@quick(150)
@given(st.lists(recipes(), min_size=1, max_size=2), st.integers(2, 4), st.integers(1, 3),
       st.lists(st.sets(st.sampled_from(REFUSALS), max_size=6), min_size=3, max_size=3),
       st.lists(st.tuples(st.integers(0, 63), st.integers(0, 3)), max_size=3), st.integers(0, 1000), st.booleans())
def test_queued_computes(pair, n_backends, copies, refused, wishes, seed, direct):
    """With a seed, over devices whose queues run late, which copy by themselves or through the host."""
    pair = [replace(r, leafs=tuple((s, k if k % 2 else k // 3 * 3 + 2) for s, k in r.leafs)) for r in pair]
    world = LateWorld(seed)
    backends = [PoisonedLate(f"L{i}", world, frozenset(ops), copies=direct) if seed
                else PoisonedBackend(f"B{i}", frozenset(ops))
                for i, ops in enumerate([*refused, set()][-n_backends:])]
    cases = []
    with gs.Scheduler(backends, copies=copies) as sched:
        for recipe in pair:
            built = Built(recipe, n_backends)
            for ctx, backend in zip(built.homes, backends, strict=True):
                backend.alloc_tensors(ctx)
            for pick, backend in wishes:
                sched.set_tensor_backend(built.graph.nodes[pick % len(built.graph)], backends[backend % n_backends])
            cases.append((built, in_memory_of_their_own(recipe, n_backends)))
        for attempt in range(3):
            for built, expected in cases:
                sched.alloc(built.graph).verify()
                # Residents that the graph changes must be set again before the next compute.
                set_all(built)
                for _ in range(1 if writes_to_residents(built) else 3):
                    sched.compute_async(built.graph)
                if attempt:
                    disturb(built)
                sched.synchronize()
                check(built, expected, f"turn {attempt}, {copies} copies")
