"""The eval callback: gets each node (that it selected) in order with its data, can stop the compute, and may fail."""

import numpy as np
import pytest
from devices import Chain, Gated, device, weights_on

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


def backends(n):
    return [gs.CpuBackend(1, name=f"cpu{k}") for k in range(n)]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_node_is_seen_in_order_with_its_data(n, copies):
    made = backends(n)
    chain = Chain(made, log=4)
    with chain.scheduler(made, copies=copies) as scheduler:
        for k in range(4):
            chain.set(k)
            seen = {}
            assert scheduler.compute(chain.graph, lambda node, seen=seen: seen.setdefault(node, node.numpy())) is True
            assert list(seen) == [node for node in chain.graph.nodes if node.op not in VIEWS]
            value = chain.input(k)
            for w, product in zip(chain.values, [t for t in seen if t.op == "MUL_MAT"], strict=True):
                assert np.array_equal(seen[product], value @ w.T)
                value = value @ w.T + chain.input(k)
            assert np.array_equal(seen[chain.out], chain.expected(k))
            assert np.array_equal(chain.log.numpy()[k], chain.expected(k)[0])


@pytest.mark.parametrize("at", range(6))
def test_stop_stops_every_backend(at):
    made = [Gated(f"b{k}") for k in range(3)]
    chain = Chain(made)
    nodes = chain.graph.nodes
    ran = []
    for backend in made:
        original = backend.graph_compute
        backend.graph_compute = lambda graph, original=original: (ran.extend(graph.nodes), original(graph))
    with chain.scheduler(made) as scheduler:
        chain.set(1)
        seen = []

        def stop(node):
            seen.append(node)
            return len(seen) <= at

        assert scheduler.compute(chain.graph, stop) is False
        assert seen == list(nodes[: at + 1]) and len(ran) == at + 1
        assert scheduler.compute(chain.graph) is True
        chain.check(1)


@pytest.mark.parametrize("answer", [None, 0, "", True, np.True_, np.float32(0), False, np.False_])
def test_only_false_stops_a_compute_or_selects_no_node(answer):
    """np.False_ is what `return np.isfinite(node.numpy()).all()` gives."""
    made = backends(2)
    chain = Chain(made)
    is_false = answer is False or answer is np.False_
    with chain.scheduler(made) as scheduler:
        chain.set(1)
        seen = []
        assert scheduler.compute(chain.graph, lambda node: seen.append(node) or answer) is not is_false
        assert seen == list(chain.graph.nodes[: 1 if is_false else None])
        seen.clear()
        assert scheduler.compute(chain.graph, seen.append, lambda node: answer) is True
        assert seen == ([] if is_false else list(chain.graph.nodes))


@pytest.mark.parametrize("ask", [None, True, False])
@pytest.mark.parametrize("at", range(4))
def test_an_exception_reaches_the_caller_and_the_scheduler_works_afterwards(at, ask):
    """Raised by the callback, or by `ask`, which selects all earlier nodes or none."""
    made = backends(2)
    chain = Chain(made)
    with chain.scheduler(made, copies=2) as scheduler:
        chain.set(2)
        seen = []

        def fail(node):
            if node is chain.graph.nodes[at]:
                raise LookupError(node.name)
            if ask is None:
                seen.append(node)
            return ask

        with pytest.raises(LookupError):
            scheduler.compute(chain.graph, *((fail,) if ask is None else (seen.append, fail)))
        assert seen == ([] if ask is False else list(chain.graph.nodes[:at]))
        assert scheduler.compute(chain.graph) is True
        chain.check(2)


def test_neither_a_callback_nor_a_backend_can_use_the_scheduler():
    backend = device(before={"graph_plan_compute": lambda plan: None})
    chain = Chain([backend])
    with chain.scheduler([backend]) as scheduler:
        chain.set(1)
        for use in (lambda _: scheduler.compute(chain.graph), lambda _: scheduler.synchronize(),
                    lambda _: scheduler.close(), lambda _: scheduler.plan(chain.graph)):
            for observers in ((use,), (lambda node: None, use), ()):
                backend.before["graph_plan_compute"] = (lambda plan: None) if observers else use
                with pytest.raises(gs.Error, match="at work"):
                    scheduler.compute(chain.graph, *observers)
        backend.before.clear()
        chain.compute(scheduler, 1)


# -- ask: selecting the nodes to observe ------------------------------------------------------------


def noted(name, log, waits=False):
    """A backend that appends the nodes of each call of graph_compute to a log, and its waits if asked for."""
    before = {"graph_compute": lambda graph: log.append(("run", *(node.name for node in graph.nodes))),
              "synchronize": lambda: log.append(("wait", name))}
    return device(name=name, before=before if waits else {"graph_compute": before["graph_compute"]})


def long_chain(n, backends_of, log=4):
    """A chain whose nodes all have names, and its backends."""
    made = backends_of(n)
    chain = Chain(made, log=log)
    for k, node in enumerate(chain.graph.nodes):
        chain.ctx.set_name(node, f"n{k}")
    return made, chain, [node.name for node in chain.graph.nodes if node.op not in VIEWS]


def events(steps, wanted):
    """The expected log: asks up to a selected node or a step's end, then one run of those nodes, then the
    observation."""
    found = []
    for step in steps:
        pending = []
        for name in step:
            pending.append(name)
            found.append(("ask", name))
            if name in wanted or name == step[-1]:
                found.append(("run", *pending))
                pending = []
            if name in wanted:
                found.append(("seen", name))
    return found


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_unselected_nodes_run_together_with_the_next_selected_one(n, every, copies):
    log = []
    made, chain, names = long_chain(n, lambda n: [noted(f"b{k}", log) for k in range(n)])
    wanted = set(names[every - 1 :: every])
    with gs.Scheduler(made, copies=copies) as scheduler:
        plan = scheduler.alloc(chain.graph)
        steps = [[t.name for t in split.nodes if t.op not in VIEWS] for split in plan.splits]
        for k in range(3):
            chain.set(k)
            data = {}

            def ask(node):
                log.append(("ask", node.name))
                return node.name in wanted

            def see(node, data=data):
                log.append(("seen", node.name))
                data[node.name] = node.numpy()

            log.clear()
            assert scheduler.compute(chain.graph, see, ask) is True
            assert log == events(steps, wanted)
            chain.check(k)
            assert np.array_equal(chain.log.numpy()[k], chain.expected(k)[0])
            every_one = {}
            scheduler.compute(chain.graph, lambda node, to=every_one: to.update({node.name: node.numpy().tobytes()}))
            assert {name: found.tobytes() for name, found in data.items()} == {
                name: every_one[name] for name in names if name in wanted}


@pytest.mark.parametrize("at", range(6))
def test_stopping_at_a_node_that_was_asked_for(at):
    log = []
    made, chain, names = long_chain(3, lambda n: [noted(f"b{k}", log) for k in range(n)], log=0)
    with chain.scheduler(made) as scheduler:
        chain.set(1)
        asked = []
        assert scheduler.compute(chain.graph, lambda node: False,
                                 lambda node: asked.append(node.name) or node.name == names[at]) is False
        assert asked == names[: at + 1] == [name for _, *run in log for name in run]
        assert scheduler.compute(chain.graph) is True
        chain.check(1)


@pytest.mark.parametrize("wanted", [(), ("write",), ("late",), ("write", "late")])
def test_writes_go_back_whether_asked_for_or_not(ctx, wanted):
    here, there = backends(2)
    cache = weights_on(there, "any", cache=np.zeros((3, 4), np.float32))["cache"]
    x = ctx.tensor("f32", (4, 1), "x", input=True)
    row = ctx.tensor("i64", (1,), "row", input=True)
    write = ctx.set_name(ctx.set_rows(cache, ctx.scale(x, 2.0), row), "write")
    late = ctx.set_output(ctx.set_name(ctx.scale(write, 10.0), "late"))
    with gs.Scheduler([here, there]) as scheduler:
        scheduler.set_tensor_backend(write, here)
        scheduler.set_tensor_backend(late, there)
        plan = scheduler.alloc(gs.Graph(late))
        assert plan.data.write_backs and len(plan.splits) == 2
        x.set(np.float32([[1, 2, 3, 4]]))
        row.set(np.int64([1]))
        seen = {}
        assert scheduler.compute(plan.graph, lambda node: seen.update({node.name: node.numpy()[1].tolist()}),
                                 lambda node: node.name in wanted) is True
        expected = {"write": [2, 4, 6, 8], "late": [20, 40, 60, 80]}
        assert seen == {name: expected[name] for name in wanted}
        assert cache.numpy()[1].tolist() == [2, 4, 6, 8] and late.numpy()[1].tolist() == [20, 40, 60, 80]


@pytest.mark.parametrize("wanted", [(), ("read",), ("end",), ("read", "end")])
def test_backends_wait_for_each_other_whether_nodes_are_observed_or_not(ctx, wanted):
    """A node's backend is done before it is observed; its alloc dependencies on other backends stay until then."""
    log = []
    made = [noted(name, log, waits=True) for name in ("w0", "w1")]
    x = ctx.tensor("f32", (64,), "x", input=True)
    first = ctx.set_name(ctx.scale(x, 3.0), "first")
    read = ctx.set_name(ctx.scale(x, 2.0), "read")
    end = ctx.set_output(ctx.set_name(ctx.scale(read, 5.0), "end"))
    last = ctx.set_output(ctx.set_name(ctx.scale(x, 7.0), "last"))
    ctx.keep_until(first, end)
    graph = gs.Graph(end, last)
    with gs.Scheduler(made) as scheduler:
        for t, backend in ((first, 0), (read, 1), (end, 1), (last, 0)):
            scheduler.set_tensor_backend(t, made[backend])
        names = [t.name for t in scheduler.alloc(graph).graph.nodes]
        assert names == ["read", "first", "end", "last"]
        for k in range(3):
            x.set(np.full(64, k, np.float32))
            log.clear()
            seen = {}

            def see(node, seen=seen):
                log.append(("seen", node.name))
                seen[node.name] = node.numpy()[0].item()

            assert scheduler.compute(graph, see, lambda node: node.name in wanted) is True
            assert seen == {name: k * {"read": 2, "end": 10}[name] for name in wanted}
            assert end.numpy()[0] == 10 * k and last.numpy()[0] == 7 * k
            for name in wanted:
                assert log[log.index(("seen", name)) - 1] == ("wait", "w1")
            at, after = log.index(("run", "end")), log.index(("run", "last"))
            assert ("wait", "w0") in log[log.index(("run", "first")):at] and ("wait", "w1") in log[at:after]


def test_ask_alone_makes_no_sense():
    made, chain, _ = long_chain(1, backends, log=0)
    with gs.Scheduler(made) as scheduler, pytest.raises(ValueError, match="no callback"):
        scheduler.compute(chain.graph, ask=lambda node: True)


def test_what_goes_back_is_in_its_memory_when_it_is_seen():
    """The write-back is complete, since the callback may read the root's memory."""
    for seed in range(8):
        world = DeferredQueues(seed)
        here, there = DeferredBackend("here", world), DeferredBackend("there", world)
        cache = weights_on(there, "any", cache=np.zeros((3, 4), np.float32))["cache"]
        ctx = gs.Context()
        x, row = ctx.tensor("f32", (4, 1), "x", input=True), ctx.tensor("i64", (1,), "row", input=True)
        graph = gs.Graph(ctx.set_rows(cache, x, row))
        with gs.Scheduler([here, there]) as scheduler:
            scheduler.set_tensor_backend(graph.nodes[0], here)
            assert scheduler.alloc(graph).data.write_backs
            x.set(np.float32([[1, 2, 3, 4]]))
            row.set(np.int64([1]))
            memory = cache.buffer.memory[cache.offset : cache.offset + cache.nbytes].view(np.float32)
            seen = []
            scheduler.compute(graph, lambda node, memory=memory, seen=seen: seen.append(memory[4:8].tolist()))
            assert seen == [[1, 2, 3, 4]]
