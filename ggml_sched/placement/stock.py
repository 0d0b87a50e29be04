"""What an unmodified llama.cpp must be given to place weights and caches as a fit does: `stock(fit)`.

llama.cpp gives each layer a device: the host has the first layers, then each device in order has a number of layers in
the proportions of `-ts`; the output is one more layer at the end.  A layer's caches are on the layer's device.  Weights
are, too, unless a regular expression (`-ot`) names another device for them.  So weights can be anywhere, but caches
only where the order of layers allows; where a fit has caches elsewhere, the nearest allowed order is taken, and all
else is fitted again around it.

Owns the rules of llama.cpp's parameters, nothing of its arithmetic.  All sizes are bytes, times seconds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

from ggml_sched._core import Policy
from ggml_sched._graph import Graph, Tensor
from ggml_sched.backends.dry import DryBackend
from ggml_sched.errors import PlacementError
from ggml_sched.placement.devices import Device
from ggml_sched.placement.pricing import Price
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import table

if TYPE_CHECKING:
    from ggml_sched.placement.answer import Fit
    from ggml_sched.placement.fit import Refit, Refits

__all__ = ["Stock", "StockUsage", "stock"]

HOST = "CPU"
"""llama.cpp's name of the host."""
OFFLOADED_ROWS = 32
"""From this many rows (tokens) on, llama.cpp lets a device compute nodes whose weights are on the host."""
MOST_ROUNDS = 5
"""The most placements that are tried until llama.cpp's arenas fit."""
ROUNDS_ELSEWHERE = 2
"""In so many of these rounds, the last ones, caches may move to where a search for more room puts them; in earlier
rounds they stay where the first placement has them, if something fits around them."""
HOST_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The parts of the layers whose caches are put on the host, tried in this order until all else fits."""
PINNED = 1 << 40
"""A byte of a cache that the caller pinned counts as this many bytes where `assign` looks for the fewest to move."""
MOST_ORDERS = 6
"""With up to this many devices all orders are tried (720); with more, only the order in which layers use them first."""
MOST_LAYERS = 1 << 12
"""More layers than llama.cpp allows.  What a file says is checked against it, because lists of all layers are made."""
_WEIGHT = re.compile(r"blk\.(\d+)\.(.+)")
_CACHE = re.compile(r"_l(\d+)$")
_OUTPUT = re.compile(r"output(_norm)?\.(weight|bias)")
_POLICY = Policy(placement="seed", offsets="best fit", reuse="first", leafs_first=False, stream=True)
"""The rules of ggml's scheduler and allocator."""


@dataclass(frozen=True)
class StockUsage:
    """Bytes of one device under llama.cpp's own scheduler and allocator, by plans that follow their rules."""

    device: Device
    weights: int
    cache: int
    arena: int

    @property
    def left(self) -> int:
        """Bytes of the budget that nothing takes; negative: so many are missing."""
        return self.device.budget - self.weights - self.cache - self.arena


@dataclass(frozen=True)
class Stock:
    """A placement that an unmodified llama.cpp can have: its arguments, the bytes on each device, and the seconds."""

    arguments: Mapping[str, object]
    """Arguments of `llama_cpp.Llama`: n_gpu_layers, tensor_split, n_ctx, n_batch, n_ubatch, type_k, flash_attn, ..."""
    override_tensor: Mapping[str, str]
    """{regular expression: device} of weights that are not on their layer's device: `-ot`.  `Llama` has no argument for
    it; under `ggml_sched.llama_cpp.overriding` models are opened with it."""
    order: tuple[str, ...]
    """The devices in the order in which llama.cpp must list them: `--device`."""
    exact: bool
    """Whether every weight and cache is where the fit has it."""
    moved: Mapping[str, str]
    """{weight or cache: its device here}, only of those that the fit has on another device."""
    residents: Mapping[str, str]
    """{weight or cache: its device}."""
    memory: tuple[StockUsage, ...]
    seconds: float
    """The prices of the plans, each times its graph's weight in the goal; ggml's rules place the nodes."""
    prices: tuple[Price, ...]
    plans: tuple[Plan, ...] = field(compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """Whether every device keeps its budget."""
        return all(use.left >= 0 for use in self.memory)

    @property
    def settings(self) -> dict[str, object]:
        """Keyword arguments of `ggml_sched.llama_cpp.dry_run`, which gives the exact bytes; the argument `devices` is
        left to the caller: the fit's devices, in `order`."""
        return {**self.arguments, "override_tensor": dict(self.override_tensor)}

    def command(self, model: str = "MODEL.gguf", program: str = "llama-server") -> str:
        """The command line with which `program` places `model` so."""
        given = self.arguments
        words: list[object] = [program, "-m", model, "-c", given["n_ctx"], "-b", given["n_batch"], "-ub",
                               given["n_ubatch"], "-ngl", given["n_gpu_layers"]]
        if self.order:
            words += ["--device", ",".join(self.order)]
        if given.get("tensor_split"):
            words += ["-ts", ",".join(map(str, given["tensor_split"]))]  # type: ignore[call-overload]
        for name, flag in (("type_k", "-ctk"), ("type_v", "-ctv"), ("n_seq_max", "-np")):
            if name in given:
                words += [flag, given[name]]
        words += ["-fa", "on" if given["flash_attn"] else "off", "--fit", "off"]
        words += [] if given["op_offload"] else ["--no-op-offload"]
        for pattern, name in self.override_tensor.items():
            words += ["-ot", f"{pattern}={name}"]
        return " ".join(shlex.quote(str(word)) for word in words)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"arguments": dict(self.arguments), "override_tensor": dict(self.override_tensor),
                "order": list(self.order), "command": self.command(), "exact": self.exact, "moved": dict(self.moved),
                "fits": self.fits, "seconds": self.seconds,
                "memory": [{"device": use.device.name, "weights": use.weights, "cache": use.cache, "arena": use.arena,
                            "left": use.left} for use in self.memory]}

    def describe(self, model: str = "MODEL.gguf") -> str:
        """A text: the command line, and what the placement takes."""
        rows: list[Sequence[object]] = [["device", "weights", "cache", "arena", "left"]]
        rows += [[use.device.name, use.weights, use.cache, use.arena, use.left] for use in self.memory]
        how = "as the fit has it" if self.exact else f"{len(self.moved)} weights and caches elsewhere than in the fit"
        return (f"{self.command(model)}\n\n{how}; {self.seconds * 1e3:.2f} ms by ggml's rules\n\n"
                f"{table(rows, underlined=True)}")

    def __str__(self) -> str:
        return self.describe()


def stock(fit: Fit, names: Mapping[str, str] | None = None,
          compute: Callable[[Stock], Mapping[str, int]] | None = None, **settings: object) -> Stock:
    """What stock llama.cpp must be given for a fit's placement, or for the nearest one that llama.cpp can have.

    Where llama.cpp cannot have the caches as the fit has them, or its larger arenas exceed a budget, all else is fitted
    again around what it can have.  The result's `fits` is False if that was not enough.

    `names`: {name of a device of the fit: llama.cpp's name}, such as {"GPU0": "CUDA0"}; the host is "CPU".
    `compute`: a function that returns {llama.cpp's name of a device: bytes of its compute buffers} for a `Stock`, such
    as `ggml_sched.llama_cpp.compute_of(path)`, whose bytes are exact; without it arenas are planned by ggml's rules.
    `settings`: arguments of `llama_cpp.Llama` that replace those that the graphs show: context, batch, types of
    caches, flash attention.

    Raises PlacementError for several models, for residents whose names are not llama.cpp's, and where nothing fits
    around the caches; ValueError for a name that no device has.
    """
    if max(fit.models, default=0) > 0:
        raise PlacementError(f"{1 + max(fit.models)} models were placed together: call fit.model(k).llama_cpp()")
    if fit.fetching is not None:
        stored = sum(entry.nbytes for entry in fit.placed if entry.fetched)
        raise PlacementError(f"llama.cpp cannot fetch what an evaluation reads of {stored} bytes of weights in a file, "
                             "as this placement does")
    from ggml_sched.placement.fit import Refit, Refits

    called = _called(fit, names or {})
    wanted = {entry.name: fit.devices[entry.device].name for entry in fit.placed}
    layers, again = _Layers(fit), Refits(fit)
    more = [0] * len(fit.devices)
    target = Refit(wanted, fit.arenas)
    for left in range(MOST_ROUNDS - 1, -1, -1):
        order, layer_of, at = _nearest(again, layers, target, more)
        found = _described(again, fit, layers, order, layer_of, wanted, at.residents, called, settings)
        if compute is not None:
            found = _measured(found, compute(found), called)
        if found.fits or not left:      # another search would make the plans of `found` invalid
            break
        # Leave free what llama.cpp's arenas take beyond those of this placement, and at least the missing bytes, so
        # that the next search cannot find this placement again.
        more = [max(size - use.left, use.arena - own) if use.left < 0 else size
                for size, use, own in zip(more, found.memory, at.arenas, strict=True)]
        near = again.search({**layers.pins, **layers.caches_of(layer_of)}, more) if left > ROUNDS_ELSEWHERE else None
        target = near or again.search(layers.pins, more) or at
    return found


def _nearest(again: Refits, layers: _Layers, target: Refit,
             more: Sequence[int]) -> tuple[tuple[str, ...], list[str], Refit]:
    """The order of devices, the device of each layer, and a placement that llama.cpp can have: the target, or, if
    llama.cpp cannot have the target's caches, a fit around the nearest caches that it can have."""
    order, layer_of = layers.assign(target.residents)
    caches = layers.caches_of(layer_of)
    if all(target.residents[name] == device for name, device in caches.items()):
        return order, layer_of, target
    for part in HOST_PARTS:
        on_host = round(part * layers.count)
        fewer = [layers.host if layer < on_host else name for layer, name in enumerate(layer_of)]
        caches = layers.caches_of(fewer)
        if any(layers.pins.get(name, device) != device for name, device in caches.items()):
            continue
        found = again.search({**layers.pins, **caches}, more)
        if found is not None:
            return order, fewer, found
    raise PlacementError("llama.cpp places the caches of layers on the host first, then on one device after the other; "
                         "with the nearest such orders nothing fits" + (" the pins" if layers.pins else ""))


def _measured(found: Stock, arenas: Mapping[str, int], called: Mapping[str, str]) -> Stock:
    """`found` with the bytes of compute buffers in `arenas`, {llama.cpp's name of a device: bytes}, in place of planned
    ones."""
    return replace(found, memory=tuple(replace(use, arena=arenas.get(called[use.device.name], use.arena))
                                       for use in found.memory))


def _described(again: Refits, fit: Fit, layers: _Layers, order: Sequence[str], layer_of: Sequence[str],
               wanted: Mapping[str, str], residents: Mapping[str, str], called: Mapping[str, str],
               settings: Mapping[str, object]) -> Stock:
    """The `Stock` for a placement that llama.cpp can have; `wanted`: {weight or cache: its device in the fit}."""
    plans, prices = _planned(again, fit, residents, bool(settings.get("op_offload", any(fit.stream))))
    memory = tuple(_usage(fit, d, residents, plans) for d in range(len(fit.devices)))
    arguments = _arguments(fit, layers, order, layer_of, settings)
    overrides = _overrides(layers, residents, layer_of, fit.devices[-1].name)
    seconds = sum(weight * one.seconds for weight, one in zip(fit.goal, prices, strict=True))
    moved = {name: called[device] for name, device in residents.items() if wanted[name] != device}
    return Stock(arguments, {pattern: called[device] for pattern, device in overrides.items()},
                 tuple(called[name] for name in order), not moved, moved,
                 {name: called[device] for name, device in residents.items()}, memory, seconds, prices, plans)


def _called(fit: Fit, names: Mapping[str, str]) -> dict[str, str]:
    """{name of a device of the fit: llama.cpp's name}; `names` as for `stock`."""
    known = [device.name for device in fit.devices]
    for name in names:
        if name not in known:
            raise ValueError(f"names: no device of the fit has the name {name!r}; names are {', '.join(known)}")
    found = {device.name: names.get(device.name, HOST if device.host else device.name) for device in fit.devices}
    if len(set(found.values())) < len(found):
        raise ValueError(f"names: two devices have one name: {', '.join(found.values())}")
    return found


# -- layers ---------------------------------------------------------------------------


class _Layers:
    """The weights and caches of a fit by layer; the output is one more layer, and the last.

    `caches`: {cache: number of its layer}; `weights`: {weight: number of its layer}, which is `count` for the output;
    `others`: weights that llama.cpp has on the host, such as the embedding; `pins`: {weight or cache: device} as the
    caller pinned it.
    """

    def __init__(self, fit: Fit) -> None:
        self.host = fit.devices[-1].name
        self.names = [device.name for device in fit.devices[:-1]]
        self.nbytes = {entry.name: entry.nbytes for entry in fit.placed}
        self.pins = {entry.name: fit.devices[entry.device].name for entry in fit.placed if entry.pinned}
        self.caches: dict[str, int] = {}
        self.weights: dict[str, int] = {}
        self.others: list[str] = []
        output: list[str] = []
        for entry in fit.placed:
            if entry.kind != "weight":
                self.caches[entry.name] = _layer_of(_CACHE, entry.name)
            elif _WEIGHT.fullmatch(entry.name):
                self.weights[entry.name] = _layer_of(_WEIGHT, entry.name)
            elif _OUTPUT.fullmatch(entry.name):
                output.append(entry.name)
            else:
                self.others.append(entry.name)
        meta = [plan.graph.meta.get("n_layer") for plan in fit.plans]
        most = 1 + max([*self.caches.values(), *self.weights.values()], default=-1)
        self.count = max([most, *(n for n in meta if isinstance(n, int))])
        if self.count > MOST_LAYERS:
            raise PlacementError(f"{self.count} layers, by the names and the metadata of the graphs: more than "
                                 f"{MOST_LAYERS}, which no model of llama.cpp has")
        self.weights.update(dict.fromkeys(output, self.count))

    def caches_of(self, layer_of: Sequence[str]) -> dict[str, str]:
        """{cache: the device of its layer}."""
        return {name: layer_of[layer] for name, layer in self.caches.items()}

    def assign(self, wanted: Mapping[str, str]) -> tuple[tuple[str, ...], list[str]]:
        """(The order of devices; the device of each layer, the output last) that moves the fewest bytes of caches away
        from the `wanted` devices, and then of weights that `-ot` has to name.  Caches with pins move only if some move
        in every order."""
        caches = [dict.fromkeys((self.host, *self.names), 0) for _ in range(self.count + 1)]
        weights = [dict.fromkeys((self.host, *self.names), 0) for _ in range(self.count + 1)]
        for of, rows in ((self.caches, caches), (self.weights, weights)):
            for name, layer in of.items():
                for device in rows[layer]:
                    pinned = PINNED if of is self.caches and name in self.pins else 1
                    rows[layer][device] += self.nbytes[name] * pinned * (device != wanted[name])
        best: tuple[tuple[int, int], tuple[str, ...], list[str]] | None = None
        for order in self._orders(wanted):
            moved, path = _cheapest([self.host, *order], caches, weights)
            if best is None or moved < best[0]:
                best = moved, order, path
        assert best is not None
        return best[1], best[2]

    def _orders(self, wanted: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
        """Orders of the devices to try: all permutations of those that hold anything, followed by the other devices."""
        first: dict[str, float] = {}
        for name, layer in sorted({**self.weights, **self.caches}.items(), key=lambda one: one[1]):
            if wanted[name] != self.host:
                first.setdefault(wanted[name], layer)
        used = sorted(first, key=lambda name: (first[name], self.names.index(name)))
        rest = tuple(name for name in self.names if name not in used)
        for order in permutations(used) if len(used) <= MOST_ORDERS else (tuple(used),):
            yield (*order, *rest)


def _layer_of(pattern: re.Pattern[str], name: str) -> int:
    """The number of the layer in a name; PlacementError for a name without one."""
    found = pattern.search(name)
    if found is None:
        raise PlacementError(f"{name!r} does not name its layer as llama.cpp's caches do: cache_k_l0, cache_v_l0, ...")
    return int(found[1])


def _cheapest(order: Sequence[str], caches: Sequence[Mapping[str, int]], weights: Sequence[Mapping[str, int]],
              ) -> tuple[tuple[int, int], list[str]]:
    """((bytes of caches, bytes of weights) that are not where they were wanted, the device of each layer), where these
    bytes are least and the devices follow `order` from layer to layer.  `caches`, `weights`: for each layer {device:
    bytes that would not be where they were wanted}."""
    best: list[tuple[tuple[int, int], list[int]]] = [((0, 0), [])] * len(order)
    for cache, weight in zip(caches, weights, strict=True):
        least = best[0]
        row = []
        for d, name in enumerate(order):
            least = min(least, best[d], key=lambda one: one[0])
            (a, b), path = least
            row.append(((a + cache[name], b + weight[name]), [*path, d]))
        best = row
    found, path = min(best, key=lambda one: one[0])
    return found, [order[d] for d in path]


# -- parameters -----------------------------------------------------------------------


def _arguments(fit: Fit, layers: _Layers, order: Sequence[str], layer_of: Sequence[str],
               settings: Mapping[str, object]) -> dict[str, object]:
    """The arguments of llama_cpp.Llama for this placement; `settings` replace those that the graphs show."""
    on_devices = [name for name in layer_of if name != layers.host]
    largest = max((plan.graph for plan in fit.plans), key=_tokens)
    residents = {t.name: t for t in largest.tensors if t.resident and t.view_src is None}
    found: dict[str, object] = {
        "n_ctx": _context(largest, residents), "n_batch": _tokens(largest), "n_ubatch": _tokens(largest),
        "n_gpu_layers": len(on_devices), "flash_attn": any(t.op == "FLASH_ATTN_EXT" for t in largest.nodes),
        "op_offload": any(fit.stream)}
    if len(order) > 1 and on_devices:
        found["tensor_split"] = [on_devices.count(name) for name in order]
    for key, prefix in (("type_k", "cache_k_l"), ("type_v", "cache_v_l")):
        kinds = {str(t.type) for name, t in residents.items() if name.startswith(prefix)}
        if len(kinds) == 1:
            found[key] = kinds.pop()
    sequences = largest.meta.get("n_seqs", 1)
    if isinstance(sequences, int) and sequences > 1:
        found["n_seq_max"] = sequences
    return {**found, **settings}


def _tokens(graph: Graph) -> int:
    """Tokens of a graph's batch, by its metadata, or else by its input of tokens or embeddings."""
    known = graph.meta.get("n_tokens")
    if isinstance(known, int) and known > 0:
        return known
    found = [t.ne[0] for t in graph.leafs if t.name in ("inp_tokens", "tokens")]
    return int(found[0]) if found else 1


def _context(graph: Graph, residents: Mapping[str, Tensor]) -> int:
    """Cells of the KV cache, by the graph's metadata, or else by the extents of its caches."""
    known = graph.meta.get("n_ctx")
    if isinstance(known, int) and known > 0:
        return known
    return max((t.ne[1] for name, t in residents.items() if name.startswith("cache_k_l")), default=512)


def _overrides(layers: _Layers, residents: Mapping[str, str], layer_of: Sequence[str], host: str) -> dict[str, str]:
    """{regular expression: device} for the weights that llama.cpp would place elsewhere without the expression.

    A weight matches at most one expression.  If the embedding is also the output matrix, llama.cpp makes a copy of it
    for the output, unless an expression matches the embedding.
    """
    found: dict[str, str] = {}
    has_output = any(layer == layers.count and not name.startswith("output_norm")
                     for name, layer in layers.weights.items())
    for name in layers.others:
        if residents[name] != host or not has_output or name != "token_embd.weight":
            found[f"^{re.escape(name)}$"] = residents[name]
    by_device: dict[str, dict[str, list[int]]] = {}
    for name, layer in sorted(layers.weights.items(), key=lambda one: (one[1], one[0])):
        if residents[name] == layer_of[layer]:
            continue
        part = _WEIGHT.fullmatch(name)
        if part is None:
            found[f"^{re.escape(name)}$"] = residents[name]
        else:
            by_device.setdefault(residents[name], {}).setdefault(part[2], []).append(layer)
    for device, parts in by_device.items():
        groups: dict[tuple[int, ...], list[str]] = {}
        for part_name, numbers in parts.items():
            groups.setdefault(tuple(numbers), []).append(part_name)
        for numbers_of, part_names in groups.items():
            found[_pattern(numbers_of, part_names)] = device
    return found


def _pattern(layers: Sequence[int], parts: Sequence[str]) -> str:
    """A regular expression that matches the weights blk.LAYER.PART of these layers and parts, and no others."""
    numbers = "|".join(map(str, layers))
    ends = {part.rpartition(".")[2] for part in parts}
    bodies = [part.rpartition(".")[0] for part in parts] if len(ends) == 1 else list(parts)
    names = "|".join(map(re.escape, bodies))
    end = rf"\.{re.escape(ends.pop())}" if len(ends) == 1 else ""
    return rf"^blk\.({numbers})\.({names}){end}$"


# -- price ----------------------------------------------------------------------------


class _StockBackend(DryBackend):
    """A device without memory, under ggml's rules; with `offloads` it computes large batches on the host's weights."""

    def __init__(self, device: Device, offloads: bool) -> None:
        super().__init__(device.name, device.alignment)
        self.is_host = device.host
        self._offloads = offloads and not device.host

    def offload_op(self, node: Tensor) -> bool:
        if not self._offloads or node.op == "GET_ROWS":
            return False
        return node.ne[2 if node.op == "MUL_MAT_ID" else 1] >= OFFLOADED_ROWS


def _planned(again: Refits, fit: Fit, residents: Mapping[str, str],
             offloads: bool) -> tuple[tuple[Plan, ...], tuple[Price, ...]]:
    """Plans of the fit's graphs by ggml's rules, with these residents, and their prices."""
    at = {device.name: d for d, device in enumerate(fit.devices)}
    return again.model.by_rules({name: at[device] for name, device in residents.items()},
                                [_StockBackend(device, offloads) for device in fit.devices], _POLICY)


def _usage(fit: Fit, d: int, residents: Mapping[str, str], plans: Sequence[Plan]) -> StockUsage:
    """The bytes of device d: of the residents on it, {name: device}, aligned, and of the largest arena of the plans."""
    device = fit.devices[d]
    nbytes = {t.name: t.nbytes for plan in plans for t in plan.graph.tensors if t.resident and t.view_src is None}
    weights = cache = 0
    for entry in fit.placed:
        if residents[entry.name] == device.name:
            size = -(-nbytes[entry.name] // device.alignment) * device.alignment
            weights, cache = (weights + size, cache) if entry.kind == "weight" else (weights, cache + size)
    return StockUsage(device, weights, cache, max(plan.buffer_sizes[d] for plan in plans))
