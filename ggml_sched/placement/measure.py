"""Measures a real backend: products and attention give bandwidth, launch and operations a second; copies give links.

A chain is, in this file, a graph of several equal nodes: a single node would mostly show what a call of the backend
costs.  Chains of two sizes give a line: its slope is seconds a byte, its intercept the launch.  Everything runs once to
warm up and then up to five times; the median counts.  The weights together exceed the caches of processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeAlias

from ggml_sched._graph import Context, Graph, Tensor, bind_resident, new_buffer
from ggml_sched._host import host_memory
from ggml_sched.backend import Backend, Buffer, GraphView, new_graph_plan, tensor_copy
from ggml_sched.errors import BackendError, OutOfMemory
from ggml_sched.placement.devices import ATTENTION, DRIVER, PROMPT_ATTENTION, Device, Link
from ggml_sched.placement.facts import facts

__all__ = ["TYPES", "is_driven", "measure", "measure_links", "memory_left"]
TYPES = ("f16", "q4_0", "q8_0")
"""The types of weights that are measured unless others are given."""
_POOL = 256 << 20
"""Bytes of all weights of a chain, where the device has room."""
_NODES = 16
"""The most nodes of a chain."""
_LENGTH = 4096
"""Elements of a row of weights: a multiple of the block size of every type."""
_SMALL = (256, 2)
"""Elements of a row, and rows, of each weight of a small chain."""
_HEAD, _HEADS, _GROUP = 128, 8, 8
"""Elements of a head of attention; heads of the cache; how many heads of the query share one head of the cache where
operations of attention for one token are measured."""
_FEW_CELLS = 8
"""Cells of each cache of a small chain."""
_LEAST = 4 << 20
"""The smallest buffer of weights, in bytes: a node's share of it is larger than the weights of a small chain."""
_TOKENS = 512
"""Tokens of products and attention that stand for those of a prompt."""
_RUNS = 5
"""How often a chain is timed, at most."""
_FILL = 0x3C
"""The byte that fills weights and inputs: 1.06 as f16, 0.011 as f32, so that no kernel meets denormal numbers.  Memory
that was never written would be faster to read: its pages may all be one page of zeros."""
_COPIES = (4 << 10, 64 << 20)
"""Bytes of the two copies that measure a link."""


def measure(backend: Backend, types: Sequence[str] = TYPES, memory: int | None = None, seconds: float = 2.0,
            clock: Callable[[], float] = perf_counter) -> Device:
    """The `Device` that describes `backend`, and has it as its field `backend`; measuring takes about `seconds`.

    Products of weights of each of `types` with one token give `bandwidths` and `launch`, products with 512 tokens give
    `flops_of`; `bandwidth` and `flops` are the largest of these.  Attention of one token and of 512 over caches of f16
    gives the entries "attention" and "attention of prompts".  What the backend does not support is left out.
    `memory`: bytes left on the device (default: what the backend says is available, on a host what the system has).
    The device's field `measured` names these fields.  `split` stays assumed, except for a backend of another process:
    there it is what a compute of one node takes beside the node and a round trip, which the links count.

    Raises ValueError for a dry backend, for no `types`, and where the memory is unknown; BackendError if the backend
    supports products of none of the types; OutOfMemory, if it has no room for a few MiB.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"measure takes a Backend, not {backend!r}")
    if not backend.has_memory:
        raise ValueError(f"backend {backend.name!r} has no memory: there is nothing to measure")
    if not types:
        raise ValueError(f"backend {backend.name!r}: no types of weights to measure")
    begin = clock()
    room = memory_left(backend, memory)
    pool, size = _allocated(backend, _POOL, max(room, 4 * _LEAST))
    if size < _LEAST:
        pool.close()
        raise OutOfMemory(f"backend {backend.name!r}: measuring takes a buffer of {_LEAST} bytes, {size} are the most",
                          backend.name, _LEAST, size)
    bandwidths: dict[str, float] = {}
    flops_of: dict[str, float] = {}
    launches = []
    with pool:
        pool.usage = "weights"
        pool.clear(_FILL)
        slot = max(seconds - (clock() - begin), seconds / 4) / (4 * len(types) + 6)
        chains = _Chains(backend, pool, size, slot, clock)
        for kind in types:
            if chains.supports(_product(kind, *_SMALL, 1)):
                bandwidths[kind], launch = chains.bandwidth(
                    _product(kind, *_SMALL, 1), _product(kind, _LENGTH, chains.rows(kind) // _NODES, 1))
                many = partial(_product, kind, _LENGTH, tokens=_TOKENS)
                flops_of[kind] = chains.flops(many, chains.rows(kind), launch)
                launches.append(launch)
        if not launches:
            raise BackendError(f"backend {backend.name!r} supports products of none of the types {', '.join(types)}")
        launch = median(launches)
        split = None if not chains.outside else chains.split(_product(kind, *_SMALL, 1), launch)
        fastest, peak = max(bandwidths.values()), max(flops_of.values())
        if chains.supports(_attention(_FEW_CELLS, 1, 1)):
            rate, least = chains.bandwidth(_attention(_FEW_CELLS, 1, 1), _attention(chains.cells // _NODES, 1, 1))
            bandwidths[ATTENTION] = bandwidths[PROMPT_ATTENTION] = rate
            for kind, tokens, group in ((ATTENTION, 1, _GROUP), (PROMPT_ATTENTION, _TOKENS, 1)):
                many = partial(_attention, tokens=tokens, group=group)
                flops_of[kind] = chains.flops(many, chains.cells, least)
    measured = {"memory", "bandwidth", "flops", "launch", "bandwidths", "flops_of"}
    return Device(backend.name, room, fastest, peak, bool(backend.is_host), _rounded(launch), split,
                  bandwidths=bandwidths, flops_of=flops_of, alignment=backend.alignment, backend=backend,
                  measured=measured if split is None else measured | {"split"})


def measure_links(backends: Iterable[Backend], seconds: float = 1.0, clock: Callable[[], float] = perf_counter,
                  most: int = _COPIES[1],
                  known: Mapping[tuple[str, str], Link] | None = None,
                  anew: bool = False) -> dict[tuple[str, str], Link]:
    """The `Link` from each backend to each other, by names, as `link=` accepts them; takes about `seconds`.

    Links that are `known` are not measured, nor, without `anew`, those that a backend states (`Backend.link_to`).
    Copies of 4 KiB and of `most` bytes, or as many as there is room for, give latency and bandwidth.  The time until
    this process knows that a copy has ended includes half a round trip to each of the two backends, which is subtracted
    from the latency.  Where none of the backends is a host, and some are of other processes, links to and from this
    process are measured, too, under the name "driver".  Raises as `measure`.
    """
    given = list(backends)
    for backend in given:
        if not backend.has_memory:
            raise ValueError(f"backend {backend.name!r} has no memory: there is nothing to measure")
    found = dict(known or {})
    pairs = [(a, b) for a in given for b in given if a is not b and (a.name, b.name) not in found]
    ways = given if is_driven(given) else []
    trips = {backend.name: backend.round_trip() for backend in given}
    slot = seconds / max(2 * len(pairs) + 4 * len(ways), 1)
    for a, b in pairs:
        stated = None if anew else a.link_to(b.name) or b.link_from(a.name)
        found[a.name, b.name] = Link(*stated) if stated is not None else \
            _link(a, b, slot, clock, (trips[a.name] + trips[b.name]) / 2, most)
    for backend in ways:
        for pair, stated, is_up in (((DRIVER, backend.name), backend.link_from(DRIVER), True),
                                    ((backend.name, DRIVER), backend.link_to(DRIVER), False)):
            found[pair] = Link(*stated) if stated is not None and not anew else \
                _way(backend, is_up, slot, clock, trips[backend.name] / 2, most)
    return found


def is_driven(backends: Iterable[Backend]) -> bool:
    """Whether this process is the host for the backends: if some are of other processes, and none is a host."""
    given = [*backends]
    return any(backend.worker is not None for backend in given) and not any(backend.is_host for backend in given)


Node: TypeAlias = Callable[[Context, Context], Tensor]
"""A function that makes one node of a chain: its weights in the first context, all other tensors in the second."""


def _product(kind: str, length: int, rows: int, tokens: int) -> Node:
    """Makes products of a weight of type `kind`, `rows` rows of `length` elements, with activations of `tokens`."""
    return lambda weights, ctx: ctx.mul_mat(weights.tensor(kind, (length, rows)), ctx.tensor("f32", (length, tokens)))


def _attention(cells: int, tokens: int, group: int) -> Node:
    """Makes attention of `tokens` tokens over `cells` cells; `group` heads of the query share a head of the cache."""
    def make(weights: Context, ctx: Context) -> Tensor:
        k, v = (ctx.permute(ctx.view_3d(weights.tensor("f16", (_HEAD * _HEADS, cells)), _HEAD, _HEADS, cells,
                                        2 * _HEAD, 2 * _HEAD * _HEADS), 0, 2, 1, 3) for _ in range(2))
        return ctx.flash_attn_ext(ctx.tensor("f32", (_HEAD, tokens, group * _HEADS)), k, v, None, _HEAD ** -0.5)

    return make


class _Chains:
    """Chains of equal nodes whose weights, or caches, are in one buffer, `pool`, of `size` bytes.

    `slot`: seconds that one measurement should take at most.
    """

    def __init__(self, backend: Backend, pool: Buffer, size: int, slot: float, clock: Callable[[], float]) -> None:
        self.backend, self.pool, self.size, self.slot, self.clock = backend, pool, size, slot, clock
        self.outside = backend.round_trip()

    def supports(self, make: Node) -> bool:
        with Context("weights") as weights, Context("supported") as ctx:
            return self.backend.supports_op(make(weights, ctx))

    def bandwidth(self, small: Node, large: Node) -> tuple[float, float]:
        """(Bytes a second of a long chain of large nodes, seconds that a node takes at least.)"""
        spent, nbytes, _ = self.run(small, _NODES, _RUNS)
        probe, _, _ = self.run(large, 1, 1)
        nodes = max(2, min(_NODES, int(self.slot / (_RUNS + 1) / max(probe, 1e-9))))
        longer, more, _ = self.run(large, nodes, _RUNS)
        slope = (longer - spent) / (more - nbytes)
        rate = 1 / slope if slope > 0 else more / longer
        # The few bytes of the small chain may come from a processor's cache, and then take no time.
        return _rounded(rate), max(spent / 2, spent - nbytes / rate)

    def split(self, small: Node, launch: float) -> float:
        """Seconds that a compute of one node takes beside the node and a round trip."""
        taken, _, _ = self.run(small, 1, _RUNS)
        return _rounded(max(taken - launch, 1e-6))

    def flops(self, sized: Callable[[int], Node], most: int, launch: float) -> float:
        """Operations a second of a node, without its launch; `sized(n)` makes nodes with n rows or cells, and n may be
        at most `most`."""
        most = min(2 * _LENGTH, most)
        n = min(64, most)
        probe, _, _ = self.run(sized(n), 1, 1)
        n = max(n, min(most, int(n * self.slot / (_RUNS + 1) / max(probe, 1e-9)) // 64 * 64))
        taken, _, operations = self.run(sized(n), 1, _RUNS)
        return _rounded(operations / max(taken - launch, taken / 2))

    def rows(self, kind: str) -> int:
        """How many rows of `_LENGTH` elements of type `kind` fill the buffer."""
        with Context("row") as ctx:
            row = ctx.tensor(kind, (_LENGTH,))
            return (self.size - (1 << 16)) // (row.nbytes + self.backend.alignment)

    @property
    def cells(self) -> int:
        """How many cells of caches fill the buffer."""
        return (self.size - (1 << 16)) // (4 * _HEAD * _HEADS)

    def run(self, make: Node, nodes: int, runs: int) -> tuple[float, float, float]:
        """(Seconds, bytes, operations) of one node, in a chain of `nodes` nodes; the seconds are a median of `runs`."""
        with Context("weights") as weights, Context("nodes") as ctx:
            chain = [make(weights, ctx) for _ in range(nodes)]
            at = 0
            for w in weights.tensors:
                bind_resident(w, self.pool, at)
                self.pool.init_tensor(w)
                at += -(-self.backend.alloc_size(w) // self.backend.alignment) * self.backend.alignment
            found = facts(Graph(*chain))
            with self.backend.alloc_tensors(ctx, usage="any") as memory:
                memory.clear(_FILL)
                view = GraphView(chain)
                plan = new_graph_plan(self.backend, view)

                def compute() -> None:
                    if plan is None:
                        self.backend.graph_compute(view)
                    else:
                        self.backend.graph_plan_compute(plan)

                try:
                    taken = _median(compute, self.backend.synchronize, self.slot, self.clock, runs)
                finally:
                    self.backend.synchronize()
                    if plan is not None:
                        self.backend.graph_plan_free(plan)
            taken = max(taken - self.outside, taken / 16)
            return taken / nodes, float(found.nbytes.sum()) / nodes, float(found.flops.sum()) / nodes


def _median(call: Callable[[], object], wait: Callable[[], object], slot: float, clock: Callable[[], float],
            runs: int = _RUNS) -> float:
    """Median seconds of `call` and `wait`, after one call to warm up: of `runs` calls, or of fewer, at least one, if
    these would take more than `slot` seconds."""
    end = clock() + slot
    call()
    wait()
    taken: list[float] = []
    while len(taken) < runs and (not taken or clock() < end):
        begin = clock()
        call()
        wait()
        taken.append(clock() - begin)
    return median(taken)


def _link(a: Backend, b: Backend, slot: float, clock: Callable[[], float], outside: float, most: int) -> Link:
    """The link from one backend to another, measured; `outside`: seconds of each copy that are no part of the link;
    `slot`: seconds for each of the two sizes; `most`: bytes of the larger copy."""
    taken, sizes = [], []
    for size in (_COPIES[0], most):
        there, here = _allocated(a, size, memory_left(a)), _allocated(b, size, memory_left(b))
        with there[0] as source, here[0] as target, Context("copied") as ctx:
            n = min(there[1], here[1]) // 4
            src, dst = ctx.tensor("f32", n), ctx.tensor("f32", n)
            for tensor, buffer in ((src, source), (dst, target)):
                buffer.clear(_FILL)
                bind_resident(tensor, buffer, 0)
            taken.append(_copied(src, dst, slot, clock))
            sizes.append(4 * n)
    return _line(taken, sizes, outside)


def _way(backend: Backend, is_up: bool, slot: float, clock: Callable[[], float], outside: float, most: int) -> Link:
    """The link from this process to a backend (`is_up`), or from the backend to this process; `slot`, `outside` and
    `most` as for `_link`."""
    taken, sizes = [], []
    for wished in (_COPIES[0], most):
        memory, size = _allocated(backend, wished, memory_left(backend))
        with memory, Context("moved") as ctx:
            t, data = ctx.tensor("i8", size), bytearray(size)
            memory.clear(_FILL)
            bind_resident(t, memory, 0)
            move = partial(backend.set_tensor if is_up else backend.get_tensor, t, data)
            taken.append(_median(move, backend.synchronize, slot, clock))
            sizes.append(size)
    return _line(taken, sizes, outside)


def _line(taken: Sequence[float], sizes: Sequence[int], outside: float) -> Link:
    """The link over which a small and a large copy of `sizes` bytes took `taken` seconds; `outside`: seconds of each
    that are no part of the link."""
    slope = (taken[1] - taken[0]) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    rate = 1 / slope if slope > 0 else sizes[1] / max(taken[1], 1e-9)
    return Link(_rounded(rate), _rounded(max(0.0, taken[0] - outside - sizes[0] / rate)))


def _copied(src: Tensor, dst: Tensor, slot: float, clock: Callable[[], float]) -> float:
    """Median seconds of a copy; `slot` as for `_median`."""
    return _median(lambda: tensor_copy(src, dst), dst.backend.synchronize, slot, clock)


def memory_left(backend: Backend, memory: int | None = None) -> int:
    """Bytes left on a device: `memory` if given, else what the backend says, else, on a host, what the system says;
    ValueError where all are unknown."""
    left = backend.memory_available() if memory is None else memory
    if left is None:
        left = host_memory() if backend.is_host else backend.system_memory()
    if left is None:
        raise ValueError(f"backend {backend.name!r} does not say how much memory it has: give memory=")
    return left


def _allocated(backend: Backend, wished: int, room: int) -> tuple[Buffer, int]:
    """A buffer, and its size: `wished` bytes, but at most a quarter of `room`, and less if the backend refuses that."""
    size = min(wished, max(4096, room // 4))
    if backend.max_buffer_size is not None:
        size = min(size, backend.max_buffer_size)
    while True:
        try:
            return new_buffer(backend, size), size
        except OutOfMemory:
            if size <= 4 << 20:
                raise
            size //= 2


def _rounded(value: float) -> float:
    """A value rounded to three digits: more would be noise."""
    return float(f"{value:.3g}") if math.isfinite(value) else value
