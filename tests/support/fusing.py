"""A CPU backend that computes fusion groups and uses memory in the worst way that a fused kernel may.

Before a group is computed, the memory of all its members is filled with a pattern: any data in those bytes that the
group, or a later node, still reads is lost.  Then the members are computed in memory of the backend's own, and only
results that are needed elsewhere reach the plan's memory.
"""

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

from devices import POISON

import ggml_sched as gs
from ggml_sched._core import new_lease, rewired, stand_in
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

VIEWS = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})

Groups = Callable[[gs.Graph], Iterable[tuple[int, ...]]]


class Fusing(gs.CpuBackend):
    """Fuses what `offer` finds in a graph.

    `fused` are the groups that were computed as one, as tuples of ops; `one_by_one`: the members are computed one after
    the other instead, in the plan's memory, at the place of the last.
    """

    def __init__(self, name: str, offer: Groups, one_by_one: bool = False) -> None:
        super().__init__(1, name)
        self.fuses(offer, one_by_one)

    def fuses(self, offer: Groups, one_by_one: bool = False) -> None:
        self.offer, self.one_by_one = offer, one_by_one
        self.fused: list[tuple[str, ...]] = []
        self.asked = 0

    def fusion_groups(self, graph):
        self.asked += 1
        return self.offer(graph)

    def graph_plan_create(self, graph):
        return None if groups_of(graph) else super().graph_plan_create(graph)

    def graph_compute(self, graph):
        groups = groups_of(graph)
        if not groups:
            super().graph_compute(graph)
            return
        ends = {group[-1]: group for group in groups}
        inside = {k for group in groups for k in group}
        for k, node in enumerate(graph.nodes):
            if k in ends:
                members = [graph.nodes[m] for m in ends[k]]
                self.fused.append(tuple(t.op for t in members))
                if self.one_by_one:
                    super().graph_compute(gs.GraphView(members))
                else:
                    self.compute_as_one(members, {graph.nodes[m] for m in ends[k] if m in graph.needed} | {node})
            elif k not in inside:
                super().graph_compute(gs.GraphView((node,)))

    def compute_as_one(self, members, written):
        lease = new_lease()
        for t in members:
            if t.view_src is None and t.nbytes:
                t.buffer.write(t.offset, memoryview(bytes([POISON]) * t.nbytes))
        own: dict[tuple, gs.Buffer] = {}        # address in the plan: own buffer
        results = []

        def here(s):
            """A member's source in the backend's own memory, where earlier members wrote it."""
            if s is None or address(s.root) not in own:
                return s
            return stand_in(s, s.name, own[address(s.root)], s.view_offs if s.view_src is not None else 0, lease)

        for t in members:
            src, memory = tuple(here(s) for s in t.src), None
            if t.view_src is None:
                buffer = gs.CpuBackend.alloc_buffer(self, max(t.nbytes, 1))
                memory = stand_in(t, t.name, buffer, 0, lease)
                if t in written:
                    results.append((t, buffer))
                if t.nbytes:
                    own[address(t)] = buffer
            elif address(t.root) in own:
                memory = stand_in(t, t.name, own[address(t.root)], t.view_offs, lease)
            super().graph_compute(gs.GraphView((rewired(t, src, memory, lease),)))
        for t, buffer in results:
            if t.nbytes:
                data = bytearray(t.nbytes)
                buffer.read(0, memoryview(data))
                t.buffer.write(t.offset, memoryview(data))


class FusingDeferred(DeferredBackend, Fusing):
    """Fusing on a device whose queue runs late."""

    def __init__(self, name: str, queues: DeferredQueues, offer: Groups, one_by_one: bool = False,
                 copies: bool = True) -> None:
        DeferredBackend.__init__(self, name, queues, copies)
        self.fuses(offer, one_by_one)


def groups_of(graph) -> tuple[tuple[int, ...], ...]:
    return graph.groups if isinstance(graph, gs.GraphView) else ()


def address(t: gs.Tensor) -> tuple:
    return t.buffer, t.offset


# -- groups to offer ------------------------------------------------------------------------------------


def chains(*patterns: tuple[str, ...]) -> Groups:
    """Groups of nodes with the ops of a pattern, each reading the one before it, also through views; first match
    wins."""
    def offer(graph):
        taken: set[int] = set()
        for pattern in patterns:
            for start, node in enumerate(graph.nodes):
                found = [start] if node.op == pattern[0] else []
                while found and len(found) < len(pattern):
                    reader = next((k for k in range(found[-1] + 1, len(graph.nodes))
                                   if graph.nodes[k].op == pattern[len(found)] and reads(graph.nodes[k],
                                                                                        graph.nodes[found[-1]])), None)
                    found = [] if reader is None else [*found, reader]
                if found and taken.isdisjoint(found):
                    taken.update(found)
                    yield tuple(found)
    return offer


def reads(node: gs.Tensor, earlier: gs.Tensor) -> bool:
    return any(s is not None and s.root is earlier.root for s in node.src)


def anything(seed: int) -> Groups:
    """Random groups: mostly of nodes that read each other, some of unrelated nodes at near positions."""
    def offer(graph):
        rng = random.Random(seed)
        free = [k for k, t in enumerate(graph.nodes) if t.computes]
        found = []
        for _ in range(rng.randint(1, 6)):
            if len(free) < 2:
                break
            group = {rng.choice(free)}
            for _ in range(rng.randint(1, 4)):
                near = [k for k in free if k not in group and abs(k - max(group)) < 8 and (
                    rng.random() < 0.1 or any(reads(graph.nodes[k], graph.nodes[m]) or reads(
                        graph.nodes[m], graph.nodes[k]) for m in group))]
                if near:
                    group.add(rng.choice(near))
            if len(group) > 1:
                found.append(tuple(sorted(group)))
                free = [k for k in free if k not in group]
        return found
    return offer


def nothing(graph: gs.Graph) -> list:
    return []


def ascending(groups) -> bool:
    return all(a < b for group in groups for a, b in pairwise(group))
