"""Devices whose queues run late: results are right in any order that waits allow, and every wait is needed."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from devices import PATIENCE, Chain, device, weights_on

import ggml_sched as gs
from ggml_sched.planning.program import Program
from ggml_sched.planning.verify import check as problems_of
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

SEEDS = range(8)
MANY_SEEDS = range(24)
N = 8
"""Computes: the places of a ring of three are used more than twice."""


# -- right results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["through the host", "direct"])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_queued_computes_use_their_own_inputs(seed, copies, direct):
    world = DeferredQueues(seed)
    backends = [DeferredBackend(name, world, direct) for name in "abc"]
    chain = Chain(backends, log=6)
    with chain.scheduler(backends, copies=copies) as scheduler:
        chain.queue_all(scheduler, 6)
        chain.x.set(np.full((4, 8), 1e6, np.float32))
        scheduler.synchronize()
        chain.check_log(6)
        chain.compute(scheduler, 9)


def test_the_caller_waits_for_nothing_but_results():
    """Devices that copy by themselves: many computes are queued, and the host waits when it reads."""
    world = DeferredQueues(1)
    backends = [DeferredBackend(name, world) for name in "abc"]
    chain = Chain(backends, log=20)
    with chain.scheduler(backends, copies=2) as scheduler:
        before = world.waits, world.tasks_run
        chain.queue_all(scheduler, 20)
        assert (world.waits, world.tasks_run) == before
        scheduler.synchronize()
        chain.check_log(20)
        # One compute: the host waits for each device at its end, and nowhere else.
        chain.row.set(np.int64([0]))
        before = world.waits
        scheduler.compute(chain.graph)
        assert world.waits == before + len(backends)


def test_no_more_computes_are_queued_than_may_be(monkeypatch):
    """The host waits for the end of the oldest."""
    monkeypatch.setattr("ggml_sched.execution.pipeline.MAX_IN_FLIGHT", 2)
    world = DeferredQueues(2)
    backends = [DeferredBackend(name, world) for name in "ab"]
    chain = Chain(backends, log=6)
    with chain.scheduler(backends, copies=2) as scheduler:
        for k in range(6):
            before = world.tasks_run
            chain.queue(scheduler, k)
            assert (world.tasks_run > before) is (k >= 2)
        scheduler.synchronize()
        chain.check_log(6)


# -- failures ----------------------------------------------------------------------------------------


def test_an_error_that_comes_late_is_raised_by_synchronize_and_everything_works_again():
    world = DeferredQueues(0)
    backends = [DeferredBackend(name, world) for name in "ab"]
    chain = Chain(backends, log=4)
    with chain.scheduler(backends, copies=2) as scheduler:
        chain.queue(scheduler, 0)
        backends[0].queue.append(lambda: 1 / 0)
        chain.queue(scheduler, 1)
        with pytest.raises(ZeroDivisionError):
            scheduler.synchronize()
        chain.check_queued(scheduler, 4)


def test_nothing_is_issued_behind_a_failure():
    world = DeferredQueues(0)
    backends = [DeferredBackend(name, world) for name in "ab"]
    chain = Chain(backends, log=4)
    issued = []
    with chain.scheduler(backends, copies=2) as scheduler:
        backends[0].graph_plan_compute = lambda plan: issued.append(plan) or 1 / 0
        chain.queue_all(scheduler, 3)
        with pytest.raises(ZeroDivisionError):
            scheduler.synchronize()
        assert len(issued) == 1
        del backends[0].graph_plan_compute
        chain.check_queued(scheduler, 4)


def test_devices_that_wait_for_each_other_are_an_error():
    world = DeferredQueues(0)
    a, b = (DeferredBackend(name, world) for name in "ab")
    one, two = a.event_new(), b.event_new()
    one.passed = two.passed = False
    a.event_wait(two)
    b.event_wait(one)
    with pytest.raises(gs.BackendError, match="wait for each other: "):
        a.synchronize()
    a.queue.clear()
    b.queue.clear()


# -- every wait is needed ----------------------------------------------------------------------------------


class Case:
    """A graph over late devices, and the expected results of each compute."""

    def __init__(self, seed: int, copies: int, direct: bool) -> None:
        self.world = DeferredQueues(seed)
        self.backends = [DeferredBackend(name, self.world, direct) for name in "abc"]
        self.scheduler = gs.Scheduler(self.backends, copies=copies)

    def begin(self, place: int, *ne: int) -> gs.Context:
        """Make a context with the inputs x and row, and a log on one of the backends."""
        self.log = weights_on(self.backends[place], "any", log=np.zeros((N, 8), np.float32))["log"]
        self.ctx = gs.Context()
        self.x, self.row = self.ctx.tensor("f32", ne, "x", input=True), self.ctx.tensor("i64", 1, "row", input=True)
        return self.ctx

    def assign(self, *pairs):
        for t, k in pairs:
            self.scheduler.set_tensor_backend(t, self.backends[k])

    def set(self, k):
        """Set the inputs of compute k."""
        self.x.set(np.full(self.x.n_elements, k + 1, np.float32))
        self.row.set(np.int64([k]))

    def expected(self, k):
        """The row of the log that compute k writes."""
        return 4 * (k + 1) ** 2

    def results(self):
        return self.log.numpy(), np.array([np.broadcast_to(self.expected(k), 8) for k in range(N)], np.float32)


class Forth(Case):
    """a, b, c, one after the other; a log on the last."""

    def build(self):
        self.chain = Chain(self.backends, log=N)
        return self.chain.graph

    def set(self, k):
        self.chain.set(k)

    def results(self):
        return self.chain.log.numpy(), np.array([self.chain.expected(k)[0] for k in range(N)])


class Back(Case):
    """x to a, b reads it and gives it back to a, which also reads what it had before; the log is on a."""

    def build(self):
        ctx = self.begin(0, 8, 4)
        one = ctx.sqr(self.x)
        two = ctx.scale(one, 3.0)
        three = ctx.add(two, one)
        write = ctx.set_rows(self.log, ctx.view_2d(three, 8, 1, three.nb[1], 0), self.row)
        self.assign((one, 0), (two, 1), (three, 0), (write, 0))
        return gs.Graph(write)


class Through(Case):
    """b writes through a copy into a cache of a, which a and c read before and after."""

    def build(self):
        self.cache = weights_on(self.backends[0], "any", cache=np.zeros((N, 8), np.float32))["cache"]
        ctx = self.begin(2, 8, 1)
        before = ctx.mul_mat(self.x, self.cache)
        doubled = ctx.scale(self.x, 2.0)
        write = ctx.set_rows(self.cache, doubled, self.row)
        after = ctx.mul_mat(self.x, write)
        total = ctx.add(after, before)
        wide = ctx.repeat(ctx.view_1d(ctx.sum(total), 1), self.x)
        noted = ctx.set_rows(self.log, wide, self.row)
        self.assign((before, 0), (doubled, 1), (write, 1), (after, 2), (total, 2), (wide, 2), (noted, 2))
        return gs.Graph(before, noted)

    def expected(self, k):
        before = sum(2 * (j + 1) * (k + 1) * 8 for j in range(k))
        return 2 * before + 2 * (k + 1) ** 2 * 8


class Mixture(Case):
    """Experts of c that a mixture on b offloads, with ids that a computes."""

    def build(self):
        rng = np.random.default_rng(1)
        self.values = [rng.integers(-2, 3, (3, 8, 8)).astype(np.float32) for _ in range(3)]
        self.experts = [weights_on(self.backends[2], **{f"e{k}": v})[f"e{k}"] for k, v in enumerate(self.values)]
        self.backends[1].offload_op = lambda node: node.op == "MUL_MAT_ID"
        ctx = self.begin(1, 8, 1, 1)
        scores = ctx.scale(ctx.view_2d(self.x, 3, 1, self.x.nb[1]), 1.0)
        ids = ctx.top_k(scores, 1)
        value = self.x
        for e in self.experts:
            value = ctx.mul_mat_id(e, value, ids)
        noted = ctx.set_rows(self.log, ctx.reshape(value, 8, 1), self.row)
        self.assign((scores, 0), (ids, 0), (noted, 1))
        return gs.Graph(noted)

    def input(self, k):
        x = np.arange(8, dtype=np.float32) % 3
        x[(k + k // 3) % 3] = 9
        return x

    def set(self, k):
        self.x.set(self.input(k).reshape(1, 1, 8))
        self.row.set(np.int64([k]))

    def expected(self, k):
        value = self.input(k)
        for v in self.values:
            value = v[(k + k // 3) % 3] @ value
        return value


class Kept(Case):
    """A node of c has an alloc dependency on a result of a, without reading it; a copy reads that result afterwards."""

    def build(self):
        ctx = self.begin(1, 8, 1)
        held = ctx.sqr(self.x)
        there = ctx.scale(held, 2.0)
        slow = ctx.add(there, there)
        noted = ctx.set_rows(self.log, slow, self.row)
        room = ctx.set_output(ctx.neg(self.x))
        ctx.keep_until(held, slow)
        self.assign((held, 0), (there, 1), (slow, 2), (noted, 1), (room, 0))
        return gs.Graph(noted, room)


CASES = [Forth, Back, Through, Mixture, Kept]


def run(make, copies, direct, seed, program=None):
    """N queued computes over late devices; whether all results are right.  `program`: instead of the plan's."""
    case = make(seed, copies, direct)
    with case.scheduler as scheduler:
        graph = case.build()
        plan = scheduler.alloc(graph)
        if program is None:
            plan.verify()
        else:
            plan.data._program = scheduler._allocations.current.program = program
            assert {p.reason for p in problems_of(plan.facts)} == {"unordered"}
        try:
            for k in range(N):
                case.set(k)
                scheduler.compute_async(graph)
            scheduler.synchronize()
        except gs.BackendError:
            return False
        finally:
            plan.data._program = None
        return np.array_equal(*case.results())


def without(program, k, wait):
    """The program in which step k does not wait for one of the steps."""
    steps = list(program.steps)
    steps[k] = steps[k]._replace(waits=tuple(w for w in steps[k].waits if w != wait))
    return Program(tuple(steps), program.inputs, program.copy_slots)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_the_checker_sees_a_load_that_does_not_wait_for_readers_on_other_backends(ctx, extra):
    """A load left out while its leaf is not set again; whatever id the leaf has, some compute has to wait for
    others."""
    world = DeferredQueues(0)
    a, b = DeferredBackend("a", world), device(DeferredBackend, "b", queues=world, reads=["a"])
    acc = weights_on(b, "any", acc=np.zeros(8, np.float32))["acc"]
    x = ctx.tensor("f32", 8, "x", input=True)
    others = [ctx.tensor("f32", 8, f"other {k}", input=True) for k in range(extra)]
    there = ctx.sqr(x)
    written = ctx.cpy(ctx.add(acc, x), acc)
    graph = gs.Graph(*[ctx.set_output(ctx.add(acc, t)) for t in others], written,
                     ctx.set_output(ctx.scale(there, 2.0)))
    with gs.Scheduler([a, b]) as scheduler:
        for t in (x, *graph.nodes):
            scheduler.set_tensor_backend(t, a if t in (x, there) else b)
        plan = scheduler.plan(graph)
        plan.verify()
        k = next(k for k, s in enumerate(plan.program.steps) if s.kind == "load" and graph.tensors[s.tensor] is x)
        assert plan.program.steps[k].if_changed and plan.program.steps[k].waits
        for wait in plan.program.steps[k].waits:
            facts = replace(plan.facts, program=without(plan.program, k, wait))
            assert {p.reason for p in problems_of(facts)} == {"unordered"}


@pytest.mark.spread("make seeds", "copies seeds")
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MANY_SEEDS, marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("make", CASES)
def test_copies_that_go_through_the_host_give_the_same(make, copies, seeds):
    assert all(run(make, copies, direct, seed) for seed in seeds for direct in (False, True))


def test_an_input_is_not_loaded_before_another_device_has_read_the_one_before():
    """b's memory is read by c itself, which is late."""
    for seed in SEEDS:
        world = DeferredQueues(seed)
        b, c = DeferredBackend("b", world), DeferredBackend("c", world)
        c.supports_buffer = lambda buffer, both=(b, c): buffer.backend in both
        log = weights_on(c, "any", log=np.zeros((N, 8), np.float32))["log"]
        ctx = gs.Context()
        x, row = ctx.tensor("f32", (8, 1), "x", input=True), ctx.tensor("i64", (1,), "row", input=True)
        graph = gs.Graph(ctx.set_rows(log, ctx.sqr(x), row))
        with gs.Scheduler([b, c]) as scheduler:
            for t in (*graph.nodes, row):
                scheduler.set_tensor_backend(t, c)
            scheduler.set_tensor_backend(x, b)
            scheduler.alloc(graph).verify()
            for k in range(N):
                x.set(np.full((1, 8), k))
                row.set(np.int64([k]))
                scheduler.compute_async(graph)
            scheduler.synchronize()
            assert np.array_equal(log.numpy()[:, 0], [k * k for k in range(N)]), seed


class Sender(DeferredBackend):
    """Copies to other devices in its own queue, and does not copy from them."""

    def cpy_tensor_from(self, src, dst):
        return False

    def cpy_tensor_async(self, src, dst):
        return False

    def cpy_tensor_to(self, src, dst):
        return self.queue_copy(src, dst)


@pytest.mark.spread("make seeds", "copies seeds")
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MANY_SEEDS, marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("make", CASES)
def test_copies_that_only_their_source_can_make_give_the_same(make, copies, seeds, monkeypatch):
    """They stand in another queue than the step."""
    monkeypatch.setitem(globals(), "DeferredBackend", Sender)
    assert all(run(make, copies, True, seed) for seed in seeds)


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_third_device_sends_is_there_when_it_is_read(shared):
    """c sends to a's memory in its own queue, and b has it from there through the host, which itself waits for a alone;
    or c's data goes to a through the host, in a's queue, and b reads a's memory itself, after c.
    """
    for seed in MANY_SEEDS:
        world = DeferredQueues(seed)
        a, b = DeferredBackend("a", world, False), DeferredBackend("b", world, False)
        c = DeferredBackend("c", world, False) if shared else Sender("c", world)
        if shared:
            b.supports_buffer = lambda buffer, both=(a, b): buffer.backend in both
        cache = weights_on(a, "any", cache=np.zeros((4, 8), np.float32))["cache"]
        ctx = gs.Context()
        x, row = ctx.tensor("f32", (8, 1), "x", input=True), ctx.tensor("i64", (1,), "row", input=True)
        written = ctx.set_rows(cache, ctx.sqr(x), row)
        last = ctx.set_output(ctx.scale(written, 2.0))
        graph = gs.Graph(last)
        with gs.Scheduler([a, b, c]) as scheduler:
            for node in graph.nodes:
                scheduler.set_tensor_backend(node, b if node is last else c)
            plan = scheduler.alloc(graph)
            plan.verify()
            assert plan.data.write_backs
            expected = np.zeros((4, 8))
            for k in range(4):
                x.set(np.full(8, k + 1.0))
                row.set(np.int64([k]))
                expected[k] = 2 * (k + 1) ** 2
                scheduler.compute(graph)
                assert np.array_equal(last.numpy(), expected), seed


@pytest.mark.parametrize("direct", [False, True], ids=["through the host", "direct"])
@pytest.mark.parametrize("observed", [False, True])
def test_one_compute_after_the_other_gives_the_same(observed, direct):
    """Also with a callback that observes some of the nodes."""
    for make in CASES:
        for seed in SEEDS:
            case, seen = make(seed, 2, direct), []
            with case.scheduler as scheduler:
                graph = case.build()
                scheduler.alloc(graph)
                for k in range(N):
                    case.set(k)
                    last = graph.nodes[-1]
                    scheduler.compute(graph, *[seen.append, lambda node, last=last: node is last] * observed)
                given, expected = case.results()
                assert np.array_equal(given, expected) and len(seen) == N * observed, (make, seed)


@pytest.mark.parametrize("way", ["computed", "observed", "queued"])
def test_a_wait_for_a_step_that_was_left_out_waits_for_the_steps_before_it(way):
    """Two leafs come to one backend, where another reads them; only the one that comes first is set anew."""
    for seed in SEEDS:
        world = DeferredQueues(seed)
        b, c = DeferredBackend("b", world), DeferredBackend("c", world)
        c.supports_buffer = lambda buffer, both=(b, c): buffer.backend in both
        ctx = gs.Context()
        x, y = (ctx.tensor("f32", 8, name, input=True) for name in "xy")
        last = ctx.set_output(ctx.add(x, y))
        graph = gs.Graph(last)
        with gs.Scheduler([b, c]) as scheduler:
            for t, backend in ((x, b), (y, b), (last, c)):
                scheduler.set_tensor_backend(t, backend)
            plan = scheduler.alloc(graph)
            plan.verify()
            first, second, run = plan.program.steps
            assert first.if_changed and second.if_changed and [w.step for w in run.waits] == [1]
            leafs = [graph.tensors[step.tensor] for step in (first, second)]
            leafs[1].set(np.ones(8))
            for k in range(N):
                leafs[0].set(np.full(8, k))
                if way == "queued":
                    scheduler.compute_async(graph)
                else:
                    scheduler.compute(graph, *[lambda node: None, lambda node: False] * (way == "observed"))
                assert last.numpy().tolist() == [k + 1] * 8


@pytest.mark.spread("make", "copies")
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("make", CASES)
def test_every_wait_is_needed(make, copies):
    """Without any single one of them the checker objects, and some order of the devices gives wrong numbers.

    The devices copy by themselves: where the host reads, it waits, and that orders more than is asked for.
    """
    assert all(run(make, copies, True, seed) for seed in SEEDS)
    case = make(0, copies, True)
    with case.scheduler:
        program = case.scheduler.plan(case.build()).program
    waits = [(k, wait) for k, step in enumerate(program.steps) for wait in step.waits]
    assert waits
    for k, wait in waits:
        changed = without(program, k, wait)
        assert not all(run(make, copies, True, seed, changed) for seed in MANY_SEEDS), (
            f"every result is right although step {k} does not wait for {wait}:\n{program}")


def test_a_thread_passes_an_event_while_another_runs_tasks():
    """A task waits for a backend whose own thread waits for an event that has passed meanwhile."""
    late = DeferredBackend("late", DeferredQueues(0))
    event, ended = late.event_new(), []

    class Outside(gs.CpuBackend):
        def event_synchronize(self, _):
            thread = threading.Thread(target=late.event_synchronize, args=(event,), daemon=True)
            thread.start()
            thread.join(PATIENCE)
            ended.append(not thread.is_alive())

    with Outside(1, "outside") as outside:
        late.event_record(event)
        late.event_wait(outside.event_new())
        late.synchronize()
    assert ended == [True]
