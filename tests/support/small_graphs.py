"""Small graphs and backends for tests: by hand, and at random."""

import random

from devices import device

import ggml_sched as gs


def dry_device(name, reads=None, inplace=None, alloc_size=None, offload=None, **options):
    """A dry backend that reads other backends' buffers, permits the given in-place reuse, and offloads nodes."""
    given = {"inplace_sources": inplace, "alloc_size": alloc_size, "offload_op": offload}
    answers = {method: lambda _inherited, argument, answer=answer: answer(argument)
               for method, answer in given.items() if answer is not None}
    return device(gs.DryBackend, name, reads=reads, answers=answers, **options)


class Residents:
    """Contexts of resident tensors, one for each backend."""

    def __init__(self):
        self.contexts = []

    def tensor(self, backend, type, ne, name, usage="weights"):
        ctx = gs.Context(name)
        t = ctx.tensor(type, ne, name)
        backend.alloc_tensors(ctx, usage)
        self.contexts.append(ctx)
        return t


def two_layers(first, second):
    """Two matrix products with a residual, weights on two backends: (graph, context)."""
    weights = Residents()
    ctx = gs.Context("two layers")
    x = ctx.tensor("f32", (8, 4), "x", input=True)
    w1 = weights.tensor(first, "f32", (8, 8), "w1")
    w2 = weights.tensor(second, "f32", (8, 8), "w2")
    h1 = ctx.set_name(ctx.mul_mat(w1, x), "h1")
    a1 = ctx.set_name(ctx.silu(h1), "a1")
    h2 = ctx.set_name(ctx.mul_mat(w2, a1), "h2")
    a2 = ctx.set_name(ctx.add(h2, a1), "a2")
    view = ctx.set_name(ctx.reshape(a2, 32), "flat")
    out = ctx.set_name(ctx.scale(view, 2.0), "out")
    return gs.Graph(out), ctx


def random_case(seed: int, n_ops: int | None = None):
    """(graph, backends, {tensor: backend}), everything about them random.

    Residency, views, in-place ops, writes through views, roots read before and after a write, mixtures of experts,
    flags, assignments, unsupported and offloaded ops, memory that other backends read, backends that take data while
    they compute.  Every op is supported somewhere.
    """
    rng = random.Random(seed)
    n_backends = rng.randint(1, 4)
    names = [f"B{k}" for k in range(n_backends)]
    refused = rng.choice([(), (), ("SCALE",), ("MUL_MAT", "ADD"), ("CPY", "SET_ROWS")])
    backends = []
    for name in names:
        last = name == names[-1]
        reads = tuple(other for other in names if rng.random() < 0.15)
        mask = rng.choice([None, None, 0, 1, 2])
        pad = rng.choice([0, 0, 0, 48])
        some = tuple(op for op in refused if rng.random() < 0.7) if not last else ()
        backends.append(dry_device(
            name, reads=reads, alignment=rng.choice([1, 16, 32, 64]),
            alloc_size=(lambda t, pad=pad: t.nbytes + pad) if pad else None,
            inplace=None if mask is None else lambda op, mask=mask: mask,
            supports_op=(lambda t, some=some: t.op not in some) if some else None,
            offload=(lambda t: t.op in ("MUL_MAT", "MUL_MAT_ID")) if rng.random() < 0.2 and not last else None))
        backends[-1].concurrent_copies = rng.random() < 0.5
    weights, ctx = Residents(), gs.Context("random")
    n, m = rng.choice([(4, 3), (8, 4), (8, 1)])
    values = []
    for k in range(rng.randint(1, 4)):
        if rng.random() < 0.3:
            values.append(weights.tensor(rng.choice(backends), "f32", (n, m), f"r{k}", "any"))
        else:
            flags = {"input": rng.random() < 0.6, "output": rng.random() < 0.1}
            values.append(ctx.tensor("f32", (n, m), f"x{k}", **flags))
    caches = [weights.tensor(rng.choice(backends), "f32", (n, 4 * m), "kv", "any") if rng.random() < 0.7
              else ctx.tensor("f32", (n, 4 * m), "cache", input=rng.random() < 0.5)]
    matrices = [weights.tensor(rng.choice(backends), "f32", (n, n), f"w{k}") for k in range(2)]
    experts = [weights.tensor(rng.choice(backends), "f32", (n, n, 3), f"e{k}") for k in range(2)]
    rows, ids = ctx.tensor("i32", (m,), "rows", input=True), ctx.tensor("i32", (1, m), "ids", input=True)
    effects = []

    def window():
        cache = rng.choice(caches)
        return ctx.view_2d(cache, n, m, cache.nb[1], rng.randint(0, 3 * m) * cache.nb[1])

    kinds = ["scale", "add", "mul_mat", "inplace", "cpy", "set_rows", "window", "reshape", "split", "cont",
             "add", "silu", "grow", "mixture", "around"]
    for k in range(n_ops or rng.randint(1, 14)):
        kind = rng.choice(kinds)
        a, b = rng.choice(values), rng.choice(values)
        if kind == "scale":
            t = ctx.scale(a, 0.5)
        elif kind == "add":
            t = ctx.add(a, b)
        elif kind == "silu":
            t = ctx.silu(a)
        elif kind == "cont":
            t = ctx.cont(a)
        elif kind == "grow":
            t = ctx.concat(ctx.concat(a, b, 1), ctx.concat(a, a, 1), 1)
            caches.append(t)
            continue
        elif kind == "mul_mat":
            t = ctx.mul_mat(rng.choice(matrices), a)
        elif kind == "inplace":
            t = ctx.add(a, b, inplace=True) if rng.random() < 0.5 else ctx.scale(a, 2.0, inplace=True)
        elif kind == "cpy":
            t = ctx.cpy(a, window())
            effects.append(t)
        elif kind == "set_rows":
            t = ctx.set_rows(rng.choice(caches), a, rows)
            caches.append(t)
            effects.append(t)
            continue
        elif kind == "mixture":
            which = ids if rng.random() < 0.5 else ctx.top_k(ctx.cont(ctx.view_2d(a, 3, m, a.nb[1])), 1)
            t = ctx.reshape(ctx.mul_mat_id(rng.choice(experts), ctx.reshape(a, n, 1, m), which), n, m)
        elif kind == "around":
            part = window()
            before = ctx.add(part, b)
            effects.append(ctx.cpy(a, part))
            values.append(before)
            t = ctx.add(part, before)
        elif kind == "window":
            t = window()
        elif kind == "reshape":
            t = ctx.reshape(ctx.reshape(a, n * m), n, m)
        else:
            t = ctx.reshape(ctx.view_1d(ctx.concat(a, b, 1), n * m, rng.choice([0, 4 * n * m])), n, m)
        if rng.random() < 0.1:
            ctx.set_output(t)
        values.append(ctx.set_name(t, f"t{k}"))
    outputs = rng.sample(values, min(2, len(values))) + [e for e in effects if rng.random() < 0.7]
    rng.shuffle(outputs)
    graph = gs.Graph(*outputs)
    assigned = {t: rng.choice(backends) for t in graph.tensors if rng.random() < rng.choice([0, 0, 0.3])}
    return graph, tuple(backends), assigned


def plan_of(case, policy: str = "seed") -> gs.Plan:
    graph, backends, assigned = case
    scheduler = gs.Scheduler(backends, policy=policy)
    for t, backend in assigned.items():
        scheduler.set_tensor_backend(t, backend)
    return scheduler.plan(graph)
