"""The least seconds of placements that have weights of some bytes in a store: of fetches, and of computing beside them.

Costs are seconds of the goal, of all graphs together.  Any part of a weight may be in the store, so that the weights
whose bytes cost least come first, and a cost is a convex function of the bytes (`Curve`).  Fetches of whole weights run
beside what computes.  Experts are read when a node has chosen them, and next nodes read them: then nothing computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.placement.devices import Device
from ggml_sched.placement.facts import Facts, is_resident

__all__ = ["Curve", "LeastFetches", "seconds_beside"]

ROUNDING = 1 - 1e-12


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


class LeastFetches:
    """The least costs of placements of one model.

    `sizes`: {weight that may be in the store: bytes}; `whole`: {weight: cost of fetching all of it}; `experts`:
    {weight: cost of reading the experts that are used}, of weights that may have slots.  `beside`: see
    `seconds_beside`; None: nothing is known of what computes while experts are read.
    """

    def __init__(self, sizes: Mapping[str, int], whole: Mapping[str, float], experts: Mapping[str, float],
                 beside: float | None) -> None:
        either = {name: min(cost, experts.get(name, cost)) for name, cost in whole.items()}
        self.either: Curve = Curve(sizes, either)
        """Of fetches, whether experts are read one by one or not."""
        self._whole = Curve(sizes, whole)
        self._experts = Curve({name: sizes[name] for name in experts}, experts)
        self._others = Curve({name: size for name, size in sizes.items() if name not in experts}, whole)
        self.beside: float | None = beside if experts else None

    def seconds(self, nbytes: float, computing: float = 0.0, alone: float | None = None) -> float:
        """The least seconds with weights of at least so many bytes in the store; `computing`: what computing, copies
        and splits take at least; `alone`: what computing takes without the others, None: nothing is known of that."""
        if self.beside is None or alone is None:
            return max(computing, self.either.at(nbytes) * ROUNDING)
        nbytes = min(nbytes, self.either.most)
        whole = max(computing, self._whole.at(nbytes) * ROUNDING)
        if whole == computing:
            return whole
        # A part `others` of the bytes costs max(computing, fetches), the rest is read while nothing computes.  The sum
        # is convex, so its least value is at a corner.
        alone -= self.beside
        corners = [*self._others.nbytes, *(nbytes - self._experts.nbytes), self._others.within(alone)]
        low, high = max(0.0, nbytes - self._experts.most), min(nbytes, self._others.most)
        others = np.clip(corners, low, high)
        costs = (np.maximum(alone, np.interp(others, self._others.nbytes, self._others.costs))
                 + np.interp(nbytes - others, self._experts.nbytes, self._experts.costs))
        return max(computing, min(whole, float(costs.min()) * ROUNDING))


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
