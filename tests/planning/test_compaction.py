"""A graph that replays a larger one's plan lies densely at the low end of its arenas: few pages are touched."""

import itertools

import pytest

import ggml_sched as gs

PAGE = 4096
WIDTH, HIDDEN, VOCAB, CELLS, LAYERS = 64, 176, 2000, 128, 4


class Model:
    """Weights of a few layers on a backend, and the graph of a batch."""

    def __init__(self, backend: gs.Backend) -> None:
        self.ctx = gs.Context("weights")
        square = [("q", WIDTH), ("k", WIDTH), ("v", WIDTH), ("o", WIDTH), ("up", HIDDEN)]
        self.layers = [{name: self.ctx.tensor("f32", (WIDTH, rows), f"{name}{i}") for name, rows in square}
                       | {"down": self.ctx.tensor("f32", (HIDDEN, WIDTH), f"down{i}")} for i in range(LAYERS)]
        self.output = self.ctx.tensor("f32", (WIDTH, VOCAB), "output")
        backend.alloc_tensors(self.ctx)

    def graph(self, rows: int, outputs: int) -> gs.Graph:
        ctx = gs.Context("batch")
        x = ctx.tensor("f32", (WIDTH, rows), "x", input=True)
        mask = ctx.tensor("f32", (CELLS, rows), "mask", input=True)
        wanted = ctx.tensor("i32", outputs, "wanted", input=True)
        keys = ctx.tensor("f32", (WIDTH, CELLS), "keys", input=True)
        for layer in self.layers:
            normed = ctx.rms_norm(x, 1e-5)
            q = ctx.mul_mat(layer["q"], normed)
            held = ctx.mul(ctx.mul_mat(layer["k"], normed), ctx.mul_mat(layer["v"], normed))
            scores = ctx.soft_max(ctx.mul_mat(keys, q), mask, 0.2)
            mixed = ctx.mul_mat(ctx.cont(ctx.transpose(keys)), scores)
            x = ctx.add(ctx.mul_mat(layer["o"], ctx.add(mixed, held)), x)
            x = ctx.add(ctx.mul_mat(layer["down"], ctx.relu(ctx.mul_mat(layer["up"], x))), x)
        return gs.Graph(ctx.set_output(ctx.mul_mat(self.output, ctx.get_rows(x, wanted))))


def owners(plan: gs.Plan) -> list[int]:
    """Ids of the tensors that own memory of an arena; views and in-place results lie inside theirs."""
    data = plan.data
    ids = range(data.n_tensors + data.n_copies + len(data.slot_copies))
    return [i for i in ids if data.memory_index(i) >= 0 and data.root(i) < 0 and data.lifetime(i)]


def touched_pages(plan: gs.Plan) -> int:
    data = plan.data
    return len({(data.memory_index(i), data.chunk(i), page) for i in owners(plan)
                for page in range(data.offset(i) // PAGE, -(-(data.offset(i) + data.size(i)) // PAGE))})


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100, 255, 256])
def test_a_smaller_batch_touches_hardly_more_than_if_it_was_planned_for_itself(rows):
    backend = gs.DryBackend("A", alignment=64)
    model = Model(backend)
    with gs.Scheduler([backend]) as scheduler:
        own = scheduler.plan(model.graph(rows, 1))
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(model.graph(256, 256))
        size = scheduler.buffer_size(backend)
        plan = scheduler.alloc(model.graph(rows, 1))
        plan.verify()
        assert plan.methods == ("replayed",) and scheduler.buffer_size(backend) == size
    assert touched_pages(plan) <= touched_pages(own)
    assert max(plan.data.offset(i) + plan.data.size(i) for i in owners(plan)) <= own.buffer_sizes[0]


def test_in_several_buffers_no_offset_rises_and_what_lives_at_once_keeps_its_order():
    backend = gs.DryBackend("A", alignment=64)
    model = Model(backend)
    backend.max_buffer_size = 200_000
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(model.graph(256, 2))
        reserved = scheduler.plan(model.graph(256, 2))
        for rows in (3, 200):
            small = scheduler.plan(model.graph(rows, 1))
            was, now, ids = reserved.data, small.data, owners(small)
            assert len(ids) > 20 and any(now.offset(i) < was.offset(i) for i in ids)
            assert all(now.offset(i) <= was.offset(i) for i in ids)
            for i, k in itertools.combinations(ids, 2):
                meet = was.lifetime(i)[0] <= was.lifetime(k)[1] and was.lifetime(k)[0] <= was.lifetime(i)[1]
                if meet and was.chunk(i) == was.chunk(k):
                    assert (was.offset(i) < was.offset(k)) == (now.offset(i) < now.offset(k))


def test_long_lives_are_kept_apart_from_all_that_comes_and_goes_meanwhile():
    """Outputs that stay are born between short-lived tensors, at single positions and in blocks."""
    def graph(rows: int) -> gs.Graph:
        ctx = gs.Context()
        x = ctx.tensor("f32", (32, rows), "x", input=True)
        kept = []
        for i in range(300):
            x = ctx.add(ctx.sqr(ctx.scale(x, 0.5)), ctx.sqr(ctx.scale(x, 2.0)))
            if i % 7 == 0:
                kept.append(ctx.set_output(ctx.sum_rows(x)))
        return gs.Graph(*kept, ctx.set_output(x))

    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        scheduler.reserve(graph(64))
        reserved = scheduler.plan(graph(64))
        plan = scheduler.alloc(graph(5))
        plan.verify()
    assert plan.methods == ("replayed",) and touched_pages(plan) * 4 < touched_pages(reserved)


def test_in_several_buffers_each_tensor_stays_in_its_own():
    backend = gs.DryBackend("A", alignment=64)
    model = Model(backend)
    backend.max_buffer_size = 200_000
    with gs.Scheduler([backend]) as scheduler:
        scheduler.reserve(model.graph(256, 2))
        was = scheduler.plan(model.graph(256, 2))
        now = scheduler.alloc(model.graph(20, 2))
        now.verify()
    assert now.methods == ("replayed",) and len({was.data.chunk(i) for i in owners(was)}) > 1
    assert all(was.data.chunk(i) == now.data.chunk(i) for i in owners(now))
    assert touched_pages(now) * 3 < touched_pages(was)


@pytest.mark.parametrize("copies", [1, 2])
def test_offsets_stay_where_computes_overlap(copies):
    """The inputs of the next compute are written while another graph may still be at work in the same arena."""
    devices = [gs.DryBackend("A"), gs.DryBackend("B")]
    model = Model(devices[0])
    with gs.Scheduler(devices, copies=copies) as scheduler:
        scheduler.reserve(model.graph(256, 256))
        was, now = scheduler.plan(model.graph(256, 256)), scheduler.plan(model.graph(20, 1))
    assert "replayed" in now.methods and bool(now.data.slot_copies) == (copies > 1)
    moved = [i for i in owners(now) if now.data.offset(i) != was.data.offset(i)]
    assert bool(moved) == (copies == 1)


def test_the_seed_policy_leaves_offsets_where_they_were_reserved():
    backend = gs.DryBackend("A")
    model = Model(backend)
    with gs.Scheduler([backend], "seed") as scheduler:
        scheduler.reserve(model.graph(64, 64))
        was, now = scheduler.plan(model.graph(64, 64)), scheduler.plan(model.graph(9, 1))
    assert now.methods == ("replayed",)
    assert all(now.data.offset(i) == was.data.offset(i) for i in owners(now))
