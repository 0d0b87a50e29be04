"""Patterns: a device for every atom of a stage; and rules: where nodes without residents go under a pattern.

A site is what a node's device can depend on: each atom is a site, which a pattern puts on a device; so are the incoming
activation, which the stage before passes on, and the host.  A rule gives every node a site.  Nodes with residents have
their atom as site under every rule; the others follow one of four rules:

* forward: a node has the site of the node with residents that it feeds, or, if it feeds none, of what feeds it;
* back: a node has the site of what feeds it;
* forward, or back, but a node that feeds no node with residents has the incoming activation as site.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from ggml_sched.placement.atoms import Atoms
from ggml_sched.placement.outline import NODE, Nodes, Outline

__all__ = ["MAX_PATTERNS", "Sites", "patterns", "sites"]

MAX_PATTERNS = 2187
"""The most patterns of a stage: as many as three devices give for seven atoms.  Where there would be more, `patterns`
leaves some out."""

Sites = tuple[tuple[int, ...], ...]
"""A rule: for each graph the site of each node, as a number (see `sites`)."""


def patterns(atoms: int, devices: int, host: int) -> NDArray[np.int8]:
    """Patterns as devices [patterns, atoms]: all of them, if those are at most `MAX_PATTERNS`.

    Otherwise the patterns with at most two devices; if these are too many as well, those on one device, or on one and
    the host.  The patterns on one and the host exceed `MAX_PATTERNS` with more than some 16 devices and seven atoms,
    but their number grows only in proportion to the devices.  So with many devices no stage is spread over three.
    """
    if devices ** atoms <= MAX_PATTERNS:
        return np.array(list(product(range(devices), repeat=atoms)), np.int8).reshape(devices ** atoms, atoms)
    inner = 2 ** atoms - 2
    pairs = list(combinations(range(devices), 2))
    if len(pairs) * inner + devices > MAX_PATTERNS:
        pairs = [(host, d) for d in range(devices) if d != host]
    bits = np.array(list(product(range(2), repeat=atoms)), np.int8)[1:-1]
    alone = [np.full((1, atoms), d, np.int8) for d in range(devices)]
    return np.concatenate([*alone, *(np.where(bits, np.int8(b), np.int8(a)) for a, b in pairs)])


def sites(outline: Outline, atoms: Atoms) -> list[Sites]:
    """The distinct rules: for each graph the site of each node.  Sites have numbers: atoms first, then the incoming
    activation, then the host."""
    ruled = [[_rule(nodes, atoms, forward, back_in) for nodes in outline.graphs]
             for forward, back_in in ((True, False), (False, False), (True, True), (False, True))]
    return list(dict.fromkeys(tuple(rule) for rule in ruled))


def _rule(nodes: Nodes, atoms: Atoms, forward: bool, back_in: bool) -> tuple[int, ...]:
    """The site of each node of a graph.  `forward`: a node has the site of what it feeds, otherwise of what feeds it;
    `back_in`: a node that feeds no node with residents has the incoming activation as site."""
    comes_in, on_host = len(atoms.members), len(atoms.members) + 1
    n = len(nodes.kinds)
    before = [[nodes.values[v].number for v in reads if nodes.values[v].origin == NODE] for reads in nodes.reads]
    fixed: list[int | None] = [None] * n
    for i in range(n):
        if nodes.residents[i]:
            # A node's residents may be pinned to different devices: the node is computed where its first resident is,
            # and reads copies of the others.
            fixed[i] = atoms.of[nodes.residents[i][0]]
        elif nodes.on_host[i]:
            fixed[i] = on_host
    back: list[int] = []
    for i in range(n):
        at = fixed[i]
        if at is None:
            at = next((back[p] for p in before[i] if back[p] != comes_in), comes_in)
        back.append(at)
    fed = list(fixed)
    for i in range(n - 1, -1, -1):
        at = fed[i]
        if at is not None and at != on_host:
            for p in before[i]:
                if fixed[p] is None:
                    fed[p] = at             # of several readers of p the first in the order of execution decides
    found: list[int] = []
    for i in range(n):
        own = fixed[i]
        if own is not None:
            found.append(own)
        elif nodes.writes[i] >= 0:
            found.append(found[nodes.writes[i]])        # node i computes into that node's memory
        else:
            ahead = fed[i]
            if ahead is None:
                found.append(comes_in if back_in else back[i])
            else:
                found.append(ahead if forward else back[i])
    return tuple(found)
