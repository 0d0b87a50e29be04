"""What each node of a graph moves and computes: the bytes, the operations, and the tensors that prices depend on.

Views are free and left out.  The rules are those of a roofline: a node takes as long as moving its bytes or computing
its operations does, whichever is longer, and its launch (Williams, Waterman, Patterson: Roofline, 2009).

Bytes are those of every source, once, and of the result:

* of a source that is a view only its own elements count, not all of the tensor that it views;
* GET_ROWS reads as many rows as its result has;
* SET_ROWS and CPY write the rows that they are given, and do not read where they write;
* MUL_MAT_ID and ADD_ID read E (1 - (1 - k/E)^tokens) of E experts: the number of different ones to expect where each
  token chooses k at random;
* attention reads the part `fill` of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import Graph, Tensor
from ggml_sched.backend import dense_bytes
from ggml_sched.placement.devices import ATTENTION, PROMPT_ATTENTION, Device
from ggml_sched.threads.cached import cached_property

__all__ = ["Facts", "expected_reads", "facts", "is_resident", "is_weight", "share_of_experts"]

_WRITTEN_OVER = {"SET_ROWS": 2, "CPY": 1}
"""{op that writes its first source into another source: the slot of that other source}."""
_OF_EXPERTS = {"MUL_MAT_ID": 0, "ADD_ID": 1}
"""{op that reads experts: the slot of the tensor that holds them all}; the ids are in slot 2."""
_CACHES = {"MUL_MAT": (0, 1), "FLASH_ATTN_EXT": (1, 2)}
"""{op of attention: the slots that a cache can be in}."""
_TOKENS = {"MUL_MAT": 1, "FLASH_ATTN_EXT": 2}
"""{op of attention: the axis of its result along which the tokens are}."""
_FEW = 8
"""Attention for more tokens than this counts as attention of prompts, which other kernels compute."""
_PER_STATE = 6
"""Operations for each number of a recurrent state and each token: a product and a sum to decay, update and read it."""


@dataclass(frozen=True, eq=False)
class Facts:
    """The nodes of one graph that are no views, in the order of execution, and what their price on any device needs."""

    graph: Graph
    nodes: tuple[Tensor, ...]
    nbytes: NDArray[np.float64]
    """Bytes that each node reads and writes [nodes]."""
    flops: NDArray[np.float64]
    """Operations of each node [nodes]."""
    kinds: tuple[str | None, ...]
    """For each node the type of the largest weight that it reads, such as "q4_0"; without a weight, "attention" or
    "attention of prompts" if it is attention over caches; None for all others."""
    residents: tuple[tuple[Tensor, ...], ...]
    """The weights and caches that each node reads or writes, each once."""
    activations: tuple[tuple[Tensor, ...], ...]
    """The other tensors that each node reads: roots of nodes, inputs and constants, each once."""

    @cached_property
    def _by_kind(self) -> tuple[tuple[str | None, ...], NDArray[np.intp]]:
        """The kinds, each once, and the index of each node's kind."""
        known = {kind: i for i, kind in enumerate(dict.fromkeys(self.kinds))}
        return tuple(known), np.array([known[kind] for kind in self.kinds], np.intp)

    def seconds(self, device: Device) -> NDArray[np.float64]:
        """Seconds that each node takes on `device` [nodes]."""
        kinds, which = self._by_kind
        if not kinds:
            return np.zeros(0)
        bandwidth, peak = np.array([device.rates(kind) for kind in kinds]).T
        seconds: NDArray[np.float64] = np.maximum(self.nbytes / bandwidth[which], self.flops / peak[which])
        return seconds + device.launch


def facts(graph: Graph, fill: float = 1.0) -> Facts:
    """The facts of a graph; `fill` is the part of each cache that attention is expected to read, 0 to 1."""
    fill = float(fill)
    if not 0 <= fill <= 1:
        raise ValueError(f"fill is the part of a cache that is read, 0 to 1, not {fill}")
    nodes = tuple(node for node in graph.nodes if node.computes)
    n = len(nodes)
    nbytes, flops = np.zeros(n), np.zeros(n)
    kinds: list[str | None] = []
    residents, activations = [], []
    for i, node in enumerate(nodes):
        roots = dict.fromkeys([s.root for s in node.src if s is not None])
        kept = tuple(t for t in roots if is_resident(t))
        weights = [t for t in kept if is_weight(t)]
        caches = _read_caches(node)
        nbytes[i] = _bytes_of(node, caches, fill)
        flops[i] = _operations(node) * (fill if caches else 1)
        kinds.append(str(max(weights, key=lambda t: t.nbytes).type) if weights else
                     None if not caches else PROMPT_ATTENTION if node.ne[_TOKENS[node.op]] > _FEW else ATTENTION)
        residents.append(kept)
        activations.append(tuple(t for t in roots if t not in kept))
    return Facts(graph, nodes, nbytes, flops, tuple(kinds), tuple(residents), tuple(activations))


def is_resident(root: Tensor) -> bool:
    """Whether a root is a resident, whose memory no plan gives: a weight or cache of a graph file or loaded model."""
    return bool(root.resident) or root.is_resident


def is_weight(root: Tensor) -> bool:
    """Whether a resident is a weight, and not a cache."""
    return root.resident == "weight" if root.resident else root.buffer.usage == "weights"


def _read_caches(node: Tensor) -> tuple[int, ...]:
    """The slots of the caches that a node reads for attention; empty if it is no attention over caches."""
    return tuple(k for k in _CACHES.get(node.op, ()) if k < len(node.src) and node.src[k] is not None
                 and is_resident(node.src[k].root) and not is_weight(node.src[k].root))


def _bytes_of(node: Tensor, caches: Sequence[int], fill: float) -> float:
    """Bytes that a node reads and writes; `caches`: the slots of caches, of which it reads the part `fill`."""
    written = _WRITTEN_OVER.get(node.op)
    read: dict[Tensor, float] = {}
    for k, source in enumerate(node.src):
        if source is None or k == written or source in node.src[:k]:
            continue
        n = float(dense_bytes(source))
        if node.op == "GET_ROWS" and k == 0:
            n = node.n_elements / source.type.block_size * source.type.type_size
        elif _OF_EXPERTS.get(node.op) == k:
            n *= share_of_experts(source.ne[2 if node.op == "MUL_MAT_ID" else 1], node.src[2])
        elif k in caches:
            n *= fill
        root = source.root
        read[root] = min(read.get(root, 0.0) + n, float(max(root.nbytes, 0)))
    if written is not None:
        return sum(read.values()) + node.src[0].n_elements / node.type.block_size * node.type.type_size
    return sum(read.values()) + dense_bytes(node)


def share_of_experts(n_experts: int, ids: Tensor) -> float:
    """The part of all experts that at least one token is expected to use."""
    missed = max(0.0, 1 - ids.ne[0] / max(1, n_experts))
    return 1 - float(missed ** ids.ne[1])


def expected_reads(used: float, n_slots: int, n_experts: int) -> float:
    """How many of the `used` different experts that a node uses are in no slot, where all layers together have
    `n_experts` experts in `n_slots` slots, and each token chooses at random, all experts of its layer equally likely.

    The node's own experts have slots when it computes, so that the others of the slots are all that could have kept one
    for it: a part (n_slots - used) / (n_experts - used) of all other experts.  Replays of such choices read as many
    under each of the policies of `ggml_sched.experts`.
    """
    if n_slots >= n_experts or used >= n_experts:
        return 0.0 if n_slots >= n_experts else used
    return used * min(1.0, (n_experts - n_slots) / (n_experts - used))


def _operations(node: Tensor) -> float:
    """Operations of a node: a product and a sum are two."""
    count = _COUNTS.get(node.op)
    return 2.0 * node.n_elements if count is None else float(count(node, node.src))


def _states(node: Tensor, src: tuple[Tensor, ...]) -> float:
    """Operations of a node that updates and reads a recurrent state."""
    return _PER_STATE * src[0].ne[0] * src[0].n_elements


def _conv_3d(node: Tensor, src: tuple[Tensor, ...]) -> float:
    # The outer extents are IC * N of the data, OC * IC of the kernel and OC * N of the result.
    channels = math.sqrt(src[1].ne[3] * src[0].ne[3] / max(1, node.ne[3]))
    return 2 * node.n_elements * math.prod(src[0].ne[:3]) * channels


_COUNTS: dict[str, Callable[[Tensor, tuple[Tensor, ...]], float]] = {
    "MUL_MAT": lambda node, src: 2 * src[0].ne[0] * node.n_elements,
    "MUL_MAT_ID": lambda node, src: 2 * src[0].ne[0] * node.n_elements,
    "OUT_PROD": lambda node, src: 2 * src[0].ne[1] * node.n_elements,
    # For each query, head and cell: a score from src[0].ne[0] elements, and sums of the src[2].ne[0] values.
    "FLASH_ATTN_EXT": lambda node, src: 2 * (src[0].ne[0] + src[2].ne[0]) * src[1].ne[1] * (
        src[0].n_elements // max(1, src[0].ne[0])),
    "CONV_2D": lambda node, src: 2 * node.n_elements * math.prod(src[0].ne[:3]),
    "CONV_2D_DW": lambda node, src: 2 * node.n_elements * math.prod(src[0].ne[:3]),
    "CONV_3D": _conv_3d,
    "CONV_TRANSPOSE_1D": lambda node, src: 2 * src[1].n_elements * math.prod(src[0].ne[:2]),
    "CONV_TRANSPOSE_2D": lambda node, src: 2 * src[1].n_elements * math.prod(src[0].ne[:3]),
    "SSM_SCAN": lambda node, src: _PER_STATE * src[0].ne[0] * src[1].n_elements,
    "RWKV_WKV6": _states, "RWKV_WKV7": _states, "GATED_LINEAR_ATTN": _states, "GATED_DELTA_NET": _states,
}
"""{op: operations of a node with its sources}; of other ops two for each element of the result."""
