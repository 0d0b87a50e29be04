"""Known errors of today's ggml, one or a few tests each: here the result is right.

Errors that other files test: a stop that one backend does not see (test_callbacks.py), another graph's results
(test_allocation_cache.py), weights sent with each compute (test_copies_in_turn.py), graphs that scheduling changes, and
too many backends or holes (tests/core/test_first_generation_failures.py).
"""

import numpy as np
import pytest
from devices import devices, poisoned, resident, verified

import ggml_sched as gs

RNG = np.random.default_rng(3)


def values(*shape):
    return RNG.uniform(-2, 2, shape).astype(np.float32)


# -- same counts and sizes, different wiring: upstream replays a stale plan ------------------------


def subtraction(swapped):
    """x and y go through equal chains; their difference in one order or the other."""
    ctx = gs.Context("subtraction")
    x, y = (ctx.tensor("f32", (8, 2), name, input=True) for name in "xy")
    a, b = ctx.scale(x, 2.0), ctx.scale(y, 3.0)
    return gs.Graph(ctx.sub(b, a) if swapped else ctx.sub(a, b), a, b), x, y


@pytest.mark.parametrize("n_backends", [1, 2])
def test_equal_counts_and_sizes_with_other_wiring_are_planned_anew_and_compute_right(n_backends):
    backends = devices(n_backends)
    x_values, y_values = values(2, 8), values(2, 8)
    with gs.Scheduler(backends) as sched:
        for swapped in (False, True, False, True):
            graph, x, y = subtraction(swapped)
            sched.alloc(graph)
            x.set(x_values)
            y.set(y_values)
            assert sched.compute(graph)
            expected = 2 * x_values - 3 * y_values
            result = next(t for t in graph.nodes if t.op == "SUB").numpy()
            np.testing.assert_array_equal(result, -expected if swapped else expected)


# -- an unused leaf that grows overlaps its neighbour ----------------------------------------------


@pytest.mark.parametrize("unused_first", [False, True])
def test_an_unused_leaf_that_grows_disturbs_nobody(unused_first):
    backend = poisoned("CPU")
    with gs.Scheduler([backend]) as sched:
        for n in (1, 7, 64, 500):
            ctx = gs.Context()
            x = ctx.tensor("f32", 16, "x", input=True)
            unused = ctx.tensor("f32", n, "unused", input=True)
            y = ctx.tensor("f32", 16, "y", input=True)
            out = ctx.add(x, y)
            flat = ctx.view_1d(unused, 1)
            graph = gs.Graph(flat, out) if unused_first else gs.Graph(out, flat)
            plan = verified(sched.alloc(graph))
            x_values, y_values = values(16), values(16)
            x.set(x_values)
            if unused.buffer is not None:
                unused.set(np.full(n, 1e9, np.float32))
            y.set(y_values)
            sched.compute(graph)
            np.testing.assert_array_equal(out.numpy(), x_values + y_values)
            assert plan.buffer_sizes[0] <= 3 * 64 + -(-4 * n // 64) * 64


# -- reuse through a view's root is lost: twice the memory -----------------------------------------


@pytest.mark.parametrize("view", ["reshape", "view_1d", "two reshapes"])
def test_reuse_through_a_view_is_kept(ctx, view):
    backend = gs.DryBackend("D")
    x = ctx.tensor("f32", (256, 4), "x")
    a = ctx.sqr(ctx.add(x, x))
    if view == "reshape":
        a = ctx.reshape(a, 1024)
    elif view == "view_1d":
        a = ctx.view_1d(a, 1024)
    else:
        a = ctx.reshape(ctx.reshape(a, 1024), 512, 2)
    out = ctx.scale(a, 0.5)
    with gs.Scheduler([backend]) as sched:
        plan = verified(sched.plan(gs.Graph(out)))
    assert plan.offset_of(out) == plan.offset_of(a)
    # The leaf, which lives from the start, and one tensor beside it.
    assert plan.buffer_sizes == (2 * 4096,)


# -- host weights are sent on every compute --------------------------------------------------------


def test_a_host_weight_that_a_node_writes_to_is_sent_again(ctx):
    device, host = devices(2)
    w = resident(host, "w", values(8, 8))
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    before = ctx.set_name(ctx.mul_mat(w, x), "before")
    halved = ctx.set_name(ctx.scale(w, 0.5, inplace=True), "halved")
    after = ctx.set_name(ctx.mul_mat(halved, x), "after")
    graph = gs.Graph(before, halved, after)
    with gs.Scheduler((device, host)) as sched:
        sched.set_tensor_backend(before, device)
        sched.set_tensor_backend(after, device)
        verified(sched.alloc(graph))
        x.set(values(2, 8))
        held = w.numpy()
        for _ in range(3):
            sched.compute(graph)
            np.testing.assert_allclose(before.numpy(), x.numpy() @ held.T, rtol=1e-5, atol=1e-5)
            held = held * np.float32(0.5)
            np.testing.assert_array_equal(w.numpy(), held)
            np.testing.assert_allclose(after.numpy(), x.numpy() @ held.T, rtol=1e-5, atol=1e-5)


# -- a write through a view whose root lives on another backend is lost ----------------------------


WRITES = ("cpy", "set_rows", "inplace", "set")


def written(kind, ctx, cache, x):
    """A node that writes x into rows 1 and 2 of a cache [8, 4] (in place: doubles them)."""
    if kind == "cpy":
        return ctx.cpy(x, ctx.view_2d(cache, 8, 2, cache.nb[1], cache.nb[1]))
    if kind == "set_rows":
        rows = ctx.tensor("i32", 2, "rows", input=True)
        return ctx.set_rows(cache, x, rows)
    if kind == "set":
        return ctx.set(cache, x, cache.nb[1], cache.nb[2], cache.nb[3], cache.nb[1], inplace=True)
    return ctx.add(ctx.view_2d(cache, 8, 2, cache.nb[1], cache.nb[1]), x, inplace=True)


def expectation(kind, held, x):
    held = held.copy()
    held[1:3] = held[1:3] + x if kind == "inplace" else x
    return held


@pytest.mark.parametrize("forced", ["by the caller", "by supports_op"])
@pytest.mark.parametrize("where", ["resident", "in the arena"])
@pytest.mark.parametrize("kind", WRITES)
def test_a_write_through_a_view_reaches_a_root_on_another_backend(ctx, kind, where, forced):
    op = {"cpy": "CPY", "set_rows": "SET_ROWS", "inplace": "ADD", "set": "SET"}[kind]
    by_caller = forced == "by the caller"
    device, host = poisoned("D"), poisoned("HOST", refuses=() if by_caller else (op,))
    start = values(4, 8)
    if where == "resident":
        cache = resident(host, "cache", start, usage="any")
    else:
        cache = ctx.tensor("f32", (8, 4), "cache", input=True)
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    before = ctx.set_name(ctx.sqr(cache), "before")
    node = ctx.set_name(written(kind, ctx, cache, x), "write")
    # Readers of the root by other names, on both backends.
    here = ctx.set_name(ctx.scale(ctx.view_2d(cache, 8, 3, cache.nb[1], cache.nb[1]), 2.0), "here")
    there = ctx.set_name(ctx.scale(ctx.reshape(cache, 32), 3.0), "there")
    direct = ctx.set_name(ctx.scale(node, 4.0), "direct")
    graph = gs.Graph(before, node, here, there, direct)
    with gs.Scheduler((device, host)) as sched:
        if by_caller:
            sched.set_tensor_backend(node, device)
        sched.set_tensor_backend(here, device)
        sched.set_tensor_backend(there, host)
        plan = verified(sched.alloc(graph))
        assert plan.backend_of(node) is device and plan.backend_of(cache) is host
        held = start
        for _ in range(3):
            if where != "resident":
                held = values(4, 8)
                cache.set(held)
            sent = values(2, 8)
            x.set(sent)
            for t in graph.leafs:
                if t.name == "rows":
                    t.set(np.array([1, 2], np.int32))
            sched.compute(graph)
            np.testing.assert_array_equal(before.numpy(), held * held)
            held = expectation(kind, held, sent)
            if where == "resident":
                np.testing.assert_array_equal(cache.numpy(), held)
            np.testing.assert_array_equal(here.numpy(), held[1:] * 2)
            np.testing.assert_array_equal(there.numpy(), held.ravel() * 3)
            window = held if kind in ("set_rows", "set") else held[1:3]
            np.testing.assert_array_equal(direct.numpy(), window * 4)


@pytest.mark.parametrize("through", ["the node", "a view", "the leaf"])
@pytest.mark.parametrize("resides", [True, False])
def test_a_copy_of_memory_that_a_node_has_written_to_is_made_on_every_compute(ctx, resides, through):
    """The leaf itself was not set again, but what was written into it has changed."""
    device, host = devices(2)
    cache = (resident(host, "cache", values(2, 8), "any") if resides
             else ctx.tensor("f32", (8, 2), "cache", input=True))
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    node = ctx.set_name(ctx.cpy(x, cache), "write")
    # No op that could run in place over the copy.
    seen = node if through == "the node" else cache if through == "the leaf" else ctx.reshape(cache, 8, 2)
    out = ctx.set_name(ctx.concat(seen, seen, 1), "out")
    graph = gs.Graph(node, out)
    with gs.Scheduler((device, host)) as sched:
        sched.set_tensor_backend(node, host)
        sched.set_tensor_backend(out, device)
        verified(sched.alloc(graph))
        if not resides:
            cache.set(values(2, 8))
        for _ in range(3):
            sent = values(2, 8)
            x.set(sent)
            sched.compute(graph)
            np.testing.assert_array_equal(out.numpy(), np.concatenate([sent, sent]))


# -- best fit over several chunks takes the last chunk that fits -----------------------------------


def test_best_fit_over_several_chunks_takes_the_best(ctx):
    """Two chunks with a hole each, 512 bytes in the first and 2,048 in the second: 256 go to the first."""
    backend = gs.DryBackend("D", alignment=32, max_buffer_size=8192)
    x = ctx.tensor("f32", 8, "x")

    def block(size, tag):
        return ctx.set_name(ctx.repeat(x, ctx.tensor("f32", size // 4, f"like {tag}")), tag)

    a = block(512, "a")             # chunk 0, later a hole
    b = block(7616, "b")            # fills chunk 0 up
    c = block(2048, "c")            # chunk 1, later a hole
    d = block(4096, "d")
    ends = [ctx.sum(a), ctx.sum(c)]
    e = block(256, "e")
    graph = gs.Graph(a, b, c, d, *ends, e, ctx.sum(b), ctx.sum(d), ctx.sum(e))
    with gs.Scheduler([backend]) as sched:
        plan = verified(sched.plan(graph))
    assert plan.chunk_of(a) != plan.chunk_of(c)
    assert plan.chunk_of(e) == plan.chunk_of(a)
    assert plan.offset_of(a) <= plan.offset_of(e) < plan.offset_of(a) + a.nbytes
