"""What a plan says of messages and bytes is what a network carries."""

import numpy as np
import pytest
from remote_workers import products, simulated

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama.synthetic import random_model
from ggml_sched.planning.envelopes import PIECE

HEADS = 6000
"""Bytes of the head of a message, at most, in these tests."""


def carried(network, before=({}, {})):
    """{(from, to): (messages, bytes)} since `before`."""
    return {way: (n - before[0].get(way, 0), network.bytes_carried[way] - before[1].get(way, 0))
            for way, n in network.carried.items() if n != before[0].get(way, 0)}


def check(plan, seen):
    """The same messages over the same links, and the bytes of their data."""
    said = plan.messages()
    assert {way: found.messages for way, found in said.items()} == {way: n for way, (n, _) in seen.items()}
    for way, (n, size) in seen.items():
        assert said[way].nbytes <= size <= said[way].nbytes + n * HEADS, way


def compute(network, scheduler, graph, x, y, rows, width, copies=1):
    """The messages of one compute with its inputs and output, after those that register the splits."""
    for _ in range(copies + 1):
        scheduler.alloc(graph)
        before = dict(network.carried), dict(network.bytes_carried)
        x.set(np.ones((rows, width), np.float32))
        scheduler.compute(graph, wait=False)
        y.numpy()
    return carried(network, before)


@pytest.mark.parametrize("path", ["a", "ab", "ba", "abc", "cab", "aba", "abcab"])
def test_messages_of_products_in_any_order_of_workers(ctx, path):
    with simulated(3) as cluster:
        graph, x, y, _held = products(ctx, *(cluster.backends["abc".index(step)] for step in path), n=32)
        with gs.Scheduler(cluster.backends) as scheduler:
            seen = compute(cluster.session.transport, scheduler, graph, x, y, 2, 32)
            check(scheduler.plan(graph), seen)


@pytest.mark.parametrize("path", ["abh", "ahb", "hab", "hh"])
@pytest.mark.parametrize("copies", [1, 2])
def test_messages_beside_a_host(ctx, path, copies):
    with simulated(2) as cluster, gs.CpuBackend(1) as cpu:
        backends = *cluster.backends, cpu
        graph, x, y, _held = products(ctx, *(backends["abh".index(step)] for step in path), n=32)
        with gs.Scheduler(backends, copies=copies) as scheduler:
            seen = compute(cluster.session.transport, scheduler, graph, x, y, 2, 32, copies)
            assert np.all(y.numpy() == {2: 6, 3: 24}[len(path)])
            check(scheduler.plan(graph), seen)


@pytest.mark.parametrize("rows", [1 << 10, 1 << 14])
def test_data_that_travel_in_pieces_are_several_messages(ctx, rows):
    with simulated(2) as cluster:
        graph, x, y, _held = products(ctx, *cluster.backends, n=128, rows=rows)
        with gs.Scheduler(cluster.backends) as scheduler:
            seen = compute(cluster.session.transport, scheduler, graph, x, y, rows, 128)
            plan = scheduler.plan(graph)
            check(plan, seen)
            assert (plan.messages()["w0", "w1"].messages > 1) == (x.nbytes > PIECE)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("n", [2, 3])
def test_messages_of_a_token(arch, n):
    with simulated(n) as cluster, llama.load(random_model(arch, 1), cluster.backends, n_ctx=64) as model:
        network = cluster.session.transport
        for tokens in ([3, 14, 15], [9], [26], [5]):
            before = dict(network.carried), dict(network.bytes_carried)
            model.eval(tokens)
        plan = model.scheduler.plan(model.batch_graph(1, min(64, model.n_ctx) if arch != "mamba" else 1).graph)
        seen = carried(network, before)
        assert sum(found.messages for found in plan.messages().values()) == n + 1
        check(plan, seen)


def test_backends_of_this_process_send_nothing(ctx):
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        graph, *_held = products(ctx, a, b)
        with gs.Scheduler([a, b]) as scheduler:
            plan = scheduler.plan(graph)
            assert plan.messages() == {} and "messages" not in str(plan)


def test_a_printed_plan_shows_messages_and_bytes(ctx):
    with simulated(2) as cluster:
        graph, *_held = products(ctx, *cluster.backends, n=32)
        with gs.Scheduler(cluster.backends) as scheduler:
            lines = str(scheduler.plan(graph)).splitlines()
        at = lines.index("from    to      messages  bytes")
        assert lines[at + 2 : at + 5] == ["driver  w0             1    256", "w0      w1             1    256",
                                          "w1      driver         1    256"]
