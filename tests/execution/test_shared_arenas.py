"""Schedulers that share arenas: results are as with arenas of their own, in as many bytes as the largest needs."""

import gc
import threading
import weakref

import numpy as np
import pytest
from devices import PATIENCE, resident_tensor
from forks import in_child

import ggml_sched as gs
from ggml_sched.execution.allocation_cache import Allocations
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

N_LINKS = 5


class World:
    """((x @ x + x) @ x + x) ... on some backends, `n` numbers a row; on two, every other link is on the second."""

    def __init__(self, n, backends, arenas=None, cache=None, **options):
        self.ctx, self.n = gs.Context(), n
        self.x = self.ctx.tensor("f32", (n, n), "x", input=True)
        self.scheduler, y = gs.Scheduler(backends, arenas=arenas, **options), self.x
        for k in range(N_LINKS):
            product = self.ctx.mul_mat(self.x, y)
            y = self.ctx.add(product, self.x)
            for node in (product, y):
                self.scheduler.set_tensor_backend(node, backends[k % len(backends)])
        self.y = self.ctx.set_output(y)
        self.last = self.y if cache is None else self.ctx.cpy(self.y, cache)
        self.graph = gs.Graph(self.last)

    def values(self, turn):
        return np.random.default_rng(turn * 100 + self.n).standard_normal((self.n, self.n)).astype(np.float32) / self.n

    def start(self, turn):
        self.scheduler.alloc(self.graph)
        self.x.set(self.values(turn))

    def run(self, turn):
        self.start(turn)
        self.scheduler.compute(self.graph)
        return self.y.numpy().tobytes()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.scheduler.close()


def expected(n, turn, kind=gs.CpuBackend):
    with kind(1) as cpu, World(n, [cpu]) as world:
        return world.run(turn)


@pytest.fixture
def cpu():
    with gs.CpuBackend(1) as cpu:
        yield cpu


@pytest.fixture(params=["own", "wait"])
def arenas(request):
    with gs.Arenas(request.param) as arenas:
        yield arenas


def in_thread(call):
    """Start a thread; returns a function that waits for it, and returns or raises what the call has."""
    found = []

    def run():
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(PATIENCE)
        assert found, "the thread did not end"
        value, error = found[0]
        if error is not None:
            raise error
        return value

    return result


# -- in turns --------------------------------------------------------------------------------------------------------


def test_schedulers_that_take_turns_need_the_largest_of_their_arenas(cpu, arenas):
    sizes = (8, 24, 16)
    worlds = [World(n, [cpu], arenas) for n in sizes]
    for turn in range(3):
        for n, world in zip(sizes, worlds, strict=True):
            assert world.run(turn) == expected(n, turn)
    with World(24, [cpu]) as alone:
        alone.run(0)
        assert arenas.nbytes(cpu) == alone.scheduler.buffer_size(cpu)
    for world in worlds:
        world.scheduler.close()


def test_a_change_of_lessee_prepares_nothing_anew_and_keeps_inputs(cpu, arenas):
    with World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        first = a.run(0)
        b.run(1)
        prepared = a.scheduler._allocations._suspended[id(a.graph)].prepared
        a.scheduler.compute(a.graph)        # with the x that was set before
        assert a.y.numpy().tobytes() == first
        assert a.scheduler._allocations.current.prepared is prepared


def test_tensors_lose_their_addresses_with_the_arenas_and_results_that_were_read_stay(cpu, arenas):
    with World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        a.run(0)
        array = a.y.numpy()
        before = array.tobytes()
        b.run(1)
        with pytest.raises(gs.PlacementError, match="it was in an arena on backend 'CPU', which another graph"):
            a.y.numpy()
        with pytest.raises(gs.PlacementError, match="has no address"):
            a.x.set(a.values(0))
        assert array.tobytes() == before
        a.scheduler.alloc(a.graph)
        with pytest.raises(gs.HazardError, match="has not been computed since its graph was allocated"):
            a.y.numpy()


def test_planning_and_reserving_what_fits_leave_the_lessee_its_results(cpu, arenas):
    with World(16, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        result = a.run(0)
        b.scheduler.plan(b.graph)
        b.scheduler.reserve(b.graph)
        assert a.y.numpy().tobytes() == result


def test_larger_buffers_for_one_release_what_the_others_had_prepared(cpu, arenas):
    with World(8, [cpu], arenas) as a, World(32, [cpu], arenas) as b:
        first = a.run(0)
        buffer = a.y.buffer
        b.run(0)
        assert buffer.closed
        assert a.run(0) == first and b.run(1) == expected(32, 1)


def test_buffers_that_cannot_grow_stay_as_they_are(arenas):
    with gs.CpuBackend(1) as cpu, World(8, [cpu], arenas) as a, World(64, [cpu], arenas) as b:
        a.run(0)
        cpu.memory = cpu.used + 1000
        with pytest.raises(gs.OutOfMemory):
            b.run(0)
        assert a.run(1) == expected(8, 1)
        cpu.memory = None
        assert b.run(0) == expected(64, 0)


def test_schedulers_share_on_each_backend_that_they_have_in_common(arenas):
    one, two, three = (gs.CpuBackend(1, name) for name in ("one", "two", "three"))
    with World(8, [one, two], arenas) as a, World(16, [two, three], arenas) as b:
        assert a.run(0) == expected(8, 0) and b.run(0) == expected(16, 0)
        assert a.run(1) == expected(8, 1)
        assert a.y.buffer.backend is one
        assert arenas.nbytes(two) == a.scheduler.buffer_size(two) == b.scheduler.buffer_size(two) > 0
        a.scheduler.close()
        assert arenas.nbytes(one) == 0 and arenas.nbytes(two) > 0
        assert b.run(1) == expected(16, 1)
    assert not any(map(arenas.nbytes, (one, two, three)))


# -- queued computes -------------------------------------------------------------------------------------------------


def queued_before_a_change(seed, arenas, n_turns=3):
    """What each of two schedulers on deferred devices wrote to a cache, where neither waits for its own computes."""
    queues = DeferredQueues(seed)
    devices = [DeferredBackend(name, queues) for name in ("d0", "d1", "d2")]
    found = []
    worlds = []
    for n, backends in ((12, devices), (8, devices)):
        cache = resident_tensor(backends[(N_LINKS - 1) % 3], (n, n), "cache")
        cache.set(np.zeros((n, n), np.float32))
        worlds.append((World(n, backends, arenas, cache), cache))
    for turn in range(n_turns):
        for world, cache in worlds:
            world.start(turn)
            world.scheduler.compute_async(world.graph)
            world.cache = cache
        found.append([cache.numpy().tobytes() for _, cache in worlds])
    for world, _ in worlds:
        world.scheduler.close()
    return found


def test_a_change_of_lessee_waits_for_what_is_queued(arenas):
    for seed in range(20):
        assert queued_before_a_change(seed, arenas) == [[expected(n, turn) for n in (12, 8)] for turn in range(3)]


def test_without_the_wait_deferred_devices_compute_with_bytes_of_the_next_lessee(monkeypatch):
    """The test before would find a missing wait."""
    monkeypatch.setattr(Allocations, "drain", lambda self: None)
    wanted, wrong = [[expected(n, turn) for n in (12, 8)] for turn in range(3)], 0
    for seed in range(20):
        with gs.Arenas() as arenas:
            wrong += queued_before_a_change(seed, arenas) != wanted
    assert wrong


def test_computes_of_a_scheduler_that_was_freed_end_before_others_write_there(arenas):
    for seed in range(10):
        queues = DeferredQueues(seed)
        devices = [DeferredBackend(name, queues) for name in ("d0", "d1", "d2")]
        cache = resident_tensor(devices[(N_LINKS - 1) % 3], (8, 8), "cache")
        cache.set(np.zeros((8, 8), np.float32))
        gone = World(8, devices, arenas, cache)
        gone.start(0)
        gone.scheduler.compute_async(gone.graph)
        ref = weakref.ref(gone.scheduler)
        del gone
        gc.collect()
        assert ref() is None
        with World(8, devices[::-1], arenas) as b:
            assert b.run(1) == expected(8, 1)
        assert cache.numpy().tobytes() == expected(8, 0)


# -- threads ---------------------------------------------------------------------------------------------------------


def test_a_second_thread_waits_or_gets_buffers_of_its_own(cpu, arenas):
    with World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        with a.scheduler.lease():
            mine = a.run(0)
            theirs = in_thread(lambda: b.run(1))
            if arenas.when_busy == "own":
                assert theirs() == expected(8, 1)
            assert a.y.numpy().tobytes() == mine        # no other scheduler has had the memory
            assert arenas.nbytes(cpu) == a.scheduler.buffer_size(cpu) * (2 if arenas.when_busy == "own" else 1)
        assert theirs() == expected(8, 1)
        assert a.run(2) == expected(8, 2) and b.run(2) == expected(8, 2)
        if arenas.when_busy == "own":
            assert a.y.numpy().tobytes() == b.y.numpy().tobytes()       # both keep what they have got


def test_schedulers_of_many_threads_compute_the_same_bits(cpu, arenas):
    sizes = (8, 12, 16, 20)
    worlds = [World(n, [cpu], arenas) for n in sizes]
    wanted = {(n, turn): expected(n, turn) for n in sizes for turn in range(3)}

    def work(world):
        for turn in (0, 1, 2) * 5:
            with world.scheduler.lease():
                assert world.run(turn) == wanted[world.n, turn]

    for end in [in_thread(lambda world=world: work(world)) for world in worlds]:
        end()
    for world in worlds:
        world.scheduler.close()
    assert arenas.nbytes(cpu) == 0


def test_a_scheduler_that_moves_to_other_buffers_frees_what_it_had_prepared(cpu):
    with gs.Arenas("own") as arenas, World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        a.run(0)
        b.run(0)
        with a.scheduler.lease():
            assert in_thread(lambda: b.run(1))() == expected(8, 1)
            with pytest.raises(gs.PlacementError):
                a.y.numpy()         # lost when b ran first, and not found again in b's new buffers
            assert a.run(1) == expected(8, 1)
            assert b.y.buffer is not a.y.buffer


def test_computing_inside_a_callback_of_another_scheduler(cpu):
    with gs.Arenas("wait") as arenas, World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        a.start(0)
        with pytest.raises(gs.Error, match="waiting for it would not end: Arenas"):
            a.scheduler.compute(a.graph, lambda node: b.run(0))
        assert b.run(0) == a.run(0) == expected(8, 0)
    with gs.Arenas("own") as arenas, World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        a.start(0)
        inner = []
        a.scheduler.compute(a.graph, lambda node: inner.append(b.run(1)))
        assert a.y.numpy().tobytes() == expected(8, 0) and set(inner) == {expected(8, 1)}


def test_a_scheduler_is_closed_while_this_thread_has_the_buffers_for_another(cpu, arenas):
    other = gs.CpuBackend(1, "other")
    with World(8, [cpu], arenas) as a, World(16, [other, cpu], arenas) as b:
        b.run(0)
        with a.scheduler.lease():
            b.scheduler.close()
            assert b.scheduler.closed and arenas.nbytes(other) == 0 < arenas.nbytes(cpu)
            with pytest.raises(gs.PlacementError, match="its scheduler was closed"):
                b.y.numpy()
            assert a.run(0) == expected(8, 0)
        with World(12, [cpu], arenas) as c:
            a.start(1)
            c.run(1)
            a.scheduler.compute(a.graph, lambda node: c.scheduler.close())
            assert a.y.numpy().tobytes() == expected(8, 1)
        assert in_thread(lambda: a.run(2))() == expected(8, 2)


def test_a_scheduler_is_closed_after_the_thread_that_has_the_buffers(cpu):
    with gs.Arenas("wait") as arenas, World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        b.run(0)
        with a.scheduler.lease():
            closed = in_thread(b.scheduler.close)
            assert a.run(1) == expected(8, 1) and not b.scheduler.closed
        closed()
        assert b.scheduler.closed and a.run(2) == expected(8, 2)


def test_one_scheduler_in_two_threads_is_an_error(cpu, arenas):
    with World(8, [cpu], arenas) as a, a.scheduler.lease():
        with pytest.raises(gs.Error, match="use one scheduler for each thread"):
            in_thread(lambda: a.run(0))()
        a.run(0)


def test_a_child_process_may_use_arenas_that_a_thread_of_its_parent_has(cpu):
    with gs.Arenas("wait") as arenas, World(8, [cpu], arenas) as a, World(8, [cpu], arenas) as b:
        inside, end = threading.Event(), threading.Event()

        def hold():
            with a.scheduler.lease():
                inside.set()
                assert end.wait(PATIENCE)

        done = in_thread(hold)
        assert inside.wait(PATIENCE)
        wanted = expected(8, 0)

        def child():
            assert b.run(0) == wanted

        try:
            assert in_child(child) == 0
        finally:
            end.set()
            done()
        assert b.run(0) == wanted


# -- errors and ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_middle_gives_the_buffers_back(cpu, arenas, error):
    def fail(node):
        raise error

    with World(8, [cpu], arenas) as a, World(12, [cpu], arenas) as b:
        b.run(0)
        a.start(0)
        with pytest.raises(error):
            a.scheduler.compute(a.graph, fail)
        assert in_thread(lambda: b.run(1))() == expected(12, 1)
        assert a.run(1) == expected(8, 1)


def test_an_error_of_queued_work_is_raised_by_its_own_scheduler(arenas):
    device = DeferredBackend("d0", DeferredQueues(0))
    with World(8, [device], arenas) as a, World(8, [device], arenas) as b:
        a.start(0)
        a.scheduler.compute_async(a.graph)
        device.queue.appendleft(lambda: 1 / 0)
        assert b.run(1) == expected(8, 1)
        with pytest.raises(ZeroDivisionError):
            a.scheduler.synchronize()
        assert a.run(0) == expected(8, 0)


def test_buffers_end_with_the_last_scheduler_and_arenas_go_on(cpu, arenas):
    a, b = World(8, [cpu], arenas), World(8, [cpu], arenas)
    a.run(0)
    a.scheduler.close()
    assert b.run(0) == expected(8, 0)
    b.scheduler.close()
    assert arenas.nbytes(cpu) == 0
    with World(8, [cpu], arenas) as c:
        assert c.run(1) == expected(8, 1)


def test_buffers_of_a_scheduler_that_was_dropped_are_freed_with_it(cpu, arenas):
    other = gs.CpuBackend(1, "other")
    with World(8, [cpu], arenas) as a:
        first = a.run(0)
        dropped = World(16, [other, cpu], arenas)
        dropped.run(0)
        shared, alone = (weakref.ref(dropped.scheduler._arenas.buffers[i][0]) for i in (1, 0))
        del dropped
        gc.collect()
        assert alone() is None and arenas.nbytes(other) == 0
        assert shared() is not None and arenas.nbytes(cpu) == shared().size
        assert a.run(0) == first and a.y.buffer is shared()
    lone = World(8, [cpu], arenas)
    assert lone.run(1) == expected(8, 1)
    del lone
    gc.collect()
    assert arenas.nbytes(cpu) == 0


def test_closed_arenas_give_no_memory_and_schedulers_of_them_can_be_closed(cpu, arenas):
    a = World(8, [cpu], arenas)
    a.run(0)
    with a.scheduler.lease(), pytest.raises(gs.Error, match="in use"):
        arenas.close()
    arenas.close()
    arenas.close()
    assert arenas.nbytes(cpu) == 0 and "closed" in repr(arenas)
    with pytest.raises(gs.PlacementError, match="the arenas that its scheduler shared were closed"):
        a.y.numpy()
    for call in (lambda: a.run(0), lambda: a.scheduler.compute(a.graph), lambda: a.scheduler.reserve(a.graph)):
        with pytest.raises(gs.Error, match="the arenas that this scheduler shared were closed"):
            call()
    assert a.scheduler.plan(a.graph).buffer_sizes
    a.scheduler.close()


def test_arguments_are_checked(cpu):
    with pytest.raises(ValueError, match="'own' or 'wait', not 'never'"):
        gs.Arenas("never")
    with pytest.raises(TypeError, match="arenas are gs.Arenas"):
        gs.Scheduler([cpu], arenas=gs.Arenas)


def test_a_scheduler_without_a_lost_backend_shares_the_same_arenas(arenas):
    one, two = gs.CpuBackend(1, "one"), gs.CpuBackend(1, "two")
    with World(8, [one, two], arenas) as a:
        a.run(0)
        with a.scheduler.without(one) as rest:
            graph = gs.Graph(a.y)
            rest.alloc(graph)
            a.x.set(a.values(1))
            rest.compute(graph)
            assert a.y.numpy().tobytes() == expected(8, 1)
            assert arenas.nbytes(two) == rest.buffer_size(two)


def test_a_lease_without_shared_arenas_does_nothing(cpu):
    with World(8, [cpu]) as a, a.scheduler.lease(), a.scheduler.lease():
        assert a.run(0) == expected(8, 0)
