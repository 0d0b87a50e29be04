"""Plans a model under limits of memory: which weights stay in memory, and which are left in a store.

Everything that the model allocates counts: weights that stay, the window of those that are fetched, cache and states,
arenas, work memory of kernels, what the store needs for rows, and the keys that a context shift copies.  The bytes of
the arenas are those of plans for one token, for the largest prompt, for a token of each sequence, each with all rows of
the cache, and for a context shift.  The plans are for the real backends, with weights whose buffers have no memory, and
are made before any weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import ggml_sched as gs
from ggml_sched._graph import Context, Graph, Tensor, bind_resident
from ggml_sched.backend import Backend, Buffer
from ggml_sched.backends.cpu.buffer import HostBackend
from ggml_sched.errors import OutOfMemory
from ggml_sched.llama.batchgraph import LargestShapes
from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.defaults import PlaceFunction
from ggml_sched.llama.expert_slots import SlotsSpec, least_slots
from ggml_sched.llama.residency import Residency
from ggml_sched.llama.shift import ShiftGraph, build_shifts
from ggml_sched.llama.weights import BASE_ALIGNMENT, Spec, Weights, grouped, layout_of
from ggml_sched.placement.plan_bytes import arena_bytes, store_bytes
from ggml_sched.placement.residency import Choice, Use, choose, chosen, least_choice, most_whole_reads, reads_of
from ggml_sched.threads.cached import cached_property

if TYPE_CHECKING:
    from ggml_sched import Plan, Store
    from ggml_sched.experts import Policy
    from ggml_sched.llama.arch import Architecture
    from ggml_sched.llama.gguf import GGUFFile, TensorInfo
    from ggml_sched.llama.hparams import Hparams
    from ggml_sched.llama.kvcache import KVCache
    from ggml_sched.placement.answer import Fit

__all__ = ["Held", "Outline", "assigned", "hold", "store_for"]

BATCHES = (512, 256, 128, 64, 32)
"""Values of n_batch that are tried in this order if the caller gives none; the first that the limit allows is used.
512 is also the default without a limit, so that where it fits, results have the same bits as without a limit."""
PART_OF_OUTPUTS = 8
"""The graph of a prompt whose tokens are all outputs is reserved only if its arenas take at most 1 / PART_OF_OUTPUTS of
the limit.  Otherwise it gets memory when it is first used, if there is enough beside all weights."""
FEW = (2, 3, 5, 7)
"""Numbers of tokens for which kernels may need more work memory than for more tokens."""
ROUNDS = 8
"""The most rounds of choosing weights and planning the graphs; a round counts the arenas of the round before.  The
last one takes the least choice if none has fitted."""
NO_MEMORY = 1 << 62
"""The size of the buffers without memory in which weights have addresses for planning."""


@dataclass
class Held:
    """The choice under limits: the weights that are in the store, and the bytes that `budgets` leaves for arenas on
    each backend."""

    store: Store | None
    """The store of weights; None where all weights stay in memory."""
    stored: frozenset[str]
    """Names of the weights that are in the store."""
    budgets: dict[Backend, int]
    host_work: dict[Backend, int]
    """{backend: bytes of host memory that its kernels may take besides buffers}."""
    residency: Residency
    slots: SlotsSpec | None = None
    """The slots of weights that are read expert by expert; None where no weight is."""
    shapes: list[Shape] = field(default_factory=list)
    """The shapes whose graphs fit the limits, and are to be reserved."""
    shifts: bool = True
    """Whether the graph of a context shift fits, too, and is to be reserved."""


class _Trial(NamedTuple):
    """Choices of the weights that stay on each backend with a limit, and the plans with these."""

    choices: dict[Backend, Choice]
    rooms: dict[Backend, int]
    """The bytes for weights and windows beside the largest arenas so far."""
    budgets: dict[Backend, int]
    """The bytes that the weights that stay leave for arenas and slots."""
    left: dict[Backend, int]
    """The bytes that arenas leave of these; less than 0 where the plans do not fit."""
    stored: list[str]
    plans: list[Plan]

    @property
    def fits(self) -> bool:
        return min(self.left.values()) >= 0

    @property
    def seconds(self) -> float:
        """The estimated seconds of all fetches of an evaluation."""
        return sum(choice.seconds for choice in self.choices.values())


def store_for(source: object, rows: Backend) -> Store:
    """A store for the weights of a model: of files where `source` is a path, else over the caller's memory.

    The store computes GET_ROWS of its weights with the kernels of the backend `rows` if it can, else with the CPU's.
    """
    kernels = _for_rows(rows)
    if isinstance(source, (str, os.PathLike)):
        return gs.FileStore("file", kernels)
    return gs.Store("memory", kernels)


def _for_rows(backend: Backend) -> HostBackend:
    """A new backend of one thread over host memory, for a store's GET_ROWS: with the kernels of `backend`, to give the
    same bits, if that computes on the host; otherwise the CPU's."""
    if isinstance(backend, gs.CpuBackend):
        return gs.CpuBackend(1, "rows", kernels=backend.kernels)
    if backend.is_host and isinstance(backend, gs.GgmlBackend):
        return gs.GgmlBackend(backend.device.name, 1, backend.library.folder, name="rows", repack=False)
    return gs.CpuBackend(1, "rows")


class Outline:
    """The weights of a file for planning, with addresses but no memory: each on its backend, or in the store (`put`).

    `twins`: {name of a tensor that the file does not have: the tensor whose bytes it has}.
    """

    def __init__(self, file: GGUFFile, specs: Iterable[Spec], place: PlaceFunction,
                 twins: Mapping[str, str] | None = None) -> None:
        self.weights: Weights = Weights()
        self.homes: dict[str, Backend] = {}
        self._buffers: dict[Backend, Buffer] = {}
        self._groups = grouped(file, specs, place, twins=twins)
        self.infos: dict[str, TensorInfo] = {info.name: info for infos in self._groups.values() for info in infos}
        context = Context("weights")
        for backend, infos in self._groups.items():
            for info in infos:
                tensor = context.restore("NONE", *layout_of(info), name=info.name, resident="weight")
                self.weights.tensors[info.name] = tensor
                self.homes[info.name] = backend
        self.put({})

    def size_on(self, backend: Backend) -> int:
        """Bytes that are enough for all weights of a backend, whether it allocates memory for them or maps the file."""
        infos = self._groups.get(backend, ())
        sizes = (self.size_of(info.name) for info in infos)
        spans = (max(info.offset + info.nbytes for info in infos if info.part == part)
                 - min(info.offset for info in infos if info.part == part) + BASE_ALIGNMENT
                 for part in {info.part for info in infos})
        return max(sum(sizes), sum(spans))

    def size_of(self, name: str, margin: int = 0) -> int:
        """The bytes that a weight takes on its backend; with the `margin` of a store, those of a fetched copy of it."""
        backend = self.homes[name]
        size = backend.alloc_size(self.weights.tensors[name]) + margin
        return -(-size // backend.alignment) * backend.alignment

    def put(self, stored: Mapping[str, Backend]) -> None:
        """Give all weights addresses: those in `stored` on the backend there, the others on that of their placement."""
        for name, tensor in self.weights.tensors.items():
            bind_resident(tensor, self._buffer_on(stored.get(name, self.homes[name])), 0)

    def _buffer_on(self, backend: Backend) -> Buffer:
        """The buffer without memory that stands for all buffers of weights on a backend."""
        if backend not in self._buffers:
            self._buffers[backend] = Buffer(backend, NO_MEMORY, usage="weights")
        return self._buffers[backend]


def hold(outline: Outline, arch: Architecture, hparams: Hparams, cache: KVCache, store: Store,
         backends: Sequence[Backend], limits: Mapping[Backend, int], n_seq: int, n_batch: int | None,
         policy: str, experts: Policy | None = None, fit: Fit | None = None) -> tuple[Held, int]:
    """Choose which weights stay in memory under the limits; returns (the choice, the n_batch that it allows).

    `n_batch` None: the first of BATCHES that fits.  `experts` is the expert policy of slots; None: weights of experts
    are fetched as a whole.  `fit`: a placement with fetched weights, whose choice is kept where its graphs fit, and
    whose nodes are assigned; it has slots for experts if the placement has.  Raises OutOfMemory, which says the least
    limit that would suffice.
    """
    made = _Limited(outline, arch, hparams, cache, store, backends, limits, policy, experts, fit)
    if fit is not None:
        assert n_batch is not None
        return _hold_fit(made, min(n_batch, cache.n_ctx), n_seq)
    *larger, least = BATCHES if n_batch is None else (n_batch,)
    for n in larger:
        with suppress(OutOfMemory):
            return _hold_batch(made, min(n, cache.n_ctx), n_seq)
    return _hold_batch(made, min(least, cache.n_ctx), n_seq)


def _hold_batch(made: _Limited, n: int, n_seq: int) -> tuple[Held, int]:
    """`hold` for an n_batch of n."""
    largest = LargestShapes(n_seq, n, made.cache.padded(made.cache.n_ctx))
    wanted = largest.usual(made.hparams.recurrent)
    if largest.all not in wanted and made.is_small(largest.all, PART_OF_OUTPUTS):
        with suppress(OutOfMemory):     # where the limit has room for all other graphs, it is kept without this one
            return made.held([*wanted, largest.all]), n
    return made.held(wanted, largest.all), n


def _hold_fit(made: _Limited, n: int, n_seq: int) -> tuple[Held, int]:
    """`hold` for a placement.  Graphs of which the placement did not know are left out where they do not fit, or where
    slots for experts would be fewer than those of the placement; and so is the context shift where it does not fit: as
    without fetched weights they are then planned when they are first used."""
    assert made.fit is not None and made.fit.fetching is not None
    largest = LargestShapes(n_seq, n, made.cache.padded(made.cache.n_ctx))
    usual = largest.usual(made.hparams.recurrent)
    least = list(dict.fromkeys((largest.token, largest.few)))
    expected = 0 if made.fit.fetching.slots is None else made.fit.fetching.slots.n_slots
    found: list[tuple[int, Held]] = []
    for shapes in (list(dict.fromkeys([*usual, largest.all])), usual, least):
        with suppress(OutOfMemory):
            held = made.held(shapes)
            n_slots = 0 if held.slots is None else held.slots.n_slots
            if n_slots >= expected:
                return held, n
            found.append((n_slots, held))
    if found:
        return max(found, key=lambda one: one[0])[1], n       # the first of equal ones has the most graphs
    made.shifts = False
    return made.held(least), n


class _Limited:
    """Makes the choice under limits: plans the graphs with some weights in the store, and compares bytes."""

    def __init__(self, outline: Outline, arch: Architecture, hparams: Hparams, cache: KVCache, store: Store,
                 backends: Sequence[Backend], limits: Mapping[Backend, int], policy: str,
                 experts: Policy | None, fit: Fit | None = None) -> None:
        self.experts = experts
        self.fit = fit
        self.shifts = True
        """Whether a context shift is planned."""
        self.outline, self.arch, self.hparams, self.cache, self.store = outline, arch, hparams, cache, store
        self.limits, self.policy = dict(limits), policy
        self.order = [*sorted([store, *backends], key=lambda backend: backend.is_host)]
        self.host = next((backend for backend in reversed(self.order) if backend in self.limits and backend.is_host),
                         None)
        """The backend over host memory whose limit counts the bytes that the store needs; None if none has a limit."""
        self._graphs: dict[Shape, Graph] = {}
        self._shift_plans: list[Plan] = []

    def graph(self, shape: Shape) -> Graph:
        if shape not in self._graphs:
            self._graphs[shape] = build_graph(self.arch, self.hparams, self.outline.weights, self.cache, shape,
                                              self.cache.flash).graph
        return self._graphs[shape]

    @property
    def shift(self) -> list[ShiftGraph]:
        """The graphs of a context shift; empty for a model whose positions cannot move, and where none is planned."""
        return self._built_shift if self.shifts else []

    @cached_property
    def _built_shift(self) -> list[ShiftGraph]:
        return build_shifts(self.hparams, self.outline.weights, self.cache, True)

    def plans(self, shapes: Iterable[Shape], stored: Iterable[str], windows: Mapping[Backend, int]) -> list[Plan]:
        """Plan the graphs of these shapes, with the weights named in `stored` in the store.  `windows`: {backend: the
        most bytes of fetched copies}."""
        return self._planned([self.graph(shape) for shape in shapes], stored, windows)

    def shift_plans(self, stored: Iterable[str], windows: Mapping[Backend, int]) -> list[Plan]:
        """The plans of a context shift, if there is one; made once where the weights that it reads are in memory."""
        graphs = [shift.graph for shift in self.shift]
        read = {s.root.name for graph in graphs for node in graph.nodes for s in node.src
                if s is not None and s.root.is_resident}
        if not read.isdisjoint(stored):
            return self._planned(graphs, stored, windows, assigns=False)
        if graphs and not self._shift_plans:
            self._shift_plans = self._planned(graphs, (), {}, assigns=False)
        return self._shift_plans if graphs else []

    def _planned(self, graphs: Iterable[Graph], stored: Iterable[str], windows: Mapping[Backend, int],
                 assigns: bool = True) -> list[Plan]:
        """`assigns`: nodes are assigned as in evaluations."""
        self.outline.put(dict.fromkeys(stored, self.store))
        ahead = {backend: windows.get(backend, 0) for backend in self.order if backend is not self.store}
        with gs.Scheduler(self.order, policy=self.policy, windows=ahead, plan_cache=1) as scheduler:
            plans = []
            for graph in graphs:
                for node in self.assigned(graph, stored) if assigns else ():
                    scheduler.set_tensor_backend(*node)
                plans.append(scheduler.plan(graph))
            return plans

    def assigned(self, graph: Graph, stored: Iterable[str]) -> list[tuple[Tensor, Backend]]:
        """(node, backend) for each node that the placement assigns, and for each that reads a weight named in `stored`,
        with the backend on which the weight was placed.  Empty if only one backend computes."""
        if len(self.order) <= 2:
            return []
        named = {backend.name: backend for backend in self.order}
        fitted = {} if self.fit is None else self.fit.nodes(graph)
        return [*((node, named[device.name]) for node, device in fitted.items()),
                *assigned(graph, {name: self.outline.homes[name] for name in stored})]

    def arenas(self, plans: Sequence[Plan], backend: Backend) -> int:
        """The most bytes of arena and work memory that one of these plans takes on a backend; on `host` plus those that
        the store needs."""
        k, s = self.order.index(backend), self.order.index(self.store)
        return arena_bytes(plans, k) + (store_bytes(plans, s) if backend is self.host else 0)

    def counted(self, plans: Sequence[Plan], backend: Backend) -> int:
        """`arenas`, but on `host` no less than the placement counts of each part: it has divided the bytes beside these
        among the models that take turns."""
        if self.fit is None or backend is not self.host:
            return self.arenas(plans, backend)
        k, s = self.order.index(backend), self.order.index(self.store)
        arena, _, store = self._of_fit
        return max(arena_bytes(plans, k), arena) + max(store_bytes(plans, s), store)

    @cached_property
    def _of_fit(self) -> tuple[int, int, int]:
        """The bytes of the host's arena, of work memory of its kernels and of the store in the placement."""
        assert self.fit is not None
        arena, store = arena_bytes(self.fit.plans, len(self.fit.devices)), store_bytes(self.fit.plans, 0)
        return arena, self.fit.arenas[-1] - arena - store, store

    def work(self, shapes: Sequence[Shape], backend: Backend) -> int:
        """The most bytes of host memory that the kernels of a backend take besides buffers, for graphs of these shapes
        or with fewer tokens."""
        rows, n = shapes[0].n_kv, max(shape.n_tokens for shape in shapes)
        fewer = [Shape(k, rows, k) for k in FEW if k < n]
        graphs = [self.graph(shape) for shape in (*shapes, *fewer)] + [shift.graph for shift in self.shift]
        most = max(backend.host_work(graph.nodes) for graph in graphs)
        return most if self.fit is None or backend is not self.host else max(most, self._of_fit[1])

    def is_small(self, shape: Shape, part: int) -> bool:
        """Whether a graph of this shape, without fetched weights, has arenas of at most 1 / `part` of each limit."""
        plans = self.plans([shape], (), {})
        return all(self.arenas(plans, backend) <= limit // part for backend, limit in self.limits.items())

    # -- choosing the weights that stay ------------------------------------------------------------------

    def _reads_rows(self, node: Tensor) -> bool:
        """Whether the store computes a node that reads single rows of its first source."""
        return node.op == "GET_ROWS" and self.store.supports_op(node)

    def uses(self, shapes: Iterable[Shape]) -> tuple[dict[Backend, list[Use]], list[str]]:
        """Sort the weights on backends with a limit by how nodes read them: ({backend: uses of the weights that a node
        reads as a whole, in the order of the first shape's graph}, names of the weights of which nodes read single
        rows or nothing)."""
        tensors = self.outline.weights.tensors
        counts = most_whole_reads(reads_of(self.graph(shape).nodes, tensors, self._reads_rows) for shape in shapes)
        found: dict[Backend, list[Use]] = {backend: [] for backend in self.limits}
        idle = []
        for name in [*counts, *(name for name in tensors if name not in counts)]:
            backend = self.outline.homes[name]
            if backend not in found:
                continue
            if not counts.get(name, 0):
                idle.append(name)
                continue
            found[backend].append(Use(name, self.outline.size_of(name),
                                      self.outline.size_of(name, self.store.margin), counts[name]))
        return found, idle

    def held(self, shapes: list[Shape], later: Shape | None = None) -> Held:
        """The choice with which the graphs of all these shapes fit the limits; OutOfMemory if there is none.

        `later`: a shape whose graph gets memory when it is first used, if it fits beside all weights."""
        uses, idle = self.uses(shapes)
        cached = {backend: sum(buffer.size for of, buffer in self.cache.buffers.items() if of is backend)
                  for backend in self.limits}
        # A context shift copies the keys of a layer.  A placement did not know of it, and its shares leave no room.
        if self.host is not None and self.fit is None:
            cached[self.host] += max((shift.nbytes(self.cache) for shift in self.shift), default=0)
        work = {backend: self.work(shapes, backend) for backend in self.limits}
        plans = self.plans(shapes, (), {})
        others = {backend: self.arenas(plans, backend) for backend in self.limits}
        plans += self.shift_plans((), {})
        arenas = {backend: self.arenas(plans, backend) for backend in self.limits}
        whole = {backend: self.outline.size_on(backend) for backend in self.limits}
        fixed = {backend: work[backend] + cached[backend] for backend in self.limits}
        needs = {backend: whole[backend] + fixed[backend] + arenas[backend] for backend in self.limits}
        if self.fit is None and all(needs[b] <= limit for b, limit in self.limits.items()):
            if later is not None:
                more = {b: self.work([*shapes, later], b) for b in self.limits}
                most = self.plans([later], (), {})
                if all(whole[b] + cached[b] + more[b] + max(arenas[b], self.arenas(most, b)) <= limit
                       for b, limit in self.limits.items()):
                    work, fixed = more, {b: cached[b] + more[b] for b in self.limits}
            rooms = {b: limit - fixed[b] - arenas[b] for b, limit in self.limits.items()}
            everything = {b: Choice((), sum(use.nbytes for use in uses[b]), 0) for b in self.limits}
            budgets = {b: limit - fixed[b] - whole[b] for b, limit in self.limits.items()}
            return self._held(shapes, uses, everything, rooms, budgets, work, [], plans, kept=idle)
        # No error in this list is in a cycle with this frame, which would keep all graphs until garbage is collected:
        # they have no tracebacks, and the one that is raised is not in the list any more.
        refusals = []
        for slots in self.slots(shapes):
            try:
                return self._fetching(shapes, uses, idle, fixed, work, others, slots)
            except OutOfMemory as error:
                refusals.append(error.with_traceback(None))
        if self.fit is None and len(self.limits) == 1:
            # What fetches need beside the window can be more than small weights take, of which none is fetched.
            (b, needed), = needs.items()
            refusals.append(OutOfMemory(
                f"a limit of {self.limits[b]:,} bytes on {b.name!r}: the model needs {needed:,} at least, where all of "
                f"its {whole[b]:,} bytes of weights stay: {fixed[b]:,} for the cache of {self.cache.n_ctx} tokens and "
                f"work memory, {arenas[b]:,} for arenas; a smaller n_ctx or n_batch needs less", b.name, needed,
                self.limits[b]))
        refusals.sort(key=lambda error: error.needed or 0)
        raise refusals.pop(0)

    def slots(self, shapes: Sequence[Shape]) -> list[SlotsSpec | None]:
        """What is tried in turn: the fewest slots for experts with which the graphs of these shapes can be computed, if
        experts can be read one by one, and a placement does not have them whole; and no slots."""
        fetching = None if self.fit is None else self.fit.fetching
        is_whole = len(self.order) > 2 if fetching is None else fetching.slots is None
        if self.experts is None or self.host is None or is_whole:
            return [None]
        tensors = {name: tensor for name, tensor in self.outline.weights.tensors.items()
                   if self.outline.homes[name] is self.host}
        least = least_slots(self.host, self.store, tensors, self.outline.infos,
                            [self.graph(shape) for shape in shapes], self.experts)
        return [None] if least is None else [least, None]

    def _fetching(self, shapes: list[Shape], uses: Mapping[Backend, Sequence[Use]], idle: Sequence[str],
                  fixed: Mapping[Backend, int], work: dict[Backend, int], others: Mapping[Backend, int],
                  slots: SlotsSpec | None = None) -> Held:
        """The choice that leaves weights in the store, with at least these `slots` for experts; OutOfMemory if there is
        none.  `fixed`: {backend: bytes beside weights and arenas}; `others`: {backend: bytes of arenas without
        windows}."""
        if slots is not None:
            uses = {b: [use for use in of if use.name not in slots.names] for b, of in uses.items()}
            fixed = {b: size + (slots.nbytes if b is slots.home else 0) for b, size in fixed.items()}
        best: _Trial | None = None
        spare = dict.fromkeys(self.limits, 0)
        for turn in range(ROUNDS):
            rooms = {b: limit - fixed[b] - others[b] for b, limit in self.limits.items()}
            choices = {b: choose(uses[b], rooms[b], spare[b]) or least_choice(uses[b]) for b in self.limits}
            if best is None and turn == ROUNDS - 1:
                # Arenas have grown by a few bytes a turn, and choices with them.
                choices = {b: least_choice(uses[b]) for b in self.limits}
            if best is not None and choices == best.choices:
                break
            names = None if turn or self.fit is None or self.fit.fetching is None else self.fit.fetching.names
            if names is not None:
                choices = {b: chosen(uses[b], names) for b in self.limits}
            stored = [*idle, *(use.name for choice in choices.values() for use in choice.fetched)]
            windows = {b: choice.window for b, choice in choices.items()}
            plans = self.plans(shapes, stored, windows) + self.shift_plans(stored, windows)
            self._check_others(plans)
            # Without the windows, arenas are a few bytes larger or smaller than in plans without fetched weights.
            bare = {b: self.counted(plans, b) - choices[b].window for b in self.limits}
            budgets = {b: limit - fixed[b] - choices[b].resident for b, limit in self.limits.items()}
            trial = _Trial(choices, rooms, budgets, {b: budgets[b] - bare[b] - choices[b].window for b in self.limits},
                           stored, plans)
            if trial.fits and (best is None or trial.seconds < best.seconds):
                best = trial
                # Where the arena is largest at nodes beside which little is fetched, a part of the window takes no
                # memory of its own.
                spare = {b: max(0, others[b] - bare[b]) for b in self.limits}
                if names is not None:
                    break
            elif best is not None:
                break
            else:
                for b in self.limits:
                    if choices[b] == least_choice(uses[b]) and trial.left[b] < 0:
                        raise self._refusal(b, uses[b], fixed[b], bare[b], slots)
                others = {b: max(bare[b], others[b]) for b in self.limits}
        assert best is not None     # the last turn has found one or raised
        if slots is not None:
            home, least = slots.home, slots
            slots = least.grown(min(best.left[home], self._most_slots(least) * least.slot_nbytes - least.nbytes))
            best.rooms[home] += least.nbytes
            best.budgets[home] -= slots.nbytes - least.nbytes
        return self._held(shapes, uses, best.choices, best.rooms, best.budgets, work, best.stored, best.plans, slots,
                          spare=spare)

    def _most_slots(self, least: SlotsSpec) -> int:
        """The most slots that there are: those of a placement, as memory of the host may be for other models."""
        fetching = None if self.fit is None else self.fit.fetching
        most = least.n_experts if fetching is None or fetching.slots is None else fetching.slots.n_slots
        return max(most, least.n_slots)

    def _check_others(self, plans: Sequence[Plan]) -> None:
        """Check that arenas on backends without a limit fit what the placement leaves there; OutOfMemory."""
        if self.fit is None:
            return
        named = {backend.name: backend for backend in self.order}
        for device, room in zip(self.fit.devices, self.fit.budgets(), strict=True):
            backend = named[device.name]
            needed = 0 if backend in self.limits else self.arenas(plans, backend)
            if room is not None and needed > room:
                raise OutOfMemory(f"backend {backend.name!r}: arena and work memory need {needed} bytes, and the "
                                  f"placement leaves {room}", backend.name, needed, room)

    def _held(self, shapes: list[Shape], uses: Mapping[Backend, Sequence[Use]], choices: Mapping[Backend, Choice],
              rooms: Mapping[Backend, int], budgets: dict[Backend, int], work: dict[Backend, int],
              stored: Sequence[str], plans: Sequence[Plan], slots: SlotsSpec | None = None,
              kept: Sequence[str] = (), spare: Mapping[Backend, int] | None = None) -> Held:
        """Make the `Held` of a choice; `kept`: weights that stay besides those in `uses`; `spare`: see `Residency`.

        Changes `budgets`: adds the bytes that the store needs as its budget, and subtracts them from that of `host`.
        """
        if stored or slots is not None:
            s = self.order.index(self.store)
            budgets[self.store] = store_bytes(plans, s)
            if self.host is not None:
                budgets[self.host] -= budgets[self.store]
        fetched = {use.name for choice in choices.values() for use in choice.fetched}
        names = [name for name in stored if name not in fetched]
        residency = Residency({b.name: limit for b, limit in self.limits.items()},
                              {b.name: rooms[b] for b in self.limits}, {b.name: tuple(uses[b]) for b in self.limits},
                              {b.name: choices[b] for b in self.limits}, tuple(names),
                              self.store.name if stored or slots is not None else "", slots, tuple(kept),
                              {b.name: free for b, free in (spare or {}).items()})
        return Held(self.store if stored or slots is not None else None, frozenset(stored), budgets, work, residency,
                    slots, shapes, self.shifts)

    def _refusal(self, backend: Backend, uses: Sequence[Use], fixed: int, arenas: int,
                 slots: SlotsSpec | None) -> OutOfMemory:
        choice, limit = least_choice(uses), self.limits[backend]
        least = choice.resident + choice.window + fixed + arenas
        total = sum(use.nbytes for use in uses)
        experts = ""
        if slots is not None and slots.home is backend:
            fixed -= slots.nbytes
            experts = f"{slots.nbytes:,} for {slots.n_slots} slots of experts, "
        return OutOfMemory(
            f"a limit of {limit:,} bytes on {backend.name!r}: the model needs {least:,} at least, where most of its "
            f"{total:,} bytes of weights are fetched: {fixed:,} for the cache of {self.cache.n_ctx} tokens, {arenas:,} "
            f"for arenas and work memory, {experts}the rest for a window of weights; a smaller n_ctx or n_batch needs "
            "less", backend.name, least, limit)


def assigned(graph: Graph, homes: Mapping[str, Backend]) -> list[tuple[Tensor, Backend]]:
    """(node, backend) for each node that reads a whole weight of a store: the backend that should compute the node.

    `homes`: {name of a weight in the store: the backend on which the weight was placed}.
    """
    found = []
    for node in graph.nodes:
        if node.computes and node.op != "GET_ROWS":
            home = next((homes[s.root.name] for s in node.src if s is not None and s.root.name in homes
                         and s.root.is_resident), None)
            if home is not None:
                found.append((node, home))
    return found
