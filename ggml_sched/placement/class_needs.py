"""What the arenas of classes of stages need at least: of a pattern, beside copies that stay, and with caches.

`ClassNeeds` also says which patterns have caches on which device, and what the entries of `arenas.Case.caches` mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import Tensor
from ggml_sched.placement.costs import needs, where
from ggml_sched.placement.devices import Device, Links
from ggml_sched.placement.facts import Facts
from ggml_sched.placement.outline import GLOBAL
from ggml_sched.placement.stage_classes import StageClass, StageClasses
from ggml_sched.threads.cached import cached_property

__all__ = ["ClassNeeds", "Lasting"]


@dataclass(frozen=True, eq=False)
class Lasting:
    """Inputs that the same stages with caches read: their copies on a device last from the first of these stages with
    caches there to the last."""

    model: int
    stages: frozenset[int]
    """The stages of the model that read all of these inputs."""
    inputs: tuple[frozenset[int], ...]
    """For each graph the ids of the inputs that all of these stages read."""
    classes: tuple[bool, ...]
    """For each class of stages whether it reads these inputs."""


class ClassNeeds(StageClasses):
    """The needs of the patterns of classes of stages, which depend on the devices of caches.  Arguments and errors are
    those of `StageClasses`."""

    def __init__(self, graphs: Sequence[Facts], weights: Sequence[float], devices: Sequence[Device], links: Links,
                 stream: Sequence[bool] | None = None, pins: Mapping[str, int] | None = None) -> None:
        super().__init__(graphs, weights, devices, links, stream, pins)
        self._within: dict[int, tuple[tuple[NDArray[np.int64], ...], ...]] = {}

    @property
    def needs(self) -> tuple[NDArray[np.int64], ...]:
        """For each class the bytes that arenas have to hold at least [patterns, devices], whichever the variant."""
        return tuple(each.needs for each in self._classes)

    @cached_property
    def levels(self) -> tuple[NDArray[np.int64], ...]:
        """For each device all numbers of bytes that some variant of a pattern needs of its arena, each once, rising."""
        found = [cost.needs.reshape(-1, len(self.devices)) for each in self._classes for cost in each.costs]
        return tuple(np.unique(np.concatenate([needs[:, d] for needs in found])) for d in range(len(self.devices)))

    @cached_property
    def cached(self) -> tuple[int, ...]:
        """For each device the bytes that its arena has to hold at least if three or more stages have caches there.

        Copies of the inputs that all stages with caches read are alive from the first of the stages with caches there
        to the last, so also while a stage between them runs.  0 for the host, and if the model has fewer such stages.
        """
        found = []
        for m, model in enumerate(self.models):
            classes = [each for each in self._classes if each.model == m and self._caches(each).any()]
            count = sum(self._caches(self._classes[c]).any() for (of, _), c in zip(self._of_stage, self.classes,
                                                                                  strict=True) if of == m)
            for n, g in enumerate(model.graphs):
                lasting = frozenset(s for s in self._held[g] if self._shared_values[g].stages[s] == count)
                least = np.full(len(self.devices), np.inf)
                for each in classes if count >= 3 else ():
                    shape, there = (len(each.patterns), len(each.ins)), self._caches(each)
                    at = where(each.patterns, each.atoms, each.ins, self._host)
                    for rule in each.rules:
                        need = needs(each.outline.graphs[n], rule[n], at, shape, len(self.devices), lasting,
                                     known=each.known[n]).min(1)
                        least = np.minimum(least, np.where(there, need, np.inf).min(0))
                found.append(np.where(np.isfinite(least), least, 0))
        most = np.max(found, axis=0).astype(np.int64)
        most[self._host] = 0
        return tuple(most.tolist())

    @cached_property
    def lasting(self) -> tuple[Lasting, ...]:
        """The sets of inputs whose copies last through several stages, those that the most stages read first."""
        found: dict[tuple[int, frozenset[int]], None] = {}
        for m, model in enumerate(self.models):
            for g in model.graphs:
                for s in self._held[g]:
                    stages = self._shared_values[g].readers[s]
                    if len(stages) > 1 and self._wirings[g].nbytes[s]:
                        found[m, stages] = None
        made = []
        for m, stages in sorted(found, key=lambda key: (key[0], -len(key[1]), sorted(key[1]))):
            inputs = [frozenset(s for s in held if g in self.models[m].graphs
                                and stages <= self._shared_values[g].readers[s]) for g, held in enumerate(self._held)]
            classes = {c for (of, k), c in zip(self._of_stage, self.classes, strict=True) if of == m and k in stages}
            made.append(Lasting(m, stages, tuple(inputs), tuple(c in classes for c in range(len(self._classes)))))
        return tuple(made)

    def _needs_within(self, number: int) -> tuple[tuple[NDArray[np.int64], ...], ...]:
        """For each class, for each graph that counts in the goal, the bytes that arenas have to hold in a stage while
        copies of the inputs `lasting[number]` are alive before and after it [variants, patterns, in, devices]."""
        found = self._within.get(number)
        if found is None:
            found = self._within[number] = tuple(self._class_within(each, self.lasting[number])
                                                 for each in self._classes)
        return found

    def _class_within(self, each: StageClass, lasting: Lasting) -> tuple[NDArray[np.int64], ...]:
        """`_needs_within` of one class."""
        if each.model != lasting.model or not each.costs:
            return tuple(cost.needs for cost in each.costs)
        there = self._caches(each)
        shape, graphs = (len(each.patterns), len(each.ins)), self.models[each.model].graphs
        at, others = where(each.patterns, each.atoms, each.ins, self._host), np.arange(len(self.devices)) != self._host
        found = [cost.needs.copy() for cost in each.costs]
        for n, g in enumerate(graphs):
            read = {value.number for value in each.outline.graphs[n].values if value.origin == GLOBAL}
            nbytes = {s: int(self._wirings[g].nbytes[s]) for s in lasting.inputs[g]}
            # A device without caches of the stage has copies of all these inputs; one with caches has them, too, and
            # `needs` counts those that the stage reads.
            more = np.where(there, sum(size for s, size in nbytes.items() if s not in read), sum(nbytes.values()))
            more = (more * others)[:, None, :]
            is_active = n in each.active
            own = each.active.index(n) if is_active else 0
            cost = each.costs[own]
            if is_active:
                found[own] += np.where(there, 0, more[:, 0])[:, None, :]
                if not there.any():
                    continue
            for r, rule in enumerate(each.rules):
                need = needs(each.outline.graphs[n], rule[n], at, shape, len(self.devices), lasting.inputs[g],
                             known=each.known[n])
                need = np.where(others, need + more, 0)
                for v in range(len(cost.rule)):
                    if cost.rule[v] == r and (not is_active or cost.streams_to[v] < 0):
                        np.maximum(found[own][v], need, out=found[own][v])
        return tuple(found)

    @property
    def holds_caches(self) -> tuple[NDArray[np.bool_], ...]:
        """For each class whether a pattern has caches on a device [patterns, devices]."""
        return tuple(self._caches(each) for each in self._classes)

    def _caches(self, each: StageClass) -> NDArray[np.bool_]:
        found = np.zeros((len(each.patterns), len(self.devices)), bool)
        for a, members in enumerate(each.atoms.members):
            if any(each.outline.residents[r].cache for r in members):
                found |= each.devices[:, a, None] == np.arange(len(self.devices))
        return found

    @cached_property
    def implied(self) -> tuple[tuple[int, ...], ...]:
        """For each entry of `Case.caches` the others that are True if it is: those of sets of `readers` with all of its
        stages."""
        n = len(self.devices)
        wider = [[j for j, other in enumerate(self.readers) if j != i and all(there or not here for here, there in zip(
            of, other, strict=True))] for i, of in enumerate(self.readers)]
        return (*(tuple(j * n + d for j in of) for of in wider for d in range(n)), *((),) * (len(self.copied) * n))

    @property
    def n_sets(self) -> int:
        """The sets of entries of `Case.caches`, each with one for every device: those of `readers`, then `copied`."""
        return len(self.readers) + len(self.copied)

    @cached_property
    def _least_with_caches(self) -> NDArray[np.int64]:
        """For each entry of `Case.caches` of a set of `readers`, if it is True, the bytes that the arena of its device
        has to hold at least."""
        found = np.zeros((len(self.readers), len(self.devices)), np.int64)
        for i, of in enumerate(self.readers):
            least = np.full(len(self.devices), np.inf)
            for is_in, each, there in zip(of, self._classes, self.holds_caches, strict=True):
                if is_in:
                    np.minimum(least, np.where(there, each.needs, np.inf).min(0), out=least)
            found[i] = np.where(np.isfinite(least), least, 0)
        return found.reshape(-1)

    def floors(self, caches: Sequence[bool | None]) -> list[int]:
        """The bytes that the arena of each device has to hold at least where it has caches; `caches`: `Case.caches`."""
        least = np.where([held is True for held in caches[:len(self._least_with_caches)]], self._least_with_caches, 0)
        found: list[int] = least.reshape(len(self.readers), len(self.devices)).max(0).tolist()
        return found

    def caches_of(self, residents: Mapping[str, int],
                  nodes: Sequence[Mapping[Tensor, int]] | None = None) -> tuple[bool | None, ...]:
        """The entries of `Case.caches` for a placement; without `nodes`, which has the device of each node of each
        graph, None for `copied`."""
        n = len(self.devices)
        found = [False] * (n * len(self.readers))
        for c, made in zip(self.classes, self._outlines, strict=True):
            for name, resident in zip(made.names, made.residents, strict=True):
                for i, of in enumerate(self.readers):
                    found[i * n + residents[name]] |= of[c] and resident.cache
        if nodes is None:
            return (*found, *(None,) * (n * len(self.copied)))
        for g, s in self.copied:
            w = self._wirings[g]
            at = {nodes[g].get(w.facts.nodes[i]) for i, sources in enumerate(w.sources) if s in sources}
            found += [d in at for d in range(n)]
        return tuple(found)
