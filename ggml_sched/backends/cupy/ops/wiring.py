"""Which members of a fusion group read each other's results, according to the memory that they use.

A member's source may be another `Tensor` object than the member with the same memory, so tensors are compared by
addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.launch import Builder

__all__ = ["Members", "apart"]


def apart(b: Builder, t: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor shares no byte with any of the others."""
    start = b.region(t).address
    return not any(start < (at := b.region(other).address) + other.nbytes and at < start + t.nbytes
                   for other in others)


class Members:
    """The members of a group, in order, and which of them read the results of which."""

    def __init__(self, b: Builder, nodes: Sequence[Tensor]) -> None:
        self.nodes: tuple[Tensor, ...] = tuple(nodes)
        self.number: dict[Tensor, int] = {node: i for i, node in enumerate(nodes)}
        self._builder = b
        self._writers: dict[tuple[int, int], int] = {}
        self._readers: dict[int, list[int]] = {i: [] for i in range(len(nodes))}
        for i, node in enumerate(nodes):
            for j, source in enumerate(node.src):
                if source is None:
                    continue
                for k in range(i - 1, -1, -1):
                    if not apart(b, nodes[k], (source,)):
                        self._writers[i, j] = k
                        self._readers[k].append(i)
                        break

    def producer(self, node: Tensor, j: int) -> Tensor | None:
        """The member that computes all of source j of a member, and nothing else; None if there is none."""
        k = self._writers.get((self.number[node], j))
        if k is None:
            return None
        found, source, b = self.nodes[k], node.src[j], self._builder
        same = (b.region(found).address == b.region(source).address and found.nbytes == source.nbytes
                and found.is_contiguous and source.is_contiguous)
        return found if same else None

    def only_reader(self, node: Tensor) -> Tensor | None:
        """The one member that reads a member's result, as one source; None if several, or nodes outside, read it."""
        readers = self._readers[self.number[node]]
        return self.nodes[readers[0]] if len(readers) == 1 and not self._builder.is_needed(node) else None

    def reads(self, node: Tensor, others: Iterable[Tensor]) -> bool:
        """Whether a member reads the result of one of these members, directly or through other members."""
        wanted, waiting = {self.number[other] for other in others}, [self.number[node]]
        seen: set[int] = set()
        while waiting:
            i = waiting.pop()
            if i in seen:
                continue
            seen.add(i)
            found = [k for (reader, _), k in self._writers.items() if reader == i]
            if wanted.intersection(found):
                return True
            waiting += found
        return False

    def may_move(self, node: Tensor, over: Iterable[Tensor]) -> bool:
        """Whether a member may be computed on the other side of the members `over`: neither writes what the other reads
        or writes."""
        b = self._builder
        mine = [t for t in node.src if t is not None]
        return all(apart(b, node, (other, *(t for t in other.src if t is not None))) and apart(b, other, mine)
                   for other in over)
