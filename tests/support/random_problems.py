"""Random planning problems: graphs, backends with seeded answers, and every policy."""

import zlib

from hypothesis import strategies as st
from random_graphs import Built, recipes

import ggml_sched as gs
from ggml_sched._core import Policy


def number(what: tuple) -> int:
    return zlib.crc32(repr(what).encode())


class SeededBackend(gs.DryBackend):
    """Answers support queries by a hash of a seed and the query: equal queries get equal answers."""

    seed, friends, offers, largest = 0, (), (), None

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


POLICY_FIELDS = st.fixed_dictionaries({
    "reuse": st.sampled_from(["first", "whole", "front", "all"]), "offsets": st.sampled_from(["packed", "best fit"]),
    "placement": st.sampled_from(["default", "default", "seed"]), "leafs_first": st.booleans(),
    "stream": st.booleans(), "places": st.integers(1, 3)})


@st.composite
def problems(draw):
    """(recipe, backends, policy, assignments); `realised` makes a graph with residents of it."""
    recipe = draw(recipes())
    n = draw(st.integers(1, 4))
    backends = []
    for k in range(n):
        # Mostly with a host that supports every op, so that a plan exists.
        kind = SeededBackend if k < n - 1 or draw(st.integers(0, 3)) == 3 else gs.DryBackend
        backend = kind(f"b{k}", draw(st.sampled_from([1, 24, 64])))
        backend.seed, backend.largest = draw(st.integers(0, 5)), draw(st.sampled_from([None, None, 4096, 600, 64]))
        backend.friends = draw(st.sampled_from([(), ("b3",), ("b0", "b1"), ("b2",)]))
        backend.offers = draw(st.sampled_from([(), (0, 4), (1,), (0, 3, 6, 9)]))
        backends.append(backend)
    return recipe, backends, Policy(**draw(POLICY_FIELDS)), draw(st.lists(st.integers(0, 99), max_size=6))


def realised(problem: tuple) -> tuple[gs.Graph, dict]:
    """The graph of a problem, with its residents allocated, and the assignments as {tensor: backend}."""
    recipe, backends, policy, chosen = problem
    built = Built(recipe, len(backends), keeps=policy.placement != "seed")
    for home, backend in zip(built.homes, backends, strict=True):
        if home.tensors:
            backend.alloc_tensors(home, "weights" if chosen else "any")
    for k, backend in enumerate(backends):
        # Residents need their buffers first.
        if k < len(backends) - 1 or len(backends) == 1:
            backend.max_buffer_size = backend.largest
    graph = built.graph
    return graph, {graph.tensors[k % len(graph.tensors)]: backends[k % len(backends)] for k in chosen}
