"""Plans of all placements of a small model with a disk, made here and not by the package, to compare `fit` with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from dry_file_store import DryFileStore

import ggml_sched as gs
from ggml_sched.backends.store.files import ROOM
from ggml_sched.backends.store.rows import fits
from ggml_sched.graph import graphfile
from ggml_sched.placement.fetching import disk_of
from ggml_sched.placement.residency import reads_of
from ggml_sched.placement.slots import Slots, by_expert

__all__ = ["FetchingPlan", "every_fetching_plan"]

NO_MEMORY = 1 << 40
"""The size of a buffer without memory."""


class FetchingPlan(NamedTuple):
    """The plans of one placement, one for each graph; valid until the next are made."""

    plans: tuple[gs.Plan, ...]
    used: tuple[int, ...]
    """Bytes of weights and caches on each device, without slots."""
    arenas: tuple[int, ...]
    store: int
    """Bytes that the store takes on the host."""
    slots: Slots | None
    """The slots of experts on the host, whose number is not set; None: no weight is read expert by expert."""

    def left(self, ordered: Sequence[gs.Device]) -> list[int]:
        """The bytes of the budget of each device beside all that but slots; negative where it is exceeded."""
        left = [device.budget - u - a for device, u, a in zip(ordered, self.used, self.arenas, strict=True)]
        left[-1] -= self.store
        return left

    def seconds(self, ordered: Sequence[gs.Device], link: gs.Link, goal: Sequence[float] = (1.0,),
                n_slots: int = 0) -> float:
        """The price of the plans with so many slots."""
        if self.slots is not None:
            self.slots.n_slots = n_slots
        disk = disk_of(ordered)
        links = {("*", "*"): link, **{(disk.name, device.name): gs.Link(1e30) if device.host else link
                                      for device in ordered}}
        return sum(weight * gs.price(plan, (*ordered, disk), links).seconds
                   for weight, plan in zip(goal, self.plans, strict=True) if weight)


def every_fetching_plan(graphs: Sequence[gs.Graph], ordered: Sequence[gs.Device],
                        has_window: Sequence[bool]) -> Iterator[FetchingPlan]:
    """Each weight is on a device or in a store, and those of experts on the host may have slots together; without
    placements whose weights and caches alone exceed a budget.

    `graphs`: of one model.  `ordered`: the devices, the host with the disk last.  `has_window`: whether the arena of
    the host has a window, one or both.
    """
    last = len(ordered) - 1
    backends = [gs.DryBackend(device.name, alignment=device.alignment) for device in ordered]
    backends[last].concurrent_copies = True
    store = DryFileStore(disk_of(ordered).name)
    copies = [graphfile.graph_from_dict(graphfile.graph_to_dict(graph)) for graph in graphs]
    residents = [{t.name: t for t in copy.tensors if t.resident and t.view_src is None} for copy in copies]
    tensors = {name: t for named in residents for name, t in named.items()}
    experts = by_expert([[*reads_of(copy.nodes, named, fits)] for copy, named in zip(copies, residents, strict=True)])
    sizes = {name: -(-t.nbytes // 64) * 64 for name, t in tensors.items()}
    for window in (2 * max(sizes.values()) + 4 * ROOM if has else 0 for has in has_window):
        with gs.Scheduler([store, *backends], windows={backends[last]: window}, plan_cache=0) as scheduler:
            for chosen in product(*(range(last + (3 if name in experts else 2)) for name in tensors)):
                at = dict(zip(tensors, chosen, strict=True))
                used = tuple(sum(sizes[name] for name, d in at.items() if d == k) for k in range(last + 1))
                if any(n > device.budget for n, device in zip(used, ordered, strict=True)):
                    continue
                slotted = {name: experts[name] for name, d in at.items() if d == last + 2}
                if slotted and any(at[name] in (last, last + 1) for name in experts):
                    continue        # weights of experts on the host either all have slots, or none has
                if any(t.resident != "weight" and at[name] > last for name, t in tensors.items()):
                    continue
                slots = Slots(store, slotted) if slotted else None
                plans = tuple(_planned(scheduler, copy, named, at, (*backends, store), slots)
                              for copy, named in zip(copies, residents, strict=True))
                arenas = tuple(max(plan.buffer_sizes[k + 1] for plan in plans) for k in range(last + 1))
                taken = max(plan.buffer_sizes[0] for plan in plans) + max(plan.work_sizes[0] for plan in plans)
                yield FetchingPlan(plans, used, arenas, taken, slots)


def _planned(scheduler: gs.Scheduler, graph: gs.Graph, residents: Mapping[str, gs.Tensor], at: Mapping[str, int],
             backends: Sequence[gs.Backend], slots: Slots | None) -> gs.Plan:
    """`backends`: the host last but one, then the store; a weight at the number after them has slots on the host."""
    host = len(backends) - 2
    for name, t in residents.items():
        where = backends[host if at[name] > host + 1 else at[name]]
        buffer = gs.Buffer(where, NO_MEMORY, usage="weights" if t.resident == "weight" else "any")
        buffer.experts = None if slots is None else slots.bank_of.get(name)
        gs.bind_resident(t, buffer, 0)
    assigned = [node for node in graph.nodes if node.computes and not fits(node) and any(
        s is not None and at.get(s.root.name, 0) > host for s in node.src)]
    for node in assigned:
        scheduler.set_tensor_backend(node, backends[host])
    plan = scheduler.plan(graph)
    for node in assigned:
        scheduler.set_tensor_backend(node, None)
    return plan
