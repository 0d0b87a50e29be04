"""`copies=n` gives each copy between backends n copy slots, used by consecutive computes in turn."""

import threading
from functools import partial

import numpy as np
import pytest
from devices import DATA_WRITES, Chain, Gated, device, wait, weights_on

import ggml_sched as gs

recorded = partial(device, gs.CpuBackend, records=DATA_WRITES)


def rings(plan):
    """{(copied tensor, backend): offsets of its copy slots}."""
    data, found = plan.data, {}
    for c, (like, backend) in enumerate(data.copies):
        further = [k for k, d in enumerate(data.slot_copies) if d == c]
        ids = [data.n_tensors + c, *(data.n_tensors + data.n_copies + k for k in further)]
        found[plan.graph.tensors[like].name, plan.backends[backend].name] = [data.offset(i) for i in ids]
    return found


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_ring_s_memory_is_in_the_plan(copies):
    backends = [gs.DryBackend(name) for name in "abc"]
    chain = Chain(backends)
    scheduler = gs.Scheduler(backends, copies=copies)
    chain.pin(scheduler)
    plan = scheduler.plan(chain.graph)
    plan.verify()
    places = rings(plan)
    assert set(places) == {("x", "a"), ("x", "b"), ("h0", "b"), ("h1", "c")}
    assert all(len(offsets) == copies == len(set(offsets)) for offsets in places.values())
    if copies > 1:
        for backend, used in zip("abc", plan.buffer_sizes, strict=True):
            mine = sorted(o for (_, b), offsets in places.items() if b == backend for o in offsets)
            assert all(after - at >= 128 for at, after in zip(mine, mine[1:], strict=False))
            assert used >= copies * 128 * sum(b == backend for _, b in places)
    scheduler.reserve(chain.graph)
    assert tuple(map(scheduler.buffer_size, backends)) == plan.buffer_sizes


def test_weights_have_one_place(ctx):
    a, host = gs.CpuBackend(1, name="a"), gs.CpuBackend(1, name="host")
    w = weights_on(host, w=np.eye(4, dtype=np.float32))["w"]
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    graph = gs.Graph(ctx.mul_mat(w, x))
    with gs.Scheduler([a, host], copies=3) as scheduler:
        scheduler.set_tensor_backend(graph.nodes[0], a)
        plan = scheduler.plan(graph)
        plan.verify()
        assert {name: len(offsets) for (name, _), offsets in rings(plan).items()} == {"w": 1, "x": 3}


def test_inputs_are_copied_first():
    backends = [gs.DryBackend(name) for name in "abc"]
    chain = Chain(backends)
    scheduler = gs.Scheduler(backends)
    chain.pin(scheduler)
    plan = scheduler.plan(chain.graph)
    assert [tuple(t.name for t in split.inputs) for split in plan.splits] == [("x",), ("x", "h0"), ("h1",)]


def test_every_slot_holds_its_compute_s_data():
    """The last backend begins when all the copies of the next compute have been made."""
    first, last, host = Gated("first"), Gated("last"), gs.CpuBackend(1, name="host")
    begun = threading.Event()
    names = []
    original = last.cpy_tensor_from

    def copy(src, dst):
        done = original(src, dst)
        names.append(src.name)
        if names.count("h0") == 2:
            begun.set()
        return done

    last.cpy_tensor_from = copy
    last.before = lambda number: wait(begun) if number == 0 else None
    chain = Chain([first, last], log=4)
    with chain.scheduler([first, last, host], copies=2) as scheduler:
        chain.check_queued(scheduler, 4)


def test_a_slot_is_not_filled_while_a_compute_reads_it():
    """With two copy slots, the copies of the third compute wait for the first to end."""
    first, last, host = Gated("first"), Gated("last"), gs.CpuBackend(1, name="host")
    order = []
    original = last.cpy_tensor_from

    def copy(src, dst):
        order.append(f"copy {src.name}")
        return original(src, dst)

    last.cpy_tensor_from = copy
    last.after = lambda number: order.append(f"ran {number}")
    chain = Chain([first, last], log=6)
    with chain.scheduler([first, last, host], copies=2) as scheduler:
        chain.check_queued(scheduler, 6)
    for k in range(2, 6):
        third = [i for i, what in enumerate(order) if what == "copy h0"][k]
        assert order.index(f"ran {k - 2}") < third


def test_the_seed_policy_gives_each_copy_one_slot():
    backends = [gs.DryBackend(name) for name in "ab"]
    chain = Chain(backends)
    sizes = {gs.Scheduler(backends, policy="seed", copies=n).plan(chain.graph).buffer_sizes for n in (1, 3)}
    assert len(sizes) == 1


# -- copies that stay valid between computes --------------------------------------------------------------------


def split_over(device, host, streamed=False):
    """x and w live on the host, the product is computed on the device."""
    w = weights_on(host, w=np.arange(16, dtype=np.float32).reshape(4, 4))["w"]
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    out = ctx.set_output(ctx.mul_mat(w, x))
    return w, x, gs.Graph(out), ctx


SETTING = {"the tensor": lambda w, values: w.set(values),
           "its backend": lambda w, values: w.backend.set_tensor(w, values),
           "a copy": lambda w, values: gs.tensor_copy(weights_on(w.backend, other=values)["other"], w)}


@pytest.mark.parametrize("through", SETTING)
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_host_weight_travels_once_and_again_after_it_was_set(copies, queued, through):
    device, host = recorded("device"), recorded("host")
    w, x, graph, ctx = split_over(device, host)
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    with gs.Scheduler([device, host], copies=copies) as scheduler:
        scheduler.set_tensor_backend(graph.nodes[0], device)
        scheduler.alloc(graph)

        def compute(k):
            x.set(np.full((2, 4), k, np.float32))
            if queued:
                scheduler.compute_async(graph)
                scheduler.synchronize()
            else:
                scheduler.compute(graph)
            assert np.array_equal(graph.nodes[0].numpy(), np.full((2, 4), k, np.float32) @ values.T)
            return [name for name, _ in device.take_received()]

        assert sorted(compute(1)) == ["w", "x"]
        assert [compute(k) for k in (2, 3, 4)] == [["x"]] * 3
        values = -values
        SETTING[through](w, values)
        assert sorted(compute(5)) == ["w", "x"]
        assert compute(6) == ["x"]


def test_unchanged_inputs_in_memory_of_their_own_stay():
    device, host = recorded("device"), recorded("host")
    w, x, graph, ctx = split_over(device, host)
    with gs.Scheduler([device, host]) as scheduler:
        scheduler.set_tensor_backend(graph.nodes[0], device)
        scheduler.alloc(graph)
        x.set(np.ones((2, 4), np.float32))
        scheduler.compute(graph)
        first = graph.nodes[0].numpy()
        assert {name for name, _ in device.take_received()} == {"w", "x"}
        host.take_received()
        for _ in range(3):
            scheduler.compute(graph)
        scheduler.compute_async(graph)
        scheduler.synchronize()
        assert device.take_received() == host.take_received() == []
        assert np.array_equal(graph.nodes[0].numpy(), first)
        x.set(np.zeros((2, 4), np.float32))
        scheduler.compute(graph)
        assert [name for name, _ in device.take_received()] == ["x"] and not host.take_received()


def test_a_copy_is_made_again_after_a_failure():
    device, host = recorded("device"), recorded("host")
    w, x, graph, ctx = split_over(device, host)
    with gs.Scheduler([device, host]) as scheduler:
        scheduler.set_tensor_backend(graph.nodes[0], device)
        scheduler.alloc(graph)
        x.set(np.ones((2, 4), np.float32))
        device.graph_plan_compute = lambda plan: 1 / 0
        for run in (scheduler.compute, scheduler.compute_async):
            with pytest.raises(ZeroDivisionError):
                run(graph)
                scheduler.synchronize()
            assert sorted(name for name, _ in device.take_received()) == ["w", "x"]
        del device.graph_plan_compute
        scheduler.compute(graph)
        assert sorted(name for name, _ in device.take_received()) == ["w", "x"]
        assert np.array_equal(graph.nodes[0].numpy(), np.ones((2, 4)) @ np.arange(16).reshape(4, 4).T)


def mixture(host, values):
    """Layers of experts on the host, each of which two tokens use in turn: (graph, x, ids, result)."""
    ctx = gs.Context()
    value = x = ctx.tensor("f32", (values[0].shape[2], 1, 2), "x", input=True)
    ids = ctx.tensor("i32", (1, 2), "ids", input=True)
    for k, v in enumerate(values):
        value = ctx.mul_mat_id(weights_on(host, **{f"e{k}": v})[f"e{k}"], value, ids)
    return gs.Graph(ctx.set_output(value)), x, ids, value


@pytest.mark.parametrize("queued", [False, True])
def test_only_the_used_experts_of_a_streamed_mixture_travel(queued):
    """Three layers of experts on the host, computed on a device that offloads them and has too little memory to keep
    them."""

    device, host = recorded("device", offloads={"MUL_MAT_ID"}), recorded("host")
    rng = np.random.default_rng(5)
    n_expert, n = 6, 8
    values = [rng.integers(-2, 3, (n_expert, n, n)).astype(np.float32) for _ in range(3)]
    graph, x, ids, value = mixture(host, values)
    with gs.Scheduler([device, host], copies=2) as scheduler:
        plan = scheduler.alloc(graph)
        plan.verify()
        assert plan.backend_of(value) is device
        for used in ([1, 4], [4, 4], [0, 5]):
            start = rng.integers(-2, 3, (2, 1, n)).astype(np.float32)
            x.set(start)
            ids.set(np.int32(used).reshape(2, 1))
            device.take_received()
            if queued:
                scheduler.compute_async(graph)
                ids.set(np.int32([[3], [3]]))
                scheduler.synchronize()
            else:
                scheduler.compute(graph)
            moved = sum(size for name, size in device.take_received() if name.startswith("e"))
            assert moved == 3 * len(set(used)) * n * n * 4
            expected = start[:, 0]
            for v in values:
                expected = np.stack([v[i] @ row for i, row in zip(used, expected, strict=True)])
            assert np.array_equal(value.numpy().reshape(2, n), expected)


def test_a_copy_that_a_node_writes_through_has_one_place(ctx):
    """Its write-back is immediate, so no other compute fills the slot."""
    a, b = gs.DryBackend("a"), gs.DryBackend("b")
    cache = weights_on(b, "any", cache=np.zeros((2, 4), np.float32))["cache"]
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    write = ctx.cpy(ctx.sqr(x), cache)
    graph = gs.Graph(write)
    scheduler = gs.Scheduler([a, b], copies=3)
    for node in graph.nodes:
        scheduler.set_tensor_backend(node, a)
    plan = scheduler.plan(graph)
    plan.verify()
    assert {name: len(offsets) for (name, _), offsets in rings(plan).items()} == {"x": 3, write.name: 1}


def test_experts_that_a_node_writes_on_the_device_travel_whole(ctx):
    """The node writes to the copy, which the product then reads: it may change some experts only."""
    device, host = recorded("device"), recorded("host")
    old = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
    experts = weights_on(host, "any", e=old)["e"]
    x, ids = ctx.tensor("f32", (3, 1, 2), "x", input=True), ctx.tensor("i32", (1, 2), "ids", input=True)
    row = ctx.tensor("f32", (3, 1, 3), "row", input=True)
    stored = ctx.set(experts, row, 12, 36, 108, 0, inplace=True)
    value = ctx.mul_mat_id(stored, x, ids)
    graph = gs.Graph(ctx.set_output(value))
    with gs.Scheduler([device, host]) as scheduler:
        for node in (stored, value):
            scheduler.set_tensor_backend(node, device)
        scheduler.alloc(graph).verify()
        x.set(np.ones((2, 1, 3)))
        ids.set(np.int32([[1], [2]]))
        row.set(np.zeros((3, 1, 3)))
        scheduler.compute(graph)
        new = old.copy()
        new[:, 0] = 0
        assert np.array_equal(value.numpy()[:, 0], new[[1, 2]].sum(-1))
        assert np.array_equal(experts.numpy(), new)


def test_experts_that_are_not_there_are_left_to_the_kernel_to_refuse():
    """The error equals that of a mixture whose experts need no copy."""
    said = []
    for devices in ((), (recorded("device", offloads={"MUL_MAT_ID"}),)):
        host = recorded("host")
        graph, x, ids, value = mixture(host, [np.ones((3, 4, 4), np.float32)] * 3)
        with gs.Scheduler([*devices, host]) as scheduler:
            plan = scheduler.alloc(graph)
            assert any(step.kind == "copy experts" for step in plan.program.steps) is bool(devices)
            x.set(np.ones((2, 1, 4)))
            ids.set(np.int32([[1], [3]]))
            with pytest.raises(Exception) as caught:
                scheduler.compute(graph)
            said.append((type(caught.value), type(caught.value.__cause__)))
            ids.set(np.int32([[1], [2]]))
            scheduler.compute(graph)
            assert (value.numpy() == 64).all()
    assert said[0] == said[1]


def test_nothing_is_pushed_to_a_backend_that_takes_no_data_while_it_computes(ctx):
    here, there = gs.CpuBackend(1, name="here"), gs.CpuBackend(1, name="there")
    cache = weights_on(there, "any", cache=np.zeros((3, 4), np.float32))["cache"]
    pushed = []
    here.cpy_tensor_async = lambda src, dst: bool(pushed.append(dst))
    x, row = ctx.tensor("f32", (4, 1), "x", input=True), ctx.tensor("i64", (1,), "row", input=True)
    graph = gs.Graph(ctx.set_rows(cache, x, row))
    with gs.Scheduler([here, there]) as scheduler:
        scheduler.set_tensor_backend(graph.nodes[0], here)
        assert scheduler.alloc(graph).data.write_backs
        x.set(np.float32([[1, 2, 3, 4]]))
        row.set(np.int64([1]))
        for there.concurrent_copies in (False, True):
            scheduler.compute(graph)
            assert cache.numpy()[1].tolist() == [1, 2, 3, 4] and bool(pushed) is there.concurrent_copies
