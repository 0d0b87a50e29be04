"""Which experts of host weights are copied to the device that computes with them: each case in a process of its own.

    python expert_cases.py CASE      CASE a function of this module
"""

import numpy as np
from device_graphs import ROWS, WIDTH, aside, numbers, start
from ggml_devices import Bench
from ggml_schedulers import I32, Graph, run, view
from scheduler_cases import Weights

ALL = [(-1, 6 * WIDTH * WIDTH * 4)]
ONE = WIDTH * WIDTH * 4


class Mixture:
    """MUL_MAT_ID on a device, with expert weights on the host."""

    def __init__(self, bench: Bench, s: int, weights: Weights, device, ids=None, also=None) -> None:
        self.width = view(weights.experts).ne[0]
        self.g, self.bench, self.s, self.weights, self.device = bench.g, bench, s, weights, device
        graph = self.graph = Graph(self.g)
        self.x = graph.tensor(self.width, 1, ROWS, flags="i")
        self.ids = graph.tensor(2, ROWS, kind=I32, flags="i") if ids is None else ids(graph)
        self.mixed = graph.op("mul_mat_id", weights.experts, self.x, self.ids)
        self.out = graph.op("scale", self.mixed, 0.5)
        more = also(graph, self) if also is not None else []
        graph.expand(self.out, *more)
        self.g.backend_sched_reset(s)
        for node in (self.mixed, self.out, *more):
            self.g.backend_sched_set_tensor_backend(s, node, device.handle)

    def allocate(self) -> None:
        assert self.g.backend_sched_alloc_graph(self.s, self.graph.graph)

    def run(self, used=None) -> list[tuple[int, int]]:
        """(offset, bytes) of each copied range of experts; a copy of the whole tensor: [(-1, bytes)]."""
        self.graph.put(self.x, numbers(3, self.width, 1, ROWS))
        if used is not None:
            self.graph.put(self.ids, np.array([used] * ROWS, np.int32))
        self.bench.log.clear()
        assert self.g.backend_sched_graph_compute(self.s, self.graph.graph) == 0
        self.bench.sound()
        name = view(self.weights.experts).name.decode()
        return [(row[3] if row[0] == "set_async" else -1, row[4]) for row in self.bench.log
                if row[0] in ("set", "set_async") and row[1] == self.device.name and f"#{name}#" in row[2]]

    def want(self, used) -> np.ndarray:
        w = self.weights.own.get(self.weights.experts).reshape(6, self.width, self.width)
        x = numbers(3, self.width, 1, ROWS)
        return np.stack([np.stack([w[e] @ x[row, 0] for e in used]) for row in range(ROWS)]) * np.float32(0.5)

    def got(self) -> np.ndarray:
        return self.graph.get(self.out).reshape(ROWS, 2, self.width)


def used_experts_travel() -> None:
    """Runs of used experts are copied, with the padding that kernels may read; all experts if no id is valid."""
    g, bench = start()
    device = bench.device("A", lazy=True)
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    mixture = Mixture(bench, s, weights, device)
    mixture.allocate()
    for used, runs in (((0, 1), [(0, 2)]), ((3, 5), [(3, 1), (5, 1)]), ((4, 4), [(4, 1)]), ((2, 0), [(0, 1), (2, 1)]),
                       ((4, 5), [(4, 2)])):
        found = mixture.run(used)
        assert found == [(first * ONE, n * ONE + (512 if first + n < 6 else 0)) for first, n in runs], (used, found)
        assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4), used
    g.backend_sched_free(s)
    weights.close()
    # Experts smaller than the padding behind the last.
    weights = Weights(g, bench.cpu, np.random.default_rng(2), experts=8)
    s = g.scheduler([device.handle, bench.cpu], True)
    mixture = Mixture(bench, s, weights, device)
    mixture.allocate()
    for used, runs in (((4, 0), [(0, 512), (1024, 512)]), ((5, 1), [(256, 512), (1280, 256)])):
        assert mixture.run(used) == runs
        assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4), used


def ids_of_no_expert() -> None:
    """All experts are copied, and no access leaves its tensor."""
    g, bench = start()
    device = bench.device("A")
    device._compute_node = lambda t: None
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    mixture = Mixture(bench, s, weights, device)
    mixture.allocate()
    for used in ((0, 6), (-1, 2), (1 << 30, 0), (-(1 << 31), 1)):
        assert mixture.run(used) == ALL, used
    assert mixture.run((1, 1)) == [(ONE, ONE + 512)]


def experts_that_others_read() -> None:
    """All experts are copied where another node reads the copy, also in a later split or through a view."""
    g, bench = start()
    device = bench.device("A")
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    whole = weights.own.get(weights.experts)

    def second(graph: Graph, m: Mixture) -> list[int]:
        m.second = graph.tensor(2, ROWS, kind=I32, flags="i")
        return [graph.op("mul_mat_id", weights.experts, m.x, m.second)]

    def scaled(graph: Graph, m: Mixture) -> list[int]:
        return [graph.op("scale", weights.experts, 3.0)]

    def seen(graph: Graph, m: Mixture) -> list[int]:
        return [graph.op("scale", aside(graph.op("view_1d", weights.experts, WIDTH * WIDTH, 5 * ONE)), 3.0)]

    whole *= np.float32(3)
    for also, other in ((second, None), (scaled, whole), (seen, whole[-WIDTH * WIDTH:])):
        mixture = Mixture(bench, s, weights, device, also=also)
        mixture.allocate()
        if also is second:
            mixture.graph.put(mixture.second, np.array([[4, 5]] * ROWS, np.int32))
            other = mixture.want((4, 5)).ravel() * np.float32(2)
        found = mixture.run((0, 1))
        assert found == ALL, found
        assert np.allclose(mixture.got(), mixture.want((0, 1)), atol=1e-4)
        assert np.allclose(mixture.graph.get(mixture.graph.nodes()[-1]), other, atol=1e-4)
        mixture.graph.close()


def experts_that_are_no_weights() -> None:
    """Tensors that a client may have written to, and memory that the host does not read, travel whole."""
    g, bench = start()
    device, owner = bench.device("A"), bench.device("B")
    for on, usage in ((bench.cpu, 0), (owner.handle, 1)):
        weights = Weights(g, on, np.random.default_rng(2), usage)
        s = g.scheduler([device.handle, owner.handle, bench.cpu], True)
        mixture = Mixture(bench, s, weights, device)
        mixture.allocate()
        found = mixture.run((0, 1))
        assert not [row for row in found if row[0] >= 0], found
        assert np.allclose(mixture.got(), mixture.want((0, 1)), atol=1e-4)
        g.backend_sched_free(s)
        weights.close()


def experts_of_no_mixture() -> None:
    """Other ops with such a first and third source read all of the weights."""
    g, bench = start()
    device = bench.device("A")
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    found = []
    for where in (device.handle, bench.cpu):
        graph = Graph(g)
        out = graph.op("soft_max", weights.experts)
        # One for each expert: their bits would name the first.
        sinks = graph.tensor(6, flags="i")
        g.soft_max_add_sinks(out, sinks)
        graph.expand(out)
        graph.allocate(s, {out: where})
        graph.put(sinks, np.zeros(6, np.float32))
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        found.append(graph.get(out))
    assert np.array_equal(*found)


def ids_seen_through_a_view() -> None:
    """Ids that are a view of a copy are unknown before the copy is made."""
    g, bench = start()
    device = bench.device("A", lazy=True)
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    kept: list[int] = []

    def ids(graph: Graph) -> int:
        kept[:] = [graph.tensor(6, ROWS, kind=I32, flags="i")]
        return aside(graph.op("view_2d", kept[0], 2, ROWS, 6 * 4, 2 * 4))

    mixture = Mixture(bench, s, weights, device, ids=ids)
    mixture.allocate()
    for used in ((3, 5), (0, 2)):
        mixture.graph.put(kept[0], np.array([[1, 1, *used, 1, 1]] * ROWS, np.int32))
        assert mixture.run() == ALL
        assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4)


def computed_ids() -> None:
    """Ids computed in an earlier split are read back; ids of the same split are not available."""
    g, bench = start()
    device, other = bench.device("A", lazy=True), bench.device("B", lazy=True)
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    kept: list[int] = []

    def ids(graph: Graph) -> int:
        kept[:] = [graph.tensor(6, ROWS, flags="i")]
        kept.append(graph.op("argsort", kept[0], 1))
        return graph.op("view_2d", kept[1], 2, ROWS, 6 * 4, 0)

    for where, whole in ((device, True), (other, False), (None, False)):
        s = g.scheduler([device.handle, other.handle, bench.cpu], True)
        mixture = Mixture(bench, s, weights, device, ids=ids)
        g.backend_sched_set_tensor_backend(s, kept[1], where.handle if where is not None else bench.cpu)
        mixture.allocate()
        for used in ((3, 5), (0, 2)):
            scores = np.zeros((ROWS, 6), np.float32)
            scores[:, used[0]], scores[:, used[1]] = 2, 1
            mixture.graph.put(kept[0], scores)
            found = mixture.run()
            assert found == (ALL if whole else [(e * ONE, ONE + (512 if e < 5 else 0)) for e in used]), (where, found)
            assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4)
        g.backend_sched_free(s)


if __name__ == "__main__":
    run(globals())
