"""Tables: from graphs and devices to the chain that the solver reads, and from its solution back to tensors.

`Tables` has layers, each a class that extends the one before: `stage_classes` prices the patterns of classes of stages,
`class_needs` says what their arenas need, `table_chains` selects among them for a case, and this module turns a
solution into the devices of residents and nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggml_sched._graph import Tensor
from ggml_sched.errors import PlacementError
from ggml_sched.placement.chain import Choice, Solution
from ggml_sched.placement.stage_classes import StageClass
from ggml_sched.placement.table_chains import TableChain, TableChains

__all__ = ["Assignment", "TableChain", "Tables"]


@dataclass(frozen=True)
class Assignment:
    """The devices, as indices, on which a solution has residents and nodes."""

    residents: dict[str, int]
    """{name of a weight or cache: device}."""
    nodes: tuple[dict[Tensor, int], ...]
    """For each graph {node: device}, of all nodes that are no views."""
    streamed: tuple[tuple[str, ...], ...]
    """For each graph the names of the weights that nodes of another device read."""


class Tables(TableChains):
    """The tables of some graphs on some devices.  Arguments and errors are those of `StageClasses`."""

    def assignment(self, chain: TableChain, solution: Solution) -> Assignment:
        """Where a solution of `chain` has residents and nodes; PlacementError for a solution without a path."""
        if solution.path is None:
            raise PlacementError("this solution has no path: nothing fits")
        residents: dict[str, int] = {}
        nodes: list[dict[Tensor, int]] = [{} for _ in self.graphs]
        streamed: list[dict[str, None]] = [{} for _ in self.graphs]
        for k, choice in enumerate(solution.path):
            each = self._classes[self.classes[k]]
            m, stage = self._of_stage[k]
            row = int(chain.rows[self.classes[k]][choice.pattern])
            for r, name in enumerate(self._outlines[k].names):
                residents.setdefault(name, int(each.devices[row, each.atoms.of[r]]))
            for n, g in enumerate(self.models[m].graphs):
                self._assign(nodes[g], streamed[g], chain, each, k, stage, row, choice, m, n)
        return Assignment(residents, tuple(nodes), tuple(tuple(names) for names in streamed))

    def _assign(self, nodes: dict[Tensor, int], streamed: dict[str, None], chain: TableChain, each: StageClass, k: int,
                stage: int, row: int, choice: Choice, m: int, n: int) -> None:
        """Add the nodes of graph n of model m in stage k of the chain to `nodes`, with their devices, and the names of
        the weights that they read from another device to `streamed`."""
        follows = each.active.index(n) if n in each.active else 0
        rule, came, streams_to = 0, self._host, -1
        if each.active:
            came = self.states[choice.state_in][follows]
            v, _ = self._variant(chain, each, self.classes[k], row, choice, follows)
            rule = each.costs[follows].rule[v]
            streams_to = each.costs[follows].streams_to[v] if n in each.active else -1
        device = [*each.devices[row].tolist(), came, self._host]
        if streams_to >= 0:
            for a, members in enumerate(each.atoms.members):
                if device[a] == self._host and not any(each.outline.residents[r].cache for r in members):
                    device[a] = streams_to
        g = self.models[m].graphs[n]
        made = self._outlines[k]
        for i, node in enumerate(self.models[m].stages[stage].nodes[n]):
            at = device[each.rules[rule][n][i]]
            nodes[self.graphs[g].nodes[node]] = at
            for r in made.graphs[n].residents[i]:
                if not made.residents[r].cache and int(each.devices[row, each.atoms.of[r]]) != at:
                    streamed[made.names[r]] = None
