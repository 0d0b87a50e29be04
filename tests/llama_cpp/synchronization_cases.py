"""Waits and copies of our scheduler with devices that work late: each case in a process of its own.

    python synchronization_cases.py CASE      CASE a function of this module
"""

import itertools

import numpy as np
from device_graphs import CPU, ROWS, WIDTH, aside, numbers, start
from ggml_devices import Bench
from ggml_schedulers import CALLBACK, Ggml, Graph, hook, run, view
from scheduler_cases import Weights

ABORTED, FAILED = 1, -1


def memory_that_others_read() -> None:
    """A backend that reads another's memory needs no copy: it waits until its source is computed, and the next compute
    waits until it has been read."""
    g, bench = start()
    device = bench.device("A", lazy=True, events=True)
    reader = bench.device("B", reads=[device], lazy=True, events=True)
    stranger = bench.device("C", lazy=True, events=True)
    weights = Weights(g, device.handle, np.random.default_rng(1))
    values, copies = numbers(2, WIDTH, ROWS), {}
    w = [weights.own.get(t).reshape(WIDTH, WIDTH) for t in weights.square]
    h = values @ w[0].T
    there = (h / (1 + np.exp(-h))) @ w[1].T
    for other, parallel, comes_back in itertools.product((reader, stranger), (False, True), (False, True)):
        s = g.scheduler([other.handle, device.handle, bench.cpu], True, parallel)
        graph = Graph(g)
        x = graph.tensor(WIDTH, ROWS, flags="i")
        product = graph.op("mul_mat", weights.square[0], x)
        out = graph.op("mul_mat", weights.square[1], graph.op("silu", product))
        back = graph.op("mul_mat", weights.square[2], out) if comes_back else out
        graph.expand(back)
        for _ in range(4):
            graph.allocate(s, {product: device.handle, back: device.handle, out: other.handle})
            copies[other.name, comes_back] = len(hook().last_planned()[0]["plan"]["copies"])
            graph.put(x, values)
            assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
        g.backend_sched_synchronize(s)
        bench.sound()
        want = there @ w[2].T if comes_back else there
        assert np.allclose(graph.get(back).reshape(want.shape), want, atol=1e-4)
        g.backend_sched_free(s)
        graph.close()
    assert copies["B", False] == 1 and copies["B", True] == 2, "what is not read: the input, and what comes back"
    assert copies["C", False] == 3 and copies["C", True] == 4, copies


def memory_that_two_share() -> None:
    """Backends of one buffer type share an arena: memory that one still uses is not reused by the other without a
    wait."""
    g, bench = start()
    device = bench.device("A", refuses={"UNARY"}, lazy=True)
    twin = bench.device("C", shares=device, lazy=True)
    weights = Weights(g, device.handle, np.random.default_rng(1))
    s = g.scheduler([device.handle, twin.handle, bench.cpu], True)
    graph = Graph(g)
    x, y = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
    one = graph.op("mul_mat", weights.square[1], graph.op("mul_mat", weights.square[0], x))
    first = graph.op("sum_rows", one)
    silu = graph.op("silu", y)
    out = graph.op("add", silu, first)
    g.build_forward_expand(graph.graph, first)
    graph.expand(out)
    for node, where in ((silu, twin.handle), (out, bench.cpu)):
        g.backend_sched_set_tensor_backend(s, node, where)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    assert [g.backend_sched_get_tensor_backend(s, t) for t in (one, silu)] == [device.handle, twin.handle]
    for k in range(3):
        values = [numbers(2 * k + i, WIDTH, ROWS) for i in range(2)]
        graph.put(x, values[0])
        graph.put(y, values[1])
        assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
    g.backend_sched_synchronize(s)
    bench.sound()
    w = [weights.own.get(t).reshape(WIDTH, WIDTH) for t in weights.square]
    want = values[1] / (1 + np.exp(-values[1])) + (values[0] @ w[0].T @ w[1].T).sum(axis=1, keepdims=True)
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), want, atol=1e-3)


def writes_that_others_read() -> None:
    """A node reads memory of the client's that another node writes: only the node order shows this dependency."""
    g, bench = start()
    device = bench.device("A", lazy=True)
    reader = bench.device("B", reads=[device], lazy=True)
    store = Weights(g, device.handle, np.random.default_rng(1), 0)
    for first, second in ((device, reader), (reader, device)):
        for kind in (int, aside):
            for writer, other in ((device, reader), (reader, device)):
                s = g.scheduler([first.handle, second.handle, bench.cpu], True)
                graph = Graph(g)
                x, y = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
                scaled = graph.op("scale", x, 2.0)
                into, read = (kind(graph.op("view_2d", store.store, WIDTH, ROWS, WIDTH * 4, 0)) for _ in range(2))
                written = graph.op("cpy", scaled, into)
                out = graph.op("add", read, y)
                g.build_forward_expand(graph.graph, written)
                graph.expand(out)
                graph.allocate(s, {scaled: writer.handle, written: writer.handle, out: other.handle})
                for k in range(3):
                    graph.put(x, numbers(k, WIDTH, ROWS))
                    graph.put(y, numbers(k + 9, WIDTH, ROWS))
                    assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
                g.backend_sched_synchronize(s)
                bench.sound()
                assert np.array_equal(graph.get(out).reshape(ROWS, WIDTH),
                                      numbers(2, WIDTH, ROWS) * 2 + numbers(11, WIDTH, ROWS))
                g.backend_sched_free(s)
                graph.close()


def two_devices(g: Ggml, bench: Bench, weights: Weights, scheduler: int, devices: list):
    """(graph, input, output, expected function): an input on the host that both devices read, and a copied result."""
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    first = graph.op("silu", graph.op("mul_mat", weights.square[0], x))
    second = graph.op("add", graph.op("mul_mat", weights.square[1], first), x)
    out = graph.op("soft_max", second)
    graph.expand(out)
    g.backend_sched_reset(scheduler)
    for node, where in ((first, devices[0]), (second, devices[1]), (out, devices[1])):
        g.backend_sched_set_tensor_backend(scheduler, node, where.handle)
    w = [weights.own.get(t).reshape(WIDTH, WIDTH) for t in weights.square]

    def answer(values: np.ndarray) -> np.ndarray:
        h = values @ w[0].T
        z = (h / (1 + np.exp(-h))) @ w[1].T + values
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    return graph, x, out, answer


def waiting_before_writing() -> None:
    """The next compute overwrites no data that a device still reads, and reads no data before a late device wrote
    it."""
    g, bench = start()
    devices = [bench.device(name, lazy=True) for name in "AB"]
    # One that copies as late as the others work.
    late = bench.device("H", lazy=True, host=True, kind=CPU)
    for host in (bench.cpu, late.handle):
        weights = Weights(g, host, np.random.default_rng(1))
        s = g.scheduler([*(d.handle for d in devices), host], True)
        graph, x, out, answer = two_devices(g, bench, weights, s, devices)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        for k in range(4):
            # The client may write to an input as soon as the call before has returned.
            graph.put(x, numbers(k, WIDTH, ROWS))
            assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
            assert devices[1].queue, "no call needs the result yet"
        graph.put(x, np.full((ROWS, WIDTH), np.nan, np.float32))
        g.backend_sched_synchronize(s)
        bench.sound()
        assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), answer(numbers(3, WIDTH, ROWS)), atol=1e-5)
        g.backend_sched_free(s)
        weights.close()


def pipeline() -> None:
    """Each allocation has four copy slots, used in turn: four computes are queued without a wait."""
    g, bench = start()
    devices = [bench.device(name, lazy=True, events=True) for name in "AB"]
    weights = Weights(g, devices[0].handle, np.random.default_rng(1))
    s = g.scheduler([*(d.handle for d in devices), bench.cpu], True, parallel=True)
    assert g.backend_sched_get_n_copies(s) == 4 and len(devices[0]._events) == 4
    made, last = None, [0, 0]
    for k in range(9):
        made = two_devices(g, bench, weights, s, devices)
        graph, x, out, answer = made
        assert g.backend_sched_alloc_graph(s, graph.graph)
        names = [view(t).name.decode() for t in view(graph.nodes()[0]).src[:2]]
        assert [name[-2:] for name in names if "#" in name] == [f"#{k % 4}"]
        graph.put(x, numbers(k, WIDTH, ROWS))
        bench.log.clear()
        assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
        assert not bench.named("synchronize"), "no call waits for a whole device"
        assert {name for _, name, _ in bench.named("record")} == {"A", "B"}
        left = [len([w for w in d.queue if w.reads]) for d in devices]
        if k < 4:
            assert all(now > before for now, before in zip(left, last, strict=True)), (k, left, last)
        else:
            assert bench.named("synchronize_event") and left <= [5 * n for n in left]
        last = left
    g.backend_sched_synchronize(s)
    bench.sound()
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), answer(numbers(8, WIDTH, ROWS)), atol=1e-5)
    g.backend_sched_free(s)
    assert not devices[0]._events


def views_of_copies() -> None:
    """A node that reads a view of a copied tensor reads the same part, or that part of the copy if the view is no
    node."""
    g, bench = start()
    device = bench.device("A")
    s = g.scheduler([device.handle, bench.cpu], True)
    for whole, kind in ((False, int), (True, int), (False, aside), (True, aside)):
        graph = Graph(g)
        x = graph.tensor(WIDTH, ROWS, flags="i")
        rows = ROWS // 4
        parts = [kind(graph.op("view_2d", x, WIDTH, rows, WIDTH * 4, k * rows * WIDTH * 4)) for k in range(4)]
        read = parts if not whole else [*parts[:3], graph.op("cont", x)]
        found = [graph.op("scale", part, float(k + 1)) for k, part in enumerate(read)]
        halves = [graph.op("concat", *found[2 * k:2 * k + 2], 1) for k in range(2)]
        out = graph.op("concat", *halves, 1)
        graph.expand(out)
        graph.allocate(s, dict.fromkeys((*found, *halves, out, *(read[3:] if whole else ())), device.handle))
        values = numbers(5, WIDTH, ROWS)
        for _ in range(2):
            graph.put(x, values)
            assert g.backend_sched_graph_compute(s, graph.graph) == 0
            bench.sound()
            want = [values[6 * k:6 * k + 6] * np.float32(k + 1) for k in range(4)]
            want = want if not whole else [*want[:3], values * np.float32(4)]
            assert np.array_equal(graph.get(out).reshape(-1, WIDTH), np.concatenate(want))
        graph.close()


def fused_nodes_that_read_copies(largest: int = 1 << 40) -> None:
    """A norm and its product may be fused: the product does not overlap the norm's source."""
    g, bench = start()
    device = bench.device("A", max_size=largest)
    own = g.backend_buft_alloc_buffer(device.buft, ROWS * WIDTH * 4)
    s = g.scheduler([device.handle, bench.cpu], True)
    for kind in (int, aside):
        graph = Graph(g)
        x, y = graph.tensor(WIDTH, 2 * ROWS, flags="i"), graph.tensor(WIDTH, ROWS, flags="i")
        part = kind(graph.op("view_2d", x, WIDTH, ROWS, WIDTH * 4, ROWS // 2 * WIDTH * 4))
        norm = graph.op("rms_norm", part, 1e-5)
        # The client has allocated it: the product cannot reuse it in place.
        g.backend_tensor_alloc(own, norm, g.backend_buffer_get_base(own))
        product = graph.op("mul", y, norm)
        out = graph.op("add", product, y)
        graph.expand(out)
        graph.allocate(s, dict.fromkeys((norm, product, out), device.handle))
        assert largest == 1 << 40 or len(hook().last_planned()[0]["plan"]["arenas"][0][3]) > 1, "buffers of A"
        read = view(norm).src[0]
        assert b"#" in view(view(read).view_src or read).name, "a copy"
        a, b = bench.span(read), bench.span(product)
        assert a == b or a[1] <= b[0] or b[1] <= a[0], kind
        values = [numbers(1, WIDTH, 2 * ROWS), numbers(2, WIDTH, ROWS)]
        graph.put(x, values[0])
        graph.put(y, values[1])
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        bench.sound()
        rows = values[0][ROWS // 2:ROWS // 2 + ROWS]
        want = rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + 1e-5) * values[1] + values[1]
        assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), want, atol=1e-4)
        graph.close()
    g.backend_sched_free(s)
    g.backend_buffer_free(own)


def fused_nodes_that_read_copies_in_small_buffers() -> None:
    """The same where a device's largest buffer holds only a part."""
    fused_nodes_that_read_copies(ROWS * WIDTH * 4)


def copies_of_graphs_that_take_turns() -> None:
    """Graphs that are allocated in turn, without being built again, read their own copies."""
    g, bench = start()
    device = bench.device("A")
    weights = Weights(g, device.handle, np.random.default_rng(1))
    s = g.scheduler([device.handle, bench.cpu], True)
    made = []
    for n in (3, 1, 2):
        graph = Graph(g)
        inputs = [graph.tensor(WIDTH, ROWS, flags="i") for _ in range(n)]
        out = graph.op("mul_mat", weights.square[0], inputs[0])
        for x in inputs[1:]:
            out = graph.op("add", out, graph.op("mul_mat", weights.square[0], x))
        graph.expand(out)
        made.append((graph, inputs, out))
    w = weights.own.get(weights.square[0]).reshape(WIDTH, WIDTH)
    for k in (0, 1, 0, 2, 1, 0, 2):
        graph, inputs, out = made[k]
        g.backend_sched_reset(s)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        values = [numbers(10 * k + i, WIDTH, ROWS) for i in range(len(inputs))]
        for x, value in zip(inputs, values, strict=True):
            graph.put(x, value)
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        bench.sound()
        assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), sum(values) @ w.T, atol=1e-3), k


def in_place_through_a_copy() -> None:
    """A node computed in place over a part of another backend's memory, through a copy, reads that part."""
    g, bench = start()
    device = bench.device("A")
    s = g.scheduler([device.handle, bench.cpu], True)
    graph = Graph(g)
    x, y = graph.tensor(WIDTH, 2 * ROWS, flags="i"), graph.tensor(WIDTH, ROWS, flags="i")
    whole = graph.op("scale", x, 2.0)
    part = graph.op("view_2d", whole, WIDTH, ROWS, WIDTH * 4, ROWS * WIDTH * 4)
    out = graph.op("scale_inplace", part, 3.0)
    last = graph.op("add", out, y)
    graph.expand(last)
    graph.allocate(s, {whole: device.handle, out: bench.cpu, last: bench.cpu})
    values = [numbers(1, WIDTH, 2 * ROWS), numbers(2, WIDTH, ROWS)]
    graph.put(x, values[0])
    graph.put(y, values[1])
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    bench.sound()
    assert np.array_equal(graph.get(last).reshape(ROWS, WIDTH), values[0][ROWS:] * np.float32(6) + values[1])


def errors_of_devices() -> None:
    """A failed compute's status is returned, however its nodes are run; later nodes are not computed."""
    g, bench = start()
    one, two = (bench.device(name) for name in "AB")
    weights = Weights(g, one.handle, np.random.default_rng(1), 0)
    s = g.scheduler([one.handle, two.handle, bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    first = graph.op("scale", x, 2.0)
    # Computed by another backend than the memory's owner: through a copy and a write-back.
    into = graph.op("view_2d", weights.store, WIDTH, ROWS, WIDTH * 4, 0)
    written = graph.op("cpy", first, into)
    out = graph.op("silu", first)
    g.build_forward_expand(graph.graph, written)
    graph.expand(out)

    def allocate() -> None:
        graph.allocate(s, {first: one.handle, written: two.handle, out: one.handle})
        graph.put(x, numbers(1, WIDTH, ROWS))

    def ran() -> list[int]:
        names = [name for _, _, nodes in bench.named("compute") for name in nodes]
        return [names.count(view(t).name.decode()) for t in (first, written, out)]

    ask = CALLBACK(lambda t, first, user: True)
    for callback in (CALLBACK(0), ask):
        g.backend_sched_set_eval_callback(s, callback, None)
        for device, node, times in ((one, first, [1, 0, 0]), (two, written, [1, 1, 0]), (one, out, [1, 1, 1])):
            for status in (ABORTED, FAILED):
                device.fails = {node: status}
                allocate()
                weights.own.put(weights.store, np.zeros((12 * ROWS, WIDTH), np.float32))
                bench.log.clear()
                assert g.backend_sched_graph_compute(s, graph.graph) == status, (device.name, node)
                assert ran() == times
                stored = weights.own.get(weights.store).reshape(-1, WIDTH)[:ROWS]
                assert stored.any() == (node == out), "what failed does not go back"
                device.fails = {}
                assert g.backend_sched_graph_compute(s, graph.graph) == 0
                assert np.array_equal(weights.own.get(weights.store).reshape(-1, WIDTH)[:ROWS],
                                      numbers(1, WIDTH, ROWS) * 2)
    bench.sound()


if __name__ == "__main__":
    run(globals())
