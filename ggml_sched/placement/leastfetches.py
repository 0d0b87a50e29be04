"""The least seconds of placements that have weights of some bytes in a store: of fetches, and of computing beside them.

Costs are seconds of the goal, of all graphs and models together.  Any part of a weight may be in the store, so that the
weights whose bytes cost least come first, and a cost is a convex function of the bytes (`Curve`).  Fetches of whole
weights run beside what computes.  Experts are read when a node has chosen them, and next nodes read them: then nothing
computes of their model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.placement.devices import Device
from ggml_sched.placement.facts import Facts, is_resident

__all__ = ["Costs", "Curve", "LeastFetches", "seconds_beside"]

ROUNDING = 1 - 1e-12
MOST_SETS = 64
"""The most sets of models that read experts one by one; of more nothing is known of what computes meanwhile."""


class Curve:
    """The least cost of so many bytes of some weights; `sizes`: {weight: bytes}, `costs`: {weight: cost of all of it}.
    """

    def __init__(self, sizes: Mapping[str, int], costs: Mapping[str, float]) -> None:
        order = sorted((name for name in sizes if sizes[name]), key=lambda name: costs.get(name, 0.0) / sizes[name])
        self.nbytes: np.ndarray = np.cumsum([0.0, *(sizes[name] for name in order)])
        self.costs: np.ndarray = np.cumsum([0.0, *(costs.get(name, 0.0) for name in order)])

    @property
    def most(self) -> float:
        """The bytes of all weights."""
        return float(self.nbytes[-1])

    def at(self, nbytes: float) -> float:
        """The least cost of so many bytes, at most all of them."""
        return float(np.interp(nbytes, self.nbytes, self.costs))

    def within(self, cost: float) -> float:
        """The most bytes whose least cost is at most this."""
        k = int(np.searchsorted(self.costs, cost, "right"))
        if k == 0 or k == len(self.costs):
            return 0.0 if k == 0 else self.most
        part = (cost - self.costs[k - 1]) / (self.costs[k] - self.costs[k - 1])
        return float(self.nbytes[k - 1] + part * (self.nbytes[k] - self.nbytes[k - 1]))

    def slope(self, nbytes: float) -> float:
        """What one of so many bytes costs more or less."""
        if len(self.nbytes) < 2:
            return 0.0
        k = min(max(1, int(np.searchsorted(self.nbytes, nbytes))), len(self.nbytes) - 1)
        return float((self.costs[k] - self.costs[k - 1]) / (self.nbytes[k] - self.nbytes[k - 1]))


class Costs(NamedTuple):
    """What fetches of one model cost.

    `sizes`: {weight that may be in the store: bytes}; `whole`: {weight: cost of fetching all of it}; `experts`:
    {weight: cost of reading the experts that are used}, of weights that may have slots.  `beside`: see
    `seconds_beside`; None: nothing is known of what computes while experts are read.
    """

    sizes: Mapping[str, int]
    whole: Mapping[str, float]
    experts: Mapping[str, float]
    beside: float | None

    @property
    def either(self) -> Mapping[str, float]:
        """{weight: the least cost of all of it, whether experts are read one by one or not}."""
        return {name: min(cost, self.experts.get(name, cost)) for name, cost in self.whole.items()}

    @property
    def is_known(self) -> bool:
        """Whether experts may be read one by one, and it is known what computes beside that."""
        return bool(self.experts) and self.beside is not None


def curve_of(parts: Iterable[tuple[Mapping[str, int], Mapping[str, float]]]) -> Curve:
    """The curve of the weights of several models: (their sizes, their costs) for each.  As any division of some bytes
    among the models divides them among the weights of all, no division costs less."""
    sizes, costs = {}, {}
    for k, (of, cost) in enumerate(parts):
        sizes.update({f"{k} {name}": size for name, size in of.items()})
        costs.update({f"{k} {name}": value for name, value in cost.items()})
    return Curve(sizes, costs)


class LeastFetches:
    """The least costs of placements of some models together, however they divide the memory of the host."""

    def __init__(self, models: Sequence[Costs]) -> None:
        self.either: Curve = curve_of((of.sizes, of.either) for of in models)
        """Of fetches, whether experts are read one by one or not."""
        kinds = [(False, True) if of.is_known else (False,) for of in models]
        n_sets = 2 ** sum(of.is_known for of in models)
        ways = [*product(*kinds)][1:] if n_sets <= MOST_SETS else []    # the first: of no model
        self.knows: bool = bool(ways)
        """Whether something is known of what computes while experts are read."""
        self._whole = curve_of((of.sizes, of.whole if of.is_known else of.either) for of in models)
        self._ways = [self._way(models, way) for way in ways]

    @staticmethod
    def _way(models: Sequence[Costs], is_slotted: Sequence[bool]) -> tuple[Curve, Curve, float]:
        """(The curve of fetches beside which others compute, that of experts that are read one by one, `beside` of all
        models), where these models read experts one by one."""
        others, experts, beside = [], [], 0.0
        for of, slotted in zip(models, is_slotted, strict=True):
            rest = {name: size for name, size in of.sizes.items() if not slotted or name not in of.experts}
            others.append((rest, of.whole if of.is_known else of.either))
            experts.append(({name: of.sizes[name] for name in of.experts} if slotted else {}, of.experts))
            beside += of.beside or 0.0 if slotted else 0.0
        return curve_of(others), curve_of(experts), beside

    def seconds(self, nbytes: float, computing: float = 0.0, alone: float | None = None) -> float:
        """The least seconds with weights of at least `nbytes` bytes in the store; `computing`: what computing, copies
        and splits take at least; `alone`: what computing without these takes, None: nothing is known of that."""
        if not self.knows or alone is None:
            return max(computing, self.either.at(nbytes) * ROUNDING)
        nbytes = min(nbytes, self.either.most)
        least = self._whole.at(nbytes) * ROUNDING
        for way in self._ways:
            if least <= computing:
                break
            least = min(least, self._reading(nbytes, alone, *way) * ROUNDING)
        return max(computing, least)

    @staticmethod
    def _reading(nbytes: float, alone: float, others: Curve, experts: Curve, beside: float) -> float:
        """The least seconds with weights of `nbytes` bytes in the store, a part of them of the curve `others`, the rest
        of `experts`.  Nodes compute while the others are fetched, so that both take the longer of their times; nothing
        computes while experts are read, whose time is added.  The sum is convex in the bytes of the others, so that its
        least value is at a corner of a curve."""
        alone -= beside
        corners = [*others.nbytes, *(nbytes - experts.nbytes), others.within(alone)]
        part = np.clip(corners, max(0.0, nbytes - experts.most), min(nbytes, others.most))
        costs = np.maximum(alone, np.interp(part, others.nbytes, others.costs))
        return float((costs + np.interp(nbytes - part, experts.nbytes, experts.costs)).min())


def seconds_beside(facts: Facts, names: Collection[str], devices: Sequence[Device]) -> float | None:
    """The most seconds of computing while a store reads experts of the weights `names`: of the nodes between those that
    choose and those that read them, in their order, each on the slowest device.  Weights from which the same numbers
    choose are all in slots if there is one device; of several devices others may compute with all but the last of them.
    None where a layer chooses before the last one has read, or rows of a weight are read between, which a store may do.
    """
    at = {node: i for i, node in enumerate(facts.nodes)}
    taken = np.max([facts.seconds(device) for device in devices], 0)
    readers: dict[Tensor, list[int]] = {}
    for i, node in enumerate(facts.nodes):
        if node.op == "MUL_MAT_ID" and node.src[0].root.name in names:
            readers.setdefault(node.src[2], []).append(i)
    total, last = 0.0, -1
    for ids, found in readers.items():
        first = at.get(ids.root, -1) + 1
        until = found[0] if len(devices) == 1 else found[-1]
        between = facts.nodes[first:until]
        if first <= last or any(other.op == "GET_ROWS" and is_resident(other.src[0].root) for other in between):
            return None
        total += float(taken[first:until].sum())
        last = until
    return total
