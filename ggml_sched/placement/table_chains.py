"""Chains of tables: of the classes of stages and of what a case allows, for the solver.

A chain has a stage for every stage of every model, model after model, and a table for every class of stages.  A state
is a device for each graph that counts in the goal (its weight is not 0); a model begins and ends in state 0, which is
the host for each.  The chains of one search differ in the devices that may hold caches, the bytes of arenas, and the
devices of residents that several stages read: these only select among the patterns, which costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Choice
from ggml_sched.placement.class_needs import ClassNeeds
from ggml_sched.placement.costs import Costs, undominated
from ggml_sched.placement.devices import Device, Links
from ggml_sched.placement.facts import Facts
from ggml_sched.placement.stage_classes import StageClass

__all__ = ["TableChain", "TableChains"]


@dataclass(frozen=True, eq=False)
class TableChain(Chain):
    """A chain whose tables have only some patterns of each class, and which patterns and variants these are."""

    rows: tuple[NDArray[np.intp], ...] = field(default=())
    """For each class: for each row of the chain's table the index of its pattern among all patterns of the class."""
    variants: tuple[tuple[NDArray[np.int16], ...], ...] = field(default=())
    """For each class, for each of its graphs that count in the goal, the variant [all patterns, device of the incoming
    activation, device of the activation passed on]."""
    caches: tuple[bool | None, ...] = field(default=())
    """The entries of `Case.caches`."""


_Kept: TypeAlias = tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.int64], tuple[NDArray[np.int16], ...]]
"""The table of one class for a chain, as `Tables._table` returns it."""
Within: TypeAlias = tuple[int, int] | None
"""(Index of inputs in `Tables.lasting`, a device other than the host); None: none."""


class TableChains(ClassNeeds):
    """The chains of some graphs and devices, and what their paths need and pay.  Arguments and errors are those of
    `StageClasses`."""

    def __init__(self, graphs: Sequence[Facts], weights: Sequence[float], devices: Sequence[Device], links: Links,
                 stream: Sequence[bool] | None = None, pins: Mapping[str, int] | None = None) -> None:
        super().__init__(graphs, weights, devices, links, stream, pins)
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._known: dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.int64], Any]] = {}

    def chain(self, caches: Sequence[bool | None] | None = None, shared: Mapping[str, int] | None = None,
              limits: Sequence[float] | None = None, within: Sequence[tuple[int, int]] = ()) -> TableChain:
        """The chain of all placements that have no caches, or read no input, where `caches`, which is `Case.caches`, is
        False, have residents that several stages read on the devices of `shared` ({name: device}, one name for each
        group), and need arenas of at most `limits` bytes on each device.  `within`: inputs, as indices of `lasting`,
        and a device where their copies are alive before and after each stage.  Entries of `copied` may be left out of
        `caches`: they are None.

        These copies have a price: for each entry of `caches` that is True the start of the chain costs one copy; where
        it is None, or if `caches` is None, each stage of the set with caches on the device, or each stage that reads
        the input there, costs a part of the copy.
        A group that `shared` does not name may be on a different device in every stage, and its bytes count in the
        first stage alone: such a chain gives lower bounds only.

        A class without an allowed pattern has a single row of infinite cost.
        """
        n, entries = len(self.devices), self.n_sets * len(self.devices)
        if caches is not None and len(caches) == entries - n * len(self.copied):
            caches = (*caches, *(None,) * (n * len(self.copied)))
        if caches is not None and len(caches) != entries:
            raise ValueError(f"{len(caches)} entries of `caches` for {len(self.readers)} sets of stages, "
                             f"{len(self.copied)} inputs and {len(self.devices)} devices")
        if limits is not None and len(limits) != len(self.devices):
            raise ValueError(f"{len(limits)} limits for {len(self.devices)} devices")
        fixed = self._fixed(shared or {})
        rows, cost, memory, variants = [], [], [], []
        where_caches = (None,) * entries if caches is None else tuple(
            None if held is None else bool(held) for held in caches)
        for c, each in enumerate(self._classes):
            kept, table, taken, chosen = self._table(c, each, where_caches, fixed,
                                                     None if limits is None else tuple(limits), tuple(within))
            rows.append(kept)
            cost.append(table)
            memory.append(taken)
            variants.append(chosen)
        start = np.full(len(self.states), np.inf)
        start[0] = self._prices[[held is True for held in where_caches]].sum()
        return TableChain(self.classes, tuple(cost), tuple(memory), start, self.states, self._known, tuple(rows),
                          tuple(variants), where_caches)

    def _fixed(self, shared: Mapping[str, int]) -> dict[int, int]:
        """{index of a group in `self.shared`: its device}, from {name of a resident of the group: device}."""
        fixed: dict[int, int] = {}
        for name, device in shared.items():
            group = next((i for i, names in enumerate(self.shared) if name in names), None)
            if group is None:
                raise ValueError(f"{name!r} is not read in several stages")
            if not 0 <= device < len(self.devices):
                raise ValueError(f"{name!r} on device {device}; there are {len(self.devices)}")
            if fixed.setdefault(group, device) != device:
                raise ValueError(f"{name!r} and {self.shared[group][0]!r} are on one device, not on {device} and "
                                 f"{fixed[group]}")
        return fixed

    def _table(self, c: int, each: StageClass, caches: tuple[bool | None, ...], fixed: Mapping[int, int],
               limits: tuple[float, ...] | None, within: Sequence[tuple[int, int]]) -> _Kept:
        """(The patterns of class `c` that no other beats; their seconds [patterns, states, states]; their bytes
        [patterns, devices]; for each graph that counts in the goal the variant of fewest seconds [all patterns, device
        of the incoming activation, device of the activation passed on]).  The other arguments are those of `chain`."""
        usable = np.ones(len(each.patterns), bool)
        n = len(self.devices)
        of = [i for i, readers in enumerate(self.readers) if readers[c]]    # other sets say nothing of this class
        closed = [any(caches[i * n + d] is False for i in of) for d in range(n)]
        usable &= ~self._caches(each)[:, closed].any(1)
        for r, resident in enumerate(each.outline.residents):
            if resident.shared in fixed:
                usable &= each.devices[:, each.atoms.of[r]] == fixed[resident.shared]
        most = np.inf if limits is None else np.array(limits)
        allowed = [np.asarray((cost.needs <= most).all(3)) for cost in each.costs]
        if limits is not None:
            for number, d in within:
                allowed = [mask & (needs[..., d] <= limits[d])
                           for mask, needs in zip(allowed, self._needs_within(number)[c], strict=True)]
        parts = tuple(held is None and i in of for i in range(len(self.readers)) for held in caches[i * n:(i + 1) * n])
        charged = [self._charged(each, j, caches) for j in range(len(each.costs))]
        for j, cost in enumerate(each.costs):
            for s, there in cost.reads.items():
                banned = [held is False for held in self._entries_of(each, j, s, caches)]
                if any(banned):
                    allowed[j] = allowed[j] & ~there[..., banned].any(3)
        key = (c, parts, *map(tuple, charged), usable.tobytes(), *(mask.tobytes() for mask in allowed))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) > 256:
                self._kept.clear()
            found = self._kept[key] = self._make_table(each, parts, charged, usable, allowed)
        return found

    def _entries_of(self, each: StageClass, j: int, s: int, caches: Sequence[bool | None]) -> Sequence[bool | None]:
        """For each device the entry of `caches` of an input of graph j of `StageClass.active`, by id."""
        n = len(self.devices)
        at = len(self.readers) + self.copied.index((self.models[each.model].graphs[each.active[j]], s))
        return caches[at * n:(at + 1) * n]

    def _charged(self, each: StageClass, j: int, caches: Sequence[bool | None]) -> list[tuple[int, int, float]]:
        """(Id of an input, device, seconds) for each input of graph j of `StageClass.active` whose copy to the device
        is not decided: what each stage that reads it there costs more.  Of the host it is nothing."""
        g = self.models[each.model].graphs[each.active[j]]
        return [(s, d, float(self._price_of_input(g, s)[d]) / self.weights[g] / self._shared_values[g].stages[s])
                for s in each.costs[j].reads for d, held in enumerate(self._entries_of(each, j, s, caches))
                if held is None and d != self._host]

    def _make_table(self, each: StageClass, parts: Sequence[bool], charged: Sequence[Sequence[tuple[int, int, float]]],
                    usable: NDArray[np.bool_], allowed: Sequence[NDArray[np.bool_]]) -> _Kept:
        """Make the result of `_table`.  `parts`: for each entry of `Case.caches` of a set of `readers` whether a stage
        of the set with caches on the device pays its part of copying the inputs; `charged`: for each graph those of
        `_charged`; `usable`: the patterns that may be used; `allowed`: for each graph the variants within the limits.
        """
        best, variants = [], []
        for cost, more, mask in zip(each.costs, charged, allowed, strict=True):
            taken = cost.seconds
            for s, d, part in more:
                taken = taken + part * cost.reads[s][..., d]
            seconds, chosen = self._best_variant(cost, taken, mask & usable[None, :, None])
            best.append(seconds)
            variants.append(chosen)
        n, s = len(each.patterns), len(self.states)
        model = self.models[each.model]
        ins = {d: i for i, d in enumerate(each.ins)}
        # No stage reads the last activation, so its device does not matter: a model ends in state 0.
        leave = [seconds.min(2, keepdims=True) for seconds in best] if each.outline.last else best
        total = np.full((n, s, s), np.inf)
        width = len(each.active)
        enter = [a for a, state in enumerate(self.states) if (a == 0 or not each.outline.first)
                 and all(d == self._host for d in state[width:])]
        exits = [b for b, state in enumerate(self.states) if (b == 0 or not each.outline.last)
                 and all(d == self._host for d in state[width:])]
        if width:
            grid = np.ix_(range(n), enter, exits)
            sums: NDArray[np.float64] = np.zeros((n, len(enter), len(exits)))
            for j, seconds in enumerate(leave):
                a = [ins[self.states[e][j]] for e in enter]
                b = [0 if each.outline.last else self.states[e][j] for e in exits]
                sums += self.weights[model.graphs[each.active[j]]] * seconds[np.ix_(range(n), a, b)]
            total[grid] = sums
        else:
            total[:, 0, 0] = np.where(usable, 0.0, np.inf)      # only the memory of this model counts
        if each.atoms.cache >= 0:
            paid = (each.held_back * np.reshape(parts, each.held_back.shape)).sum(0)
            total += paid[each.devices[:, each.atoms.cache]][:, None, None]
        kept = undominated(total, each.memory)
        return kept, np.ascontiguousarray(total[kept]), each.memory[kept], tuple(variants)

    def _best_variant(self, cost: Costs, taken: NDArray[np.float64],
                      mask: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
        """(The least seconds; the variant that has them, -1: none) [patterns, device of the incoming activation, device
        of the activation passed on].  `taken`: the seconds of the variants; `mask`: those that are allowed."""
        n, i = cost.seconds.shape[1:]
        every = np.ogrid[:n, :i]
        best = np.full((n, i, len(self.devices)), np.inf)
        chosen = np.full((n, i, len(self.devices)), -1, np.int16)
        for v in range(len(cost.rule)):
            seconds = np.where(mask[v], taken[v], np.inf)
            better = np.nonzero(seconds < best[(*every, cost.out[v])])
            to = (*better, cost.out[v][better])
            best[to], chosen[to] = seconds[better], v
        return best, chosen

    def needed(self, chain: TableChain, path: Sequence[Choice], within: Within = None) -> list[int]:
        """Bytes that the arena of each device has to hold at least for a path: the most that a stage needs in its
        variant.  `within`: inputs, and a device where their copies are alive between the first and the last stage that
        reads them there."""
        most: NDArray[np.int64] = np.zeros(len(self.devices), np.int64)
        for choice, c in set(zip(path, self.classes, strict=True)):
            each, row = self._classes[c], int(chain.rows[c][choice.pattern])
            for j, cost in enumerate(each.costs):
                variant, enters = self._variant(chain, each, c, row, choice, j)
                np.maximum(most, cost.needs[variant, row, enters], out=most)
        if within is not None:
            number, d = within
            reads = self.reads(number, d)
            at = [k for k, (choice, c) in enumerate(zip(path, self.classes, strict=True))
                  if reads[c][chain.rows[c][choice.pattern]]]
            inside = slice(at[0] + 1, at[-1]) if at else slice(0)
            for choice, c in set(zip(path[inside], self.classes[inside], strict=True)):
                each, row = self._classes[c], int(chain.rows[c][choice.pattern])
                for j, needs in enumerate(self._needs_within(number)[c]):
                    variant, enters = self._variant(chain, each, c, row, choice, j)
                    most[d] = max(most[d], needs[variant, row, enters, d])
        return [int(nbytes) for nbytes in most]

    def reads(self, number: int, d: int) -> tuple[NDArray[np.bool_], ...]:
        """For each class which of its patterns read the inputs `lasting[number]` on device d [all patterns]."""
        return tuple(there[:, d] & reads
                     for there, reads in zip(self.holds_caches, self.lasting[number].classes, strict=True))

    def unpaid(self, chain: TableChain, path: Sequence[Choice]) -> list[float]:
        """For each entry of `Case.caches` the seconds of one copy of the set's inputs to the device, less what the
        path's cost includes of them; 0 where the path has no caches of the set there, or does not read the input there.
        Valid for entries that are None in the chain's `caches`."""
        n = len(self.devices)
        paid: list[list[float]] = [[] for _ in self._prices]
        for choice, c in zip(path, self.classes, strict=True):
            each = self._classes[c]
            if each.atoms.cache >= 0:
                d = int(each.devices[chain.rows[c][choice.pattern], each.atoms.cache])
                for i, of in enumerate(self.readers):
                    if of[c]:
                        paid[i * n + d].append(float(each.held_back[i, d]))
            for j, cost in enumerate(each.costs):
                g = self.models[each.model].graphs[each.active[j]]
                variant, enters = self._variant(chain, each, c, int(chain.rows[c][choice.pattern]), choice, j)
                for s, there in cost.reads.items():
                    at = (len(self.readers) + self.copied.index((g, s))) * n
                    for d in np.flatnonzero(there[variant, chain.rows[c][choice.pattern], enters]).tolist():
                        paid[at + d].append(float(self._prices[at + d]) / self._shared_values[g].stages[s])
        return [max(0.0, price - sum(parts)) if parts else 0.0
                for price, parts in zip(self._prices.tolist(), paid, strict=True)]

    def _variant(self, chain: TableChain, each: StageClass, c: int, row: int, choice: Choice,
                 j: int) -> tuple[int, int]:
        """(The variant of a graph under a choice, the index in `StageClass.ins` of the device of the incoming
        activation).  `row`: the pattern of the choice; `j`: the index of the graph in `StageClass.active`."""
        enters = each.ins.index(self.states[choice.state_in][j])
        chosen = chain.variants[c][j][row, enters]
        if each.outline.last:       # no stage reads the result: it may be on any device
            cost = each.costs[j]
            seconds = np.where(chosen >= 0, cost.seconds[chosen, row, enters], np.inf)
            for s, d, part in self._charged(each, j, chain.caches):
                seconds = seconds + part * cost.reads[s][chosen, row, enters, d]
            return int(chosen[int(seconds.argmin())]), enters
        return int(chosen[self.states[choice.state_out][j]]), enters
