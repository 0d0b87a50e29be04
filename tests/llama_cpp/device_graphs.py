"""Graphs for cases on devices, and the backends that their nodes get."""

import numpy as np
from ggml_devices import Bench
from ggml_schedulers import Ggml, Graph, view

WIDTH, ROWS = 32, 24
CPU = 0
"""ggml's type number of CPU devices."""


def start() -> tuple[Ggml, Bench]:
    g = Ggml()
    return g, Bench(g)


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape[::-1]).astype(np.float32)


def places(g: Ggml, backends: list[int], make, ours: bool = True, offload: bool = True, choose=None) -> list[int]:
    """Allocate a new graph and return each node's backend index; `choose`: {position in `nodes`: backend}."""
    scheduler = g.scheduler(backends, ours, offload=offload)
    graph = Graph(g)
    nodes = make(graph)
    graph.expand(nodes[-1])
    graph.allocate(scheduler, {nodes[node]: backend for node, backend in (choose or {}).items()})
    found = [backends.index(g.backend_sched_get_tensor_backend(scheduler, node)) for node in nodes]
    g.backend_sched_free(scheduler)
    graph.close()
    return found


def chain_of(weight: int, width: int = WIDTH):
    """A builder of graphs: a product with a resident tensor, with nodes before and after it."""
    def make(graph: Graph) -> list[int]:
        x = graph.tensor(width, ROWS, flags="i")
        scaled = graph.op("scale", x, 2.0)
        product = graph.op("mul_mat", weight, scaled)
        silu = graph.op("silu", product)
        return [scaled, product, silu, graph.op("soft_max", silu)]
    return make


def aside(t: int) -> int:
    """A view that the graph does not list as a node."""
    view(t).op, view(t).src[0] = 0, None
    return t


def first_source(t: int) -> int:
    """The leaf that a chain of nodes begins with."""
    while view(t).src[0]:
        t = view(t).src[0]
    return t
