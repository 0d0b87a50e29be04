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
        known: dict[tuple[int, Choice], list[tuple[list[int], list[int]]]] = {}
        for k, choice in enumerate(solution.path):
            c = self.classes[k]
            each, (m, stage), names = self._classes[c], self._of_stage[k], self._outlines[k].names
            row = int(chain.rows[c][choice.pattern])
            held = each.devices[row].tolist()
            for name, a in zip(names, each.atoms.of, strict=True):
                residents.setdefault(name, held[a])
            graphs = self.models[m].graphs
            if (c, choice) not in known:
                known[c, choice] = [self._assigned(chain, each, c, row, choice, n) for n in range(len(graphs))]
            for g, own, (devices, far) in zip(graphs, self.models[m].stages[stage].nodes, known[c, choice],
                                              strict=True):
                nodes[g].update(zip([self.graphs[g].nodes[i] for i in own], devices, strict=True))
                streamed[g].update(dict.fromkeys(names[r] for r in far))
        return Assignment(residents, tuple(nodes), tuple(tuple(names) for names in streamed))

    def _assigned(self, chain: TableChain, each: StageClass, c: int, row: int, choice: Choice,
                  n: int) -> tuple[list[int], list[int]]:
        """(The device of each node of graph n in a stage of class c, the weights that nodes read from another device,
        as indices of the stage's residents)."""
        follows = each.active.index(n) if n in each.active else 0
        rule, came, streams_to = 0, self._host, -1
        if each.active:
            came = self.states[choice.state_in][follows]
            v, _ = self._variant(chain, each, c, row, choice, follows)
            rule = each.costs[follows].rule[v]
            streams_to = each.costs[follows].streams_to[v] if n in each.active else -1
        held = each.devices[row].tolist()
        device, residents, of = [*held, came, self._host], each.outline.residents, each.atoms.of
        if streams_to >= 0:
            for a, members in enumerate(each.atoms.members):
                if device[a] == self._host and not any(residents[r].cache for r in members):
                    device[a] = streams_to
        devices = [device[site] for site in each.rules[rule][n]]
        far = [r for at, read in zip(devices, each.outline.graphs[n].residents, strict=True) for r in read
               if not residents[r].cache and held[of[r]] != at]
        return devices, far
