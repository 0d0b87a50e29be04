"""Inputs: an unset one is an error; data goes to each backend that reads it; leafs that nodes write to."""

import numpy as np
import pytest
from devices import DATA_WRITES, device, poisoned

import ggml_sched as gs
from ggml_sched.planning.compiler import Bytes


def graph_of(*outputs):
    return gs.Graph(*outputs)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("policy", ["default", "seed"])
def test_an_input_that_was_never_set_is_an_error_that_names_it(ctx, policy, flagged, queued):
    x, y = ctx.tensor("f32", 4, "x", input=flagged), ctx.tensor("f32", 4, "forgotten", input=flagged)
    graph = gs.Graph(ctx.set_output(ctx.add(x, y)))
    with gs.Scheduler([gs.CpuBackend(1)], policy=policy) as scheduler:
        run = scheduler.compute_async if queued else scheduler.compute
        scheduler.alloc(graph)
        x.set(np.ones(4))
        with pytest.raises(gs.HazardError, match="input 'forgotten' .f32 .4, 1, 1, 1.. was never set"):
            run(graph)
        scheduler.synchronize()
        y.set(np.full(4, 2.0))
        run(graph)
        scheduler.synchronize()
        assert graph.nodes[0].numpy().tolist() == [3] * 4


@pytest.mark.parametrize("queued", [False, True])
def test_zero_sets_inputs_that_were_never_set_to_zeros(ctx, queued):
    x, y = ctx.tensor("f32", 4, "x", input=True), ctx.tensor("f32", 4, "y", input=True)
    graph = gs.Graph(ctx.set_output(ctx.add(x, y)))
    backend = gs.CpuBackend(1)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        y.buffer.clear(0xFF)
        x.set(np.ones(4))
        (scheduler.compute_async if queued else scheduler.compute)(graph, zero=True)
        scheduler.synchronize()
        assert graph.nodes[0].numpy().tolist() == [1] * 4 and y.numpy().tolist() == [0] * 4
    with gs.Scheduler([backend], zero=True) as scheduler:
        other = gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "z")))
        scheduler.compute(other)
        assert other.nodes[0].numpy().tolist() == [0] * 4
        with pytest.raises(gs.HazardError, match="'w'"):
            scheduler.compute(gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "w"))), zero=False)


def test_a_view_that_was_set_sets_its_root(ctx):
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    row = ctx.view_1d(x, 4, x.nb[1])
    graph = gs.Graph(ctx.set_output(ctx.sqr(x)), row)
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        scheduler.alloc(graph)
        row.set(np.full(4, 3.0))
        scheduler.compute(graph)
        assert graph.nodes[0].numpy().tolist() == [[0] * 4, [9] * 4]


def test_what_nothing_reads_need_not_be_set(ctx):
    """A leaf that a node writes to first, an empty one, and one that is only viewed."""
    x, out = ctx.tensor("f32", 4, "x", input=True), ctx.tensor("f32", 4, "out")
    nothing, seen = ctx.tensor("f32", (4, 0), "nothing"), ctx.tensor("f32", 4, "seen")
    written = ctx.cpy(x, out)
    graph = gs.Graph(ctx.sqr(written), ctx.sqr(nothing), ctx.view_1d(seen, 2))
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.full(4, 3.0))
        scheduler.compute(graph)
        assert graph.nodes[1].numpy().tolist() == [9] * 4


def test_what_is_read_before_it_is_written_must_be_set(ctx):
    x, acc = ctx.tensor("f32", 4, "x", input=True), ctx.tensor("f32", 4, "acc")
    graph = gs.Graph(ctx.cpy(ctx.add(acc, x), acc))
    other = gs.Graph(ctx.add(acc, x, inplace=True))
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        for each in (graph, other):
            scheduler.alloc(each)
            x.set(np.ones(4))
            with pytest.raises(gs.HazardError, match="'acc'"):
                scheduler.compute(each)


def half(ctx, a, x):
    return ctx.cpy(a, ctx.view_2d(x, 4, 2, 16, 0))


def rows(ctx, a, x):
    ids = ctx.tensor("i64", 2, "ids", input=True)
    return ctx.set_rows(x, a, ids)


def moved(ctx, a, x):
    """One half of x to the other."""
    return ctx.cpy(ctx.view_2d(x, 4, 2, 16, 0), ctx.view_2d(x, 4, 2, 16, 32))


def itself(ctx, a, x):
    return ctx.cpy(x, x)


@pytest.mark.parametrize("reads", ["afterwards", "by the caller"])
@pytest.mark.parametrize("write", [half, rows, moved, itself])
def test_a_write_to_a_part_leaves_the_rest_to_be_set(write, reads):
    """The rest would hold stale memory."""
    ctx, backend = gs.Context(), poisoned()
    x, a = ctx.tensor("f32", (4, 4), "x", input=True), ctx.tensor("f32", (4, 2), "a", input=True)
    ends = [write(ctx, a, x)]
    if reads == "afterwards":
        ends.append(ctx.set_output(ctx.scale(x, 2.0)))
    graph = gs.Graph(*ends)
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph).verify()
        for t in graph.leafs:
            if t is not x:
                t.set(np.arange(t.n_elements))
        for run in (scheduler.compute, scheduler.compute_async):
            with pytest.raises(gs.HazardError, match="input 'x'.*never set"):
                run(graph)
        scheduler.compute(graph, zero=True)
        expected = np.arange(8).reshape(2, 4) if write in (half, rows) else np.zeros((2, 4))
        assert np.array_equal(x.numpy(), np.concatenate([expected, np.zeros((2, 4))]))
        if reads == "afterwards":
            assert np.array_equal(ends[1].numpy(), 2 * x.numpy())


@pytest.mark.parametrize("complete", [True, False])
def test_writes_to_all_parts_are_enough(complete):
    """Columns, of which none is contiguous; the second one's last row alone leaves bytes between."""
    ctx, backend = gs.Context(), poisoned()
    x = ctx.tensor("f32", (4, 4), "x", input=True)
    parts = [ctx.tensor("f32", (2, 4), "left", input=True), ctx.tensor("f32", (2, 4 if complete else 1), "right")]
    places = [ctx.view_2d(x, 2, 4, 16, 0), ctx.view_2d(x, 2, 4, 16, 8) if complete else ctx.view_1d(x, 2, 56)]
    written = [ctx.cpy(part, place) for part, place in zip(parts, places, strict=True)]
    graph = gs.Graph(*written, ctx.set_output(ctx.scale(x, 2.0)))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph).verify()
        for k, part in enumerate(parts):
            part.set(np.full(part.n_elements, k + 1.0))
        if not complete:
            with pytest.raises(gs.HazardError, match="input 'x'"):
                scheduler.compute(graph)
            return
        scheduler.compute(graph)
        assert x.numpy().tolist() == [[1, 1, 2, 2]] * 4


def test_bytes_cover_the_ranges_that_were_added():
    rng = np.random.default_rng(0)
    for _ in range(200):
        known, slow = Bytes(), np.zeros(64, bool)
        for _ in range(rng.integers(6)):
            starts, size = rng.integers(0, 56, rng.integers(4)), int(rng.integers(0, 9))
            known.add(starts, size)
            for start in starts:
                slow[start : start + size] = True
        for start in range(0, 64, 3):
            for stop in range(start, 64, 5):
                assert known.cover(start, stop) is bool(slow[start:stop].all())


def test_an_input_that_was_never_set_cannot_be_read():
    ctx, backend = gs.Context(), poisoned()
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    row = ctx.view_1d(x, 4, 16)
    column = ctx.view_2d(x, 1, 2, 16, 0)
    graph = gs.Graph(ctx.sqr(x), ctx.scale(row, 2.0), ctx.scale(ctx.cont(column), 2.0))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        for t in (x, row, column):
            with pytest.raises(gs.HazardError, match="'x'.*never set"):
                t.numpy()
        column.set([[1.0], [2.0]])
        assert x.numpy().tolist() == [[1, 0, 0, 0], [2, 0, 0, 0]] and row.numpy().tolist() == [2, 0, 0, 0]


def test_a_dry_backend_misses_nothing(ctx):
    graph = gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "x", input=True)))
    with gs.Scheduler([gs.DryBackend("A", accepts_computes=True), gs.DryBackend("B")]) as scheduler:
        assert scheduler.compute(graph)


# -- destinations -----------------------------------------------------------------------------------


def test_an_input_goes_to_each_backend_that_reads_it_and_to_no_other(ctx):
    a, b, host = (device(name=name, records=DATA_WRITES) for name in ("a", "b", "host"))
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    row = ctx.view_1d(x, 4, x.nb[1])
    one, two = ctx.sqr(x), ctx.scale(row, 2.0)
    graph = gs.Graph(ctx.set_output(one), ctx.set_output(two))
    with gs.Scheduler([a, b, host]) as scheduler:
        scheduler.set_tensor_backend(one, a)
        scheduler.set_tensor_backend(two, b)
        plan = scheduler.alloc(graph)
        plan.verify()
        assert plan.backend_of(x) is host
        x.set(np.arange(8).reshape(2, 4))
        scheduler.compute(graph)
        assert a.received == [("x", 32)] and b.received == [("x (view)", 16)] and host.received == []
        assert one.numpy().tolist() == [[0, 1, 4, 9], [16, 25, 36, 49]] and two.numpy().tolist() == [8, 10, 12, 14]
        assert x.numpy().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- leafs that the graph writes to -----------------------------------------------------------------------


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_leaf_that_a_node_wrote_to_can_be_read_as_its_writer_can(ctx, policy, output):
    """Unless the leaf is an output, later nodes use its memory."""
    a, x = ctx.tensor("f32", 64, "a", input=True), ctx.tensor("f32", 64, "x")
    if output:
        ctx.set_output(x)
    write = ctx.cpy(a, x)
    t = ctx.scale(write, 2.0)
    for _ in range(4):
        t = ctx.add(ctx.neg(t), ctx.sqr(t))
    graph = gs.Graph(ctx.set_output(t))
    with gs.Scheduler([gs.CpuBackend(1)], policy=policy) as scheduler:
        plan = scheduler.alloc(graph)
        a.set(np.arange(64))
        scheduler.compute(graph)
        assert plan.data.is_overwritten(graph.id_of(write)) is not output
        if output:
            assert x.numpy().tolist() == write.numpy().tolist() == list(range(64))
            return
        for tensor in (write, x, ctx.view_1d(x, 4)):
            with pytest.raises(gs.HazardError, match="is not kept"):
                tensor.numpy()
        x.set(np.ones(64))
        assert x.numpy().tolist() == [1] * 64       # what the caller sets waits on the host


def test_a_leaf_that_was_set_and_written_gives_what_was_written(ctx):
    """What the caller set waits on the host for the next compute; a view of the writing node is no view of that."""
    a, x = ctx.tensor("f32", 8, "a", input=True), ctx.set_output(ctx.tensor("f32", 8, "x", input=True))
    write = ctx.set_output(ctx.cpy(ctx.add(a, x), x))
    part = ctx.view_1d(write, 4)
    graph = gs.Graph(write, part)
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        scheduler.alloc(graph)
        a.set(np.arange(8))
        x.set(np.ones(8))
        scheduler.compute(graph)
        assert x.numpy().tolist() == write.numpy().tolist() == list(range(1, 9))
        part.set(np.full(4, 50))
        assert x.numpy().tolist() == [50, 50, 50, 50, 5, 6, 7, 8]
        scheduler.compute(graph)
        assert x.numpy().tolist() == list(range(1, 9))


# -- memory closed by its owner -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["default", "seed"])
@pytest.mark.parametrize("computed", [False, True])
def test_a_graph_whose_arena_was_closed_is_allocated_again(ctx, policy, computed):
    backends = [gs.CpuBackend(1, name) for name in "ab"]
    x = ctx.tensor("f32", 4, "x", input=True)
    one = ctx.sqr(x)
    two = ctx.set_output(ctx.add(one, x))
    graph, other = gs.Graph(two), gs.Graph(ctx.neg(x))
    with gs.Scheduler(backends, policy=policy) as scheduler:
        scheduler.set_tensor_backend(one, backends[1])
        for each in (graph, other):
            scheduler.alloc(each)
        scheduler.alloc(graph)
        x.set(np.full(4, 3.0))
        if computed:
            scheduler.compute(graph)
        for backend in backends:
            for t in (one, two, x):
                if t.backend is backend:
                    t.buffer.close()
                    break
            scheduler.alloc(graph)
            x.set(np.full(4, 3.0))
            scheduler.compute(graph)
            assert two.numpy().tolist() == [12] * 4
        scheduler.compute(other)
        assert other.nodes[0].numpy().tolist() == [-3] * 4
