"""Plans of all placements of a small model with a disk, made here and not by the package, to compare `fit` with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """The plan of one placement; valid until the next is made."""

    plan: gs.Plan
    used: tuple[int, ...]
    """Bytes of weights and caches on each device, without slots."""
    arenas: tuple[int, ...]
    store: int
    """Bytes that the store takes on the host."""
    slots: Slots | None
    """The slots of experts on the host, whose number is not set; None: no weight is read expert by expert."""
    devices: tuple[gs.Device, ...]
    """The devices that the price of the plan needs, the disk last."""
    links: dict[tuple[str, str], gs.Link]

    def seconds(self, n_slots: int = 0) -> float:
        """The price of the plan with so many slots."""
        if self.slots is not None:
            self.slots.n_slots = n_slots
        return gs.price(self.plan, self.devices, self.links).seconds


def every_fetching_plan(graph: gs.Graph, ordered: Sequence[gs.Device], link: gs.Link,
                        has_window: Sequence[bool]) -> Iterator[FetchingPlan]:
    """Each weight is on a device or in a store, and those of experts on the host may have slots together.

    `ordered`: the devices, the host with the disk last.  `has_window`: whether the arena of the host has a window, one
    or both.
    """
    last, disk = len(ordered) - 1, disk_of(ordered)
    backends = [gs.DryBackend(device.name, alignment=device.alignment) for device in ordered]
    backends[last].concurrent_copies = True
    store = DryFileStore(disk.name)
    copy = graphfile.graph_from_dict(graphfile.graph_to_dict(graph))
    residents = {t.name: t for t in copy.tensors if t.resident and t.view_src is None}
    experts = by_expert([[*reads_of(copy.nodes, residents, fits)]])
    links = {("*", "*"): link, **{(disk.name, device.name): gs.Link(1e30) if device.host else link
                                  for device in ordered}}
    sizes = {name: -(-t.nbytes // 64) * 64 for name, t in residents.items()}
    for window in (2 * max(sizes.values()) + 4 * ROOM if has else 0 for has in has_window):
        with gs.Scheduler([store, *backends], windows={backends[last]: window}, plan_cache=0) as scheduler:
            for chosen in product(*(range(last + (3 if name in experts else 2)) for name in residents)):
                at = dict(zip(residents, chosen, strict=True))
                slotted = {name: experts[name] for name, d in at.items() if d == last + 2}
                if slotted and any(at[name] in (last, last + 1) for name in experts):
                    continue        # weights of experts on the host either all have slots, or none has
                if any(t.resident != "weight" and at[name] > last for name, t in residents.items()):
                    continue
                slots = Slots(store, slotted) if slotted else None
                for name, t in residents.items():
                    where = store if at[name] == last + 1 else backends[min(at[name], last)]
                    buffer = gs.Buffer(where, NO_MEMORY, usage="weights" if t.resident == "weight" else "any")
                    buffer.experts = None if slots is None else slots.bank_of.get(name)
                    gs.bind_resident(t, buffer, 0)
                assigned = [node for node in copy.nodes if node.computes and not fits(node) and any(
                    s is not None and at.get(s.root.name, 0) > last for s in node.src)]
                for node in assigned:
                    scheduler.set_tensor_backend(node, backends[last])
                plan = scheduler.plan(copy)
                for node in assigned:
                    scheduler.set_tensor_backend(node, None)
                used = tuple(sum(sizes[name] for name, d in at.items() if d == k) for k in range(last + 1))
                yield FetchingPlan(plan, used, plan.buffer_sizes[1:], plan.buffer_sizes[0] + plan.work_sizes[0], slots,
                                   (*ordered, disk), links)
