"""Guards of the planner that only this file tests: each test fails when its guard is removed."""

import numpy as np
import pytest
from devices import device, poisoned, resident, resident_tensor

import ggml_sched as gs

F32 = np.float32


def experts_case(ids_on_host: bool, second_reader: bool, n_mixtures: int = 3):
    """Mixtures with experts on the host, which the device offloads; three are too much to keep.

    Ids are computed on the device, in the split of the first mixture, or on the host, before it.
    """
    device, host = poisoned("device", offloads=("MUL_MAT_ID",)), poisoned("host")
    rng = np.random.default_rng(2)
    values = [rng.integers(-2, 3, (4, 8, 8)).astype(F32) for _ in range(n_mixtures)]
    experts = [resident(host, f"e{k}", v) for k, v in enumerate(values)]
    ctx = gs.Context()
    x = ctx.tensor("f32", (8, 1, 2), "x", input=True)
    scores = ctx.sqr(ctx.cont(ctx.view_2d(x, 4, 2, x.nb[2])))
    ids = ctx.top_k(scores, 1)
    value = x
    for e in experts:
        value = ctx.mul_mat_id(e, value, ids)
    # All experts of the first weight, by a node on the device.
    summed = ctx.set_output(ctx.sum_rows(ctx.reshape(ctx.scale(experts[0], 2.0), 256))) if second_reader else None
    graph = gs.Graph(ctx.set_output(value), *[summed] * second_reader)
    scheduler = gs.Scheduler([device, host])
    for node in graph.nodes:
        if node.op != "MUL_MAT_ID":
            scheduler.set_tensor_backend(node, host if ids_on_host and node.op in ("SQR", "CONT", "TOP_K") else device)

    def expected(given):
        rows = given[:, 0]
        picks = np.argmax(rows[:, :4] ** 2, axis=1)
        for v in values:
            rows = np.stack([v[i] @ row for i, row in zip(picks, rows, strict=True)])
        return rows

    return scheduler, graph, x, (value, expected), (summed, 2 * values[0].sum(dtype=np.float64))


@pytest.mark.parametrize("second_reader", [False, True])
@pytest.mark.parametrize("ids_on_host", [False, True])
def test_only_used_experts_travel_where_that_is_enough(ids_on_host, second_reader):
    """Not when another node reads the weight, nor before the ids are there."""
    scheduler, graph, x, (mixed, expected), (summed, total) = experts_case(ids_on_host, second_reader)
    with scheduler:
        plan = scheduler.alloc(graph)
        plan.verify()
        partial = {graph.tensors[s.tensor].name for s in plan.program.steps if s.kind == "copy experts"}
        late = {graph.tensors[s.tensor].name for s in plan.program.steps if s.kind == "copy"} & {"e0", "e1", "e2"}
        assert ("e0" in partial) is (ids_on_host and not second_reader) and partial | late == {"e0", "e1", "e2"}
        rng = np.random.default_rng(3)
        for _ in range(4):
            given = rng.integers(-3, 4, (2, 1, 8)).astype(F32)
            given[:, 0, :4] += np.arange(4) / 8        # no ties
            x.set(given)
            scheduler.compute(graph)
            assert np.array_equal(mixed.numpy(), expected(given).reshape(2, 1, 8))
            if second_reader:
                assert summed.numpy().item() == pytest.approx(total)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("layout", ["dense", "interleaved", "padded", "overlapping"])
def test_experts_travel_one_by_one_where_each_has_bytes_of_its_own(layout, tokens, kind):
    host, device = poisoned("host"), poisoned("device", offloads=("MUL_MAT_ID",))
    shape = {"dense": (32, 3, 5), "interleaved": (32, 5, 3), "padded": (32, 5, 5),
             "overlapping": (32, 11)}[layout]
    home, ctx, rng = gs.Context(), gs.Context(), np.random.default_rng(0)
    stored = [home.tensor(kind, shape, f"e{k}") for k in range(3)]
    host.alloc_tensors(home)
    x = ctx.tensor("f32", (32, 1, tokens), "x", input=True)
    ids = ctx.tensor("i32", (2, tokens), "ids", input=True)
    results = []
    for weight in stored:
        weight.set(rng.standard_normal(shape[::-1]))
        experts = {"dense": lambda w: w, "interleaved": lambda w: ctx.permute(w, 0, 2, 1, 3),
                   "padded": lambda w: ctx.view_3d(w, 32, 3, 5, w.nb[1], w.nb[2], 0),
                   # The last row of an expert is the first row of the next one.
                   "overlapping": lambda w: ctx.view_3d(w, 32, 3, 5, w.nb[1], 2 * w.nb[1], 0)}[layout](weight)
        results.append(ctx.set_output(ctx.mul_mat_id(experts, x, ids)))
    # Needs memory afterwards, also where the results are empty: nothing stays in the places of the weights.
    busy = [ctx.tensor("f32", (32, 64), "busy", input=True)]
    for _ in range(3):
        busy.append(ctx.sqr(busy[-1]))
    graph, found = gs.Graph(*results, *busy[-1:]), []
    given = rng.standard_normal((tokens, 1, 32)), rng.integers(0, 5, (tokens, 2))
    for backends in ([host], [device, host]):
        with gs.Scheduler(backends, policy="seed") as scheduler:
            for node in [*results, *busy]:
                scheduler.set_tensor_backend(node, backends[0])
            plan = scheduler.alloc(graph)
            plan.verify()
            x.set(given[0])
            ids.set(given[1])
            scheduler.compute(graph, zero=True)
            found.append([t.numpy() for t in results])
    kinds = {step.kind for step in plan.program.steps}
    assert ("copy experts" in kinds) is (layout in ("dense", "padded"))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_kept_experts_travel_once_and_whole():
    scheduler, graph, x, (mixed, expected), _ = experts_case(True, False, 2)
    with scheduler:
        plan = scheduler.alloc(graph)
        assert sum(plan.data.kept) == 2
        copies = {graph.tensors[s.tensor].name: (s.kind, s.if_changed) for s in plan.program.steps if "copy" in s.kind}
        assert copies["e0"] == copies["e1"] == ("copy", True)
        for start in (0, 3):
            given = (np.arange(16, dtype=F32).reshape(2, 1, 8) + start) % 5
            x.set(given)
            scheduler.compute(graph)
            assert np.array_equal(mixed.numpy(), expected(given).reshape(2, 1, 8))


def test_ids_that_a_node_writes_over_are_those_of_their_time(ctx):
    """Experts copied before the node runs would be those of the previous compute's ids."""
    device, host = poisoned("device", offloads=("MUL_MAT_ID",)), poisoned("host")
    rng = np.random.default_rng(4)
    values = [rng.integers(-2, 3, (3, 8, 8)).astype(F32) for _ in range(3)]
    experts = [resident(host, f"e{k}", v) for k, v in enumerate(values)]
    x = ctx.tensor("f32", (8, 1, 1), "x", input=True)
    fresh, ids = ctx.tensor("i32", (1, 1), "fresh", input=True), ctx.tensor("i32", (1, 1), "ids", input=True)
    written = ctx.cpy(fresh, ids)
    mixed = x
    for e in experts:
        mixed = ctx.mul_mat_id(e, mixed, written)
    graph = gs.Graph(mixed)
    with gs.Scheduler([device, host]) as scheduler:
        for t in (written, ids):
            scheduler.set_tensor_backend(t, device)
        plan = scheduler.alloc(graph)
        plan.verify()
        assert not all(s.if_changed for s in plan.program.steps if s.kind == "copy")
        x.set(np.ones(8, F32))
        ids.set(np.int32([0]))
        for which in (1, 2, 0, 2):
            fresh.set(np.int32([which]))
            scheduler.compute(graph)
            expected = np.ones(8, F32)
            for v in values:
                expected = v[which] @ expected
            assert np.array_equal(mixed.numpy().reshape(8), expected)


@pytest.mark.parametrize("takes_data", [False, True])
def test_copies_are_pushed_to_who_takes_data_while_it_computes(ctx, takes_data):
    """A backend that takes no data while it computes copies in its own turn: its queue must not wait for others."""
    a, b = poisoned("a"), poisoned("b")
    b.concurrent_copies = takes_data
    x = ctx.tensor("f32", 8, "x", input=True)
    first = ctx.sqr(x)
    second = ctx.set_output(ctx.neg(first))
    graph = gs.Graph(second)
    with gs.Scheduler([a, b], copies=2) as scheduler:
        scheduler.set_tensor_backend(first, a)
        scheduler.set_tensor_backend(second, b)
        (copy,) = [s for s in scheduler.plan(graph).program.steps if s.kind == "copy"]
        assert len(copy.locations) == 2 and scheduler.backends[copy.backend] is (a if takes_data else b)


def test_a_copy_is_made_again_after_a_node_wrote_to_its_source():
    """In one compute: the device reads a cache of the host before and after the host writes to it."""
    device, host = poisoned("device"), poisoned("host")
    for usage in ("any", "weights"):
        cache = resident(host, "cache", np.ones((2, 4), F32), usage)
        ctx = gs.Context()
        x = ctx.tensor("f32", (4, 2), "x", input=True)
        before = ctx.set_output(ctx.add(cache, x))
        write = ctx.cpy(before, cache)
        after = ctx.set_output(ctx.mul(cache, x))
        graph = gs.Graph(before, write, after)
        with gs.Scheduler([device, host]) as scheduler:
            for node, backend in ((before, device), (write, host), (after, device)):
                scheduler.set_tensor_backend(node, backend)
            scheduler.alloc(graph).verify()
            total = 1
            for k in (2, 3, 5):
                x.set(np.full((2, 4), k, F32))
                scheduler.compute(graph)
                total += k
                assert (before.numpy() == total).all() and (after.numpy() == total * k).all()


def test_what_does_not_fit_even_streamed_is_refused(ctx):
    device, host = gs.DryBackend("device"), gs.DryBackend("host")
    device.offload_op = lambda node: True
    value = ctx.tensor("f32", (64, 4), "x", input=True)
    for _ in range(2):
        value = ctx.mul_mat(resident_tensor(host, (64, 64)), value)
    graph = gs.Graph(value)
    kept = gs.Scheduler([device, host]).plan(graph)
    assert any(kept.data.kept)
    needed = kept.buffer_sizes[0]
    with gs.Scheduler([device, host], budgets={device: needed - 32}) as scheduler:
        streamed = scheduler.plan(graph)
        assert not any(streamed.data.kept) and streamed.buffer_sizes[0] < needed
    with (gs.Scheduler([device, host], budgets={device: streamed.buffer_sizes[0] - 32}) as scheduler,
          pytest.raises(gs.OutOfMemory) as caught):
        scheduler.plan(graph)
    # The error's number of bytes is that of the plan that keeps its weights.
    assert (caught.value.needed, caught.value.available) == (needed, streamed.buffer_sizes[0] - 32)


def test_what_a_buffer_is_for_tells_plans_apart():
    """Ops follow weights; other residents they may leave where they are."""
    a, b = gs.DryBackend("a"), gs.DryBackend("b")

    def build(usage):
        ctx = gs.Context()
        first = ctx.mul_mat(resident_tensor(b, (8, 8), usage=usage), ctx.tensor("f32", 8, "x"))
        return gs.Graph(first), first

    with gs.Scheduler([a, b], policy="default") as scheduler:
        graphs = {usage: build(usage) for usage in ("weights", "any")}
        assert graphs["weights"][0].fingerprint == graphs["any"][0].fingerprint
        rules = {usage: scheduler.plan(graph).data.rule(graph.id_of(first))
                 for usage, (graph, first) in graphs.items()}
        assert rules["weights"] == "weight" != rules["any"]


def test_a_reserved_plan_is_not_used_where_reuse_would_leave_its_memory():
    """In the reserved plan a node reuses the front of a tensor, and others reuse its tail; in this graph the node would
    reuse its end."""

    def build(row):
        ctx = gs.Context()
        x = ctx.tensor("f32", (64, 1), "x", input=True)
        large = ctx.repeat(x, ctx.tensor("f32", (64, 16), "like"))
        taker = ctx.relu(ctx.view_2d(large, 64, 4, large.nb[1], row * large.nb[1]))
        room = ctx.repeat(ctx.sqr(ctx.view_1d(taker, 64)), ctx.tensor("f32", (64, 12), "room"))
        last = ctx.add(ctx.repeat(ctx.sum(room), taker), taker)
        return gs.Graph(ctx.set_output(last)), x, last

    backend = gs.CpuBackend(1)
    with gs.Scheduler([backend]) as scheduler:
        graph, _, _ = build(0)
        scheduler.reserve(graph)
        front = scheduler.plan(graph)
        for row in (0, 4, 8, 12):
            graph, x, last = build(row)
            plan = scheduler.alloc(graph)
            plan.verify()
            assert row or plan.methods == front.methods or plan.methods == ("replayed",)
            x.set(np.full(64, 2.0))
            scheduler.compute(graph)
            alone = build(row)
            with gs.Scheduler([backend]) as other:
                other.alloc(alone[0])
                alone[1].set(np.full(64, 2.0))
                other.compute(alone[0])
                assert np.array_equal(last.numpy(), alone[2].numpy())


def test_only_weights_are_kept_where_they_were_copied_to():
    """A cache that is read elsewhere is written by other graphs: its copy gives its memory back."""
    a, b = gs.DryBackend("a"), gs.DryBackend("b")
    for usage in ("weights", "any"):
        ctx, w = gs.Context(), resident_tensor(b, (8, 8), usage=usage)
        graph = gs.Graph(ctx.sqr(ctx.add(w, ctx.tensor("f32", (8, 8), "x", input=True))))
        with gs.Scheduler([a, b]) as scheduler:
            for node in graph.nodes:
                scheduler.set_tensor_backend(node, a)
            plan = scheduler.plan(graph)
            plan.verify()
            assert sum(plan.data.kept) == (usage == "weights")


@pytest.mark.parametrize("shared", [False, True])
def test_a_node_is_not_upgraded_against_the_callers_wish_nor_where_memory_is_not_shared(ctx, shared):
    """A node without sources could be computed anywhere."""
    slow = device(gs.DryBackend, "slow", reads=["fast"])
    fast = device(gs.DryBackend, "fast", reads=["slow"] if shared else [])
    product = ctx.mul_mat(resident_tensor(slow, (8, 8)), ctx.tensor("f32", 8, "x", input=True))
    count = ctx.arange(0, 8, 1)
    graph = gs.Graph(product, count)
    with gs.Scheduler([fast, slow]) as scheduler:
        if shared:
            assert scheduler.plan(graph).backend_of(count) is fast
            scheduler.set_tensor_backend(count, slow)
        plan = scheduler.plan(graph)
        plan.verify()
        assert plan.backend_of(count) is slow


def test_a_plan_depends_on_the_largest_buffer_that_a_backend_allows(ctx):
    backend = gs.DryBackend("a")
    x = ctx.tensor("f32", 64, "x", input=True)
    graph = gs.Graph(ctx.set_output(ctx.sqr(x)), ctx.set_output(ctx.neg(x)))
    with gs.Scheduler([backend]) as scheduler:
        assert len(scheduler.plan(graph).chunk_sizes[0]) == 1
        backend.max_buffer_size = 512
        assert len(scheduler.plan(graph).chunk_sizes[0]) > 1


def test_work_memory_of_kernels_is_counted_where_memory_is_short():
    """Kernels need 100 bytes beside the arena for each node of the longest split, and keep what they had."""
    backend = device(gs.DryBackend, "W", memory=4096, answers={"work_size": lambda _inherited, nodes: 100 * len(nodes)})
    other, ctx = gs.DryBackend("other"), gs.Context()
    x = ctx.tensor("f32", 64, "x", input=True)
    nodes = [ctx.sqr(x)]
    for _ in range(4):
        nodes.append(ctx.neg(nodes[-1]))
    graph = gs.Graph(nodes[-1])
    with gs.Scheduler([backend, other]) as scheduler:
        for node in nodes[:2]:
            scheduler.set_tensor_backend(node, backend)
        for node in nodes[2:3]:
            scheduler.set_tensor_backend(node, other)
        for node in nodes[3:]:
            scheduler.set_tensor_backend(node, backend)
        plan = scheduler.plan(graph)
        assert plan.work_sizes == (200, 0) and "work memory in bytes: 200 on W" in str(plan)
        arena = plan.buffer_sizes[0]
        backend.memory = arena + 199
        with pytest.raises(gs.OutOfMemory, match=f"the arena needs {arena} bytes and the kernels 200, {arena + 199} "
                                                 "are available, 1 are missing"):
            scheduler.alloc(graph)
        assert backend.used == 0
        backend.work_held = 1
        scheduler.alloc(graph)
    backend.memory, backend.work_held = None, 0
    with gs.Scheduler([backend]) as scheduler:
        arena = scheduler.plan(graph).buffer_sizes[0]
    for budget, fits in ((arena + 500, True), (arena + 499, False)):
        with gs.Scheduler([backend], budgets={backend: budget}) as scheduler:
            if fits:
                assert scheduler.plan(graph).work_sizes == (500,)
                continue
            with pytest.raises(gs.OutOfMemory, match="the kernels 500.*1 are missing"):
                scheduler.plan(graph)


@pytest.mark.parametrize("n, rest", [(8, ""), (9, "1 more"), (10, "2 more")])
def test_eight_of_the_tensors_at_the_peak_are_named_and_the_others_counted(n, rest):
    backend, ctx = gs.DryBackend("A", memory=1024), gs.Context()
    values = [ctx.tensor("f32", 64, f"v{k}", input=True) for k in range(n - 1)]
    total = values[0]
    for value in values[1:]:
        total = ctx.add(total, value)       # the first sum is alive, too: memory of inputs is not reused in place
    with gs.Scheduler([backend]) as scheduler, pytest.raises(gs.OutOfMemory) as failed:
        scheduler.alloc(gs.Graph(total))
    named, _, others = str(failed.value).partition("alive at the peak: ")[2].partition(" and ")
    assert len(named.split(", ")) == 8 and named.startswith("'v0' 256, 'v1' 256") and others == rest
