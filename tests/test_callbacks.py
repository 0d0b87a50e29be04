"""The eval callback: sees each node in order with its data, stops everything, and may fail."""

from __future__ import annotations

import numpy as np
import pytest
from devices import Chain, Gated, weights_on

import ggml_sched as gs

VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


def backends(n):
    return [gs.CpuBackend(1, name=f"cpu{k}") for k in range(n)]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_node_is_seen_in_order_with_its_data(n, copies):
    made = backends(n)
    chain = Chain(made, log=4)
    with gs.Scheduler(made, copies=copies) as scheduler:
        scheduler.alloc(chain.graph)
        for k in range(4):
            chain.x.set(chain.input(k))
            chain.row.set(np.int64([k]))
            seen = {}
            assert scheduler.compute(chain.graph, lambda node, seen=seen: seen.setdefault(node, node.numpy())) is True
            assert list(seen) == [node for node in chain.graph.nodes if node.op not in VIEWS]
            value = chain.input(k)
            for w, product in zip(chain.values, [t for t in seen if t.op == "MUL_MAT"], strict=True):
                assert np.array_equal(seen[product], value @ w.T)
                value = value @ w.T + chain.input(k)
            assert np.array_equal(seen[chain.out], chain.expected(k))
            assert np.array_equal(chain.log.numpy()[k], chain.expected(k)[0])


def test_a_node_that_writes_to_another_backend_is_seen_with_its_data():
    here, there = backends(2)
    cache = weights_on(there, "any", cache=np.zeros((3, 4), np.float32))["cache"]
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 1), "x", input=True)
    row = ctx.tensor("i64", (1,), "row", input=True)
    out = ctx.set_rows(cache, x, row)
    with gs.Scheduler([here, there]) as scheduler:
        scheduler.set_tensor_backend(out, here)
        plan = scheduler.alloc(gs.Graph(out))
        assert plan.backend_of(out) is here and plan.data.write_backs
        x.set(np.float32([[1, 2, 3, 4]]))
        row.set(np.int64([1]))
        seen = []
        scheduler.compute(plan.graph, lambda node: seen.append(node.numpy()))
        assert seen[-1][1].tolist() == [1, 2, 3, 4] == cache.numpy()[1].tolist()


@pytest.mark.parametrize("at", range(6))
def test_stop_stops_every_backend(at):
    made = [Gated(f"b{k}") for k in range(3)]
    chain = Chain(made)
    nodes = chain.graph.nodes
    ran = []
    for backend in made:
        original = backend.graph_compute
        backend.graph_compute = lambda graph, original=original: (ran.extend(graph.nodes), original(graph))
    with gs.Scheduler(made) as scheduler:
        scheduler.alloc(chain.graph)
        chain.x.set(chain.input(1))
        seen = []

        def stop(node):
            seen.append(node)
            return len(seen) <= at

        assert scheduler.compute(chain.graph, stop) is False
        assert seen == list(nodes[: at + 1]) and len(ran) == at + 1
        assert scheduler.compute(chain.graph) is True
        assert np.array_equal(chain.out.numpy(), chain.expected(1))


def test_only_false_stops():
    made = backends(1)
    chain = Chain(made)
    with gs.Scheduler(made) as scheduler:
        scheduler.alloc(chain.graph)
        chain.x.set(chain.input(1))
        for answer in (None, 0, "", True, np.True_, np.float32(0)):
            assert scheduler.compute(chain.graph, lambda node, answer=answer: answer) is True
        seen = []
        # What `return np.isfinite(node.numpy()).all()` gives.
        assert scheduler.compute(chain.graph, lambda node: seen.append(node) or np.False_) is False
        assert len(seen) == 1


@pytest.mark.parametrize("at", range(4))
def test_an_exception_reaches_the_caller_and_the_scheduler_works_afterwards(at):
    made = backends(2)
    chain = Chain(made)
    with gs.Scheduler(made, copies=2) as scheduler:
        scheduler.alloc(chain.graph)
        chain.x.set(chain.input(2))
        left = [at]

        def fail(node):
            if left[0] == 0:
                raise LookupError(node.name)
            left[0] -= 1

        with pytest.raises(LookupError):
            scheduler.compute(chain.graph, fail)
        assert scheduler.compute(chain.graph) is True
        assert np.array_equal(chain.out.numpy(), chain.expected(2))


def test_a_callback_cannot_use_the_scheduler():
    made = backends(1)
    chain = Chain(made)
    with gs.Scheduler(made) as scheduler:
        scheduler.alloc(chain.graph)
        chain.x.set(chain.input(1))
        for call in (lambda node: scheduler.compute(chain.graph), lambda node: scheduler.synchronize(),
                     lambda node: scheduler.close()):
            with pytest.raises(gs.Error, match="at work"):
                scheduler.compute(chain.graph, call)
        scheduler.compute(chain.graph)
        assert np.array_equal(chain.out.numpy(), chain.expected(1))
