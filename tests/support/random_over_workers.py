"""Random graphs over backends of workers, and at times a host: the bits of every tensor in memory of its own."""

import random
from contextlib import ExitStack

from random_graphs import Built, decode
from random_results import check_three_computes

import ggml_sched as gs

__all__ = ["check_random_graphs", "overlaps"]


def overlaps(t):
    """Whether elements of a tensor overlap."""
    reach = t.type.type_size
    for stride, n in sorted((stride, n) for stride, n in zip(t.nb, t.ne, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * n
    return False


def check_random_graphs(backends, seed, n):
    """Three computes of each of `n` random graphs over some of the backends; nothing of them is left on a worker.  How
    many were computed: a view whose elements overlap does not travel, and only a host computes with it."""
    rng, computed = random.Random(seed), 0
    for k in range(n):
        recipe, queued = decode(rng.randbytes(10 + 4 * rng.randint(1, 12))), rng.randint(0, 3)
        chosen = rng.sample(list(backends), rng.randint(1, len(backends)))
        with ExitStack() as stack:
            if rng.random() < 0.4 or len(chosen) < 2:
                chosen.append(stack.enter_context(gs.CpuBackend(1, name="host")))
            built = Built(recipe, len(chosen))
            for backend, home in zip(chosen, built.homes, strict=True):
                stack.enter_context(backend.alloc_tensors(home))
            scheduler = stack.enter_context(gs.Scheduler(chosen, copies=max(queued, 1)))
            try:
                scheduler.alloc(built.graph).verify()
            except gs.UnsupportedOp:
                assert not chosen[-1].is_host and any(overlaps(t) for t in built.graph.tensors), (seed, k)
                continue
            check_three_computes(built, recipe, scheduler, queued, f"graph {k} of seed {seed}")
            computed += 1
    return computed
