"""Small graphs with residents, random in their sizes: models of a few stages for tests of placement; and the check that
a fit keeps its budgets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import ggml_sched as gs
from ggml_sched.graph import graphfile

__all__ = ["allocated", "devices", "every_placement", "layered", "mixture", "sized"]


def layered(rng: random.Random, stages: int, tokens: int = 1, *, tied: bool = False, caches: bool = False,
            width: int = 64, vocabulary: int = 128) -> gs.Graph:
    """A residual stream of some stages, each with two matrices of a random width; an output matrix at the end.

    `tied`: the embedding is the output matrix, too.  `caches`: the first stage appends to a cache and reads it.
    """
    ctx = gs.Context("layered")

    def weight(name: str, *ne: int) -> gs.Tensor:
        return _resident(ctx, "weight", name, *ne)

    ids = ctx.tensor("i32", tokens, "ids", input=True)
    embedding = weight("embedding", width, vocabulary)
    x = ctx.get_rows(embedding, ids)
    for k in range(stages):
        wide = width * rng.randrange(1, 5)
        if caches and k == 0:
            cache = _resident(ctx, "kv", "cache", width, 256)
            rows = ctx.tensor("i64", tokens, "rows", input=True)
            new = ctx.mul_mat(weight("keys", width, width), x)
            full = ctx.set_rows(cache, new, rows)
            scores = ctx.soft_max(ctx.mul_mat(full, x))
            y = ctx.mul_mat(weight("back", 256, width), scores)
        else:
            y = ctx.mul_mat(weight(f"up{k}", width, wide), x)
            y = ctx.unary(y, "relu") if rng.random() < 0.5 else y
            y = ctx.mul_mat(weight(f"down{k}", wide, width), y)
        x = ctx.add(x, y)
    out = ctx.mul_mat(embedding if tied else weight("output", width, vocabulary), x)
    ctx.set_output(out)
    graph = gs.Graph(out)
    graph.meta = {"n_tokens": tokens}
    return graph


def mixture(layers: int = 1, tokens: int = 1, n_experts: int = 4, n_used: int = 2, width: int = 64,
            wide: int = 96) -> gs.Graph:
    """A residual stream of some layers of experts, each with a router; a matrix before them, and an output matrix."""
    ctx = gs.Context("mixture")

    def weight(name: str, *ne: int) -> gs.Tensor:
        return _resident(ctx, "weight", name, *ne)

    x = ctx.mul_mat(weight("first", width, width), ctx.tensor("f32", (width, tokens), "x", input=True))
    for k in range(layers):
        order = ctx.argsort(ctx.mul_mat(weight(f"router{k}", width, n_experts), x), "desc")
        ids = ctx.view_2d(order, n_used, tokens, order.nb[1])
        y = ctx.mul_mat_id(weight(f"up{k}", width, wide, n_experts), ctx.reshape_3d(x, width, 1, tokens), ids)
        y = ctx.mul_mat_id(weight(f"down{k}", wide, width, n_experts), ctx.relu(y), ids)
        parts = [ctx.view_2d(y, width, tokens, y.nb[2], i * y.nb[1]) for i in range(n_used)]
        for part in parts:
            x = ctx.add(x, part)
    out = ctx.mul_mat(weight("output", width, width), x)
    ctx.set_output(out)
    graph = gs.Graph(out)
    graph.meta = {"n_tokens": tokens}
    return graph


def _resident(ctx: gs.Context, kind: str, name: str, *ne: int) -> gs.Tensor:
    with gs.Context() as scratch:
        plain = scratch.tensor("f32", ne)
        return ctx.restore("NONE", plain.type, plain.ne, plain.nb, name=name, resident=kind)


def sized(graph: gs.Graph) -> dict[str, int]:
    """{name of a resident: bytes}."""
    return {name: t.nbytes for name, t in _tensors(graph).items()}


def _tensors(graph: gs.Graph) -> dict[str, gs.Tensor]:
    return {t.name: t for t in graph.tensors if t.resident and t.view_src is None}


def devices(rng: random.Random, count: int, total: int, *, tight: float = 0.7) -> list[gs.Device]:
    """A host and other devices of random speeds; `total`: bytes of the residents.  The host has room for all of them,
    each other device for a part of at most `tight`."""
    made = [gs.Device("CPU", 4 * total + (1 << 20), rng.uniform(1e8, 1e9), rng.uniform(1e10, 1e11), host=True)]
    for k in range(count - 1):
        memory = int(total * rng.uniform(0.1, tight)) + rng.randrange(20000)
        made.append(gs.Device(f"GPU{k}", memory, rng.uniform(1e9, 2e10), rng.uniform(1e11, 1e12)))
    return made


def every_placement(graphs: Sequence[gs.Graph], weights: Sequence[float], given: Sequence[gs.Device],
                    link: gs.Link) -> list[tuple[float, dict[str, str]]]:
    """(seconds, {resident: device}) of each placement whose real plans keep the budgets, the cheapest first."""
    ordered = sorted(given, key=lambda device: device.host)
    backends = [gs.DryBackend(device.name, alignment=device.alignment) for device in ordered]
    copies = [graphfile.graph_from_dict(graphfile.graph_to_dict(graph)) for graph in graphs]
    residents = [{t.name: t for t in copy.tensors if t.resident and t.view_src is None} for copy in copies]
    names = list(dict.fromkeys(name for named in residents for name in named))
    sizes = {name: t.nbytes for named in residents for name, t in named.items()}
    found = []
    with gs.Scheduler(backends, plan_cache=0) as scheduler:
        for chosen in product(range(len(ordered)), repeat=len(names)):
            at = dict(zip(names, chosen, strict=True))
            used = [0] * len(ordered)
            for name, d in at.items():
                used[d] += -(-sizes[name] // ordered[d].alignment) * ordered[d].alignment
            if any(n > device.budget for n, device in zip(used, ordered, strict=True)):
                continue
            for named in residents:
                for name, t in named.items():
                    kind = "weights" if t.resident == "weight" else "any"
                    gs.bind_resident(t, gs.Buffer(backends[at[name]], t.nbytes, usage=kind), 0)
            plans = [scheduler.plan(copy) for copy in copies]
            arenas = [max(plan.buffer_sizes[d] for plan in plans) for d in range(len(ordered))]
            if all(n + arena <= device.budget for n, arena, device in zip(used, arenas, ordered, strict=True)):
                seconds = sum(weight * gs.price(plan, ordered, link).seconds
                              for weight, plan in zip(weights, plans, strict=True) if weight)
                found.append((seconds, {name: ordered[d].name for name, d in at.items()}))
    return sorted(found, key=lambda entry: entry[0])


def allocated(fit: gs.Fit, graphs: Sequence[gs.Graph]) -> None:
    """Allocate weights and caches, and then every graph of a fit, planned anew, on dry backends whose memory is exactly
    the budgets; the bytes of residents are those that the fit says.

    Raises what a backend or the scheduler raises where the residents and arenas of a plan exceed a budget, or a plan is
    wrong.
    """
    backends = {device.name: gs.DryBackend(device.name, alignment=device.alignment, memory=device.budget)
                for device in fit.devices}
    held = []       # what keeps the memory
    made = {name: t for graph in graphs for name, t in _tensors(graph).items()}
    for use in fit.memory:
        ctx = gs.Context(use.device.name)
        for name, t in made.items():
            if fit.place(name) == use.device:
                ctx.tensor(t.type, t.ne, name)
        buffer = backends[use.device.name].alloc_tensors(ctx)
        held.append((ctx, buffer))
        assert backends[use.device.name].used == use.weights + use.cache, f"bytes said of {use.device.name}"
    copies = [graphfile.graph_from_dict(graphfile.graph_to_dict(graph), lambda t: backends[fit.place(t).name])
              for graph in graphs]
    budgets = {backends[device.name]: room for device, room in zip(fit.devices, fit.budgets(), strict=True)}
    with gs.Scheduler(list(backends.values()), budgets=budgets) as scheduler:
        for graph in copies:
            for node, device in fit.nodes(graph).items():
                scheduler.set_tensor_backend(node, backends[device.name])
        scheduler.reserve(*copies)
        for graph in copies:
            scheduler.alloc(graph).verify()
