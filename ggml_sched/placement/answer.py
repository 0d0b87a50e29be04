"""The answer of `fit`: a frozen value that says where every weight and cache lives, what it takes, and what is proven.

Holds no memory: plans are values, and a device stands for a backend.  `report` and `explain` make its texts.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import Backend
from ggml_sched.errors import OutOfMemory, PlacementError
from ggml_sched.placement.devices import DRIVER, Device, Driver, LinkLike
from ggml_sched.placement.pricing import Price
from ggml_sched.planning.plan import Plan
from ggml_sched.threads.cached import cached_property

if TYPE_CHECKING:
    from ggml_sched.placement.stock import Stock

__all__ = ["Fetching", "Fit", "Placed", "Slotted", "Usage"]


class Placed(NamedTuple):
    """Where one weight or cache lives."""

    name: str
    kind: str
    """"weight", "kv", or another kind that the graph gives its residents."""
    nbytes: int
    """Bytes that it takes on its device, aligned."""
    device: int
    """Index of its device."""
    model: int = 0
    """Index of its model, where several were placed together."""
    pinned: bool = False
    """Whether a pin of the caller put it there."""
    fetched: bool = False
    """Whether it is in a file, from which each evaluation fetches what it reads: then it takes no memory there, save
    that of the slots for experts (`Fetching.slots`)."""


class Usage(NamedTuple):
    """The bytes of one device."""

    device: Device
    weights: int
    cache: int
    arena: int
    """Bytes of its arena; see `Fit.arenas`."""
    reserve: int
    left: int
    """Bytes of the budget that nothing takes."""
    fetched: int = 0
    """Bytes of its weights that are in a file: `weights` does not count them."""
    slots: int = 0
    """Bytes of its slots for experts."""


@dataclass(frozen=True)
class Slotted:
    """The slots of weights of which the host reads single experts, when a node has chosen them.

    Assumption: each token chooses its experts at random, all experts of a layer equally likely.  Where tokens prefer
    some experts, or choose as the tokens before, fewer bytes are read."""

    names: tuple[str, ...]
    """The weights that are read expert by expert."""
    n_slots: int
    n_experts: int
    """Experts of all layers together: with as many slots none would be read again."""
    slot_nbytes: int
    """The most bytes that one slot takes."""
    used: tuple[float, ...]
    """For each graph the bytes of the experts that it is expected to use."""
    nbytes: tuple[float, ...]
    """For each graph the bytes of those that are expected to be in no slot: what it reads."""
    n_slots_with_more: int
    """The number of slots with 1 GiB more on the host."""
    nbytes_with_more: tuple[float, ...]
    """`nbytes` with 1 GiB more on the host."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {"weights": list(self.names), "slots": self.n_slots, "experts": self.n_experts,
                "slot_nbytes": self.slot_nbytes, "used": list(self.used), "nbytes": list(self.nbytes),
                "slots_with_1GiB_more": self.n_slots_with_more, "nbytes_with_1GiB_more": list(self.nbytes_with_more),
                "assumed": "each token chooses its experts at random"}


@dataclass(frozen=True)
class Fetching:
    """What each evaluation of a model fetches, where the weights do not fit all devices together."""

    disk: Device
    """The disk: the device that `gs.price` needs besides `Fit.devices` for the plans."""
    names: tuple[str, ...]
    """The weights that each evaluation fetches as a whole, in the order of their uses."""
    rows: tuple[str, ...]
    """The weights in the file of which evaluations read the rows that they need."""
    nbytes: int
    """Bytes of the weights `names`, aligned."""
    window: int
    """Bytes of the host's arena for weights that are being fetched or used."""
    with_more: int
    """Bytes that each evaluation would fetch with 1 GiB more on the host."""
    still: tuple[str, ...]
    """The weights that each evaluation would then fetch."""
    share: int
    """Bytes of the host's budget that are for this model: its weights that stay, slots, caches, and its arena with the
    window.  The shares of several models add up to at most the budget; those of models that take turns can add up to
    more, as each counts an arena of its own, and the models have only the largest of these."""
    slots: Slotted | None = None
    """The slots for experts that are read when nodes have chosen them; None where no weight is read so."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {"disk": self.disk.name, "bandwidth": self.disk.bandwidth, "latency": self.disk.launch,
                "nbytes": self.nbytes, "window": self.window, "weights": list(self.names), "rows": list(self.rows),
                "nbytes_with_1GiB_more": self.with_more, "share": self.share,
                "experts": None if self.slots is None else self.slots.to_dict()}


@dataclass(frozen=True, repr=False)
class Fit:
    """A placement, its price, and the proof.  Made by `gs.fit`; equal if all numbers are equal; picklable.

    Times are seconds, sizes bytes; tuples are in the order of `devices` or of the graphs that were given.
    """

    devices: tuple[Device, ...]
    """The devices, best first and the host last, as a `Scheduler` takes their backends."""
    link: LinkLike
    goal: tuple[float, ...]
    """For each graph the weight of its seconds."""
    within: float
    """The gap at which the search could stop."""
    seconds: float
    """The price of the plans: for each graph the seconds of its real plan, times its weight in the goal."""
    bound: float
    """No placement within the budgets takes less, wherever its weights, caches and nodes are: proven node by node.
    Assumption: matrix products of graphs of weight 0 in the goal run where their largest weight or cache is."""
    rules_bound: float
    """No placement of the tables takes less: proven by multipliers, with the least arenas that such a placement has.

    The tables have the placements that compute, in every graph, nodes with weights and caches where these are, and
    other nodes by four rules.  The tables leave out placements that

    * divide an atom: residents of one node, the caches of a stage, small weights and the matrix beside them, and
      what joins a neighbour in a stage of more than seven atoms;
    * spread a stage over more than two devices, where it has more than 2,187 patterns (over more than one device
      and the host, where the patterns of two devices alone are more than that);
    * have residents that several stages read on another device than the host, except for the largest groups of
      such residents: as many groups as can be placed in at most 32 ways together;
    * compute several graphs of the goal on different devices at a cut, where the combinations of devices are more
      than 27, except with the graphs that stream weights on one device and the others on the host;
    * stream weights to a device that is not one of the four with the most FLOP/s.

    `bound` holds for all of these."""
    arenas: tuple[int, ...]
    """Bytes of the arena of each device: the largest of all graphs; of several models the sum, or the largest if they
    share their arenas, and what each needs to read rows from a disk."""
    arenas_of: tuple[tuple[int, ...], ...]
    """For each model alone the bytes of the arena of each device."""
    models: tuple[int, ...]
    """For each graph the index of its model."""
    prices: tuple[Price, ...]
    """The price of each graph's plan."""
    placed: tuple[Placed, ...]
    """Where each weight and cache lives: those of the first model, sorted by name, then of the next."""
    worth: tuple[float, ...]
    """For each device the seconds that one more byte of it is worth (a multiplier).  An estimate: the bounds
    can fall by more, and `seconds` falls in steps, because a tensor is never divided.  Where computing waits for
    weights that are fetched, the seconds of fetching a byte less."""
    assigned: bool
    """Whether the plans assign nodes to devices; otherwise the scheduler's own rules place all nodes."""
    fill: float
    """The part of each cache that attention is expected to read."""
    stream: tuple[bool, ...]
    """For each graph whether weights of the host may be streamed to other devices for it."""
    plans: tuple[Plan, ...] = field(compare=False)
    """The plan of each graph; its graph is a copy of the one that was given."""
    fetchings: tuple[Fetching, ...] = ()
    """For each model what an evaluation fetches from the disk of the host; empty: all weights stay on the devices."""

    # -- what it takes ----------------------------------------------------------------

    @property
    def gap(self) -> float:
        """How far `seconds` is above `rules_bound`, as a part of it: 0.01 is 1 %."""
        return self.seconds / self.rules_bound - 1 if self.rules_bound > 0 else 0.0

    @property
    def full_gap(self) -> float:
        """How far `seconds` is above `bound`, as a part of it."""
        return self.seconds / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def fetching(self) -> Fetching | None:
        """What each evaluation fetches from the disk of the host; None: all weights stay on the devices.

        PlacementError where several models fetch weights: see `model`, and `fetchings`.
        """
        if len(self.fetchings) > 1:
            raise PlacementError(f"{len(self.fetchings)} models fetch weights: fit.model(k).fetching is what one of "
                                 "them does")
        return self.fetchings[0] if self.fetchings else None

    @property
    def memory(self) -> tuple[Usage, ...]:
        """The bytes of each device."""
        rows = []
        for d, device in enumerate(self.devices):
            here = [entry for entry in self.placed if entry.device == d]
            weights = sum(entry.nbytes for entry in here if entry.kind == "weight" and not entry.fetched)
            fetched = sum(entry.nbytes for entry in here if entry.fetched)
            cache = sum(entry.nbytes for entry in here) - weights - fetched
            slots = sum(of.n_slots * of.slot_nbytes for found in self.fetchings if device.host
                        and (of := found.slots) is not None)
            rows.append(Usage(device, weights, cache, self.arenas[d], min(device.reserve, device.memory),
                              device.budget - weights - cache - slots - self.arenas[d], fetched, slots))
        return tuple(rows)

    def model(self, k: int) -> Fit:
        """The answer for one of several models; what the others take is added to the devices' reserve.  Of a host that
        fetches weights all but the share of the model is."""
        graphs = [g for g, of in enumerate(self.models) if of == k]
        if not graphs:
            raise IndexError(f"model {k} of {1 + max(self.models)}")
        arenas = self.arenas_of[k]
        other = [use.weights + use.cache + use.arena - arena for use, arena in zip(self.memory, arenas, strict=True)]
        own = tuple(entry._replace(model=0) for entry in self.placed if entry.model == k)
        for entry in own:
            other[entry.device] -= 0 if entry.fetched else entry.nbytes
        fetchings = self.fetchings[k : k + 1]
        if fetchings:
            other[-1] = self.devices[-1].budget - fetchings[0].share
        devices = tuple(device.replace(reserve=device.reserve + taken)
                        for device, taken in zip(self.devices, other, strict=True))
        pick = {name: tuple(getattr(self, name)[g] for g in graphs) for name in ("goal", "prices", "stream", "plans")}
        seconds = sum(weight * price.seconds for weight, price in zip(pick["goal"], pick["prices"], strict=True))
        bound = max(0.0, self.bound - (self.seconds - seconds))
        return dataclasses.replace(self, devices=devices, seconds=seconds, bound=bound,
                                   rules_bound=max(0.0, self.rules_bound - (self.seconds - seconds)), arenas=arenas,
                                   arenas_of=(arenas,), models=(0,) * len(graphs), placed=own, fetchings=fetchings,
                                   **pick)  # type: ignore[arg-type]

    @cached_property
    def residents(self) -> Mapping[str, Device]:
        """{name of a weight or cache: its device}.

        PlacementError where several models have the name, on different devices: see `model`.
        """
        found: dict[str, Placed] = {}
        for entry in self.placed:
            other = found.setdefault(entry.name, entry)
            if other.device != entry.device:
                raise _ambiguous(entry.name, [other, entry], self.devices)
        return {name: self.devices[entry.device] for name, entry in found.items()}

    # -- using it ---------------------------------------------------------------------

    def place(self, tensor: Tensor | str, layer: int | None = None) -> Device:
        """The device of a weight or cache, given as a tensor or by name; the argument `place` of `load_graph`.

        A tensor that no graph of the fit reads is on the host.  `layer` is not used; loaders of models pass it anyway.
        PlacementError where several models have the name, on different devices: `fit.model(k).place` is that of one.
        """
        name = tensor if isinstance(tensor, str) else tensor.root.name
        found = self._entries.get(name, ())
        if len({entry.device for entry in found}) > 1:
            raise _ambiguous(name, found, self.devices)
        return self.devices[found[0].device if found else -1]

    @cached_property
    def _entries(self) -> Mapping[str, Sequence[Placed]]:
        """{name: the weights and caches of that name, at most one of each model}."""
        found: dict[str, list[Placed]] = {}
        for entry in self.placed:
            found.setdefault(entry.name, []).append(entry)
        return found

    def nodes(self, graph: Graph) -> dict[Tensor, Device]:
        """{node: device} to assign in a graph of the same model: `scheduler.set_tensor_backend` for each.

        The graph may be one of the fit's or have other sizes; nodes correspond by name, op and order.  Empty where the
        scheduler's rules place all nodes (`assigned` is False).  PlacementError for a graph that several models of
        the fit may have: `fit.model(k).nodes` is that of one.
        """
        if not self.assigned:
            return {}
        like = self._like(graph)
        # A store, which reads rows of its weights, is no device.
        devices = dict(zip([b for b in like.backends if not b.is_store], self.devices, strict=True))
        found = {key: devices.get(backend) for key, t in _keyed(like.graph)
                 if (backend := like.backend_of(t)) is not None}
        return {t: device for key, t in _keyed(graph) if (device := found.get(key)) is not None}

    def budgets(self) -> tuple[int | None, ...]:
        """For each device the bytes that the arena of a scheduler may take (`Scheduler(budgets=)`): what weights and
        caches leave.  None, which is no bound, for a host that `fit` has added: other graphs may need more there than
        those of the fit."""
        return tuple(None if isinstance(use.device, Driver) else use.arena + use.left for use in self.memory)

    def verify(self) -> None:
        """Check every plan, independently of the planner, and that every device keeps its budget.

        HazardError for an unsound plan, OutOfMemory for a budget that is exceeded.
        """
        for use in self.memory:
            if use.left < 0:
                budget = use.device.budget
                raise OutOfMemory(f"device {use.device.name!r}: {-use.left} bytes more than its budget of {budget}",
                                  use.device.name, budget - use.left, budget)
        for plan in self.plans:
            plan.verify()

    def _like(self, graph: Graph) -> Plan:
        """The plan of `graph` if it is one of the fit's; otherwise that of the fit's graph whose number of tokens is
        nearest, among graphs of the same wiring if there are any.  PlacementError where several models were placed, and
        not exactly one has this wiring."""
        own = next((plan for plan in self.plans if plan.graph is graph), None)
        if own is not None:
            return own
        models = {k for k, plan in zip(self.models, self.plans, strict=True) if plan.graph.wiring == graph.wiring}
        if max(self.models) > 0 and len(models) != 1:
            raise PlacementError(f"{len(models)} of {1 + max(self.models)} models have a graph like {graph!r}: "
                                 "fit.model(k) is the answer for one")
        return min(self.plans, key=lambda plan: (plan.graph.wiring != graph.wiring,
                                                 abs(_tokens(plan.graph) - _tokens(graph))))

    def llama_cpp(self, names: Mapping[str, str] | None = None,
                  compute: Callable[[Stock], Mapping[str, int]] | None = None, **settings: object) -> Stock:
        """What an unmodified llama.cpp must be given for this placement, or for the nearest that it can have.

        llama.cpp has the first layers on the host, then the layers of each device in one piece; caches are where their
        layer is, and single weights may be placed by name.  Where llama.cpp cannot have the caches as they are here, or
        its larger arenas exceed a budget, all else is fitted again around what it can have.

        `names`: {name of a device here: llama.cpp's name}, such as {"GPU0": "CUDA0"}; the host is "CPU".  `compute`: a
        function that returns {llama.cpp's name of a device: bytes of its compute buffers} for a `Stock`, such as
        `ggml_sched.llama_cpp.compute_of(path)`, whose bytes are exact; without it arenas are planned by ggml's rules.
        `settings`: arguments of `llama_cpp.Llama` that replace those that the graphs show.

        Raises PlacementError for several models, for residents whose names are not llama.cpp's, and where nothing fits
        around the caches; ValueError for a name that no device has.
        """
        found: Stock = _METHODS["stock"](self, names, compute, **settings)
        return found

    # -- printing it ------------------------------------------------------------------

    def explain(self, name: str) -> str:
        """A text: what a weight or cache costs where it is, and for each other device what it would cost there and what
        it would push out; where several models have the name, one text for each.  PlacementError for a name that is not
        placed."""
        text: str = _METHODS["explain"](self, name)
        return text

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON: devices by name, bytes, seconds.

        "residents" are {name: device}, "fetching" what is fetched, if anything is; of several models, which may have
        equal names, "models" are a list of such "residents" and "fetching" with the "graphs" and "arenas" of each.
        """
        names = [device.name for device in self.devices]
        count = 1 + max(self.models)
        residents: list[dict[str, str]] = [{} for _ in range(count)]
        for entry in self.placed:
            residents[entry.model][entry.name] = names[entry.device]
        fetched: list[dict[str, Any] | None] = [None] * count
        if self.fetchings:
            fetched = [fetching.to_dict() for fetching in self.fetchings]
        where: dict[str, Any] = {"residents": residents[0], "fetching": fetched[0]}
        if count > 1:
            where = {"models": [{"graphs": [g for g, of in enumerate(self.models) if of == k],
                                 "arenas": dict(zip(names, self.arenas_of[k], strict=True)), "residents": residents[k],
                                 "fetching": fetched[k]} for k in range(count)]}
        return {
            "seconds": self.seconds, "bound": self.bound, "rules_bound": self.rules_bound, "gap": self.gap,
            "full_gap": self.full_gap,
            "within": self.within, "goal": list(self.goal), "fill": self.fill, "stream": list(self.stream),
            "devices": [device.to_dict() for device in self.devices],
            "memory": [{"device": use.device.name, "weights": use.weights, "cache": use.cache, "arena": use.arena,
                        "reserve": use.reserve, "left": use.left, "fetched": use.fetched, "slots": use.slots}
                       for use in self.memory],
            "graphs": [{"weight": weight, "seconds": price.seconds,
                        "compute": dict(zip(names, price.compute, strict=True)), "copies": price.copies,
                        "splits": price.splits, "fetches": price.fetches, "stalled": price.stalled}
                       for weight, price in zip(self.goal, self.prices, strict=True)],
            "seconds_per_byte": dict(zip(names, self.worth, strict=True)),
            "assigned": self.assigned, **where,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        text: str = _METHODS["report"](self)
        return text

    def __repr__(self) -> str:
        uses = ", ".join(f"{use.device.name} {use.weights + use.cache + use.arena}" for use in self.memory)
        return f"<Fit of {len(self.placed)} residents: {self.seconds * 1e3:.3f} ms, gap {self.gap:.2%}, bytes {uses}>"

    def to_svg(self, before: Fit | Stock | Mapping[str, Any] | None = None, names: Sequence[str] = ()) -> str:
        """The answer as an SVG drawing: what fills each device, where the time goes, and the bound.

        `before`: another answer to draw above this one, to the same scale: a fit, what stock llama.cpp can have
        (`fit.llama_cpp()`), or what `to_dict` returned, such as the JSON of `ggml-sched fit --json`.  `names`: what to
        call the two answers, such as ("one card", "two cards").  ValueError for a mapping that is no such answer, and
        for other than two names.
        """
        text: str = _METHODS["to_svg"](self, before, names)
        return text

    def _repr_svg_(self) -> str:
        """The drawing in a notebook."""
        return self.to_svg()

    def _repr_html_(self) -> str:
        """The answer in a notebook: the drawing, and the text of `print(fit)` to unfold."""
        text: str = _METHODS["notebook"](self)
        return text

    def entry(self, name: str) -> Placed:
        """Where a weight or cache is; PlacementError for a name that is not placed, or that several models have."""
        found = self.entries(name)
        if len(found) > 1:
            raise _ambiguous(name, found, self.devices)
        return found[0]

    def entries(self, name: str) -> Sequence[Placed]:
        """Where the weights or caches of a name are, in each model that has one; PlacementError if none has."""
        found = self._entries.get(name, ())
        if not found:
            raise PlacementError(f"{name!r} is no weight or cache of the graphs that were placed")
        return tuple(found)


def _tokens(graph: Graph) -> int:
    """The number of tokens that the graph's meta gives; 0 if it gives none."""
    known = graph.meta.get("n_tokens")
    return known if isinstance(known, int) else 0


def _ambiguous(name: str, found: Sequence[Placed], devices: Sequence[Device]) -> PlacementError:
    """The error for a name that several models have."""
    where = " and ".join(f"of model {entry.model} on {devices[entry.device].name}" for entry in found)
    return PlacementError(f"several models have a {found[0].kind} {name!r}, {where}: fit.model(k) is the answer for "
                          "one")


Key: TypeAlias = tuple[str, str, int]


def _keyed(graph: Graph) -> Iterator[tuple[Key, Tensor]]:
    """The nodes that compute, each with a key: name, op, and how many nodes of this name and op came before."""
    seen: Counter[tuple[str, str]] = Counter()
    for t in graph.nodes:
        if t.computes:
            yield (t.name, t.op, seen[t.name, t.op]), t
            seen[t.name, t.op] += 1


_METHODS: dict[str, Callable[..., Any]] = {}
"""{method of Fit: the registered function that does its work}."""


def register_fit_methods(**functions: Callable[..., Any]) -> None:
    """Use these functions for `str(fit)` (`report`), `fit.explain` (`explain`), `fit.llama_cpp` (`stock`), `fit.to_svg`
    and notebooks."""
    _METHODS.update(functions)


def backends_of(fit: Fit, backends: Sequence[Backend] | None,
                driver: Callable[[str], Backend]) -> tuple[Backend, ...]:
    """For each device of a fit the backend that stands for it: the one of its name in `backends`, or its own if
    `backends` is None.  `driver`: a function that makes, under a name, the backend of this process, for the host that
    `fit` has added or that its caller has named "driver".

    PlacementError where `backends` lacks another device of the fit.
    """
    named = {device.name: device.backend for device in fit.devices} if backends is None else \
        {backend.name: backend for backend in backends}
    if fit.devices[-1].name == DRIVER and (DRIVER not in named or not named[DRIVER].has_memory):
        named = {**named, DRIVER: driver(DRIVER)}
    missing = [device.name for device in fit.devices if device.name not in named]
    if missing:
        raise PlacementError(f"the fit has a device {missing[0]!r}, and no backend has that name; names are "
                             f"{', '.join(named)}")
    return tuple(named[device.name] for device in fit.devices)
