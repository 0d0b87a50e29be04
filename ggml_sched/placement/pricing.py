"""The price of any plan on any devices: seconds of one compute, by device, for copies, and for splits.

A node takes what `Facts.seconds` says, a copy the link's latency and its bytes over the link's bandwidth, a split a
fixed price.  None of these overlap: a token's path is sequential, and the price is the sum.  A store fetches while
these run, one weight after another: only the seconds for which a step waits for a fetch count, which a walk over the
program gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import BackendBase, Graph, Tensor, label
from ggml_sched.errors import GraphError
from ggml_sched.placement.devices import Device, LinkLike, Links
from ggml_sched.placement.facts import Facts, expected_reads, facts, share_of_experts
from ggml_sched.planning.compiler import arrays_of
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import Fetch, FetchExperts, Load, Run, WriteBack, bank_of

__all__ = ["Price", "Pricer", "price", "price_steps"]


@dataclass(frozen=True)
class Price:
    """Seconds of one compute of a plan."""

    compute: tuple[float, ...]
    """Seconds that the nodes of each device take, in the order of the devices."""
    copies: float
    """Seconds of the copies between devices: of activations, and of weights that are read elsewhere."""
    splits: float
    """Seconds to begin the splits."""
    fetches: float = 0.0
    """Seconds of reading weights from stores, while other steps run."""
    stalled: float = 0.0
    """Seconds for which other steps wait for fetches."""

    @property
    def seconds(self) -> float:
        """The sum, with `stalled` in place of `fetches`: only fetches overlap with other steps."""
        return sum(self.compute) + self.copies + self.splits + self.stalled


def price(plan: Plan, devices: Sequence[Device], link: LinkLike = None, fill: float = 1.0) -> Price:
    """The seconds of one compute of `plan`, if its backends were `devices`.

    Devices and backends are matched by name; if no name is the same, `devices` are in the order of `plan.backends`.
    `link`: a `Link` for all, or {(from, to): Link} by the names of devices.  `fill`: the part of each cache that
    attention reads, 0 to 1.

    A node takes max(bytes / bandwidth, operations / flops) + launch of its device, a copy latency + bytes / bandwidth
    of its link, a split a fixed price of its device; views are free.  Every copy that `plan.copies` lists counts, even
    one of a weight that later computes find already copied, and so does every write-back.

    A store, which holds weights where no kernel reads them, is a device whose bandwidth is that of its source: a fetch
    takes bytes / bandwidth + launch, beside what the other devices do, as early as the waits of `plan.program` allow.
    Of weights in slots (`llama.load(memory=)`) it reads the experts that are expected to be in no slot, if each token
    chooses its experts at random; for a plan from a file, which does not say how many slots there are, all that nodes
    use.

    Raises ValueError for a backend without a device.
    """
    return Pricer(facts(plan.graph, fill), devices, Links(devices, link)).price(plan)


def price_steps(plan: Plan, devices: Sequence[Device], link: LinkLike = None, fill: float = 1.0) -> tuple[float, ...]:
    """The seconds of each step of `plan.program`, by the rules of `price`.

    A run takes the seconds of its nodes, and the fixed price of each split that begins with it; a copy, and a load to
    another backend than the one that holds the leaf, those of its link; other loads are free; a fetch takes its bytes
    over the bandwidth of the store's device.  Without fetches, which overlap with other steps, the sum is the price,
    except that two things count in `price` alone: copies that `plan.copies` lists again but a compute makes once, and
    splits that consist of views.
    """
    return Pricer(facts(plan.graph, fill), devices, Links(devices, link)).steps(plan)


class Pricer:
    """Prices many plans of one graph on the same devices: what does not depend on the plan is computed once."""

    def __init__(self, of: Facts, devices: Sequence[Device], links: Links) -> None:
        self.devices: tuple[Device, ...] = tuple(devices)
        self.links: Links = links
        self._facts = of
        self._seconds: NDArray[np.float64] = np.array([of.seconds(device) for device in devices]).reshape(
            len(devices), len(of.nodes))
        self._split = np.array([device.split for device in devices])
        self._ids = _Ids(of.graph, of.nodes)
        self._rows = np.arange(len(of.nodes))

    def price(self, plan: Plan) -> Price:
        """The price of a plan of the same graph; see `price`."""
        device_of = np.array(matched(plan.backends, self.devices), np.intp)
        ids = self._ids if plan.graph is self._facts.graph else _Ids(plan.graph, self._facts.nodes)
        splits = plan.data.splits
        begun = device_of[np.array([b for b, _, _, _ in splits], np.intp)]
        lengths = [stop - start for _, start, stop, _ in splits]
        where = np.repeat(begun, lengths)[ids.positions]
        taken = self._seconds[where, self._rows]
        compute = np.bincount(where, taken, minlength=len(self.devices))
        fetches, stalled = self._fetches(plan) if any(map(_is_store, plan.backends)) else (0.0, 0.0)
        return Price(tuple(compute.tolist()), self._copies(plan, ids, device_of), float(self._split[begun].sum()),
                     fetches, stalled)

    def steps(self, plan: Plan) -> tuple[float, ...]:
        """The seconds of each step of the program of a plan; see `price_steps`."""
        device_of = np.array(matched(plan.backends, self.devices), np.intp)
        ids = self._ids if plan.graph is self._facts.graph else _Ids(plan.graph, self._facts.nodes)
        before = np.zeros(len(plan.graph) + 1)      # for each position the seconds of all nodes before it
        for b, start, stop, _ in plan.data.splits:
            before[start + 1] += self._split[device_of[b]]
            mine = (ids.positions >= start) & (ids.positions < stop)
            np.add.at(before, ids.positions[mine] + 1, self._seconds[device_of[b]][mine])
        before = np.cumsum(before)
        found = []
        for step in plan.program.steps:
            if isinstance(step, Run):
                found.append(float(before[step.last + 1] - before[step.first]))
                continue
            if isinstance(step, Fetch):
                store = self.devices[device_of[step.backend]]
                found.append(store.launch + step.nbytes / store.bandwidth)
                continue
            if isinstance(step, FetchExperts):
                found.append(_seconds_of_experts(plan, step, self.devices[device_of[step.backend]]))
                continue
            here, there = self._holder(plan, ids, step.tensor), step.locations[0].backend
            a, b = (there, here) if isinstance(step, WriteBack) else (here, there)
            one, other = device_of[a], device_of[b]
            is_copy = step.locations[0].id >= plan.data.n_tensors
            nbytes = ids.nbytes[step.tensor] if not isinstance(step, Load) else step.nbytes
            found.append(float(self.links.latency[one, other] + self.links.per_byte[one, other] * nbytes)
                         if is_copy else 0.0)
        return tuple(found)

    def _fetches(self, plan: Plan) -> tuple[float, float]:
        """(seconds of all fetches, seconds for which other steps wait for them) in a compute that begins when nothing
        runs.  Each store is a queue, and all other steps are one after another, in the order of the program."""
        ends: list[float] = []
        free: dict[int, float] = {}         # when each store has read all that was queued
        now = total = stalled = 0.0
        for step, taken in zip(plan.program.steps, self.steps(plan), strict=True):
            # Earlier computes have ended: their steps are no longer awaited.
            ready = max((ends[wait.step] for wait in step.waits if wait.back == 0), default=0.0)
            if isinstance(step, (Fetch, FetchExperts)):
                total += taken
                free[step.backend] = max(ready, free.get(step.backend, 0.0)) + taken
                ends.append(free[step.backend])
                continue
            if isinstance(step, Run) and step.backend in free:      # GET_ROWS of a stored weight
                ready = max(ready, free[step.backend])
            start = max(now, ready)
            stalled += start - now
            now = start + taken
            if isinstance(step, Run) and _is_store(plan.backends[step.backend]):
                free[step.backend] = now
            ends.append(now)
        return total, stalled

    def _copies(self, plan: Plan, ids: _Ids, device_of: NDArray[np.intp]) -> float:
        """Seconds of a plan's copies and write-backs, without those of weights that a store fetches; `device_of`: for
        each backend the index of its device."""
        data = plan.data
        listed = data.copies
        made = [listed[c] for _, _, _, inputs in data.splits for c in inputs
                if not (_is_store(plan.backends[self._holder(plan, ids, listed[c][0])])
                        and plan.graph.tensors[listed[c][0]].root.is_resident)]
        if not made:
            return 0.0
        like, to = np.array(made, np.intp).T
        source = np.array([self._holder(plan, ids, int(i)) for i in like], np.intp)
        # A node that computes into a copy: its bytes are copied back to the backend that has the node's own memory.
        for node, c in data.write_backs:
            like, source = np.append(like, node), np.append(source, listed[c][1])
            to = np.append(to, self._holder(plan, ids, listed[c][0]))
        a, b = device_of[source], device_of[to]
        return float((self.links.latency[a, b] + self.links.per_byte[a, b] * ids.nbytes[like]).sum())

    def _holder(self, plan: Plan, ids: _Ids, i: int) -> int:
        """The index in `plan.backends` of the holder of tensor i when the plan was made."""
        return plan.data.backend_index(int(ids.memory[i]))


class _Ids:
    """What a pricer reads of a graph: the positions of its nodes, and for each id the bytes and the id of its root."""

    def __init__(self, graph: Graph, nodes: Sequence[Tensor]) -> None:
        found = [graph.id_of(node) for node in nodes]
        if -1 in found:
            raise GraphError(f"{label(nodes[found.index(-1)])} is not in the graph of the plan")
        arrays = arrays_of(graph)
        self.positions = arrays["position"][np.array(found, np.intp)]
        self.nbytes, self.memory = arrays["nbytes"], arrays["memory"]


def _seconds_of_experts(plan: Plan, step: FetchExperts, store: Device) -> float:
    """The seconds of reading the experts that are expected to be in no slot."""
    tensors = plan.graph.tensors
    first, ids = tensors[step.tensor], tensors[step.ids]
    reads = first.ne[2] * share_of_experts(first.ne[2], ids)
    slots = getattr(bank_of(first.buffer), "slots", None)
    if slots is not None:
        reads = expected_reads(reads, slots.n_slots, slots.n_experts)
    return reads * sum(store.launch + tensors[i].nb[2] / store.bandwidth for i in step.weights)


def _is_store(backend: BackendBase) -> bool:
    return getattr(backend, "is_store", False)


def matched(backends: Sequence[BackendBase], devices: Sequence[Device]) -> list[int]:
    """For each backend the index of its device: by name, or in order if no backend has the name of a device."""
    index = {device.name: i for i, device in enumerate(devices)}
    found = [index.get(backend.name, -1) for backend in backends]
    if any(i >= 0 for i in found) or len(backends) != len(devices):
        if -1 in found:
            raise ValueError(f"backend {backends[found.index(-1)].name!r} of the plan has no device; devices are "
                             f"{', '.join(index)}")
        return found
    return [*range(len(devices))]
