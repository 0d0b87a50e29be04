"""Loads a `Model` from a GGUF file: checks the arguments, places weights and cache, and plans the first graph.

Invariant: after an exception no memory is held and no backend is open that `load` has made.  Corresponds to llama.cpp's
llama_model_load_from_file and llama_init_from_model.  limited.py plans models under limits of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from ggml_sched._graph import Tensor, Type
from ggml_sched._host import host_memory
from ggml_sched.backend import Backend, Buffer, checked_backends
from ggml_sched.backends.cpu import CpuBackend
from ggml_sched.errors import FileFormatError, GraphError, OutOfMemory
from ggml_sched.experts.policies import checked_policy
from ggml_sched.llama import arch as architectures
from ggml_sched.llama._cells import MAX_SEQUENCES
from ggml_sched.llama.arguments import count
from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.defaults import (
    PlaceFunction,
    PlaceLike,
    are_apart,
    as_fit,
    checked_place,
    default_backend,
    spread_layers,
)
from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.hints import unknown_argument
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache, type_of
from ggml_sched.llama.limits import limits_of
from ggml_sched.llama.model import Model
from ggml_sched.llama.runner import Runner
from ggml_sched.llama.weights import Weights, load_weights

if TYPE_CHECKING:
    from ggml_sched import Arenas
    from ggml_sched.experts import Policy
    from ggml_sched.llama.gguf import GGUFFile, Source
    from ggml_sched.llama.limited import Held
    from ggml_sched.llama.limits import MemoryLike
    from ggml_sched.placement.answer import Fit

__all__ = ["load"]

T = TypeVar("T")

_BACKENDS = "backends are a list, best first: load(path, [backend])"
MAX_ROWS = 1 << 30
N_BATCH = 512
"""Tokens that are evaluated together where the caller does not say how many."""
LEAST_CONTEXT = 256
"""The fewest tokens of a context that the caller leaves open under a limit, if the model was trained with as many."""


def load(path: Source, backends: Sequence[Backend] | None = None, n_ctx: int | None = None,
         n_batch: int | None = None, place: PlaceLike | Fit | None = None, *, n_threads: int | None = None,
         memory: MemoryLike | None = None, policy: str = "default", kv_type: Type | str | None = None, n_seq: int = 1,
         flash: bool | None = None, use_mmap: bool = True, huge_pages: bool = True, interleave: bool = False,
         progress: Callable[[int, int], object] | None = None, arenas: Arenas | None = None,
         experts: Policy | str = "lfu", **unknown: Never) -> Model:
    """Load a GGUF model from a path, a buffer of bytes or a binary file object.

    `backends`: best first; None: one (`defaults.default_backend`) with `n_threads` threads (None: as many as CPUs that
    this process may use).  The model closes that one, and does not close backends that the caller passes.
    `memory`: a limit, in bytes or as a text like "4GiB", of all that the model holds on its only backend over host
    memory, or {backend: such a limit}.  Weights that do not fit stay in the file, and every evaluation fetches them
    while it computes with others (`model.residency`); results have the same bits.
    `place(name, layer)` returns the backend of a weight or KV tensor (`layer` is None outside the layers), or a
    `Device` that stands for it; by default layers are spread evenly.  Instead of a function, a `Fit` of `gs.fit` also
    assigns nodes, bounds the arenas, and gives the `n_ctx`, `n_batch`, `kv_type` and `flash` of its graphs where the
    caller leaves these out; the weights that it fetches are fetched, and the memory of its host is a limit as `memory`
    is.  `backends` are then those with the names of its devices; None: the devices' own.
    `n_ctx`: rows of the cache, for the tokens of `n_seq` sequences together; None or 0: as many as the model was
    trained with, but no more than fit into half of the free memory.  With `memory` no more than fit into an eighth of
    it, but at least 256; if it does not allow that many, half as many are tried, and so on, down to 256.
    `n_batch`: tokens that are evaluated at a time (default 512, or what `memory` allows).
    `kv_type`: "f32" (default), "f16", "bf16", or with flash attention a block type like "q8_0".
    `flash`: whether attention is one node; None: where backends support it.
    `arenas`: models that are given the same `gs.Arenas` share the memory that they compute in, on `backends` that they
    have in common; their evaluations take turns, or, in several threads, get memory as the arenas have it (with
    `memory`, give `gs.Arenas("wait")`: see there).
    `experts`: the policy by which experts stay in memory where `memory` does not hold all: a value of
    `ggml_sched.experts` or "lfu", "lru", "mixture"; "whole": all experts of a layer are fetched together.
    `use_mmap=False` copies the weights; with a mapping the system ends a process that uses weights of a file which was
    shortened since (SIGBUS).  `huge_pages`: weights in a mapped file move to huge pages in parts, one at
    each of 32 evaluations after the first, where Linux has the file in small pages and while they are at most a quarter
    of the free memory: tokens take up to a third less time, and these pages are the process's own.  With `memory` they
    stay in the mapping.
    `interleave`: weights are read at once, and kept with interleaved rows (`CpuBackend.interleave`), in private memory
    in place of the mapping: a token of one or two sequences takes less time, loading more.
    `progress(done, total)` is called with bytes while weights are read.

    Raises TypeError for `n_threads` together with `backends`, for `arenas` without `backends`, for `memory` together
    with a `Fit`, for `interleave` together with `memory` or with a `Fit` that fetches weights, and for unknown
    arguments (if another library has the name, with what it is called here); FileFormatError for a file that is not a
    model this package runs, UnsupportedOp when no backend computes one of its nodes or interleaves any of its weights,
    and PlacementError and OutOfMemory as the backends do; OutOfMemory also for a limit that is too small, with the
    least that would suffice.
    """
    if unknown:
        raise unknown_argument(load, next(iter(unknown)))
    if backends is not None and n_threads is not None:
        raise TypeError("n_threads is an argument of the default backend: give it to the backends")
    if backends is None and arenas is not None and as_fit(place) is None:
        raise TypeError("models share arenas on backends that they have in common: give each load the same backends")
    n_ctx = 0 if n_ctx is None else count("n_ctx", n_ctx, 0, MAX_ROWS)
    n_seq = count("n_seq", n_seq, 1, MAX_SEQUENCES - 1)
    fit = as_fit(place)
    where = cast("PlaceLike | None", place if fit is None else fit.place)
    if fit is not None:
        # Arguments that the caller leaves out get the values of the graphs for which the fit was made.
        meta = fit.plans[0].graph.meta
        n_ctx = n_ctx or meta.get("n_ctx", 0)
        kv_type = meta.get("kv_type") if kv_type is None else kv_type
        flash = meta.get("flash_attn") if flash is None else flash
        n_batch = max(plan.graph.meta.get("n_tokens", 1) for plan in fit.plans) if n_batch is None else n_batch
    if fit is not None and memory is not None:
        raise TypeError("memory bounds what a placement has decided already: give fit devices with less memory")
    if interleave and (memory is not None or (fit is not None and fit.fetching is not None)):
        raise TypeError("interleave=True needs all weights in memory, and under a limit some are fetched")
    if n_batch is not None:
        n_batch = count("n_batch", n_batch, 1, MAX_ROWS)
    kv_type = type_of("f32" if kv_type is None else kv_type)
    by_expert = None if isinstance(experts, str) and experts == "whole" else checked_policy(experts, "whole")
    for name, function in (("place", where), ("progress", progress)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} is a function, not {type(function).__name__}")
    with ExitStack() as undo:
        owned: list[Backend] = []
        if fit is not None:
            from ggml_sched.placement.answer import backends_of

            def driver(name: str) -> Backend:
                owned.append(CpuBackend(1, name=name))
                undo.callback(owned[0].close)
                return owned[0]

            backends = backends_of(fit, None if backends is None else checked_backends(backends, _BACKENDS), driver)
        elif backends is None:
            owned = backends = [default_backend(n_threads)]
            undo.callback(owned[0].close)
        backends = checked_backends(backends, _BACKENDS)
        if not backends:
            raise ValueError("a model needs one backend or more")
        limits = limits_of(memory, backends)
        if fit is not None and fit.fetching is not None:
            limits = {backends[-1]: fit.devices[-1].budget}     # the host is the last device
        if n_batch is None and not limits:
            n_batch = N_BATCH
        with open_gguf(path) as file:
            _, arch = architectures.find(file)
            hparams = arch.hparams(file)
            is_tied = "output.weight" not in file.tensors
            made_at = partial(_runner_at, path, file, arch, hparams, backends, n_ctx, n_batch, kv_type, n_seq, flash,
                              policy, fit, limits, use_mmap, huge_pages, interleave, arenas, by_expert,
                              progress)

            def runner_at(at: PlaceFunction, twins: Mapping[str, str] | None = None) -> Runner:
                try:
                    return made_at(at, twins)
                except GraphError as error:     # a weight has a type that an op of the graph does not take
                    raise FileFormatError(f"{file.name}: {error}") from error

            runner = None
            if where is None and is_tied and are_apart(backends):
                with suppress(OutOfMemory):     # no room for a copy of the tied matrix: loaded below without one
                    runner = runner_at(spread_layers(backends, hparams.n_layer, is_tied=False),
                                       {"output.weight": "token_embd.weight"})
            if runner is None:
                runner = runner_at(checked_place(where or spread_layers(backends, hparams.n_layer, is_tied), backends))
            if runner.held is not None and runner.held.store is not None:
                owned = [*owned, runner.held.store]
                undo.callback(runner.held.store.close)
            undo.callback(runner.close)
            metadata = file.metadata
        n_ctx, n_batch = runner.cache.n_ctx, runner.n_batch
        hosts = [backend for backend in backends if backend.is_host] if fit is None else backends[-1:]
        again = None if hasattr(path, "read") else partial(
            _load_again, path, n_ctx=n_ctx, n_batch=n_batch, policy=policy, kv_type=kv_type, n_seq=n_seq, flash=flash,
            use_mmap=use_mmap, huge_pages=huge_pages, interleave=interleave,
            memory=memory if fit is None else limits or None, host=hosts[0] if len(hosts) == 1 else None,
            arenas=arenas, experts=experts)
        model = Model(runner, backends, owned, n_batch, n_seq, metadata, again)
        undo.pop_all()
        return model


def _runner_at(path: Source, file: GGUFFile, arch: architectures.Architecture, hparams: Hparams,
               backends: Sequence[Backend], n_ctx: int, n_batch: int | None, kv_type: Type, n_seq: int,
               flash: bool | None, policy: str, fit: Fit | None, limits: Mapping[Backend, int], use_mmap: bool,
               huge_pages: bool, interleave: bool, arenas: Arenas | None, experts: Policy | None,
               progress: Callable[[int, int], object] | None, at: PlaceFunction,
               twins: Mapping[str, str] | None = None) -> Runner:
    """Make a runner: place the weights of a file and an empty cache by `at`, and reserve memory for graphs.

    `twins`: see `load_weights`.  If weights do not fit under the limits, the caller has to close `runner.held.store`.
    """
    with ExitStack() as undo:
        specs = [*arch.weights(hparams)]
        outline = None
        if limits:
            from ggml_sched.llama.limited import Outline, hold, store_for

            outline = Outline(file, specs, at, twins)
            huge_pages = False      # a piece that moves is in memory twice
        weights = (outline.weights if outline is not None
                   else load_weights(file, specs, at, use_mmap, progress, twins=twins, huge_pages=huge_pages))
        undo.callback(lambda: weights.close())
        contexts = [n_ctx] if n_ctx else open_contexts(hparams, kv_type, backends, limits)
        held = None
        if outline is None:
            n_ctx = contexts[0]
        else:
            store = store_for(path, at("token_embd.weight", None))
            undo.callback(store.close)

            def attempt(n_ctx: int) -> tuple[Held, int, bool]:
                cache = _cache_of(arch, hparams, weights, n_ctx, at, kv_type, n_seq, flash, has_memory=False)
                return *hold(outline, arch, hparams, cache, store, backends, limits, n_seq, n_batch, policy, experts,
                             fit), cache.flash

            n_ctx, found = longest(contexts, attempt)
            held, n_batch, flash = found
        cache = _cache_of(arch, hparams, weights, n_ctx, at, kv_type, n_seq, flash)
        undo.callback(cache.close)
        if held is not None:
            if held.store is None:
                store.close()
            weights = load_weights(file, specs, at, use_mmap, progress, twins=twins, store=held.store,
                                   stored=held.stored, slots=held.slots, huge_pages=huge_pages)
        assert n_batch is not None
        runner = Runner(arch, hparams, weights, cache, backends, n_seq, policy, min(n_batch, n_ctx), fit, held, arenas,
                        huge_pages)
        undo.callback(runner.scheduler.close)
        if interleave:
            runner.interleave(partial(_replaced, weights, file, twins or {}))
        runner.reserve()
        undo.pop_all()
        return runner


def _replaced(weights: Weights, file: GGUFFile, twins: Mapping[str, str], name: str) -> None:
    """Release the pages of a mapped weight that has an interleaved form now."""
    buffer, info = weights[name].buffer, file.tensors[twins.get(name, name)]
    if isinstance(buffer, Buffer) and buffer.file_backed:
        file.parts[info.part].forget(info.offset, info.offset + info.nbytes)
        buffer.moved += info.nbytes


def _cache_of(arch: architectures.Architecture, hparams: Hparams, weights: Weights, n_ctx: int, at: PlaceFunction,
              kv_type: Type, n_seq: int, flash: bool | None, has_memory: bool = True) -> KVCache:
    """An empty cache for flash attention, or, if `flash` is None and a backend does not support that, for the other.
    `has_memory`: see `KVCache`."""
    n_states = Runner.n_states(hparams, n_seq)
    with ExitStack() as undo:
        cache = KVCache(hparams, n_ctx, at, kv_type, n_states, flash=flash is None or flash, has_memory=has_memory)
        undo.callback(cache.close)
        if flash is not None or has_flash(arch, hparams, weights, cache):
            undo.pop_all()
            return cache
    return KVCache(hparams, n_ctx, at, kv_type, n_states, has_memory=has_memory)


def _load_again(path: Source, backends: Sequence[Backend], memory: MemoryLike | None = None,
                host: Backend | None = None, **settings: Any) -> Model:
    """Load on other backends, which keep their own limits.  Where none of them has one, the limit of `host`, the only
    backend over host memory before, is that of the only one now."""
    if isinstance(memory, Mapping):
        backends = checked_backends(backends, _BACKENDS)
        hosts = [backend for backend in backends if backend.is_host]
        kept = {backend: nbytes for backend, nbytes in memory.items() if backend in backends}
        if host is not None and host in memory and not kept and len(hosts) == 1:
            kept = {hosts[0]: memory[host]}
        memory = kept
    return load(path, backends, memory=memory, **settings)


def has_flash(arch: architectures.Architecture, hparams: Hparams, weights: Weights, cache: KVCache) -> bool:
    """Whether the backend that holds each layer's cache supports the node of flash attention that this model needs."""
    graph = build_graph(arch, hparams, weights, cache, Shape(1, cache.padded(1), 1), True).graph
    nodes: dict[Backend, list[Tensor]] = {}
    for node in graph.nodes:
        if node.op == "FLASH_ATTN_EXT":
            nodes.setdefault(node.src[1].backend, []).append(node)
    for backend, asked in nodes.items():
        backend.expect_queries(asked)
    return all(backend.supports_op(node) for backend, asked in nodes.items() for node in asked)


def open_contexts(h: Hparams, kind: Type, backends: Sequence[Backend], limits: Mapping[Backend, int]) -> list[int]:
    """What is tried in turn for `n_ctx` 0 or None: the trained context, and under limits the half of it, and so on, to
    LEAST_CONTEXT; so the least limit that suffices does not depend on the limit that was given.  Only one where a cache
    has no rows."""
    found = [trained_context(h, kind, backends, limits)]
    if limits:
        least = min(h.n_ctx_train, LEAST_CONTEXT)
        found[0] = max(found[0], least)
        while found[-1] > least and _row_size(h, kind):
            found.append(max(found[-1] // 2, least))
    return found


def longest(contexts: Sequence[int], hold: Callable[[int], T]) -> tuple[int, T]:
    """(n_ctx, what `hold(n_ctx)` returns) of the first of these contexts, the longest first, for which it does not
    raise OutOfMemory.  If the first one is refused, the last one is tried next: where that is refused, all are."""
    first, *others = contexts
    try:
        return first, hold(first)
    except OutOfMemory:
        if not others:
            raise
    shortest = hold(others[-1])
    for n_ctx in others[:-1]:
        with suppress(OutOfMemory):
            return n_ctx, hold(n_ctx)
    return others[-1], shortest


def _row_size(h: Hparams, kind: Type) -> int:
    """Bytes of a row of all layers' caches."""
    return sum(layer.n_embd_k + layer.n_embd_v for layer in h.layers) // kind.block_size * kind.type_size


def trained_context(h: Hparams, kind: Type, backends: Sequence[Backend],
                    limits: Mapping[Backend, int] | None = None) -> int:
    """The context for `n_ctx` 0 or None: the length that the model was trained with, or less, so that the cache takes
    at most half of the free memory (of the host, and of the backends together), and an eighth of the sum of `limits`.
    """
    row = _row_size(h, kind)
    left = [backend.memory_available() for backend in backends]
    known = [] if (free := host_memory()) is None else [free]
    if None not in left:
        known.append(sum(filter(None, left)))
    if limits:
        known.append(sum(limits.values()) // 4)
    return max(min(h.n_ctx_train, MAX_ROWS, *(free // 2 // max(row, 1) for free in known)), 1)
