"""Queries of our scheduler to devices, clients and libraries, and their effects: each case in a process of its own.

    python device_query_cases.py CASE      CASE a function of this module
"""

import ctypes

import numpy as np
from device_graphs import CPU, ROWS, WIDTH, aside, chain_of, first_source, numbers, places, start
from ggml_schedulers import Graph, hook, run, view
from scheduler_cases import Weights, check_same, run_all


def random_graphs() -> None:
    """Devices that work late, read no memory but their own and write behind every tensor: the bits of the CPU."""
    g, bench = start()
    want, _served = run_all(g, [bench.cpu], False, range(20), resident_on=[bench.cpu] * 3)
    for lazy, extra, parallel in ((False, 0, False), (True, 0, False), (True, 96, False), (True, 0, True)):
        one, two = (bench.device(name, lazy=lazy, extra=extra, events=parallel) for name in "AB")
        backends = [one.handle, two.handle, bench.cpu]
        check_same(want, run_all(g, backends, True, range(20), parallel)[0])
        bench.sound()


def one_device_asks_for_more() -> None:
    """Extra bytes of a tensor are those of the device that owns its memory, for copies and results of others, too."""
    g, bench = start()
    want, _served = run_all(g, [bench.cpu], False, range(20), resident_on=[bench.cpu] * 3)
    for extras in ((0, 96), (96, 0), (32, 160)):
        backends = [bench.device(name, extra=extra).handle for name, extra in zip("AB", extras, strict=True)]
        check_same(want, run_all(g, [*backends, bench.cpu], True, range(20), choose=True)[0])
        bench.sound()


def weights_draw_their_readers() -> None:
    """A node is placed on the backend of its weights, not on that of other allocated tensors."""
    g, bench = start()
    device = bench.device("A")
    backends = [device.handle, bench.cpu]
    for usage, want in ((1, [0, 0, 0, 0]), (0, [1, 0, 0, 0])):
        weights = Weights(g, device.handle, np.random.default_rng(1), usage)
        assert places(g, backends, chain_of(weights.square[0])) == want
        assert places(g, backends, chain_of(weights.square[0]), ours=False) == want
        weights.close()


def offloading() -> None:
    """A device that supports and offloads an op computes it with weights of the host, if the client permits."""
    g, bench = start()
    device = bench.device("A", offloads={"MUL_MAT"})
    backends = [device.handle, bench.cpu]
    for usage in (1, 0):
        weights = Weights(g, bench.cpu, np.random.default_rng(1), usage)
        for offload, refuses in ((True, set()), (False, set()), (True, {"MUL_MAT"})):
            device.refuses = refuses
            want = [0 if usage and offload and not refuses else 1] * 4
            for ours in (True, False):
                assert places(g, backends, chain_of(weights.square[0]), ours, offload) == want, (usage, offload, ours)
        weights.close()


def older_library() -> None:
    """A library without the option op_offload, so that all clients offload; and without gated units."""
    g, bench = start()
    device = bench.device("A", offloads={"MUL_MAT"})
    weights = Weights(g, bench.cpu, np.random.default_rng(1))
    for offload in (False, True):
        assert places(g, [device.handle, bench.cpu], chain_of(weights.square[0]), offload=offload) == [0, 0, 0, 0]
    weights.close()
    want, _served = run_all(g, [bench.cpu], False, range(12), resident_on=[bench.cpu] * 2)
    got, served = run_all(g, [device.handle, bench.cpu], True, range(12))
    check_same(want, got)
    assert served["planned"] > 0 and hook().unsupported() is None
    # A word that is a number to some only: what is not known is still computed, and never in place.
    s = g.scheduler([bench.cpu], True)
    graph = Graph(g)
    x, y = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
    out = graph.op("swiglu_split", graph.op("scale", x, 2.0), y)
    graph.expand(out)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    values = [numbers(k, WIDTH, ROWS) for k in (1, 2)]
    graph.put(x, values[0])
    graph.put(y, values[1])
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    want = 2 * values[0] / (1 + np.exp(-2 * values[0])) * values[1]
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), want, atol=1e-5)
    assert [t["op"] for t in hook().last_planned()[0]["graph"]["tensors"]].count("CUSTOM") == 1


def schedulers_that_cannot_be() -> None:
    """No backends, or too many; a last one that is no CPU; one that does not read the buffers it is given."""
    g, bench = start()
    device, other = bench.device("A"), bench.device("B")
    hook().schedule(True)
    p = ctypes.c_void_p

    def make(*backends: int, bufts=None) -> int | None:
        return g.backend_sched_new((p * len(backends))(*backends), bufts and (p * len(bufts))(*bufts), len(backends),
                                   64, False, False)

    assert make() is None and make(*[bench.cpu] * 17) is None
    assert make(bench.cpu, device.handle) is None
    assert make(device.handle, bench.cpu, bufts=[other.buft, g.backend_get_default_buffer_type(bench.cpu)]) is None
    for found in (make(*[bench.cpu] * 16), make(device.handle, bench.cpu),
                  make(device.handle, bench.cpu, bufts=[device.buft, g.backend_get_default_buffer_type(bench.cpu)])):
        assert found
        g.backend_sched_free(found)


def library_without_a_function() -> None:
    """A library that lacks what we need has its own schedulers, and `check` says why."""
    from ggml_sched.llama_cpp import HookError, check

    g, bench = start()
    s = g.scheduler([bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    out = graph.op("scale", x, 2.0)
    graph.expand(out)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    graph.put(x, numbers(1, WIDTH, ROWS))
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    assert np.array_equal(graph.get(out).reshape(ROWS, WIDTH), numbers(1, WIDTH, ROWS) * 2)
    assert [found["is_scheduler"] for found in hook().last_planned()] == [False], "its allocator is ours all the same"
    g.backend_sched_free(s)
    try:
        check()
    except HookError as error:
        assert "ggml_backend_event_wait" in str(error)
    else:
        raise AssertionError("its schedulers are not ours")


def reordered_graphs() -> None:
    """A backend reorders nodes and names a pair that must not share memory: the same graph elsewhere, which it reorders
    in the same way, is planned no more.  A graph that the backend leaves as it is may reuse a plan."""
    g, bench = start()

    def swap(nodes) -> list:
        nodes[:2] = sorted(nodes[:2], reverse=True)
        return [(nodes[0], nodes[2])]

    device = bench.device("A", optimize=swap)
    s, alive = g.scheduler([device.handle, bench.cpu], True), []

    def compute(rows: int, planned: int, order: str = "t3 t2 t4 t5", graph: Graph | None = None) -> Graph:
        hook().clear_counters()
        if graph is None:
            graph = Graph(g)
            graph.x = graph.tensor(WIDTH, rows, flags="i")
            terms = [graph.op("scale", graph.x, factor) for factor in (2.0, 3.0)]
            graph.expand(graph.op("silu", graph.op("add", *terms)))
            alive.append(graph)
        graph.allocate(s, dict.fromkeys(graph.nodes(), device.handle))
        assert hook().served()["planned"] == planned, hook().served()
        values = numbers(rows, WIDTH, rows)
        graph.put(graph.x, values)
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        assert " ".join(bench.named("compute")[-1][2]) == order
        want = 5 * values.ravel()
        assert np.allclose(graph.get(graph.nodes()[-1]), want / (1 + np.exp(-want)), atol=1e-3)
        bench.sound()
        return graph

    # A graph is planned as the client lists it, then as the backend reorders it.
    graph = compute(ROWS, 2)
    compute(ROWS, 0)
    compute(ROWS, 2, graph=graph)
    compute(ROWS - 4, 2)
    # A new scheduler of these backends continues with the plans of one that was freed.
    g.backend_sched_free(s)
    s = g.scheduler([device.handle, bench.cpu], True)
    compute(ROWS, 0)
    device.optimize = lambda nodes: []
    compute(ROWS, 1, "t2 t3 t4 t5")
    compute(ROWS, 0, "t2 t3 t4 t5")
    compute(ROWS - 8, 0, "t2 t3 t4 t5")
    g.backend_sched_free(s)


def computed_inputs_and_unlisted_views() -> None:
    """A computed node that is flagged as an input, and a view that is no node: such a graph matches elsewhere, and
    smaller ones reuse its plan."""
    g, bench = start()
    device = bench.device("A", extra=64, lazy=True)
    for backends in ([bench.cpu], [device.handle, bench.cpu]):
        hook().clear_counters()
        s, alive = g.scheduler(backends, True), []
        for rows in (24, 24, 12, 7, 24, 12):
            graph, half, pitch = Graph(g), rows // 2, 4 * WIDTH
            x = graph.tensor(WIDTH, rows, flags="i")
            doubled = graph.op("scale", x, 2.0)
            g.set_input(doubled)
            last = graph.op("view_2d", doubled, WIDTH, half, pitch, pitch * (rows - half))
            first = aside(graph.op("view_2d", x, WIDTH, half, pitch, 0))
            out = graph.op("add", graph.op("add", graph.op("silu", last), first), last)
            graph.expand(out)
            alive.append(graph)
            graph.allocate(s, dict.fromkeys(graph.nodes(), backends[0]))
            values = numbers(rows, WIDTH, rows)
            graph.put(x, values)
            assert g.backend_sched_graph_compute(s, graph.graph) == 0
            want = 2 * values[rows - half:]
            want = want / (1 + np.exp(-want)) + values[:half] + want
            assert np.allclose(graph.get(out), want.ravel(), atol=1e-4), rows
            bench.sound()
        served = hook().served()
        assert (served["planned"], served["equal"], served["replayed"]) == (1, 3, 2), served
        g.backend_sched_free(s)


def ops_that_are_refused() -> None:
    """A node is computed by a backend that supports it, even if another backend was assigned."""
    g, bench = start()
    device = bench.device("A", refuses={"UNARY"})
    weights = Weights(g, device.handle, np.random.default_rng(1))
    backends = [device.handle, bench.cpu]
    assert places(g, backends, chain_of(weights.square[0])) == [0, 0, 1, 1]
    assert places(g, backends, chain_of(weights.square[0]), choose={2: device.handle}) == [0, 0, 1, 1]
    device.refuses = {"MUL_MAT"}
    assert places(g, backends, chain_of(weights.square[0])) == [1, 1, 1, 1]
    # The leaf is on its first reader's backend, if that supports it.
    reader = bench.device("B", reads=[device], refuses={"MUL_MAT"})
    device.refuses = set()
    for ours in (True, False):
        assert places(g, [reader.handle, *backends], chain_of(weights.square[0]), ours) == [1, 1, 1, 1]
        reader.refuses = set()
        assert places(g, [reader.handle, *backends], chain_of(weights.square[0]), ours) == [0, 0, 0, 0]
        reader.refuses = {"MUL_MAT"}


def plans_say_what_is_refused() -> None:
    """A plan that is shown has the answers of all backends, not only of those that compute; reasons are not known."""
    from ggml_sched.llama_cpp import plans

    g, bench = start()
    device = bench.device("A", refuses={"UNARY"})
    weights = Weights(g, device.handle, np.random.default_rng(1))
    s = g.scheduler([device.handle, bench.cpu], True)
    graph = Graph(g)
    graph.expand(chain_of(weights.square[0])(graph)[-1])
    graph.allocate(s, {})
    (plan,) = plans()
    assert [[b.supports_op(node) for node in plan.graph.nodes] for b in plan.backends] == [
        [True, True, False, True], [True] * 4]
    assert "not supported by: A" in plan.explain(plan.graph.nodes[2])
    assert [(found.op, found.why) for found in plan.fallbacks()] == [
        ("UNARY:SILU", "its op, types, extents or parameters")]
    g.backend_sched_free(s)
    graph.close()


def choices_of_one_place() -> None:
    """Backends of one buffer type are equal to the client: the first that supports an assigned node computes it."""
    g, bench = start()
    device = bench.device("A")
    twin = bench.device("C", shares=device)
    backends = [device.handle, twin.handle, bench.cpu]
    weights = Weights(g, device.handle, np.random.default_rng(1))
    for chosen in (device, twin):
        assert places(g, backends, chain_of(weights.square[0]), choose={2: chosen.handle}) == [0, 0, 0, 0]
    device.refuses = {"UNARY"}
    assert places(g, backends, chain_of(weights.square[0]), choose={2: twin.handle}) == [0, 0, 1, 0]
    hosts = Weights(g, bench.cpu, np.random.default_rng(1))
    assert places(g, backends, chain_of(hosts.square[0])) == [2, 2, 2, 2]
    assert places(g, backends, chain_of(hosts.square[0]), choose={2: twin.handle}) == [2, 2, 1, 0]
    hosts.close()
    # Where types differ, the assignment holds.
    device.refuses = set()
    other = bench.device("B")
    assert places(g, [device.handle, other.handle, bench.cpu], chain_of(weights.square[0]),
                  choose={1: other.handle, 3: bench.cpu}) == [1, 1, 1, 2]


def many_choices() -> None:
    """More assignments than the first table holds, some repeated; a reset removes all."""
    g, bench = start()
    backends = [bench.device("A").handle, bench.device("B").handle, bench.cpu]
    s = g.scheduler(backends, True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    nodes = [graph.op("scale", x, float(k)) for k in range(150)]
    for first in (0, 1):
        assert all(g.backend_sched_get_tensor_backend(s, node) is None for node in nodes)
        for k, node in enumerate(nodes):
            g.backend_sched_set_tensor_backend(s, node, backends[(k + first) % 3])
        for k, node in enumerate(nodes[:100]):
            g.backend_sched_set_tensor_backend(s, node, backends[(k + first + 1) % 3])
        found = [backends.index(g.backend_sched_get_tensor_backend(s, node)) for node in nodes]
        assert found == [(k + first + (k < 100)) % 3 for k in range(150)]
        g.backend_sched_reset(s)


def memory_without_a_buffer() -> None:
    """Memory without a buffer counts as the host's: no backend gets a supports_buft query for it."""
    g, bench = start()
    device = bench.device("A")
    s = g.scheduler([device.handle, g.cpu_backend(), bench.cpu], True)
    graph, values = Graph(g), numbers(4, WIDTH, ROWS)
    x = graph.tensor(WIDTH, ROWS)
    view(x).data = values.ctypes.data
    y = graph.tensor(WIDTH, ROWS, flags="i")
    out = graph.op("add", graph.op("scale", y, 3.0), x)
    graph.expand(out)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    graph.put(y, values)
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    assert np.array_equal(graph.get(out).reshape(ROWS, WIDTH), values * 3 + values)
    assert view(x).data == values.ctypes.data


def buffers_are_told() -> None:
    """init_tensor is called for each tensor of a buffer, and for views of these, on every allocation."""
    g, bench = start()
    device = bench.device("A")
    s = g.scheduler([device.handle, bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    first = graph.op("scale", x, 2.0)
    graph.expand(graph.op("silu", graph.op("reshape_2d", first, ROWS, WIDTH)))
    nodes = graph.nodes()
    for _ in range(3):
        device.told.clear()
        graph.allocate(s, dict.fromkeys(nodes, device.handle))
        assert [device.told.count(node) for node in nodes] == [1, 1, 1], "a view among them"


def too_large_for_a_buffer() -> None:
    """A tensor above the largest buffer has one of its own, which the device may refuse; others share theirs."""
    g, bench = start()
    size = WIDTH * ROWS * 4
    device = bench.device("A", max_size=size // 2)
    s = g.scheduler([device.handle, bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    out = graph.op("scale", graph.op("silu", x), 2.0)
    graph.expand(out)
    for node in graph.nodes():
        g.backend_sched_set_tensor_backend(s, node, device.handle)
    device.room = size - 1
    assert not g.backend_sched_alloc_graph(s, graph.graph)
    assert hook().last_error() == f"A refused compute buffers: {size} bytes are needed"
    device.room = 1 << 20
    assert g.backend_sched_alloc_graph(s, graph.graph)
    assert g.backend_sched_get_buffer_size(s, device.handle) >= size
    values = numbers(1, WIDTH, ROWS)
    graph.put(x, values)
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    bench.sound()
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), values / (1 + np.exp(-values)) * 2, atol=1e-5)


def too_many_types() -> None:
    """More buffer types than the scheduler supports: an error, and everything works afterwards."""
    g, bench = start()
    s = g.scheduler([bench.cpu], True)
    graph = Graph(g)
    total = graph.tensor(WIDTH, flags="i")
    owners = []
    for k in range(70):
        own = Graph(g)
        t = own.tensor(WIDTH)
        owners.append((own, g.backend_alloc_ctx_tensors(own.ctx, bench.device(f"D{k}", host=True).handle)))
        own.put(t, np.full(WIDTH, k, np.float32))
        total = graph.op("add", total, t)
        if k == 40:
            few = total
    graph.expand(total)
    assert not g.backend_sched_alloc_graph(s, graph.graph)
    assert "64" in hook().last_error() and "types of buffers" in hook().last_error()
    g.backend_sched_reset(s)
    fewer = Graph(g)
    fewer.expand(few)
    g.backend_sched_reset(s)
    assert g.backend_sched_alloc_graph(s, fewer.graph)
    graph.put(first_source(few), np.zeros(WIDTH, np.float32))
    assert g.backend_sched_graph_compute(s, fewer.graph) == 0
    assert np.array_equal(fewer.get(few), np.full(WIDTH, sum(range(41)), np.float32))


def graphs_that_are_circles() -> None:
    """Planning them is an error with a message; the next graph is planned."""
    g, bench = start()
    s = g.scheduler([bench.cpu], True)
    for whole in (False, True):
        graph = Graph(g)
        x = graph.tensor(WIDTH, ROWS, flags="i")
        first = graph.op("scale", x, 2.0)
        out = graph.op("silu", first)
        graph.expand(out)
        if not whole:
            view(first).src[0] = out
            assert not g.backend_sched_reserve(s, graph.graph) and hook().last_error()
            view(first).src[0], view(out).view_src = x, out
            assert not g.backend_sched_reserve(s, graph.graph)
            assert hook().last_error() == "a graph of 2 nodes cannot be read"
        else:
            assert g.backend_sched_reserve(s, graph.graph)


def ops_that_nobody_supports() -> None:
    """An error that names the node; and a plan with a node on a backend that refuses it would not pass as sound."""
    from ggml_sched.errors import Error
    from ggml_sched.llama_cpp.last_plans import plan_of

    g, bench = start()
    device, host = bench.device("A", refuses={"UNARY"}), bench.device("H", kind=CPU, host=True, refuses={"UNARY"})
    weights = Weights(g, device.handle, np.random.default_rng(1))
    s = g.scheduler([device.handle, host.handle], True)
    graph = Graph(g)
    nodes = chain_of(weights.square[0])(graph)
    graph.expand(nodes[-1])
    assert not g.backend_sched_reserve(s, graph.graph) and not g.backend_sched_alloc_graph(s, graph.graph)
    assert "SILU" in hook().last_error() and "none of the 2 backends supports it" in hook().last_error()
    host.refuses = set()
    assert g.backend_sched_alloc_graph(s, graph.graph)
    (found,) = hook().last_planned()
    assert all(supported for supported, _ in found["needs"])
    plan_of(found).verify()
    silu = [t["name"] for t in found["graph"]["tensors"]].index(view(nodes[2]).name.decode())
    try:
        found["needs"][silu] = (False, 0)
        plan_of(found).verify()
    except Error as error:
        assert view(nodes[2]).name.decode() in str(error) and "H" in str(error), error
    else:
        raise AssertionError("its backend refused it")


def pools_apart() -> None:
    """Tensors of two backends of one type are packed into one arena, whether or not another device needs several
    buffers."""
    g, bench = start()
    size = WIDTH * ROWS * 4
    one = bench.device("A", refuses={"CONCAT"})
    two, sizes = bench.device("C", shares=one), []
    for largest in (1 << 40, size):
        other = bench.device(f"B{len(sizes)}", max_size=largest)
        s, graph = g.scheduler([one.handle, two.handle, other.handle, bench.cpu], True), Graph(g)
        chain = [graph.tensor(WIDTH, ROWS, flags="i")]
        # What reads the copy of an input is read twice: no kernel computes both, and the copy lives as planned.
        for make in ("norm", "add", "norm", "norm", "concat"):
            sources = {"norm": (chain[-1], 1e-5), "add": (chain[-1], chain[-1]), "concat": (chain[-1], chain[-1], 1)}
            chain.append(graph.op(make, *sources[make]))
        kept = [graph.op("norm", chain[-1], eps) for eps in (1e-5, 1e-4, 1e-3)]
        graph.expand(graph.op("add", graph.op("add", kept[0], kept[1]), kept[2]))
        where = {node: (one if node in chain[:5] else two if node in chain else other).handle
                 for node in graph.nodes()}
        graph.allocate(s, where)
        (found,) = hook().last_planned()
        chunks = [len(sizes) for _, _, _, sizes in found["plan"]["arenas"]]
        assert chunks[0] == chunks[1] == 1 and (chunks[2] > 1) == (largest == size), chunks
        sizes.append(g.backend_sched_get_buffer_size(s, one.handle))
        assert sizes[-1] < sum(sum(found["plan"]["arenas"][b][3]) for b in (0, 1)), "they live one after the other"
        g.backend_sched_free(s)
    assert sizes[0] == sizes[1], sizes


if __name__ == "__main__":
    run(globals())
