"""Reordering: another execution order of the same nodes, with fewer bytes alive at the peak.

List scheduling (a greedy form of Sethi and Ullman's idea): among the nodes whose sources are computed, take the one
after which the fewest bytes are alive, on a tie the one that comes first in the graph.  If nodes write to a memory
through views (a KV cache), all its reads and writes keep their order: in ggml's graphs only the position of nodes says
which comes first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from ggml_sched._graph import Graph, Tensor

__all__ = ["reorder"]



def reorder(graph: Graph) -> Graph:
    """The graph with its nodes in an order that probably needs fewer bytes at its peak: same tensors, same results.

    The greedy order may be worse than the given one; `Scheduler(reorder=True)` plans both and keeps the better.
    """
    before = _dependencies(graph)
    after: dict[int, list[int]] = defaultdict(list)
    missing = [len(found) for found in before]
    for i, found in enumerate(before):
        for k in found:
            after[k].append(i)
    readers, frees = _lifetimes(graph)
    ready = [i for i, count in enumerate(missing) if count == 0]
    queue = [(_growth(graph, i, readers, frees), i) for i in ready]
    heapq.heapify(queue)
    order: list[int] = []
    done = bytearray(len(graph.nodes))
    while queue:
        growth, i = heapq.heappop(queue)
        if done[i]:
            continue
        now = _growth(graph, i, readers, frees)
        if now != growth:
            # Since node i was queued, other readers of its sources have run: it may now free more.
            heapq.heappush(queue, (now, i))
            continue
        done[i] = 1
        order.append(i)
        for root in frees[i]:
            readers[root].discard(i)
        for k in after[i]:
            missing[k] -= 1
            if not missing[k]:
                heapq.heappush(queue, (_growth(graph, k, readers, frees), k))
        # The last remaining reader of a tensor will free it: queue that node again, with its smaller growth.
        for root in frees[i]:
            if len(readers[root]) == 1:
                (k,) = readers[root]
                if not missing[k] and not done[k]:
                    heapq.heappush(queue, (_growth(graph, k, readers, frees), k))
    return graph.with_order([graph.nodes[i] for i in order])


def _dependencies(graph: Graph) -> list[set[int]]:
    """For each node, by position, the positions of nodes that must run first.

    These are its sources and alloc dependencies.  Where nodes write to a root's memory through views, they are also the
    last write before each read, and all reads and the last write before each write.
    """
    position = {t: i for i, t in enumerate(graph.nodes)}
    written = {t.view_src for t in graph.nodes if t.view_src is not None and t.computes}
    last_write: dict[Tensor, int] = {}
    reads: dict[Tensor, list[int]] = defaultdict(list)
    before: list[set[int]] = []
    deps = graph.deps
    for i, node in enumerate(graph.nodes):
        found = {position[s] for s in node.src if s is not None and s in position}
        if node.view_src is not None and node.view_src in position:
            found.add(position[node.view_src])
        kept = deps.get(node, ())
        found.update(position[t] for t in kept if t in position)
        touched = {s.root for s in (*node.src, *kept) if s is not None} & written
        if node.view_src in written:
            touched.add(node.view_src)
        for root in touched:
            if root in last_write:
                found.add(last_write[root])
        if node.view_src is not None and node.computes:
            found.update(reads[node.view_src])
            last_write[node.view_src] = i
            reads[node.view_src] = []
        for root in touched:
            reads[root].append(i)
        found.discard(i)
        before.append(found)
    return before


def _lifetimes(graph: Graph) -> tuple[dict[Tensor, set[int]], list[list[Tensor]]]:
    """({root: positions of the nodes that read its memory}, for each node the roots whose memory it reads).

    Alloc dependencies count as reads.  Nodes that are views read nothing: their readers count as readers of the root.
    """
    readers: dict[Tensor, set[int]] = defaultdict(set)
    frees: list[list[Tensor]] = []
    deps = graph.deps
    for i, node in enumerate(graph.nodes):
        roots = list(dict.fromkeys(s.root for s in (*node.src, *deps.get(node, ())) if s is not None))
        if not node.computes:
            roots = []
        for root in roots:
            readers[root].add(i)
        frees.append(roots)
    return readers, frees


def _growth(graph: Graph, i: int, readers: dict[Tensor, set[int]], frees: list[list[Tensor]]) -> int:
    """By how many bytes running node i changes the bytes alive: its result, less the roots of which it is the last
    reader.  `readers` and `frees` are the results of `_lifetimes`, without the nodes that have run."""
    node = graph.nodes[i]
    grown = 0 if node.view_src is not None else node.nbytes
    for root in frees[i]:
        if readers[root] == {i} and "output" not in graph.flags_of(root) and not root.is_resident:
            grown -= root.nbytes
    return grown
