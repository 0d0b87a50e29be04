"""Known errors of today's ggml, one or a few tests each: here the result is right."""

import numpy as np
import pytest
from devices import DATA_WRITES, devices, poisoned, resident, verified

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


def test_plans_of_graphs_that_differ_in_one_edge_differ():
    backends = (gs.DryBackend("D0"), gs.DryBackend("HOST"))
    with gs.Scheduler(backends) as sched:
        ctx = gs.Context()
        x = ctx.tensor("f32", 64, "x", input=True)
        a = ctx.sqr(x)
        b = ctx.sqr(a)
        c = ctx.mul(a, b)
        one = gs.Graph(ctx.add(c, a), b)
        other = gs.Graph(ctx.add(c, b), a)
        assert len(one) == len(other) and one.fingerprint != other.fingerprint
        first, second = verified(sched.plan(one)), verified(sched.plan(other))
        assert first.data is not second.data


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
def test_reuse_through_a_view_is_kept(view):
    backend = gs.DryBackend("D")
    ctx = gs.Context()
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


# -- a stop leaves only the current split, and the status says success -----------------------------


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_a_stop_stops_everything_and_says_so(stop_at):
    backends = devices(3, records={"graph_compute", "graph_plan_create"})
    weights = [resident(b, f"w{b.name}", values(8, 8)) for b in (*backends, backends[0])]
    ctx = gs.Context()
    x = h = ctx.tensor("f32", (8, 2), "x", input=True)
    nodes = []
    for k, w in enumerate(weights):
        h = ctx.set_name(ctx.mul_mat(w, h), f"h{k}")
        nodes.append(h)
    graph = gs.Graph(h)
    with gs.Scheduler(backends) as sched:
        assert len(sched.alloc(graph).splits) == 4
        x.set(values(2, 8))
        seen = []

        def stop(node):
            seen.append(node)
            return len(seen) <= stop_at

        assert sched.compute(graph, callback=stop) is False
        assert seen == nodes[: stop_at + 1]
        ran = [name for b in backends for name in b.ran]
        assert sorted(ran) == [f"h{k}" for k in range(stop_at + 1)]
        # The scheduler works afterwards.
        assert sched.compute(graph) is True
        expected = x.numpy()
        for w in weights:
            expected = expected @ w.numpy().T
        np.testing.assert_allclose(h.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_callback_that_returns_none_or_true_stops_nothing():
    ctx = gs.Context()
    x = ctx.tensor("f32", 4, "x", input=True)
    graph = gs.Graph(ctx.scale(ctx.scale(x, 2.0), 2.0))
    with gs.Scheduler([poisoned("CPU")]) as sched:
        sched.alloc(graph)
        x.set(np.ones(4, np.float32))
        seen = []
        assert sched.compute(graph, callback=seen.append) is True
        assert [t.op for t in seen] == ["SCALE", "SCALE"]
        assert sched.compute(graph, callback=lambda t: True) is True


# -- compute(B) after alloc(A) computes A ----------------------------------------------------------


def chain(factor):
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    out = ctx.scale(ctx.sqr(x), factor)
    return gs.Graph(out), x, out


def test_computing_another_graph_than_the_one_allocated_computes_that_other():
    with gs.Scheduler([poisoned("D"), poisoned("HOST")]) as sched:
        (a, xa, out_a), (b, xb, out_b) = chain(2.0), chain(5.0)
        sched.alloc(b)
        xb.set(np.full((2, 4), 3, np.float32))
        sched.alloc(a)
        xa.set(np.full((2, 4), 7, np.float32))
        sched.compute(b)
        np.testing.assert_array_equal(out_b.numpy(), np.full((2, 4), 45, np.float32))
        assert out_a.buffer is None     # rather than a dangling address
        sched.compute(a)
        np.testing.assert_array_equal(out_a.numpy(), np.full((2, 4), 98, np.float32))


# -- host weights are sent on every compute --------------------------------------------------------


@pytest.fixture
def sent_weight():
    """A device op that reads a weight of the host: (scheduler, device, graph, x, w, out)."""
    device, host = devices(2, records=DATA_WRITES)
    w = resident(host, "w", values(8, 8))
    ctx = gs.Context()
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    out = ctx.set_name(ctx.mul_mat(w, x), "out")
    graph = gs.Graph(out)
    with gs.Scheduler((device, host)) as sched:
        sched.set_tensor_backend(out, device)
        yield sched, device, graph, x, w, out


def test_a_host_weight_is_sent_to_a_device_once(sent_weight):
    sched, device, graph, x, w, out = sent_weight
    verified(sched.alloc(graph))
    for _ in range(4):
        x.set(values(2, 8))
        sched.compute(graph)
        np.testing.assert_allclose(out.numpy(), x.numpy() @ w.numpy().T, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in device.received].count("w") == 1
    assert [name for name, _ in device.received].count("x") == 4


@pytest.mark.parametrize("way", ["the tensor", "its backend", "a copy"])
def test_a_host_weight_is_sent_again_after_it_was_set(sent_weight, way):
    sched, device, graph, x, w, out = sent_weight
    sched.alloc(graph)
    x.set(values(2, 8))
    for turn in range(3):
        if way == "the tensor":
            w.set(values(8, 8))
        elif way == "its backend":
            w.backend.set_tensor(w, values(8, 8))
        else:
            gs.tensor_copy(resident(w.backend, "other", values(8, 8)), w)
        sched.compute(graph)
        sched.compute(graph)
        assert [name for name, _ in device.received].count("w") == turn + 1
        np.testing.assert_allclose(out.numpy(), x.numpy() @ w.numpy().T, rtol=1e-5, atol=1e-5)


def test_an_input_that_is_not_set_again_is_not_sent_again(sent_weight):
    sched, device, graph, x, _, _ = sent_weight
    sched.alloc(graph)
    x.set(values(2, 8))
    for _ in range(3):
        sched.compute(graph)
    assert [name for name, _ in device.received].count("x") == 1


def test_a_host_weight_that_a_node_writes_to_is_sent_again():
    device, host = devices(2)
    w = resident(host, "w", values(8, 8))
    ctx = gs.Context()
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
def test_a_write_through_a_view_reaches_a_root_on_another_backend(kind, where, forced):
    op = {"cpy": "CPY", "set_rows": "SET_ROWS", "inplace": "ADD", "set": "SET"}[kind]
    by_caller = forced == "by the caller"
    device, host = poisoned("D"), poisoned("HOST", refuses=() if by_caller else (op,))
    start = values(4, 8)
    ctx = gs.Context()
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
def test_a_copy_of_memory_that_a_node_has_written_to_is_made_on_every_compute(resides, through):
    """The leaf itself was not set again, but what was written into it has changed."""
    device, host = devices(2)
    ctx = gs.Context()
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


# -- the source graph is rewritten, so it can be scheduled once ------------------------------------


def snapshot(graph):
    return [(t, t.op, t.ne, t.nb, t.src, t.view_src, t.view_offs, t.op_params, t.flags, t.name)
            for t in graph.tensors]


def test_the_source_graph_is_unchanged_and_can_be_scheduled_many_times():
    backends = devices(3)
    w = [resident(b, f"w{b.name}", values(8, 8)) for b in backends]
    ctx = gs.Context()
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    h = ctx.mul_mat(w[0], x)
    h = ctx.add(ctx.mul_mat(w[1], h), ctx.scale(h, 2.0))
    out = ctx.reshape(ctx.mul_mat(w[2], h), 16)
    graph = gs.Graph(out)
    before = snapshot(graph)
    x_values = values(2, 8)
    results = []
    with (gs.Scheduler(backends) as first, gs.Scheduler(backends[::-1]) as second,
          gs.Scheduler(backends, "seed") as third):
        for _ in range(2):
            for sched in (first, second, third, first):
                verified(sched.alloc(graph))
                x.set(x_values)
                sched.compute(graph)
                results.append(out.numpy())
                assert snapshot(graph) == before
                sched.reset()
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert graph.nodes[0].buffer is None


# -- more than 256 holes, more than 16 backends: the process dies ----------------------------------


def test_more_than_256_holes():
    """700 tensors alive at once, every other one freed first."""
    ctx = gs.Context()
    x = ctx.tensor("f32", 16, "x", input=True)
    parts = [ctx.scale(x, k + 1.0) for k in range(700)]
    total = parts[0]
    for part in parts[2::2] + parts[1::2]:
        total = ctx.add(total, part)
    graph = gs.Graph(*parts, total)
    with gs.Scheduler([poisoned("CPU")]) as sched:
        verified(sched.alloc(graph))
        x.set(np.ones(16, np.float32))
        sched.compute(graph)
        np.testing.assert_array_equal(total.numpy(), np.full(16, 700 * 701 / 2, np.float32))


def test_more_than_16_backends():
    backends = devices(24)
    ctx = gs.Context()
    x = h = ctx.tensor("f32", 4, "x", input=True)
    for b in backends:
        h = ctx.add(h, resident(b, f"bias {b.name}", np.ones(4, np.float32)))
    with gs.Scheduler(backends) as sched:
        plan = verified(sched.alloc(gs.Graph(h)))
        assert [s.backend for s in plan.splits] == list(backends)
        x.set(np.zeros(4, np.float32))
        sched.compute(plan.graph)
        np.testing.assert_array_equal(h.numpy(), np.full(4, 24, np.float32))


# -- best fit over several chunks takes the last chunk that fits -----------------------------------


def test_best_fit_over_several_chunks_takes_the_best():
    """Two chunks with a hole each, 512 bytes in the first and 2,048 in the second: 256 go to the first."""
    backend = gs.DryBackend("D", alignment=32, max_buffer_size=8192)
    ctx = gs.Context()
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
