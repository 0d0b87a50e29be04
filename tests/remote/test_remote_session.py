"""A session after what goes wrong in the driver: values that are none, interrupts and forks."""

import gc
import os
import sys
import weakref

import numpy as np
import pytest
from interrupting import interrupted
from remote_workers import products, simulated, two_halves

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.planning.envelopes import PIECE
from ggml_sched.remote import RemoteBackend
from ggml_sched.remote.answers import ask_ahead
from ggml_sched.remote.cluster import cluster_of
from ggml_sched.remote.envelope import Envelope, Segment
from ggml_sched.remote.messages import MessageError
from ggml_sched.remote.session import MAX_ASIDE
from ggml_sched.remote.simulated import Faults, SimulatedNetwork
from ggml_sched.remote.worker import MAX_HELD, QUESTIONS, Worker


def test_a_message_that_cannot_be_made_is_an_error_and_the_next_one_is_executed():
    with simulated(1, deadline=4) as cluster:
        backend = cluster.backends[0]
        backend.alloc_buffer(64).close()
        with pytest.raises(TypeError):
            cluster.session.call("w0", ["ask", "answer", "memory", [object()]])
        assert backend.ask("memory", 0) is None


def test_sizes_and_offsets_may_be_numbers_of_numpy():
    with simulated(1) as cluster:
        backend = cluster.backends[0]
        with backend.alloc_buffer(np.int64(64)) as buffer:
            buffer.write(np.int64(8), memoryview(b"x"))
            out = bytearray(1)
            buffer.read(np.int64(8), memoryview(out))
            assert out == b"x"


@pytest.mark.parametrize("call", ["write", "read", "clear"])
def test_what_was_dropped_raises_though_another_thread_got_the_exception(call, monkeypatch):
    with simulated(1) as cluster:
        backend = cluster.backends[0]

        def synchronize():
            cluster.session.wait()
            cluster.session.take_error()    # by another thread

        with backend.alloc_buffer(64) as buffer, monkeypatch.context() as patch:
            patch.setattr(backend, "synchronize", synchronize)
            arguments = {"write": (0, memoryview(b"x")), "read": (0, memoryview(bytearray(1))), "clear": (1,)}[call]
            backend.put("clear", 12345, 1)
            with pytest.raises(gs.BackendError, match="another thread failed.*may have been dropped"):
                getattr(buffer, call)(*arguments)
            getattr(buffer, call)(*arguments)


def test_an_interrupt_while_a_message_is_made_loses_nothing(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with simulated(1, deadline=4) as cluster:
        backend = cluster.backends[0]
        with backend.alloc_buffer(64) as buffer:
            backend.put("clear", buffer.number, 1)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Envelope, "packed", interrupted)
                backend.synchronize()
            out = bytearray(1)
            buffer.read(0, memoryview(out))
            assert out == b"\1"


@pytest.mark.parametrize("when", range(6))
def test_an_interrupt_of_a_wait_loses_nothing(ctx, when):
    """At the `when`th message that is waited for, as it has come."""

    class Interrupted(SimulatedNetwork):
        left = -1

        def receive(self, timeout):
            message = super().receive(timeout)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return message

    network = Interrupted([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)])
    with gs.remote.cluster_of(network) as cluster:
        graph, x, y, _held = two_halves(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            network.left = when + 1
            with pytest.raises(KeyboardInterrupt):
                for k in range(6):
                    x.set(np.full((2, 16), k, np.float32))
                    scheduler.compute(graph)
                    y.numpy()
            for k in (8, 9):
                x.set(np.full((2, 16), k, np.float32))
                scheduler.compute(graph)
                assert np.array_equal(y.numpy(), np.full((2, 16), 6.0 * k, np.float32))
            assert not cluster.lost


@pytest.mark.parametrize("patience", [None, 0.25])
def test_an_interrupt_at_any_instruction_of_a_session_loses_nothing(patience):
    network = SimulatedNetwork([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)])
    network.patience = patience
    with gs.remote.cluster_of(network, 4) as cluster:
        contexts = [gs.Context() for _ in range(2)]
        one, two = (ctx.tensor("i8", (64,), "t") for ctx in contexts)
        buffers = [backend.alloc_tensors(ctx) for backend, ctx in zip(cluster.backends, contexts, strict=True)]
        first, second = cluster.backends
        out = bytearray(64)

        def talk():
            first.put("clear", buffers[0].number, 1)
            second.cpy_tensor_async(one, two)
            second.get_tensor_async(two, memoryview(out))
            second.synchronize()

        at, where = 0, ""
        while where is not None:
            at += 7
            where = interrupted(talk, at, "remote/session")
            value = at % 100
            first.put("clear", buffers[0].number, value)
            gs.tensor_copy(one, two)
            assert set(two.numpy().tolist()) == {value}, where
            assert not cluster.lost, where
        assert at > 700
        for buffer in buffers:
            buffer.close()


def test_an_interrupt_at_any_instruction_of_sending_loses_nothing_that_was_queued():
    with simulated(1, deadline=4) as cluster, cluster.backends[0].alloc_buffer(64) as buffer:
        at, where, out, backend = 0, "", bytearray(1), cluster.backends[0]
        while where is not None:
            at += 1
            backend.put("clear", buffer.number, at % 100)
            where = interrupted(cluster.session.flush, at, "remote/session")
            buffer.read(0, memoryview(out))
            assert out[0] == at % 100, where
        assert at > 200


def test_an_interrupt_at_any_instruction_queues_no_command_without_its_bytes():
    with simulated(1, deadline=4) as cluster, cluster.backends[0].alloc_buffer(64) as buffer:
        at, where, out = 0, "", bytearray(64)
        while where is not None:
            at += 1
            where = interrupted(lambda data=bytes([at % 100]) * 64: buffer.write(0, memoryview(data)), at,
                                "remote/session")
            buffer.read(0, memoryview(out))
            assert where is not None or set(out) == {at % 100}
        assert at > 300


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_of_a_fork_sends_nothing_of_what_its_parent_has_queued():
    with simulated(1) as cluster:
        backend, session = cluster.backends[0], cluster.session
        with backend.alloc_buffer(64) as buffer:
            backend.put("clear", buffer.number, 1)
            pid = os.fork()
            if not pid:
                sent = session.messages
                session.lock = None         # another thread may have held it
                backend.synchronize()
                cluster.session.close()
                os._exit(session.messages - sent)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            out = bytearray(1)
            buffer.read(0, memoryview(out))
            assert out == b"\1"


@pytest.mark.parametrize("is_sent", [False, True])
def test_what_was_to_be_freed_on_other_workers_is_freed_after_a_loss(is_sent):
    with simulated(2, deadline=4, memory=1 << 10) as cluster:
        first, second = cluster.backends
        network = cluster.session.transport
        kept, other = first.alloc_buffer(1 << 10), second.alloc_buffer(64)
        network.begin(Faults(deaths={"w1": network.handled["w1"]}))
        second.put("clear", other.number, 1)
        kept.close()
        if is_sent:
            first.flush()
        with pytest.raises(gs.BackendLost):
            second.synchronize()
        assert first.memory_available() == 1 << 10
        other.close()


def test_backends_of_one_name_on_a_worker_have_names_of_their_own(ctx):
    with simulated(2, backends=lambda: [gs.CpuBackend(1), gs.CpuBackend(1), gs.CpuBackend(1, name="b")]) as cluster:
        names = [backend.name for backend in cluster.backends]
        assert names == ["w0:CPU0", "w0:CPU1", "w0:b", "w1:CPU0", "w1:CPU1", "w1:b"]
        assert [worker.name for worker in cluster.workers] == ["w0", "w1"]
        assert RemoteBackend(cluster.workers[1], 2).name == "w1:b"
        with pytest.raises(ValueError, match="worker 'w1' has 3 backends, and none with number 3"):
            RemoteBackend(cluster.workers[1], 3)
        graph, x, y, _held = two_halves(ctx, *cluster.backends[:2])
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            assert np.array_equal(y.numpy(), np.full((2, 16), 6.0, np.float32))


def test_what_was_to_be_freed_on_a_lost_worker_alone_is_forgotten():
    with simulated(2) as cluster:
        session = cluster.session
        cluster.backends[1].alloc_buffer(64).close()
        session.transport.dead["w1"] = "it was killed"
        assert session.lose_dead()
        session.wait()
        assert session.take_error() is None
        cluster.backends[0].alloc_buffer(64).close()


def test_segments_that_come_long_before_an_earlier_one_are_executed(ctx):
    """One worker computes for long, and another has much to do that comes after it."""
    network = SimulatedNetwork([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)],
                               cost=lambda worker, message: 1.0 if worker.name == "w0" else 0.0)
    with gs.remote.cluster_of(network) as cluster:
        graph, x, _y, _held = two_halves(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            second = cluster.backends[1]
            with second.alloc_buffer(64) as buffer:
                scheduler.compute_async(graph)
                second.flush()
                for k in range(MAX_HELD + 40):
                    second.put("clear", buffer.number, k % 256)
                    second.flush()
                scheduler.synchronize()
                out = bytearray(1)
                buffer.read(0, memoryview(out))
                assert out[0] == (MAX_HELD + 39) % 256


def test_what_comes_late_or_twice_does_not_open_a_closed_session_again():
    worker = Worker("w0", [gs.CpuBackend(1)])
    alloc = Envelope("call", "s", 0, 0, [Segment("w0", 0, [["alloc", 1, 0, 64, "any"]])]).packed()
    close = Envelope("close", "s", 0, 0, [Segment("w0", 0, [])]).packed()
    assert worker.answer(alloc)
    assert worker.used == [64]
    assert worker.answer(close)
    assert worker.answer(alloc) == []
    assert worker.used == [0] and not worker.sessions
    worker.close()


def test_an_answer_that_is_no_value_is_an_error_of_its_question():
    class Odd(gs.CpuBackend):
        kv_padding = object()

    network = SimulatedNetwork([Worker("w0", [Odd(1)])])
    with pytest.raises(TypeError, match="not JSON serializable"):
        gs.remote.cluster_of(network, 4)


def test_a_question_that_is_put_aside_takes_no_message():
    with simulated(2) as cluster:
        session, backend, took = cluster.session, cluster.backends[0], []
        with backend.alloc_buffer(64) as buffer:
            for worker in ("w0", "w1"):
                ask_ahead(session, worker, "memory", [0], lambda answer, w=worker: took.append((w, answer)))
            before = session.messages
            session.flush()
            backend.synchronize()
            assert session.messages == before and not took
            backend.put("clear", buffer.number, 1)
            backend.synchronize()
            assert session.messages == before + 1 and took == [("w0", None)]      # w1 has got nothing yet


@pytest.mark.parametrize("question, arguments", [("kinds", [0, [{}]]), ("kinds", [7, []]), ("no question", [])])
def test_a_question_put_aside_that_fails_leaves_no_answer_and_no_error(question, arguments):
    with simulated(1) as cluster:
        backend, took = cluster.backends[0], []
        with backend.alloc_buffer(64) as buffer:
            ask_ahead(cluster.session, "w0", question, arguments, took.append)
            backend.put("clear", buffer.number, 1)
            out = bytearray(1)
            buffer.read(0, memoryview(out))
            assert out == b"\1" and not took


def test_an_answer_of_a_wrong_shape_to_a_question_put_aside_is_not_taken(monkeypatch):
    monkeypatch.setitem(QUESTIONS, "memory", lambda self, session, device: "much")
    with simulated(1) as cluster:
        backend, took = cluster.backends[0], []
        with backend.alloc_buffer(64):
            ask_ahead(cluster.session, "w0", "memory", [0], took.append)
            backend.synchronize()
            backend.alloc_buffer(64).close()
            backend.synchronize()
        with pytest.raises(MessageError, match="the answer to 'memory'"):
            backend.ask("memory", 0)
        assert not took


def test_questions_put_aside_for_a_lost_worker_are_forgotten(ctx):
    network = SimulatedNetwork([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)])
    with cluster_of(network, deadline=4) as cluster:
        kept = weakref.WeakSet()

        class Take:
            def __init__(self):
                kept.add(self)

            def __call__(self, answer):
                pass

        ask_ahead(cluster.session, "w1", "memory", [0], Take())
        network.dead["w1"] = "a test"
        with pytest.raises(gs.BackendLost):
            cluster.backends[1].ask("memory", 0)
        gc.collect()
        assert not kept
        with pytest.raises(gs.BackendLost):
            ask_ahead(cluster.session, "w1", "memory", [0], Take())


def test_questions_put_aside_for_a_worker_that_gets_no_commands_are_bounded():
    """A session keeps the latest: a scheduler may announce any number of graphs of which a worker computes no part."""
    with simulated(2) as cluster:
        session, took = cluster.session, []
        for k in range(2 * MAX_ASIDE):
            for worker in ("w0", "w1"):
                ask_ahead(session, worker, "memory", [0], lambda answer, of=(worker, k): took.append(of))
        for backend in cluster.backends:
            backend.alloc_buffer(64).close()
            backend.synchronize()
        assert sorted(took) == [(worker, k) for worker in ("w0", "w1") for k in range(MAX_ASIDE, 2 * MAX_ASIDE)]


def test_a_name_whose_worker_did_not_start_may_be_used_again():
    if sys.platform == "win32":
        pytest.skip("needs sockets of the file system")
    with gs.remote.connect(workers=1, threads=1, transport="processes") as cluster:
        with pytest.raises(gs.BackendError, match="worker 'again' does not start: ValueError: backend 'none'"):
            cluster.join("again", backends=["none"])
        assert cluster.session.transport.workers == ("w0",)
        joined, = cluster.join("again", threads=1)
        assert joined.ask("memory", 0) is None


def test_what_is_freed_after_an_error_in_the_same_message_is_freed():
    with simulated(1, memory=1 << 10) as cluster:
        backend = cluster.backends[0]
        buffer = backend.alloc_buffer(1 << 10)
        backend.put("run", 99)
        buffer.close()
        with pytest.raises(gs.BackendError, match="there is no split 99"):
            backend.synchronize()
        assert backend.memory_available() == 1 << 10


@pytest.mark.parametrize(("how", "said"), [
    ({"deadline": 0}, "a deadline of 0 s"), ({"deadline": float("nan")}, "a deadline of nan s"),
    ({"backends": "cpu"}, r"such as \['cpu'\]"), ({"workers": ["a/b"]}, "without slashes"),
    ({"workers": [1]}, "without slashes"), ({"workers": ["driver"]}, "none is 'driver'"),
])
def test_what_a_cluster_cannot_have_is_refused_before_anything_starts(how, said):
    with pytest.raises(ValueError, match=said):
        gs.remote.connect(transport="processes", **how)


# -- what is dropped or given up --------------------------------------------------------------------


def held(cluster):
    """{worker: (bytes, buffers, splits)} of all sessions."""
    return {name: (sum(worker.used), sum(len(s.buffers) for s in worker.sessions.values()),
                   sum(len(s.splits) for s in worker.sessions.values()))
            for name, worker in cluster.session.transport.handlers.items()}


def test_what_becomes_garbage_is_freed_with_the_next_message(ctx):
    with simulated(2) as cluster:
        before = held(cluster)
        for _ in range(2):
            model = llama.load(llama.small_model(), cluster.backends, n_ctx=64)
            model.eval([1, 2, 3])
            del model
            buffer = cluster.backends[1].alloc_buffer(64)
            del buffer
            gc.collect()
            cluster.backends[0].synchronize()
            assert held(cluster) == before


def test_what_became_garbage_is_freed_with_a_message_that_is_full():
    with simulated(1) as cluster, cluster.backends[0].alloc_buffer(PIECE) as kept:
        cluster.backends[0].alloc_buffer(64)
        gc.collect()
        kept.write(0, memoryview(bytes(PIECE)))
        assert held(cluster) == {"w0": (PIECE, 1, 0)}


def test_garbage_collected_in_the_middle_of_the_sessions_own_work_is_freed():
    """A finalizer may run between any two instructions of a thread that holds the session."""
    class Cycle:
        pass

    with simulated(1) as cluster:
        backend, out, before = cluster.backends[0], bytearray(1), gc.get_threshold()
        kept = backend.alloc_buffer(64)
        try:
            for k in range(300):
                cycle = Cycle()
                cycle.itself, cycle.buffer = cycle, backend.alloc_buffer(64)
                del cycle
                gc.set_threshold(1 + k % 60, 1, 1)
                backend.put("clear", kept.number, k % 256)
                kept.read(0, memoryview(out))
                gc.set_threshold(*before)
                assert out[0] == k % 256
        finally:
            gc.set_threshold(*before)
        gc.collect()
        backend.synchronize()
        assert held(cluster) == {"w0": (64, 1, 0)}
        kept.close()


def test_what_a_worker_makes_for_a_call_that_is_given_up_is_freed():
    """Another worker is lost while this one is busy and the call waits for it."""
    seen = set()

    def cost(worker, message):
        is_slow = worker.name == "w0" and b'["clear",' in message and message not in seen
        seen.add(bytes(message))
        return 9.0 * is_slow

    with simulated(2, deadline=8, cost=cost) as cluster:
        network, (first, second) = cluster.session.transport, cluster.backends
        slow, other = first.alloc_buffer(64), second.alloc_buffer(64)
        network.begin(Faults(hangs={"w1": network.handled["w1"]}))
        second.put("clear", other.number, 0)
        second.flush()
        first.put("clear", slow.number, 0)
        first.flush()
        with pytest.raises(gs.BackendLost, match="'w1' has not answered"):
            first.alloc_buffer(1 << 10)
        first.synchronize()
        assert held(cluster)["w0"] == (64, 1, 0)
        for buffer in (slow, other):
            buffer.close()


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_split_whose_registration_was_given_up_is_registered_again(ctx, is_sent):
    with simulated(2, deadline=4) as cluster:
        network, (first, second) = cluster.session.transport, cluster.backends
        graph, x, y, _held = products(ctx, first)
        other = second.alloc_buffer(64)
        with gs.Scheduler([first]) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            network.begin(Faults(hangs={"w1": network.handled["w1"]}))
            second.put("clear", other.number, 0)
            if is_sent:
                second.flush()
            with pytest.raises(gs.BackendLost):
                scheduler.compute(graph)
            assert held(cluster)["w0"][2] == is_sent
            for k in (3, 4):
                x.set(np.full((2, 16), k, np.float32))
                scheduler.compute(graph)
                assert np.array_equal(y.numpy(), np.full((2, 16), 2.0 * k, np.float32))
        first.synchronize()
        assert held(cluster)["w0"][2] == 0
        other.close()


def test_a_split_that_fails_at_its_registration_is_registered_at_the_next_compute(ctx):
    class Late(gs.CpuBackend):
        refused = 1

        def graph_plan_create(self, graph):
            if self.refused:
                self.refused -= 1
                raise gs.OutOfMemory("no work memory", self.name, 2, 1)
            return super().graph_plan_create(graph)

    with simulated(1, backends=lambda: [Late(1)]) as cluster:
        graph, x, y, _held = products(ctx, cluster.backends[0])
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            with pytest.raises(gs.OutOfMemory, match="no work memory") as raised:
                scheduler.compute(graph)
            assert any("MUL_MAT" in note for note in raised.value.__notes__)
            assert raised.value.backend == cluster.backends[0].name == "w0:CPU"
            assert "worker 'w0' raised this for backend 'w0:CPU'" in raised.value.__notes__
            scheduler.compute(graph)
            assert np.array_equal(y.numpy(), np.full((2, 16), 2.0, np.float32))


def test_no_backend_is_named_where_a_worker_has_two_of_the_name_in_an_error(ctx):
    class Full(gs.CpuBackend):
        def graph_plan_create(self, graph):
            raise gs.OutOfMemory("no work memory", self.name, 2, 1)

    with simulated(1, backends=lambda: [Full(1, name="CPU"), gs.CpuBackend(1, name="CPU")]) as cluster:
        graph, x, _y, _held = products(ctx, cluster.backends[0])
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            with pytest.raises(gs.OutOfMemory, match="no work memory") as raised:
                scheduler.compute(graph)
            assert raised.value.backend is None


@pytest.mark.parametrize("when", range(1, 4))
def test_what_a_worker_makes_for_a_call_that_is_interrupted_is_freed(when):
    class Interrupted(SimulatedNetwork):
        left = -1

        def receive(self, timeout):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().receive(timeout)

    network = Interrupted([Worker("w0", [gs.CpuBackend(1)])])
    with gs.remote.cluster_of(network) as cluster:
        network.left = when
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                cluster.backends[0].alloc_buffer(64).close()
        cluster.backends[0].synchronize()
        assert held(cluster) == {"w0": (0, 0, 0)}


def test_the_end_of_a_session_is_repeated_until_its_workers_confirm_it():
    class Deaf(SimulatedNetwork):
        lost_ends = 3

        def post(self, worker, message, route=()):
            if Envelope.read(message).kind == "close" and self.lost_ends:
                self.lost_ends -= 1
            else:
                super().post(worker, message, route)

    network = Deaf([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)])
    with gs.remote.cluster_of(network) as cluster:
        assert all(worker.sessions for worker in network.handlers.values())
        cluster.session.close()
        assert not any(worker.sessions for worker in network.handlers.values())
        assert not cluster.lost and not network.lost_ends


def test_a_worker_that_does_not_confirm_the_end_is_lost_and_closing_ends():
    with simulated(2, deadline=4) as cluster:
        network = cluster.session.transport
        network.begin(Faults(hangs={"w1": network.handled["w1"]}))
        start = network.now()
        cluster.session.close()
        assert network.now() - start == pytest.approx(4)
        assert [backend.worker for backend in cluster.lost] == ["w1"]


def test_a_loss_keeps_nothing_that_its_frames_held_alive():
    class Held:
        pass

    def computed(backend):
        backend.held = Held()
        kept = backend.__dict__.pop("held")
        reference.append(weakref.ref(kept))
        backend.put("clear", 1, 0)
        backend.synchronize()

    reference = []
    with simulated(2, deadline=4) as cluster:
        network = cluster.session.transport
        network.begin(Faults(deaths={"w1": network.handled["w1"]}))
        with pytest.raises(gs.BackendLost):
            computed(cluster.backends[1])
        gc.collect()
        assert reference[0]() is None
