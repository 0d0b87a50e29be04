"""Small graphs and backends for tests."""

from devices import device, resident_tensor

import ggml_sched as gs


def dry_device(name, reads=None, inplace=None, alloc_size=None, offload=None, **options):
    """A dry backend that reads other backends' buffers, permits the given in-place reuse, and offloads nodes."""
    given = {"inplace_sources": inplace, "alloc_size": alloc_size, "offload_op": offload}
    answers = {method: lambda _inherited, argument, answer=answer: answer(argument)
               for method, answer in given.items() if answer is not None}
    return device(gs.DryBackend, name, reads=reads, answers=answers, **options)


def two_layers(first, second):
    """Two matrix products with a residual, weights on two backends: (graph, context)."""
    ctx = gs.Context("two layers")
    x = ctx.tensor("f32", (8, 4), "x", input=True)
    w1 = resident_tensor(first, (8, 8), "w1")
    w2 = resident_tensor(second, (8, 8), "w2")
    h1 = ctx.set_name(ctx.mul_mat(w1, x), "h1")
    a1 = ctx.set_name(ctx.silu(h1), "a1")
    h2 = ctx.set_name(ctx.mul_mat(w2, a1), "h2")
    a2 = ctx.set_name(ctx.add(h2, a1), "a2")
    view = ctx.set_name(ctx.reshape(a2, 32), "flat")
    out = ctx.set_name(ctx.scale(view, 2.0), "out")
    return gs.Graph(out), ctx
