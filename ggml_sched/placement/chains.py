"""Chains made of chains: several models joined into one, and fines for stages on several devices or on the host.

Joined models take turns: the last stage of one ends where the first of the next begins.  A fine is seconds added to the
cost of a stage, so that other placements are preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.chain import Chain, Choice

__all__ = ["dearer", "fined", "joined", "parted", "phased"]

ChainT = TypeVar("ChainT", bound=Chain)


def joined(chains: Sequence[Chain]) -> Chain:
    """One chain of the stages of all, in order.

    Chains may have different numbers of states: those with fewer get more states, which cannot be reached.
    """
    if len(chains) == 1:
        return chains[0]
    states = max(len(chain.start) for chain in chains)
    classes: list[int] = []
    cost: list[NDArray[np.float64]] = []
    memory: list[NDArray[np.int64]] = []
    for k, chain in enumerate(chains):
        offset = len(cost)
        own = [offset + c for c in chain.classes]
        cost += [_widened(table, states) for table in chain.cost]
        memory += chain.memory
        if k + 1 < len(chains):
            # The last stage gets a class of its own: after it come the states in which the next chain may begin.
            own[-1] = len(cost)
            last = chain.cost[chain.classes[-1]]
            ends = np.full((len(last), states, states), np.inf)
            begin = chains[k + 1].start
            ends[:, : last.shape[1], : len(begin)] = last.min(axis=2)[:, :, None] + begin
            cost.append(ends)
            memory.append(chain.memory[chain.classes[-1]])
        classes += own
    start = np.full(states, np.inf)
    start[: len(chains[0].start)] = chains[0].start
    widest = max(chains, key=lambda chain: len(chain.start))
    return Chain(tuple(classes), tuple(cost), tuple(memory), start, widest.devices)


def parted(path: Sequence[Choice], chains: Sequence[Chain]) -> list[tuple[Choice, ...]]:
    """For each of `chains`, its choices in `path`, a path of the chain that `joined` made of them."""
    found, at = [], 0
    for k, chain in enumerate(chains):
        part = list(path[at : at + len(chain.classes)])
        at += len(chain.classes)
        if k + 1 < len(chains):
            # The state after the last stage is the one in which the next chain begins: put in the cheapest end instead.
            last = part[-1]
            ends = chain.cost[chain.classes[-1]][last.pattern, last.state_in]
            part[-1] = last._replace(state_out=int(ends.argmin()))
        found.append(tuple(part))
    return found


def _widened(table: NDArray[np.float64], states: int) -> NDArray[np.float64]:
    """A table [patterns, states before, states after] with `states` states; no pattern joins the new ones."""
    if table.shape[1] == states:
        return table
    wide = np.full((len(table), states, states), np.inf)
    wide[:, : table.shape[1], : table.shape[2]] = table
    return wide


def fined(chain: Chain, states: Sequence[Sequence[int]], fine: float) -> Chain:
    """The same chain where each stage costs `fine` seconds more for each device that it uses beyond the first.

    A stage uses the devices that hold its bytes, and those of the states before and after it.  `states`: for each state
    its devices.
    """
    n_devices = chain.memory[0].shape[1]
    there = np.zeros((len(states), n_devices), bool)
    for row, devices in zip(there, states, strict=True):
        row[list(devices)] = True
    costs = []
    for cost, memory in zip(chain.cost, chain.memory, strict=True):
        used = (memory > 0)[:, None, None, :] | there[None, :, None, :] | there[None, None, :, :]
        costs.append(cost + fine * (used.sum(axis=3) - 1))
    return Chain(chain.classes, tuple(costs), chain.memory, chain.start, chain.devices)


def dearer(chain: ChainT, fine: float) -> ChainT:
    """The same chain where each byte on the last device, the host, costs `fine` seconds more."""
    if not fine:
        return chain
    costs = tuple(cost + fine * memory[:, -1, None, None]
                  for cost, memory in zip(chain.cost, chain.memory, strict=True))
    return replace(chain, cost=costs)


def phased(outer: Chain, inner: Chain, held: Sequence[NDArray[np.bool_]]) -> Chain:
    """A chain whose states also say whether a stage with caches on one device came before, and whether one follows.

    `outer`: the chain with all patterns; `inner`: the same chain, with only the patterns that a stage may have between
    two stages with caches on the device; `held`: for each class, which patterns of `outer` have caches on the device.
    State `s` of these chains becomes `s` before the first stage with caches there, `states + s` from that stage to the
    last such stage, and `2 * states + s` after it.
    """
    n = len(outer.start)
    costs, memory = [], []
    for out, within, out_memory, in_memory, out_held in zip(outer.cost, inner.cost, outer.memory, inner.memory, held,
                                                            strict=True):
        free, caching = np.flatnonzero(~out_held), np.flatnonzero(out_held)
        cost = np.full((len(out) + len(within), 3 * n, 3 * n), np.inf)
        one, two = len(free), len(out)
        first, later = out[free], out[caching]
        for before, after, rows, table in ((0, 0, slice(0, one), first), (2, 2, slice(0, one), first),
                                           *((a, b, slice(one, two), later) for a, b in ((0, 1), (0, 2), (1, 2))),
                                           (1, 1, slice(two, None), within)):
            cost[rows, before * n:(before + 1) * n, after * n:(after + 1) * n] = table
        costs.append(cost)
        memory.append(np.concatenate([out_memory[free], out_memory[caching], in_memory]))
    start = np.concatenate([outer.start, np.full(2 * n, np.inf)])
    return Chain(outer.classes, tuple(costs), tuple(memory), start, outer.devices * 3)
