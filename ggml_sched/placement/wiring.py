"""Which node of a graph reads what, as plain lists by index, for the search of stages and the pricing of patterns.

Node i is `facts.nodes[i]`: nodes that are no views, in execution order.  Tensors are given by their ids in the graph.
A source may be a view; its root is the tensor that a node or the caller wrote.  Every list is made once for a graph.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_sched.errors import GraphError
from ggml_sched.placement.facts import Facts, is_weight

__all__ = ["Wiring"]

_WRITES = 2     # GS_ROLE_WRITES of include/ggml_sched/graph.h: the node computes into another tensor's memory


class Wiring:
    """The sources of every node of one graph, and what is resident.

    Raises GraphError for a resident without a name, and for two residents of one name.
    """

    def __init__(self, facts: Facts) -> None:
        graph = facts.graph
        arrays = graph.arrays()
        begin = _ints(arrays["src_begin"])
        sources = _ints(arrays["src"])
        role = arrays["role"]
        self.facts: Facts = facts
        self.ids: list[int] = [graph.id_of(t) for t in facts.nodes]
        self.root: list[int] = _ints(arrays["memory"])
        """For each tensor its root."""
        self.sources: list[list[int]] = [sources[begin[i]:begin[i + 1]] for i in self.ids]
        """For each node the tensors that it reads, in the order of its slots."""
        self.writes: list[bool] = [bool(role[i] & _WRITES) for i in self.ids]
        """For each node whether it computes into another tensor's memory."""
        self.nbytes: NDArray[np.int64] = np.frombuffer(arrays["nbytes"], np.int64)
        """For each tensor its bytes."""
        kinds = graph.kinds()
        self.kinds: list[int] = [kinds[i] for i in self.ids]
        """For each node the number of its kind (`Graph.kinds`): equal for nodes of equal op, parameters and layouts."""
        self.residents: dict[int, str] = {}
        """{id of a resident: its name}; residents are roots."""
        self.caches: set[int] = set()
        """The ids of residents that are no weights, or that a node writes."""
        self.by_name: dict[str, int] = {}
        """{name of a resident: its id}."""
        self._find_residents()
        self.producer: list[int] = [-1] * len(self.root)
        """For each root the first node that writes it; -1: a leaf."""
        for i in range(len(self.ids) - 1, -1, -1):
            self.producer[self.root[self.ids[i]]] = i
        self.before: list[list[int]] = self._find_before()
        """For each node the nodes whose results it reads, each once.  What nodes write to residents does not count."""

    def __len__(self) -> int:
        return len(self.ids)

    def _find_residents(self) -> None:
        graph = self.facts.graph
        for node, tensors in enumerate(self.facts.residents):
            for t in tensors:
                i = graph.id_of(t)
                if i in self.residents:
                    continue
                if not t.name:
                    raise GraphError(f"{self.facts.nodes[node]!r} reads a resident without a name: {t!r}")
                if t.name in self.by_name:
                    raise GraphError(f"two residents have the name {t.name!r}: "
                                     f"{graph.tensors[self.by_name[t.name]]!r} and {t!r}")
                self.by_name[t.name] = i
                self.residents[i] = t.name
                if not is_weight(t):
                    self.caches.add(i)
        for i, writes in zip(self.ids, self.writes, strict=True):
            if writes and self.root[i] in self.residents:
                self.caches.add(self.root[i])

    def _find_before(self) -> list[list[int]]:
        writer = [-1] * len(self.root)
        before = []
        for i, (node, sources) in enumerate(zip(self.ids, self.sources, strict=True)):
            found: dict[int, None] = {}
            for s in sources:
                r = self.root[s]
                if writer[r] >= 0 and r not in self.residents:
                    found[writer[r]] = None
            writer[self.root[node]] = i
            before.append(list(found))
        return before


def _ints(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, np.int32).tolist()
    return found
