"""Random graphs over backends with separate memory: queued, in a ring, alternating, the same bits as one backend."""

from __future__ import annotations

from devices import poisoned
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, many_residents, quick, recipes
from random_results import REFUSALS, in_memory_of_their_own, settle, take_turns

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues


@quick(150)
@given(st.lists(recipes(), min_size=1, max_size=2), st.integers(2, 4), st.integers(1, 3),
       st.lists(st.sets(st.sampled_from(REFUSALS), max_size=6), min_size=3, max_size=3),
       st.lists(st.tuples(st.integers(0, 63), st.integers(0, 3)), max_size=3), st.integers(0, 1000), st.booleans())
def test_queued_computes(pair, n_backends, copies, refused, wishes, seed, direct):
    """With a seed, over devices whose queues run late, which copy by themselves or through the host."""
    world = DeferredQueues(seed)
    backends = [poisoned(f"L{i}", ops, base=DeferredBackend, queues=world, copies=direct) if seed
                else poisoned(f"B{i}", ops)
                for i, ops in enumerate([*refused, set()][-n_backends:])]
    cases = []
    with gs.Scheduler(backends, copies=copies) as sched:
        for recipe in map(many_residents, pair):
            built = Built(recipe, n_backends)
            settle(built, sched, backends, wishes)
            cases.append((built, in_memory_of_their_own(recipe, n_backends)))
        take_turns(sched, cases, 3, sched.compute_async, f"{copies} copies")
