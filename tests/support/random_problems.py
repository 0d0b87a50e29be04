"""Random planning problems: graphs, backends with seeded answers, and every policy."""

import random
import zlib

from hypothesis import strategies as st
from random_graphs import Built, decode, many_residents

import ggml_sched as gs
from ggml_sched._core import Policy


def number(what: tuple) -> int:
    return zlib.crc32(repr(what).encode())


class SeededBackend(gs.DryBackend):
    """Answers support queries by a hash of a seed and the query: equal queries get equal answers."""

    seed, friends, offers = 0, (), ()

    def says(self, what: str, t: gs.Tensor, of: int) -> bool:
        return number((self.seed, what, t.op, t.ne, int(t.type))) % 8 < of

    def supports_op(self, node):
        return self.says("supports", node, 7)

    def offload_op(self, node):
        return self.says("offload", node, 2)

    def alloc_size(self, tensor):
        return tensor.nbytes + 40 * self.says("size", tensor, 3)

    def inplace_sources(self, op):
        return number((self.seed, op)) & 3 if self.seed % 2 else super().inplace_sources(op)

    def supports_buffer(self, buffer):
        return buffer.backend is self or buffer.backend.name in self.friends

    def fusion_groups(self, graph):
        work = [k for k, t in enumerate(graph.nodes) if t.computes]
        return [work[i:i + 3] for i in self.offers if len(work) > i + 3]


def random_case(rng: random.Random, solvable: bool = True) -> tuple[gs.Graph, tuple[gs.Backend, ...], dict]:
    """(graph, backends, {tensor: backend}), everything about them random; residents have memory.

    `solvable`: the last backend supports every op, and no buffer is too small.
    """
    n = rng.randint(1, 4)
    backends, largest = [], []
    for k in range(n):
        kind = SeededBackend if k < n - 1 or not solvable and rng.randrange(4) == 3 else gs.DryBackend
        backend = kind(f"b{k}", rng.choice([1, 32, 64]), accepts_computes=True)
        backend.seed, backend.concurrent_copies = rng.randrange(6), rng.randrange(2) == 1
        backend.friends = rng.choice([(), ("b3",), ("b0", "b1"), ("b2",)])
        backend.offers = rng.choice([(), (), (0, 4), (1,), (0, 3, 6, 9)])
        backends.append(backend)
        largest.append(None if solvable or k == n - 1 > 0 else rng.choice([None, None, 4096, 600, 64]))
    recipe = decode(rng.randbytes(10 + 4 * rng.randint(1, 20)))
    built = Built(rng.choice([recipe, many_residents(recipe)]), n)
    for home, backend in zip(built.homes, backends, strict=True):
        if home.tensors:
            backend.alloc_tensors(home, rng.choice(["weights", "any"]))
    for backend, limit in zip(backends, largest, strict=True):
        backend.max_buffer_size = limit     # residents need their buffers first
    tensors = built.graph.tensors
    assigned = {rng.choice(tensors): rng.choice(backends) for _ in range(rng.choice([0, 0, 1, 6]))}
    return built.graph, tuple(backends), assigned


def random_policy(rng: random.Random) -> Policy:
    return Policy(reuse=rng.choice(["first", "whole", "front", "all"]), offsets=rng.choice(["packed", "best fit"]),
                  placement=rng.choice(["default", "default", "seed"]), leafs_first=rng.randrange(2) == 1,
                  stream=rng.randrange(2) == 1, n_copies=rng.randint(1, 3))


def problems() -> st.SearchStrategy[tuple[gs.Graph, tuple[gs.Backend, ...], dict, Policy]]:
    """(graph, backends, assignments, policy), not all of which have a plan."""
    return st.randoms(use_true_random=False).map(lambda rng: (*random_case(rng, solvable=False), random_policy(rng)))


def plan_of(case: tuple, policy: str = "seed") -> gs.Plan:
    graph, backends, assigned = case
    scheduler = gs.Scheduler(backends, policy=policy)
    for t, backend in assigned.items():
        scheduler.set_tensor_backend(t, backend)
    return scheduler.plan(graph)
