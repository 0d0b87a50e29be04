"""Memory rules: inputs and outputs, chunked arenas, budgets, zero sizes, buffers of a whole context."""

import numpy as np
import pytest
from devices import DATA_WRITES, device, devices, poisoned, resident, verified
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched.execution.arenas import SchedulerArenas

F32 = np.float32


def ranges(plan):
    """(tensor, backend, chunk, start, stop, birth, death) of everything with memory of its own in the plan."""
    data, graph = plan.data, plan.graph
    for i, t in enumerate(graph.tensors):
        if t.view_src is None and data.lifetime(i) is not None and data.root(i) < 0:
            birth, death = data.lifetime(i)
            yield t, plan.backend_of(t), plan.chunk_of(t), data.offset(i), data.offset(i) + data.size(i), birth, death


def last_use(plan, leaf):
    """Position in the plan's sequence of the last node, or copy to another backend, that reads the leaf or a view."""
    data, graph = plan.data, plan.graph
    mine = {i for i, t in enumerate(graph.tensors) if t is leaf or t.view_src is leaf}
    return max((k for k, i in enumerate(data.sequence) if mine & {*data.sources(i)}), default=-1)


# -- flags ----------------------------------------


@quick(75)
@given(recipes(24), st.integers(1, 3))
def test_inputs_overlap_nothing_before_their_last_use(recipe, n_backends):
    """From the start of the compute: they are set before it."""
    built = Built(recipe, n_backends)
    backends = [gs.DryBackend(f"D{k}") for k in range(n_backends)]
    for ctx, backend in zip(built.homes, backends, strict=True):
        backend.alloc_tensors(ctx)
    with gs.Scheduler(backends) as sched:
        plan = verified(sched.plan(built.graph))
    taken = list(ranges(plan))
    for t, backend, chunk, start, stop, birth, _ in taken:
        if "input" not in t.flags or start == stop:
            continue
        assert birth == 0 and not plan.data.is_late(plan.index_of(t))
        until = last_use(plan, t)
        for other, where, piece, low, high, born, _ in taken:
            if other is not t and (where, piece) == (backend, chunk) and low < stop and start < high:
                assert born > until, (t, other)


@pytest.mark.parametrize("policy", ["default", "seed"])
@quick(50)
@given(recipe=recipes(24))
def test_outputs_are_never_overwritten(policy, recipe):
    built = Built(recipe)
    backend = gs.DryBackend("D")
    backend.alloc_tensors(built.homes[0])
    with gs.Scheduler([backend], policy) as sched:
        plan = verified(sched.plan(built.graph))
    taken = list(ranges(plan))
    for t in built.graph.tensors:
        start, i = plan.offset_of(t), plan.index_of(t)
        if "output" not in t.flags or start is None or not t.nbytes or t.op == "NONE":
            continue
        position = plan.data.sequence.index(i)
        root = t
        while plan.data.root(plan.index_of(root)) >= 0:
            root = built.graph.tensors[plan.data.root(plan.index_of(root))]
        for other, _, _, low, high, born, _ in taken:
            if other is not root and low < start + t.nbytes and start < high:
                assert born <= position, (t, other)
        assert not any(plan.data.is_inplace(k) and plan.data.root(k) == i for k in range(plan.data.n_tensors))


# -- several buffers for an arena ----------------------------------------


class Chunks:
    """A slow model: best fit over the free ranges of all chunks; the last range of all only when no other fits."""

    def __init__(self, largest, alignment):
        self.largest = largest - largest % alignment
        self.alignment = alignment
        self.held = {}
        self.n = 1

    def holes(self):
        found = []
        for chunk in range(self.n):
            at = 0
            for start, stop in sorted((s, e) for c, s, e in self.held.values() if c == chunk):
                if at < start:
                    found.append((chunk, at, start - at))
                at = stop
            if at < self.largest:
                found.append((chunk, at, self.largest - at))
        return found

    def take(self, name, size):
        size = -(-size // self.alignment) * self.alignment
        holes = self.holes()
        fits = [(hole[2], -k) for k, hole in enumerate(holes[:-1]) if hole[2] >= size]
        if fits:
            chunk, start, _ = holes[-min(fits)[1]]
        elif holes and holes[-1][2] >= size:
            chunk, start, _ = holes[-1]
        else:
            chunk, start, self.n = self.n, 0, self.n + 1
        self.held[name] = chunk, start, start + size
        return chunk, start

    def give(self, name):
        del self.held[name]


@quick(75)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=2, max_size=40),
       st.sampled_from([32, 64]), st.integers(1, 6))
def test_best_fit_over_all_chunks_as_a_slow_model_does_it(blocks, alignment, tight):
    """Each tensor is computed, and read once some steps later; its chunk and offset are those of the model."""
    largest = 40 * 32 * tight
    backend = device(gs.DryBackend, "D", reads=["HOME"], alignment=alignment, max_buffer_size=largest)
    ctx, home = gs.Context(), gs.Context()
    one = home.tensor("f32", 1, "one")
    likes = {units: home.tensor("f32", units * 8) for units, _ in blocks}
    gs.DryBackend("HOME").alloc_tensors(home)
    made, order = [], []
    for k, (units, delay) in enumerate(blocks):
        t = ctx.set_name(ctx.repeat(one, likes[units]), f"t{k}")
        made.append((t, k + delay))
        order.append(t)
        for old, due in made:
            if due == k:
                order.append(ctx.sum(old))
                ctx.set_output(order[-1])
    graph = gs.Graph(*order)
    with gs.Scheduler([backend], policy="seed") as sched:
        plan = sched.plan(graph)
    model = Chunks(largest, alignment)
    due = dict(made)
    for t in graph.nodes:
        assert model.take(t, t.nbytes) == (plan.chunk_of(t), plan.offset_of(t)), (t, plan.chunk_sizes)
        if t.op == "SUM" and t.src[0] in due:
            model.give(t.src[0])
    assert all(size <= largest for size in plan.chunk_sizes[0])


@quick(50)
@given(recipes(30), st.sampled_from([1024, 2048, 4096]), st.sampled_from(["default", "seed"]))
def test_every_allocation_lies_within_one_chunk(recipe, largest, policy):
    built = Built(recipe)
    home = gs.DryBackend("HOME")
    home.alloc_tensors(built.homes[0])
    backend = device(gs.DryBackend, "D", reads=["HOME"], max_buffer_size=largest)
    with gs.Scheduler([backend], policy) as sched:
        try:
            plan = sched.plan(built.graph)
        except gs.OutOfMemory as failed:
            assert failed.needed > failed.available == largest and failed.backend == "D"
            assert any(t.nbytes > largest for t in built.graph.tensors)
            return
        plan.verify()
        sizes = plan.chunk_sizes[0]
        assert all(size <= largest for size in sizes) and sum(sizes) == plan.buffer_sizes[0]
        for t in built.graph.tensors:
            if plan.offset_of(t) is not None:
                assert plan.offset_of(t) >= 0 and plan.offset_of(t) + t.nbytes <= sizes[plan.chunk_of(t)]
        sched.alloc(built.graph)
        assert sched.buffer_size(backend) == plan.buffer_sizes[0]


def wide(n, size=1024):
    """n tensors of `size` floats alive at once, then their sum: (graph, x, out)."""
    ctx = gs.Context()
    x = ctx.tensor("f32", size, "x", input=True)
    parts = [ctx.set_name(ctx.scale(x, k + 1.0), f"part {k}") for k in range(n)]
    total = parts[0]
    for part in parts[1:]:
        total = ctx.add(total, part)
    return gs.Graph(*parts, total), x, ctx.set_name(total, "total")


@pytest.mark.parametrize("policy", ["default", "seed"])
@pytest.mark.parametrize("largest", [4096, 5000, 3 * 4096, 10**6, None])
def test_computing_in_several_buffers_is_bit_equal(largest, policy):
    graph, x, out = wide(7)
    backend = poisoned("CPU", attributes={"max_buffer_size": largest})
    with gs.Scheduler([backend], policy) as sched:
        plan = verified(sched.alloc(graph))
        assert len(plan.chunk_sizes[0]) == {4096: 8, 5000: 8, 3 * 4096: 3}.get(largest, 1)
        for scale in (1, 0.1):
            x.set(np.arange(1024, dtype=F32) * F32(scale))
            sched.compute(graph)
            expected = np.zeros(1024, F32)
            for k in range(7):
                part = x.numpy() * F32(k + 1)
                expected = part if k == 0 else expected + part
            np.testing.assert_array_equal(out.numpy(), expected)
        used = backend.used
        assert used == sum(plan.chunk_sizes[0])
    assert backend.used == 0


def test_chunks_grow_and_serve_smaller_graphs():
    backend = poisoned("CPU", attributes={"max_buffer_size": 3 * 4096})
    big, small = wide(9), wide(2, 64)
    with gs.Scheduler([backend]) as sched:
        for graph, x, out in (small, big, small, big):
            verified(sched.alloc(graph))
            x.set(np.ones(x.ne[0], F32))
            sched.compute(graph)
            n = (len(graph) + 1) // 2
            np.testing.assert_array_equal(out.numpy(), np.full(x.ne[0], n * (n + 1) / 2, F32))


# -- budgets ----------------------------------------


def limited(kind, limit):
    """(backend, scheduler options) whose arena may take `limit` bytes."""
    if kind == "budgets":
        backend = gs.DryBackend("D", accepts_computes=True)
        return backend, {"budgets": {backend: limit}}
    if kind == "dry memory":
        return gs.DryBackend("D", memory=limit, accepts_computes=True), {}
    return poisoned("D", memory=limit), {}


KINDS = ["budgets", "dry memory", "cpu memory"]


@pytest.mark.parametrize("policy", ["default", "seed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(kind, policy):
    graph, x, _ = wide(10)
    small, xs, out = wide(3, 64)
    backend, options = limited(kind, 5 * 4096)
    with gs.Scheduler([backend], policy, **options) as sched:
        for call in (sched.plan, sched.alloc, sched.compute, sched.reserve):
            with pytest.raises(gs.OutOfMemory) as failed:
                call(graph)
            error = failed.value
            assert error.backend == "D" and error.available == 5 * 4096 and isinstance(error, MemoryError)
            assert error.needed >= 10 * 4096
            for part in ("'D'", str(error.needed), str(error.available), str(error.needed - error.available),
                         "part 3", "part 0"):
                assert part in str(error)
            assert backend.used == 0 and sched.buffer_size(backend) == 0 and x.buffer is None
        verified(sched.alloc(small))
        xs.set(np.ones(64, F32))
        assert sched.compute(small)
        held = backend.used
        for call in (sched.alloc, sched.compute, sched.reserve):
            with pytest.raises(gs.OutOfMemory):
                call(graph)
            # As before: the old plan, its memory and its results are still there.
            assert backend.used == held and xs.buffer is not None and x.buffer is None
            assert kind != "cpu memory" or out.numpy().tolist() == [6] * 64
        assert sched.compute(small)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_just_fits_is_taken(kind):
    graph, x, _ = wide(10)
    needed = gs.Scheduler([limited(kind, 10**9)[0]]).plan(graph).buffer_sizes[0]
    backend, options = limited(kind, needed)
    with gs.Scheduler([backend], **options) as sched:
        sched.alloc(graph)
        assert backend.used == needed
    backend, options = limited(kind, needed - 1)
    with gs.Scheduler([backend], **options) as sched, pytest.raises(gs.OutOfMemory) as failed:
        sched.alloc(graph)
    assert failed.value.needed - failed.value.available == 1


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_counts_as_available_for_the_next_graph(kind, is_shared):
    """A larger graph that fits once the smaller one's arena is given back, which is before the larger one is taken."""
    def alloc_buffer(size):
        buffer = type(backend).alloc_buffer(backend, size)
        most.append(backend.used)
        return buffer

    small, large, most = wide(4), wide(9), []
    needed = gs.Scheduler([limited(kind, 10**9)[0]]).plan(large[0]).buffer_sizes[0]
    backend, options = limited(kind, needed)
    backend.alloc_buffer = alloc_buffer
    with gs.Scheduler([backend], arenas=gs.Arenas() if is_shared else None, **options) as sched:
        sched.alloc(small[0])
        sched.alloc(large[0])
        assert backend.used == needed == max(most)
        sched.alloc(small[0])
        sched.compute(small[0], zero=True)


@pytest.mark.parametrize("work, is_crowded", [(0, False), (1, True)])
def test_work_memory_counts_beside_old_and_new_memory_in_a_budget(work, is_crowded):
    """Old buffers stay open while larger ones are allocated where the budget holds both and work memory."""
    def alloc_buffer(size):
        buffer = type(backend).alloc_buffer(backend, size)
        most.append(backend.used)
        return buffer

    backend, most = gs.CpuBackend(1), []
    arenas = SchedulerArenas((backend,), {0: 3 << 12})
    arenas.grow([[1 << 12]], lambda: None)
    backend.alloc_buffer, backend.work_held = alloc_buffer, work
    arenas.grow([[2 << 12]], lambda: None)
    assert max(most) == (2 << 12 if is_crowded else 3 << 12) and backend.used == 2 << 12
    arenas.close()


def test_old_memory_and_what_lived_in_it_come_back_when_new_memory_cannot_be_had():
    """The old memory is freed first, as both do not fit side by side."""
    def alloc_buffer(inherited, size):
        if size > backend.largest:
            raise gs.OutOfMemory(f"no {size} bytes in one piece", backend.name, size, backend.largest)
        return inherited(size)

    backend = device(answers={"memory_available": lambda inherited: backend.free, "alloc_buffer": alloc_buffer},
                     attributes={"free": 1 << 20, "largest": 1 << 20})
    graphs, inputs = [], []
    for elements in (100, 1000):
        ctx = gs.Context()
        inputs.append(ctx.tensor("f32", (elements,), "x", input=True))
        graphs.append(gs.Graph(ctx.set_output(ctx.scale(inputs[-1], 2.0))))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graphs[0])
        inputs[0].set(np.arange(100))
        before = scheduler.buffer_size(backend)
        backend.free, backend.largest = 7500, 2000
        with pytest.raises(gs.OutOfMemory, match="in one piece"):
            scheduler.alloc(graphs[1])
        assert scheduler.buffer_size(backend) == before
        assert inputs[0].buffer is not None and not inputs[0].buffer.closed and inputs[1].buffer is None
        scheduler.compute(graphs[0])
        assert graphs[0].nodes[-1].numpy().tolist() == [2.0 * k for k in range(100)]


@pytest.mark.parametrize("kind", KINDS[1:])     # a budget is for the arena alone
def test_weights_beside_the_arena_use_the_memory_too(kind):
    graph, _, _ = wide(4)
    needed = gs.Scheduler([limited(kind, 10**9)[0]]).plan(graph).buffer_sizes[0]
    backend, _ = limited(kind, needed + 4096)
    home = gs.Context()
    home.tensor("f32", 1024, "weight")
    buffer = backend.alloc_tensors(home)
    with gs.Scheduler([backend]) as sched:
        sched.alloc(graph)
        sched.reset()
    more = gs.Context()
    more.tensor("f32", 8, "one more")
    second = backend.alloc_tensors(more)
    with gs.Scheduler([backend]) as sched, pytest.raises(gs.OutOfMemory):
        sched.alloc(graph)
    second.close()
    buffer.close()
    assert backend.used == 0


def test_kept_weights_take_turns_where_they_do_not_fit():
    """Two host weights are kept on the device; with less memory they are sent on every compute instead."""
    def build(memory):
        device, host = poisoned("D", offloads=("MUL_MAT",), memory=memory, records=DATA_WRITES), poisoned("HOST")
        weights = [resident(host, f"w{k}", np.eye(64, dtype=F32) * (k + 1)) for k in range(2)]
        ctx = gs.Context()
        x = ctx.tensor("f32", (64, 1), "x", input=True)
        out = ctx.mul_mat(weights[1], ctx.mul_mat(weights[0], x))
        return device, host, gs.Graph(out), x, out

    for memory, sent in ((None, 1), (20_000, 3)):
        device, host, graph, x, out = build(memory)
        with gs.Scheduler((device, host)) as sched:
            plan = verified(sched.alloc(graph))
            x.set(np.arange(64, dtype=F32))
            for _ in range(3):
                sched.compute(graph)
                np.testing.assert_array_equal(out.numpy().ravel(), np.arange(64, dtype=F32) * 2)
            assert [name for name, _ in device.received if name != "x"] == ["w0", "w1"] * sent
            assert memory is None or plan.buffer_sizes[0] <= memory


def test_a_budget_must_be_for_a_backend_of_the_scheduler():
    with pytest.raises(gs.PlacementError):
        gs.Scheduler([gs.DryBackend("D")], budgets={gs.DryBackend("other"): 1})


@pytest.mark.parametrize("argument", ["budgets", "windows", "host_work"])
def test_bytes_that_are_none_bound_nothing_as_those_of_a_backend_that_is_left_out(argument):
    graph, _, _ = wide(10)
    backend = gs.DryBackend("D", memory=5 * 4096)
    with gs.Scheduler([backend], **{argument: {backend: None}}) as sched, \
            pytest.raises(gs.OutOfMemory, match=f"{5 * 4096} are available"):      # the backend's own bound stays
        sched.plan(graph)
    roomy = gs.DryBackend("D")
    with gs.Scheduler([roomy], **{argument: {roomy: None}}) as sched, gs.Scheduler([roomy]) as without:
        assert sched.plan(graph).buffer_sizes == without.plan(graph).buffer_sizes
    with pytest.raises(gs.PlacementError):
        gs.Scheduler([roomy], **{argument: {gs.DryBackend("other"): None}})


# -- whole contexts ----------------------------------------


@pytest.mark.parametrize("alignment", [1, 32, 256])
def test_the_size_of_a_whole_context_is_known_before_it_is_allocated(ctx, alignment):
    backend = gs.DryBackend("D", alignment=alignment)
    tensors = [ctx.tensor("f32", n, f"t{n}") for n in (1, 7, 64, 0, 100)]
    view = ctx.view_1d(tensors[2], 8, 32)
    size = backend.alloc_tensors_size(ctx)
    assert backend.used == 0 and all(t.buffer is None for t in tensors)
    assert size == sum(-(-t.nbytes // alignment) * alignment for t in tensors)
    buffer = backend.alloc_tensors(ctx)
    assert buffer.size == size == backend.used
    assert all(t.buffer is buffer for t in tensors) and view.offset == tensors[2].offset + 32
    assert [t.offset % alignment for t in tensors] == [0] * 5
    assert backend.alloc_tensors_size(ctx) == 0     # nothing is left to do
    buffer.close()
    assert backend.used == 0 and all(t.buffer is None for t in tensors)


def test_a_context_that_does_not_fit_stays_without_memory():
    backend = gs.DryBackend("D", memory=100, max_buffer_size=80)
    for n, limit in ((21, 80), (26, 80)):
        ctx = gs.Context()
        t = ctx.tensor("f32", n)
        with pytest.raises(gs.OutOfMemory) as failed:
            backend.alloc_tensors(ctx)
        assert failed.value.available == limit and failed.value.needed == backend.alloc_tensors_size(ctx)
        assert t.buffer is None and backend.used == 0


# -- nothing at all, and give and take ----------------------------------------


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_tensors_of_no_bytes_take_none(ctx, policy):
    device, host = devices(2)
    x, nothing = ctx.tensor("f32", (8, 4), "x", input=True), ctx.tensor("f32", (8, 0), "nothing", input=True)
    empty = ctx.scale(ctx.sqr(nothing), 2.0)
    out = ctx.sqr(x)
    graph = gs.Graph(empty, out, ctx.reshape(empty, 0, 8))
    with gs.Scheduler((device, host), policy) as sched:
        plan = verified(sched.alloc(graph))
        assert plan.data.size(plan.index_of(empty)) == 0
        nothing.set(np.zeros((0, 8), F32))
        x.set(np.full((4, 8), 3, F32))
        sched.compute(graph)
        assert empty.numpy().shape == (0, 8)
        np.testing.assert_array_equal(out.numpy(), np.full((4, 8), 9, F32))


def test_in_place_through_a_view_with_an_offset_takes_the_right_bytes(ctx):
    """A window of a tensor, changed by an op that the graph makes in place."""
    backend = poisoned("CPU")
    x = ctx.tensor("f32", (4, 6), "x", input=True)
    h = ctx.sqr(x)
    window = ctx.view_2d(h, 4, 2, h.nb[1], 2 * h.nb[1])
    changed = ctx.scale(window, 10.0, inplace=True)
    out = ctx.add(ctx.cont(h), ctx.repeat(ctx.sum_rows(ctx.sum(changed)), h))
    graph = gs.Graph(changed, out)
    with gs.Scheduler([backend]) as sched:
        plan = verified(sched.alloc(graph))
        assert plan.offset_of(changed) == plan.offset_of(h) + 32
        x.set(np.ones((6, 4), F32))
        sched.compute(graph)
        expected = np.ones((6, 4), F32)
        expected[2:4] = 10
        np.testing.assert_array_equal(out.numpy(), expected + 80)


def test_memory_of_a_dead_tensor_is_used_again(ctx):
    """A long chain of tensors that no kernel computes in place needs two at a time."""
    backend = gs.DryBackend("D")
    h = ctx.tensor("f32", (32, 32), "x", input=True)
    for _ in range(50):
        h = ctx.cont(ctx.transpose(h))
    with gs.Scheduler([backend]) as sched:
        plan = verified(sched.plan(gs.Graph(h)))
    assert plan.buffer_sizes == plan.live_bytes == (2 * 4096,)
