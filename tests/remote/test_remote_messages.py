"""A message from a stranger: a typed error, and nothing of another session is touched."""

import json
import random

import numpy as np
import pytest
from remote_workers import simulated, two_halves

import ggml_sched as gs
from ggml_sched.remote import messages as messages_room
from ggml_sched.remote import worker as worker_room
from ggml_sched.remote.envelope import Envelope, Segment, error_of
from ggml_sched.remote.messages import MessageError, packed, unpacked
from ggml_sched.remote.simulated import SimulatedNetwork
from ggml_sched.remote.tensors import layout_values, strides, tensors_of
from ggml_sched.remote.worker import Worker

N_MUTATIONS = 400


class Listening(SimulatedNetwork):
    """Keeps every message that the driver sends."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.heard = []

    def post(self, worker, message, route=()):
        self.heard.append((worker, message))
        super().post(worker, message, route)


def recorded():
    """Messages of a driver that uses a worker for all that there is to use."""
    network = Listening([Worker("w0", [gs.CpuBackend(1)], 1 << 22)])
    with gs.remote.cluster_of(network) as cluster:
        backend, ctx = cluster.backends[0], gs.Context()
        graph, x, y, _held = two_halves(ctx, backend, backend)
        with gs.Scheduler([backend]) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            y.numpy()
        backend.alloc_buffer(64).close()
    return [message for _, message in network.heard]


def mutated(message, rng):
    """A message with one thing changed: bytes, its length, or a value of its header."""
    kind = rng.randrange(4)
    if kind == 0:
        return message[: rng.randrange(len(message))]
    if kind == 1:
        out = bytearray(message)
        for _ in range(rng.choice([1, 1, 4])):
            out[rng.randrange(len(out))] = rng.randrange(256)
        return bytes(out)
    header, blocks = unpacked(message)
    places = []

    def visit(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                visit(value[key])

    visit(header)
    where, key = rng.choice(places)
    where[key] = rng.choice([None, -1, 0, 1, 2**31, 2**62, 2**63, 2**70, 1.5, True, "", "x", "run", "w0", [], {},
                             [1, 2], [[]], {"t": "f32", "ne": [1, 1, 1, 1]}, where[key], [where[key]], "9" * 5000])
    return packed(header, blocks)


def check_counts(worker):
    """What a worker counts is what its sessions hold."""
    sessions = worker.sessions.values()
    assert worker.n_buffers == sum(len(s.buffers) for s in sessions)
    assert sum(worker.used) == sum(buffer.size for s in sessions for buffer in s.buffers.values())
    assert worker.n_registered == sum(split.n_tensors for s in sessions for split in s.splits.values())
    assert worker.held_bytes == sum(size for s in sessions for _, size in s.held.values()) + \
        sum(len(message) for s in sessions for sent in s.sent.values() for _, message in sent)


def attack(seed, n):
    """Send `n` changed messages to a worker that serves an honest session, too."""
    rng, messages = random.Random(seed), recorded()
    with simulated(1, memory=1 << 22) as cluster:
        backend, ctx = cluster.backends[0], gs.Context()
        worker = cluster.session.transport.handlers["w0"]
        graph, x, y, _held = two_halves(ctx, backend, backend)
        refused = 0
        with gs.Scheduler([backend]) as scheduler:
            scheduler.alloc(graph)
            for k in range(n):
                # From the start of a session up to the changed message, so that it finds what it names.
                stranger = f"stranger {k}"
                last = rng.randrange(len(messages))
                for i, message in enumerate(messages[: last + 1]):
                    envelope = Envelope.read(message)
                    envelope.session = stranger
                    sent = envelope.packed()
                    try:
                        answers = worker.handle(mutated(sent, rng) if i == last else sent)
                    except MessageError:
                        refused += 1
                        continue
                    for _to, answer in answers:
                        found = Envelope.read(answer)
                        if found.error is not None:
                            refused += 1
                            assert isinstance(error_of(found.error, {}), (gs.Error, TypeError, ValueError))
                worker.close_session(stranger)
                for name in [name for name in worker.sessions if name != cluster.session.name]:
                    worker.close_session(name)
                check_counts(worker)
                if k % 50 == 0:
                    x.set(np.full((2, 16), k, np.float32))
                    scheduler.compute(graph)
                    assert np.array_equal(y.numpy(), np.full((2, 16), 6.0 * k, np.float32))
        assert refused > n // 3


def test_mutated_messages_end_in_typed_errors():
    attack(1, N_MUTATIONS)


@pytest.mark.soak
def test_ten_thousand_mutated_messages_end_in_typed_errors():
    attack(2, 10_000)


class Lying(SimulatedNetwork):
    """Mutates a part of the messages that come to the driver, once it has a generator of random numbers."""

    rng, rate = None, 0.0

    def receive(self, timeout):
        message = super().receive(timeout)
        if message is not None and self.rng is not None and self.rng.random() < self.rate:
            return mutated(bytes(message), self.rng)
        return message


def use_of_liars(seed):
    """Use two workers, whose answers are mutated, for all that there is to use."""
    rng = random.Random(seed)
    network = Lying([Worker(f"w{k}", [gs.CpuBackend(1)], 1 << 22) for k in range(2)])
    network.rate = rng.choice((0.02, 0.1, 0.4))
    network.rng = rng if rng.random() < 0.4 else None
    with gs.remote.cluster_of(network, 5.0) as cluster:
        network.rng = rng
        first, last = cluster.backends
        graph, x, y, _held = two_halves(gs.Context(), first, last)
        with gs.Scheduler([first, last]) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            scheduler.compute(graph)
            y.numpy()
        first.alloc_buffer(64).close()
        assert first.memory_available() is not None and first.work_held >= 0 and first.round_trip() >= 0
        first.system_memory()
        cluster.measure()


def test_mutated_answers_end_in_typed_errors():
    n_errors = 0
    for seed in range(60):
        try:
            use_of_liars(seed)
        except gs.Error:
            n_errors += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert n_errors > 25


@pytest.mark.parametrize("question, answer", [
    ("memory", "lots"), ("memory", -1), ("memory", 1.5), ("work held", None), ("work", True), ("file", 1),
    ("kinds", []), ("kinds", [[True, True]]), ("kinds", [[True, None, 5]]), ("kinds", [[True, True, "5"]]),
    ("fusions", [[0, 9]]), ("fusions", [0]), ("hello", {}), ("hello", [{}]), ("hello", [None])])
def test_an_answer_of_a_wrong_shape_names_the_worker_and_the_question(question, answer, ctx, monkeypatch):
    with simulated(1) as cluster:
        backend, = cluster.backends
        graph, *_held = two_halves(ctx, backend, backend)
        nodes = [node for node in graph.nodes if node.computes][:1]
        values = backend._described(nodes)
        arguments = {"kinds": [0, [values[0]]], "work": [0, *values], "fusions": [0, *values]}.get(question, [0])
        monkeypatch.setattr(backend.session, "call", lambda *args, **options: {"answer": answer})
        with pytest.raises(MessageError, match=f"worker 'w0': the answer to '{question}'"):
            backend.ask(question, *arguments)
        monkeypatch.setattr(backend.session, "call", lambda *args, **options: {})
        with pytest.raises(MessageError, match=f"worker 'w0': the answer to '{question}': there is none"):
            backend.ask(question, *arguments)


@pytest.mark.parametrize("name, value", [
    ("name", 5), ("machine", None), ("alignment", 3), ("alignment", 0), ("alignment", "64"), ("kv_padding", 0),
    ("max_buffer_size", -1), ("host", 1), ("bounded", None), ("inplace", []), ("inplace", {"ADD": -1})])
def test_a_worker_that_describes_itself_wrongly_is_refused(name, value, monkeypatch):
    described = Worker.describe
    monkeypatch.setattr(Worker, "describe", lambda worker: [facts | {name: value} for facts in described(worker)])
    with pytest.raises(MessageError, match="worker 'w0': the answer to 'hello'"):
        simulated(1).__enter__()


def test_no_message_names_what_another_session_has(ctx):
    with simulated(1) as cluster:
        worker = cluster.session.transport.handlers["w0"]
        buffer = cluster.backends[0].alloc_buffer(64)
        values = {"t": "i8", "ne": [64, 1, 1, 1], "at": [buffer.number, 0]}
        envelope = Envelope("call", "stranger", 0, 0, [Segment("w0", 0, [["read", values, 0, 64, 1]])])
        (_, answer), = worker.handle(envelope.packed())
        assert "there is no buffer" in Envelope.read(answer).error["text"]


@pytest.mark.parametrize("values, said", [
    ({"t": "f32", "ne": [4, 2, 1, 1], "at": [1, 40]}, "do not fit a buffer of 64 bytes"),
    ({"t": "f32", "ne": [1 << 40, 1 << 40, 1, 1], "at": [1, 0]}, "62 bits|2\\*\\*63"),
    ({"t": "f32", "ne": [4, 2, 1, 1], "axes": [[0, 1], [1, 3]], "at": [1, 0]}, "axes"),
    ({"t": "f32", "ne": [4, 2, 1, 1], "axes": [[0, 1]], "at": [1, 0]}, "leave out axis 1"),
    ({"t": "f32", "ne": [4, 2, 1, 1], "axes": [[0, 1], [0, 4]], "at": [1, 0]}, "axes"),
    ({"t": "f32", "ne": [4, 2, 1, 1], "at": [2, 0]}, "there is no buffer 2"),
    ({"t": "f99", "ne": [4, 2, 1, 1], "at": [1, 0]}, "is no type"),
    ({"t": "f32", "ne": [4, 2, 1, 1], "op": "ADD", "s": [0, 0], "at": [1, 0]}, "not the position of a tensor before"),
    ({"t": "f32", "ne": [-4, 2, 1, 1], "at": [1, 0]}, "an extent"),
])
def test_what_does_not_fit_is_refused(values, said):
    with gs.CpuBackend(1) as cpu, pytest.raises(MessageError, match=said):
        tensors_of([values], {1: cpu.alloc_buffer(64)})


def test_layouts_come_back_as_they_were(ctx):
    x = ctx.tensor("f32", (6, 5, 4, 3))
    cache = ctx.tensor("f16", (64, 32))
    made = [x, ctx.permute(x, 0, 2, 1, 3), ctx.transpose(x), ctx.permute(x, 3, 1, 2, 0), ctx.tensor("q4_0", (64, 3)),
            ctx.view_3d(cache, 16, 7, 4, 128, 32, 64), ctx.tensor("f32", (0, 3)), ctx.tensor("f32", (1, 1, 5, 1)),
            ctx.view_2d(x, 3, 5, 24, 12)]
    for t in made:
        values = json.loads(json.dumps(layout_values(t)))
        assert strides(t.type, t.ne, values.get("axes")) == t.nb, t
    assert layout_values(ctx.view_2d(cache, 0, 3, 10, 0)) == {"t": "f16", "ne": [0, 3, 1, 1]}


def test_a_layout_whose_elements_overlap_does_not_travel(ctx):
    x = ctx.tensor("f32", (16,))
    windows = ctx.view_2d(x, 8, 3, 16, 0)
    with pytest.raises(gs.PlacementError, match="which a remote backend does not take"):
        layout_values(windows)


# -- what a driver can make a worker hold -----------------------------------------------------------


class Asking:
    """A driver of one worker, message by message."""

    def __init__(self, memory=None, backends=None, session="s"):
        self.worker = Worker("w0", backends or [gs.CpuBackend(1)], memory)
        self.session, self.number = session, 0

    def __call__(self, *commands, acked=0, number=None, blocks=None):
        """The answer to a call: an Envelope, or None."""
        n = self.number if number is None else number
        self.number = n + 1
        segment = Segment("w0", n, [*commands], acked)
        sent = self.worker.handle(Envelope("call", self.session, n, 0, [segment], blocks or {}).packed())
        check_counts(self.worker)
        return Envelope.read(sent[-1][1]) if sent else None

    def error(self, *commands, **how):
        answer = self(*commands, **how)
        return f"{answer.error['type']}: {answer.error['text']}" if answer.error else None


def bytes_of(size, buffer=1):
    return {"t": "i8", "ne": [size, 1, 1, 1], "at": [buffer, 0]}


@pytest.fixture
def asking():
    driver = Asking()
    yield driver
    driver.worker.close()
    assert driver.worker.held_bytes == 0 and driver.worker.n_buffers == 0


def test_answers_that_a_driver_does_not_acknowledge_are_bounded(asking, monkeypatch):
    monkeypatch.setattr(worker_room, "MAX_MESSAGES", 1 << 16)
    assert asking.error(["alloc", 1, 0, 1 << 14, "any"]) is None
    found = [asking.error(["read", bytes_of(1 << 14), 0, 1 << 14, 1]) for _ in range(20)]
    assert found[:4] == [None] * 4
    assert all(error.startswith("OutOfMemory: worker 'w0' holds") for error in found[5:])
    assert asking.worker.held_bytes < 3 << 16
    assert asking.error(["read", bytes_of(1 << 14), 0, 1 << 14, 1], acked=asking.number) is None


def test_envelopes_that_come_early_are_bounded(asking, monkeypatch):
    monkeypatch.setattr(worker_room, "MAX_MESSAGES", 1 << 16)
    for n in range(1, 20):
        assert asking(number=n, blocks={1: bytes(1 << 14)}) is None
    assert 1 << 15 < asking.worker.held_bytes <= 1 << 16
    monkeypatch.setattr(worker_room, "MAX_HELD", 6)
    for n in range(30, 50):
        assert asking(number=n) is None
    assert len(asking.worker.sessions["s"].held) == 6
    # The next one is executed however much is held, and those behind it follow.
    assert asking(number=0, blocks={1: bytes(1 << 16)}).number == 3
    asking.worker.close_session("s")
    assert asking.worker.held_bytes == 0


def test_bytes_that_are_read_in_one_envelope_are_bounded(asking, monkeypatch):
    monkeypatch.setattr(worker_room, "MAX_BLOCK_BYTES", 1 << 16)
    asking(["alloc", 1, 0, 1 << 15, "any"])
    reads = [["read", bytes_of(1 << 15), 0, 1 << 15, k] for k in range(3)]
    assert asking.error(*reads[:2]) is None
    assert asking.error(*reads) == "MessageError: more than 65536 bytes are read in one envelope"


def test_questions_of_strangers_open_no_session_and_those_that_open_one_are_bounded(monkeypatch):
    monkeypatch.setattr(worker_room, "MAX_SESSIONS", 3)
    driver = Asking()
    for k in range(9):
        (_, answer), = driver.worker.handle(Envelope("status", f"s{k}", 0, 0, [Segment("w0", 0, [])]).packed())
        assert Envelope.read(answer).answers == {"w0": 0}
    assert not driver.worker.sessions
    for k in range(3):
        driver.session = f"s{k}"
        driver(number=0)
    driver.session = "s3"
    with pytest.raises(MessageError, match="has 3 sessions"):
        driver(number=0)
    driver.worker.close()


def test_buffers_and_tensors_of_splits_are_bounded(asking, monkeypatch):
    monkeypatch.setattr(worker_room, "MAX_BUFFERS", 3)
    monkeypatch.setattr(worker_room, "MAX_REGISTERED", 7)
    assert [asking.error(["alloc", k, 0, 64, "any"]) for k in range(1, 4)] == [None] * 3
    assert asking.error(["alloc", 4, 0, 0, "any"]) == "MessageError: worker 'w0' has 3 buffers, and allocates no other"
    assert asking.error(["free", 3], ["alloc", 4, 0, 0, "any"]) is None
    x = {"t": "f32", "ne": [4, 1, 1, 1], "at": [1, 0]}
    y = {"t": "f32", "ne": [4, 1, 1, 1], "at": [2, 0], "op": "UNARY:RELU", "s": [0], "p": [6]}
    split = [0, [x, y], [1], [], None]
    assert [asking.error(["split", k, *split]) for k in range(3)] == [None] * 3
    assert asking.error(["split", 3, *split]) == "MessageError: worker 'w0' has splits of 6 tensors, and takes 7"
    assert asking.error(["split", 2, *split]) is None       # in place of the one of this number
    assert asking.error(["drop", 0], ["split", 3, *split]) is None


def test_a_buffer_of_no_usage_is_refused_before_it_is_allocated(asking, monkeypatch):
    allocated = []
    monkeypatch.setattr(worker_room, "new_buffer", lambda *args: allocated.append(args))
    assert asking.error(["alloc", 1, 0, 64, 7]).startswith("MessageError: the usage of a buffer is 7")
    assert not allocated


def test_values_of_any_length_are_not_kept(asking):
    asking(["alloc", 1, 0, 64, "any"])
    for k in range(9):
        assert asking.error(["read", {**bytes_of(64), "junk": f"{k}" * 10_000}, 0, 64, 1]) is None
    assert not asking.worker.sessions["s"].tensors


def test_work_memory_counts_in_a_workers_bound():
    class Working(gs.CpuBackend):
        work_held = 0

        def work_size(self, nodes):
            return 600

        def graph_plan_create(self, graph):
            self.work_held = 600
            return super().graph_plan_create(graph)

    x = {"t": "f32", "ne": [4, 1, 1, 1], "at": [1, 0]}
    y = {"t": "f32", "ne": [4, 1, 1, 1], "at": [1, 64], "op": "UNARY:RELU", "s": [0], "p": [6]}
    driver = Asking(1000, [Working(1)])
    assert driver.error(["alloc", 1, 0, 500, "any"]) is None
    said = "OutOfMemory: backend 'CPU' of worker 'w0': 600 bytes of work memory needed, 500 left"
    assert driver.error(["split", 1, 0, [x, y], [1], [], None]) == said
    assert driver.error(["free", 1], ["alloc", 1, 0, 300, "any"], ["split", 1, 0, [x, y], [1], [], None]) is None
    assert driver.worker.available(0) == 100
    assert driver.error(["alloc", 2, 0, 101, "any"]).startswith("OutOfMemory")
    driver.worker.close()


class Late(gs.CpuBackend):
    """A backend whose queued work fails: `error` is raised by the next wait."""

    asynchronous = True
    error = None

    def synchronize(self):
        error, self.error = self.error, None
        if error is not None:
            raise error


def test_an_error_of_queued_work_does_not_come_after_the_message_that_queued_it():
    """Whatever else fails in that message, and on however many backends."""
    backends = [Late(1), Late(1)]
    driver = Asking(backends=backends)
    backends[0].error = gs.BackendError("late")
    assert driver.error(["no command"]).startswith("MessageError: 'no command'")
    assert driver.error() is None
    for backend in backends:
        backend.error = gs.BackendError("late")
    assert driver.error() == "BackendError: late"
    assert driver.error() is None
    driver.worker.close()


def test_a_message_that_is_larger_than_any_is_refused(monkeypatch):
    monkeypatch.setattr(messages_room, "MAX_MESSAGE", 100)
    with pytest.raises(MessageError, match="a message of 200 bytes, at most 100"):
        unpacked(bytes(200))
