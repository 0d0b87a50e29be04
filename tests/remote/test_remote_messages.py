"""A message from a stranger: a typed error, and nothing of another session is touched."""

import json
import random

import numpy as np
import pytest
from remote_workers import simulated, two_halves

import ggml_sched as gs
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
                            assert isinstance(error_of(found.error), (gs.Error, TypeError, ValueError))
                worker.close_session(stranger)
                for name in [name for name in worker.sessions if name != cluster.session.name]:
                    worker.close_session(name)
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
